"""Pseudo-terminals of tasks: what a task writes to its terminal goes into the file of its stdout. Used by the launcher
alone.

The launcher holds the master; the task opens the slave as the leader of its session, so that it becomes its controlling
terminal: Ctrl-C is a signal for its foreground processes. stdout and stderr are one. The launcher keeps the slave open,
too: a task may close all of its descriptors for a while, and open its terminal again.
"""

from __future__ import annotations

import os
import select

from peerload.launcher.record_log import log_line

READ_BYTES = 64 << 10
TURN_BYTES_MAX = 1 << 20
"""Bytes copied from one terminal before others have their turn."""
DRAIN_BYTES_MAX = 4 << 20
"""Bytes copied from the terminal of an ended task."""
SIDE_MAX = 65_535
"""Most rows and columns that the system can count."""
DESCRIPTORS = 4
"""Open descriptors for each: the master, its copy for the input, the slave, and the file."""


class PseudoTerminal:
    """One terminal. file: where its output goes."""

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
        """Set the window size; its foreground processes get SIGWINCH if it is new."""
        import fcntl  # noqa: PLC0415 -- few tasks have a terminal
        import struct  # noqa: PLC0415 -- as above
        import termios  # noqa: PLC0415 -- as above

        if 0 < rows <= SIDE_MAX and 0 < columns <= SIDE_MAX:
            fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def copy(self, bytes_max: int) -> bool:
        """Copy output to the file. → whether there may be more later."""
        while bytes_max > 0:
            try:
                data = os.read(self.master, READ_BYTES)
            except BlockingIOError:
                return True
            except OSError as error:
                log_line(f"terminal of a task failed: key={self.key} error={error.strerror}")
                return False
            if not data:
                return False
            bytes_max -= len(data)
            try:
                while data:
                    data = data[os.write(self.file, data) :]
            except OSError as error:
                log_line(f"output of a task is lost: key={self.key} error={error.strerror}")
        return True

    def close(self) -> None:
        """Close it: whoever still has it open is hung up."""
        os.close(self.slave)
        os.close(self.master)
        os.close(self.file)


class PseudoTerminals:
    """All terminals, by the key of their task."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._by_key: dict[str, PseudoTerminal] = {}
        self._by_master: dict[int, PseudoTerminal] = {}

    @property
    def descriptors(self) -> int:
        """Number of open descriptors."""
        return DESCRIPTORS * len(self._by_key)

    def open(self, key: str, path: str, rows: int, columns: int) -> PseudoTerminal:
        """Open a terminal for a task that is about to start. Raises OSError."""
        terminal = PseudoTerminal(key, path)
        terminal.resize(rows, columns)
        self._by_key[key] = self._by_master[terminal.master] = terminal
        self._epoll.register(terminal.master, select.EPOLLIN)
        return terminal

    def resize(self, key: str, rows: int, columns: int) -> None:
        """Set the window size of a task's terminal, if it has one."""
        terminal = self._by_key.get(key)
        if terminal is not None:
            terminal.resize(rows, columns)

    def ready(self, masks: dict[int, int]) -> None:
        """Copy the output that epoll reported."""
        for master in [fd for fd in masks if fd in self._by_master]:
            terminal = self._by_master[master]
            if not terminal.copy(TURN_BYTES_MAX):
                self._drop(terminal)

    def close(self, key: str) -> None:
        """Copy what is left, and close the terminal of an ended task."""
        terminal = self._by_key.get(key)
        if terminal is not None:
            terminal.copy(DRAIN_BYTES_MAX)
            self._drop(terminal)

    def _drop(self, terminal: PseudoTerminal) -> None:
        del self._by_key[terminal.key], self._by_master[terminal.master]
        self._epoll.unregister(terminal.master)
        terminal.close()
