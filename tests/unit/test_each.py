"""`each` runs every case, and says which failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.each import each


def test_every_case_is_run_and_each_that_fails_is_named(tmp_path: Path) -> None:
    seen = []

    @each(("number", "text"), [(1, "a"), (2, "b"), (3, "c")])
    def tried(tmp_path: Path, number: int, text: str) -> None:
        assert list(tmp_path.iterdir()) == [], "a directory of its own"
        (tmp_path / text).touch()
        seen.append(number)
        assert number == 2

    with pytest.raises(AssertionError) as caught:
        tried(tmp_path=tmp_path)
    assert seen == [1, 2, 3]
    assert "(1, 'a')" in str(caught.value)
    assert "(2, 'b')" not in str(caught.value)
    assert "(3, 'c')" in str(caught.value)


def test_one_failure_is_raised_as_it_is() -> None:
    @each("number", [1, 0])
    def tried(number: int) -> None:
        1 / number

    with pytest.raises(ZeroDivisionError) as caught:
        tried()
    assert any("0" in note for note in caught.value.__notes__)
