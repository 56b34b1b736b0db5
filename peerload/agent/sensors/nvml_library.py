"""One way to call NVML, NVIDIA's own library, in which every call may fail: `pynvml` (the module of nvidia-ml-py) behind it.

A card that cannot tell something answers with an error, and so does a driver that is older than a function, and a card that
is gone. `Library.ask` makes None of the first two and remembers the others.
"""

from __future__ import annotations

import ctypes
from typing import Any

LIBRARY = "libnvidia-ml.so.1"

NOT_THERE = frozenset({15, 16, 28})
"""The card is lost, needs a reset, or cannot be found any more."""
SESSION_OVER = frozenset({1, 9, 18})
"""Not initialized, the driver is not loaded, or is of another version than the library: it was unloaded."""
CANNOT_TELL = frozenset({2, 3, 4, 6, 7, 10, 13, 22, 25, 26, 27, 29})
"""It lacks what was asked for, we may not have it, or there is none now: that says nothing about the card's health."""


class SessionOver(Exception):
    """The driver went away under us. What was found of the cards holds no more; `find` them anew."""


class Library:
    """``module`` is `pynvml`, or speaks like it."""

    def __init__(self, module: Any) -> None:  # noqa: ANN401 -- a module without types
        self._module = module
        self._too_old: type[Exception] = getattr(module, "NVMLLibraryMismatchError", UnicodeDecodeError)
        self.codes: set[int] = set()
        """The errors since this was last cleared, but for those of CANNOT_TELL."""

    def ask(self, name: str, *words: Any) -> Any:  # noqa: ANN401 -- the function's own type
        """What the function of that name returns; None if this card, driver or module cannot. Raises SessionOver."""
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
        """The same of the first of its versions that this driver and this module have. The functions without a version are
        of no use: they raise something else where the driver is older than the module."""
        for version in versions:
            answer = self.ask(name + version, *words)
            if answer is not None:
                return answer
        return None

    def begin(self) -> str:
        """Open a session. → why there can be none, "" if there is one."""
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
    """`pynvml`; None where there is no driver: importing it for nothing would cost memory."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    import pynvml  # noqa: PLC0415 -- see above

    return pynvml


def text(value: bytes | str | None) -> str:
    """A text as some versions of the module tell it, and others."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""
