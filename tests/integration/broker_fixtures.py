"""Real brokers in processes of their own, and event loops in threads of their own, as fixtures."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pytest
import uvloop

from peerload.agent.mqtt import MqttBus
from peerload.cli.demo.broker import BrokerProcess, Kind, start_broker
from peerload.model.config import AgentConfig
from peerload.model.messages import Envelope, Identity, Message, State
from peerload.model.resources import LoadReport, Profile
from peerload.wire import peer
from peerload.wire.seal import Sealer
from tests.conftest import require_program
from tests.support import cluster_of, security_events

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from peerload.security.broker import BrokerTls

ResultT = TypeVar("ResultT")


class LoopThread:
    """An event loop in a thread, so that a test can wait with `wait_until` while it runs. Exceptions that the loop
    had nobody to give to are kept in ``complaints``."""

    def __init__(self, kind: str) -> None:
        self.complaints: list[dict[str, Any]] = []
        factory = uvloop.new_event_loop if kind == "uvloop" else asyncio.new_event_loop
        self._runner = asyncio.Runner(loop_factory=cast("Any", factory))
        ready = threading.Event()
        self._stopped: asyncio.Event | None = None

        async def live() -> None:
            self.loop = asyncio.get_running_loop()
            self.loop.set_exception_handler(lambda _, context: self.complaints.append(context))
            self._stopped = asyncio.Event()
            ready.set()
            await self._stopped.wait()

        def body() -> None:
            with self._runner:
                self._runner.run(live())

        self._thread = threading.Thread(target=body, name=f"loop {kind}")
        self._thread.start()
        assert ready.wait(60)

    def run(self, work: Coroutine[Any, Any, ResultT], timeout_s: float = 60.0) -> ResultT:
        """What the coroutine returns."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def start(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run it beside the test."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, function: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Call a plain function inside the loop."""

        async def inside() -> ResultT:
            return function(*arguments)

        return self.run(inside())

    def close(self) -> None:
        """Cancel what still runs and end the thread."""
        if self._stopped is not None:
            self.loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture(params=["uvloop"])
def loop_thread(request: pytest.FixtureRequest) -> Iterator[LoopThread]:
    """The event loop that an agent runs on; a complaint of the loop fails the test."""
    thread = LoopThread(request.param)
    yield thread
    thread.close()
    if thread.complaints:
        pytest.fail(f"the event loop complained: {thread.complaints}")


def need_broker(kind: Kind) -> None:
    """Install this broker if we may; else skip, or fail where nothing may be skipped."""
    if kind == "mosquitto":
        require_program("mosquitto", "mosquitto")
    elif importlib.util.find_spec("amqtt") is None:
        pytest.skip("amqtt is not installed (the extra `broker`)")


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A directory with a short path."""
    directory = Path(tempfile.mkdtemp(prefix="pl-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(params=["mosquitto", pytest.param("amqtt", marks=pytest.mark.long)])
def broker(request: pytest.FixtureRequest, short_directory: Path) -> Iterator[BrokerProcess]:
    """A running broker of each kind."""
    need_broker(request.param)
    with start_broker(short_directory, request.param) as running:
        yield running


def identity_of(node: str, boot: str = "", incarnation: int = 1) -> Identity:
    """Who a test's node is."""
    return Identity(
        node=node,
        boot=boot or f"boot-of-{node}",
        machine_boot="machine",
        store=f"store-{node}",
        incarnation=incarnation,
    )


def sealer_of(identity: Identity, cluster: str = "default") -> Sealer:
    """What it seals with for MQTT."""
    of = cluster_of(cluster)
    return Sealer(of.key, of.id, identity.node, identity.boot, purpose="mqtt")


def sealed(sealer: Sealer, topic: str, envelope: Envelope) -> tuple[str, bytes]:
    """What is to be published, and where."""
    return topic, sealer.seal(peer.encode(envelope), topic.encode())


class _LocalNode:
    """What stands for `LocalNode`: this node as its peers see it."""

    def __init__(self, identity: Identity, cluster: str, profile_load: Callable[[], int]) -> None:
        self.identity = identity
        self.cluster = cluster_of(cluster)._replace(name=cluster)
        self._load_tasks = profile_load
        self._sealer = sealer_of(identity, cluster)
        self.envelopes = peer.Envelopes(cluster, identity.node, identity.boot)

    def sealer(self, purpose: str) -> Sealer:
        assert purpose == "mqtt"
        return self._sealer

    def state(self) -> State:
        profile = Profile(node=self.identity.node, slots=4, cpus=4.0)
        return State(identity=self.identity, profile=profile, report=LoadReport(load_tasks=self._load_tasks()))


class BusNode:
    """One node on the bus, which writes down what it hears. ``settings``: of the agent."""

    def __init__(
        self,
        loop: LoopThread,
        urls: list[str],
        node: str,
        *,
        identity: Identity | None = None,
        cluster: str = "default",
        tls: BrokerTls | None = None,
        **settings: Any,
    ) -> None:
        self.loop = loop
        self.identity = identity or identity_of(node)
        self.local = _LocalNode(self.identity, cluster, lambda: self.load_tasks)
        self.sealer = self.local.sealer("mqtt")
        self.envelope, self.state = self.local.envelopes.make, self.local.state
        self.heard: list[tuple[Message, bool]] = []
        self.changes: list[bool] = []
        self.counters: Counter[str] = Counter()
        self.load_tasks = 0
        config = AgentConfig(node=self.identity.node, state="/", socket="/", mqtt=tuple(urls), **settings)

        async def make() -> MqttBus:
            return MqttBus(config, cast("Any", self.local), self, security_events(self.counters), tls)

        self.bus = loop.run(make())
        self.running = loop.start(self.bus.run())

    def from_bus(self, envelope: Envelope, *, retained: bool) -> None:
        self.heard.append((envelope.body, retained))

    def bus_changed(self, *, connected: bool) -> None:
        self.changes.append(connected)

    def copy_reported(self, other: Identity) -> None:
        del other

    def broadcast(self, message: Message) -> bool:
        return self.loop.call(self.bus.broadcast, message)

    def send(self, dst: str, message: Message, dst_boot: str = "") -> bool:
        return self.loop.call(self.bus.send, dst, dst_boot, message)

    def announce(self, load_tasks: int) -> bool:
        self.load_tasks = load_tasks
        return self.loop.call(self.bus.publish_state, self.state())

    def close(self) -> None:
        self.loop.run(self.bus.close())
        self.running.result(60)
