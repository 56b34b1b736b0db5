"""Tasks with a terminal of their own: what they write to it goes into the file of their stdout. Used by the launcher alone.

The launcher holds the master's side; the task opens the other one as the leader of its session, so that it is its
controlling terminal: Ctrl-C typed into it is a signal for whatever runs in its foreground. stdout and stderr are one.
The launcher has the other side open, too: a task may close all of its own for a while, and find its terminal again.
"""

from __future__ import annotations

import os
import select

from peerload.launcher.record_log import log_line

READ_BYTES = 64 << 10
TURN_BYTES_MAX = 1 << 20
"""Of one terminal no more is copied before others have their turn."""
DRAIN_BYTES_MAX = 4 << 20
"""Of what an ended task has left in its terminal no more is looked for."""
SIDE_MAX = 65_535
"""Rows and columns, as the system counts them."""
DESCRIPTORS = 4
"""Open for each: the master's side, once more for its input, the task's side, and the file."""


class PseudoTerminal:
    """One: ``master`` is our side of it, ``file`` where its output goes, ``slave`` the task's side."""

    __slots__ = ("file", "key", "master", "slave")

    def __init__(self, key: str, path: str) -> None:
        self.key = key
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self.master, self.slave = os.openpty()
        except OSError:
            os.close(self.file)
            raise
        os.set_blocking(self.master, False)

    def resize(self, rows: int, columns: int) -> None:
        """Its window; what runs in its foreground gets SIGWINCH if that is new."""
        import fcntl  # noqa: PLC0415 -- few tasks have a terminal
        import struct  # noqa: PLC0415 -- as above
        import termios  # noqa: PLC0415 -- as above

        if 0 < rows <= SIDE_MAX and 0 < columns <= SIDE_MAX:
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def copy(self, bytes_max: int) -> bool:
        """What has been written to it, to the file. → whether there may be more some day."""
        while bytes_max > 0:
            try:
                data = os.read(self.master, READ_BYTES)
            except BlockingIOError:
                return True
            except OSError as error:
                log_line(f"the terminal of {self.key}: {error.strerror}")
                return False
            if not data:
                return False
            bytes_max -= len(data)
            try:
                while data:
                    data = data[os.write(self.file, data) :]
            except OSError as error:
                log_line(f"output of {self.key} is lost: {error.strerror}")
        return True

    def close(self) -> None:
        """Let go of it: whoever still has it open is hung up."""
        os.close(self.slave)
        os.close(self.master)
        os.close(self.file)


class PseudoTerminals:
    """All of them, by the key of their task."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._by_key: dict[str, PseudoTerminal] = {}
        self._by_master: dict[int, PseudoTerminal] = {}

    @property
    def descriptors(self) -> int:
        """How many of the process's descriptors they take."""
        return DESCRIPTORS * len(self._by_key)

    def open(self, key: str, path: str, rows: int, columns: int) -> PseudoTerminal:
        """A terminal for a task that is about to start. Raises OSError."""
        terminal = PseudoTerminal(key, path)
        terminal.resize(rows, columns)
        self._by_key[key] = self._by_master[terminal.master] = terminal
        self._epoll.register(terminal.master, select.EPOLLIN)
        return terminal

    def resize(self, key: str, rows: int, columns: int) -> None:
        """The window of a task's terminal, if it has one."""
        terminal = self._by_key.get(key)
        if terminal is not None:
            terminal.resize(rows, columns)

    def ready(self, masks: dict[int, int]) -> None:
        """What epoll said of terminals: something was written to one."""
        for master in [fd for fd in masks if fd in self._by_master]:
            terminal = self._by_master[master]
            if not terminal.copy(TURN_BYTES_MAX):
                self._drop(terminal)

    def close(self, key: str) -> None:
        """Its task is over, with all it has started: what is left in it is copied."""
        terminal = self._by_key.get(key)
        if terminal is not None:
            terminal.copy(DRAIN_BYTES_MAX)
            self._drop(terminal)

    def _drop(self, terminal: PseudoTerminal) -> None:
        del self._by_key[terminal.key], self._by_master[terminal.master]
        self._epoll.unregister(terminal.master)
        terminal.close()
