"""What the web server costs: VIEWERS viewers of NODES nodes that all change each second; /metrics with TASKS queued tasks; the
time from the navigation to the first row in a browser. `python tests/bench/bench_web.py`

Processor time is that of the processes; the page's wall time depends on what else the machine does, so its CPU is beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from peerload.wire import frame
from tests.bench.support import agents, arguments, cpu_s, percentile, report
from tests.fakes.web_agent import ChangingCluster
from tests.integration.cluster import program
from tests.integration.test_web_page import chromium
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.bench.support import Agent
    from tests.integration.test_web_page import Browser

VIEWERS, NODES, SECONDS = 20, 300, 15
TASKS, SCRAPES = 100_000, 50
LOADS = 20
FIRST_ROW = """
new MutationObserver((_, watch) => {
  if (!window.row_ms && document.querySelector("#work tr")) { window.row_ms = performance.now(); watch.disconnect(); }
}).observe(document, { childList: true, subtree: true });
"""


async def answer(
    cluster: ChangingCluster, state: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Answer requests at the control socket as an agent of this cluster does."""
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            size = int.from_bytes(await reader.readexactly(frame.HEADER_BYTES), "big")
            asked = frame.unpack(await reader.readexactly(size))
            number, verb = asked.pop("id"), asked.pop("verb")
            told = {"state": state} if verb == "info" else await cluster.ask(verb, **asked)
            writer.write(frame.pack({"id": number, "ok": told}))
    writer.close()


async def viewers() -> dict[str, float]:
    """A web server, a process of its own, with an agent that is not there; each viewer reads the samples and then the live feed."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        cluster = ChangingCluster(NODES, 0)
        await asyncio.start_unix_server(lambda *link: answer(cluster, directory, *link), f"{directory}/agent")
        words = (
            sys.executable,
            "-m",
            "peerload",
            "web",
            "--socket",
            f"{directory}/agent",
            "--listen",
            f"{directory}/s",
        )
        server = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
        assert server.stdout is not None
        await server.stdout.readline()
        seen = [Path(directory, f"seen{number}") for number in range(VIEWERS)]
        curl = ("curl", "-sN", "--unix-socket", f"{directory}/s")
        urls = [
            ("http://x/api/v1/samples", "-o", "/dev/null", "http://x/api/v1/events", "-o", str(path)) for path in seen
        ]
        curls = [await asyncio.create_subprocess_exec(*curl, *url) for url in urls]
        await asyncio.sleep(2)
        before_s, began_s = cpu_s([server.pid]), time.monotonic()
        await asyncio.sleep(SECONDS)
        share = (cpu_s([server.pid]) - before_s) / (time.monotonic() - began_s)
        status = Path(f"/proc/{server.pid}/status").read_text(encoding="ascii")  # noqa: ASYNC240
        mib = int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024  # the most that it had
        updates = [path.read_bytes().count(b"\nevent: ") for path in seen]
        for process in (*curls, server):
            process.terminate()
            await process.wait()
    return {"share": share, "mib": mib, "events_min": min(updates), "events_max": max(updates)}


@contextlib.contextmanager
def serving(agent: Agent, *words: str) -> Iterator[tuple[int, str]]:
    """The pid of a web server for this agent, and where it is."""
    words = (*program(), "web", "--socket", agent.socket, "--json", *words)
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process.pid, json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait()


def scrapes(agent: Agent) -> dict[str, float]:
    """/metrics, by the processor time of agent and server for one scrape."""

    path = f"{agent.socket}-web"
    with serving(agent, "--listen", path) as (pid, _), contextlib.closing(http.client.HTTPConnection("x")) as link:
        link.sock = socket.socket(socket.AF_UNIX)
        link.sock.connect(path)

        def scrape() -> bytes:
            link.request("GET", "/metrics")
            answer = link.getresponse()
            assert answer.status == http.HTTPStatus.OK
            return answer.read()

        told, walls = scrape(), []
        before_s, web_before_s = cpu_s([agent.pid]), cpu_s([pid])
        for _ in range(SCRAPES):
            began_s = time.perf_counter()
            scrape()
            walls.append(time.perf_counter() - began_s)
        found = {"agent_cpu_ms": cpu_s([agent.pid]) - before_s, "server_cpu_ms": cpu_s([pid]) - web_before_s}
    series = sum(1 for line in told.splitlines() if line and not line.startswith(b"#"))
    found = {name: value / SCRAPES * 1e3 for name, value in found.items()}
    return found | {"wall_ms": statistics.median(walls) * 1e3, "series": series}


def restart_without_slots(agent: Agent) -> None:
    """Start the agent again so that nothing of its queue can run there."""
    from peerload.cli.common import agent_process

    info = agent.client.call("info")
    settings: dict[str, Any] = {"node": info["node"], "state": info["state"], "socket": info["socket"], "slots": 0}
    settings |= {"listen": info["listen"], "config": str(Path(info["state"]).parent / "config.toml")}
    os.kill(agent.pid, 9)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(agent.pid, 0)
    agent.pid = int(agent_process.start(settings)["pid"])
    agent.client.close()
    agent.client = type(agent.client)(agent.socket, timeout_s=60)


def page(agent: Agent, browser: Browser) -> dict[str, float]:
    """From the navigation to the first row of the working queue, signed in already."""
    walls, cpus = [], []
    with serving(agent, "--listen", "127.0.0.1:0") as (pid, url):
        browser.open(url)
        browser.devtools("Performance.enable", {})
        browser.devtools("Page.addScriptToEvaluateOnNewDocument", {"source": FIRST_ROW})
        before_s = cpu_s([pid, agent.pid])
        for _ in range(LOADS):
            browser.open(url.partition("login")[0])
            wait_until(lambda: browser.script("return window.row_ms"), what="the first row")
            walls.append(browser.script("return window.row_ms"))
            metrics = browser.devtools("Performance.getMetrics", {})["metrics"]
            cpus.append(next(one["value"] for one in metrics if one["name"] == "TaskDuration") * 1e3)
        served_ms = (cpu_s([pid, agent.pid]) - before_s) / LOADS * 1e3
    quick, most = percentile(walls, 0.0), percentile(walls, 0.95)
    return {
        "wall_ms": statistics.median(walls), "wall_ms_min": quick, "wall_ms_p95": most,
        "page_ms": statistics.median(cpus), "served_cpu_ms": served_ms,
    }  # fmt: skip


def main() -> None:
    """Measure all three."""
    options = arguments("what the web server costs")
    watched = asyncio.run(viewers())
    got = f"each viewer got {watched['events_min']} to {watched['events_max']} events"
    lines = [
        f"{VIEWERS} viewers, {NODES} nodes, 1 Hz: {watched['share']:.1%} of a core, {watched['mib']:.1f} MiB; {got}"
    ]
    figures: dict[str, Any] = {"viewers": watched}
    with agents(1) as (agent,):
        agent.submit("sleep", "3600", array=4)
        with chromium() as browser:
            figures["page"] = told = page(agent, browser)
        lines.append(
            f"page: first row {told['wall_ms']:.0f} ms after the navigation [{told['wall_ms_min']:.0f}, 95 %:"
            f" {told['wall_ms_p95']:.0f}], of which its own thread worked {told['page_ms']:.0f} ms;"
            f" CPU of server and agent {told['served_cpu_ms']:.0f} ms"
        )
        agent.submit("sleep", "3600", array=TASKS)
        for slots in (2, 0):
            if not slots:
                restart_without_slots(agent)
            figures[f"metrics_{slots}_slots"] = told = scrapes(agent)
            lines.append(
                f"/metrics, {TASKS:,} tasks wait, {slots} slots: CPU of the agent {told['agent_cpu_ms']:.2f} ms, of the server"
                f" {told['server_cpu_ms']:.2f} ms; {told['wall_ms']:.1f} ms in all, {told['series']:.0f} series"
            )
    report(lines, figures, as_json=options.json)


if __name__ == "__main__":
    main()
