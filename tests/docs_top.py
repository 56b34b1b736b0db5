"""The picture of `peerload top` in docs/top.md: Textual's own export of the program, on a made-up cluster.

`make docs` writes it. The export carries web fonts of other sites, which are left out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.unit.top.given import GIB, NOW, event, node, sample, task
from tests.unit.top.test_app import play, until

if TYPE_CHECKING:
    from textual.pilot import Pilot

    from peerload.top.app import TopApp

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "top.svg"
SIZE = (120, 28)


def usage(of: str, cores: float) -> dict[str, Any]:
    return {"id": of, "node": "ws1", "cpu_s": 80.0, "cpus_busy": cores, "memory_bytes": int(1.4 * GIB), "processes": 1}


def running(number: int, where: str, command: str) -> dict[str, Any]:
    return task(f"ws1/{number}", name=command.split()[1].removesuffix(".py"), node=where, command=command)


SHOWN = sample(
    nodes=[
        node("lab3", load=1.25, region="overloaded", cpus_busy=4.0, tasks_running=4, age_s=0.6),
        node("ws1", self=True, load=1.1, region="overloaded", cpus_busy=5.4, tasks_running=3, tasks_queued=2),
        node("ws2", drained=True, drain_reason="new PSU", load=0.4, region="underloaded", cpus_busy=1.5, age_s=0.2),
    ],
    tasks=[
        *(running(number, "ws1", f"python train.py --seed {number}") for number in (1, 2)),
        *(running(number, where, f"python render.py --frame {number}") for number, where in ((3, "lab3"), (4, "ws2"), (5, "lab3"))),
        task("ws1/6", "queued", name="film", command="ffmpeg -i frames film.mp4", reason="waits for ws1/5"),
    ],
    guests=[task("lab3/9", node="ws1", home="lab3", command="make -j 2")],
    counts={"placed": 5, "waiting": 1, "held": 0},
    events=[event(number, node=where, reason=f"started on {where}") for number, where in ((1, "ws1"), (3, "lab3"), (4, "ws2"))],
)  # fmt: skip


def picture() -> str:
    """The program as SVG."""
    shown: list[str] = []

    async def body(app: TopApp, pilot: Pilot[int]) -> None:
        await pilot.press("j")
        await until(pilot, lambda: app.tail.task == "ws1/1" and app.tail.why_none)  # no agent tells of output
        lines = "".join(f"epoch {number}: loss 0.{185 - number}\n" for number in range(67, 76))
        app.world.take_usage([usage(f"ws1/{number}", 1.0) for number in range(1, 6)] + [usage("lab3/9", 1.8)])
        app.tail.take("ws1/1", [{"stream": 1, "offset": 0, "data": lines.encode()}], NOW)
        app.paint()
        await pilot.pause()
        shown.append(app.export_screenshot(title="peerload top"))

    play(SIZE, body, SHOWN)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", shown[0], flags=re.DOTALL)
    return re.sub(r"terminal-\d+", "terminal", svg)


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
