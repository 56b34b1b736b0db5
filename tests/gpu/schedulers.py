"""Who plays a trace with devices: agents with a preset, and two schedulers to hold them against.

FIFO per node: every node has one line for all its tasks and starts the first as soon as it fits; nobody overtakes, and
nothing goes elsewhere. Central first-fit: one line for all, which knows the free cores and GPUs of every node at every
moment; each time something changes, every task in it is tried, in the order of arrival, on each node, and starts on the
first where it fits. Both know how much memory each task will have of its GPUs, also where it did not say, and spend
no time on messages. What fits is decided as on any node (`core/resources/admission.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec

from peerload.core.resources.admission import Ledger
from peerload.core.resources.devices import DeviceRequest
from peerload.core.resources.placement import place
from peerload.model.resources import ResourceRequest
from peerload.policy.registry import load_preset
from peerload.sim.queueing_model import IDEAL_CONFIG
from peerload.sim.scenario import LIVE, TIMINGS_LIVE
from tests.gpu.device_model import DeviceArrival, DeviceModel
from tests.gpu.mixed import profiles
from tests.gpu.rack import Outcome, Rack

MESSAGE_S = 0.001
"""From node to node."""
AGENT = msgspec.structs.replace(IDEAL_CONFIG, **{name: getattr(LIVE, name) for name in TIMINGS_LIVE})


def by_agents(preset: str, trace: Sequence[DeviceArrival], seed: int) -> Outcome:
    """Agents with this preset, as shipped, with the timings of agents."""
    rack = Rack(profiles())
    cluster = DeviceModel(load_preset(preset), profiles(), rack, seed=seed, message_s=MESSAGE_S, config=AGENT)
    cluster.run(iter(trace), tasks=len(trace))
    cluster.drain()
    return rack.outcome()


def fifo_per_node(trace: Sequence[DeviceArrival]) -> Outcome:
    """One line for each node."""
    return _Reference(trace, is_central=False).play()


def central_first_fit(trace: Sequence[DeviceArrival]) -> Outcome:
    """One line for all."""
    return _Reference(trace, is_central=True).play()


class _Reference:
    """Both of them: lines of (number, arrival, what it asks for) by node, of all nodes in the line "" if ``is_central``."""

    def __init__(self, trace: Sequence[DeviceArrival], *, is_central: bool) -> None:
        self._trace = trace
        self._is_central = is_central
        nodes = profiles(are_read=False)
        self._rack = Rack(nodes)
        self._ledgers = {profile.node: Ledger(profile) for profile in nodes}
        self._lines: dict[str, list[tuple[int, DeviceArrival, ResourceRequest]]] = {}
        self._ends: list[tuple[float, int, str]] = []

    def play(self) -> Outcome:
        """To the end."""
        for number, arrival in enumerate(self._trace, 1):
            self._until(arrival.at_s)
            self._rack.comes(number, arrival)
            line = "" if self._is_central else arrival.node
            self._lines.setdefault(line, []).append((number, arrival, _known(arrival)))
            self._start(line, arrival.at_s)
        self._until(float("inf"))
        return self._rack.outcome()

    def _until(self, at_s: float) -> None:
        while self._ends and self._ends[0][0] <= at_s:
            now_s, number, node = heapq.heappop(self._ends)
            self._rack.ends(now_s, number)
            self._ledgers[node].now_s = now_s
            self._ledgers[node].end(str(number))
            self._start("" if self._is_central else node, now_s)

    def _start(self, line: str, now_s: float) -> None:
        waiting = self._lines.get(line, [])
        left = []
        failed: set[ResourceRequest] = set()
        for number, arrival, request in waiting:
            is_blocked = bool(failed) and not self._is_central
            if is_blocked or request in failed or not self._starts(line, number, arrival, request, now_s):
                failed.add(request)
                left.append((number, arrival, request))
        self._lines[line] = left

    def _starts(self, line: str, number: int, arrival: DeviceArrival, request: ResourceRequest, now_s: float) -> bool:
        for node, ledger in self._ledgers.items():
            if line not in ("", node) or not ledger.has_cores(request):
                continue
            ledger.now_s = now_s
            names = place(ledger.devices, request, DeviceRequest(request, ledger.devices.config), now_s)
            if names is not None:
                ledger.start(str(number), request, is_local=True, devices=names)
                self._rack.begins(now_s, number, arrival, node, names)
                heapq.heappush(self._ends, (now_s + arrival.service_s, number, node))
                return True
        return False


def _known(arrival: DeviceArrival) -> ResourceRequest:
    """What it asks for, with the memory that it will have where it does not say."""
    request = arrival.request
    if not request.gpus or request.gpu_mem_bytes or request.gpu_fraction < 1:
        return request
    return msgspec.structs.replace(request, gpu_mem_bytes=arrival.gpu_bytes)
