"""CPU and memory of the web server: VIEWERS viewers of NODES nodes that all change each second. `python tests/bench/bench_web.py`"""

from __future__ import annotations

import asyncio
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peerload.web.access import Access
from peerload.web.http import HttpServer
from peerload.web.live import LiveFeed
from peerload.web.routes import Routes
from tests.fakes.web_agent import ChangingCluster

VIEWERS, NODES, SECONDS = 20, 300, 15


async def main() -> None:
    """Measure in this process: the viewers are others."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        agent: Any = ChangingCluster(NODES, 0)
        feed = LiveFeed(agent)
        access = Access(Path(directory) / "web", (), "c", is_secure=False)
        server = HttpServer(Routes(agent, access, feed, port=0, scheme="http").answer)
        listener = await asyncio.start_unix_server(server.serve(is_local=True), f"{directory}/s")
        words = ("-sN", "--unix-socket", f"{directory}/s", "http://x/api/v1/events")
        seen = [Path(directory, f"seen{number}") for number in range(VIEWERS)]
        viewers = [await asyncio.create_subprocess_exec("curl", *words, "-o", str(path)) for path in seen]
        await asyncio.sleep(2)
        before_s, began_s = time.process_time(), time.monotonic()
        await asyncio.sleep(SECONDS)
        share = (time.process_time() - before_s) / (time.monotonic() - began_s)
        mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        updates = [path.read_bytes().count(b"\nevent: ") for path in seen]
        got = f"each viewer got {min(updates)} to {max(updates)} events, {seen[0].stat().st_size >> 10} KiB"
        sys.stdout.write(f"{VIEWERS} viewers, {NODES} nodes, 1 Hz: {share:.1%} of a core, {mib:.1f} MiB; {got}\n")
        for viewer in viewers:
            viewer.kill()
            await viewer.wait()
        listener.close()
        await server.close()
        await feed.close()


if __name__ == "__main__":
    asyncio.run(main())
