"""The picture of `peerload web` in docs/web.md: three agents with stand-in GPUs and their work, in Chromium. `make docs-web`
writes it. With a directory as argument it also stores there the page as on a phone and in dark colours, to be looked at."""

from __future__ import annotations

import io
import math
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from peerload.agent.views.agent import EVERY_S, KEYS, SAMPLES_MAX
from tests.gpu.cards import GIB, Cards, with_cards
from tests.integration.cluster import Cluster, ended
from tests.integration.test_web import serve
from tests.integration.test_web_page import Browser, chromium, rows
from tests.support import wait_until

if TYPE_CHECKING:
    from tests.integration.cluster import Agent

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "web.png"
BYTES_MAX = 150_000
COLOURS = 256
NODES = {"desk": 2, "lab": 2, "store": 0}
"""The agents and the number of their GPUs."""
HEIGHTS = {1400: 1400, 390: 2600}


def submit_gpu(agent: Agent, node: str, name: str, mode: str, program: str = "exec sleep 600", share: float = 1) -> str:
    """Submit a task that prefers GPU 0 of a node."""
    request = {"gpus": 1, "gpu_fraction": share, "gpu_prefer": ["0"], "gpu_wait": mode, "cpus": 0.5}
    words = ("sh", "-c", f"echo $$; {program}")
    return agent.submit(*words, name=name, request=request, placement={"node": node})


def past_hours(now: float) -> bytes:
    """Samples of a day's work, as an agent keeps them."""
    told = []
    for at in range(SAMPLES_MAX):
        share = max(0.0, math.sin(at / 210)) * 0.7 + 0.1 * (at // 37 % 3)
        foreign = 1.5 if 500 < at < 800 else 0.2
        running, waiting = round(share * 14), max(0, round((share - 0.5) * 30))
        sums = (3, 6, share * 5 + foreign, foreign, running, waiting, 4, share * 3.4, share * 0.6)
        told.append(struct.pack(f"<d{len(KEYS)}f", now - EVERY_S * (SAMPLES_MAX - at), *sums))
    return b"peerload samples 1\n" + b"".join(told)


def start(cluster: Cluster) -> tuple[dict[str, Agent], dict[str, Cards]]:
    """Start the agents, each with its own GPUs."""
    agents: dict[str, Agent] = {}
    cards: dict[str, Cards] = {}
    for node, count in NODES.items():
        (cluster.directory / f"{node}-cards").mkdir()
        cards[node] = Cards(cluster.directory / f"{node}-cards", count)
        for number in range(count):
            cards[node].set(number, name="A10", util=0, temp=38 + 3 * number)
        cluster.environment |= cards[node].environment
        peer = ("--peer", agents["desk"].listen) if agents else ()
        agents[node] = cluster.add(node, *peer, slots=8)
        agents[node].state.mkdir(parents=True, mode=0o700, exist_ok=True)
        (agents[node].state / "samples").write_bytes(past_hours(time.time()))
        agents[node].start()
        with_cards(agents[node], count)
    cluster.await_acquainted(agents.values())
    return agents, cards


def work(agents: dict[str, Agent], cards: dict[str, Cards]) -> int:
    """Have tasks end, run and wait → how many do not end."""
    home = agents["desk"]
    over = [
        submit_gpu(home, "desk", "prepare", "queue", "sleep 1"),
        submit_gpu(home, "lab", "evaluate", "schedule", "sleep 1", 0.5),
        home.submit("sh", "-c", "exit 3", name="upload", placement={"node": "store"}),
        home.submit("true", name="index", placement={"node": "store"}),
    ]
    home.wait(*over)
    running = {
        submit_gpu(home, "desk", "train-large", "queue"): ("desk", 0, 17.5, 93, 71),
        submit_gpu(home, "lab", "train-small", "queue"): ("lab", 0, 9.0, 64, 58),
        submit_gpu(agents["lab"], "desk", "render", "schedule"): ("desk", 1, 6.5, 38, 52),
    }
    for task, (node, number, gib, util, temperature) in running.items():
        owner = agents[task.partition("/")[0]]
        owner.await_state(task, "running")
        pid: list[bytes] = []

        def has_written(task: str = task, owner: Agent = owner, pid: list[bytes] = pid) -> bool:
            pid[:] = owner.output(task)[0].split()
            return bool(pid)

        wait_until(has_written, what=f"{task} to write its number")
        cards[node].use(number, int(pid[0]), int(gib * GIB))
        cards[node].set(number, util=util, temp=temperature)
    cards["lab"].set(1, used=int(11 * GIB), util=47)
    home.submit("sleep", "600", name="archive", placement={"node": "store"})
    submit_gpu(home, "desk", "train-next", "queue")
    home.call("hold", tasks=[submit_gpu(home, "desk", "train-later", "queue")])
    return len(running) + 3


def screenshot(browser: Browser, width: int, scheme: str) -> bytes:
    """The page in a window of this width."""
    size = {"width": width, "height": HEIGHTS[width], "deviceScaleFactor": 1, "mobile": False}
    browser.devtools("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.devtools("Emulation.setEmulatedMedia", {"features": features})
    return browser.screenshot()


def main(directory: Path | None) -> None:
    """Write the picture."""
    with Cluster() as cluster, chromium() as browser:
        agents, cards = start(cluster)
        count = work(agents, cards)
        process, url = serve(agents["desk"])
        with ended(process):
            browser.open(url)
            wait_until(lambda: len(rows(browser, "work")) == count and len(rows(browser, "done")) == 4)
            busy = "return [...document.querySelectorAll('.gpu small:first-of-type')].every(one => /^[2-9][0-9] %/.test(one.textContent))"
            wait_until(lambda: browser.script(busy), what="all GPUs to be busy")
            if directory is not None:
                for width in HEIGHTS:
                    for scheme in ("light", "dark"):
                        (directory / f"{width}-{scheme}.png").write_bytes(screenshot(browser, width, scheme))
            picture = (
                Image.open(io.BytesIO(screenshot(browser, 1400, "light")))
                .convert("RGB")
                .quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            )
            picture.save(PICTURE, optimize=True)
    if PICTURE.stat().st_size > BYTES_MAX:
        sys.exit(f"{PICTURE} has more than {BYTES_MAX} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else None)
