"""Every variant of the protocol that the simulation has to find out, by name."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from tests.chaos import broken_drivers as drivers


class Variant(msgspec.Struct, frozen=True):
    """``apply`` leaves the rule out; checks_boots: whether messages for earlier starts are still dropped."""

    apply: Callable[[pytest.MonkeyPatch], None]
    checks_boots: bool = True


VARIANTS = {
    "ack-submit-early": Variant(drivers.ack_submit_early),
    "commit-early": Variant(drivers.commit_early),
    "exec-before-start": Variant(drivers.exec_before_start),
    "ack-result-early": Variant(drivers.ack_result_early),
    "return-not-durable": Variant(drivers.return_not_durable),
    "no-self-fence": Variant(drivers.no_self_fence),
    "agent-timer": Variant(drivers.agent_timer),
    "no-adopt": Variant(drivers.no_adopt),
    "launcher-unbound": Variant(drivers.launcher_unbound),
    "died-then-fork": Variant(drivers.died_then_fork),
    "exit-torn": Variant(drivers.exit_torn),
    "clock-slow": Variant(drivers.clock_slow),
    "floor-volatile": Variant(drivers.floor_volatile, checks_boots=False),
    "alo-start-unsynced": Variant(drivers.alo_start_unsynced, checks_boots=False),
    "amo-start-unsynced": Variant(drivers.amo_start_unsynced),
}
