"""`peerload doctor`: what usually goes wrong here, looked at one by one, with what mends it."""

from __future__ import annotations

import sys
import threading

from peerload.cli import doctor_agent, doctor_cluster, doctor_machine
from peerload.cli.doctor_facts import FAIL, OK, SKIP, WARN, Check, Facts, Finding
from peerload.cli.options import Options
from peerload.text.format import coloured, counted, print_json, printable

CHECKS = (
    Check("settings", doctor_agent.settings),
    Check("agent", doctor_agent.agent),
    Check("version", doctor_agent.version),
    Check("restart", doctor_agent.restart),
    Check("python", doctor_agent.python),
    Check("socket", doctor_agent.socket),
    Check("state", doctor_agent.state),
    Check("file system", doctor_agent.file_system),
    Check("room", doctor_agent.room),
    Check("damage", doctor_agent.damaged),
    Check("kept", doctor_agent.kept),
    Check("launcher", doctor_agent.launcher),
    Check("containment", doctor_agent.containment),
    Check("drained", doctor_cluster.drained),
    Check("frozen", doctor_cluster.frozen),
    Check("cluster", doctor_cluster.cluster),
    Check("listen", doctor_cluster.listen),
    Check("port", doctor_cluster.port),
    Check("peers", doctor_cluster.peers),
    Check("names", doctor_cluster.names),
    Check("ways", doctor_cluster.ways),
    Check("datagrams", doctor_cluster.datagrams),
    Check("broker", doctor_cluster.broker),
    Check("clock", doctor_machine.clock),
    Check("clocks", doctor_cluster.clocks),
    Check("GPUs", doctor_machine.gpus),
    Check("open files", doctor_machine.open_files),
    Check("inotify", doctor_machine.inotify),
    Check("processes", doctor_machine.processes),
    Check("temporary", doctor_machine.temporary),
    Check("swap", doctor_machine.swap),
    Check("lingering", doctor_machine.lingering),
)
"""Each is a function of what was gathered; the names are what people and scripts know them by."""

LOOK_S_MAX = 10.0
"""So long one check may take."""
COLOURS = {OK: "green", WARN: "yellow", FAIL: "red", SKIP: "dim"}


def main(words: list[str]) -> int:
    """Run the verb → 1 if anything fails."""
    reader = Options(
        "doctor",
        "What usually goes wrong here, looked at one by one: what is so, and the command that mends it. It works without\n"
        "an agent, too. Exit code 1 if anything fails; a warning is none.",
    )
    reader.switch("--quiet", help="only what is not as it should be")
    reader.switch("--security", help="instead: each rule that keeps strangers out and members in bounds")
    flags = reader.read(words)
    if flags.security:
        from peerload.cli import doctor_security

        return doctor_security.run(flags.socket, as_json=flags.json, quiet=flags.quiet)
    facts = Facts(flags.socket)
    found = [(check.name, looked_at(check, facts)) for check in CHECKS]
    counts = {result: sum(finding.result == result for _, finding in found) for result in (OK, WARN, FAIL, SKIP)}
    if flags.json:
        checks = [{"name": name, **finding._asdict()} for name, finding in found]
        told = {"node": facts.info.get("node"), "checks": checks, "warned": counts[WARN], "failed": counts[FAIL]}
        print_json(told)
    else:
        shown = [pair for pair in found if not flags.quiet or pair[1].result in (WARN, FAIL)]
        sys.stdout.write("".join(f"{line}\n" for name, finding in shown for line in _lines(name, finding)))
        sys.stdout.write(
            f"{counted(len(found), 'check')}: {counts[OK]} ok, {counted(counts[WARN], 'warning')}, "
            f"{counts[FAIL]} failed, {counts[SKIP]} not to be looked at here\n"
        )
    return 1 if counts[FAIL] else 0


def looked_at(check: Check, facts: Facts) -> Finding:
    """What a check finds. One that breaks, or hangs (in a mount whose server is gone), says so, and the others are done all
    the same."""
    found: list[Finding] = []

    def look() -> None:
        try:
            found.append(check.look(facts))
        except Exception as error:  # noqa: BLE001 -- a doctor who faints is of no use
            found.append(Finding(WARN, f"could not be looked at: {type(error).__name__}: {error}", "please report it"))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(LOOK_S_MAX)
    if not found:
        return Finding(FAIL, f"it hangs: no answer within {LOOK_S_MAX:g} s", "a dead mount?  df        dmesg | tail")
    return found[0]


def _lines(name: str, finding: Finding) -> list[str]:
    width = max(len(check.name) for check in CHECKS)
    result = coloured(finding.result.ljust(4), COLOURS[finding.result], sys.stdout)
    lines = [f"{result}  {name.ljust(width)}  {printable(finding.says)}"]
    if finding.fix and finding.result in (WARN, FAIL):
        lines.append(f"{' ' * (width + 8)}{printable(finding.fix)}")
    return lines
