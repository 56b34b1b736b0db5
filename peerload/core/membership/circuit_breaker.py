"""Circuit breaker for nodes that draw tasks and do nothing with them: they refuse what they said they would take, or
fail all that they are given (P4).

A node that has not answered, or refused though it says that it takes tasks, refusals_max offers of this home in a row is not
asked again for skip_s (one that refuses and says that it is full is only late: others were faster). Nor is one
on which fast_failures_max tasks in a row have failed within fast_failure_s. That many fail of one command may be the
command's fault: as soon as it fails so on a second node, what it did on the first counts no more. Where nobody else could
run a task, its node is asked all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.core.estimates import command_keys
from peerload.model import rules
from peerload.model.bounded import BoundedDict

if TYPE_CHECKING:
    from peerload.core.membership.directory import NamesWithout
    from peerload.core.state import CoreState
    from peerload.model.messages import Need
    from peerload.model.task import Exit, TaskSpec

COMMANDS_MAX = 1024
"""Commands that have failed fast are remembered; the one that did so longest ago is forgotten first."""
NODES_MAX = 1024
"""Nodes of which something is counted, likewise."""
TRANSIENT = ("room", "busy", "cannot")
"""Declines that count: the others tell of something that its profile says, or soon will."""
FAILED_ON_MANY = ""
"""In place of the node of a command that has failed fast on more than one."""


class CircuitBreaker:
    """The breakers of one home for all its peers. eligible: what is remembered of the nodes that can be asked, which is
    cleared whenever a node is skipped from now on, or no more."""

    def __init__(self, state: CoreState, eligible: dict[Need, NamesWithout]) -> None:
        self._state = state
        self._refusals: BoundedDict[str, int] = BoundedDict(NODES_MAX)
        self._failures: BoundedDict[str, dict[bytes, int]] = BoundedDict(NODES_MAX)
        self._failed_on: BoundedDict[bytes, str] = BoundedDict(COMMANDS_MAX)
        self._skipped: dict[str, tuple[float, str]] = {}
        self._eligible = eligible

    def is_any(self) -> bool:
        """True if any node is skipped now (the common case is no)."""
        now_s = self._state.now.boot_s
        over = [node for node, (until_s, _) in self._skipped.items() if until_s <= now_s]
        for node in over:
            del self._skipped[node]
        if over:
            self._eligible.clear()
        return bool(self._skipped)

    def why(self, node: str) -> str:
        """The reason why this node is skipped now; "" if it is not."""
        return self._skipped[node][1] if self._skipped and self.is_any() and node in self._skipped else ""

    def accepted(self, node: str) -> None:
        """Note an accepted offer."""
        self._refusals.pop(node, None)

    def started_anew(self, node: str) -> None:
        """Another start of it: what the last one did is over."""
        self._refusals.pop(node, None)
        self._failures.pop(node, None)
        if self._skipped.pop(node, None) is not None:
            self._eligible.clear()

    def declined(self, node: str, code: str, *, accepts: bool) -> None:
        """Note a declined offer; ``accepts``: though the node says that it takes tasks."""
        if accepts and code in TRANSIENT:
            self.unanswered(node)

    def unanswered(self, node: str) -> None:
        """Note an offer without an answer."""
        count = self._refusals[node] = self._refusals.get(node, 0) + 1
        if count >= self._state.config.refusals_max:
            self._refusals[node] = count - 1  # when it is asked again, one more is enough
            self._skip(node, f"it refused {count} offers in a row, or did not answer them")

    def ended(self, node: str, spec: TaskSpec, exit_: Exit) -> None:
        """Note how a task that was given to a node has ended."""
        if exit_.exit_code == 0 or exit_.ended_at - exit_.started_at >= self._state.config.fast_failure_s:
            self._failures.pop(node, None)
            return
        command = command_keys(spec.argv, spec.directory)[0]
        if not self._is_on_this_alone(command, node):
            return
        failures = self._failures[node] = self._failures.get(node) or {}
        failures[command] = failures.get(command, 0) + 1
        count = sum(failures.values())
        if count >= self._state.config.fast_failures_max:
            failures[command] -= 1  # as above
            limit_s = self._state.config.fast_failure_s
            self._skip(node, f"{count} tasks in a row failed there within {limit_s:g} s each")

    def _is_on_this_alone(self, command: bytes, node: str) -> bool:
        """Remember where a command failed fast. False: it did so elsewhere, too, so that it says nothing about the node."""
        first = self._failed_on[command] = self._failed_on.get(command, node)
        if first == node:
            return True
        self._failed_on[command] = FAILED_ON_MANY
        for failures in self._failures.values():
            failures.pop(command, None)
        return False

    def _skip(self, node: str, because: str) -> None:
        if node == self._state.node:
            return
        is_new = node not in self._skipped
        skip_s = self._state.config.skip_s
        self._skipped[node] = self._state.now.boot_s + skip_s, f"skipped for {skip_s:g} s: {because}"
        if is_new:
            self._state.note("node", "skipped", node=node, reason=because)
            self._state.broken(rules.CLAIMS_HARMLESS, node, because)
            self._eligible.clear()
