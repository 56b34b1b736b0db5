"""`peerload doctor`: checks for common problems, each with its fix."""

from __future__ import annotations

import sys
import threading

from peerload.cli.common.options import Options
from peerload.cli.doctor import cluster, machine, security
from peerload.cli.doctor.machine import FAIL, OK, SKIP, WARN, Check, DoctorInput, Finding
from peerload.model.text import printable
from peerload.text.format import coloured, counted, print_json

CHECKS = (
    Check("settings", machine.settings),
    Check("agent", machine.agent),
    Check("version", machine.version),
    Check("restart", machine.restart),
    Check("python", machine.python),
    Check("socket", security.permitted(security.socket)),
    Check("state", machine.state),
    Check("file system", machine.file_system),
    Check("room", machine.room),
    Check("damage", machine.damaged),
    Check("kept", machine.kept),
    Check("hooks", machine.hooks),
    Check("launcher", machine.launcher),
    Check("containment", machine.containment),
    Check("drained", cluster.drained),
    Check("frozen", cluster.frozen),
    Check("cluster", cluster.cluster),
    Check("listen", cluster.listen),
    Check("port", cluster.port),
    Check("peers", cluster.peers),
    Check("names", cluster.names),
    Check("ways", cluster.ways),
    Check("datagrams", cluster.datagrams),
    Check("broker", cluster.broker),
    Check("clock", machine.clock),
    Check("clocks", cluster.clocks),
    Check("GPUs", machine.gpus),
    Check("MPS", machine.mps),
    Check("power", machine.power),
    Check("open files", machine.open_files),
    Check("inotify", machine.inotify),
    Check("processes", machine.processes),
    Check("temporary", machine.temporary),
    Check("swap", machine.swap),
    Check("lingering", machine.lingering),
)
"""The checks, each a function of the gathered facts. The names are public: users and scripts rely on them."""

LOOK_S_MAX = 10.0
"""Time limit of one check."""
COLOURS = {OK: "green", WARN: "yellow", FAIL: "red", SKIP: "dim"}


def main(words: list[str]) -> int:
    """Run the verb → 1 if anything fails."""
    reader = Options(
        "doctor",
        "Check this machine for common problems; each one comes with the command that fixes it. It works without an agent,\n"
        "too. Exit code 1 if a check fails; warnings do not count.",
    )
    reader.switch("--quiet", help="only warnings and failures")
    reader.switch("--security", help="instead: who can read keys, change settings and code, and what is not enforced")
    flags = reader.read(words)
    facts = DoctorInput(flags.socket)
    checks: tuple[Check, ...] = CHECKS
    told = {"node": facts.info.get("node")}
    if flags.security:
        checks, told = security.CHECKS, told | {"mode": facts.security.get("mode")}
    found = [(check.name, run_check(check, facts)) for check in checks]
    counts = {result: sum(finding.result == result for _, finding in found) for result in (OK, WARN, FAIL, SKIP)}
    if flags.json:
        listed = [{"name": name, **finding._asdict()} for name, finding in found]
        print_json(told | {"checks": listed, "warned": counts[WARN], "failed": counts[FAIL]})
    else:
        width = max(len(check.name) for check in checks)
        shown = [pair for pair in found if not flags.quiet or pair[1].result in (WARN, FAIL)]
        sys.stdout.write("".join(f"{line}\n" for name, finding in shown for line in _lines(name.ljust(width), finding)))
        sys.stdout.write(
            f"{counted(len(found), 'check')}: {counts[OK]} ok, {counted(counts[WARN], 'warning')}, "
            f"{counts[FAIL]} failed, {counts[SKIP]} skipped\n"
        )
    return 1 if counts[FAIL] else 0


def run_check(check: Check, facts: DoctorInput) -> Finding:
    """Run a check. A check that raises or hangs (for example in a mount without its server) results in a finding about that."""
    found: list[Finding] = []

    def look() -> None:
        try:
            found.append(check.look(facts))
        except Exception as error:  # noqa: BLE001 -- the other checks still count
            found.append(Finding(WARN, f"the check itself failed: {type(error).__name__}: {error}", "please report it"))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(LOOK_S_MAX)
    if not found:
        return Finding(
            FAIL, f"the check hangs: no result within {LOOK_S_MAX:g} s", "a dead mount?  df        dmesg | tail"
        )
    return found[0]


def _lines(name: str, finding: Finding) -> list[str]:
    result = coloured(finding.result.ljust(4), COLOURS[finding.result], sys.stdout)
    lines = [f"{result}  {name}  {printable(finding.says)}"]
    if finding.fix and finding.result in (WARN, FAIL):
        lines.append(f"{' ' * (len(name) + 8)}{printable(finding.fix)}")
    return lines
