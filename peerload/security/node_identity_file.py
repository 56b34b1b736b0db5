"""STATE/joined.toml: as whom this node was let into a cluster, so that it comes up as a member again.

Written by `peerload join` and by the first `peerload invite`. It counts as a setting, the weakest: a flag, a variable or a
configuration file overrules it, and where another cluster's directory is named all of it is passed over.
"""

from __future__ import annotations

import json
import os
import tomllib
from typing import TYPE_CHECKING, Any, NamedTuple

from peerload.model.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

NAME = "joined.toml"
FILE_BYTES_MAX = 16 << 10


class NodeIdentityFile(NamedTuple):
    """cluster: its directory; node: the name that the certificate has; listen: where others find this node; peer:
    members that were told of at the beginning."""

    cluster: str
    node: str
    listen: str
    peer: tuple[str, ...] = ()


def read(state: Path) -> NodeIdentityFile | None:
    """As it was written; None if this node has joined nobody. Raises ConfigError if it is damaged."""
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
        raise _damaged(path, "a value is no text")
    return joined


def settings(state: Path) -> dict[str, Any]:
    """The same as settings of the agent; {} if there is none. Raises ConfigError."""
    joined = read(state)
    return {} if joined is None else {**joined._asdict(), "peer": list(joined.peer)}


def write(state: Path, joined: NodeIdentityFile) -> None:
    """Keep it, durably and at once as a whole. Raises OSError."""
    lines = [f"{key} = {_quoted(value)}" for key, value in joined._asdict().items() if key != "peer"]
    lines.append(f"peer = [{', '.join(map(_quoted, joined.peer))}]")
    write_private(state / NAME, ("\n".join(lines) + "\n").encode())


def forget_peers(state: Path) -> None:
    """This node leaves: its next start looks for nobody. Raises OSError."""
    try:
        joined = read(state)
    except ConfigError:
        return  # its next start says so
    if joined is not None and joined.peer:
        write(state, joined._replace(peer=()))


def write_private(path: Path, data: bytes) -> None:
    """A file that its owner alone can read, replaced as a whole, and durable. Raises OSError."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _quoted(text: str) -> str:
    """As TOML has it; the same escapes as JSON's."""
    return json.dumps(text, ensure_ascii=False)


def _damaged(path: Path, why: str) -> ConfigError:
    return ConfigError("state", f"{path} is damaged", why=why, hint=f"mv {path} {path}.old ; peerload join TOKEN")
