"""Facts about one agent that its parts share: settings in force, identity, start time, counters and notices."""

from __future__ import annotations

import collections
import os
import time
from typing import TYPE_CHECKING

from peerload.model.events import Instant

if TYPE_CHECKING:
    from collections.abc import Mapping

    from peerload.model.config import AgentConfig
    from peerload.model.messages import Identity

REFUSED_BY_MAX = 16
"""Bound on the addresses in `AgentInfo.refused_by`; the latest are kept."""


_NOT_FOR_CHILDREN = ("PEERLOAD_", "NOTIFY_", "LISTEN_", "WATCHDOG_", "CREDENTIALS_")


def child_environment() -> dict[str, str]:
    """The variables of this process for its children: without its settings, which have passwords, and those of its service
    manager."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_NOT_FOR_CHILDREN)}


def now() -> Instant:
    """The present moment, on the boot clock and by the machine's date."""
    return Instant(time.clock_gettime(time.CLOCK_BOOTTIME), time.time())


class AgentInfo:
    """Plain values; from the loop's thread only. A reload replaces ``config``, so read it where it is used."""

    def __init__(self, config: AgentConfig, identity: Identity, origins: Mapping[str, str] | None = None) -> None:
        self.config = config
        self.identity = identity
        """Name, boot and address of this node. The address is empty until the peer links listen."""
        self.origins = dict(origins or {})
        """Source of each setting (flag, variable, file), as far as it is known."""
        self.counters: collections.Counter[str] = collections.Counter()
        self.notices: list[str] = []
        """Sentences about the state of this node for whoever starts or looks at the agent."""
        self.refused_by: tuple[str, ...] = ()
        """Addresses of the last peers that refused this node, because another has its name."""
        self.started_at = time.time()
        self._started_s = now().boot_s

    def up_s(self) -> float:
        """Uptime of this agent, in seconds."""
        return now().boot_s - self._started_s

    def add_refusal(self, address: str) -> None:
        """Note that the peer at this address refuses this node."""
        self.refused_by = (*self.refused_by, address)[-REFUSED_BY_MAX:]
