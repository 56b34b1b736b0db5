"""Preset: one policy of each kind, chosen independently, with its parameters."""

from __future__ import annotations

import msgspec

from peerload.policy.api import (
    InformationPolicy,
    LoadPolicy,
    MigrationPolicy,
    PairingPolicy,
    PriorityPolicy,
    ReceiverPolicy,
    SelectionPolicy,
    SenderPolicy,
    TransferPolicy,
)

KINDS: dict[str, type] = {
    "load": LoadPolicy,
    "transfer": TransferPolicy,
    "selection": SelectionPolicy,
    "information": InformationPolicy,
    "location.sender": SenderPolicy,
    "location.receiver": ReceiverPolicy,
    "location.pairing": PairingPolicy,
    "priority": PriorityPolicy,
    "migration": MigrationPolicy,
}
"""Kinds of policy, each with the Protocol of its policies; the names are those of the tables in a preset."""


BASELINE, CENTRAL = "baseline", "centralized"
CLASSES = (
    ("static", "dynamic"),
    ("deterministic", "probabilistic"),
    (CENTRAL, "distributed"),
    ("cooperative", "non-cooperative"),
    ("load balancing", "load sharing"),
    ("sender-initiated", "receiver-initiated", "symmetric"),
    (BASELINE,),
)
"""Taxonomy of presets [RM, CK88]: at most one word of each group. A baseline is there for comparison."""


class PolicySet(msgspec.Struct, frozen=True, kw_only=True):
    """Policies of one node; made by `peerload.policy.registry.load_preset`."""

    name: str
    description: str
    load: LoadPolicy
    transfer: TransferPolicy
    selection: SelectionPolicy
    information: InformationPolicy
    sender: SenderPolicy
    receiver: ReceiverPolicy
    pairing: PairingPolicy
    priority: PriorityPolicy
    migration: MigrationPolicy
    memory: bool = False
    """True if searches leave footprints and follow them (`NodeView.idle_list`, `busy_list`)."""
    names: dict[str, str]
    """kind → the name its policy was chosen by, for people and decision records."""
    classes: tuple[str, ...] = ()
    """Place in the taxonomy: words of CLASSES."""

    @property
    def is_central(self) -> bool:
        """True if all tasks pass through a head node."""
        return CENTRAL in self.classes
