"""`peerload logs`: the output of a task."""

from __future__ import annotations

from peerload.cli.command import say_unknown
from peerload.cli.options import Options, whole
from peerload.cli.output import OutputWriter
from peerload.cli.text import print_json
from peerload.client import Client

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TAIL_LINE_BYTES = 4096
"""How long a line is reckoned to be when the end of an output is fetched for `--tail`; longer ones cost a second look."""
TAIL_BYTES_MIN = 64 << 10
TAIL_BYTES_MAX = 64 << 20


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "logs",
        "The output of a task: its stdout on stdout, its stderr on stderr, byte for byte.",
        json_says="one object for each piece of output",
    )
    reader.add_argument("task", metavar="ID")
    reader.switch("-f", "--follow", help="go on as more comes, until the task has ended")
    reader.switch("--err", help="only what it wrote to stderr")
    reader.flag("--tail", type=whole(0, 1_000_000), metavar="N", help="only the last N lines of each stream")
    flags = reader.read(words)
    streams = [2] if flags.err else [1, 2]
    with Client(flags.socket) as client:
        first: dict[int, int] = {} if flags.tail is None else tail_offsets(client, flags.task, streams, flags.tail)
        writer = OutputWriter(first)
        for piece in client.stream("output", task=flags.task, follow=flags.follow, streams=streams):
            if "unknown" in piece:
                say_unknown(piece["unknown"])
            elif not flags.json:
                writer.write(piece)
            elif piece["offset"] + len(piece["data"]) > first.get(piece["stream"], 0):
                print_json(_from(piece, first.get(piece["stream"], 0)))
    return 0


def tail_offsets(client: Client, task: str, streams: list[int], lines: int) -> dict[int, int]:
    """Per stream, the offset at which its last ``lines`` lines begin as things stand now."""
    return {stream: _tail_offset(client, task, stream, lines) for stream in streams}


def _tail_offset(client: Client, task: str, stream: int, lines: int) -> int:
    reach = min(max(lines * TAIL_LINE_BYTES, TAIL_BYTES_MIN), TAIL_BYTES_MAX)
    while True:
        kept, end = bytearray(), 0
        for piece in client.stream("output", task=task, streams=[stream], tail_bytes=reach):
            if piece["offset"] != end:
                kept.clear()  # what lies between was cut out: lines are counted behind the gap
            kept += piece["data"]
            end = piece["offset"] + len(piece["data"])
        last = last_lines(bytes(kept), lines)
        if len(last) < len(kept) or len(kept) < reach or reach == TAIL_BYTES_MAX:
            return end - len(last)
        reach = min(reach * 16, TAIL_BYTES_MAX)


def last_lines(data: bytes, lines: int) -> bytes:
    """The last so many lines; one that is not ended by a newline counts."""
    start = len(data)
    if lines and data.endswith(b"\n"):
        start -= 1
    for _ in range(lines):
        start = data.rfind(b"\n", 0, start)
        if start < 0:
            return data
    return data[start + 1 :] if lines else b""


def _from(piece: dict[str, Any], first: int) -> dict[str, Any]:
    skipped = max(0, first - piece["offset"])
    return {**piece, "offset": piece["offset"] + skipped, "data": piece["data"][skipped:]}
