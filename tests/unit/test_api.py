"""What goes to a task of `Executor` and comes back, how its thread meets refusals, what `submit` asks for, and that commands do not
pay for any of it."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import dataclasses
import itertools
import json
import pickle
import secrets
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from hypothesis import given
from hypothesis import strategies as st

import peerload
from peerload import AsyncClient, Client, Executor
from peerload.client import call, connection, executor, function, operations
from peerload.client.operations import NodeInfo, TaskInfo
from peerload.model.errors import AgentSilent, AgentUnavailable, BadRequest, NoSuchTask, OutputIncomplete, SlowDown
from peerload.wire import control
from tests.support import PATIENCE_S, wait_until
from tests.unit.cli.fake_agent import FakeAgent, Reply, fixture_agent, goes_away_once  # noqa: F401 -- a fixture

MARK = "ab" * 16


@given(st.binary(max_size=200), st.binary(max_size=200), st.binary(max_size=50))
def test_an_outcome_is_found_whatever_is_printed(before: bytes, after: bytes, value: bytes) -> None:
    line = call.packed_outcome(MARK, {"value": value})
    assert call.outcome_in(before + line + after, MARK) == {"value": value}


@given(st.binary(max_size=300))
def test_what_is_no_outcome_is_none(output: bytes) -> None:
    assert call.outcome_in(output, MARK) is None


def test_an_outcome_that_was_cut_is_none() -> None:
    line = call.packed_outcome(MARK, {"value": "x" * 1000})
    for size in range(0, len(line) - 1, 7):
        assert call.outcome_in(line[:size], MARK) is None
    assert call.outcome_in(line, "cd" * 16) is None


def test_the_bounds_of_calls_and_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "CALL_BYTES_MAX", 1000)
    monkeypatch.setattr(call, "RESULT_BYTES_MAX", 1000)
    with pytest.raises(ValueError, match="1000"):
        call.packed_call(MARK, len, (b"x" * 2000,), {}, [])
    with pytest.raises(ValueError, match="1000"):
        call.packed_outcome(MARK, {"value": b"x" * 2000})


@pytest.mark.rule("C1")
def test_with_json_nothing_is_unpickled() -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return pytest.fail, ("it was unpickled",)

    line = call.packed_outcome(MARK, {"value": Payload()})
    with pytest.raises(ValueError, match=r"utf-8|Expecting|JSON"):
        call.outcome_in(line, MARK, "json")


def test_with_json_plain_results_and_what_was_raised_come_back() -> None:
    def back(outcome: dict[str, Any]) -> Any:
        return call.outcome_in(call.packed_outcome(MARK, outcome, "json"), MARK, "json")

    assert back({"value": {"a": [1, 2.5, None, True, "x"]}}) == {"value": {"a": [1, 2.5, None, True, "x"]}}
    assert back({"value": (1, (2,))}) == {"value": [1, [2]]}
    told = back(call.failure_of(ZeroDivisionError("no"), "where"))
    assert (told["error"].kind, told["error"].text, told["traceback"]) == ("ZeroDivisionError", "no", "where")
    for odd in (b"bytes", {1: "x"}, {0: "x"}, {"a": object()}):
        with pytest.raises(TypeError):
            back({"value": odd})
    for told in ([], {"error": "x", "traceback": ""}, {"other": 1}):
        data = base64.b64encode(json.dumps(told).encode())
        line = b"\n%s %s %d %s\n" % (call.WORD, MARK.encode(), len(data), data)
        with pytest.raises(ValueError, match="wrote no result"):
            call.outcome_in(line, MARK, "json")


@given(st.sets(st.integers(0, 200), max_size=50))
def test_ranges_are_these_numbers(numbers: set[int]) -> None:
    ranges = operations.array_ranges(numbers)
    assert [number for low, high, step in ranges for number in range(low, high + 1, step)] == sorted(numbers)
    assert operations.array_ranges(range(3, 20, 4)) == [(3, 19, 4)]


def test_an_array_with_a_step_is_one_range() -> None:
    for indices in (range(0, 4000, 2), range(3998, -1, -2), set(range(0, 4000, 2))):
        assert operations.submit_array("x", indices, shell=True).fields["array"] == [(0, 3998, 2)]
    with pytest.raises(TypeError, match="numbers"):
        operations.submit_array("x", "0-10:2", shell=True)  # type: ignore[arg-type]


def test_one_stands_for_a_list_of_one(tmp_path: Path) -> None:
    task = Client("/nowhere").task("n1/3")
    for named in (task, "n1/3", [task], ("n1/3",)):
        fields = operations.submit_fields([b"x"], {"after": named, "after_ok": named})
        assert fields["terms"] == {"after": ["n1/3"], "after_ok": ["n1/3"]}
        for asked in (operations.wait(named), operations.cancel(named), operations.ended(named)):
            assert asked.fields["tasks"] == ["n1/3"]
    assert operations.tasks(states="failed").fields["states"] == ["failed"]
    assert operations.task_spec([b"x"], {"labels": "gpu", "exclude": "n2"})["placement"] == {
        "labels": ["gpu"], "exclude": ["n2"]
    }  # fmt: skip
    (tmp_path / "data").write_text("x")
    for path in ("data", Path("data"), [Path("data")]):
        made = operations.submit(["x"], directory=tmp_path, in_=path, out=path)
        assert made.fields["spec"]["files"]["outputs"] == ["data"]


def test_what_is_asked_for_becomes_a_spec() -> None:
    made = operations.task_spec(
        [b"/bin/true"],
        {
            "cpus": 2,
            "mem": "1G",
            "gpus": 0.5,
            "gpu_mem": 5,
            "node": "n1",
            "exclude": ["n2"],
            "once": True,
            "environment": {"A": "b"},
        },
    )
    assert made["request"] == {"cpus": 2, "gpus": 1, "gpu_fraction": 0.5, "mem_bytes": 1 << 30, "gpu_mem_bytes": 5}
    made_on = operations.task_spec(
        [b"x"], {"gpus": 2, "gpu_prefer": ["A100*", "1"], "gpu_wait": "queue", "gpu_share": "exclusive"}
    )
    assert made_on["request"] == {
        "cpus": 1.0, "gpus": 2, "gpu_prefer": ["A100*", "1"], "gpu_wait": "queue", "gpu_share": "exclusive"
    }  # fmt: skip
    assert operations.task_spec([b"x"], {"gpus": 1, "gpu_prefer": "0,1"})["request"]["gpu_prefer"] == ["0", "1"]
    assert made["placement"] == {"node": "n1", "exclude": ["n2"]}
    never = operations.task_spec([b"x"], {"migrations_max": 0, "local": False, "labels": ()})
    assert never["placement"] == {"migrations_max": 0}
    assert (made["guarantee"], made["name"]) == ("once", "true")
    fields = operations.submit_fields([b"x"], {"group": "g", "retries": 2, "held": True, "after": ("n1/3",)})
    assert (fields["terms"], fields["held"]) == ({"group": "g", "retries": 2, "after": ["n1/3"]}, True)
    wrong: list[Any] = [{"mem": "8"}, {"mem": "x"}, {"once": True, "fast": True}]
    wrong += [{"gpu_prefer": ["0"]}, {"gpus": 1, "gpu_wait": "never"}, {"gpus": 1, "gpu_share": "all"}]
    wrong += [{"gpus": 0.5, "gpu_share": "exclusive"}]
    for wanted in wrong:
        with pytest.raises(BadRequest):
            operations.task_spec([b"x"], wanted)


def test_an_array_without_members_is_refused() -> None:
    with pytest.raises(BadRequest, match="without members"):
        operations.submit_array("x", [], shell=True)
    with pytest.raises(BadRequest, match="without members"):
        operations.submit_each([])


def test_values_leave_out_what_they_do_not_know() -> None:
    node = NodeInfo.of({"node": "n1", "state": "alive", "gpus": [{"id": "g"}], "later": 1})
    assert (node.node, node.gpus, node.labels) == ("n1", ({"id": "g"},), ())
    assert hash(TaskInfo.of({"id": "n1/1", "argv": ["a"]}))


def test_a_command_imports_none_of_it() -> None:
    line = "import sys, peerload, peerload.client.connection; print([name for name in sys.modules if name.startswith('peerload.client.') and name not in ('peerload.client.connection', 'peerload.client.connection') or name in ('asyncio', 'cloudpickle', 'dataclasses', 'concurrent')])"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError):
        peerload.Nothing  # noqa: B018 -- that it raises


def test_the_asyncio_client_waits_as_long_as_the_agent_says_who_it_is(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s = [0.0]
    timeout = asyncio.timeout
    monkeypatch.setattr(asyncio, "timeout", lambda _: timeout(waits_s.pop() if waits_s else PATIENCE_S))
    asked_who = threading.Event()

    def show(_request: control.Show, reply: Reply) -> None:
        assert asked_who.wait(PATIENCE_S)
        reply.error("no-such-task", "no task 9")

    def info(_request: control.Info, reply: Reply) -> None:
        reply.ok(node="ws1")
        asked_who.set()

    agent.handlers |= {"show": show, "info": info}
    with pytest.raises(NoSuchTask):
        asyncio.run(AsyncClient(agent.path).info("9"))
    assert len(agent.asked(control.Info)) == 1


def test_the_asyncio_client_gives_up_an_agent_that_says_nothing(agent: FakeAgent) -> None:
    agent.handlers |= {"nodes": lambda _request, _reply: None, "info": lambda _request, _reply: None}
    with pytest.raises(AgentSilent):
        asyncio.run(AsyncClient(agent.path, timeout_s=0.05).nodes())


# -- an agent that goes away -------------------------------------------------------------------------------------------


class Asks:
    """What a client is asked, by both kinds of clients."""

    def __init__(self, path: str, *, is_async: bool) -> None:
        self._client = Client(path)
        self._async = AsyncClient(path) if is_async else None

    def call(self, verb: str, *args: Any, **wanted: Any) -> Any:
        if self._async is None:
            return getattr(self._client, verb)(*args, **wanted)
        return asyncio.run(getattr(self._async, verb)(*args, **wanted))

    def stream(self, verb: str, *args: Any, **wanted: Any) -> list[Any]:
        async def items(client: AsyncClient) -> list[Any]:
            return [item async for item in getattr(client, verb)(*args, **wanted)]

        if self._async is None:
            return list(getattr(self._client, verb)(*args, **wanted))
        return asyncio.run(items(self._async))


@pytest.fixture(name="asks", params=["blocking", "asyncio"])
def fixture_asks(agent: FakeAgent, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Asks:
    monkeypatch.setattr(connection, "RECONNECT_EVERY_S", 0.0)
    return Asks(agent.path, is_async=request.param == "asyncio")


def task_ended(reply: Reply, *numbers: int) -> None:
    for number in numbers:
        reply.more(id=f"ws1/{number}", state="done", exit_code=0, signal=None, node="ws1", reason="")


def test_reads_and_submissions_are_repeated_when_the_agent_is_back(agent: FakeAgent, asks: Asks) -> None:
    agent.handlers["submit"] = goes_away_once(
        agent, control.Submit, lambda _: None, lambda reply: reply.ok(id="ws1/3", members=None)
    )
    assert asks.call("submit", ["true"], directory="-").id == "ws1/3"
    first, second = agent.asked(control.Submit)
    assert (first.token, first.spec) == (second.token, second.spec)
    agent.handlers["tasks"] = goes_away_once(
        agent,
        control.TasksRequest,
        lambda reply: reply.more(tasks=[{"id": "ws1/1"}]),
        lambda reply: reply.ok(tasks=[{"id": "ws1/1"}]),
    )
    assert [task.id for task in asks.call("tasks")] == ["ws1/1"]


def test_a_wait_goes_on_with_the_time_that_is_left(
    agent: FakeAgent, asks: Asks, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(1000.0, 1.0)
    for module in (connection, operations):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    def rest(reply: Reply) -> None:
        task_ended(reply, 1, 2)
        reply.ok(timed_out=False)

    agent.handlers["wait"] = goes_away_once(agent, control.Wait, lambda reply: task_ended(reply, 2), rest)
    assert [end.id for end in asks.call("wait", ["1", "2"], timeout_s=50.0)] == ["ws1/2", "ws1/1"]
    first, second = agent.asked(control.Wait)
    assert first.timeout_s == 50.0
    assert second.timeout_s < 50.0
    agent.requests.clear()
    agent.handlers["wait"] = goes_away_once(agent, control.Wait, lambda reply: task_ended(reply, 2), rest)
    assert [end.id for end in asks.stream("ended", ["1", "2"])] == ["ws1/2", "ws1/1"]


@pytest.mark.parametrize(("timeout_s", "error"), [(30.0, TimeoutError), (None, AgentUnavailable)])
def test_an_agent_that_stays_away_is_not_waited_for_any_longer(
    agent: FakeAgent, asks: Asks, monkeypatch: pytest.MonkeyPatch, timeout_s: float | None, error: type[Exception]
) -> None:
    clock = itertools.count(1000.0, 20.0)
    for module in (connection, operations):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    def stay_away(_request: control.Wait, reply: Reply) -> None:
        agent.remove()
        reply.hang_up()

    agent.handlers["wait"] = stay_away
    with pytest.raises(error, match=f"no socket at {agent.path}"):
        asks.call("wait", ["1"], timeout_s=timeout_s)
    assert next(clock) >= 1000.0 + (timeout_s or connection.RECONNECT_S_MAX)


def test_an_agent_that_was_never_there_is_not_waited_for(agent: FakeAgent, asks: Asks) -> None:
    agent.answer("nodes", nodes=[])
    agent.remove()
    with pytest.raises(AgentUnavailable):
        asks.call("nodes")


def test_an_agent_that_goes_between_two_calls_is_waited_for(
    agent: FakeAgent, asks: Asks, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.answer("nodes", nodes=[])
    assert asks.call("nodes") == []
    clock = itertools.count(1000.0, 20.0)
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    agent.remove()
    with pytest.raises(AgentUnavailable):
        asks.call("nodes")
    assert (waited_until_s := next(clock)) >= 1000.0 + connection.RECONNECT_S_MAX
    with pytest.raises(AgentUnavailable):
        asks.call("nodes")
    assert next(clock) <= waited_until_s + 40.0


def test_output_and_events_go_on_where_they_were(agent: FakeAgent, asks: Asks) -> None:
    def output(reply: Reply) -> None:
        reply.more(stream=1, offset=0, data=b"abcdefgh", attempt=1)
        reply.more(stream=1, offset=0, data=b"again", attempt=2)
        reply.ok(id="ws1/1", state="done", stdout_bytes=5, stderr_bytes=0)

    agent.handlers["output"] = goes_away_once(
        agent, control.ReadOutput, lambda reply: reply.more(stream=1, offset=0, data=b"abc", attempt=1), output
    )
    pieces = asks.stream("follow", "1")
    assert [(piece.offset, piece.data) for piece in pieces] == [(0, b"abc"), (3, b"defgh"), (0, b"again")]

    def begin(reply: Reply) -> None:
        reply.more(events=[], begins=6)
        reply.more(events=[{"number": 7}, {"number": 9}])

    def rest(reply: Reply) -> None:
        reply.more(events=[], begins=9)
        reply.ok(events=[{"number": 12}])

    agent.handlers["events"] = goes_away_once(agent, control.Events, begin, rest)
    assert [event.number for event in asks.stream("events", follow=True, limit=2)] == [7, 9, 12]
    assert [(one.after, one.limit) for one in agent.asked(control.Events)] == [(0, 2), (9, connection.EVENTS_MAX)]


def test_what_may_do_something_else_the_second_time_is_not_repeated(agent: FakeAgent, asks: Asks) -> None:
    agent.handlers["wait"] = goes_away_once(agent, control.Wait, lambda _: None, lambda reply: reply.ok())
    with pytest.raises(AgentUnavailable):
        asks.call("wait", "@")
    assert len(agent.asked(control.Wait)) == 1
    agent.handlers["cancel"] = goes_away_once(
        agent, control.Cancel, lambda _: None, lambda reply: reply.ok(cancelled=["ws1/1"], already_ended=[])
    )
    with pytest.raises(AgentUnavailable):
        asks.call("cancel", "1")
    assert len(agent.asked(control.Cancel)) == 1


def test_a_client_too_many_waits_for_room(agent: FakeAgent, asks: Asks, monkeypatch: pytest.MonkeyPatch) -> None:
    agent.answer("nodes", nodes=[])
    agent.refused = {1, 2}
    assert asks.call("nodes") == []
    clock = itertools.count(1000.0, 20.0)
    monkeypatch.setattr(connection, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    agent.refused = set(range(100))
    with pytest.raises(BadRequest, match="too many clients"):
        asks.call("nodes")
    assert next(clock) >= 1000.0 + connection.RECONNECT_S_MAX


def test_a_token_of_ones_own_names_a_submission() -> None:
    assert operations.submit_fields([b"x"], {"token": "nightly-1"})["token"] == "nightly-1"
    with pytest.raises(TypeError):
        Executor("/nowhere", token="nightly-1")


# -- the thread of an executor -----------------------------------------------------------------------------------------


class Calls:
    """The tasks of an executor's calls at a fake agent. ``gates``: by number of a task, set once it may end; ``bodies``: what `wait`
    says of its output."""

    def __init__(self, agent: FakeAgent) -> None:
        self._numbers = itertools.count(1)
        self.gates = {number: threading.Event() for number in range(1, 20)}
        self.bodies: dict[str, dict[str, Any]] = {}
        agent.answer("info", node="ws1")
        agent.answer("attend", attended=True)
        agent.handlers |= {"submit": self._submit, "wait": self._wait, "cancel": self._cancel}

    def _submit(self, _request: control.Submit, reply: Reply) -> None:
        reply.ok(id=f"ws1/{next(self._numbers)}", members=None, directory_here=True, placeable=None)

    def _wait(self, request: control.Wait, reply: Reply) -> None:
        (task,) = request.tasks
        self.gates[int(task.rpartition("/")[2])].wait(PATIENCE_S)
        ended = {"id": task, "state": "failed", "exit_code": 7, "signal": None, "reason": "", "node": "ws1"}
        reply.more(**(ended | self.bodies.get(task, {"stdout": b"", "stderr": b""})))
        reply.ok(timed_out=False)

    def _cancel(self, request: control.Cancel, reply: Reply) -> None:
        (task,) = request.tasks
        reply.ok(cancelled=[task], already_ended=[])
        self.gates[int(task.rpartition("/")[2])].set()


def exit_code(future: concurrent.futures.Future[Any]) -> int | None:
    failure = future.exception(PATIENCE_S)
    assert isinstance(failure, call.TaskFailed), failure
    return failure.exit_code


def test_a_refused_connection_makes_calls_wait_and_fails_none(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first connection is refused, and later the second that many calls need."""
    monkeypatch.setattr(executor, "CALLS_A_SESSION", 2)
    monkeypatch.setattr(executor, "FULL_RETRY_S", 0.01)
    calls = Calls(agent)
    agent.refused = {1, *range(3, 100_000)}
    with Executor(agent.path) as pool:
        futures = [pool.submit(abs, number) for number in range(4)]
        wait_until(lambda: len(agent.asked(control.Wait)) == 2, what="two calls to be submitted")
        calls.gates[1].set()
        wait_until(lambda: len(agent.asked(control.Wait)) == 3, what="a third in the room of the first")
        agent.refused.clear()
        wait_until(lambda: len(agent.asked(control.Wait)) == 4, what="the fourth on a second connection")
        for gate in calls.gates.values():
            gate.set()
        assert [exit_code(future) for future in futures] == [7] * 4


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_an_output_that_cannot_be_read_now_is_read_later(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    monkeypatch.setattr(executor, "FULL_RETRY_S", 0.01)
    calls = Calls(agent)
    agent.refused = {2, 3}

    def output(request: control.ReadOutput, reply: Reply) -> None:
        assert request.streams == ((1,) if stream == "stdout" else (2,))
        reply.more(stream=request.streams[0], offset=0, data=b"no result")
        reply.ok(id="ws1/1")

    agent.handlers["output"] = output
    calls.bodies["ws1/1"] = {"stdout": b"", "stderr": b"", f"{stream}_bytes": 9}
    del calls.bodies["ws1/1"][stream]
    with Executor(agent.path) as pool:
        futures = [pool.submit(abs, number) for number in range(2)]
        calls.gates[1].set()
        assert exit_code(futures[0]) == 7
        calls.gates[2].set()
        assert exit_code(futures[1]) == 7
    assert agent.asked(control.ReadOutput)


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An exception that refuses assignments."""


class Exits:
    """A value that raises SystemExit when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return sys.exit, (3,)


@pytest.mark.parametrize(
    ("outcome", "error"),
    [(call.failure_of(Frozen(), "the traceback"), Frozen), ({"value": Exits()}, SystemExit)],
    ids=["refuses assignments", "exits when it is read"],
)
def test_a_strange_outcome_fails_its_own_call_and_no_other(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, outcome: dict[str, Any], error: type[BaseException]
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: MARK)
    calls = Calls(agent)
    calls.bodies["ws1/1"] = {"stdout": call.packed_outcome(MARK, outcome), "stderr": b""}
    with Executor(agent.path) as pool:
        strange, other = pool.submit(abs, 1), pool.submit(abs, 2)
        wait_until(lambda: len(agent.asked(control.Wait)) == 2, what="both calls to be submitted")
        calls.gates[1].set()
        raised = strange.exception(PATIENCE_S)
        assert isinstance(raised, error)
        assert error is SystemExit or isinstance(raised.__cause__, call.RemoteTraceback)
        calls.gates[2].set()
        assert exit_code(other) == 7


def test_an_exception_that_refuses_assignments_is_sent() -> None:
    def fails() -> None:
        raise Frozen

    outcome = function._outcome(cloudpickle.dumps((fails, (), {})))
    assert isinstance(outcome["error"], Frozen)
    assert "in fails" in outcome["traceback"]


@pytest.mark.parametrize(
    "error",
    [
        call.TaskFailed("n1/3", "ended", why="it was killed", signal=9),
        call.RemoteError("KeyError", "'x'"),
        OutputIncomplete("n1/3", 5, why="it was removed"),
        SlowDown("too many", retry_after_s=3.0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: Exception) -> None:
    """A worker of multiprocessing raises them, and so does a function on a node that is a client itself."""
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_all_pending_calls_fail_where_one_has_just_ended() -> None:
    link = executor.ExecutorLink("/nowhere", {})
    futures = [executor.TaskFuture[int](link) for _ in range(3)]
    made = [executor.PendingCall(future, MARK, {}, b"", "pickle") for future in futures]
    link._calls = {id(one): one for one in made}
    made[0].is_over = True
    futures[0].finish(value=1)
    link._fail_all(RuntimeError("refused"))
    assert futures[0].result(0) == 1
    assert all(isinstance(future.exception(0), RuntimeError) for future in futures[1:])


def test_a_map_is_whole_when_its_executor_is_shut_down(agent: FakeAgent) -> None:
    """As of the executors of the standard library, which submit all inputs at once."""
    calls = Calls(agent)
    for gate in calls.gates.values():
        gate.set()
    with Executor(agent.path, tasks_max=2) as pool:
        results = pool.map(abs, range(5))
        pool.map(abs, range(4))
        few = pool.map(abs, range(9), buffersize=1)
    assert len(agent.asked(control.Submit)) == 5 + 4 + 1
    with pytest.raises(call.TaskFailed):
        next(results)
    with pytest.raises(call.TaskFailed):
        next(few)
    with pytest.raises(RuntimeError):
        pool.map(abs, range(1))


def test_cancel_does_not_wait_for_who_is_called_back(agent: FakeAgent) -> None:
    """The callback waits for the end of the task, which needs the cancellation."""
    calls = Calls(agent)
    pool = Executor(agent.path)
    future = pool.submit(abs, -1)
    over = threading.Event()

    def called(_: concurrent.futures.Future[int]) -> None:
        pool.shutdown(wait=True)
        over.set()

    future.add_done_callback(called)
    wait_until(lambda: agent.asked(control.Wait), what="the call to be submitted")
    assert future.cancel()
    assert future.cancelled()
    assert calls.gates[1].wait(PATIENCE_S)
    assert over.wait(PATIENCE_S)
