"""The page of `peerload web` in Debian's Chromium, driven over chromedriver's own HTTP interface, with real agents behind it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Agent, Cluster, ended
from tests.integration.test_web import serve
from tests.support import kept_port, wait_until

pytestmark = pytest.mark.long
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
HOSTILE = '<script>document.title="hurt"</script><img src=x onerror=alert(1)>'


class Browser:
    """One window of a headless Chromium."""

    def __init__(self, port: int, directory: str) -> None:
        self._base = f"http://127.0.0.1:{port}/session"
        options = {"args": [*FLAGS, f"--user-data-dir={directory}"], "binary": shutil.which("chromium")}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        self._base += "/" + self._post("", wanted)["sessionId"]

    def _post(self, path: str, body: object) -> Any:
        asked = urllib.request.Request(
            self._base + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)["value"]

    def open(self, url: str) -> None:
        self._post("/url", {"url": url})

    def size(self, width: int, height: int) -> None:
        self._post("/window/rect", {"width": width, "height": height})

    def script(self, text: str) -> Any:
        return self._post("/execute/sync", {"script": text, "args": []})

    def devtools(self, command: str, params: dict[str, Any]) -> None:
        self._post("/goog/cdp/execute", {"cmd": command, "params": params})

    def screenshot(self) -> bytes:
        with urllib.request.urlopen(self._base + "/screenshot", timeout=60) as answer:
            return base64.b64decode(json.load(answer)["value"])

    def close(self) -> None:
        urllib.request.urlopen(urllib.request.Request(self._base, method="DELETE"), timeout=60).close()


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    driver = shutil.which("chromedriver")
    if driver is None or shutil.which("chromium") is None:
        pytest.skip("Chromium is not here (apt-get install chromium chromium-driver)")
    with kept_port() as port, contextlib.ExitStack() as stack:
        process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.enter_context(ended(process))
        directory = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))

        def answers() -> bool:
            try:
                return bool(
                    json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5))["value"]["ready"]
                )
            except OSError:
                return False

        wait_until(answers, what="chromedriver answers")
        browser = Browser(port, directory)
        yield browser
        browser.close()


@pytest.fixture(name="browser", scope="module")
def fixture_browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(name="agents", scope="module")
def fixture_agents() -> Iterator[list[Agent]]:
    with Cluster() as cluster:
        yield cluster.linked(2, slots=2)


def rows(browser: Browser, table: str) -> dict[str, list[str]]:
    """The rows of a table as a person sees them, by the first cell."""
    read = f"return [...document.querySelectorAll('#{table} tr')].map(row => [...row.children].map(cell => cell.innerText))"
    return {cells[0]: cells for cells in browser.script(read)}


def test_a_viewer_sees_what_happens(agents: list[Agent], browser: Browser) -> None:
    n1, n2 = agents
    process, url = serve(n1)
    with ended(process):
        browser.size(1400, 1000)
        browser.open(url)
        wait_until(lambda: browser.script("return document.getElementById('link').innerText") == "live")
        tiles = browser.script(
            "return [...document.querySelectorAll('.tile strong')].map(tile => tile.firstChild.data)"
        )
        assert tiles == ["n1", "n2"]

        # Both queues; a hostile name is text
        task = n1.submit("sh", "-c", "echo hello; exec sleep 600", placement={"node": "n2"}, name="long")
        over = n1.submit("false", name=HOSTILE)
        wait_until(lambda: rows(browser, "work").get(task, [""] * 4)[2:4] == ["running", "n2"])
        wait_until(lambda: rows(browser, "done").get(over, [""] * 3)[1:3] == [HOSTILE, "failed"])
        assert browser.script("return document.title") == "peerload"
        assert browser.script("return document.querySelectorAll('table script, table img').length") == 0
        if directory := os.environ.get("SCREENSHOTS"):
            for width in (1400, 390):
                browser.size(width, 1000)
                Path(directory, f"page-{width}.png").write_bytes(browser.screenshot())
        browser.size(390, 800)
        assert browser.script("return document.documentElement.scrollWidth <= innerWidth"), "it fits on a phone"

        # Every control has a name
        assert browser.script("return [...document.querySelectorAll('button')].every(one => one.innerText.trim())")

        # A task's own page: timeline, output
        browser.script(f"location.hash = 'task={task}'")
        spans = "return [...document.querySelectorAll('#detail .span')].map(one => one.innerText).join()"
        wait_until(lambda: "submitted" in browser.script(spans), what="the timeline")
        assert "n2~" in browser.script(spans)
        output = "return document.querySelector('#detail pre').innerText"
        wait_until(lambda: "hello" in browser.script(output), what="the live output")
        browser.script("document.getElementById('detail').close()")

        # A node that dies
        os.kill(n2.pid, signal.SIGKILL)
        wait_until(lambda: browser.script("return document.querySelectorAll('.tile.stale').length") == 1)
        n1.call("cancel", tasks=[task], force=True)
