"""The short form of `make chaos-real`: every kind of fault once, on real processes in namespaces of their own."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos_real.broken import broken_program
from tests.chaos_real.campaign import Options, hold
from tests.chaos_real.faults import KINDS
from tests.chaos_real.lab import Lab
from tests.chaos_real.ledger import overlapping
from tests.chaos_real.machine import Machine
from tests.conftest import require_program
from tests.integration.cluster import processes_with
from tests.support import wait_until

LONG_MS = 600_000
"""Longer than all that a test waits for."""
LONG_LEASE_S = 120
"""Longer than an agent takes to restart on a slow machine: a lease that ends before stops the task, and hides the fault."""
_NEEDED = "nsenter --net=/proc/self/ns/net unshare --net --mount --pid --fork --mount-proc --time --boottime 1 true"


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skip where no namespaces can be made."""
    if os.geteuid() != 0:
        pytest.skip("only root can make machines of namespaces")
    for program, package in (("ip", "iproute2"), ("nft", "nftables"), ("sysctl", "procps"), ("cc", "gcc")):
        require_program(program, package)
    tried = subprocess.run(_NEEDED.split(), capture_output=True, text=True, check=False)
    if tried.returncode or not Path("/dev/net/tun").exists():
        pytest.skip(f"this system cannot make machines of namespaces: {tried.stderr.strip() or 'no /dev/net/tun'}")


@pytest.mark.long
@pytest.mark.usefixtures("namespaces")
def test_a_short_campaign_loses_nothing(mosquitto: Path, capfd: pytest.CaptureFixture[str]) -> None:
    verdict = hold(Options(tasks=250, faults=len(KINDS), seconds=12.0, scale=0.6, faults_at_a_time=6), mosquitto)
    told = capfd.readouterr().out
    assert verdict.is_good, told
    assert told.splitlines()[-1] == f"tasks 250, faults {len(KINDS)}, lost 0, overlapped 0, recorded twice 0", told


@pytest.mark.long
@pytest.mark.sample
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("namespaces")
def test_two_minutes_of_kill_9_lose_nothing(mosquitto: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kinds = tuple(kind for kind in KINDS if "killed" in kind or "crashed" in kind)
    verdict = hold(Options(tasks=1500, faults=60, seconds=100.0, kinds=kinds), mosquitto)
    assert verdict.is_good, capfd.readouterr().out


def overlaps(lab: Lab) -> bool:
    """Whether two runs of one task have overlapped by now."""
    return any(overlapping(those) for those in lab.ledger.runs().values())


def started(lab: Lab) -> int:
    """How often tasks were started by now."""
    return sum(len(those) for those in lab.ledger.runs().values())


def with_one_task_away(lab: Lab) -> Machine:
    """Run a long task that may not run at its home → where it runs."""
    lab.await_acquainted()
    home = lab.machines[0]
    spec = lab.work(LONG_MS, placement={"exclude": [home.node]})
    home.call("submit", token=secrets.token_hex(16), spec=spec)
    wait_until(lambda: started(lab), 30.0, "the task to start")
    ((run,),) = lab.ledger.runs().values()
    return next(machine for machine in lab.machines if machine.node == run.node)


def pause(machine: Machine) -> None:
    machine.pause()


def restart(machine: Machine) -> None:
    machine.kill()
    machine.start()


@pytest.mark.long
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("variant", "fault", "lease_s"), [("no-self-fence", pause, 4), ("no-adopt", restart, LONG_LEASE_S)]
)
def test_a_rule_left_out_is_seen_in_the_ledger(variant: str, fault: Callable[[Machine], None], lease_s: int) -> None:
    """That a campaign finds nothing proves something only if what is there can be found."""
    with Lab(3, slots=2, leases_s=(lease_s,), start=broken_program(variant)) as lab:
        fault(with_one_task_away(lab))
        wait_until(lambda: overlaps(lab), 60.0, "two copies at a time")
    shutil.rmtree(lab.directory)


@pytest.mark.long
@pytest.mark.usefixtures("namespaces")
def test_with_all_rules_the_second_copy_comes_after_the_first() -> None:
    with Lab(3, slots=2, leases_s=(4,)) as lab:
        executor = with_one_task_away(lab)
        executor.pause()
        wait_until(lambda: started(lab) > 1, 60.0, "the task to run elsewhere")
        executor.resume()
        wait_until(lambda: len(processes_with(str(lab.ledger.path))) == 1, 30.0, "the first copy to end")
        assert not overlaps(lab)
    shutil.rmtree(lab.directory)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(("variant", "is_good"), [("ack-submit-early", False), ("slow-disk", True)])
def test_acknowledging_too_early_is_noticed(variant: str, is_good: bool) -> None:
    options = Options(tasks=600, faults=12, seconds=30.0, kinds=("killed when acknowledged",), long_percent=0)
    verdict = hold(options, None, broken_program(variant))
    shutil.rmtree(verdict.directory, ignore_errors=True)
    assert verdict.is_good is is_good
