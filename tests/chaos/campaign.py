"""Runs chaos plans by seed, one after another or in several processes, and says what they showed."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

import msgspec

from peerload.model.errors import PeerloadError
from peerload.model.messages import Envelope
from peerload.policy.registry import load_preset
from peerload.wire import peer
from tests.chaos.cluster import Cluster, Outcome
from tests.chaos.draw import draw
from tests.chaos.engine.trace import Trace

PRESETS = ("adaptive", "symmetric", "threshold", "shortest", "receiver", "pairing", "random", "bidding")
"""Presets; those of the first half send a task away as soon as there is no room for it at home."""


class Options(msgspec.Struct, frozen=True):
    """Size of a run."""

    nodes_min: int = 3
    nodes_max: int = 7
    minutes: float = 5.0
    checks_boots: bool = True


def codec(envelope: Envelope, newer: bool) -> Envelope:
    """Through the wire; what a newer version writes has fields that this one does not know."""
    raw = peer.encode(envelope)
    if newer:
        fields = msgspec.msgpack.decode(raw)
        fields["of-a-newer-version"] = [1, {"two": 2}]
        fields["body"]["of-a-newer-version"] = 3
        raw = msgspec.msgpack.encode(fields)
    return peer.decode(raw)


AS_USUAL = Options()


def run(
    seed: int, options: Options = AS_USUAL, write: Callable[[str], object] | None = None, *, traced: bool = False
) -> Outcome:
    """One seed. ``write`` gets each line of its trace; ``traced``: its hash is wanted."""
    plan = draw(seed, PRESETS, nodes_min=options.nodes_min, nodes_max=options.nodes_max, minutes=options.minutes)
    trace = Trace(write) if write is not None or traced else None
    cluster = Cluster(plan, load_preset(plan.preset), codec=codec, trace=trace, checks_boots=options.checks_boots)
    try:
        return cluster.run()
    except PeerloadError:
        raise
    except Exception as error:
        error.add_note(f"seed {seed}, at {cluster.now_s:.6f} s")
        raise


def run_all(seeds: Iterable[int], options: Options, jobs: int) -> Iterator[Outcome]:
    """Every seed, in no order, in so many processes."""
    if jobs <= 1:
        for seed in seeds:
            yield run(seed, options)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        # One at a time: seeds differ in length, and nobody is to wait for the last handful of another.
        yield from pool.imap_unordered(_run, ((seed, options) for seed in seeds))


def _run(given: tuple[int, Options]) -> Outcome:
    return run(*given)


def total(outcomes: Iterable[Outcome]) -> Counter[str]:
    """The gauges of them all."""
    gauges: Counter[str] = Counter()
    for outcome in outcomes:
        gauges.update(outcome.gauges)
    return gauges
