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
