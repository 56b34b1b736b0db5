"""The Python interface against real agents: `Client`, `AsyncClient` and `Executor`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peerload import AsyncClient, Client, Executor
from peerload.client.call import RESULT_BYTES_MAX, RemoteError, RemoteTraceback, TaskFailed
from peerload.client.executor import PendingCall, _Session
from peerload.model.errors import AgentUnavailable, BadRequest, NoSuchTask, OutputIncomplete
from tests.integration.cluster import ROOT, Agent, Cluster
from tests.integration.shared import bring_back, restart
from tests.support import in_short, wait_until
from tests.wording import Says

UNFINISHED = {"queued", "leased", "running", "held"}


@pytest.fixture(scope="module")
def agents() -> Iterator[list[Agent]]:
    with Cluster() as cluster:
        yield cluster.linked(2, slots=3)


@pytest.fixture(scope="module")
def agent(agents: list[Agent]) -> Agent:
    return agents[0]


@pytest.fixture
def executor(agent: Agent) -> Iterator[Executor]:
    with Executor(agent.socket) as made:
        yield made


# -- Client ------------------------------------------------------------------------------------------------------------


def test_a_client_submits_waits_and_reads(agent: Agent) -> None:
    client = Client(agent.socket)
    task = client.submit(["sh", "-c", "echo out; echo err >&2; exit 3"], name="mine", mem="64M", cpus=0.5)
    ended = task.wait(timeout_s=60)
    assert (ended.state, ended.exit_code, ended.succeeded) == ("failed", 3, False)
    assert (task.output().stdout, task.output().stderr) == (b"out\n", b"err\n")
    info = task.info()
    assert (info.name, info.mem_bytes, info.cpus, info.argv[0]) == ("mine", 64 << 20, 0.5, "sh")
    assert info in client.tasks()
    assert task.why().state == "failed"
    assert client.submit("echo $((2*3))", shell=True, directory="-").wait(60).succeeded
    assert {node.node for node in client.nodes()} == {"n1", "n2"}
    assert [event.task for event in client.events(limit=1000, tasks=[task])][-1] == task.id


def test_a_client_gets_all_of_an_output_or_is_told_what_is_missing(agent: Agent) -> None:
    client = Client(agent.socket)
    task = client.submit(["head", "-c", "20000000", "/dev/zero"])
    task.wait(timeout_s=60)
    assert len(task.output().stdout) == 20_000_000
    cut = client.task(agent.submit("head", "-c", "20000000", "/dev/zero"))
    cut.wait(timeout_s=60)
    with pytest.raises(OutputIncomplete) as told:
        cut.output()
    assert told.value.task == cut.id
    assert 0 <= 20_000_000 - (16 << 20) - told.value.missing_bytes < 4096, "whole blocks are given back"
    with pytest.raises(OutputIncomplete):
        asyncio.run(AsyncClient(agent.socket).output(cut.id))


def test_a_client_knows_arrays(agent: Agent) -> None:
    client = Client(agent.socket)
    array = client.submit_array(["sh", "-c", "exit $PEERLOAD_ARRAY_INDEX"], [0, 1, 2, 5])
    assert sorted(end.exit_code or 0 for end in client.wait([array], timeout_s=60)) == [0, 1, 2, 5]
    assert array.members[3].wait().exit_code == 5
    each = client.submit_each([["echo", "a b"], ["sh", "-c", "exit 4"]])
    assert {end.id: end.exit_code for end in client.ended([each])} == {f"{each.id}.1": 0, f"{each.id}.2": 4}
    assert each.members[0].output().stdout == b"a b\n"
    with pytest.raises(ValueError, match="array of 2"):
        each.wait()


def test_a_client_cancels_follows_and_gives_up(agent: Agent) -> None:
    client = Client(agent.socket)
    task = client.submit("echo up; sleep 60", shell=True)
    pieces = client.follow(task)
    assert next(pieces).data == b"up\n"
    with pytest.raises(TimeoutError):
        task.wait(timeout_s=0.05)
    assert task.cancel()
    assert not task.cancel()
    assert task.wait(60).state == "cancelled"
    assert list(pieces) == []
    assert client.wait([]) == []


def test_what_a_client_refuses(agent: Agent) -> None:
    client = Client(agent.socket)
    with pytest.raises(NoSuchTask):
        client.task("99999").info()
    for words, wanted, kind in (
        ("echo hi", {}, TypeError),
        ([], {}, BadRequest),
        (["true"], {"mem": "8"}, BadRequest),
        (["true"], {"once": True, "fast": True}, BadRequest),
        (["true"], {"colour": "red"}, TypeError),
        (["a\0b"], {}, BadRequest),
        (["true"], {"node": "nowhere"}, BadRequest),
    ):
        with pytest.raises(kind):
            client.submit(words, **wanted)
    with pytest.raises(AgentUnavailable):
        Client("/does/not/exist").nodes()


def test_the_async_client_does_the_same(agent: Agent) -> None:
    async def main() -> None:
        async with AsyncClient(agent.socket) as client:
            task = await client.submit("echo out; echo err >&2", shell=True)
            assert (await task.wait(60)).succeeded
            assert (await task.output()).stderr == b"err\n"
            assert (await task.info()).state == "done"
            assert (await task.why()).id == task.id
            array = await client.submit_array(["sh", "-c", "exit $PEERLOAD_ARRAY_INDEX"], range(3))
            assert {end.exit_code async for end in client.ended([array])} == {0, 1, 2}
            each = await client.submit_each([["true"], ["false"]])
            assert len(await client.wait([each])) == 2
            sleeps = await client.submit(["sleep", "60"])
            with pytest.raises(TimeoutError):
                await sleeps.wait(0.05)
            many = await asyncio.gather(*(client.submit(["true"]) for _ in range(20)))
            assert len(await client.wait(many)) == 20
            assert await sleeps.cancel()
            assert [piece async for piece in client.follow(sleeps)] == []
            assert sleeps.id in {task.id for task in await client.tasks()}
            assert len(await client.nodes()) == 2
            assert [event async for event in client.events(limit=2)]
            with pytest.raises(NoSuchTask):
                await client.info("99999")
        with pytest.raises(AgentUnavailable):
            await AsyncClient("/does/not/exist").nodes()

    asyncio.run(main())


# -- Executor ----------------------------------------------------------------------------------------------------------


def test_calls_run_on_the_cluster(executor: Executor, agent: Agent) -> None:
    assert list(executor.map(pow, [2, 3], [5, 2])) == [32, 9]
    assert "pow" in {task["name"] for task in agent.call("tasks")["tasks"]}
    offset = 5

    def added(x: int, *, y: int) -> int:
        return x + y + offset

    assert executor.submit(added, 1, y=2).result(60) == 8
    future = executor.submit(os.getenv, "PEERLOAD_NODE")
    assert concurrent.futures.wait([future], timeout=60).done == {future}
    assert future.result() in {"n1", "n2"}
    assert list(executor.map(str, range(5), chunksize=4)) == [str(number) for number in range(5)]
    inputs = iter(range(5))
    results = executor.map(str, inputs, buffersize=1)
    assert (next(results), next(inputs)) == ("0", 2)  # one is under way, and the rest is not read so far
    assert list(results) == ["1", "3", "4"]
    with pytest.raises(ValueError, match="buffersize"):
        executor.map(str, inputs, buffersize=0)


def test_the_resources_asked_for_are_those_of_the_tasks(agent: Agent) -> None:
    with Executor(
        agent.socket, node="n2", cpus=2, mem="1G", name="sweep", environment={"PATH": "/bin", "X": "1"}
    ) as executor:
        future = executor.submit(os.getenv, "X")
        assert future.result(60) == "1"
        info = Client(agent.socket).info(future.task)
    assert (info.node, info.cpus, info.mem_bytes, info.name) == ("n2", 2, 1 << 30, "sweep")


def test_exceptions_carry_the_remote_traceback(executor: Executor) -> None:
    def divide(by: int) -> float:
        return 1 / by

    future = executor.submit(divide, 0)
    with pytest.raises(ZeroDivisionError) as caught:
        future.result(60)
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "return 1 / by" in str(caught.value.__cause__)
    with pytest.raises(SystemExit):
        executor.submit(sys.exit, 3).result(60)

    def endless(depth: int) -> int:
        return endless(depth + 1)

    with pytest.raises(RecursionError):
        executor.submit(endless, 0).result(60)


@pytest.mark.rule("C1")
def test_results_come_back_as_json_where_that_is_wanted(agent: Agent) -> None:
    def divide(by: int) -> float:
        return 1 / by

    with Executor(agent.socket, serializer="json") as executor:
        assert list(executor.map(lambda number: {"twice": 2 * number}, [1])) == [{"twice": 2}]
        with pytest.raises(RemoteError) as caught:
            executor.submit(divide, 0).result(60)
        assert caught.value.kind == "ZeroDivisionError"
        assert "return 1 / by" in str(caught.value.__cause__)
        with pytest.raises(RemoteError) as caught:
            executor.submit(bytes, 3).result(60)
        assert (caught.value.kind, "bytes" in caught.value.text) == ("TypeError", True)
    with pytest.raises(ValueError, match="serializer"):
        Executor(agent.socket, serializer="yaml")  # type: ignore[arg-type]


def test_what_cannot_travel_is_said(executor: Executor) -> None:
    with pytest.raises(TypeError, match="cannot pickle"):
        executor.submit(len, threading.Lock()).result(60)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pickle .*generator"):
        executor.submit(lambda: (number for number in [1])).result(60)
    with pytest.raises(ValueError, match="5242880"):
        executor.submit(lambda: b"x" * (RESULT_BYTES_MAX + 1)).result(60)

    class Odd(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__("odd")

    def odd() -> None:
        raise Odd(1, 2)

    with pytest.raises(RuntimeError, match="Odd: odd"):  # pickled well, and cannot be read again
        executor.submit(odd).result(60)


def test_large_arguments_and_results_and_much_talk(executor: Executor) -> None:
    size = 4 << 20
    assert executor.submit(len, b"x" * (3 * size)).result(60) == 3 * size
    assert len(executor.submit(lambda: os.urandom(size)).result(60)) == size

    def talk() -> str:
        for _ in range(40):
            os.write(1, b"peerload-result 0 3 abc\n" * 25_000)  # 24 MB: more than is captured
        sys.stdout.write("no line end")
        return "said"

    assert executor.submit(talk).result(60) == "said"


def test_a_task_that_ends_without_a_result_says_how(agent: Agent, executor: Executor) -> None:
    with pytest.raises(TaskFailed, match="exit code 3") as caught:
        executor.submit(os._exit, 3).result(60)
    assert caught.value.exit_code == 3

    def die() -> None:
        os.write(2, b"last words\n")
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(TaskFailed, match="signal 9") as caught:
        executor.submit(die).result(60)
    assert "last words" in str(caught.value)
    with Executor(agent.socket, time_limit_s=0.3) as hasty, pytest.raises(TaskFailed, match="time limit"):
        hasty.submit(time.sleep, 60).result(60)
    with Executor(agent.socket, python="/does/not/exist") as wrong, pytest.raises(TaskFailed, match="127"):
        wrong.submit(abs, 1).result(60)
    with Executor(agent.socket, node="nowhere") as nowhere, pytest.raises(BadRequest):
        nowhere.submit(abs, 1).result(60)


def test_an_interpreter_without_peerload_or_of_another_version_is_named(agent: Agent, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with Executor(agent.socket, python=str(bare)) as executor, pytest.raises(TaskFailed, match=Says.NO_PEERLOAD()):
        executor.submit(abs, 1).result(60)
    other = tmp_path / "other"
    other.write_text(
        f"#!{sys.executable}\nimport sys\nfrom peerload.client import call, function\ncall.PYTHON = [3, 8]\nsys.exit(function.main())\n"
    )
    other.chmod(0o755)
    with Executor(agent.socket, python=str(other)) as executor, pytest.raises(RuntimeError, match=r"Python 3\.8"):
        executor.submit(abs, 1).result(60)


def test_running_calls_are_cancelled(agent: Agent, tmp_path: Path) -> None:
    started = tmp_path / "started"

    def long() -> None:
        started.touch()
        time.sleep(600)

    with Executor(agent.socket) as executor:
        future = executor.submit(long)
        wait_until(started.exists, what="the function to run")
        called: list[Any] = []
        future.add_done_callback(called.append)
        assert future.cancel()
        assert future.cancel()
        assert future.cancelled()
        assert called == [future]
        with pytest.raises(concurrent.futures.CancelledError):
            future.result(1)
        wait_until(lambda: agent.show(future.task)["state"] == "cancelled", what="the task to be cancelled")
        done = executor.submit(abs, -1)
        assert done.result(60) == 1
        assert not done.cancel()
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.submit(abs, 1)


def test_shutdown_waits_or_cancels(agent: Agent) -> None:
    executor = Executor(agent.socket, node="n1")
    futures = [executor.submit(time.sleep, 600) for _ in range(8)]
    executor.shutdown(cancel_futures=True)
    assert all(future.cancelled() for future in futures)
    wait_until(lambda: not UNFINISHED & set(agent.states().values()), what="all to be cancelled")
    executor = Executor(agent.socket)
    future = executor.submit(time.sleep, 0.2)
    executor.shutdown()
    assert future.done()


def test_no_more_than_so_many_are_under_way(agent: Agent) -> None:
    most = 0
    with Executor(agent.socket, tasks_max=2, name="few") as executor:
        endless = executor.map(lambda number: number * 2, iter(int, 1))  # inputs without end
        for _ in range(4):
            assert next(endless) == 0
            few = [task["state"] for task in agent.call("tasks")["tasks"] if task["name"] == "few"]
            most = max(most, sum(state in UNFINISHED for state in few))
        endless.close()  # type: ignore[attr-defined]
    assert most <= 2


def test_a_call_survives_its_agent(agents: list[Agent], tmp_path: Path) -> None:
    home, gate = agents[0], tmp_path / "gate"

    def nodes() -> set[str]:
        tasks = home.call("tasks")["tasks"]
        return {task["node"] for task in tasks if (task["name"], task["state"]) == ("slow", "running")}

    def slow(number: int) -> int:
        while not gate.exists():
            time.sleep(0.05)
        return number

    with Executor(home.socket, name="slow") as executor:
        futures = [executor.submit(slow, number) for number in range(5)]  # n1 has room for three
        wait_until(lambda: nodes() == {"n1", "n2"}, what="both nodes to be at work")
        restart(agents)
        gate.touch()
        assert [future.result(60) for future in futures] == list(range(5))
    assert [task["state"] for task in home.call("tasks")["tasks"] if task["name"] == "slow"] == ["done"] * 5


def test_a_result_is_fetched_again_if_the_agent_goes_away_meanwhile(
    agents: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = _Session._tail
    fetched: list[int] = []

    def fetch_from_the_dead(session: _Session, made: PendingCall, stream: int, size: int) -> bytes:
        if not fetched:
            agents[0].kill()
        fetched.append(stream)  # it is started again when this is seen
        return fetch(session, made, stream, size)

    monkeypatch.setattr(_Session, "_tail", fetch_from_the_dead)
    with Executor(agents[0].socket) as executor:
        future = executor.submit(bytes, 300_000)
        wait_until(lambda: bool(fetched), what="the result to be fetched")
        bring_back(agents)
        assert future.result(60) == bytes(300_000)
    assert len(fetched) == 2


def test_clients_go_on_after_a_restart_of_their_agent(agents: list[Agent], tmp_path: Path) -> None:
    home = agents[0]
    client, gate = Client(home.socket), tmp_path / "gate"
    script = f"echo before; until [ -e {gate} ]; do sleep 0.05; done; echo after"
    task = client.submit(script, shell=True, node="n2", directory="/")

    async def output() -> bytes:
        return b"".join([piece.data async for piece in AsyncClient(home.socket).follow(task)])

    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting, follows = pool.submit(task.wait, 60), pool.submit(asyncio.run, output())
        pieces = client.follow(task)
        assert next(pieces).data == b"before\n"
        restart(agents)
        gate.touch()
        assert b"".join(piece.data for piece in pieces) == b"after\n"
        assert waiting.result(60).succeeded
        assert follows.result(60) == b"before\nafter\n"


def test_a_callback_may_submit_and_shut_down(agent: Agent) -> None:
    executor = Executor(agent.socket, tasks_max=1)
    after: list[object] = []
    over = threading.Event()

    def called(future: concurrent.futures.Future[int]) -> None:
        more = [executor.submit(abs, number) for number in (-1, -2, -3)]  # the second waits for the first
        after.extend([future.result(), *(one.result(60) for one in more)])
        executor.shutdown(wait=True)
        over.set()

    executor.submit(abs, -7).add_done_callback(called)
    assert over.wait(60)
    executor.shutdown()
    assert after == [7, 1, 2, 3]


def test_shutdown_waits_for_those_who_are_called_back(agent: Agent) -> None:
    executor = Executor(agent.socket)
    said: list[int] = []

    def called(future: concurrent.futures.Future[int]) -> None:
        executor.shutdown(wait=True)
        said.append(future.result())

    for number in range(3):
        executor.submit(abs, number).add_done_callback(called)
    executor.shutdown()
    assert sorted(said) == [0, 1, 2]


def test_what_is_known_where_it_runs_is_told_while_home_is_away(agents: list[Agent]) -> None:
    home, other = agents
    task = home.submit("sh", "-c", "echo here; exec sleep 600", placement={"node": "n2"})
    home.await_state(task, "running")
    client = Client(other.socket)
    wait_until(lambda: client.output(task).stdout == b"here\n", what="its output")
    home.kill()
    try:
        wait_until(lambda: other.peers_alive() == {"n2"}, what="its home to be missed")
        assert client.output(task).stdout == b"here\n"
        assert asyncio.run(AsyncClient(other.socket).output(task)).stdout == b"here\n"
    finally:
        bring_back(agents)
    home.call("cancel", tasks=[task])


def test_calls_end_with_their_program(agent: Agent) -> None:
    program = (
        "import sys, time\nfrom peerload import Executor\n"
        "e = Executor(sys.argv[1], name='orphan')\nf = [e.submit(time.sleep, 600) for _ in range(3)]\n"
        "while not all(x.task for x in f): time.sleep(0.01)\nprint('up', flush=True)\ntime.sleep(600)\n"
    )

    def orphans() -> list[str]:
        return [task["state"] for task in agent.call("tasks")["tasks"] if task["name"] == "orphan"]

    with subprocess.Popen([sys.executable, "-c", program, agent.socket], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.kill()
    wait_until(lambda: orphans() == ["cancelled"] * 3, what="its tasks to be cancelled")


def test_without_an_agent_the_future_says_so(tmp_path: Path) -> None:
    with Executor(str(tmp_path / "sock")) as executor, pytest.raises(AgentUnavailable):
        executor.submit(abs, 1).result(60)


def test_the_line_of_the_readme(agent: Agent) -> None:
    line = "from peerload import Executor; print(list(Executor().map(pow, [2,3], [5,2])))"
    done = subprocess.run(
        [sys.executable, "-c", line],
        env={**os.environ, "PEERLOAD_SOCKET": agent.socket},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[32, 9]\n", "")


def test_the_examples_of_the_page_run(agent: Agent, tmp_path: Path) -> None:
    """Each block of docs/python.md is a program of its own."""
    text = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 4
    for number, block in enumerate(blocks):
        script = tmp_path / f"example{number}.py"
        script.write_text(block, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**os.environ, "PEERLOAD_SOCKET": agent.socket},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        for shown in re.findall(r"#: (.*)", block):
            assert shown in done.stdout, block


@pytest.mark.long
@pytest.mark.parametrize("calls", in_short([200, 1100], 2))
def test_a_thousand_calls_under_way_are_no_trouble(agent: Agent, calls: int) -> None:
    with Executor(agent.socket, tasks_max=calls + 100, held=True) as executor:
        futures = [executor.submit(abs, -number) for number in range(calls)]
        wait_until(lambda: all(future.task for future in futures), what="all to be submitted")
        assert all(future.cancel() for future in futures)
    wait_until(lambda: not UNFINISHED & set(agent.states().values()), what="all to be cancelled")
