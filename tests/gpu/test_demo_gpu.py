"""`peerload demo gpu` as a user starts it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.integration.cluster import program

DEMO_S_MAX = 90


def test_every_task_has_the_gpu_that_it_should_and_nothing_is_left() -> None:
    before = set(Path("/tmp").glob("pl-gpu-*"))
    done = subprocess.run(
        [*program(), "demo", "gpu", "--json"], capture_output=True, text=True, timeout=DEMO_S_MAX, check=False
    )
    assert done.returncode == 0, done.stderr
    account = json.loads(done.stdout)
    assert account["as_expected"], account
    assert [row["given"] for row in account["tasks"]] == ["0", "0", "0", "0", "1", "3", "3"]
    assert set(Path("/tmp").glob("pl-gpu-*")) <= before
