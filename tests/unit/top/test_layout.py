"""Where panes are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerload.top.panes import IMPORTANCE, layout

PANES = st.sets(st.sampled_from(IMPORTANCE))


@given(
    st.integers(0, 250),
    st.integers(0, 80),
    PANES,
    st.lists(st.sampled_from(IMPORTANCE), unique=True),
    st.integers(0, 400),
)
def test_panes_are_within_the_screen_and_never_over_one_another(
    width: int, height: int, hidden: set[str], first: list[str], nodes: int
) -> None:
    taken: set[tuple[int, int]] = set()
    for pane, place in layout(width, height, hidden, first, nodes=nodes).items():
        assert pane not in hidden
        assert 0 <= place.x <= place.x + place.width <= width
        assert 0 <= place.y <= place.y + place.height <= height
        cells = {(x, y) for x in range(place.x, place.x + place.width) for y in range(place.y, place.y + place.height)}
        assert not cells & taken
        taken |= cells


def test_the_sizes_of_a_terminal() -> None:
    assert list(layout(80, 22, nodes=300)) == ["cluster", "nodes", "tasks"]
    assert set(layout(120, 38, nodes=3)) == set(IMPORTANCE)
    assert set(layout(200, 58, nodes=300)) == set(IMPORTANCE)
    assert set(layout(40, 10)) == {"tasks"}


def test_all_of_the_screen_is_used() -> None:
    for width, height in ((80, 22), (120, 38), (200, 58)):
        places = layout(width, height, nodes=3)
        assert sum(place.width * place.height for place in places.values()) == width * height


def test_a_wide_screen_has_the_detail_at_the_right() -> None:
    assert layout(120, 38)["detail"].x > 60
    assert layout(100, 38)["detail"].x == 0


def test_few_nodes_need_little_room() -> None:
    assert layout(120, 38, nodes=3)["nodes"].height == 6
    assert layout(120, 38, nodes=300)["nodes"].height > 6


def test_what_is_asked_for_gets_room() -> None:
    assert "events" not in layout(80, 22)
    assert "events" in layout(80, 22, wanted_first=["events"])
    assert set(layout(80, 22, hidden={"cluster", "nodes", "tasks", "detail"})) == {"events"}


def test_one_alone() -> None:
    assert layout(80, 22, zoomed="events") == {"events": (0, 0, 80, 22)}


def test_the_tasks_have_room_before_all_that_was_not_asked_for() -> None:
    assert layout(80, 22, nodes=300)["tasks"].height == 12
    assert layout(80, 22, nodes=1)["tasks"].height == 12
    assert set(layout(80, 16, nodes=3)) == {"tasks", "events"}
    places = layout(80, 22, wanted_first=["detail"], nodes=300)
    assert (places["detail"].height, places["tasks"].height) == (6, 11)
    assert set(layout(40, 10, wanted_first=["cluster"])) == {"cluster", "tasks"}
