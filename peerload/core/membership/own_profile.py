"""Profile of this node: each change is another version, which peers fetch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.model.devices import GPU
from peerload.model.power import PowerCurve

if TYPE_CHECKING:
    from peerload.core.resources.admission import Ledger
    from peerload.core.state import CoreState
    from peerload.model.devices import Device


class OwnProfile:
    """One per node. Peers are told of a change when they next look, or at once if the caller has it told."""

    def __init__(self, state: CoreState, ledger: Ledger) -> None:
        self._state = state
        self._ledger = ledger
        self._troubles: dict[str, str] = {}

    def change(self, **changes: object) -> None:
        """These fields are now so."""
        profile = self._state.profile
        if isinstance(power := changes.get("power"), PowerCurve):
            changes["power"] = self._state.config.limited(power)
        profile = msgspec.structs.replace(profile, version=profile.version + 1, **changes)
        self._state.profile = self._ledger.profile = profile

    def set_devices(self, devices: tuple[Device, ...]) -> None:
        """These were found here."""
        self._ledger.devices.set_devices(devices)
        self.change(devices=self._ledger.devices.advertised(), gpus=sum(device.kind == GPU for device in devices))

    def trouble(self, what: str, words: str) -> None:
        """This node has some trouble with ``what``, or ("") no longer."""
        troubles = {name: said for name, said in self._troubles.items() if name != what} | (
            {what: words} if words else {}
        )
        if troubles != self._troubles:
            self._troubles = troubles
            self.change(trouble=", ".join(troubles.values()))
