"""`peerload files`: what this node keeps of files that travelled with tasks, and its removal."""

from __future__ import annotations

import sys
import time
from typing import Any

from peerload.cli.common.options import Options
from peerload.client.connection import AgentConnection
from peerload.model.text import printable
from peerload.text.format import counted, duration_text, print_json, size_text

ID_CHARACTERS = 12


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "files",
        "Show the files and environments of tasks that this node keeps: each snapshot or lock file, its size, whether a task needs it,\n"
        "and when it was last used.\n"
        "Unneeded ones are removed when the cache is full (cache of [files] in the settings), or with --gc.",
    )
    reader.switch("--gc", help="remove everything that no task needs now")
    reader.at()
    flags = reader.read(words)
    with AgentConnection(flags.socket) as client:
        removed = client.call("files", gc=True, at=flags.at)["removed_bytes"] if flags.gc else 0
        kept = client.call("files", at=flags.at)
    if flags.json:
        print_json({**kept, "removed_bytes": removed})
        return 0
    lines = [f"removed {size_text(removed)}"] if flags.gc else []
    lines.append(
        f"{size_text(kept['size_bytes'])} of {size_text(kept['limit_bytes'])} in {counted(kept['blocks'], 'block')}"
    )
    for one in kept["snapshots"]:
        what = counted(one["files"], "file")
        lines.append(f"{one['id'][:ID_CHARACTERS]}  {size_text(one['bytes']):>9}  {what}  {_used(one)}")
    lines += [
        f"{one['id'][:ID_CHARACTERS]}  {size_text(one['bytes']):>9}  {printable(one['name'])}  {_used(one)}"
        for one in kept["environments"]
    ]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _used(one: dict[str, Any]) -> str:
    return "in use" if one["in_use"] else f"used {duration_text(max(time.time() - one['used_at'], 0.0))} ago"
