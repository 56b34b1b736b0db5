"""`run` and `attach` as clients: killed, hung up, detached, interrupted; with agents that are killed under them, and on a terminal."""

from __future__ import annotations

import contextlib
import hashlib
import os
import pty
import random
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

from peerload.agent.stdin import INPUT_KEPT_BYTES_MAX
from peerload.model.errors import BadRequest
from tests.integration.cluster import ROOT, Agent, Cluster, ended, program
from tests.integration.shared import bring_back
from tests.support import wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
NODES = ["n1", "n2"]


@pytest.fixture(scope="module", name="agents")
def fixture_agents() -> Iterator[list[Agent]]:
    """n1 and n2, which know each other."""
    with Cluster() as cluster:
        yield cluster.linked(2, slots=8)


@contextlib.contextmanager
def running(agent: Agent, node: str, *words: str, **more: Any) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A `run` whose command has written a line, and the task."""
    with ended(agent.spawn_cli("run", "--node", node, *words, **more)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        yield process, agent.show("@")["id"]


class Terminal:
    """A verb with a terminal of its own for all three."""

    def __init__(self, agent: Agent, *words: str) -> None:
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            environment = {**agent.cluster.environment, "PEERLOAD_SOCKET": agent.socket, "TERM": "xterm"}
            os.chdir("/tmp")
            command = [*program(), *words]
            os.execve(command[0], command, environment)
        self.seen = b""
        self.status: int | None = None

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def sees(self, what: bytes, timeout_s: float = 60.0) -> None:
        """Wait until this is on the screen."""
        until_s = time.monotonic() + timeout_s
        while what not in self.seen:
            ready, _, _ = select.select([self._master], [], [], max(until_s - time.monotonic(), 0.0))
            assert ready, (what, self.seen)
            try:
                self.seen += os.read(self._master, 65536)
            except OSError:
                raise AssertionError((what, self.seen)) from None

    def resize(self, rows: int, columns: int) -> None:
        import fcntl
        import struct
        import termios

        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def exit_code(self, timeout_s: float = 20.0) -> int:
        def is_over() -> bool:
            with contextlib.suppress(OSError):  # nobody has it open any more
                if select.select([self._master], [], [], 0)[0]:
                    self.seen += os.read(self._master, 65536)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
            return bool(pid)

        wait_until(is_over, timeout_s, "the verb to end")
        assert self.status is not None
        return self.status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._master)


# -- a client that goes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", NODES)
def test_a_task_ends_with_its_client(agents: list[Agent], node: str) -> None:
    with running(agents[0], node, "sh", "-c", "echo begun; exec sleep 60") as (process, task):
        process.kill()
        process.wait()
        assert "client" in agents[0].await_state(task, "cancelled")["reason"]


@pytest.mark.parametrize("node", NODES)
def test_a_task_is_kept_if_that_is_asked(agents: list[Agent], node: str) -> None:
    script = "echo begun; cat; echo over"
    with running(agents[0], node, "--keep", "sh", "-c", script, stdin=subprocess.PIPE) as (process, task):
        assert process.stdin is not None
        process.stdin.write(b"some\n")
        process.stdin.flush()
        assert process.stdout is not None
        assert process.stdout.readline() == b"some\n"
        process.send_signal(signal.SIGKILL if node == "n1" else signal.SIGTERM)
        process.wait(60)
    assert agents[0].wait(task)[task]["exit_code"] == 0
    assert agents[0].output(task)[0] == b"begun\nsome\nover\n"


def test_a_terminal_that_is_hung_up_takes_its_task_along(agents: list[Agent]) -> None:
    script = "trap 'exit 5' HUP; echo begun; while :; do sleep 0.1; done"
    with running(agents[0], "n2", "sh", "-c", script) as (process, task):
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 128 + signal.SIGHUP
        assert agents[0].await_state(task, "cancelled")["reason"] == "cancelled"


def test_a_task_that_is_detached_runs_on_and_can_be_joined(agents: list[Agent]) -> None:
    script = "echo begun; read a; echo got $a; exit 7"
    with running(agents[0], "n2", "sh", "-c", script, stdin=subprocess.PIPE) as (process, task):
        process.send_signal(signal.SIGQUIT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 131
        assert f"peerload attach {task}".encode() in errors
    with ended(agents[0].spawn_cli("attach", task)) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == b"begun\n"
        watcher.terminate()
        assert watcher.wait(60) == 143
    assert agents[0].show(task)["state"] == "running"
    joined = agents[0].cli("attach", task, stdin=None, input=b"it\n")
    assert (joined.returncode, joined.stdout) == (7, b"begun\ngot it\n")


def test_it_can_be_joined_from_another_node(agents: list[Agent]) -> None:
    script = "echo begun; read a; echo got $a; exit 7"
    with running(agents[0], "n1", "sh", "-c", script, stdin=subprocess.PIPE) as (process, task):
        process.send_signal(signal.SIGQUIT)
        assert process.wait(60) == 131
    joined = agents[1].cli("attach", task, stdin=None, input=b"it\n")
    assert (joined.returncode, joined.stdout, joined.stderr) == (7, b"begun\ngot it\n", b"")


def test_two_may_watch_and_only_one_feeds(agents: list[Agent]) -> None:
    script = "echo begun; read a; echo got $a"
    with running(agents[0], "n2", "sh", "-c", script, stdin=subprocess.PIPE) as (process, task):
        assert process.stdin is not None
        process.stdin.write(b"mi")
        process.stdin.flush()
        with ended(agents[0].spawn_cli("attach", task, stdin=subprocess.PIPE)) as second:
            assert second.stdin is not None
            assert second.stdout is not None
            assert second.stdout.readline() == b"begun\n"
            second.stdin.write(b"other\n")
            second.stdin.flush()
            process.stdin.write(b"ne\n")
            process.stdin.close()
            assert second.stdout.read() == b"got mine\n"
            assert second.wait(60) == 0
        assert process.wait(60) == 0


# -- signals -----------------------------------------------------------------------------------------------------------


def test_interrupts(agents: list[Agent]) -> None:
    script = "trap 'echo once' INT; trap 'echo ended; exit 9' TERM; echo begun; while :; do sleep 0.05; done"
    with running(agents[0], "n2", "sh", "-c", script) as (process, task):
        assert process.stdout is not None
        before_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == b"once\n"
        while True:
            sent_s = time.monotonic()
            process.send_signal(signal.SIGINT)
            if process.stdout.readline() != b"once\n":
                break
            # one that comes too late, when the machine stood still, is a first one again
            assert time.monotonic() - before_s > 2.0, "the second within 2 s cancels"
            before_s = sent_s
        assert process.wait(60) == 130
        assert agents[0].show(task)["state"] == "cancelled"


def test_stopping_and_going_on(agents: list[Agent], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = f"echo begun; until [ -e {gate} ]; do sleep 0.05; done; echo over"
    with running(agents[0], "n2", "sh", "-c", script) as (process, _):
        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: _state(process.pid) == "T", what="the client stands still")
        process.send_signal(signal.SIGCONT)
        gate.touch()
        assert process.wait(60) == 0
        assert process.stdout is not None
        assert process.stdout.read() == b"over\n"


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()[0]


# -- agents that go ----------------------------------------------------------------------------------------------------


def _fed(process: subprocess.Popen[bytes], mib: int, halfway: threading.Event) -> str:
    """Write so much to its stdin, in a while, and end → what it must have read."""
    assert process.stdin is not None
    block, sum_ = random.Random(5).randbytes(MIB), hashlib.sha256()
    for number in range(mib):
        process.stdin.write(block)
        sum_.update(block)
        if number == mib // 4:
            halfway.set()
    process.stdin.close()
    return sum_.hexdigest()


@pytest.mark.long
@pytest.mark.parametrize(("node", "killed"), [("n2", "n1"), ("n1", "n1"), ("n2", "n2"), ("n2", "n1 n2")])
def test_not_a_byte_is_lost_when_agents_are_killed(node: str, killed: str) -> None:
    mib = 80
    assert mib * MIB > INPUT_KEPT_BYTES_MAX  # its beginning is dropped on the way
    with Cluster() as cluster:
        home, _ = cluster.linked(2)
        halfway = threading.Event()
        wanted: list[str] = []
        with ended(home.spawn_cli("run", "--node", node, "sha256sum", stdin=subprocess.PIPE)) as process:
            feeding = threading.Thread(target=lambda: wanted.append(_fed(process, mib, halfway)))
            feeding.start()
            assert halfway.wait(60)
            for name in killed.split():
                cluster.agents[name].kill()
                cluster.agents[name].start()
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.read().split()[:1], (process.stderr.read(), home.log_end())
            feeding.join(60)
            assert process.wait(60) == 0
        assert home.output("@")[0].split()[0].decode() == wanted[0]
        assert home.show("@")["attempt"] == 1


@pytest.mark.long
def test_a_client_that_died_while_the_agent_was_away_takes_its_task_along() -> None:
    with Cluster() as cluster:
        home = cluster.agent()
        with running(home, "n1", "sh", "-c", "echo begun; exec sleep 60") as (process, task):
            home.kill()
            process.kill()
            process.wait()
        home.start()
        assert home.show(task)["state"] == "running"
        reason = home.await_state(task, "cancelled", timeout_s=60)["reason"]
        assert "client" in reason


def test_a_client_that_submits_it_again_after_a_restart_is_there_for_its_task(agents: list[Agent]) -> None:
    home = agents[0]
    token, spec = secrets.token_hex(16), home.cluster.spec("sleep", "60", placement={"local": True})
    with home.client() as first:
        task = first.call("submit", token=token, spec=spec, attended=True)["id"]
        home.await_state(task, "running")
        _restarted(agents, "kill")
    with home.client() as second:
        reply = second.call("submit", token=token, spec=spec, attended=True)
        assert (reply["id"], reply["repeated"]) == (task, True)
    reason = home.await_state(task, "cancelled")["reason"]  # at once: it was known to be there
    assert "client" in reason


def test_ctrl_c_ends_one_that_would_be_tried_again(agents: list[Agent]) -> None:
    home = agents[0]
    with running(home, "n2", "--retries", "3", "sh", "-c", "echo begun; exec sleep 60") as (process, task):
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    shown = home.show(task)
    assert (shown["state"], shown["attempt"]) == ("failed", 1)


def test_an_attempt_that_is_lost_reads_all_of_its_input_again(agents: list[Agent], tmp_path: Path) -> None:
    home, other = agents
    gate = tmp_path / "gate"
    script = f"read a; echo begun; until [ -e {gate} ]; do sleep 0.05; done; echo $a; cat"
    with ended(home.spawn_cli("run", "--node", "n2", "sh", "-c", script, stdin=subprocess.PIPE)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"one\ntwo\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"begun\n"
        os.kill(other.launcher_pid, signal.SIGKILL)
        wait_until(lambda: home.show("@")["attempt"] == 2, what="the second attempt")
        gate.touch()
        process.stdin.write(b"three\n")
        process.stdin.close()
        assert process.stdout.read() == b"begun\none\ntwo\nthree\n"
        assert process.wait(60) == 0


@pytest.mark.long
def test_an_attempt_that_is_lost_with_more_input_than_is_kept_fails_in_words() -> None:
    with Cluster() as cluster:
        home, other = cluster.linked(2)
        size = INPUT_KEPT_BYTES_MAX + 16 * MIB
        script = f"head -c {size} > /dev/null; echo begun; sleep 60"
        with ended(home.spawn_cli("run", "--node", "n2", "sh", "-c", script, stdin=subprocess.PIPE)) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for _ in range(size // MIB):
                process.stdin.write(bytes(MIB))
            process.stdin.flush()
            assert process.stdout.readline() == b"begun\n"
            os.kill(other.launcher_pid, signal.SIGKILL)
            assert process.wait(60) == 125
            assert process.stderr is not None
            assert Says.INPUT_CUT().partition("since ")[2].encode() in process.stderr.read()


def test_a_command_that_does_not_read_holds_its_writer_back(agents: list[Agent]) -> None:
    with running(agents[0], "n2", "sh", "-c", "echo begun; exec sleep 60", stdin=subprocess.PIPE) as (process, task):
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        written, still_s = 0, time.monotonic()
        while time.monotonic() - still_s < 1.0:
            try:
                written += os.write(process.stdin.fileno(), bytes(1 << 16))
                still_s = time.monotonic()
            except BlockingIOError:
                select.select([], [process.stdin], [], 0.1)
        assert written < 16 * MIB
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        assert agents[0].show(task)["state"] == "failed"


# -- terminals ---------------------------------------------------------------------------------------------------------


def test_a_terminal_elsewhere(agents: list[Agent]) -> None:
    with Terminal(agents[0], "run", "--pty", "--node", "n2", "sh") as terminal:
        terminal.resize(33, 99)
        terminal.type(b"stty size; echo $TERM; test -t 0 && test -t 1 && test -t 2 && echo a tty\r")
        terminal.sees(b"xterm\r\na tty\r\n")
        terminal.type(b"stty size\r")
        terminal.sees(b"33 99")
        terminal.type(b"PS1='ready> '; echo re''ady; cat\r")
        terminal.sees(b"ready\r\n")
        terminal.type(b"typed\r")
        terminal.sees(b"typed\r\ntyped\r\n")
        terminal.resize(40, 120)
        terminal.type(b"\x03")  # Ctrl-C ends cat alone, and throws away what was typed and not read
        terminal.sees(b"^C\r\nready> ")
        terminal.type(b"stty size\r")
        terminal.sees(b"40 120")
        terminal.type(b"exit 5\r")
        assert terminal.exit_code() == 5


@pytest.mark.parametrize("node", NODES)
def test_a_shell_inside_of_a_task_has_a_terminal_where_there_is_one(agents: list[Agent], node: str) -> None:
    task = agents[0].submit("sleep", "600", placement={"node": node})
    agents[0].await_state(task, "running")
    with Terminal(agents[0], "exec", task, "sh") as terminal:
        terminal.resize(33, 99)
        terminal.type(b"echo $TERM $PEERLOAD_NODE; test -t 0 && test -t 1 && test -t 2 && echo a tty\r")
        terminal.sees(b"xterm %s\r\na tty\r\n" % node.encode())
        terminal.type(b"PS1='ready> '; stty size\r")
        terminal.sees(b"33 99\r\nready> ")
        terminal.type(b"sh -c \"echo be''gun; exec cat\"\r")  # what says it is what the key ends
        terminal.sees(b"begun\r\n")
        terminal.type(b"\x1c")  # no key leaves it to itself
        terminal.sees(b"Quit\r\nready> ")
        terminal.type(b"cat\r")
        terminal.type(b"typed\r")
        terminal.sees(b"typed\r\ntyped\r\n")
        terminal.type(b"\x03")
        terminal.sees(b"^C\r\nready> ")
        terminal.resize(40, 120)
        terminal.type(b"stty size\r")
        terminal.sees(b"40 120")
        terminal.type(b"exit 5\r")
        assert terminal.exit_code() == 5
    with Terminal(agents[0], "exec", "--no-pty", task, "sh", "-c", "test -t 0 || echo no tty") as terminal:
        terminal.sees(b"no tty\r\n")
    assert agents[0].show(task)["state"] == "running"
    agents[0].cli("cancel", task)


def test_a_terminal_is_left_and_joined_again(agents: list[Agent]) -> None:
    with Terminal(agents[0], "run", "--pty", "--node", "n2", "sh") as terminal:
        terminal.type(b"x=kept; echo be''gun\r")
        terminal.sees(b"begun\r\n")
        terminal.type(b"\x1c")
        terminal.sees(b"peerload attach ")
        assert terminal.exit_code() == 131
    task = agents[0].show("@")["id"]
    with Terminal(agents[1], "attach", task) as terminal:
        terminal.sees(b"begun")
        terminal.type(b"echo still $x; exit 3\r")
        terminal.sees(b"still kept\r\n")
        assert terminal.exit_code() == 3


def test_a_terminal_is_as_it_was_afterwards(agents: list[Agent]) -> None:
    words = " ".join([*program(), "run", "--pty", "--node", "n2", "true"])
    script = f'before=$(stty -g); {words}; test "$before" = "$(stty -g)" && echo as it was'
    with _Shell(agents[0], script) as terminal:
        terminal.sees(b"as it was")
        assert terminal.exit_code() == 0


class _Shell(Terminal):
    def __init__(self, agent: Agent, script: str) -> None:
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            environment = {**agent.cluster.environment, "PEERLOAD_SOCKET": agent.socket, "TERM": "xterm"}
            os.chdir("/tmp")
            os.execve("/bin/sh", ["/bin/sh", "-c", script], environment)
        self.seen = b""
        self.status = None


def test_a_terminal_of_a_command_without_one(agents: list[Agent]) -> None:
    """Keys go there once it runs, Ctrl-D is the end of them, Ctrl-C a signal, Ctrl-\\ leaves it."""
    with Terminal(agents[0], "run", "--node", "n2", "sh", "-c", "echo begun; cat; echo over") as terminal:
        terminal.sees(b"begun")
        terminal.type(b"some\r")
        terminal.sees(b"some\r\nsome\r\n")
        terminal.type(b"\x04")
        terminal.sees(b"over")
        assert terminal.exit_code() == 0
    with Terminal(agents[0], "run", "--node", "n2", "sh", "-c", "echo begun; exec sleep 60") as terminal:
        terminal.sees(b"begun")
        terminal.type(b"\x03")
        assert terminal.exit_code() == 130
    with Terminal(agents[0], "run", "--node", "n2", "sh", "-c", "echo begun; exec sleep 60") as terminal:
        terminal.sees(b"begun")
        terminal.type(b"\x1c")
        assert terminal.exit_code() == 131
    agents[0].cli("cancel", "--force", "@")


def test_in_the_background_it_is_not_stopped_for_reading(agents: list[Agent]) -> None:
    words = " ".join([*program(), "run", "--node", "n2", "sh -c 'sleep 0.3; echo over'"])
    with _Shell(agents[0], f"set -m; {words} & wait $!; echo its $?") as terminal:
        terminal.sees(b"its 0")
        assert b"over" in terminal.seen
        assert terminal.exit_code() == 0


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_takes_no_input_says_so(agents: list[Agent]) -> None:
    task = agents[0].submit("sleep", "60")
    agents[0].await_state(task, "running")
    with agents[0].client() as client, pytest.raises(BadRequest):
        client.call("input", task=task, data=b"x")
    with agents[0].client() as client, pytest.raises(BadRequest):
        client.call("resize", task=task, rows=1, columns=1)
    agents[0].call("cancel", tasks=[task], force=True)
    assert agents[0].cli("attach", "n1/999999").returncode == 125


def test_a_gap_in_the_input_is_refused(agents: list[Agent]) -> None:
    spec = agents[0].cluster.spec("cat", takes_input=True)
    with agents[0].client() as client:
        task = client.call("submit", token="a gap in it", spec=spec, input=b"abc", input_ends=False)["id"]
        with pytest.raises(BadRequest):
            client.call("input", task=task, data=b"x", offset=5)
        client.call("input", task=task, data=b"cdef", offset=2)
        client.call("input", task=task, ends=True)
        agents[0].wait(task)
    assert agents[0].output(task)[0] == b"abcdef"


def test_a_submission_with_its_whole_input(agents: list[Agent]) -> None:
    """As a program makes one that does not stay."""
    spec = agents[0].cluster.spec("sh", "-c", "wc -c; exit 4", takes_input=True, placement={"node": "n2"})
    with agents[0].client() as client:
        task = client.call("submit", token="whole input", spec=spec, input=bytes(MIB))["id"]
        again = client.call("submit", token="whole input", spec=spec, input=bytes(MIB))
        assert (again["id"], again["repeated"]) == (task, True)
        with pytest.raises(BadRequest):
            client.call("submit", token="whole input", spec=spec, input=b"another")
    assert agents[0].wait(task)[task]["exit_code"] == 4
    assert agents[0].output(task)[0] == b"%d\n" % MIB
    assert agents[0].cli("retry", task).returncode == 125, "its input is not kept"


def test_what_was_typed_nothing_to_can_be_repeated(agents: list[Agent]) -> None:
    spec = agents[0].cluster.spec("sh", "-c", "wc -c; exit 4", takes_input=True, followed=True)
    with agents[0].client() as client:
        task = client.call("submit", token="nothing typed", spec=spec, input_ends=False)["id"]
        client.call("input", task=task, ends=True)
    assert agents[0].wait(task)[task]["exit_code"] == 4
    again = agents[0].cli("retry", task).stdout.decode().strip()
    assert agents[0].wait(again)[again]["exit_code"] == 4
    assert agents[0].output(again)[0] == b"0\n"
    assert not agents[0].show(again)["takes_input"]


# -- agents that are stopped politely, and inputs that are silent ------------------------------------------------------


def _restarted(agents: list[Agent], how: str) -> None:
    """End the first of these and start it again."""
    home = agents[0]
    if how == "kill":
        home.kill()
    elif how == "down":
        assert home.cli("down").returncode == 0
        home.reap()
    else:
        os.kill(home.pid, signal.SIGTERM)
        home.reap()
    bring_back(agents)


def test_a_restart_of_the_agent_is_not_the_end_of_its_clients(agents: list[Agent]) -> None:
    """However it ends, wherever the task runs, and whether it would be kept without its client."""
    home = agents[0]
    with contextlib.ExitStack() as stack:
        clients = []
        for node, flags in (("n1", ()), ("n1", ("--keep",)), ("n2", ())):
            words = (*flags, "sh", "-c", "echo begun; cat")
            clients.append(stack.enter_context(running(home, node, *words, stdin=subprocess.PIPE)))
        for how in ("kill", "term", "down"):
            _restarted(agents, how)
            for process, task in clients:
                assert process.stdin is not None
                assert process.stdout is not None
                assert home.show(task)["state"] == "running"
                process.stdin.write(b"%s\n" % how.encode())
                process.stdin.flush()
                assert process.stdout.readline() == b"%s\n" % how.encode()
        for process, _ in clients:
            assert process.communicate(timeout=60)[0] == b""
            assert process.returncode == 0


class Impatient(Agent):
    """An agent that waits only a while for the clients that were there before it was restarted: longer than a machine stands
    still, in which they would come back."""

    def words(self) -> list[str]:
        start = (
            "import sys; from peerload.agent.requests import attach as attending; attending.FEEDER_GRACE_S = 8.0; "
            "from peerload.cli.main import main; sys.exit(main())"
        )
        return [
            sys.executable,
            "-I",
            "-c",
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); {start}",
            *super().words()[len(program()) :],
        ]


@pytest.mark.long
def test_a_client_that_is_back_and_silent_still_feeds_its_task() -> None:
    with Cluster() as cluster:
        home = Impatient(cluster, "n1", ["--slots", "2"], None)
        cluster.agents["n1"] = home
        home.start()
        script = "echo begun; cat"
        with running(home, "n1", "--keep", "sh", "-c", script, stdin=subprocess.PIPE) as (process, _task):
            silent = running(home, "n1", "--keep", "sh", "-c", script, stdin=subprocess.PIPE)
            with silent as (left, other):
                home.kill()
                left.kill()
                left.wait()
                home.start()
                assert home.wait(other)[other]["exit_code"] == 0  # who is not back has ended its input
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"two\n")
            process.stdin.close()
            assert process.stdout.read() == b"two\n"
            assert process.wait(60) == 0


@pytest.mark.long
def test_more_inputs_than_files_may_be_open() -> None:
    with Cluster() as cluster:
        home = Frugal(cluster, "n1", ["--slots", "1"], None)
        cluster.agents["n1"] = home
        home.start()
        holder = home.submit("sleep", "60")
        home.await_state(holder, "running")
        spec = cluster.spec("sh", "-c", "ulimit -Sn; cat", takes_input=True)
        with home.client() as client:
            tasks = [
                client.call(
                    "submit", token=f"token-{number:03d}", spec=spec, input=b"%d\n" % number, input_ends=number % 2 == 0
                )["id"]
                for number in range(110)
            ]
            home.kill()
            home.start()
        home.call("cancel", tasks=[holder])
        for task in tasks[1::2]:
            home.call("input", task=task, ends=True)
        for number in (0, 109):
            assert home.wait(tasks[number])[tasks[number]]["exit_code"] == 0
            assert home.output(tasks[number])[0] == b"64\n%d\n" % number


class Frugal(Agent):
    """An agent that may have few files open, at first."""

    def words(self) -> list[str]:
        return ["prlimit", "--nofile=64:100", *super().words()]


@pytest.mark.long
def test_an_input_that_its_task_closes_is_over_for_the_next_attempt_too() -> None:
    with Cluster() as cluster:
        home, other = cluster.linked(2)
        gate = home.directory / "gate"
        script = f"if [ -e {gate} ]; then cat; else touch {gate}; exec <&-; echo begun; sleep 60; fi"
        with ended(home.spawn_cli("run", "--node", "n2", "sh", "-c", script, stdin=subprocess.PIPE)) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(b"one\n")
                process.stdin.flush()
            wait_until(lambda: list((home.state / "spool").glob("*.in-ended")), what="the input to end")
            os.kill(other.launcher_pid, signal.SIGKILL)
            assert process.wait(60) == 0
            assert process.stdout.read() in (b"", b"one\n")
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


@pytest.mark.long
def test_who_waits_for_a_node_that_nobody_knows_is_told_so(agents: list[Agent]) -> None:
    """By `why` at once, by `run` after some seconds."""
    says = "no node known can ever run it: elsewhere is not a node that is known here"
    words = ("-w", "elsewhere", "--wait-for-node", "-d", "-", "true")
    with ended(agents[0].spawn_cli("run", *words, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)) as process:
        assert process.stderr is not None
        told = process.stderr.readline().decode()
        while f" waits: {says}\n" not in told:
            assert told, "it has ended"
            told = process.stderr.readline().decode()
        assert b"peerload why n1/" in process.stderr.readline()
        why = agents[0].cli("why", "@").stdout.decode()
        assert [line.split()[:2] for line in why.splitlines() if line.split()[:1] == ["elsewhere"]] == [
            ["elsewhere", "no"]
        ]
        process.send_signal(signal.SIGINT)
        process.stderr.read()
