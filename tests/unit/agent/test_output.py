"""Ends of attempts on their way to the inbox and to followers; output that its task has spoiled."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import os
import shutil
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from peerload.agent import event_sources
from peerload.agent.effects import ResultEffects
from peerload.agent.event_sources import SHORT_PAUSE_S_MAX, ExitRecords, ExitSettler, LauncherEvents
from peerload.agent.output import output as output_module
from peerload.agent.output import spool as spool_module
from peerload.agent.output.output import TaskOutputs
from peerload.agent.output.spool import Spool, open_output
from peerload.agent.requests.output_and_wait import OutputSource
from peerload.agent.runtime import BackgroundTasks, RunState, TaskWatches
from peerload.core.membership.peers import PeerState
from peerload.core.work import RemotePhase
from peerload.model import events
from peerload.model.actions import FetchOutput, KeepOutput
from peerload.model.errors import PeerloadError
from peerload.model.messages import OutputChunk, OutputEnd, OutputRequest
from peerload.model.task import (
    ExecutionRecord,
    ExecutionState,
    Exit,
    TaskSpec,
    TaskState,
    TerminalSize,
    execution_key,
)
from tests.each import each
from tests.support import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

UID = b"\x01" * 16
KEY = execution_key(UID, 1)
NOBODY = 65534


def _spool(state: Path) -> Spool:
    return Spool(state)


@contextlib.contextmanager
def ordinary_user() -> Iterator[Path]:
    """A state directory, and for this while no rights but those of an ordinary user."""
    state = Path(tempfile.mkdtemp(dir="/tmp"))
    is_root = os.geteuid() == 0
    try:
        if is_root:
            os.chown(state, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        yield state
    finally:
        if is_root:
            os.seteuid(0)
        shutil.rmtree(state)


def test_the_right_to_read_its_output_is_restored() -> None:
    with ordinary_user() as state:
        spool = _spool(state)
        spool.keep(KEY, b"hi\n", b"")
        exit_ = Exit(3, stdout_bytes=3)
        spool.path(KEY, 1).chmod(0)
        assert spool.settle([(KEY, exit_)]) == ((KEY, exit_),)
        spool.path(KEY, 1).chmod(0)
        assert spool.read_small(KEY, 3, 0) == (b"hi\n", b"")


@pytest.mark.rule("F1")
@each("kind", ["directory", "pipe", "link", "nothing"])
def test_what_is_no_file_has_size_0_and_a_reason(tmp_path: Path, kind: str) -> None:
    spool = _spool(tmp_path)
    spool.keep(KEY, b"", b"err")
    path = spool.path(KEY, 1)
    if kind == "directory":
        path.mkdir()
        (path / "more").mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/etc/passwd")
    ((_, exit_),) = spool.settle([(KEY, Exit(3, reason="before", stdout_bytes=4096, stderr_bytes=3))])
    assert (exit_.exit_code, exit_.stdout_bytes, exit_.stderr_bytes) == (3, 0, 3)
    assert exit_.reason.startswith("before; ")
    assert spool.sizes(KEY) == (0, 3)
    assert spool.read_small(KEY, 4096, 3) == (b"", b"err")
    spool.drop(KEY)
    assert not list(spool.directory.iterdir())


def test_what_is_written_on_after_the_end_does_not_count(tmp_path: Path) -> None:
    spool = _spool(tmp_path)
    spool.keep(KEY, b"hi, and what its process has left behind says later", b"")
    exit_ = Exit(0, stdout_bytes=2)
    assert spool.settle([(KEY, exit_)]) == ((KEY, exit_),)


@each("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
def test_for_want_of_descriptors_or_memory_no_output_is_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    spool = _spool(tmp_path)
    spool.keep(KEY, b"hi", b"")

    def refuse(_path: Path) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as short:
        short.setattr(spool_module, "open_output", refuse)
        with pytest.raises(OSError, match=os.strerror(number)):
            spool.settle([(KEY, Exit(0, stdout_bytes=2))])
    assert spool.settle([(KEY, Exit(0, stdout_bytes=2))]) == ((KEY, Exit(0, stdout_bytes=2)),)


class Links:
    """A peer that sends these pieces and then nothing for ever."""

    def __init__(self, *pieces: OutputChunk | OutputEnd) -> None:
        self.pieces = pieces
        self.open = 0

    async def fetch_output(self, _node: str, _request: OutputRequest) -> AsyncIterator[OutputChunk | OutputEnd]:
        """The pieces."""
        self.open += 1
        try:
            for piece in self.pieces:
                yield piece
            await asyncio.Event().wait()
        finally:
            self.open -= 1


def _output(spool: Spool, guests: dict[str, Any], links: Links | None = None) -> TaskOutputs:
    return TaskOutputs(
        spool,
        cast("Any", SimpleNamespace(executor=SimpleNamespace(remote_tasks=guests), home=SimpleNamespace(tasks={}))),
        cast("Any", links or Links()),
        cast("Any", SimpleNamespace(signal=lambda _key, _number: None)),
        collections.Counter(),
    )


def test_bringing_home_what_never_comes_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_module, "SILENCE_S_MAX", 0.1)

    async def story() -> None:
        links = Links(OutputChunk(1, 0, b"part"))
        output = _output(_spool(tmp_path), {}, links)
        async with asyncio.timeout(PATIENCE_S):
            why, missing = await output.bring_home(FetchOutput(KEY, "n1/1", UID, 1, "n2", 8, 0))
        assert (bool(why), missing) == (True, (0, 0))
        assert not links.open
        monkeypatch.setattr(output_module, "SILENCE_S_MAX", PATIENCE_S)
        links.pieces = (OutputChunk(1, 4, b"rest"), OutputEnd(8, 0))
        assert await output.bring_home(FetchOutput(KEY, "n1/1", UID, 1, "n2", 8, 0)) == ("", (0, 0))

        short = execution_key(UID, 2)
        links.pieces = (OutputChunk(1, 0, b"part"), OutputEnd(8, 3))
        assert await output.bring_home(FetchOutput(short, "n1/1", UID, 2, "n2", 8, 3)) == ("", (4, 3))

    asyncio.run(story())


def test_serving_ends_when_the_guest_is_gone(tmp_path: Path) -> None:
    async def story() -> None:
        spool = _spool(tmp_path)
        spool.keep(KEY, b"so far", b"")
        guests = {KEY: SimpleNamespace(home="n2", exit=None, phase=RemotePhase.HERE)}
        output = _output(spool, guests)
        served = output.serve_output("n2", OutputRequest("n2/1", UID, 1, 0, 0, follow=True))
        try:
            async with asyncio.timeout(PATIENCE_S):
                assert await anext(served) == OutputChunk(1, 0, b"so far")
                output.remote_attempts_gone()  # it is still here
                del guests[KEY]
                output.remote_attempts_gone()
                assert [piece async for piece in served] == [OutputEnd(6, 0)]
        finally:
            assert spool.inotify is not None
            spool.inotify.close()

    asyncio.run(story())


def test_an_attempt_waits_once_for_a_home_that_comes_and_goes_and_not_after_the_close(tmp_path: Path) -> None:
    async def story() -> None:
        spool = _spool(tmp_path)
        spool.keep(KEY, b"so far", b"")
        output = _output(spool, {KEY: SimpleNamespace(home="n2", exit=None, phase=RemotePhase.HERE)})

        async def reads_and_leaves() -> int:
            before = len(asyncio.all_tasks())
            async with contextlib.aclosing(
                cast("Any", output.serve_output("n2", OutputRequest("n2/1", UID, 1, 0, 0, follow=True, paced=True)))
            ) as served:
                assert await anext(served) == OutputChunk(1, 0, b"so far")
            for _ in range(10):
                await asyncio.sleep(0)
            return len(asyncio.all_tasks()) - before

        try:
            assert await reads_and_leaves() > 0
            assert [await reads_and_leaves() for _ in range(3)] == [0, 0, 0]
            await output.close()
            assert await reads_and_leaves() == 0
        finally:
            assert spool.inotify is not None
            spool.inotify.close()

    asyncio.run(story())


@each(
    ("terms", "is_held"),
    [({"followed": True}, True), ({}, False), ({"followed": True, "terminal": TerminalSize(24, 80)}, False)],
)
def test_an_agent_that_starts_holds_for_its_home_what_a_run_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terms: dict[str, Any], *, is_held: bool
) -> None:
    monkeypatch.setattr(output_module, "FAR_BYTES", 5)

    async def story() -> None:
        spool, signals = _spool(tmp_path), []
        spool.keep(KEY, b"so far", b"")
        output = _output(spool, {})
        output.backpressure._launcher = cast("Any", SimpleNamespace(signal=lambda *told: signals.append(told)))
        spec = TaskSpec(argv=(b"yes",), directory=b"/", **terms)
        output.adopt(((KEY, 1.0, 0.0),), [ExecutionRecord("n2/1", UID, 1, "n2", ExecutionState.START, spec, 1.0, 60.0)])
        with spool.path(KEY, 1).open("ab") as file:
            file.write(b"and on")
        for _ in range(3):
            await asyncio.sleep(0)
        assert [key for key, number in signals if number == signal.SIGSTOP] == [KEY] * is_held
        await output.close()
        assert [key for key, number in signals if number == signal.SIGCONT] == [KEY] * is_held
        if spool.inotify is not None:
            spool.inotify.close()

    asyncio.run(story())


def test_nothing_overtakes_a_launchers_list(tmp_path: Path) -> None:
    put: list[object] = []

    async def story() -> None:
        all_told = asyncio.Event()

        def take(event: object) -> None:
            put.append(event)
            if len(put) == len(told):
                all_told.set()

        spool = _spool(tmp_path)
        spool.keep(KEY, b"hi", b"")
        settler = Disk.settler(spool, _output(spool, {}), take)
        incoming = LauncherEvents(cast("Any", SimpleNamespace(put=take)), settler, cast("Any", None), ())
        incoming.release_early()
        for event in told:
            incoming.received(event)
        assert len(put) == 1
        async with asyncio.timeout(PATIENCE_S):
            await all_told.wait()

    told: list[Any] = [
        events.LauncherLost(),
        events.LauncherReady(running=(("b-1", 1.0, 0.0),), ended=((KEY, Exit(0, stdout_bytes=2)),)),
        events.TaskEnded("b-1", Exit(0)),
        events.LauncherLost(),
        events.LauncherReady(),
        events.TaskStarted("c-1", 2.0),
        events.TaskEnded("d-1", Exit(0), with_start=True),
    ]
    asyncio.run(story())
    assert put == told


def test_output_files_that_take_long_hold_up_neither_a_start_nor_what_comes_after_a_list(tmp_path: Path) -> None:
    put: list[Any] = []
    plain, slow = (KEY, Exit(0)), (f"{bytes(16).hex()}-7", Exit(0, started_at=5.0))

    async def story() -> None:
        answers, tries, is_listed, all_told = asyncio.Event(), [], asyncio.Event(), asyncio.Event()

        def take(event: Any) -> None:
            put.append(event)
            if isinstance(event, events.LauncherReady):
                is_listed.set()
            if isinstance(event, events.TaskEnded):
                all_told.set()

        async def settled(key: str, exit_: Exit) -> Exit:
            if key == slow[0]:
                tries.append(key)
                await answers.wait()
            return exit_

        spool = _spool(tmp_path)
        settler = Disk.settler(spool, _output(spool, {}), take)
        settler._records.files = SimpleNamespace(has=lambda key: key == slow[0], settled=settled)  # type: ignore[assignment]
        incoming = LauncherEvents(cast("Any", SimpleNamespace(put=take)), settler, cast("Any", None), ())
        ready = await incoming.first_listed(events.LauncherReady(ended=(plain, slow)))
        assert (ready.ended, ready.running, put) == ((plain,), ((slow[0], 5.0, 0.0),), [])
        incoming.release_early()
        incoming.received(events.LauncherReady(ended=(plain, slow)))  # its launcher was replaced meanwhile
        async with asyncio.timeout(PATIENCE_S):
            await is_listed.wait()
            answers.set()
            await all_told.wait()
        assert tries == [slow[0]]

    asyncio.run(story())
    assert isinstance(put[0], events.OutputWaits)
    assert [event for event in put if isinstance(event, events.TaskEnded)] == [events.TaskEnded(*slow)]


class Disk:
    """Writes down which files are synced, and what is told between: each under its path in the state directory."""

    def __init__(self, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self._state = state
        self._fsync = os.fsync
        self._core_is_told = asyncio.Event()
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, fd: int) -> None:
        """As the real one, with a note."""
        self._fsync(fd)
        self.log.append(str(Path(f"/proc/self/fd/{fd}").readlink().relative_to(self._state)))

    def _put(self, event: events.Event) -> None:
        self.log.append(type(event).__name__)
        self._core_is_told.set()

    @staticmethod
    def settler(spool: Spool, output: TaskOutputs, put: Callable[[Any], None]) -> ExitSettler:
        """Of an agent whose core gets the events by ``put``."""
        info: Any = SimpleNamespace(counters=collections.Counter(), config=SimpleNamespace(node="n1"))
        disk: Any = SimpleNamespace(is_full=False)
        pulls: Any = SimpleNamespace(end=lambda _key: None)
        inbox: Any = SimpleNamespace(put=put)
        devices: Any = SimpleNamespace(has=lambda _key: False)

        async def settled(_key: str, exit_: Exit) -> Exit:
            return exit_

        files: Any = SimpleNamespace(has=lambda _key: False, settled=settled)
        energy: Any = SimpleNamespace(ended=lambda _key, exit_: exit_)
        watches: Any = SimpleNamespace(delayed=lambda *_: None)
        records = ExitRecords(info, spool, disk, files, energy, inbox, watches)
        return ExitSettler(records, inbox, pulls, output, devices, BackgroundTasks(RunState()))

    def ended(self, spool: Spool, output: TaskOutputs, event: events.TaskEnded) -> list[str]:
        """What was synced until the core was told of this end, and that."""

        async def story() -> None:
            settler = self.settler(spool, output, self._put)
            settler.settle(event)
            async with asyncio.timeout(PATIENCE_S):
                await self._core_is_told.wait()

        self.log.clear()
        asyncio.run(story())
        return self.log

    def told(self, spool: Spool, output: TaskOutputs, act: Callable[[ResultEffects], object]) -> list[str]:
        """What was synced until the core was told something, and that."""

        async def story() -> None:
            inbox: Any = SimpleNamespace(put=self._put)
            unused: Any = None
            results = ResultEffects(spool, output, inbox, unused, TaskWatches(), unused, BackgroundTasks(RunState()))
            act(results)
            async with asyncio.timeout(PATIENCE_S):
                await self._core_is_told.wait()

        self.log.clear()
        asyncio.run(story())
        return self.log


def test_ends_wait_with_growing_pauses_and_are_counted_while_descriptors_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = _spool(tmp_path)
    records = Disk.settler(spool, _output(spool, {}), print)._records
    outcomes: list[int] = [*[errno.EMFILE] * 7, 0, errno.ENFILE, 0]
    pauses: list[float] = []
    sleep = asyncio.sleep

    def next_outcome(result: Any) -> Any:
        if number := outcomes.pop(0):
            raise OSError(number, os.strerror(number))
        return result

    async def settled(_key: str, exit_: Exit) -> Exit:
        return cast("Exit", next_outcome(exit_))

    async def paused(seconds: float) -> None:
        pauses.append(seconds)
        assert (records.waiting, records.waits_because) == (
            1,
            os.strerror(errno.ENFILE if pauses[7:] else errno.EMFILE),
        )
        await sleep(0)

    monkeypatch.setattr(spool, "settle", next_outcome)
    monkeypatch.setattr(records.files, "settled", settled)
    monkeypatch.setattr(asyncio, "sleep", paused)
    ended = ((KEY, Exit(0, stdout_bytes=2)),)
    assert asyncio.run(records.settled(ended)) == ended
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, SHORT_PAUSE_S_MAX, SHORT_PAUSE_S_MAX, 1.0]
    assert (outcomes, records.waiting) == ([], 0)


def test_output_that_came_with_the_result_is_on_disk_before_the_result_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = _spool(tmp_path)
    disk = Disk(tmp_path, monkeypatch)
    keep = KeepOutput(KEY, "n1/1", UID, 1, b"out", b"err")
    log = disk.told(spool, _output(spool, {}), lambda results: results.keep(keep))
    # under the names that they have until they are renamed, then the directory with the new names
    assert log == [f"spool/{KEY}.out.part", f"spool/{KEY}.err.part", "spool", "OutputArrived"]


def test_output_that_was_fetched_is_on_disk_before_the_result_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = _spool(tmp_path)
    disk = Disk(tmp_path, monkeypatch)
    links = Links(OutputChunk(1, 0, b"out"), OutputChunk(2, 0, b"err"), OutputEnd(3, 3))
    output = _output(spool, {}, links)
    fetch = FetchOutput(KEY, "n1/1", UID, 1, "n2", 3, 3)
    log = disk.told(spool, output, lambda results: results.fetch(fetch))
    assert log == [f"spool/{KEY}.out", f"spool/{KEY}.err", "spool", "OutputArrived"]
    assert spool.read_small(KEY, 3, 3) == (b"out", b"err")


def test_output_of_an_end_is_on_disk_before_the_end_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on its RESULT may be said, and home may rely on that."""
    spool = _spool(tmp_path)
    spool.keep(KEY, b"out", b"err")
    disk = Disk(tmp_path, monkeypatch)
    ended = events.TaskEnded(KEY, Exit(0, stdout_bytes=3, stderr_bytes=3))
    log = disk.ended(spool, _output(spool, {}), ended)
    assert log == [f"spool/{KEY}.out", f"spool/{KEY}.err", "spool", "TaskEnded"]


def test_an_end_waits_while_descriptors_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = _spool(tmp_path)
    spool.keep(KEY, b"out", b"")
    disk = Disk(tmp_path, monkeypatch)
    refused = [errno.EMFILE, errno.ENFILE, errno.ENOMEM]

    def refuse(path: Path) -> int:
        if refused:
            raise OSError(refused.pop(), "short")
        return open_output(path)

    monkeypatch.setattr(spool_module, "open_output", refuse)
    monkeypatch.setattr(event_sources, "SHORT_PAUSE_S", 0.0)
    ended = events.TaskEnded(KEY, Exit(0, stdout_bytes=3))
    assert disk.ended(spool, _output(spool, {}), ended) == [f"spool/{KEY}.out", "spool", "TaskEnded"]
    assert not refused


@each(
    ("failure", "state", "why"),
    [
        (None, PeerState.ALIVE, ""),
        (None, PeerState.SUSPECT, "ws2 does not answer"),  # a copy that is under way does not say so
        (TimeoutError(), PeerState.ALIVE, "ws2 does not answer"),
        (PeerloadError("ws2 has no output"), PeerState.ALIVE, "ws2 has no output"),
    ],
)
def test_output_that_cannot_be_fetched_from_its_node_is_no_silence(
    failure: Exception | None, state: PeerState, why: str
) -> None:
    async def copy_now(*_words: object) -> None:
        if failure is not None:
            raise failure

    record = cast(
        "Any", SimpleNamespace(state=TaskState.LEASED, node="ws2", task="ws1/1", uid=UID, attempt=1, exit=None)
    )
    tasks = {UID: SimpleNamespace(running_at=1.0)}
    node = SimpleNamespace(
        state=SimpleNamespace(node="ws1"),
        home=SimpleNamespace(tasks=tasks),
        membership={"ws2": SimpleNamespace(state=state)},
    )
    info = SimpleNamespace(counters=collections.Counter())
    unused = cast("Any", None)
    source = OutputSource(cast("Any", info), cast("Any", node), cast("Any", SimpleNamespace(copy_now=copy_now)), unused)
    assert asyncio.run(source.bring_up_to_date(record)) == why
    assert info.counters.total() == (failure is not None)


def test_output_of_a_task_elsewhere_goes_on_after_its_copy_broke_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy breaks off: the agent there was started again."""
    monkeypatch.setattr(output_module, "COPY_AGAIN_S", 0.0)
    starts: list[int] = []

    async def fetch_output(_node: str, request: OutputRequest) -> AsyncIterator[OutputChunk | OutputEnd]:
        starts.append(request.stdout_from)
        text = b"before" if len(starts) == 1 else b"after"
        yield OutputChunk(1, request.stdout_from, text)
        if len(starts) > 1:
            await asyncio.Event().wait()

    async def story() -> None:
        output = _output(_spool(tmp_path), {}, cast("Any", SimpleNamespace(fetch_output=fetch_output)))
        node = output._node
        node.home.tasks[UID] = cast("Any", SimpleNamespace(running_at=1.0, spec=SimpleNamespace(followed=False)))
        node.state = cast("Any", SimpleNamespace(node="ws1"))
        unused = cast("Any", None)
        source = OutputSource(unused, node, output, unused)
        record = cast("Any", SimpleNamespace(state=TaskState.LEASED, node="ws2", task="ws1/1", uid=UID, attempt=1))
        read = b""
        async with asyncio.timeout(PATIENCE_S):
            async with contextlib.aclosing(
                source.follow(record, [0, 0], in_foreground=True, is_awaited=True)
            ) as pieces:
                async for _, _, data in pieces:
                    read += data
                    if read == b"beforeafter":
                        break
            await output.close()
        assert starts == [0, len(b"before")]

    asyncio.run(story())
