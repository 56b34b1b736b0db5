"""The one consumer of the inbox: the node decides each event, in order, and what it decided is carried out.

What a batch has changed goes to the store together, at its end. Nothing here decides anything about tasks.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from peerload.model import events
from peerload.model.errors import InvariantBroken, StoreError

if TYPE_CHECKING:
    from peerload.agent.effects import Performer
    from peerload.agent.parts import Parts
    from peerload.agent.recorder import Recorder
    from peerload.model.actions import Action
    from peerload.model.events import Event

log = logging.getLogger("peerload.agent")


class Consumer:
    """Who calls the node. ``performer`` is set before the first event comes; ``recorder`` where a recording is asked for."""

    performer: Performer

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.recorder: Recorder | None = None

    def consume(self, batch: list[Event]) -> None:
        """Some events, in order. A bug ends the agent, with nothing done that is not durable."""
        try:
            for event in batch:
                if self._parts.run.has_failed:
                    return
                actions = self._decide(event)
                if isinstance(event, events.LauncherReady):
                    self._parts.launcher.resume()
                self.performer.perform(actions)
                if isinstance(event, events.AgentStarted | events.LauncherReady):
                    self._parts.feeding.adopt(is_first=isinstance(event, events.AgentStarted))
                    self._parts.inside.adopt()
        except InvariantBroken as error:
            log.critical("%s (%s)", error.what, error.story)
            self._parts.run.fail("a rule of its own was broken")
        except Exception as error:  # crash-only: a bug must not leave half a decision behind
            log.exception("a bug")
            self._parts.run.fail(f"a bug: {error!r}")
        finally:
            self._flush()

    def _decide(self, event: Event) -> list[Action]:
        now = self._parts.now()
        try:
            actions = self._parts.node.handle(now, event)
        except Exception as error:
            if self.recorder is not None:
                self.recorder.handled(now, event, (), repr(error))
            raise
        if self.recorder is not None:
            self.recorder.handled(now, event, actions)
        return actions

    def _flush(self) -> None:
        if self.recorder is not None:
            self.recorder.flush()
        try:
            self._parts.release.flush()
        except StoreError as error:
            self._parts.run.fail(f"the store failed: {error}")
