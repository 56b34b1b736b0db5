"""Every variant of the protocol that the simulation has to find out, by name."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from tests.chaos import broken_core as core
from tests.chaos import broken_drivers as drivers
from tests.chaos import broken_gates as gates
from tests.chaos import broken_memory as memory
from tests.chaos import broken_parking as parking

LeaveOut = Callable[[pytest.MonkeyPatch], None]


class Variant(msgspec.Struct, frozen=True):
    """``apply`` leaves the rule out; checks_boots: whether messages for earlier starts are still dropped; beside: further
    rules that give the same protection, left out with it; hint: the first seed at which it is found out."""

    apply: LeaveOut
    checks_boots: bool = True
    beside: tuple[LeaveOut, ...] = ()
    hint: int = 1


VARIANTS = {
    # The first table of broken simplifications, row by row.
    "ack-submit-early": Variant(drivers.ack_submit_early),
    "two-phase": Variant(core.two_phase),
    "commit-early": Variant(drivers.commit_early, hint=15),
    "lease-from-receipt": Variant(core.lease_from_receipt, hint=2),
    "renew-no-extend": Variant(core.renew_no_extend, hint=2),
    "resend-no-extend": Variant(core.resend_no_extend, hint=18),
    "reboot-deadline": Variant(core.reboot_deadline, hint=5),
    "swim-reassign": Variant(core.swim_reassign, hint=3),
    "no-self-fence": Variant(drivers.no_self_fence, hint=2),
    "agent-timer": Variant(drivers.agent_timer, hint=4),
    "no-adopt": Variant(drivers.no_adopt),
    "exec-before-start": Variant(drivers.exec_before_start),
    "clock-slow": Variant(drivers.clock_slow, hint=16),
    "promise-not-kept": Variant(core.promise_not_kept),
    "floor-volatile": Variant(drivers.floor_volatile, checks_boots=False),
    "no-tombstone": Variant(core.no_tombstone),
    "commit-unreserved": Variant(core.commit_unreserved),
    "ack-result-early": Variant(drivers.ack_result_early, hint=2),
    "any-result": Variant(core.any_result, hint=2),
    "amo-requeue": Variant(core.amo_requeue),
    "amo-start-unsynced": Variant(drivers.amo_start_unsynced, hint=6),
    "no-expiry": Variant(core.no_expiry),
    "alo-start-unsynced": Variant(drivers.alo_start_unsynced, checks_boots=False),
    # The additions: the executor's queue, RETURN, PARK, offers in turn, launchers, exit records.
    "park-not-durable": Variant(parking.park_not_durable, hint=2),
    "park-no-confirm": Variant(parking.park_no_confirm, hint=2),
    "park-late": Variant(parking.park_late, hint=39),
    "park-flag": Variant(parking.park_flag, hint=2),
    "park-strict": Variant(parking.park_strict, hint=58),
    "park-ts-volatile": Variant(parking.park_ts_volatile, checks_boots=False, hint=13),
    "revoke-forgets": Variant(parking.revoke_forgets, hint=110),
    "return-not-durable": Variant(core.return_not_durable, checks_boots=False, beside=(core.ignore_nonces,), hint=49),
    "return-queued": Variant(core.return_queued),
    "same-n-two-commits": Variant(core.same_n_two_commits),
    "n-not-burnt": Variant(core.n_not_burnt),
    "boot-id-any-new": Variant(core.boot_id_any_new, hint=14),
    "no-nonce": Variant(core.ignore_nonces, checks_boots=False, hint=35),
    "launcher-lost-says-not-started": Variant(core.launcher_lost_says_not_started),
    "died-then-fork": Variant(drivers.died_then_fork),
    "launcher-unbound": Variant(drivers.launcher_unbound),
    "exit-torn": Variant(drivers.exit_torn, hint=19),
    # An attempt that ran out of GPU memory.
    "memory-not-durable": Variant(memory.memory_not_durable, hint=10),
    "memory-first-result": Variant(memory.memory_first_result, hint=1),
    # Groups, tasks that wait for others, and tasks that are tried again.
    "slots-not-restored": Variant(gates.slots_not_restored),
    "pause-lets-go": Variant(gates.pause_lets_go, hint=13),
    "slot-not-passed-on": Variant(gates.slot_not_passed_on, hint=9),
    "dead-home-is-over": Variant(gates.dead_home_is_over, hint=5),
    "end-is-success": Variant(gates.end_is_success),
    "retry-not-durable": Variant(gates.retry_not_durable),
    "retry-first-result": Variant(gates.retry_first_result, hint=10),
}
