"""The counters, gauges and histograms of one agent, as `stats` tells them. It looks at nothing that grows with the number of
tasks, so that a scrape costs the same whatever waits."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from peerload import __version__
from peerload.core.membership.membership import PeerState
from peerload.model import metrics
from peerload.model.devices import GPU, Health
from peerload.model.metrics import labelled
from peerload.model.task import TaskState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from peerload.agent.runtime import AgentInfo, Histogram, Inbox
    from peerload.agent.sensors.energy import EnergySensors
    from peerload.agent.views.agent import DiagnosticsView
    from peerload.core.node import Node

GPUS_TOLD_MAX = 8
"""GPUs of a node that are told of."""
LABEL_VALUES_MAX = 8
"""Label values of one counter that are told of; the others, the rarest, are added up as `other`."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class MetricsView:
    """Answer to `stats`."""

    def __init__(
        self,
        info: AgentInfo,
        node: Node,
        inbox: Inbox,
        diagnostics: DiagnosticsView,
        histograms: Mapping[str, Histogram],
        energy: EnergySensors,
    ) -> None:
        self._energy = energy
        self._info = info
        self._node = node
        self._inbox = inbox
        self._diagnostics = diagnostics
        self._histograms = histograms

    def stats(self) -> dict[str, object]:
        """Everything; a missing counter is 0."""
        gauges = self._diagnostics.gauges()
        counters = _merged(self._node.state.counts, self._info.counters)
        counters[metrics.INBOX_DROPPED] = self._inbox.dropped
        counters[metrics.COMMITS_STALLED] = int(gauges.pop(metrics.COMMITS_STALLED))
        return {
            "counters": counters | self._energy.counters(),
            "gauges": gauges
            | self._energy.gauges()
            | self._of_tasks()
            | self._of_nodes()
            | self._of_agent()
            | self._of_gpus(),
            "histograms": {name: histogram.told() for name, histogram in self._histograms.items()},
        }

    def _of_tasks(self) -> dict[str, float]:
        node = self._node
        states, ledger = node.home.states, node.ledger
        unfinished = [state for state in TaskState if not state.is_final]
        return {
            **{labelled(metrics.TASKS, state=state.value): states[state] for state in unfinished},
            metrics.QUEUE_LENGTH: len(node.queue),
            metrics.QUEUE_OLDEST_WAIT: node.queue.oldest_wait_s(),
            labelled(metrics.EXECUTIONS, home="this"): ledger.running_local,
            labelled(metrics.EXECUTIONS, home="other"): len(ledger.running) - ledger.running_local,
            metrics.GUESTS: len(node.executor.guests),
            metrics.FROZEN_TASKS: sum(1 for _ in node.runs.frozen),
        }

    def _of_nodes(self) -> dict[str, float]:
        peers = dict.fromkeys(PeerState, 0)
        for peer in self._node.membership:
            peers[peer.state] += 1
        return {labelled(metrics.PEERS, state=state.value): count for state, count in peers.items()}

    def _of_agent(self) -> dict[str, float]:
        node = self._node
        profile, report = node.state.profile, node.sharing.shown()
        identity = {"node": node.state.node, "version": __version__, "policy": node.state.policies.name}
        return {
            labelled(metrics.INFO, **identity): 1,
            metrics.STARTED_AT: self._info.started_at,
            metrics.AGENT_CPU: time.process_time(),
            metrics.AGENT_MEMORY: int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE_BYTES,
            metrics.INBOX_EVENTS: len(self._inbox),
            metrics.SLOTS: profile.slots,
            metrics.CPUS: profile.cpus,
            metrics.CPUS_BUSY: report.cpus_busy,
            metrics.MEMORY_SIZE: profile.mem_bytes,
            metrics.MEMORY_USED: report.mem_used_bytes,
            metrics.DRAINED: int(profile.drained),
        }

    def _of_gpus(self) -> dict[str, float]:
        told: dict[str, float] = {}
        for state in self._node.ledger.devices.of_kind(GPU)[:GPUS_TOLD_MAX]:
            if not state.device.is_read:
                continue
            gpu, reading = str(state.device.index), state.reading
            others = reading.mem_foreign_bytes
            told |= {
                labelled(metrics.GPU_UTILIZATION, gpu=gpu): reading.busy,
                labelled(metrics.GPU_MEMORY, gpu=gpu): state.device.mem_bytes,
                labelled(metrics.GPU_MEMORY_USED, gpu=gpu, by="others"): others,
                labelled(metrics.GPU_MEMORY_USED, gpu=gpu, by="tasks"): max(reading.mem_used_bytes - others, 0),
                labelled(metrics.GPU_TEMPERATURE, gpu=gpu): reading.temperature_c,
                labelled(metrics.GPU_TASKS, gpu=gpu): len(state.grants),
                labelled(metrics.GPU_HEALTHY, gpu=gpu): int(reading.health is Health.OK),
            }
            if reading.power_w is not None:
                told[labelled(metrics.GPU_POWER, gpu=gpu)] = reading.power_w
        return told


def _merged(*sources: Mapping[str, int]) -> dict[str, int]:
    """The sums of counters, each with at most LABEL_VALUES_MAX label values and `other`."""
    values: dict[str, dict[str, int]] = {}
    for source in sources:
        for name, count in source.items():
            plain, _, labels = name.partition("{")
            of_name = values.setdefault(plain, {})
            of_name[labels] = of_name.get(labels, 0) + count
    told: dict[str, int] = {}
    for plain, of_name in values.items():
        most = sorted(of_name.items(), key=lambda item: (-item[1], item[0]))
        for labels, count in most[:LABEL_VALUES_MAX]:
            told[f"{plain}{{{labels}" if labels else plain] = count
        if rest := most[LABEL_VALUES_MAX:]:
            key = rest[0][0].partition("=")[0]
            told[labelled(plain, **{key: "other"})] = sum(count for _, count in rest)
    return told
