"""State of the cluster for the view: samples of an agent, with the history of the last minutes; and the background
threads: one takes samples, two fetch output and usage, short ones send requests.

The threads end with the program, so that quitting does not wait for a silent agent.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
import time
from typing import Protocol

from peerload.client.connection import AgentConnection
from peerload.model.errors import PeerloadError

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any


ENDED_SHOWN_MAX = 100
EVENTS_AT_ONCE_MAX = 200
ENDED_EVER_S = 1e9
ENDED_AGAIN_AFTER = 20.0
"""The ended tasks are requested again after this multiple of the time that the last answer took."""
ANSWERS_WITHIN_S = 5.0
ENDINGS = ("done", "failed", "cancelled")


@dataclasses.dataclass(frozen=True, slots=True)
class TopSample:
    """Sample of the cluster. at: time (Unix s); answer: of the agent (`overview` of docs/wire.md); ended: the newest ended
    tasks, with one row for all done and one for all cancelled members of an array; None if unchanged."""

    at: float
    answer: dict[str, Any]
    ended: list[dict[str, Any]] | None = None


class Source(Protocol):
    """Source of samples."""

    def look(self) -> TopSample:
        """The next sample. Raises PeerloadError if the agent does not answer."""

    def close(self) -> None:
        """Release the source."""


class LiveSampler:
    """Samples of an agent, over its socket. ``at``: the node that answers, "" for the agent at the socket."""

    def __init__(self, socket_path: str | None, at: str = "", clock: Callable[[], float] = time.time) -> None:
        self._path = socket_path
        self._at = at
        self._clock = clock
        self._client: AgentConnection | None = None
        self._revision = ""
        self._last_event = 0
        self._knows_ended = False
        self._ended_from_s = 0.0
        """Time (monotonic) from which the ended tasks are requested again."""

    def look(self) -> TopSample:
        """The next sample. Raises PeerloadError; the call after that reconnects and gets a complete answer."""
        try:
            return self._look()
        except BaseException:
            self.close()
            raise

    def _look(self) -> TopSample:
        if self._client is None:
            self._client = AgentConnection(self._path, timeout_s=ANSWERS_WITHIN_S)
        client, there = self._client, at(self._at)
        answer = client.call(
            "overview",
            since=self._revision,
            events_after=0 if not self._revision else self._last_event,
            events_max=EVENTS_AT_ONCE_MAX,
            **there,
        )
        events = answer.get("events") or []
        ended = None
        if answer.get("complete") or any(map(is_ending, events)):
            self._knows_ended = False
        if not self._knows_ended and time.monotonic() >= self._ended_from_s:
            began_s = time.monotonic()
            wanted = {"states": ENDINGS, "ended_within_s": ENDED_EVER_S, "limit": ENDED_SHOWN_MAX, "gathered": True}
            ended = client.call("tasks", **wanted, **there)["tasks"]
            self._knows_ended = True
            self._ended_from_s = time.monotonic() + ENDED_AGAIN_AFTER * (time.monotonic() - began_s)
        self._revision = str(answer.get("revision") or "")
        if events:
            self._last_event = int(events[-1].get("number") or 0)
        return TopSample(self._clock(), answer, ended)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        self._revision, self._ended_from_s = "", 0.0


def at(node: str) -> dict[str, str]:
    """The request field that names another node to answer; empty for the agent at the socket."""
    return {"at": node} if node else {}


def is_ending(event: dict[str, Any]) -> bool:
    return event.get("what") == "task" and event.get("state") in ENDINGS


HISTORY_KEPT = 240
"""Values kept of each series: four minutes, at one a second."""
EVENTS_KEPT = 500
STALE_S = 35.0
"""Older facts of a node are shown as stale; a node announces its load at least every 30 s."""
HERE_STATES = ("alive", "suspect")
UNREACHABLE = "unreachable"
"""State of a task whose node is suspect or dead."""


class Series(collections.deque["float | None"]):
    """The newest values of one measure, the last at the end."""

    def __init__(self) -> None:
        super().__init__(maxlen=HISTORY_KEPT)

    @property
    def now(self) -> float | None:
        return self[-1] if self else None


class NodeModel:
    """Node: ``facts`` as the agent reported them at ``told_at``, and sums over its GPUs. Shares are 0 … 1, None if
    unknown."""

    __slots__ = ("cpu", "facts", "gpu", "gpu_mem", "gpu_mem_bytes", "gpu_mem_used", "gpus", "mem", "series", "told_at")

    def __init__(self, facts: dict[str, Any], told_at: float) -> None:
        self.series: dict[str, Series] = {key: Series() for key in ("cpu", "mem", "gpu", "load")}
        self.update(facts, told_at)

    def update(self, facts: dict[str, Any], told_at: float) -> None:
        self.facts = facts
        self.told_at = told_at
        gpus = facts.get("gpus")
        gpus = gpus if isinstance(gpus, list) else []
        busy = [gpu["util"] for gpu in gpus if is_number(gpu.get("util"))]
        self.gpus = len(gpus)
        self.gpu = sum(busy) / len(busy) if busy else None
        self.gpu_mem_used = sum(number(gpu.get("mem_used_bytes")) for gpu in gpus)
        self.gpu_mem_bytes = sum(number(gpu.get("mem_bytes")) for gpu in gpus)
        self.gpu_mem = share(self.gpu_mem_used, self.gpu_mem_bytes) if busy else None
        self.cpu = share(facts.get("cpus_busy"), facts.get("cpus"))
        self.mem = share(facts.get("mem_used_bytes"), facts.get("mem_bytes"))

    @property
    def name(self) -> str:
        return str(self.facts.get("node") or "")

    @property
    def state(self) -> str:
        """alive, suspect, dead or left; revoked takes precedence."""
        if self.facts.get("revoked"):
            return "revoked"
        return str(self.facts.get("state") or "unknown")

    def age_s(self, now: float) -> float:
        return number(self.facts.get("age_s")) + max(now - self.told_at, 0.0)

    def is_stale(self, now: float) -> bool:
        return self.state not in HERE_STATES or self.age_s(now) > STALE_S

    def remember(self) -> None:
        self.series["cpu"].append(self.cpu)
        self.series["mem"].append(self.mem)
        if self.gpus:
            self.series["gpu"].append(self.gpu)
        load = self.facts.get("load")
        self.series["load"].append(number(load) if is_number(load) else None)


class TopModel:
    """State of the whole cluster. ``lost_because``: reason why the agent does not answer, "" while it does;
    ``lost_at``: since when; ``seen_at``: time of its last answer; ``turn``: increases with each sample."""

    def __init__(self) -> None:
        self.turn = 0
        self.turns = {"nodes": 0, "tasks": 0}
        """For each table, the turn of the last change."""
        self.agent: dict[str, Any] = {}
        self.nodes: dict[str, NodeModel] = {}
        self.tasks: dict[str, dict[str, Any]] = {}
        self.guests: dict[str, dict[str, Any]] = {}
        self.ended: dict[str, dict[str, Any]] = {}
        self.counts: dict[str, int] = {}
        self.events: collections.deque[dict[str, Any]] = collections.deque(maxlen=EVENTS_KEPT)
        self.cluster: dict[str, Series] = {key: Series() for key in ("cpu", "mem", "gpu", "gpu_mem")}
        self.sums: dict[str, float] = {}
        self.used: dict[str, dict[str, Any]] = {}
        """Usage of running tasks that was requested (`usage` of docs/wire.md)."""
        self.seen_at = 0.0
        self.lost_because = ""
        self.lost_at = 0.0
        self._last_event = 0

    @property
    def node(self) -> str:
        return str(self.agent.get("node") or "")

    def take(self, sample: TopSample) -> None:
        answer, is_complete = sample.answer, bool(sample.answer.get("complete"))
        self.turn += 1
        self.seen_at = sample.at
        self.lost_because, self.lost_at = "", 0.0
        agent = answer.get("agent")
        agent = agent if isinstance(agent, dict) else {}
        if agent.get("node") != self.agent.get("node"):
            self._forget_all()
        self.agent = agent
        self._take_nodes(answer, sample.at, is_complete=is_complete)
        self._take_tasks(self.tasks, answer, "tasks", is_complete=is_complete)
        self._take_tasks(self.guests, answer, "guests", is_complete=is_complete)
        self.counts = {key: int(number(value)) for key, value in (answer.get("counts") or {}).items()}
        if sample.ended is not None:
            self.turns["tasks"] = self.turn
            self.ended = {str(task.get("id") or ""): task for task in sample.ended}
        self._take_events(answer.get("events") or [])
        self._sum_up()

    def lost(self, why: str, at: float) -> None:
        self.turn += 1
        self.lost_at = self.lost_at or at
        self.lost_because = why or "it does not answer"

    def _forget_all(self) -> None:
        """Drop everything, because a different agent answers now."""
        self.nodes.clear()
        for tasks in (self.tasks, self.guests, self.ended, self.used):
            tasks.clear()
        self.events.clear()
        for series in self.cluster.values():
            series.clear()
        self._last_event = 0

    def take_usage(self, told: Iterable[Mapping[str, Any]]) -> None:
        """Store the current usage of some tasks; drop the usage of tasks that no longer run."""
        self.used |= {str(one.get("id") or ""): dict(one) for one in told}
        self.used = {name: one for name, one in self.used.items() if self.runs(name)}

    def runs(self, name: str) -> bool:
        task = self.tasks.get(name) or self.guests.get(name)
        return task is not None and task.get("state") == "running"

    def usage(self, names: Iterable[str]) -> tuple[float | None, float | None]:
        """Cores and bytes that these tasks use together; None if unknown for all of them."""
        some = [self.used[name] for name in names if name in self.used and self.runs(name)]
        cpus = [one["cpus_busy"] for one in some if is_number(one.get("cpus_busy"))]
        memory = [one["memory_bytes"] for one in some if is_number(one.get("memory_bytes"))]
        return sum(cpus) if cpus else None, sum(memory) if memory else None

    def _take_nodes(self, answer: Mapping[str, Any], at: float, *, is_complete: bool) -> None:
        told = answer.get("nodes") or []
        if told or answer.get("nodes_gone"):
            self.turns["nodes"] = self.turn
        if is_complete:
            names = {str(facts.get("node") or "") for facts in told}
            for name in [name for name in self.nodes if name not in names]:
                del self.nodes[name]
        for name in answer.get("nodes_gone") or []:
            self.nodes.pop(name, None)
        for facts in told:
            name = str(facts.get("node") or "")
            known = self.nodes.get(name)
            if known is None:
                self.nodes[name] = NodeModel(facts, at)
            else:
                known.update(facts, at)

    def _take_tasks(
        self, kept: dict[str, dict[str, Any]], answer: Mapping[str, Any], key: str, *, is_complete: bool
    ) -> None:
        if is_complete:
            kept.clear()
        if is_complete or answer.get(key) or answer.get(f"{key}_gone"):
            self.turns["tasks"] = self.turn
        for name in answer.get(f"{key}_gone") or []:
            kept.pop(name, None)
        for task in answer.get(key) or []:
            is_unreachable = is_number(task.get("unreachable_since"))
            kept[str(task.get("id") or "")] = task | {"state": UNREACHABLE} if is_unreachable else task

    def _take_events(self, events: Sequence[dict[str, Any]]) -> None:
        if events and number(events[-1].get("number")) < self._last_event:  # the agent has a new database
            self.events.clear()
            self._last_event = 0
        for event in events:
            at = int(number(event.get("number")))
            if at <= self._last_event:
                continue
            self._last_event = at
            self.events.append(event)

    def _sum_up(self) -> None:
        """Compute the sums over the live nodes, and append a value to each series."""
        keys = ("cpus", "cpus_busy", "mem_bytes", "mem_used_bytes", "tasks_running", "tasks_queued")
        sums = dict.fromkeys((*keys, "gpus", "gpu_busy", "gpu_mem_bytes", "gpu_mem_used"), 0.0)
        for node in self.nodes.values():
            node.remember()
            facts = node.facts
            if facts.get("state") not in HERE_STATES:
                continue
            for key in keys:
                value = facts.get(key)
                if value is not None:
                    sums[key] += number(value)
            if node.gpus:
                sums["gpus"] += node.gpus
                sums["gpu_busy"] += (node.gpu or 0.0) * node.gpus
                sums["gpu_mem_bytes"] += node.gpu_mem_bytes
                sums["gpu_mem_used"] += node.gpu_mem_used
        self.sums = sums
        self.cluster["cpu"].append(share(sums["cpus_busy"], sums["cpus"]))
        self.cluster["mem"].append(share(sums["mem_used_bytes"], sums["mem_bytes"]))
        self.cluster["gpu"].append(share(sums["gpu_busy"], sums["gpus"]))
        self.cluster["gpu_mem"].append(share(sums["gpu_mem_used"], sums["gpu_mem_bytes"]))

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def ours_by_node(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for task in self.tasks.values():
            node = task.get("node")
            if node and task.get("state") in ("running", "leased", UNREACHABLE):
                found[node] = found.get(node, 0) + 1
        return found

    def theirs_by_home(self) -> dict[str, int]:
        """The number of attempts here of each other home."""
        found: dict[str, int] = {}
        for guest in self.guests.values():
            home = str(guest.get("home") or "")
            found[home] = found.get(home, 0) + 1
        return found

    def task(self, name: str) -> dict[str, Any] | None:
        """A task of this home, or a remote task on this node; None if it no longer exists."""
        return self.tasks.get(name) or self.guests.get(name) or self.ended.get(name)

    @property
    def more_wait(self) -> bool:
        """True if more tasks of this home wait than the agent lists individually."""
        known = sum(task.get("state") in ("queued", "held") for task in self.tasks.values())
        return known < self.counts.get("waiting", 0) + self.counts.get("held", 0)

    def is_guest(self, task: Mapping[str, Any]) -> bool:
        return bool(task.get("home")) and task.get("home") != self.node


def number(value: object) -> float:
    """The number; 0 for any other value, and if it is not finite."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def share(part: object, whole: object) -> float | None:
    """Part of the whole, as a share; None if unknown."""
    if not is_number(part) or not is_number(whole) or number(whole) <= 0:
        return None
    return number(part) / number(whole)


# -- threads -----------------------------------------------------------------------------------------------------------

EVERY_S = 1.0
AGENT_SHARE_MAX = 0.01
"""If the agent would spend more than this share of its time on answers, it is sampled less often."""
USED_WITHIN_S = 1.5
"""Timeout of a usage request to a node."""
AWAY_S = 15.0
"""Pause before the next request to a silent node."""
PAUSE_S_MAX = 5.0
PAUSE_S_MIN = 0.2
"""Pause between two samples, however long the first one took."""


def reason(error: BaseException) -> str:
    why = str(getattr(error, "why", "") or "")
    what = str(getattr(error, "what", "") or error)
    return f"{what.rstrip('.')} ({why})" if why else what.rstrip(".")


class Watcher(threading.Thread):
    """A thread that runs ``work`` and ends with the program. ``broke(error)`` receives an unexpected exception, which must not
    stay hidden."""

    def __init__(self, name: str, work: Callable[[], None], broke: Callable[[Exception], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._broke = broke

    def run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 -- any error is shown to the user
            self._broke(error)


class Sampler(Watcher):
    """Takes a sample each second. ``took(sample)`` and ``lost(why, at)`` are called from its thread."""

    def __init__(
        self, source: Source, took: Callable[..., None], lost: Callable[..., None], broke: Callable[[Exception], None]
    ) -> None:
        super().__init__("sampler", self._sample, broke)
        self._source = source
        self._took, self._lost = took, lost
        self._ended = threading.Event()
        self._hurry = threading.Event()
        self._goes = threading.Event()
        self._goes.set()

    def _sample(self) -> None:
        source = self._source
        while not self._ended.is_set():
            began_s, every_s = time.monotonic(), EVERY_S
            source = self._source
            try:
                sample = source.look()
            except PeerloadError as error:
                self._lost(reason(error), time.time())
            else:
                every_s = min(max(EVERY_S, number(sample.answer.get("took_s")) / AGENT_SHARE_MAX), PAUSE_S_MAX)
                if source is self._source:
                    self._took(sample)
            self._hurry.wait(max(every_s - (time.monotonic() - began_s), PAUSE_S_MIN))
            self._goes.wait()
            self._hurry.clear()
        source.close()

    def pause(self, *, is_paused: bool) -> None:
        """Pause or resume; the next sample has the changes since then."""
        if is_paused:
            self._goes.clear()
        else:
            self._goes.set()
            self._hurry.set()

    def switch(self, source: Source) -> None:
        self._source = source
        self._hurry.set()

    def sample_now(self) -> None:
        """Take a sample immediately, after a change."""
        self._hurry.set()

    def end(self) -> None:
        self._ended.set()
        self._hurry.set()
        self._goes.set()


class Poller(Watcher):
    """Calls ``fetch(wanted)`` when ``wanted`` changes, and each second while ``repeats(wanted)``."""

    def __init__(
        self,
        name: str,
        fetch: Callable[[Any], None],
        repeats: Callable[[Any], object],
        broke: Callable[[Exception], None],
    ) -> None:
        super().__init__(name, self._poll, broke)
        self._fetch, self._repeats = fetch, repeats
        self._news = threading.Condition()
        self._wanted: Any = None
        self._is_new = self._is_over = False

    def want(self, wanted: object) -> None:
        with self._news:
            if wanted != self._wanted:
                self._wanted, self._is_new = wanted, True
                self._news.notify()

    def end(self) -> None:
        with self._news:
            self._is_over = True
            self._news.notify()

    def _poll(self) -> None:
        while True:
            with self._news:
                while not self._is_over and not self._is_new:
                    repeats = self._wanted is not None and self._repeats(self._wanted)
                    if not self._news.wait(EVERY_S if repeats else None):
                        break
                if self._is_over:
                    return
                self._is_new = False
                wanted = self._wanted
            self._fetch(wanted)


def read_tail(socket_path: str | None, wanted: tuple[str, int, bool], took: Callable[..., None]) -> None:
    """Fetch the end of a task's output. ``wanted``: task, bytes, whether it grows; ``took(task, pieces, why_none)``
    receives it."""
    task, tail_bytes, _ = wanted
    if not task:
        return
    try:
        with AgentConnection(socket_path, timeout_s=ANSWERS_WITHIN_S) as client:
            pieces = [piece for piece in client.stream("output", task=task, tail_bytes=tail_bytes) if "data" in piece]
    except PeerloadError as error:
        took(task, [], reason(error))
    else:
        took(task, pieces, "")


class UsageReader:
    """Requests the usage of tasks from their nodes. ``used(tasks)`` receives each answer."""

    def __init__(self, socket_path: str | None, used: Callable[..., None]) -> None:
        self._path = socket_path
        self._used = used
        self._not_before_s: dict[str, float] = {}

    def read(self, wanted: dict[str, list[str]]) -> None:
        """Ask each node for its tasks; skip a silent node for a while."""
        for node, tasks in wanted.items():
            if time.monotonic() < self._not_before_s.get(node, 0.0):
                continue
            try:
                with AgentConnection(self._path, timeout_s=USED_WITHIN_S) as client:
                    self._used(client.call("usage", at=node, tasks=tasks)["tasks"])
            except PeerloadError:
                self._not_before_s[node] = time.monotonic() + AWAY_S
        time.sleep(PAUSE_S_MIN)  # limits the requests of a user who scrolls fast
