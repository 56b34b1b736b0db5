"""The answer to `stats` in the text format of Prometheus, by the prometheus-client library. It is imported at the first scrape,
since that takes 5 MiB and 50 ms."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import CollectorRegistry

from peerload.model import metrics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = CONTENT_TYPE_LATEST
SERIES_MAX = 300
"""Maximum number of series of one agent. Beyond this counters are left out, the largest ones and those in ALWAYS last."""
PREFIX = "peerload_"
LEFT_OUT = "series_left_out"
HELP_TEXTS = metrics.help_texts | {
    LEFT_OUT: f"Counters that are not shown, since there are more than {SERIES_MAX} series."
}
_LABEL = re.compile(r'([a-z_]+)="([^"]*)"')
ALWAYS = (
    metrics.AGENT_CPU,
    metrics.TASKS_SUBMITTED,
    metrics.TRANSFERS,
    metrics.TASKS_RETURNED,
    metrics.ATTEMPTS_LOST,
    metrics.OUTCOMES_UNKNOWN,
    metrics.OFFERS_SENT,
    metrics.OFFERS_DECLINED,
    metrics.REMOTE_TASKS_COMMITTED,
    metrics.LEASES_FROZEN,
    metrics.POLICY_ERRORS,
    metrics.INBOX_DROPPED,
    metrics.STALLS,
    metrics.COMMITS_STALLED,
    metrics.PEER_SENDS_FAILED,
    metrics.MEMBER_PROBES_FAILED,
    metrics.labelled(metrics.HOOKS, outcome="failed"),
    metrics.labelled(metrics.HOOKS, outcome="dropped"),
)
"""Counters that are shown even at 0, since alerts and the dashboard compute their rate."""


def text(stats: dict[str, Any]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(stats))
    return generate_latest(registry)


class _Collector:
    def __init__(self, stats: dict[str, Any]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        helps, stats = HELP_TEXTS, self._stats
        room = SERIES_MAX - 1
        for name, told in stats.get("histograms", {}).items():
            buckets, total = [], 0
            for bound, count in zip([*map(str, told["bounds"]), "+Inf"], told["counts"], strict=True):
                total += count
                buckets.append((bound, total))
            room -= len(buckets) + 2
            yield HistogramMetricFamily(PREFIX + name, helps.get(name, name), buckets, told["sum"])
        counters = dict.fromkeys(ALWAYS, 0) | stats.get("counters", {})
        gauges: dict[str, float] = dict(stats.get("gauges", {}))
        for name in [*gauges, *counters]:
            if name in gauges and name.partition("{")[0].endswith("_total"):
                counters[name] = gauges.pop(name)
            elif name in counters and not name.partition("{")[0].endswith("_total"):
                gauges[name] = counters.pop(name)
        kept = dict(
            sorted(counters.items(), key=lambda item: (item[0] not in ALWAYS, -item[1]))[: max(room - len(gauges), 0)]
        )
        gauges[LEFT_OUT] = len(counters) - len(kept)
        for kind, series in ((GaugeMetricFamily, gauges), (CounterMetricFamily, kept)):
            by_name: dict[str, dict[str, float]] = {}
            for name, value in series.items():
                plain, _, labels = name.partition("{")
                by_name.setdefault(plain, {})[labels] = value
            for plain, values in by_name.items():
                labels_of = {labels: dict(_LABEL.findall(labels)) for labels in values}
                names = list(next(iter(labels_of.values())))
                family = kind(PREFIX + plain, helps.get(plain, plain), labels=names)
                for labels, value in values.items():
                    family.add_metric([labels_of[labels].get(name, "") for name in names], value)
                yield family
