"""A terminal that a test types on and reads: tmux, with a server of its own."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

SHELL_PROMPT = "ready>"
SEEN_S_MAX = 60.0


class Terminal:
    """A shell in a window of ``columns`` by ``rows``; the shell's prompt is SHELL_PROMPT."""

    def __init__(self, program: Path, environment: Mapping[str, str], columns: int = 120, rows: int = 40) -> None:
        self._program = str(program)
        self._directory = tempfile.mkdtemp(prefix="pl-tmux-", dir="/tmp")
        self._socket = f"{self._directory}/socket"
        wanted = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", **environment, "PS1": SHELL_PROMPT}
        shell = shlex.join(["env", "-i", *(f"{key}={value}" for key, value in wanted.items()), "TERM=screen-256color",
                            "sh"])  # fmt: skip
        self._tmux("new-session", "-d", "-x", str(columns), "-y", str(rows), shell)
        self.await_text(SHELL_PROMPT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            with contextlib.suppress(subprocess.SubprocessError):
                sys.stdout.write(self.text())
        with contextlib.suppress(subprocess.SubprocessError):
            self._tmux("kill-server")
        Path(self._socket).unlink(missing_ok=True)
        Path(self._directory).rmdir()

    def _tmux(self, *words: str) -> str:
        done = subprocess.run(
            [self._program, "-S", self._socket, "-f", "/dev/null", *words],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return done.stdout

    def start(self, words: Sequence[str]) -> None:
        """Have the shell run a command, and say how it ended."""
        self.type(f"{shlex.join(words)}; echo ended with $?")
        self.press("Enter")

    def press(self, *keys: str) -> None:
        """Press keys, as tmux calls them: Tab, Enter, Escape, C-c, j."""
        for key in keys:
            self._tmux("send-keys", key)

    def type(self, text: str) -> None:
        """Type a text."""
        self._tmux("send-keys", "-l", text)

    def resize(self, columns: int, rows: int) -> None:
        """Another size."""
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def text(self, *, styled: bool = False) -> str:
        """What can be seen; ``styled``: with the sequences for colours."""
        return self._tmux("capture-pane", "-p", *(["-e"] if styled else []))

    def lines(self) -> list[str]:
        """The same, line by line."""
        return self.text().splitlines()

    def fact(self, name: str) -> str:
        """What tmux knows of the terminal: alternate_on, cursor_flag, mouse_any_flag …"""
        return self._tmux("display-message", "-p", f"#{{{name}}}").strip()

    def await_text(self, *wanted: str, timeout_s: float = SEEN_S_MAX) -> str:
        """Wait until all of this can be seen → the screen."""
        wait_until(lambda: all(text in self.text() for text in wanted), timeout_s, f"{wanted} on the screen")
        return self.text()

    def await_none(self, *unwanted: str, timeout_s: float = SEEN_S_MAX) -> str:
        """Wait until none of this can be seen → the screen."""
        wait_until(lambda: not any(text in self.text() for text in unwanted), timeout_s, f"{unwanted} to go")
        return self.text()
