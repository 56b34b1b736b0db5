"""A wrapper of NVML (`pynvml`, the module of nvidia-ml-py) in which every call may fail.

A card that cannot report something answers with an error; so does a driver that is older than a function, and a lost
card. `Library.ask` returns None for the first two and remembers other errors.
"""

from __future__ import annotations

import ctypes
from typing import Any

LIBRARY = "libnvidia-ml.so.1"

NOT_THERE = frozenset({15, 16, 28})
"""Errors of a card that is lost, needs a reset, or cannot be found."""
SESSION_OVER = frozenset({1, 9, 18})
"""Errors after the driver was unloaded: not initialized, not loaded, or of another version than the library."""
CANNOT_TELL = frozenset({2, 3, 4, 6, 7, 10, 13, 22, 25, 26, 27, 29})
"""Errors that say nothing about a card's health: unsupported, not permitted, or nothing there."""


class SessionOver(Exception):
    """The driver was unloaded. What was found of the cards is void; call `find` again."""


class Library:
    """The library. module: `pynvml`, or the like."""

    def __init__(self, module: Any) -> None:  # noqa: ANN401 -- a module without types
        self._module = module
        self._too_old: type[Exception] = getattr(module, "NVMLLibraryMismatchError", UnicodeDecodeError)
        self.codes: set[int] = set()
        """Errors since this was last cleared, without those of CANNOT_TELL."""

    def ask(self, name: str, *words: Any) -> Any:  # noqa: ANN401 -- the function's own type
        """Call the function of that name; None if this card, driver or module cannot. Raises SessionOver."""
        function = getattr(self._module, name, None)
        if function is None:
            return None
        try:
            return function(*words)
        except self._module.NVMLError as error:
            self._note(error)
        except (UnicodeDecodeError, self._too_old):  # a text that is none; a driver older than the module
            return None
        return None

    def ask_newest(self, name: str, versions: tuple[str, ...], *words: Any) -> Any:  # noqa: ANN401 -- as above
        """Call the first of its versions that driver and module have. The functions without a version raise something
        else where the driver is older than the module."""
        for version in versions:
            answer = self.ask(name + version, *words)
            if answer is not None:
                return answer
        return None

    def begin(self) -> str:
        """Open a session. → why it fails, "" if it is open."""
        try:
            self._module.nvmlInit()
        except self._module.NVMLError as error:
            return f"the driver does not work: {error}"
        return ""

    def end(self) -> None:
        """Close the session."""
        try:
            self._module.nvmlShutdown()
        except self._module.NVMLError:
            return  # it is over anyway

    def _note(self, error: Any) -> None:  # noqa: ANN401 -- an exception with a `value`
        code = int(getattr(error, "value", 0))
        if code in SESSION_OVER:
            raise SessionOver(str(error)) from None
        if code not in CANNOT_TELL:
            self.codes.add(code)


def find_library() -> Any:  # noqa: ANN401 -- a module without types
    """Load `pynvml`; None where there is no driver: importing it for nothing would cost memory."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    import pynvml  # noqa: PLC0415 -- see above

    return pynvml


def text(value: bytes | str | None) -> str:
    """A text, which some versions of the module return as bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""
