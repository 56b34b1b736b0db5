"""Serving of standard input to the nodes that run tasks of this home: sent over a stream as far as each node requests it.

A request says how much the node has: that need not be kept for it any more, and a client may send so much more.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from peerload.agent.event_loop import BackgroundTasks
from peerload.model.messages import InputChunk, InputEnd, InputRequest, InputWindow
from peerload.model.task import TaskState, execution_key

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from peerload.agent.peers.connection import PeerConnection
    from peerload.agent.run_state import RunState
    from peerload.agent.stdin.stdin_forwarding import StdinForwarding
    from peerload.agent.stdin.stdin_store import StdinStore, StoredStdin
    from peerload.core.node import Node
    from peerload.core.work import HomeTask
    from peerload.model.messages import Message

log = logging.getLogger("peerload.input")

PIECE_BYTES_MAX = 256 << 10


class ServedStdin:
    """One stream: what ``node`` has asked for last, and how far it was sent."""

    def __init__(
        self,
        server: StdinServer,
        link: PeerConnection,
        node: str,
        request: InputRequest,
        say: Callable[[Message], None],
    ) -> None:
        self._server = server
        self._link = link
        self._node = node
        self.request = request
        self._say = say
        self._sent = request.have
        self._window: tuple[int, int] | None = None
        self.asked: asyncio.Event | None = None
        self.work: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Send what is asked for as it comes, then the end."""
        task = self._task()
        if task is None:
            self._say(InputEnd(gone=True))
            await self._link.drain()
            return
        source = self._server.inputs.get(task.record.input)
        source.began(execution_key(self.request.uid, self.request.attempt))
        file = os.open(source.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            with source.watched() as changed:
                self.asked = changed
                await self._send_all(task, source, file, changed)
        finally:
            os.close(file)

    def _task(self) -> HomeTask | None:
        """The task that this node runs for us, None if it does not (any more)."""
        request = self.request
        task = self._server.node.home.tasks.get(request.uid)
        if task is None or not task.record.input or task.record.state is not TaskState.LEASED:
            return None
        is_its = (task.record.node, task.record.attempt, task.task) == (self._node, request.attempt, request.task)
        return task if is_its else None

    async def _send_all(self, task: HomeTask, source: StoredStdin, file: int, changed: asyncio.Event) -> None:
        has_ended = False
        while self._task() is task:
            changed.clear()
            source.take(self.request.have, is_closed=self.request.is_closed)
            self._server.forwarding.cut_if_due(task.uid, source)
            if source.window is not None and source.window != self._window:
                self._window = source.window
                self._say(InputWindow(*source.window))
            while self._sent < min(source.size_bytes, self.request.up_to):
                size = min(source.size_bytes, self.request.up_to) - self._sent
                data = os.pread(file, min(size, PIECE_BYTES_MAX), self._sent)
                self._say(InputChunk(self._sent, data))
                self._sent += len(data)
                await self._link.drain()
            if source.has_ended and self._sent == source.size_bytes and not has_ended:
                has_ended = True
                self._say(InputEnd(source.size_bytes))
            await self._link.drain()
            await changed.wait()
        self._say(InputEnd(gone=True))
        await self._link.drain()


class StdinServer:
    """The streams of one home that serve standard input."""

    def __init__(self, node: Node, inputs: StdinStore, forwarding: StdinForwarding, run: RunState) -> None:
        self.node = node
        self.inputs = inputs
        self.forwarding = forwarding
        self._background = BackgroundTasks(run)
        self._served: dict[PeerConnection, ServedStdin] = {}

    def received(self, link: PeerConnection, node: str, message: InputRequest, say: Callable[[Message], None]) -> None:
        """A node asks for the input of an attempt, or for more of it; ``say`` answers."""
        served = self._served.get(link)
        if served is None:
            served = self._served[link] = ServedStdin(self, link, node, message, say)
            served.work = self._background.start(self._run(served, link))
            return
        known = served.request
        if (known.uid, known.attempt) != (message.uid, message.attempt):
            link.close("another input on one stream")
            return
        served.request = message
        if served.asked is not None:
            served.asked.set()

    async def _run(self, served: ServedStdin, link: PeerConnection) -> None:
        try:
            await served.run()
        except ConnectionError:
            return  # the asker went away, and asks again from where it was
        except OSError as error:
            log.warning("cannot serve standard input: task=%s error=%s", served.request.task, error)
        link.close("the input is complete")

    def closed(self, link: PeerConnection) -> None:
        """The other end is gone."""
        served = self._served.pop(link, None)
        if served is not None and served.work is not None:
            served.work.cancel()

    async def close(self) -> None:
        """Serve nobody any more."""
        await self._background.close()
