"""An agent whose peer links are plain TCP, for measuring what TLS costs, and for nothing else: the agent itself has no
such switch. `python tests/bench/plain_agent.py OTHER WORDS…` is `peerload agent WORDS…` that takes whoever connects to be OTHER.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import uvloop

from peerload.agent.peers import connection
from peerload.cli.main import main
from peerload.security.certificates import der_of

_OF_TLS = ("ssl", "server_hostname", "ssl_handshake_timeout", "ssl_shutdown_timeout")


class PlainLoop(uvloop.Loop):
    """uvloop's, with TLS left out of every connection."""

    async def create_connection(self, *words: Any, **named: Any) -> Any:
        """As uvloop's."""
        return await super().create_connection(*words, **_plain(named))

    async def connect_accepted_socket(self, *words: Any, **named: Any) -> Any:
        """As uvloop's."""
        return await super().connect_accepted_socket(*words, **_plain(named))


def _plain(named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name not in _OF_TLS}


def run(other: str, words: list[str]) -> int:
    """Be the agent."""
    certificate = Path(words[words.index("--state") + 1], "tls", "node.pem")
    shown: list[bytes] = []

    def shown_by(_transport: object) -> bytes:
        if not shown:
            shown.append(der_of(certificate.read_bytes()))
        return shown[0]

    vars(connection)["node_of"] = lambda _transport: other
    vars(connection)["shown_by"] = shown_by
    vars(uvloop)["new_event_loop"] = PlainLoop
    return main(["agent", *words])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
