"""Forwarding of standard input to what runs on this node: the file that feeds each attempt, and its progress.

A task of this home is fed from its input itself (`stdin_store.py`), an attempt of another home from a file in this node's
spool into which its fetch (`stdin_fetch.py`) writes. The launcher feeds, and reports its progress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peerload.core.work import HomePhase, RemotePhase
from peerload.model.events import InputCame, InputCut

if TYPE_CHECKING:
    from peerload.agent.inbox import Inbox
    from peerload.agent.launcher.client import LauncherLink
    from peerload.agent.output.spool import Spool
    from peerload.agent.stdin.stdin_fetch import StdinFetches
    from peerload.agent.stdin.stdin_store import StdinStore, StoredStdin
    from peerload.core.node import Node
    from peerload.model.actions import SpawnTask, TaskChanged
    from peerload.model.task import TaskRecord


class StdinForwarding:
    """The forwarding of one agent. inputs: of tasks of this home; fetches: for attempts of other homes."""

    def __init__(
        self,
        node: Node,
        launcher: LauncherLink,
        inbox: Inbox,
        spool: Spool,
        inputs: StdinStore,
        fetches: StdinFetches,
    ) -> None:
        self._node = node
        self._launcher = launcher
        self._inbox = inbox
        self._spool = spool
        self._inputs = inputs
        self._fetches = fetches
        self._here: dict[str, StoredStdin] = {}
        self._commands: set[str] = set()
        self._asked_to_cut: set[bytes] = set()

    def source(self, action: SpawnTask) -> str:
        """The file that the stdin of an attempt is to be fed from, "" = /dev/null. `begin` when it was ordered. Raises
        OSError."""
        spec = action.spec
        if not spec.takes_input:
            return ""
        task = self._node.home.by_id.get(action.task) if action.home == self._node.state.identity.node else None
        if task is not None:
            return str(self._inputs.get(task.record.input).path) if task.record.input else ""
        return str(self._spool.input_path(action.key))

    def begin(self, key: str) -> None:
        """The launcher was told to start this attempt, or runs it still: tell it what there is to read, and go on with
        that."""
        uid = bytes.fromhex(key.partition("-")[0])
        task = self._node.home.tasks.get(uid)
        if task is not None and task.key == key and task.phase is HomePhase.HERE:
            if task.record.input:
                source = self._here.get(key)
                if source is None:
                    source = self._here[key] = self._inputs.get(task.record.input)
                    source.is_cut = task.record.input_is_cut
                    source.began(key)
                self.grown(key, source)
            return
        guest = self._node.executor.guests.get(key)
        if guest is not None and guest.spec.takes_input and guest.phase is RemotePhase.HERE:
            self._fetches.begin(guest)

    def begin_command(self, key: str, source: StoredStdin) -> None:
        """The launcher was told to start this command of `exec`, which reads from there, or runs it still."""
        self._here[key] = source
        self._commands.add(key)
        self.grown(key, source)

    def end_command(self, key: str) -> None:
        """A command of `exec` is over."""
        self._commands.discard(key)
        self._here.pop(key, None)

    def grown(self, key: str, source: StoredStdin) -> None:
        """Tell the launcher that the input has grown, or has ended."""
        self._launcher.feed(key, source.size_bytes, has_ended=source.has_ended)

    def adopt(self, *, is_first: bool) -> None:
        """A launcher was listed: go on with all that runs here, whatever it was told before. ``is_first``: this agent has
        just been started, and what is nobody's may go."""
        node = self._node
        if is_first:
            self._inputs.drop_others({task.record.input for task in node.home.tasks.values()})
        for task in list(node.home.tasks.values()):
            if task.phase is HomePhase.HERE and task.record.input:
                self.begin(task.key)
        for guest in list(node.executor.guests.values()):
            if guest.phase is RemotePhase.HERE and guest.spec.takes_input:
                self.begin(guest.key)
        for key in sorted(self._commands):
            self.grown(key, self._here[key])

    def sent(self, uid: bytes) -> None:
        """A client has sent more to a task of this home."""
        task = self._node.home.tasks.get(uid)
        if task is None or not task.record.input:
            return
        source = self._inputs.get(task.record.input)
        if task.key in self._here:
            self.grown(task.key, source)
        self.cut_if_due(uid, source)

    def resized(self, uid: bytes) -> None:
        """The window of a client is another."""
        task = self._node.home.tasks.get(uid)
        if task is not None and task.key in self._here:
            window = self._here[task.key].window
            if window is not None:
                self._launcher.resize(task.key, *window)

    def cut_if_due(self, uid: bytes, source: StoredStdin) -> None:
        """Have the beginning of what is too large dropped: that is durable before it is done."""
        if source.is_too_large and uid not in self._asked_to_cut:
            self._asked_to_cut.add(uid)
            self._inbox.put(InputCut(uid))

    def fed(self, key: str, offset: int, *, is_closed: bool) -> None:
        """The launcher has fed so much to this attempt; ``is_closed``: it reads no more."""
        source = self._here.get(key)
        if source is not None:
            source.take(offset, is_closed=is_closed)
        else:
            self._fetches.fed(key, offset, is_closed=is_closed)

    def note_input(self, record: TaskRecord, source: StoredStdin) -> None:
        """Have the record say that something has come, if it has."""
        if source.size_bytes and not record.input_came:
            self._inbox.put(InputCame(record.uid))

    def changed(self, action: TaskChanged) -> None:
        """A task of this home has another record: what was fed from its input is over if it does not run here any more."""
        record = action.record
        if not record.input:
            return
        if record.state.is_final:
            self._asked_to_cut.discard(record.uid)
            self._inputs.drop(record.input)
        else:
            source = self._inputs.get(record.input)
            source.uid = record.uid
            source.is_cut = record.input_is_cut
            self.note_input(record, source)
        current = f"{record.uid.hex()}-{record.attempt}" if record.node == self._node.state.identity.node else ""
        for key in [key for key in self._here if key.startswith(record.uid.hex()) and key != current]:
            del self._here[key]
