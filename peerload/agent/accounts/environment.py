"""The environment variables of a task, as they travel: a MessagePack map of bytes to bytes."""

from __future__ import annotations

import msgspec

from peerload.model.errors import BadRequest

_decoder = msgspec.msgpack.Decoder(dict[bytes, bytes])


def variables_of(packed: bytes) -> dict[bytes, bytes]:
    """The variables. Raises BadRequest if it is no such map, or has what no process can have: an empty name, a name
    with ``=``, a NUL byte. Peers and clients are not trusted to have looked."""
    try:
        variables = _decoder.decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("the environment is no map of bytes to bytes", why=str(error)[:200]) from None
    for name, value in variables.items():
        if not name or b"=" in name or b"\0" in name or b"\0" in value:
            shown = name[:80].decode("utf-8", "backslashreplace")
            raise BadRequest(f"{shown!r} cannot be an environment variable", why="it is empty, or has = or NUL in it")
    return variables
