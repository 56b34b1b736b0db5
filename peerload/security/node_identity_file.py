"""Node identity file, STATE/joined.toml: the cluster, name and addresses from this node's join, for its next start.

`peerload join` and the first `peerload invite` write it. Its values are settings with the lowest precedence: a flag, a
variable or a configuration file overrides them, and all are ignored if the directory of another cluster is configured.
"""

from __future__ import annotations

import json
import tomllib
from typing import TYPE_CHECKING, Any, NamedTuple

from peerload.model.errors import ConfigError
from peerload.security.private_files import write_private

if TYPE_CHECKING:
    from pathlib import Path

NAME = "joined.toml"
FILE_BYTES_MAX = 16 << 10


class NodeIdentityFile(NamedTuple):
    """cluster: its directory; node: the name in the certificate; listen: the address of this node; peer: addresses of
    members."""

    cluster: str
    node: str
    listen: str
    peer: tuple[str, ...] = ()


def read(state: Path) -> NodeIdentityFile | None:
    """Read the file; None if this node has not joined a cluster. Raises ConfigError if it is damaged."""
    path = state / NAME
    try:
        with path.open("rb") as file:
            found: dict[str, Any] = tomllib.loads(file.read(FILE_BYTES_MAX).decode())
        joined = NodeIdentityFile(found["cluster"], found["node"], found["listen"], tuple(found.get("peer", ())))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError("state", f"{path} cannot be read", why=str(error.strerror)) from None
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, type(error).__name__) from None
    if not all(isinstance(text, str) for text in (joined.cluster, joined.node, joined.listen, *joined.peer)):
        raise _damaged(path, "a value is not a string")
    return joined


def settings(state: Path) -> dict[str, Any]:
    """The file as settings of the agent; {} if there is none. Raises ConfigError."""
    joined = read(state)
    return {} if joined is None else {**joined._asdict(), "peer": list(joined.peer)}


def write(state: Path, joined: NodeIdentityFile) -> None:
    """Write the file atomically and durably. Raises OSError."""
    lines = [f"{key} = {_quoted(value)}" for key, value in joined._asdict().items() if key != "peer"]
    lines.append(f"peer = [{', '.join(map(_quoted, joined.peer))}]")
    write_private(state / NAME, ("\n".join(lines) + "\n").encode())


def forget_peers(state: Path) -> None:
    """Remove the addresses of members, because this node leaves its cluster. Raises OSError."""
    try:
        joined = read(state)
    except ConfigError:
        return  # the next start reports it
    if joined is not None and joined.peer:
        write(state, joined._replace(peer=()))


def _quoted(text: str) -> str:
    """A TOML string; its escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError("state", f"{path} is damaged", why=why, hint=f"mv {path} {path}.old ; peerload join TOKEN")
