"""A verb in the process of the test, for tests whose subject is not the process.

For verbs that answer and end. Those that follow something or are sent signals (`run`, `events -f`) are typed with
`Agent.cli`, which starts a process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import traceback
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING

from peerload.cli.main import main
from peerload.model.errors import PeerloadError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.integration.cluster import Agent


def cli(agent: Agent, *words: str, given: bytes = b"", env: Mapping[str, str] | None = None) -> CompletedProcess[bytes]:
    """Run `peerload WORDS` against an agent, in its cluster's directory; ``given`` is the standard input."""
    environment = {**agent.cluster.environment, "PEERLOAD_SOCKET": agent.socket, **(env or {})}
    return cli_in(environment, str(agent.cluster.directory), *words, given=given)


def cli_in(
    environment: Mapping[str, str], directory: str, *words: str, given: bytes | None = b""
) -> CompletedProcess[bytes]:
    """Run `peerload WORDS` with this environment, in this directory; ``given`` is the standard input, None: /dev/null."""
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(3)]
        files[0].write(given or b"")
        files[0].seek(0)
        stdin = files[0] if given is not None else stack.enter_context(Path(os.devnull).open("rb"))
        stack.enter_context(_surroundings(environment, directory))
        stack.enter_context(_streams([stdin.fileno(), *(file.fileno() for file in files[1:])]))
        code = _exit_code(list(words))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        told = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0) for file in files[1:]]
    return CompletedProcess(["peerload", *words], code, *told)


def _exit_code(words: list[str]) -> int:
    """The exit code that Python makes of how `main` ends."""
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except PeerloadError:
        traceback.print_exc()  # with --debug
        return 1


@contextlib.contextmanager
def _surroundings(environment: Mapping[str, str], directory: str) -> Iterator[None]:
    before, here = dict(os.environ), os.getcwd()  # noqa: PTH109 -- it may be gone
    try:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        yield
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _streams(descriptors: list[int]) -> Iterator[None]:
    """Descriptors 0 to 2, and Python's streams, are these."""
    sys.stdout.flush()
    sys.stderr.flush()
    before, kept = (sys.stdin, sys.stdout, sys.stderr), [os.dup(number) for number in range(3)]
    try:
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        sys.stdin, sys.stdout, sys.stderr = (
            open(number, mode, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
            for number, mode in enumerate("rww")
        )
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = before
        for number, descriptor in enumerate(kept):
            os.dup2(descriptor, number)
            os.close(descriptor)
