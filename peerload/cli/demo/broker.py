"""An MQTT broker for the demo, in its own process (`python -m peerload.cli.demo.broker PORT`: amqtt).

Production uses Mosquitto from the distribution (deploy/mosquitto.conf). The broker of the demo listens only on the loopback
interface, has no access control there, and stores nothing across a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Literal, Self

from peerload.distribution import how_to_add
from peerload.model.errors import PeerloadError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Kind = Literal["mosquitto", "amqtt"]

START_S_MAX = 20.0
"""Time limit for a broker process to accept connections."""
STOP_S_MAX = 5.0
STARTS_MAX = 5
"""Number of ports to try: another program may take a port after it was found free."""
QUEUED_MESSAGES_MAX = 10_000
"""Queue limit of each client. Mosquitto's default of 1000 would drop retained States in a larger cluster."""

_MOSQUITTO = """\
listener {port} 127.0.0.1
allow_anonymous true
set_tcp_nodelay true
persistence false
max_queued_messages {queued}
connection_messages false
log_dest file {log}
{user}
"""


class BrokerUnavailable(PeerloadError):
    """Error: a broker could not be started; ``why`` has its last log lines."""

    code = "broker-unavailable"


def find_broker() -> Kind | None:
    """The broker that can be started here: Mosquitto if it is installed, else amqtt, else None."""
    if _mosquitto() is not None:
        return "mosquitto"
    return "amqtt" if importlib.util.find_spec("amqtt") is not None else None


def _mosquitto() -> str | None:
    path = os.environ.get("PATH", os.defpath)
    return shutil.which("mosquitto", path=os.pathsep.join((path, "/usr/sbin", "/sbin", "/usr/local/sbin")))


class BrokerProcess:
    """A broker process with its files in ``directory``. `start`, `kill` and `stop` may be called repeatedly;
    the port stays the same after the first start."""

    def __init__(self, directory: Path, kind: Kind) -> None:
        self.kind = kind
        self.port = 0
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id; 0 if it does not run."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> Self:
        """Start it and return when it accepts connections. Raises BrokerUnavailable."""
        problem = ""
        for _ in range(STARTS_MAX):
            port = self.port or _free_port()
            self._process = self._spawn(port)
            problem = self._await_start(port)
            if not problem:
                self.port = port
                return self
            self.kill()
        raise BrokerUnavailable(f"{self.kind} does not start", why=problem, hint=f"see {self._log}")

    @property
    def _log(self) -> Path:
        return self._directory / f"{self.kind}.log"

    def _spawn(self, port: int) -> subprocess.Popen[bytes]:
        self._log.unlink(missing_ok=True)
        if self.kind == "amqtt":
            argv = [sys.executable, "-m", "peerload.cli.demo.broker", str(port)]
        else:
            user = "user root" if os.geteuid() == 0 else ""  # Mosquitto's default user could not write here
            text = _MOSQUITTO.format(port=port, queued=QUEUED_MESSAGES_MAX, log=self._log, user=user)
            configuration = self._directory / "mosquitto.conf"
            configuration.write_text(text)
            argv = [_mosquitto() or "mosquitto", "-c", str(configuration)]
        with self._log.open("ab") as errors:
            try:
                return subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
                )
            except OSError as error:
                raise BrokerUnavailable(f"{self.kind} does not start", why=str(error)) from error

    def _await_start(self, port: int) -> str:
        """Wait until it runs → "", or the reason why it does not. Its log is checked first, since another program may
        answer at the port."""
        process, pause = self._process, threading.Event()
        if process is None or process.stdout is None:
            return "no process"
        deadline = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline:
            if process.poll() is not None:
                return self._last_words() or f"it exited with {process.returncode}"
            if self._says_it_runs(process) and _accepts(port):
                return ""
            pause.wait(0.02)
        return f"not within {START_S_MAX:g} s"

    def _says_it_runs(self, process: subprocess.Popen[bytes]) -> bool:
        if self.kind == "mosquitto":
            return self._log.exists() and b" running" in self._log.read_bytes()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout or -1, selectors.EVENT_READ)
            return bool(selector.select(timeout=0.0))

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines() if self._log.exists() else []
        return lines[-1] if lines else ""

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def start_broker(directory: Path, kind: Kind | None = None) -> Iterator[BrokerProcess]:
    """Context with a broker on a free loopback port. Raises BrokerUnavailable if none can be started."""
    chosen = kind or find_broker()
    if chosen is None:
        raise BrokerUnavailable(
            "no MQTT broker can be started",
            why="neither mosquitto nor amqtt is installed",
            hint=f"apt install mosquitto        or:  {how_to_add('broker')}",
        )
    broker = BrokerProcess(directory, chosen)
    try:
        yield broker.start()
    finally:
        broker.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


async def serve(port: int) -> None:
    """Run an amqtt broker at this port until SIGTERM or SIGINT. Prints a line as soon as it listens. Raises
    BrokerUnavailable if the package is not installed or the port is taken."""
    try:
        from amqtt.broker import Broker
        from amqtt.contexts import BrokerConfig, ListenerConfig
        from amqtt.errors import BrokerError
    except ImportError as error:
        raise BrokerUnavailable(
            "the small broker is not installed", why=str(error), hint=how_to_add("broker")
        ) from error
    # The plug-ins are listed because the default set logs a deprecation warning. The last one provides $SYS.
    config = BrokerConfig(
        listeners={"default": ListenerConfig(bind=f"127.0.0.1:{port}")},
        plugins={"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
    )
    broker = Broker(config)
    try:
        await broker.start()
    except BrokerError as error:
        raise BrokerUnavailable("the small broker cannot start", why=str(error)) from error
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    print("listening", flush=True)
    await stopped.wait()
    await broker.shutdown()


def main() -> int:
    """Serve at the port given on the command line."""
    logging.getLogger("amqtt").setLevel(logging.CRITICAL)  # it reports each lost client as an error
    logging.getLogger("transitions").setLevel(logging.CRITICAL)
    try:
        asyncio.run(serve(int(sys.argv[1])))
    except PeerloadError as error:
        print(f"peerload: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
