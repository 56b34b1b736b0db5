"""Health of GPUs: whether tasks may use them, by the errors and throttling that the driver reports.

Errors of the program that ran do not count against a card. Any other does until the driver is reloaded, even if the
agent restarts (`GpuFaults` are kept in a file).
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from peerload.model.resources import Health

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger("peerload.gpus")

XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})
"""Errors (XIDs) that are caused by programs."""
XID_TEXTS = {
    48: "uncorrectable memory error",
    62: "its controller has stopped",
    63: "memory rows are being replaced",
    64: "memory rows cannot be replaced any more",
    74: "NVLink error",
    79: "it has fallen off the bus",
    92: "many correctable memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "its controller does not answer",
    120: "its controller has failed",
    140: "uncorrectable memory error",
}
HELD_DOWN_BITS = 0x08 | 0x20 | 0x40 | 0x80
"""Throttling by the hardware, for heat (software or hardware), or by the power supply. A power cap (0x04) is normal."""
HELD_DOWN_S = 30.0
"""A card is degraded after throttling for this long."""
RECOVERED_S = 10.0
"""A degraded card recovers after this long without throttling."""
ERRORS_MAX = 64
WAS_LOST = "it was lost: its driver has to be loaded anew before it is used again"


def xid_text(number: int) -> str:
    """Description of an error that a card reports."""
    return f"error {number}" + (f": {XID_TEXTS[number]}" if number in XID_TEXTS else " (XID)")


class GpuFaults:
    """Errors that cards have reported, by name. boot: id of this start of the machine. file: where they are kept for
    the next agent, None = nowhere."""

    def __init__(self, boot: str = "", file: Path | None = None) -> None:
        self._boot = boot
        self._file = file
        self._driver = ""
        self._errors: dict[str, str] = {}

    def load(self, driver: str) -> None:
        """Load the errors that were noted for this version of the driver."""
        if driver == self._driver:
            return
        self._driver = driver
        self._errors = self._stored()

    def clear(self) -> None:
        """Clear all errors; the driver was reloaded."""
        self._driver = ""
        if self._errors:
            self._errors = {}
            self._store()

    def add_xid(self, card: str, number: int) -> bool:
        """Note an error of a card. → whether it counts."""
        if number in XIDS_OF_PROGRAMS:
            log.info("GPU error caused by a program: gpu=%s error=%s", card, xid_text(number))
            return False
        log.warning("GPU error, no task gets it any more: gpu=%s error=%s", card, xid_text(number))
        self._add(card, xid_text(number))
        return True

    def add_lost(self, card: str) -> None:
        """Note that the driver does not reach a card. Earlier errors say more."""
        if card not in self._errors:
            log.warning("GPU lost, no task gets it any more: gpu=%s", card)
            self._add(card, WAS_LOST)

    def _add(self, card: str, why: str) -> None:
        if len(self._errors) < ERRORS_MAX or card in self._errors:
            self._errors[card] = why
            self._store()

    def error_of(self, *names: str) -> str:
        """The error of any of these names (a slice, and its card); "" if there is none."""
        return next((self._errors[name] for name in names if name in self._errors), "")

    def _stored(self) -> dict[str, str]:
        if self._file is None:
            return {}
        try:
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            if (kept["boot"], kept["driver"]) == (self._boot, self._driver):
                return {str(name): str(why) for name, why in list(kept["ill"].items())[:ERRORS_MAX]}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("cannot read the errors of GPUs: path=%s error=%s", self._file, error)
        return {}

    def _store(self) -> None:
        if self._file is None:
            return
        new = self._file.with_suffix(".new")
        try:
            new.write_text(
                json.dumps({"boot": self._boot, "driver": self._driver, "ill": self._errors}), encoding="utf-8"
            )
            new.replace(self._file)
        except OSError as error:  # a full disk: it is known as long as this agent runs
            log.warning("cannot store the errors of GPUs: path=%s error=%s", self._file, error.strerror)


class ThrottleDetector:
    """Detection of lasting throttling. now_s: any monotonic clock."""

    __slots__ = ("_free_since_s", "_held_since_s", "is_weak")

    def __init__(self) -> None:
        self._held_since_s: float | None = None
        self._free_since_s: float | None = None
        self.is_weak = False

    def take(self, bits: int, now_s: float) -> bool:
        """Take a reading of the throttle reasons. → whether the card is throttled now."""
        is_held = bool(bits & HELD_DOWN_BITS)
        if is_held:
            self._free_since_s = None
            if self._held_since_s is None:
                self._held_since_s = now_s
            self.is_weak = self.is_weak or now_s - self._held_since_s >= HELD_DOWN_S
        else:
            self._held_since_s = None
            if self._free_since_s is None:
                self._free_since_s = now_s
            self.is_weak = self.is_weak and now_s - self._free_since_s < RECOVERED_S
        return is_held


def judged(
    ill: str,
    is_there: bool,
    uncorrected: int | None,
    rows: tuple[bool, bool],
    speed: float | None,
) -> tuple[Health, str]:
    """Health of a card, and why. ill: an error that it has reported. uncorrected: memory errors since the driver was
    loaded. rows: whether memory rows wait to be replaced, and whether they cannot be. speed: 0 … 1 while it is
    throttled for long."""
    pending, failed = rows
    if not is_there:
        return Health.SICK, "it is lost: the driver does not reach it any more"
    if ill:
        return Health.SICK, ill
    if failed:
        return Health.SICK, "memory rows cannot be replaced any more"
    if uncorrected:
        return Health.SICK, f"{uncorrected} uncorrectable memory error{'' if uncorrected == 1 else 's'}"
    if pending:
        return Health.SICK, "memory rows wait to be replaced: it needs a reset when its tasks are done"
    if speed is not None:
        about = round(speed, 1)  # it changes all the time
        return Health.DEGRADED, f"its clocks are held down for heat or power: about {about:.0%} of its speed"
    return Health.OK, ""
