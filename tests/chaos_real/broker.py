"""A real Mosquitto in a namespace of its own, to be killed and black-holed."""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING

from peerload.security.address import join_address
from tests.chaos_real.machine import send
from tests.chaos_real.network import NAMESPACES

if TYPE_CHECKING:
    from pathlib import Path

PORT = 1883
END_S_MAX = 60.0


class Broker:
    """The broker of the campaign; what it knew is gone when it has been killed."""

    def __init__(self, program: Path, directory: Path, namespace: str, address: str) -> None:
        self.url = f"mqtt://{join_address(address, PORT)}"
        self._log = directory / "broker.log"
        config = directory / "mosquitto.conf"
        config.write_text(f"user root\nlistener {PORT} {address}\nallow_anonymous true\n", encoding="ascii")
        self._words = ["nsenter", f"--net={NAMESPACES / namespace}", str(program), "-c", str(config)]
        self._process: subprocess.Popen[bytes] | None = None

    def configure(self, config: Path) -> None:
        """From its next start on it has this configuration."""
        self._words[-1] = str(config)

    def start(self) -> None:
        """Start it, unless it runs."""
        if self._process is None:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(self._words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(END_S_MAX)
            self._process = None

    def pause(self) -> None:
        """Freeze it: connections stay, nothing is answered."""
        if self._process is not None:
            send(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        if self._process is not None:
            send(self._process.pid, signal.SIGCONT)
