"""What a live view is told: all, then only what has changed."""

from __future__ import annotations

from peerload.agent.requests import overview
from peerload.agent.requests.overview import RevisionIndex


def look(seen: RevisionIndex, number: int, **marks: object) -> None:
    seen.update(number, dict(marks))


def test_what_is_new_or_differs_has_changed() -> None:
    seen = RevisionIndex()
    look(seen, 1, a=1, b=1)
    look(seen, 2, a=1, b=2, c=1)
    assert sorted(seen.changed(0)) == ["a", "b", "c"]
    assert sorted(seen.changed(1)) == ["b", "c"]
    assert seen.changed(2) == []


def test_what_is_gone_is_named_to_those_who_saw_it() -> None:
    seen = RevisionIndex()
    look(seen, 1, a=1, b=1)
    look(seen, 2, a=1)
    assert seen.gone(1) == ["b"]
    assert seen.gone(2) == []
    look(seen, 3, a=1, b=1)
    assert seen.gone(1) == []
    assert seen.changed(2) == ["b"]


def test_what_is_gone_is_not_kept_for_ever() -> None:
    seen = RevisionIndex()
    most = overview.GONE_KEPT_MAX
    look(seen, 1, **{str(number): 1 for number in range(most + 5)})
    assert seen.whole_from == 0
    look(seen, 2)
    assert seen.whole_from == 2
    assert len(seen.gone(0)) == most
