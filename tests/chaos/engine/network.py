"""Simulated network: every fault of a message on its way is a named option with one meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from peerload.model.messages import PROTOCOL_MAX, Envelope

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from peerload.model.messages import Message

    Codec = Callable[[Envelope], Envelope]


class Partition(msgspec.Struct, frozen=True):
    """From ``from_s`` until ``until_s`` nothing passes between ``nodes`` and the others."""

    from_s: float
    until_s: float
    nodes: tuple[str, ...]

    def cuts(self, at_s: float, src: str, dst: str) -> bool:
        """True if it stands between these two now."""
        return self.from_s <= at_s < self.until_s and (src in self.nodes) is not (dst in self.nodes)


class Clog(msgspec.Struct, frozen=True):
    """What ``src`` says to ``dst`` from ``from_s`` on arrives at ``until_s``, all at once; the way back is free."""

    from_s: float
    until_s: float
    src: str
    dst: str

    def holds(self, at_s: float, src: str, dst: str) -> bool:
        """True if a message sent now is stuck in it."""
        return self.from_s <= at_s < self.until_s and (src, dst) == (self.src, self.dst)


class NetworkOptions(msgspec.Struct, frozen=True, kw_only=True):
    """delay_s: one way, at least; jitter_s: mean of an exponential addition (messages may overtake each other);
    loss, duplication: share of messages; replay: share that arrives once more, up to replay_s later, whatever was
    restarted meanwhile; output_loss: share of outputs that break off while they are fetched (0: all are so small that
    they ride along with their result). faults_until_s: all of these end then, no message is replayed later."""

    delay_s: float = 0.0005
    jitter_s: float = 0.0
    loss: float = 0.0
    duplication: float = 0.0
    replay: float = 0.0
    replay_s: float = 0.0
    output_loss: float = 0.0
    partitions: tuple[Partition, ...] = ()
    clogs: tuple[Clog, ...] = ()
    faults_until_s: float = float("inf")


class SimNetwork:
    """Decides when, and how often, a message arrives. ``codec``: every message passes it, as it would the wire."""

    def __init__(self, options: NetworkOptions, rng: random.Random, codec: Codec | None = None) -> None:
        self._options = options
        self._rng = rng
        self._codec = codec
        self._sequence = 0
        self.sent = 0
        self.lost = 0

    def arrivals(self, at_s: float, src: str, dst: str) -> list[float]:
        """The times at which the copies of a message sent now arrive; [] if it is lost."""
        options, rng = self._options, self._rng
        self.sent += 1
        if self.is_cut(at_s, src, dst):
            self.lost += 1
            return []
        for clog in options.clogs:
            if clog.holds(at_s, src, dst):
                return [clog.until_s + options.delay_s]
        if at_s >= options.faults_until_s:
            return [at_s + options.delay_s]
        if options.loss and rng.random() < options.loss:
            self.lost += 1
            return []
        copies = 2 if options.duplication and rng.random() < options.duplication else 1
        arrivals = [
            at_s + options.delay_s + (rng.expovariate(1.0 / options.jitter_s) if options.jitter_s else 0.0)
            for _ in range(copies)
        ]
        if options.replay and rng.random() < options.replay:
            arrivals.append(min(arrivals[-1] + rng.uniform(0.0, options.replay_s), options.faults_until_s))
        return arrivals

    @property
    def outputs_are_fetched(self) -> bool:
        """True if outputs are too large to ride along with their results."""
        return self._options.output_loss > 0.0

    def breaks_output(self, at_s: float, src: str, dst: str) -> bool:
        """True if an output fetched now breaks off."""
        if self.is_cut(at_s, src, dst):
            return True
        options = self._options
        return at_s < options.faults_until_s and self._rng.random() < options.output_loss

    def is_cut(self, at_s: float, src: str, dst: str) -> bool:
        """True if a partition stands between these two now."""
        return any(partition.cuts(at_s, src, dst) for partition in self._options.partitions)

    def carried(self, src: str, src_boot: str, dst: str, message: Message) -> Message:
        """The message as the other end reads it."""
        if self._codec is None:
            return message
        self._sequence += 1
        return self._codec(Envelope(PROTOCOL_MAX, "sim", src, src_boot, self._sequence, message, dst)).body
