"""The one consumer of the inbox: the node decides each event, in order, and what it decided is carried out.

What a batch has changed goes to the store together, at its end. Nothing here decides anything about tasks.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from peerload.agent.runtime import now
from peerload.model.errors import InvariantBroken, StoreError

if TYPE_CHECKING:
    from peerload.agent.effects import Performer
    from peerload.agent.recorder import Recorder
    from peerload.agent.runtime import RunState
    from peerload.agent.store.write_ahead import Outbox
    from peerload.core.node import Node
    from peerload.model.actions import Action
    from peerload.model.events import Event

log = logging.getLogger("peerload.agent")


class Consumer:
    """Calls the node. recorder: writes down every event and what was decided; None: nobody asked for a recording.
    validates: whether the invariants of the node are checked after each event."""

    def __init__(
        self,
        node: Node,
        performer: Performer,
        outbox: Outbox,
        run: RunState,
        recorder: Recorder | None,
        *,
        validates: bool = False,
    ) -> None:
        self._node = node
        self._performer = performer
        self._outbox = outbox
        self._run = run
        self._recorder = recorder
        self._validates = validates

    def consume(self, batch: list[Event]) -> None:
        """Handle some events, in order. A bug ends the agent, with nothing done that is not durable."""
        try:
            for event in batch:
                if self._run.has_failed:
                    return
                self._performer.perform(event, self._decide(event))
        except InvariantBroken as error:
            log.critical("%s (%s)", error.what, error.story)
            self._run.fail("a rule of its own was broken")
        except Exception as error:  # crash-only: a bug must not leave half a decision behind
            log.exception("a bug")
            self._run.fail(f"a bug: {error!r}")
        finally:
            self._flush()

    def _decide(self, event: Event) -> list[Action]:
        moment = now()
        try:
            actions = self._node.handle(moment, event)
        except Exception as error:
            if self._recorder is not None:
                self._recorder.handled(moment, event, (), repr(error))
            raise
        if self._recorder is not None:
            self._recorder.handled(moment, event, actions)
        if self._validates:
            self._node.validate()
        return actions

    def _flush(self) -> None:
        if self._recorder is not None:
            self._recorder.flush()
        try:
            self._outbox.flush()
        except StoreError as error:
            self._run.fail(f"the store failed: {error}")
