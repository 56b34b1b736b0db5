"""What is learned of commands: from which ends, at which level, within which bounds; and what the views make of it."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from peerload.core.estimates import DURATION_S_AT_FIRST, DurationEstimates, command_keys
from peerload.core.sharing.information import task_view
from peerload.core.work import Work
from peerload.model import actions, events, messages
from peerload.model.config import CoreConfig
from peerload.model.resources import LoadReport, Profile
from peerload.model.task import Exit, TaskSpec
from peerload.policy.registry import build_preset
from tests.chaos.engine.engine import Simulation
from tests.chaos.engine.trace import Trace
from tests.core.given import ACCEPTS, ALONE, SENDER, UID, WALL_S, Given, offer
from tests.core.given import spec as given_spec
from tests.workloads import burst

KEYS = ["387b72cbd278961d356c1902ae05674e", "0fe8f251997c11b7e546e717d17de01d", "14f6621e128eda5eca68c4246198792e"]


def spec(*argv: str, directory: str = "/d") -> TaskSpec:
    return TaskSpec(tuple(word.encode() for word in argv), directory.encode())


def exit_of(duration_s: float, speed: float = 1.0) -> Exit:
    return Exit(0, started_at=WALL_S, ended_at=WALL_S + duration_s, speed=speed)


def history(commands_kept_max: int = 100, durations_kept_max: int = 50) -> DurationEstimates:
    return DurationEstimates(commands_kept_max, durations_kept_max)


def taught(runs: list[tuple[TaskSpec, float]]) -> DurationEstimates:
    made = history()
    for task, duration_s in runs:
        made.learn(task, exit_of(duration_s))
    return made


def expected_s(known: DurationEstimates, task: TaskSpec) -> float:
    return known.expected_s(known.keys(task))


def work(name: str) -> Work:
    return Work("x/1", UID, spec(name), 0.0, is_local=True)


# -- levels ------------------------------------------------------------------------------------------------------------


def test_nothing_is_known_at_first() -> None:
    known = history()
    assert (expected_s(known, spec("a")), known.mean_s) == (0.0, DURATION_S_AT_FIRST)
    assert known.past(known.keys(spec("a"))) is None


def test_the_very_command_line_says_most_once_it_has_run_three_times() -> None:
    slow, fast = spec("sleep", "9"), spec("sleep", "1")
    known = taught([(slow, 9.0), (slow, 9.0), (fast, 1.0), (fast, 1.0)])
    assert expected_s(known, slow) == 5.0  # the program has run four times, this line of it twice
    known.learn(slow, exit_of(9.0))
    assert expected_s(known, slow) == 9.0
    assert expected_s(known, fast) == pytest.approx(29 / 5)
    assert expected_s(known, spec("other")) == 0.0
    assert known.mean_s == pytest.approx(29 / 5)


def test_a_line_seen_once_is_better_than_nothing() -> None:
    known = taught([(spec("a", "1"), 4.0), (spec("b"), 2.0)])
    assert expected_s(known, spec("a", "1")) == 4.0
    assert expected_s(known, spec("a", "2")) == 4.0
    assert known.mean_s == 3.0


@pytest.mark.parametrize(
    ("one", "other", "levels"),
    [
        (spec("a", "--x=1"), spec("a", "--x=1"), "line shape program"),
        (spec("a", "--x=1"), spec("a", "--x=2"), "shape program"),
        (spec("a", "-n", "5", "in"), spec("a", "-n", "7", "out"), "shape program"),
        (spec("a", "-5"), spec("a", "-7"), "shape program"),
        (spec("a", "-x"), spec("a", "-y"), "program"),
        (spec("a"), spec("a", directory="/e"), "program"),
        (spec("/usr/bin/a"), spec("a"), "shape program"),
        (spec("a", "one"), spec("a", "two"), "shape program"),
        (spec("python3", "one.py"), spec("python3", "two.py"), ""),
        (spec("python3", "-u", "one.py", "1"), spec("python3", "-u", "one.py", "2"), "shape program"),
        (spec("sh", "-c", "make"), spec("sh", "-c", "ls"), ""),
        (spec("a"), spec("b"), ""),
    ],
)
def test_what_counts_as_the_same_command(one: TaskSpec, other: TaskSpec, levels: str) -> None:
    pairs = zip(command_keys(one.argv, one.directory), command_keys(other.argv, other.directory), strict=True)
    assert " ".join(name for name, (a, b) in zip(("line", "shape", "program"), pairs, strict=True) if a == b) == levels


def test_keys_are_the_same_on_every_node_and_after_every_start() -> None:
    keys = [key.hex() for key in command_keys((b"python3", b"a.py", b"--n=1"), b"/d")]
    assert keys == KEYS


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_the_oldest_runs_and_the_commands_not_seen_for_longest_are_forgotten() -> None:
    known = history(commands_kept_max=6, durations_kept_max=3)
    for duration_s in (100.0, 1.0, 2.0, 3.0):
        known.learn(spec("a"), exit_of(duration_s))
    assert (expected_s(known, spec("a")), known.mean_s) == (2.0, 2.0)
    known.learn(spec("b"), exit_of(8.0))
    known.learn(spec("a"), exit_of(1.0))
    known.learn(spec("c"), exit_of(9.0))
    assert len(known) == 6
    assert [expected_s(known, spec(name)) for name in "abc"] == [2.0, 0.0, 9.0]


def test_the_mean_stays_that_of_what_is_kept() -> None:
    known = history(durations_kept_max=7)
    seen = [float((step * 37) % 101 + 1) * 10 ** (step % 9 - 4) for step in range(1000)]
    for duration_s in seen:
        known.learn(spec("a"), exit_of(duration_s))
    past = known.past(known.keys(spec("a")))
    assert past is not None
    assert past.mean_s == pytest.approx(sum(seen[-7:]) / 7)
    assert past.ascending(1.0) == pytest.approx(sorted(seen[-7:]), abs=1e-6)
    assert past.ascending(2.0) == pytest.approx([seen_s / 2 for seen_s in sorted(seen[-7:])], abs=1e-6)


def test_what_never_ran_teaches_nothing() -> None:
    known = history()
    known.learn(spec("a"), Exit(127, started_at=WALL_S, ended_at=WALL_S))
    known.learn(spec("a"), Exit(1))
    known.learn(spec("a"), Exit(1, started_at=WALL_S, ended_at=WALL_S - 1.0))
    assert (len(known), known.mean_s) == (0, DURATION_S_AT_FIRST)


def test_durations_are_those_of_the_reference_machine() -> None:
    known = history()
    known.learn(spec("a"), exit_of(3.0, speed=2.0))
    known.learn(spec("a"), exit_of(12.0, speed=0.5))
    assert expected_s(known, spec("a")) == 6.0


# -- what waits --------------------------------------------------------------------------------------------------------


def test_the_backlog_is_the_sum_of_what_is_expected() -> None:
    known = taught([(spec("a"), 4.0), (spec("b"), 2.0)])
    waiting = known.backlog()
    for name in "aab":
        waiting.add(work(name))
    assert waiting.expected_s == 10.0
    waiting.add(work("new"))
    assert waiting.expected_s == 13.0  # at the mean of all
    known.learn(spec("a"), exit_of(10.0))  # so that it takes 7
    assert waiting.expected_s == pytest.approx(14 + 2 + 16 / 3)
    known.learn(spec("new"), exit_of(1.0))
    assert waiting.expected_s == pytest.approx(17.0)
    for name in ("a", "new", "a", "b"):
        waiting.remove(work(name))
    assert waiting.expected_s == 0.0


def test_what_its_user_says_of_a_task_counts_in_bids_and_in_what_runs_and_waits() -> None:
    x = Given(policies={**ALONE, "location": {"sender": {"policy": "bidding"}}})
    x.when(events.SpeedMeasured(2.0))
    x.submit(given_spec(est_s=60.0))
    x.submit(given_spec(est_s=100.0))
    assert x.sent(messages.ProbeRequest).expected_s == 100.0
    view = x.node.sharing.information.view()
    assert ([list(task.durations) for task in view.running], view.waiting_s) == ([[30.0]], 50.0)
    x.end(x.task().key)
    assert view.waiting_s == 0.0


def test_a_queue_keeps_the_sum_whatever_happens() -> None:
    """Against a sum over all that waits, for commands known by their very line."""
    given = Given(policies={**ALONE, "load": {"policy": "past-repeats"}}, peers=())
    lines = [spec("a", str(number)) for number in range(4)]
    said = [msgspec.structs.replace(line, est_s=number + 0.5) for number, line in enumerate(lines)]
    for line in [*lines, *lines, *lines]:
        given.node.state.history.learn(line, exit_of(len(line.argv[1]) + 1.0))
    chance = random.Random(1)
    queue, known, waited = given.node.queue, given.node.state.history, 0
    for number in range(300):
        if chance.random() < 0.5:
            given.submit(chance.choice([*lines, *said]))
        elif chance.random() < 0.3 and given.node.home.by_id:
            given.when(events.CancelRequested(number, (chance.choice(list(given.node.home.by_id)),)))
        elif running := list(given.node.ledger.running):
            given.after(1.0).when(events.TaskEnded(running[0], exit_of(chance.expovariate(1.0))))
        waited = max(waited, len(queue))
        expected = [waits.spec.est_s or expected_s(known, waits.spec) for waits in queue.oldest_first()]
        assert queue.expected_s == pytest.approx(sum(expected), abs=1e-9)
    assert waited > 10


# -- what a node learns from -------------------------------------------------------------------------------------------


def learned(x: Given) -> float:
    """What it expects of the task that `Given.submit` and `offer` take, on the reference machine."""
    return expected_s(x.node.state.history, given_spec())


def test_its_own_tasks_that_ran_here() -> None:
    x = Given(peers=())
    x.submit()
    x.when(events.TaskEnded(x.task().key, exit_of(7.0)))
    assert learned(x) == 7.0


def test_its_own_tasks_that_ran_elsewhere_as_fast_as_it_is_there() -> None:
    x = Given(policies=SENDER)
    x.submit()
    x.submit()
    x.hear("y", messages.ProbeReply(1, accepts=True, report=ACCEPTS))
    task = x.task(2)
    x.hear("y", messages.Accept(task.task, task.uid, 1, 77, 5.0))
    x.hear("y", messages.Result(task.task, task.uid, 1, exit_of(3.0, speed=2.0)))
    assert learned(x) == 0.0
    x.when(events.OutputArrived(task.uid, 1))
    assert learned(x) == 6.0


def test_guests_that_ran_here() -> None:
    x = Given(peers=("h",))
    x.when(events.SpeedMeasured(4.0))
    x.hear("h", offer())
    accept = x.sent(messages.Accept)
    x.hear("h", messages.Commit("h/1", UID, 1, accept.nonce, accept.ts, 60.0))
    x.when(events.TaskEnded(f"{UID.hex()}-1", exit_of(2.0)))
    assert x.done(actions.SendResult).exit == exit_of(2.0, speed=4.0)
    assert learned(x) == 8.0


def test_not_what_a_signal_ended_but_at_the_time_limit() -> None:
    x = Given(peers=())
    x.submit()
    key = x.task().key
    x.when(events.CancelRequested(1, ("x/1",)))
    x.when(events.TaskEnded(key, exit_of(7.0)))
    x.submit()
    x.when(events.TaskEnded(x.task(2).key, msgspec.structs.replace(exit_of(7.0), exit_code=137, signal=9)))
    assert learned(x) == 0.0
    x.submit(given_spec(time_limit_s=5.0))
    x.when(events.TaskEnded(x.task(3).key, msgspec.structs.replace(exit_of(5.0), exit_code=143, signal=15)))
    assert learned(x) == 5.0


def test_a_start_learns_again_from_what_had_ended() -> None:
    past = tuple(events.PastRun(given_spec(), exit_of(duration_s)) for duration_s in (1.0, 2.0, 3.0))
    x = Given(peers=(), started=events.AgentStarted(past=past), config=CoreConfig(durations_kept_max=2))
    assert learned(x) == 2.5


# -- what policies see of it -------------------------------------------------------------------------------------------


def test_a_view_tells_what_runs_and_what_waits_in_seconds_of_this_node() -> None:
    x = Given(peers=("y",), slots=2, started=events.AgentStarted(past=(events.PastRun(spec("a"), exit_of(12.0)),)))
    x.when(events.SpeedMeasured(2.0))
    for name in ("a", "b", "a", "b"):
        x.submit(spec(name))
        x.after(1.0)
    view = x.node.sharing.information.view()
    x.timer("gates")  # the moment is that of the last event
    assert [task.used_s for task in view.running] == [4.0, 3.0]
    assert [list(task.durations) for task in view.running] == [[6.0], [6.0]]  # b as all
    assert (view.speed, view.mean_s, view.waiting_s) == (2.0, 6.0, 12.0)
    x.hear("y", offer(home="y", only=True))
    assert view.waiting_s == 18.0  # what is on its way counts as the mean
    (waiting, _) = x.node.queue.oldest_first()
    shown = task_view(waiting, x.node.state)
    assert (shown.expected_s, shown.moved_bytes, shown.waited_s) == (6.0, len(b"a" + b"/d" + b"\x80"), 2.0)


def test_after_a_restart_what_runs_has_run_for_as_long() -> None:
    x = Given(peers=())
    x.submit()
    task = x.task()
    row = events.TaskRow(task.record, task.spec)
    x = Given(peers=(), started=events.AgentStarted(tasks=(row,), running=((task.key, WALL_S + 100.0 - 7.5, 0.0),)))
    (running,) = x.node.sharing.information.view().running
    assert running.used_s == 7.5


def test_the_longest_goes() -> None:
    x = Given(peers=("y",), policies={**ALONE, "selection": {"policy": "longest"}})
    for name, duration_s in (("a", 1.0), ("b", 5.0), ("c", 3.0)):
        x.node.state.history.learn(spec(name), exit_of(duration_s))
    for name in ("now", "new", "a", "b", "c"):
        x.submit(spec(name))
    request = messages.GiveRequest(4, LoadReport(sequence=2), Profile("y", 1, 1.0))
    x.hear("y", request)
    assert x.sent(messages.GiveReply).task == "x/4"


def test_a_measured_speed_is_told_to_all() -> None:
    x = Given()
    told = x.when(events.SpeedMeasured(1.5))
    assert told[0] == "Announce"
    profile = x.done(actions.Announce).message.profile
    assert (profile.speed, profile.version) == (1.5, x.profile.version + 1)
    assert x.node.ledger.profile == profile


@pytest.mark.parametrize("load", ["memoryless", "past-repeats", "distribution", "weighted"])
def test_equal_seeds_give_equal_traces(load: str) -> None:
    table: dict[str, Any] = {
        "load": {"policy": load},
        "selection": {"policy": "longest"},
        "transfer": {"threshold": 1.0},
        "location": {"sender": {"policy": "shortest"}, "receiver": {"policy": "poll"}},
    }

    def trace() -> str:
        simulation = Simulation(build_preset("t", table), nodes=3, slots=2, seed=1, trace=Trace())
        report = simulation.run(burst("n1", 60, 0.2))
        assert report.ended == 60
        assert "policy_errors_total" not in report.counts
        return report.trace_hash

    assert trace() == trace()
