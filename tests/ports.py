"""Ports that nobody else gets: one that was found free and let go may be another process's a moment later."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def kept_port() -> Iterator[int]:
    """A TCP port of the loopback interface that nobody is given by chance. A server that says SO_REUSEADDR, as servers do,
    may listen there; while none does, connections to it are refused."""
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("127.0.0.1", 0))
        yield keeper.getsockname()[1]
