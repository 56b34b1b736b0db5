"""`peerload sim` as a user runs it: processes of its own, equal numbers, Ctrl-C, a terminal."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pty
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from peerload.cli.common.messages import CANNOT
from peerload.cli.simulate import work
from peerload.model.errors import PeerloadError
from peerload.sim.scenario import Scenario
from tests.integration.cluster import ended, is_alive, program
from tests.integration.test_docs_commands import keys_told
from tests.support import wait_until
from tests.wording import Says

if TYPE_CHECKING:
    from collections.abc import Iterator

QUICK = ["--nodes", "5", "--tasks", "300", "--replications", "2"]

DEBUG = "  for a traceback:  peerload --debug sim --workers 1 …\n"


def command(*words: str) -> list[str]:
    return [*program(), "sim", *words]


def ran(
    *words: str, cwd: Path | None = None, check: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words),
        env={**os.environ, **environment},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=900,
        check=check,
    )


@pytest.mark.long
def test_numbers_depend_on_the_seed_and_not_on_workers_or_hash_seed() -> None:
    words = [*QUICK, "--tasks", "300", "--compare", "threshold,adaptive", "--load", "0.7:0.9:2", "--json"]
    one = ran(*words, "--workers", "1", PYTHONHASHSEED="1")
    three = ran(*words, "--workers", "3", PYTHONHASHSEED="2")
    other = ran(*words, "--workers", "3", "--seed", "2")
    first, second, third = (json.loads(done.stdout) for done in (one, three, other))
    for result in (*first["results"], *second["results"], *third["results"]):
        assert "--workers" in result.pop("command")
    assert first == second != third
    assert one.stderr == three.stderr == ""


def test_what_a_full_stdout_does_not_take_is_on_stderr() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command(*QUICK), stdout=full, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert done.returncode == 125
    assert done.stderr.startswith("adaptive on 5 nodes")
    assert Says.STDOUT_FAILED("peerload: sim: ", os.strerror(errno.ENOSPC)) in done.stderr


@pytest.mark.long
def test_json_has_the_keys_that_the_page_tells() -> None:
    found = json.loads(ran(*QUICK, "--json").stdout)
    assert set(found) - {"v"} == keys_told("json.md", "`sim`")[0]
    compared: dict[str, Any] = json.loads(ran(*QUICK, "--load", "0.5:0.7:2", "--json").stdout)
    keys, bounds, _ = keys_told("json.md", "`sim` of several policies or loads")
    assert set(compared) - {"v"} == keys
    assert set(compared["bounds"][0]) == bounds
    assert set(compared["results"][0]) == set(found) - {"v"}


def test_a_preset_and_a_policy_of_ones_own_are_played_by_every_worker(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import msgspec\n"
        "from peerload.policy.api import Keep, Transfer\n"
        "class Mine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):\n"
        "    def locate(self, view, task, replies, rng):\n"
        "        if replies:\n"
        "            return Keep('it was declined')\n"
        "        return Transfer(view.peers[rng.randrange(len(view.peers))])\n",
        encoding="utf-8",
    )
    (tmp_path / "mine.toml").write_text(
        '[location.sender]\npolicy = "mine.py:Mine"\n[transfer]\npolicy = "single-threshold"\nthreshold = 1.0\n',
        encoding="utf-8",
    )
    found = json.loads(ran(*QUICK, "--policy", "mine.toml", "--workers", "2", "--json", cwd=tmp_path).stdout)
    assert found["policy"] == "mine.toml"
    assert found["transfers_per_task"] > 0.03


LONG = ["--nodes", "50", "--tasks", "1000000", "--workers", "2", "--replications", "2"]


@contextlib.contextmanager
def at_work() -> Iterator[tuple[subprocess.Popen[str], list[int], list[int]]]:
    """A long simulation in a group of its own, all its children, and those of them that are workers, busy by now."""
    process = subprocess.Popen(
        command(*LONG), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

        def busy() -> list[int]:
            pids = children.read_text().split()
            return [int(pid) for pid in pids if int(Path(f"/proc/{pid}/stat").read_text().split()[13]) > 50]

        wait_until(lambda: len(busy()) == 2, what="both workers use the cpu")
        yield process, [int(pid) for pid in children.read_text().split()], busy()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_it_with_all_its_workers(number: signal.Signals) -> None:
    with at_work() as (process, children, _):
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does: to all of them
        else:
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (130, "")
        assert "0 of 1 simulation" in err
        wait_until(lambda: not any(map(is_alive, children)), what="the workers are gone")


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "says"),
    [
        (
            signal.SIGKILL,
            "peerload: a simulation process was killed (signal 9); is there enough memory?\n"  # noqa: ISC004 -- lines
            "  fewer --workers or --tasks\n",
        ),
        (signal.SIGTERM, "peerload: a simulation process was killed (signal 15)\n" + DEBUG),
    ],
)
def test_a_worker_that_dies_ends_it_with_all_the_others(number: signal.Signals, says: str) -> None:
    with at_work() as (process, children, workers):
        os.kill(workers[1], number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == CANNOT
        assert (out, err) == ("", says)
        wait_until(lambda: not any(map(is_alive, children)), what="nothing is left")


@pytest.mark.long
def test_workers_end_when_what_started_them_is_killed() -> None:
    with at_work() as (process, children, _):
        process.kill()
        process.communicate(timeout=60)
        wait_until(lambda: not any(map(is_alive, children)), what="nothing is left")


def test_a_worker_that_ends_by_itself_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "import msgspec\n"
        "class Mine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):\n"
        "    def locate(self, view, task, replies, rng):\n"
        "        os._exit(3)\n",
        encoding="utf-8",
    )
    (tmp_path / "mine.toml").write_text('[location.sender]\npolicy = "mine.py:Mine"\n', encoding="utf-8")
    done = ran(*QUICK, "--policy", "mine.toml", "--workers", "2", cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (CANNOT, "")
    assert done.stderr == "peerload: a simulation process ended by itself (3)\n" + DEBUG


@pytest.mark.parametrize("workers", [1, 2])
def test_what_goes_wrong_in_a_worker_is_raised_here(workers: int) -> None:
    with pytest.raises(PeerloadError, match=Says.NO_PRESET()) as caught:
        work.run([Scenario(policy="thresold", nodes=2, load=0.5, tasks=10, warm_up=0)], 2, 1, workers)
    assert "threshold" in caught.value.hint
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        work.run([Scenario(policy="none", nodes=2, slots=0, load=0.5, tasks=10, warm_up=0)], 2, 1, workers)


def all_of(terminal: int) -> str:
    """What is written to the other end of a terminal until nobody has that open."""
    raw = bytearray()
    with contextlib.suppress(OSError):
        while piece := os.read(terminal, 1 << 16):
            raw += piece
    return raw.decode()


@pytest.mark.long
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_terminal_shows_how_far_it_is(workers: str) -> None:
    main_end, terminal = pty.openpty()
    try:
        words = ["--nodes", "20", "--tasks", "2500", "--replications", "2", "--workers", workers]
        environment = {**os.environ, "TERM": "xterm"}
        try:
            process = subprocess.Popen(command(*words), env=environment, stdout=subprocess.PIPE, stderr=terminal)
        finally:
            os.close(terminal)
        with ended(process):
            shown = all_of(main_end)  # it holds only so much that nobody has read
            out = process.communicate(timeout=100)[0].decode()
    finally:
        os.close(main_end)
    assert "/5000" in shown
    assert shown.endswith("\r\x1b[K"), "and leaves the line clean"
    assert out.startswith("adaptive on 20 nodes")


@pytest.mark.long
def test_adaptive_at_a_hundred_nodes_is_what_it_should_be() -> None:
    """A short run of `peerload sim --policy adaptive --nodes 100 --load 0.9`."""
    found = json.loads(
        ran(
            "--policy",
            "adaptive",
            "--nodes",
            "100",
            "--load",
            "0.9",
            "--tasks",
            "12000",
            "--replications",
            "2",
            "--json",
        ).stdout
    )
    assert found["mean_response"] == pytest.approx(1.17, abs=0.06)
    assert found["stable"] is True
    assert found["idle_while_waiting"] < 0.12
