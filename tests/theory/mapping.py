"""A reference case's parameters → the preset and the workload that play it.

The parameters are those of docs/policies.md ("how the simulator is judged"): T's in absolute tasks of a node, rates
per mean service time, service times of mean 1. Every case of the format is translated; a policy or a kind that is not
there (yet) is found out by the registry, not by a list kept here.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean
from typing import Any

from peerload.model.errors import ConfigError
from peerload.policy.api import THRESHOLD_MAX
from peerload.policy.preset import PolicySet
from peerload.policy.registry import build_preset
from peerload.sim.queueing_model import Delays
from peerload.sim.replication import Setup
from peerload.sim.service import Draw, draw_of

Parameters = dict[str, Any]

WITHOUT_LIMIT = 1000
"""Migrations allowed where the case names no limit."""
PLACEMENTS = {"jsqd": "JoinShortest", "board-min": "LeastOnBoard", "board-d": "LeastOnBoard"}
"""Placements of the reference model and their classes in placements.py: they draw from all nodes, or read a board."""
KNOWN = (
    "N", "c", "rho", "lam_spec", "speed_spec", "service", "service_params",
    "sender", "T_send", "T_accept", "L", "delta", "bidders",
    "T_recv", "T_give", "L_recv", "steal", "retry_rate", "L_retry",
    "pair_rate", "pair_diff", "footprints", "max_migrations", "priority", "xdelay", "board_period",
)  # fmt: skip


class NotYet(Exception):
    """This case cannot be played, and why."""


def setup_of(parameters: Parameters) -> Setup:
    """Raises NotYet with the reason."""
    unknown = sorted(set(parameters).difference(KNOWN))
    if unknown:
        raise NotYet(f"parameters that nobody knows: {', '.join(unknown)}")
    nodes, slots = int(parameters["N"]), int(parameters.get("c", 1))
    if nodes * slots < 1:
        raise NotYet("no node")
    speeds = _each(parameters, "speed_spec", nodes)
    rates = _each(parameters, "lam_spec", nodes)
    if not rates:  # rho is that of the whole system; as many tasks come to each node
        rates = [float(parameters["rho"]) * slots * (fmean(speeds) if speeds else 1.0)] * nodes
    return Setup(
        _preset(parameters, slots),
        [slots] * nodes,
        rates,
        service_of(str(parameters.get("service", "exp")), parameters.get("service_params") or ()),
        Delays(transfer_s=float(parameters.get("xdelay", 0.0))),
        speeds=tuple(speeds),
    )


def _each(parameters: Parameters, key: str, nodes: int) -> list[float]:
    """``[[count, value], …]``: a value a node; [] if the case does not say."""
    values = [value for count, value in parameters.get(key) or () for value in [float(value)] * int(count)]
    if values and len(values) != nodes:
        raise NotYet(f"{key} names {len(values)} of {nodes} nodes")
    return values


def _preset(parameters: Parameters, slots: int) -> PolicySet:
    sender = str(parameters.get("sender", "none"))
    table: dict[str, Any] = {
        "load": {"policy": "tasks"},
        "transfer": _thresholds(parameters, slots),
        "information": _information(parameters),
        "priority": {"policy": str(parameters.get("priority", "fcfs"))},
        "selection": {"policy": "oldest" if parameters.get("steal") == "head" else "newest"},
        "migration": {"policy": "controlled", "limit": int(parameters.get("max_migrations", WITHOUT_LIMIT))},
        "location": {"sender": _sender(sender, parameters), "receiver": _receiver(parameters)},
    }
    if parameters.get("pair_rate"):
        table["location"]["pairing"] = {
            "policy": "pairing",
            "rate": float(parameters["pair_rate"]),
            "difference": int(parameters.get("pair_diff", 2)),
            "asks_from": 0.0,  # in the reference model idle nodes ask, too: with 2.0 X-pair3 gives 2.99 and not 2.75
        }
    if parameters.get("footprints"):
        table["location"]["memory"] = True
    try:
        return build_preset("case", table, Path(__file__).parent)
    except ConfigError as error:
        raise NotYet(str(error)) from error


def _information(parameters: Parameters) -> dict[str, Any]:
    """A board is what everybody tells at the same moments."""
    if parameters.get("board_period"):
        return {"policy": "periodic", "period_s": float(parameters["board_period"])}
    return {"policy": "poll"}


def _placement(policy: str, parameters: Parameters) -> dict[str, Any]:
    table: dict[str, Any] = {"policy": f"placements.py:{PLACEMENTS[policy]}"}
    if policy == "jsqd":
        table["probes"] = int(parameters["L"])
    elif policy == "board-d":
        table["draws"] = int(parameters["L"])
    return table


def _sender(policy: str, parameters: Parameters) -> dict[str, Any]:
    if policy in PLACEMENTS:
        return _placement(policy, parameters)
    if policy in ("none", "random", "first-reply"):
        return {"policy": policy}
    if policy == "bidding":
        return {"policy": policy, "bidders": int(parameters.get("bidders") or parameters.get("L", 0))}
    table: dict[str, Any] = {"policy": policy, "probes": int(parameters.get("L", 0))}
    if "delta" in parameters:
        table["delta"] = parameters["delta"]
    return table


def _receiver(parameters: Parameters) -> dict[str, Any]:
    if "T_recv" not in parameters:
        return {"policy": "none"}
    table: dict[str, Any] = {"policy": "poll", "probes": int(parameters.get("L_recv", 0))}
    if parameters.get("retry_rate"):
        table["retry_rate"] = float(parameters["retry_rate"])
        table["retry_probes"] = int(parameters.get("L_retry", 1))
    return table


def _thresholds(parameters: Parameters, slots: int) -> dict[str, Any]:
    """T's in thresholds per slot. One that a case does not name is one that its policies do not ask for."""
    send = float(parameters.get("T_send", 0 if parameters.get("sender") == "jsqd" else 1))
    receive = float(parameters.get("T_recv", 1))
    return {
        "policy": "single-threshold",
        "send_at": _per_slot(send, slots),
        "accept_below": _per_slot(float(parameters.get("T_accept", send)), slots),
        "receive_below": _per_slot(receive, slots),
        "give_above": _per_slot(float(parameters.get("T_give", receive)), slots, up=True),
    }


def _per_slot(tasks: float, slots: int, *, up: bool = False) -> float:
    """The threshold that means so many tasks when it is multiplied by the slots again. Where no float does that exactly it
    is a little less, which is the same to n ≥ and n <, or with ``up`` a little more, for n >."""
    threshold = min(tasks / slots, THRESHOLD_MAX)  # a case says "always" with a number no queue ever reaches
    while threshold < THRESHOLD_MAX and ((threshold * slots < tasks) if up else (threshold * slots > tasks)):
        threshold = math.nextafter(threshold, math.inf if up else 0.0)
    return threshold


def service_of(name: str, parameters: list[float] | tuple[float, ...]) -> Draw:
    """A distribution by the name it has in the cases."""
    try:
        return draw_of(name, parameters)
    except ConfigError as error:
        raise NotYet(str(error)) from error
