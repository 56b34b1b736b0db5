"""Servers that do what an agent must not: answer strangers, stay open, show the wrong certificate. Each ends with its block."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def talks(connection: socket.socket) -> None:
    """Answers whoever it is."""
    connection.sendall(b"hello")


def waits(connection: socket.socket) -> None:
    """Says nothing, and does not close."""
    connection.settimeout(20)
    with contextlib.suppress(OSError):
        while connection.recv(4096):
            pass


def closes(_connection: socket.socket) -> None:
    """Hangs up at once."""


@contextlib.contextmanager
def listening(
    serve: Callable[[socket.socket], None], context: ssl.SSLContext | None = None, path: str = ""
) -> Iterator[str]:
    """A server → its `HOST:PORT`, or ``path`` of its Unix socket. context: it speaks TLS like this."""
    server = socket.create_server(("127.0.0.1", 0)) if not path else socket.socket(socket.AF_UNIX)
    if path:
        server.bind(path)
        server.listen()

    def run() -> None:
        while True:
            try:
                accepted, _ = server.accept()
            except OSError:
                return  # it is over
            with accepted, contextlib.suppress(OSError):
                accepted.settimeout(20)
                if context is None:
                    serve(accepted)
                else:
                    with context.wrap_socket(accepted, server_side=True) as secured:
                        serve(secured)
                        secured.recv(1)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield path or f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(30)


@contextlib.contextmanager
def echoing() -> Iterator[str]:
    """A UDP socket that answers everybody → its `HOST:PORT`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(20)

        def run() -> None:
            told, came_from = server.recvfrom(2048)
            server.sendto(told, came_from)

        thread = threading.Thread(target=run)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(30)


def anybody(pair: Path, *, oldest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    """Of a server that asks nobody for a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = oldest
    context.load_cert_chain(pair)
    return context
