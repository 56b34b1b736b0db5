"""Random choice of peers, one after the other, without replacement, as docs/policies.md (reports and probing)
describes.

Nodes that memory names are asked first, newest first, at most REMEMBERED_MAX of them; that costs none of a search's
probes. The others are drawn by chance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Sequence

    from peerload.policy.api import NodeView, Reply

REMEMBERED_MAX = 2
"""Names from memory that one search asks. With many nodes the lists are always full, mostly of outdated hints."""
DIRECT_DRAWS_MAX = 16
"""Draws by rejection before the remaining peers are listed; keeps a draw O(1) among many peers."""


def draw_receiver(view: NodeView, replies: Sequence[Reply], rng: random.Random, probes: int) -> str | None:
    """Draw a peer to ask whether it accepts a task: from the idle list first; then, up to ``probes`` of them,
    uniformly, or by reports: first peers that reported that they accept, then peers without a report, never the
    others. None if no peer is left."""
    asked = {reply.node for reply in replies}
    named = _remembered(view.idle_list, view.peers, replies)
    if named is not None or _spent(replies) >= probes:
        return named
    if not view.reports_guide_probing:
        return _uniform(view.peers, asked, rng)
    return _by_report(view, asked, rng, wanted="accepts")


def draw_donor(view: NodeView, replies: Sequence[Reply], rng: random.Random, probes: int) -> str | None:
    """Draw a peer to ask for a task: as `draw_receiver`, from the busy list, and by whether reports say that it
    gives."""
    asked = {reply.node for reply in replies}
    named = _remembered(view.busy_list, view.peers, replies)
    if named is not None or _spent(replies) >= probes:
        return named
    if not view.reports_guide_probing:
        return _uniform(view.peers, asked, rng)
    return _by_report(view, asked, rng, wanted="gives")


def was_declined(replies: Sequence[Reply]) -> bool:
    """True if an offer was made and declined: probing is over, and the next best node is tried."""
    return len({reply.node for reply in replies}) < len(replies)


def _spent(replies: Sequence[Reply]) -> int:
    """Number of probes by chance so far; a declined offer counts as none."""
    return len({reply.node for reply in replies if not reply.remembered})


def _remembered(names: Sequence[str], peers: Sequence[str], replies: Sequence[Reply]) -> str | None:
    """Newest name that may be asked."""
    if len({reply.node for reply in replies if reply.remembered}) >= REMEMBERED_MAX:
        return None
    asked = {reply.node for reply in replies}
    return next((name for name in reversed(names) if name not in asked and name in peers), None)


def _uniform(peers: Sequence[str], asked: Collection[str], rng: random.Random) -> str | None:
    if not peers:
        return None
    for _ in range(DIRECT_DRAWS_MAX):
        peer = peers[rng.randrange(len(peers))]
        if peer not in asked:
            return peer
    left = [peer for peer in peers if peer not in asked]
    return left[rng.randrange(len(left))] if left else None


def _by_report(view: NodeView, asked: Collection[str], rng: random.Random, wanted: str) -> str | None:
    if wanted == "accepts":
        pool = [peer for peer, report in view.reports() if report.accepts and peer not in asked]
    else:
        pool = [peer for peer, report in view.reports() if report.gives and peer not in asked]
    if not pool:
        heard = {peer for peer, _ in view.reports()}
        pool = [peer for peer in view.peers if peer not in heard and peer not in asked]
    return pool[rng.randrange(len(pool))] if pool else None
