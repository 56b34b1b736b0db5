"""An agent that counts the bytecodes which its main thread and that of its launcher execute: a measure of work that no neighbour on
the machine can change. `python tests/bench/counted_agent.py DIRECTORY WORDS…` is `peerload agent WORDS…`. SIGUSR2 begins to count
(DIRECTORY/PID.on), a second one writes the number (DIRECTORY/PID.count).
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

if TYPE_CHECKING:
    from types import FrameType

_LAUNCHER = """
import sys; sys.path.insert(0, {root!r})
from tests.bench.counted_agent import count_into
count_into({directory!r})
"""


def count_into(directory: str) -> None:
    """Count between two SIGUSR2."""
    executed = 0

    def each(frame: FrameType, event: str, _: object) -> Any:
        nonlocal executed
        executed += event == "opcode"
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return each

    def toggle(*_: object) -> None:
        import os

        name = f"{directory}/{os.getpid()}"
        if sys.gettrace() is None:
            Path(f"{name}.on").touch()
            sys.settrace(each)
        else:
            sys.settrace(None)
            Path(f"{name}.new").write_text(str(executed))
            Path(f"{name}.new").rename(f"{name}.count")

    signal.signal(signal.SIGUSR2, toggle)


def run(directory: str, words: list[str]) -> int:
    """Be the agent."""
    from peerload.agent.launcher import process
    from peerload.cli.main import main

    own = process.command_line
    code = _LAUNCHER.format(root=str(Path(__file__).resolve().parents[2]), directory=directory)
    vars(process)["command_line"] = lambda module, flags, first="": own(module, flags, f"{code}\n{first}")
    count_into(directory)
    return main(["agent", *words])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
