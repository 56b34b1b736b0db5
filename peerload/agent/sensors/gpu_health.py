"""Whether a GPU may be given to tasks: what its driver reports of errors and of clocks that are held down.

Errors of the program that ran do not count against a card; any other does until the driver is loaded anew, also over the
restart of an agent (`GpuFaults` are kept in a file).
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from peerload.model.devices import Health

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger("peerload.gpus")

XIDS_OF_PROGRAMS = frozenset({13, 31, 43, 45, 68, 109})
"""Errors that a program brings about by itself."""
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
"""Clocks held down by the hardware, for heat (by software, by hardware), or by the power supply. A power cap (0x04) is
nothing unusual."""
HELD_DOWN_S = 30.0
"""Clocks that are held down for so long are a weakness of the card …"""
RECOVERED_S = 10.0
"""… that is over when they have been free for this long."""
ILL_MAX = 64
WAS_LOST = "it was lost: its driver has to be loaded anew before it is used again"


def xid_text(number: int) -> str:
    """An error that a card reports, in words."""
    return f"error {number}" + (f": {XID_TEXTS[number]}" if number in XID_TEXTS else " (XID)")


class GpuFaults:
    """What cards have reported, by their own names. ``boot`` names this start of the machine; ``file``: where they are kept
    for the next agent, None = nowhere."""

    def __init__(self, boot: str = "", file: Path | None = None) -> None:
        self._boot = boot
        self._file = file
        self._driver = ""
        self._ill: dict[str, str] = {}

    def begin(self, driver: str) -> None:
        """The driver of this version has been found: what was noted of it before the agent's start holds on."""
        if driver == self._driver:
            return
        self._driver = driver
        self._ill = self._kept()

    def forget(self) -> None:
        """The driver was loaded anew: so were the cards."""
        self._driver = ""
        if self._ill:
            self._ill = {}
            self._keep()

    def note(self, card: str, number: int) -> bool:
        """A card has reported an error. → whether it counts."""
        if number in XIDS_OF_PROGRAMS:
            log.info("GPU %s reports %s, an error of the program that used it", card, xid_text(number))
            return False
        log.warning("GPU %s reports %s: it is given to no task any more", card, xid_text(number))
        self._mark(card, xid_text(number))
        return True

    def lost(self, card: str) -> None:
        """The driver does not reach this card. What it has reported before says more."""
        if card not in self._ill:
            log.warning("GPU %s is lost: it is given to no task any more", card)
            self._mark(card, WAS_LOST)

    def _mark(self, card: str, why: str) -> None:
        if len(self._ill) < ILL_MAX or card in self._ill:
            self._ill[card] = why
            self._keep()

    def of(self, *names: str) -> str:
        """What is wrong with any of these (a slice, and the card that it is a part of); "" if nothing is known."""
        return next((self._ill[name] for name in names if name in self._ill), "")

    def _kept(self) -> dict[str, str]:
        if self._file is None:
            return {}
        try:
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            if (kept["boot"], kept["driver"]) == (self._boot, self._driver):
                return {str(name): str(why) for name, why in list(kept["ill"].items())[:ILL_MAX]}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("what was noted of GPUs in %s is lost: %s", self._file, error)
        return {}

    def _keep(self) -> None:
        if self._file is None:
            return
        new = self._file.with_suffix(".new")
        try:
            new.write_text(json.dumps({"boot": self._boot, "driver": self._driver, "ill": self._ill}), encoding="utf-8")
            new.replace(self._file)
        except OSError as error:  # a full disk: it is known as long as this agent runs
            log.warning("what is wrong with GPUs cannot be kept in %s: %s", self._file, error.strerror)


class ThrottleDetector:
    """Whether a card's clocks have been held down for long. ``now_s``: any clock that only goes forward."""

    __slots__ = ("_free_since_s", "_held_since_s", "is_weak")

    def __init__(self) -> None:
        self._held_since_s: float | None = None
        self._free_since_s: float | None = None
        self.is_weak = False

    def saw(self, bits: int, now_s: float) -> bool:
        """What the card says of its clocks now. → whether they are held down at this moment."""
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
    """A card's health, and why. ill: what it has reported; uncorrected: memory errors since the driver was loaded; rows:
    whether memory rows (wait to be replaced, cannot be any more); speed: 0 … 1 if its clocks are held down for long."""
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
