# ruff: noqa: PTH100, PTH110, PTH111, PTH112, PTH118, PTH119, PTH123
# os.path, since that is quick.
"""Lock files of environments, read by the user's own process: `requirements.txt`, `uv.lock`, `pyproject.toml`, those of conda,
and the metadata inside a script (PEP 723)."""

from __future__ import annotations

import os
import re
import tomllib
from typing import TYPE_CHECKING, Any, NamedTuple

from peerload.files.manifest import BLOCK_BYTES, FileEntry, Manifest, digest_of, encode
from peerload.model.errors import BadRequest
from peerload.model.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable

LOCK_BYTES_MAX = 8 << 20
REQUIREMENTS, PROJECT = "requirements.txt", "pyproject.toml"
IN_DIRECTORY = ("uv.lock", "conda-lock.yml", REQUIREMENTS, PROJECT)
"""The lock files to look for in a directory, in this order."""
_SCRIPT = re.compile(r"(?m)^# /// script$\s(?P<content>(?:^#(?: .*)?$\s)+)^# ///$")
"""The block of PEP 723."""
_OTHER_FILE = re.compile(
    r"(?m)^[ \t]*((?:-[rce]|--(?:requirement|constraint|editable))[ \t=]*(?!/|\S*://)\S+|\.\S*)", re.ASCII
)
"""A line of a `requirements.txt` that refers to a file or directory next to it, which is not sent along."""


class Lock(NamedTuple):
    """A lock file. kind: its builder ("pip", "uv" or "conda"); name: the file name for messages; python: the
    supported versions of Python, as in `requires-python`; files: input of the builder, by name."""

    kind: str
    name: str
    python: str
    files: dict[str, bytes]

    def put(self, ask: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """Store the files in an agent → the lock for the spec of a task. ask: sends a `files` request."""
        blocks: dict[bytes, bytes] = {}
        entries = []
        for name, content in sorted(self.files.items()):
            parts = [content[at : at + BLOCK_BYTES] for at in range(0, len(content), BLOCK_BYTES)]
            blocks |= {digest_of(part): part for part in parts}
            entries.append(FileEntry(name, 0o644, len(content), 0, tuple(map(digest_of, parts))))
        id_, own = encode(Manifest(tuple(entries)))
        if not ask(manifest=id_)["complete"]:
            for block in (*blocks.values(), *own):
                ask(blocks=[block])
            ask(manifest=id_)
        return {"manifest": id_, "kind": self.kind, "name": self.name, "python": self.python}


def read(path: str | os.PathLike[str]) -> Lock:
    """The lock in a file, or in a directory with a lock file. Raises BadRequest."""
    shown = os.fspath(path)
    path = os.path.abspath(os.path.expanduser(shown))
    if os.path.isdir(path):
        found = next((name for name in IN_DIRECTORY if os.path.exists(os.path.join(path, name))), "")
        if not found:
            raise _refused(shown, f"it contains none of {', '.join(IN_DIRECTORY)}")
        path = os.path.join(path, found)
    directory, name = os.path.split(path)
    if name == PROJECT and os.path.exists(os.path.join(directory, "uv.lock")):
        path, name = os.path.join(directory, "uv.lock"), "uv.lock"
    content = _content(path, shown)
    if name.endswith(".py"):
        found_in = in_script(content, name)
        if found_in is None:
            raise _refused(shown, "it has no metadata:  # /// script")
        return found_in
    if name == "uv.lock":
        project = _content(os.path.join(directory, PROJECT), shown)
        requires = _table(content, shown).get("requires-python", "")
        return Lock("uv", name, str(requires), {"uv.lock": content, PROJECT: project})
    if name == PROJECT:
        return _of_table(_table(content, shown).get("project"), name)
    if name.endswith(("conda-lock.yml", "conda.lock")) or b"@EXPLICIT" in content.split(b"\n"):
        kept = name if name.endswith(".yml") else "explicit.txt"
        return Lock("conda", name, "", {kept: content})
    return _requirements(content, name, shown)


def _requirements(content: bytes, name: str, shown: str) -> Lock:
    if name.endswith((".yml", ".yaml", ".lock", ".json", ".toml")):
        raise _refused(shown, "it is not a lock that peerload can build")
    if (other := _OTHER_FILE.search(content.decode("utf-8", "replace"))) is not None:
        raise _refused(shown, f"{printable(other[1])} refers to another file, but only one file can be sent")
    return Lock("pip", name, "", {REQUIREMENTS: content})


def in_script(content: bytes, name: str) -> Lock | None:
    """The lock from the metadata inside a script; None without metadata. Raises BadRequest."""
    found = [match["content"] for match in _SCRIPT.finditer(content.decode("utf-8", "replace").replace("\r\n", "\n"))]
    if not found:
        return None
    if len(found) > 1:
        raise _refused(name, "it has more than one block  # /// script")
    lines = found[0].splitlines(keepends=True)
    text = "".join(line[2:] if line.startswith("# ") else line[1:] for line in lines)
    return _of_table(_table(text.encode(), name), name)


def _of_table(table: object, name: str) -> Lock:
    """The lock from the keys `dependencies` and `requires-python`."""
    match table:
        case {"dynamic": list(dynamic)} if "dependencies" in dynamic:
            raise _refused(name, "its dependencies are dynamic")
        case {"dependencies": list(dependencies), **rest} if all(isinstance(one, str) for one in dependencies):
            lines = "".join(f"{one}\n" for one in dependencies)
        case {**rest} if "dependencies" not in rest:
            lines = ""
        case _:
            raise _refused(name, "it has no list of dependencies")
    return Lock("pip", name, str(rest.get("requires-python", "")), {REQUIREMENTS: lines.encode()})


def _table(content: bytes, shown: str) -> dict[str, Any]:
    try:
        return tomllib.loads(content.decode())
    except ValueError as error:
        raise _refused(shown, str(error)) from None


def _content(path: str, shown: str) -> bytes:
    try:
        with open(path, "rb") as file:
            content = file.read(LOCK_BYTES_MAX + 1)
    except OSError as error:
        raise _refused(shown, f"{os.path.basename(path)}: {error.strerror}") from None
    if len(content) > LOCK_BYTES_MAX:
        raise _refused(shown, f"it has more than {LOCK_BYTES_MAX >> 20} MiB")
    return content


def _refused(shown: str, why: str) -> BadRequest:
    return BadRequest(
        f"--env {printable(shown)}",
        why=why,
        hint="requirements.txt, uv.lock, pyproject.toml, conda-lock.yml, or a script with  # /// script",
    )
