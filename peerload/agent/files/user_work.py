"""Work with files as the users of a machine: each time a process of the launcher, which the agent gives and takes blocks."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
from typing import TYPE_CHECKING, Annotated, Any

import msgpack
import msgspec
from msgspec import Meta

from peerload.agent.accounts.as_user import BUSY, POLICY
from peerload.agent.launcher.client import LauncherError
from peerload.files.as_user import FRAME_BYTES_MAX, HEADER_BYTES
from peerload.launcher.protocol import FilesJob
from peerload.model.errors import PeerloadError, StagingFailed
from peerload.model.task import Digest
from peerload.model.text import printable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from peerload.agent.accounts.as_user import TaskUser
    from peerload.agent.files.transfer import FileCache
    from peerload.agent.launcher.client import LauncherLink

SILENCE_S_MAX = 600.0
"""A process that says nothing for so long is given up: its user may have stopped it, or its file system hangs."""
START_S_MAX, REASON_S_MAX = 60.0, 10.0
"""A process starts within the first; the launcher says within the second why one has ended."""
WORK_S_MAX = 86_400.0
TRIES_MAX, RETRY_S = 10, 3.0
"""A process that was lost is asked for again, so often and after so long: the launcher may be starting anew. One for which
there is no room now is asked for until there is."""
READ_BYTES_MAX = 4 << 20
WORDS_MAX = 2000
MESSAGE_BYTES_MAX = 8 << 20


class ReadBlocks(msgspec.Struct, frozen=True, array_like=True, tag="read", forbid_unknown_fields=True):
    """Give the first of these blocks, up to so many bytes → a list of them, or nil."""

    digests: Annotated[tuple[Digest, ...], Meta(min_length=1, max_length=256)]
    bytes_max: Annotated[int, Meta(ge=0, le=1 << 62)]


class PutBlocks(msgspec.Struct, frozen=True, array_like=True, tag="put", forbid_unknown_fields=True):
    """Keep these blocks → true, or nil."""

    blocks: tuple[Annotated[bytes, Meta(max_length=1 << 20)], ...]


class WorkDone(msgspec.Struct, frozen=True, array_like=True, tag="done", forbid_unknown_fields=True):
    """The work is done."""

    result: bytes | tuple[list[str], dict[str, Digest]] | None


class WorkFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed", forbid_unknown_fields=True):
    """The work failed: at a block that was not to be had, or by an error of the operating system, or else."""

    errno: Annotated[int, Meta(ge=0, le=4096)]
    what: str
    why: str
    hint: str


_DECODER = msgspec.msgpack.Decoder(ReadBlocks | PutBlocks | WorkDone | WorkFailed)


def decode(raw: bytes) -> ReadBlocks | PutBlocks | WorkDone | WorkFailed:
    """A message of a process that works as a user. Raises StagingFailed."""
    try:
        found: ReadBlocks | PutBlocks | WorkDone | WorkFailed = _DECODER.decode(raw)
    except (msgspec.MsgspecError, ValueError) as error:  # ValueError: text that is not UTF-8
        raise StagingFailed("the files of the task cannot be handled", why=str(error)) from None
    return found


class WorkLost(PeerloadError):
    """A process that works as a user could not be had, or was lost."""


class WorkBusy(WorkLost):
    """There are as many processes of this user as there may be."""


class UserWork:
    """Has work done as users. directory: the sockets are made there; only the agent may enter it."""

    def __init__(self, launcher: LauncherLink, directory: Path) -> None:
        self._launcher = launcher
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in directory.iterdir():
            path.unlink()

    async def run(
        self,
        cache: FileCache,
        whose: TaskUser,
        key: str,
        directory: bytes,
        name: str,
        values: Sequence[object],
        *,
        makes: bool = False,
    ) -> Any:  # noqa: ANN401 -- as the work has it
        """Do a part of `files/work.py` in a directory as the user of a task → its result. Raises StagingFailed, WorkLost, OSError."""
        tries_left = TRIES_MAX
        async with cache.turns:
            while True:
                try:
                    return await self._run(cache, whose, key, directory, [name, *values], makes=makes)
                except WorkLost as error:
                    tries_left -= not isinstance(error, WorkBusy)
                    if not tries_left:
                        raise
                    await asyncio.sleep(RETRY_S)

    async def _run(
        self, cache: FileCache, whose: TaskUser, key: str, directory: bytes, words: list[object], *, makes: bool
    ) -> Any:  # noqa: ANN401 -- as above
        name = secrets.token_hex(8)
        path = self._directory / name
        with contextlib.ExitStack() as opened:
            listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            listener.setblocking(False)
            above = os.open(self._directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            opened.callback(os.close, above)
            listener.bind(f"/proc/self/fd/{above}/{name}")  # the path may be too long for a socket
            opened.callback(path.unlink, missing_ok=True)
            listener.listen(1)
            loop = asyncio.get_running_loop()
            job = FilesJob(str(path), key, directory, makes, *whose)
            asked = asyncio.ensure_future(self._launcher.ask(job, WORK_S_MAX))
            opened.callback(asked.cancel)
            accepted = asyncio.ensure_future(loop.sock_accept(listener))
            opened.callback(accepted.cancel)
            await asyncio.wait({asked, accepted}, timeout=START_S_MAX, return_when=asyncio.FIRST_COMPLETED)
            if accepted.done():
                reader, writer = await asyncio.open_unix_connection(sock=accepted.result()[0], limit=MESSAGE_BYTES_MAX)
                try:
                    return await self._serve(cache, reader, writer, words)
                except (ConnectionError, asyncio.IncompleteReadError):
                    pass  # the launcher says why
                except TimeoutError:
                    why = f"its user's directory has not answered for {SILENCE_S_MAX:g} s"
                    raise StagingFailed("the files of the task cannot be reached", why=why) from None
                finally:
                    writer.close()
            try:
                async with asyncio.timeout(REASON_S_MAX):
                    why = await asyncio.shield(asked)
            except (LauncherError, TimeoutError) as error:
                raise WorkLost("no process can work with the files", why=str(error)) from None
            if why.startswith(BUSY):
                raise WorkBusy("no process can work with the files now", why=why.removeprefix(BUSY))
            if not why or why.startswith("it was ended"):
                raise WorkLost("the process that works with the files was lost", why=why)
            raise StagingFailed("the files of the task cannot be reached as its user", why=why.removeprefix(POLICY))

    async def _serve(
        self, cache: FileCache, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, words: object
    ) -> Any:  # noqa: ANN401 -- as above
        """Give and take blocks until the work is done → its result."""
        failure: Exception | None = None
        while True:
            raw = msgpack.packb(words)
            writer.write(len(raw).to_bytes(HEADER_BYTES, "big") + raw)
            async with asyncio.timeout(SILENCE_S_MAX):
                await writer.drain()
                size = int.from_bytes(await reader.readexactly(HEADER_BYTES), "big")
                if size > FRAME_BYTES_MAX:
                    raise StagingFailed("the files of the task cannot be handled", why=f"a message of {size} bytes")
                body = await reader.readexactly(size)
            message = decode(body)
            if isinstance(message, WorkDone):
                return message.result
            if isinstance(message, WorkFailed):
                raise failure if failure is not None and not message.what else _failure_of(message)
            try:
                words = await self._answer(cache, message)
            except (PeerloadError, OSError) as error:
                failure, words = error, None

    async def _answer(self, cache: FileCache, message: ReadBlocks | PutBlocks) -> object:
        """Give or take blocks. Raises StagingFailed, OSError."""
        if isinstance(message, ReadBlocks):
            most = min(message.bytes_max, READ_BYTES_MAX)
            return await cache.transfer.in_thread(cache.store.read_some, message.digests, most)
        await cache.keep(message.blocks)
        return True


def _failure_of(message: WorkFailed) -> Exception:
    what, why, hint = (printable(text[:WORDS_MAX]) for text in (message.what, message.why, message.hint))
    return OSError(message.errno, what) if message.errno else StagingFailed(what, why=why, hint=hint)
