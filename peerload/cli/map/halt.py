"""When `map` stops early: `--halt now,fail=1`, `soon,fail=10%`, `now,success=1`, `never`."""

from __future__ import annotations

from peerload.model.errors import UsageError

PERCENT_AFTER = 3
"""A share of the tasks counts when so many have ended."""
_COUNTED = ("fail", "success", "done")


class Halt:
    """``is_now``: what runs is stopped, too. Raises UsageError for words that make no sense."""

    def __init__(self, text: str = "never") -> None:
        when, comma, what = text.partition(",")
        counted, _, limit = what.partition("=")
        self.is_now = when == "now"
        self._counted = counted
        self._number = self._share = 0.0
        if text == "never":
            return
        digits = limit.removesuffix("%")
        is_sound = comma and when in ("now", "soon") and counted in _COUNTED and digits.isascii() and digits.isdecimal()
        if not is_sound or not int(digits):
            raise UsageError(
                f"map: --halt {text!r} cannot be understood",
                hint="such as:  --halt now,fail=1  or  soon,fail=10%  or  now,success=1  or  never",
            )
        if digits == limit:
            self._number = int(digits)
        else:
            self._share = int(digits) / 100

    def is_due(self, *, failed: int, succeeded: int) -> bool:
        """Whether it is time, when so many have ended."""
        ended = failed + succeeded
        count = {"fail": failed, "success": succeeded, "done": ended}.get(self._counted, 0)
        if self._number:
            return count >= self._number
        return bool(self._share) and ended >= PERCENT_AFTER and count >= self._share * ended
