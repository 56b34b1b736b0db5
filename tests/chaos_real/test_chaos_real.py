"""The short form of `make chaos-real`: every kind of fault once, on real processes in namespaces of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.chaos_real.broken import broken_program
from tests.chaos_real.campaign import Options, hold
from tests.chaos_real.faults import KINDS
from tests.conftest import require_program

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


@pytest.mark.usefixtures("namespaces")
def test_a_short_campaign_loses_nothing(mosquitto: Path, capfd: pytest.CaptureFixture[str]) -> None:
    verdict = hold(Options(tasks=250, faults=len(KINDS), seconds=12.0, scale=0.6, faults_at_a_time=6), mosquitto)
    told = capfd.readouterr().out
    assert verdict.is_good, told
    assert told.splitlines()[-1] == f"tasks 250, faults {len(KINDS)}, lost 0, overlapped 0, recorded twice 0", told


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("variant", "kinds", "long_percent", "found"),
    [
        ("no-self-fence", ("agent paused", "partition"), 50, "overlapped"),
        ("ack-submit-early", ("killed when acknowledged",), 0, "lost"),
        ("no-adopt", ("agent killed",), 50, "overlapped"),
        ("impatient-home", ("loss", "agent paused"), 50, "overlapped"),
    ],
)
def test_a_rule_left_out_is_noticed(variant: str, kinds: tuple[str, ...], long_percent: int, found: str) -> None:
    """A campaign that finds nothing proves something only if it finds what is there."""
    options = Options(
        tasks=200,
        faults=12,
        seconds=60.0,
        machines=4,
        slots=3,
        faults_at_a_time=2,
        scale=1.5,
        kinds=kinds,
        long_percent=long_percent,
    )
    verdict = hold(options, None, broken_program(variant))
    shutil.rmtree(verdict.directory)
    assert getattr(verdict, found), str(verdict)
