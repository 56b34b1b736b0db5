"""One test for many cases."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Test = Callable[..., None]


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Decorator that runs a test with each case, and fails with what failed of all of them.

    It takes what `pytest.mark.parametrize` takes, and makes one test where that makes one for each case: pytest collects a
    test in each of its processes, which costs more than most cases. Each case has a directory of its own as `tmp_path`, and
    what it changes by `monkeypatch` is undone after it. Cases share all other fixtures.
    """
    called = tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names
    values = [(case,) if len(called) == 1 else tuple(case) for case in cases]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def whole(**fixtures: Any) -> None:
            failed = []
            for number, case in enumerate(values):
                own = dict(fixtures)
                if "tmp_path" in own:
                    own["tmp_path"] = own["tmp_path"] / str(number)
                    own["tmp_path"].mkdir()
                with pytest.MonkeyPatch.context() as monkeypatch:
                    if "monkeypatch" in own:
                        own["monkeypatch"] = monkeypatch
                    try:
                        test(**own, **dict(zip(called, case, strict=True)))
                    except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 -- all are told below
                        failed.append((case, error))
            if len(failed) == 1:
                failed[0][1].add_note(f"of {len(values)} cases this one failed: {failed[0][0]!r}")
                raise failed[0][1]
            told = "\n".join(f"{case!r}: {type(error).__name__}: {error}" for case, error in failed)
            assert not failed, f"{len(failed)} of {len(values)} cases failed:\n{told}"

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in called]
        whole.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        del whole.__wrapped__
        return whole

    return decorate
