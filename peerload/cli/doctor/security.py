"""`peerload doctor --security`: each rule of docs/security.md, looked at on this machine, or else named with its test."""

from __future__ import annotations

import sys
import threading
from typing import NamedTuple

from peerload.cli.doctor import security_access, security_files, security_link, security_messages, security_processes
from peerload.cli.doctor.facts import FAIL, OK, SKIP, WARN, Check, DoctorInput, Finding
from peerload.cli.doctor.security_rules import HELD_BY, RULES
from peerload.cli.verbs.doctor import looked_at
from peerload.model.text import printable
from peerload.text.format import coloured, counted, print_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PASS, TESTED = "pass", "tested"
"""A rule that was looked at here and holds; one that no look at a machine can tell, and the project's tests hold."""
COLOURS = {PASS: "green", WARN: "yellow", FAIL: "red", TESTED: "dim", SKIP: "dim"}
MARKS_S_MAX = 15.0

LOOKS: dict[str, tuple[Callable[[DoctorInput], Finding], ...]] = {
    "J1": (security_files.ca_key, security_link.certificate),
    "J2": (security_files.invitations,),
    "J3": (
        security_link.plain_is_closed,
        security_link.silence_is_closed,
        security_link.old_tls_is_refused,
        security_link.nobody_is_refused,
        security_link.a_stranger_is_refused,
    ),
    "J4": (security_files.revocations,),
    "J5": (security_link.datagrams_unanswered, security_files.seal_key),
    "J6": (security_files.alone_stays_alone,),
    "L1": (
        security_access.socket,
        security_access.who_answers,
        security_access.others_are_refused,
    ),
    "L3": (security_access.requests_are_bounded,),
    "X1": (security_processes.whose_tasks, security_files.policy),
    "X3": (security_processes.hardening,),
    "X4": (security_processes.containment,),
    "X6": (security_processes.launcher,),
    "X7": (security_processes.descriptors,),
    "F1": (security_files.spool,),
    "T1": (security_files.log_is_plain,),
    "M1": (security_messages.broker,),
    "C1": (security_files.code, security_processes.isolated),
    "C2": (security_messages.was_asked,),
    "S2": (security_processes.listening,),
    "S4": (security_processes.running_tasks,),
    "S11": (security_files.state, security_files.cluster),
    "S13": (
        security_processes.command_lines,
        security_processes.memory_of_keys,
        security_files.secrets_in_logs,
        security_messages.secrets_in_answers,
    ),
    "S16": (security_link.certificate_says_node,),
}
"""What looks at each rule here; a rule without any is one that only tests can hold."""


class Judged(NamedTuple):
    """One rule: what came out, why, what mends it, and the tests that hold it wherever it was built."""

    rule: str
    result: str
    says: str
    fix: str
    tests: tuple[str, ...]


def examine(facts: DoctorInput) -> list[Judged]:
    """Every rule, in order; all that is looked at is looked at side by side."""
    found: dict[tuple[str, int], Finding] = {}

    def look(place: tuple[str, int], check: Check) -> None:
        found[place] = looked_at(check, facts)

    threads = [
        threading.Thread(target=look, args=((rule, number), Check(rule, permitted(one))), daemon=True)
        for rule, looks in LOOKS.items()
        for number, one in enumerate(looks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(MARKS_S_MAX)
    return [judged(rule, [found[rule, number] for number in range(len(LOOKS.get(rule, ())))]) for rule in RULES]


def permitted(look: Callable[[DoctorInput], Finding]) -> Callable[[DoctorInput], Finding]:
    """The same; where this user may not look, that is no fault of what is there."""

    def looked(facts: DoctorInput) -> Finding:
        try:
            return look(facts)
        except PermissionError as error:
            return Finding(SKIP, f"{error.filename or 'it'} may not be looked at: ask as its owner, or root")

    return looked


def judged(rule: str, findings: list[Finding]) -> Judged:
    """What the findings about one rule come to: the worst of them; with none, or none that applies, its tests."""
    tests = HELD_BY.get(rule, ())
    for result in (FAIL, WARN, OK):
        said = [one for one in findings if one.result == result]
        if said:
            fix = next((one.fix for one in said if one.fix), "")
            return Judged(rule, PASS if result == OK else result, "; ".join(one.says for one in said), fix, tests)
    if findings:
        return Judged(rule, SKIP, "; ".join(dict.fromkeys(one.says for one in findings)), "", tests)
    if not tests:
        return Judged(rule, SKIP, "neither looked at here nor held by a test", "", tests)
    more = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
    return Judged(rule, TESTED, f"by {tests[0]}{more}", "", tests)


def run(socket: str | None, *, as_json: bool, quiet: bool) -> int:
    """Look, and print → 1 if anything fails."""
    facts = DoctorInput(socket)
    found = examine(facts)
    results = (PASS, WARN, FAIL, TESTED, SKIP)
    counts = {result: sum(one.result == result for one in found) for result in results}
    if as_json:
        checks = [
            {
                "name": one.rule,
                "rule": RULES[one.rule],
                "result": one.result,
                "says": one.says,
                "fix": one.fix,
                "tests": list(one.tests),
            }
            for one in found
        ]
        told = {"node": facts.info.get("node"), "mode": facts.security.get("mode"), "checks": checks}
        print_json(told | {"warned": counts[WARN], "failed": counts[FAIL]})
    else:
        shown = [one for one in found if not quiet or one.result in (WARN, FAIL)]
        sys.stdout.write("".join(f"{line}\n" for one in shown for line in _lines(one)))
        sys.stdout.write(
            f"{counted(len(found), 'rule')}: {counts[PASS]} pass here, {counted(counts[WARN], 'warning')}, "
            f"{counts[FAIL]} failed, {counts[TESTED]} held by tests alone, {counts[SKIP]} not to be looked at here\n"
        )
    return 1 if counts[FAIL] else 0


def _lines(one: Judged) -> list[str]:
    result = coloured(one.result.ljust(6), COLOURS[one.result], sys.stdout)
    lines = [f"{result}  {one.rule.ljust(3)}  {RULES[one.rule]}", f"             {printable(one.says)}"]
    if one.fix and one.result in (WARN, FAIL):
        lines.append(f"             {printable(one.fix)}")
    return lines
