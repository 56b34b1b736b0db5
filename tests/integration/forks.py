"""Fork server: starts `peerload` by forking a process that has already imported it.

With it the start of an agent costs 0.06 s of processor time instead of 0.33 s, and that of a verb 0.01 s instead of 0.05 s
(Python 3.11). The gate has hundreds of both.

What is forked is a process of its own with the exit code, standard streams, directory, environment, umask and session that
were asked for; /proc shows the command line and the environment that it would have. `test_forks.py` compares. A changed
interpreter or an argument of `Popen` that is not known here gets a new process, as does everything with FORKS=0 in the
environment of the tests.

`Forked` overrides three private methods of `Popen`, those that start and wait for a child, since tests use all of its other
ones: pipes, `communicate`, timeouts, signals. A class of its own would have to repeat them, and a small process in between
would get the signals and show its own pid.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import marshal
import os
import pkgutil
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

WORKS = os.environ.get("FORKS") != "0" and hasattr(os, "pidfd_open")
KNOWN = {"bufsize", "cwd", "env", "start_new_session", "stderr", "stdin", "stdout", "text", "umask"}
"""Arguments of `Popen` that a fork heeds."""
INTERPRETER = ("PYTHON", "LC_", "LANG", "LD_", "TZ", "MALLOC", "OPENSSL", "SSL_")
"""Variables that an interpreter reads when it starts."""
NOT_LOADED = (
    "peerload.cli.demo",
    "peerload.cli.simulate",
    "peerload.cli.verbs.demo",
    "peerload.cli.verbs.sim",
    "peerload.cli.verbs.replay",
)
"""What loads much and is seldom typed."""
LOADED = (
    *("encodings.ascii", "encodings.idna", "encodings.utf_8_sig", "json", "tomllib"),
    *("peerload.agent.daemon", "peerload.agent.main"),
)
"""What agents load besides the verbs and the policies of their preset."""
ROOM_BYTES = 32 << 10
"""Of the command line, and of the environment, that /proc shows."""
PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
NUMBER = struct.Struct("<q")


def start(command: Sequence[str | bytes], program: tuple[str, ...], **how: Any) -> subprocess.Popen[bytes]:
    """Start a command as `Popen` does: forked if it begins with ``program``, which is peerload."""
    environment = how.get("env") or os.environ
    is_own = tuple(command[: len(program)]) == program and how.keys() <= KNOWN
    if not (WORKS and is_own) or any(os.fsdecode(name).startswith(INTERPRETER) for name in environment):
        return subprocess.Popen(command, **how)
    return Forked(command, program, **how)


def run(
    command: Sequence[str | bytes], program: tuple[str, ...], timeout_s: float, data: bytes | None = None, **how: Any
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end, as `subprocess.run` does with ``capture_output`` and, if there is any, the input ``data``."""
    stdin = {"stdin": subprocess.PIPE} if data is not None else {}
    process = start(command, program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **{**how, **stdin})
    with process:
        try:
            out, errors = process.communicate(data, timeout=timeout_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


class Forked(subprocess.Popen[bytes]):
    """`Popen` of a fork: the server is its parent, and tells its end."""

    def __init__(self, command: Sequence[str | bytes], program: tuple[str, ...], **how: Any) -> None:
        self._program = program
        self._server: socket.socket | None = None
        super().__init__(command, **how)

    def _execute_child(self, *given: Any) -> None:
        how = dict(zip(_names(), given, strict=True))
        streams = [how["p2cread"], how["c2pwrite"], how["errwrite"]]
        streams = [number if fd == -1 else fd for number, fd in enumerate(streams)]
        try:
            words = [os.fsencode(word) for word in how["args"]]
            environment = os.environ if how["env"] is None else how["env"]
            request = marshal.dumps(
                {
                    "words": words,
                    "skip": len(self._program),
                    "directory": os.fsencode(how["cwd"] or Path.cwd()),
                    "environment": {os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
                    "umask": how["umask"],
                    "session": how["start_new_session"],
                }
            )
            self._server, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(_control(self._program), [b"+"], [theirs.fileno(), *streams])
            self._server.sendall(NUMBER.pack(len(request)) + request)
            self.pid = self._read()
            self._child_created = True
        finally:
            self._close_pipe_fds(*(how[name] for name in PIPES))  # type: ignore[attr-defined]

    def _read(self) -> int:
        assert self._server is not None
        raw = self._server.recv(NUMBER.size, socket.MSG_WAITALL)
        if not raw:
            raise ChildProcessError("the fork server has ended")
        (number,) = NUMBER.unpack(raw)
        return int(number)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """As os.waitpid: (0, 0) if it has not ended."""
        assert self._server is not None
        if wait_flags & os.WNOHANG and not _readable(self._server):
            return 0, 0
        status = self._read()
        self._server.close()
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None, *_rest: object) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            except OSError:
                if _deadstate is None:
                    raise
                self.returncode = _deadstate
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


@functools.cache
def _names() -> tuple[str, ...]:
    """The parameters of the method that `Popen` starts its child with."""
    code = subprocess.Popen._execute_child.__code__  # type: ignore[attr-defined]
    return tuple(code.co_varnames[1 : code.co_argcount])


def _readable(sock: socket.socket) -> bool:
    try:
        sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    return True


@functools.cache
def _control(program: tuple[str, ...]) -> socket.socket:
    """The connection to this process's fork server, which lives as long as this does."""
    own, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        measured = {name: value for name, value in os.environ.items() if name.startswith("COVERAGE_")}
        server = subprocess.Popen(
            [program[0], "-I", __file__, str(theirs.fileno()), "." * ROOM_BYTES],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={"PATH": os.environ.get("PATH", os.defpath), **measured, "ROOM": "." * ROOM_BYTES},
            cwd="/",
            start_new_session=True,
        )

    def end() -> None:
        own.close()
        server.wait()

    atexit.register(end)
    return own


# -- the server --------------------------------------------------------------------------------------------------------


def serve(control: socket.socket) -> None:
    """Fork for each request until there is nobody to make one."""
    _load()
    main_pid = os.getpid()
    with selectors.DefaultSelector() as events:
        events.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fileobj is control:
                    _, fds, _, _ = socket.recv_fds(control, 1, 4)
                    if not fds:
                        return
                    pid = os.fork()
                    if not pid:
                        _be(fds)
                    assert os.getpid() == main_pid
                    asker = socket.socket(fileno=fds[0])
                    asker.sendall(NUMBER.pack(pid))
                    for fd in fds[1:]:
                        os.close(fd)
                    events.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, asker))
                else:
                    pid, asker = key.data
                    _, status = os.waitpid(pid, 0)
                    events.unregister(key.fd)
                    os.close(key.fd)
                    with asker:
                        try:
                            asker.sendall(NUMBER.pack(status))
                        except OSError:
                            continue  # nobody waits for it


def _load() -> None:
    gc.disable()
    try:
        import peerload.cli
    except ImportError:
        sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
        import peerload.cli
    names = [module.name for module in pkgutil.walk_packages(peerload.cli.__path__, "peerload.cli.")]
    for name in [*LOADED, *names]:
        if not name.startswith(NOT_LOADED):
            __import__(name)
    from peerload.config import loader
    from peerload.policy.registry import load_preset

    # msgspec reads the types of a class when it makes the first value of it.
    load_preset(loader.load({}, {"state": "/nonexistent", "socket": "/nonexistent"}, {}).policy)
    gc.collect()
    gc.freeze()


def _be(fds: list[int]) -> None:
    """Be the process that was asked for, to its end."""
    code = 255
    try:
        with socket.socket(fileno=fds[0]) as asker:
            (size,) = NUMBER.unpack(asker.recv(NUMBER.size, socket.MSG_WAITALL))
            raw = b""
            while len(raw) < size:
                raw += asker.recv(size - len(raw), socket.MSG_WAITALL)
        how = marshal.loads(raw)
        for number, (name, fd) in enumerate(zip(("stdin", "stdout", "stderr"), fds[1:], strict=True)):
            os.dup2(fd, number)
            before = getattr(sys, name)
            stream = open(  # noqa: SIM115 -- lasts as long as the process
                number, "w" if number else "r", encoding=before.encoding, errors=before.errors, closefd=False
            )
            stream.reconfigure(line_buffering=number == 2 or os.isatty(number))
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        os.closerange(3, 1 + max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()))
        if how["session"]:
            os.setsid()
        if how["umask"] >= 0:
            os.umask(how["umask"])
        os.chdir(how["directory"])
        os.environ.clear()
        os.environb.update(how["environment"])
        _show_in_proc(how["words"], [b"%s=%s" % pair for pair in how["environment"].items()])
        gc.enable()
        sys.argv = ["peerload", *map(os.fsdecode, how["words"][how["skip"] :])]
        code = _exit_code()
    finally:
        os._exit(code)


def _exit_code() -> int:
    """Run the verb, then do what an interpreter does at its end."""
    from peerload.cli.main import main

    code: object = 1
    try:
        code = main()
    except SystemExit as ended:
        code = ended.code
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 -- as an interpreter does
        traceback.print_exc()
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120
    return (code or 0) & 0xFF


def _show_in_proc(words: list[bytes], environment: list[bytes]) -> None:
    """Write both where /proc/PID/cmdline and environ are read."""
    fields = Path("/proc/self/stat").read_text(encoding="latin-1").rpartition(")")[2].split()
    for (first, last), texts in ((fields[45:47], words), (fields[47:49], environment)):
        room = int(last) - int(first)
        text = b"".join(text + b"\0" for text in texts)[: room - 1]
        ctypes.memmove(int(first), text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
