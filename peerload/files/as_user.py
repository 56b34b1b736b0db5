"""A process that handles the files of one task as its user, for a system-mode agent.

The launcher starts it in the user's directory with only the user's rights. Its standard input is a socket to the
agent, which sends orders, and sends and receives blocks. The frames are those of `launcher/protocol.py`, each a list.
"""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, Any

import msgpack

from peerload.files import work
from peerload.files.manifest import digest_of
from peerload.model.errors import StagingFailed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from io import BufferedRWPair

FRAME_BYTES_MAX = 64 << 20
HEADER_BYTES = 4
PUT_BYTES = 4 << 20
"""Maximum total size of blocks that are sent together."""
READ_BLOCKS_MAX = 256
"""Maximum number of blocks requested from the agent at a time."""


class _StoreFailed(StagingFailed):
    """Error: the agent cannot read or store a block. The agent knows the reason."""


class _Agent:
    """The agent at the other end of the socket, which stores the blocks of this user's files."""

    def __init__(self, file: BufferedRWPair[Any, Any]) -> None:
        self._file = file
        self._put: list[bytes] = []

    def receive(self) -> Any:  # noqa: ANN401 -- what the agent says
        header = self._file.read(HEADER_BYTES)
        if len(header) < HEADER_BYTES:
            raise ConnectionError("the agent disconnected")
        return msgpack.unpackb(self._file.read(int.from_bytes(header, "big")))

    def send(self, *words: object) -> None:
        raw = msgpack.packb(words)
        self._file.write(len(raw).to_bytes(HEADER_BYTES, "big") + raw)
        self._file.flush()

    def _ask(self, *words: object) -> Any:  # noqa: ANN401 -- as above
        self.send(*words)
        reply = self.receive()
        if reply is None:
            raise _StoreFailed("blocks are not available")
        return reply

    def read(self, digest: bytes) -> bytes:
        return self.read_some([digest], 1)[0]

    def read_some(self, digests: Sequence[bytes], bytes_max: int) -> list[bytes]:
        found: list[bytes] = self._ask("read", list(digests[:READ_BLOCKS_MAX]), bytes_max)
        return found

    def put(self, blocks: Sequence[bytes]) -> list[bytes]:
        self._put += blocks
        if sum(map(len, self._put)) > PUT_BYTES:
            self.flush()
        return [digest_of(block) for block in blocks]

    def flush(self) -> None:
        if self._put:
            self._ask("put", self._put)
            self._put = []


def main() -> None:
    """Execute the agent's orders in the working directory."""
    with socket.socket(fileno=0) as connection, connection.makefile("rwb") as file:
        _work(_Agent(file))


def _work(agent: _Agent) -> None:
    name, *values = agent.receive()
    try:
        result = work.WORK[name](b".", agent, *values)
        agent.flush()
    except _StoreFailed:
        agent.send("failed", 0, "", "", "")
    except StagingFailed as error:
        agent.send("failed", 0, error.what, error.why, error.hint)
    except OSError as error:
        agent.send("failed", error.errno or errno.EIO, error.strerror or str(error), "", "")
    except Exception as error:  # noqa: BLE001 -- its standard error is not visible
        agent.send("failed", 0, "cannot work with the files of the task", repr(error), "")
    else:
        agent.send("done", result)


if __name__ == "__main__":
    main()
