"""Certificates that end, and the key that seals, are changed under work that goes on."""

from __future__ import annotations

import json

import pytest

from tests.integration.machines import Lab
from tests.support import wait_until

CERTIFICATE_S = 8
TASKS = 40


@pytest.mark.rule("J1")
@pytest.mark.long
def test_certificates_are_changed_under_tasks_and_none_is_lost_or_run_twice() -> None:
    with Lab() as lab:
        one, two = lab.cluster("ws1", "ws2", config=f"certificate_s = {CERTIFICATE_S}\n")
        wait_until(lambda: one.sees("ws2") and two.sees("ws1"), what="a link")
        ends_at = [machine.call("info")["certificate_ends_at"] for machine in (one, two)]
        there = one.done("submit", "--node", "ws2", "-d", "/", "sleep", str(3 * CERTIFICATE_S)).strip()
        back = two.done("submit", "--node", "ws1", "-d", "/", "sleep", str(3 * CERTIFICATE_S)).strip()
        many = one.done("submit", "--node", "ws2", "-d", "/", "--array", f"1-{TASKS}", "sh", "-c", "sleep 0.5; echo x")
        for machine, task in ((one, there), (two, back), (one, many.strip())):
            machine.done("wait", task)
        for machine, task in ((one, there), (two, back)):
            shown = json.loads(machine.done("show", "--json", task))
            assert (shown["state"], shown["attempt"]) == ("done", 1)
        ended = json.loads(one.done("ls", "--json", "--all"))["tasks"]
        assert {(task["state"], task["attempt"]) for task in ended} == {("done", 1)}
        for machine, first in zip((one, two), ends_at, strict=True):
            assert machine.call("info")["certificate_ends_at"] > first + CERTIFICATE_S, "made anew, more than once"
        cut = "peer_links_expired_total"
        assert one.counters().get(cut, 0) + two.counters().get(cut, 0) >= 2, "nobody stays in by one that has ended"
        wait_until(lambda: one.sees("ws2") and two.sees("ws1"), what="they are together")
