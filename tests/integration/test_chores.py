"""What home owes for ended tasks: files of output and notices; and that no kill loses any of it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from peerload.model.errors import BadRequest
from tests.integration.cluster import Agent, Cluster, without_waits
from tests.support import wait_until


@pytest.fixture(name="cluster")
def fixture_cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        (cluster.directory / "out").mkdir()
        yield cluster


def submit(agent: Agent, *argv: str, array: tuple[int, int] | None = None, terms: dict[str, Any], **fields: Any) -> str:
    ranges = [(*array, 1)] if array else []
    reply = agent.call(
        "submit", token=os.urandom(16).hex(), spec=agent.cluster.spec(*argv, **fields), array=ranges, terms=terms
    )
    return str(reply["id"])


def place(agent: Agent, name: str) -> bytes:
    return os.fsencode(agent.cluster.directory / "out" / name)


def content(agent: Agent, name: str) -> bytes | None:
    path = agent.cluster.directory / "out" / name
    return path.read_bytes() if path.exists() else None


def left_owed(agent: Agent) -> int:
    return int(agent.database("SELECT count(*) FROM chores")[0][0])


def told(agent: Agent, task: str) -> list[tuple[str, str]]:
    """The chores of a task, as events."""
    events = agent.call("events", what=["chore"], tasks=[task])["events"]
    return [(event["state"], event["reason"]) for event in events]


SAYS = "echo out $PEERLOAD_ARRAY_INDEX; echo err >&2"


def test_the_output_is_in_the_files_that_were_named(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    files = {"output_file": place(agent, "%x.%j.out"), "error_file": place(agent, "%%.err")}
    task = submit(agent, "sh", "-c", SAYS, terms=files, name="a/b", umask=0o027)
    wait_until(lambda: content(agent, "%.err") == b"err\n", what="the file of stderr")
    agent.wait(task)  # the file may be written before that
    wait_until(lambda: not left_owed(agent))
    assert content(agent, "a_b.1.out") == b"out\n"
    assert (cluster.directory / "out" / "%.err").stat().st_mode & 0o777 == 0o640
    shown = agent.show(task)
    assert (shown["output_file"], shown["owed"]) == (str(cluster.directory / "out" / "a_b.1.out"), [])
    wait_until(lambda: [state for state, _ in told(agent, task)] == ["saved"])
    array = submit(agent, "sh", "-c", SAYS, array=(1, 3), terms={"output_file": place(agent, "all-%A_%a")})
    wait_until(
        lambda: [content(agent, f"all-2_{index}") for index in (1, 2, 3)] == [b"out %d\n" % i for i in (1, 2, 3)]
    )
    agent.wait(array)
    wait_until(lambda: not left_owed(agent), what="nothing to be owed")
    assert sorted(path.name for path in (cluster.directory / "out").iterdir()) == sorted(
        ["%.err", "a_b.1.out", "all-2_1", "all-2_2", "all-2_3"]
    )


def test_a_file_that_is_there_is_overwritten_links_are_followed_and_one_file_may_have_both(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    target = cluster.directory / "out" / "target"
    target.write_bytes(b"before, and longer than what comes\n" * 10)
    target.chmod(0o600)
    (cluster.directory / "out" / "link").symlink_to(target)
    both = {"output_file": place(agent, "link"), "error_file": place(agent, "link")}
    agent.wait(submit(agent, "sh", "-c", "echo out; echo err >&2", terms=both))
    wait_until(lambda: target.read_bytes() == b"out\nerr\n")
    assert target.stat().st_mode & 0o777 == 0o600
    assert (cluster.directory / "out" / "link").is_symlink()
    null = submit(agent, "echo", "x", terms={"output_file": b"/dev/null"})
    agent.wait(null)
    wait_until(lambda: not left_owed(agent))


@pytest.mark.bad_input("path-outside")
def test_what_cannot_be_written_is_refused_at_once(one: Agent) -> None:
    patterns = [b"relative", b"/nowhere/at/all", b"/tmp", b"/tmp/", b"/tmp/%q", b"/tmp/%j/x", b"/tmp/%a"]
    cases: list[tuple[bytes, tuple[int, int] | None]] = [(pattern, None) for pattern in patterns]
    for pattern, array in [*cases, (b"/tmp/same", (1, 2)), (b"/proc/version/x", None), (b"/dev/full", None)]:
        with pytest.raises(BadRequest) as refused:
            submit(one, "true", array=array, terms={"output_file": pattern})
        assert pattern.partition(b"%")[0].decode().rstrip("/") in str(refused.value), "it names what it refuses"
    assert not one.states()


@pytest.fixture(scope="module", name="one")
def fixture_one() -> Iterator[Agent]:
    with Cluster() as cluster:
        yield cluster.agent("n1")


def test_what_cannot_be_written_any_more_is_told_and_tried_again(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    go = cluster.directory / "go"
    waits = f"until [ -e {go} ]; do sleep 0.05; done; echo here"
    task = submit(agent, "sh", "-c", waits, terms={"output_file": place(agent, "later")})
    (cluster.directory / "out").rmdir()
    go.touch()
    agent.wait(task)
    wait_until(lambda: agent.show(task)["owed"] and agent.show(task)["owed"][0]["tries"])
    (owed,) = agent.show(task)["owed"]
    assert str(cluster.directory / "out") in owed["why"]
    agent.call("clean")  # what something is owed for stays
    assert agent.show(task)["owed"]
    (cluster.directory / "out").mkdir()
    wait_until(lambda: content(agent, "later") == b"here\n", 20)
    wait_until(lambda: [state for state, _ in told(agent, task)] == ["postponed", "saved"])


@pytest.mark.long
def test_a_kill_between_the_end_and_the_chore_loses_neither_file_nor_notice(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    go = cluster.directory / "go"
    waits = f"until [ -e {go} ]; do sleep 0.02; done; echo $PEERLOAD_ARRAY_INDEX"
    terms = {"output_file": place(agent, "%a"), "notify": b"echo $PEERLOAD_MEMBERS >>" + place(agent, "told")}
    array = submit(agent, "sh", "-c", waits, array=(1, 30), terms=terms)
    single = submit(agent, "echo", "y", terms={"output_file": place(agent, "single")})
    wait_until(lambda: list(agent.states().values()).count("running") == 2)
    go.touch()
    for _ in range(5):
        done = [name for name in agent.states().values() if name == "done"]
        wait_until(lambda done=done: list(agent.states().values()).count("done") > len(done) or len(done) == 31)  # type: ignore[misc]
        agent.kill()
        agent.start()
    agent.wait(array, single)
    wait_until(lambda: not left_owed(agent), 30, "all that is owed to be done")
    assert [content(agent, str(index)) for index in range(1, 31)] == [b"%d\n" % index for index in range(1, 31)]
    assert content(agent, "single") == b"y\n"
    assert set((content(agent, "told") or b"").split()) == {b"30"}
    assert not [path for path in (cluster.directory / "out").iterdir() if path.name.startswith(".")]


def test_a_notice_knows_how_it_ended_and_that_it_failed_is_told_with_what_it_says(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    shows = b"env | grep ^PEERLOAD_ | sort >" + place(agent, "env") + b"; echo sent >&2; exit 3"
    task = submit(agent, "sh", "-c", "exit 7", terms={"notify": shows}, name="job")
    wait_until(lambda: [state for state, _ in told(agent, task)] == ["abandoned"], 20)
    assert "3" in told(agent, task)[0][1]
    assert told(agent, task)[0][1].endswith("sent")
    variables = dict(line.split("=", 1) for line in (content(agent, "env") or b"").decode().splitlines())
    assert {key: variables[f"PEERLOAD_{key}"] for key in ("TASK_ID", "STATE", "EXIT_CODE", "NAME", "NODE", "HOME")} == {
        "TASK_ID": task, "STATE": "failed", "EXIT_CODE": "7", "NAME": "job", "NODE": "n1", "HOME": "n1",
    }  # fmt: skip
    wait_until(lambda: not list((agent.state / "spool").glob("notify*")), what="nothing to be left of it")
    assert agent.states() == {task: "failed"}  # it is no task


def test_a_notice_that_runs_is_found_again_and_one_whose_launcher_died_is_given_again(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    go, log = cluster.directory / "go", place(agent, "log")
    waits = (
        b"echo began >>" + log + b"; until [ -e " + os.fsencode(go) + b" ]; do sleep 0.02; done; echo ended >>" + log
    )
    task = submit(agent, "true", terms={"notify": waits})
    wait_until(lambda: content(agent, "log") == b"began\n", 20)
    agent.kill()
    agent.start()
    os.kill(agent.launcher_pid, 9)
    wait_until(lambda: content(agent, "log") == b"began\nbegan\n", 30)
    agent.kill()
    agent.start()
    go.touch()
    wait_until(lambda: content(agent, "log") == b"began\nbegan\nended\n", 20)
    wait_until(lambda: not left_owed(agent))
    wait_until(lambda: [state for state, _ in told(agent, task)][-1:] == ["notified"], what="that it is told")


def test_a_notice_is_given_also_after_a_launcher_that_gave_others_was_killed(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    notice = {"notify": b"echo $PEERLOAD_TASK_ID >>" + place(agent, "log")}
    first = submit(agent, "true", terms=notice)
    wait_until(lambda: [state for state, _ in told(agent, first)] == ["notified"], 20)
    old = agent.launcher_pid
    os.kill(old, 9)
    wait_until(lambda: agent.launcher_pid != old, 20)
    second = submit(agent, "true", terms=notice)
    wait_until(lambda: [state for state, _ in told(agent, second)] == ["notified"], 20)
    assert content(agent, "log") == f"{first}\n{second}\n".encode()


def test_of_an_array_there_is_one_notice_when_the_last_has_ended(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    shows = b"echo $PEERLOAD_TASK_ID $PEERLOAD_STATE $PEERLOAD_DONE/$PEERLOAD_FAILED/$PEERLOAD_CANCELLED >>"
    fails = "test $PEERLOAD_ARRAY_INDEX != 2"
    array = submit(agent, "sh", "-c", fails, array=(1, 4), terms={"notify": shows + place(agent, "log")})
    wait_until(lambda: content(agent, "log") == f"{array} failed 3/1/0\n".encode(), 20)
    held = submit(agent, "sleep", "600", array=(1, 3), terms={"notify": shows + place(agent, "log2")})
    agent.call("cancel", tasks=[held], force=True)
    wait_until(lambda: content(agent, "log2") == f"{held} cancelled 0/0/3\n".encode(), 20)
    wait_until(lambda: not left_owed(agent))
    assert content(agent, "log") == f"{array} failed 3/1/0\n".encode()


def test_a_task_that_ran_elsewhere_has_its_files_at_home(cluster: Cluster) -> None:
    home, _ = cluster.linked(2)
    terms = {"output_file": place(home, "%N"), "notify": b"echo $PEERLOAD_NODE >" + place(home, "told")}
    submit(home, "sh", "-c", "head -c 300000 /dev/zero", terms=terms, placement={"node": "n2"})
    wait_until(lambda: content(home, "told") == b"n2\n", 30)
    wait_until(lambda: len(content(home, "n2") or b"") == 300_000, 20)


def test_a_file_grows_while_its_task_runs_and_gets_all_of_it(cluster: Cluster) -> None:
    home, _ = cluster.linked(2)
    go = cluster.directory / "go"
    script = f"echo begun; until [ -e {go} ]; do sleep 0.02; done; head -c 20000000 /dev/zero; echo >&2; echo ended"
    terms = {"output_file": place(home, "%N"), "error_file": place(home, "%N.err")}
    tasks = [submit(home, "sh", "-c", script, terms=terms, placement={"node": node}) for node in ("n1", "n2")]
    for node in ("n1", "n2"):
        wait_until(lambda node=node: content(home, node) == b"begun\n", what=f"the beginning from {node}")  # type: ignore[misc]
    go.touch()
    assert home.cli("wait", *tasks).returncode == 0
    for node in ("n1", "n2"):
        assert content(home, node) == b"begun\n" + bytes(20_000_000) + b"ended\n"
        assert content(home, f"{node}.err") == b"\n"


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_the_next_agent_goes_on_with_a_file(cluster: Cluster, node: str) -> None:
    home, _ = cluster.linked(2)
    go = cluster.directory / "go"
    waits = f"until [ -e {go} ]; do sleep 0.02; done"
    script = f"i=0; while [ $i -lt 3000 ]; do i=$((i + 1)); echo line $i; [ $i = 1500 ] && {waits}; done; :"
    task = submit(home, "sh", "-c", script, terms={"output_file": place(home, "out")}, placement={"node": node})
    wait_until(lambda: (content(home, "out") or b"").endswith(b"\nline 1500\n"), what="the first half")
    home.kill()
    with (cluster.directory / "out" / "out").open("ab") as file:
        file.write(b"half a piece that nobody has noted")
    home.start()
    go.touch()
    assert home.cli("wait", task).returncode == 0
    assert content(home, "out") == b"".join(b"line %d\n" % number for number in range(1, 3001))


def test_what_is_missing_in_a_file_is_said(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    cuts = "echo a; truncate -s 1M /proc/$$/fd/1; echo b"
    task = submit(agent, "sh", "-c", cuts, terms={"output_file": place(agent, "out")})
    waited = agent.cli("wait", task)
    assert (waited.returncode, content(agent, "out")) == (125, b"a\n" + bytes(4094) + b"b\n"), waited.stderr
    ((state, reason),) = told(agent, task)
    assert (state, str((1 << 20) - 4096) in reason) == ("incomplete", True), reason


def test_a_file_that_is_removed_while_its_task_runs_is_made_again(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    go = cluster.directory / "go"
    script = f"echo begun; until [ -e {go} ]; do sleep 0.02; done; echo ended"
    task = submit(agent, "sh", "-c", script, terms={"output_file": place(agent, "out")})
    wait_until(lambda: content(agent, "out") == b"begun\n", what="its beginning")
    (cluster.directory / "out" / "out").unlink()
    go.touch()
    assert agent.cli("wait", task).returncode == 0
    assert content(agent, "out") == b"begun\nended\n"


def test_run_returns_when_its_file_is_complete(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    done = agent.cli("run", "-o", "file", "head", "-c", "20000000", "/dev/zero", cwd=cluster.directory / "out")
    assert (done.returncode, without_waits(done.stderr)) == (0, b"")
    assert len(done.stdout) == len(content(agent, "file") or b"") == 20_000_000


def test_the_flags_of_submit(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    here = cluster.directory / "out" / "100%"
    here.mkdir()
    words = ("-o", "%A.%a", "-e", "../err.%j", "--notify", "echo $PEERLOAD_TASK_ID >told", "--array", "1-2")
    done = agent.cli("submit", *words, "sh", "-c", SAYS, cwd=here)
    assert done.stdout == b"n1/1\n", done.stderr
    wait_until(lambda: (here / "told").exists() and not left_owed(agent), 20)
    assert sorted(path.name for path in here.iterdir()) == ["1.1", "1.2", "told"]
    assert (here / "1.2").read_bytes() == b"out 2\n"
    assert content(agent, "err.1.1") == b"err\n"
    assert (here / "told").read_bytes() == b"n1/1\n"
    for wrong, code, says in (
        (("-o", "gone/x"), 125, b"gone"),
        (("-o", "x/"), 2, b"x/"),
        (("-o", "%z"), 125, b"%z"),
        (("-o", "same", "--array", "1-2"), 125, b"%a"),
        (("--notify", " "), 2, b"--notify"),
    ):
        refused = agent.cli("submit", *wrong, "true", cwd=here)
        assert (refused.returncode, refused.stdout) == (code, b"")
        assert says in refused.stderr
        assert len(refused.stderr.splitlines()) <= 2
    assert len(agent.states()) == 2


def test_a_disk_that_is_full_is_no_success_and_is_tried_again(cluster: Cluster) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    agent = cluster.agent("n1")
    disk = cluster.directory / "disk"
    disk.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(disk)]
    mounted = subprocess.run(words, capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        (disk / "filler").write_bytes(b"x" * (60 << 10))
        terms = {"output_file": os.fsencode(disk / "out")}
        task = submit(agent, "sh", "-c", "head -c 20000 /dev/zero", terms=terms)
        wait_until(lambda: agent.show(task)["owed"] and agent.show(task)["owed"][0]["tries"], 20)
        assert agent.show(task)["owed"][0]["why"]
        assert agent.cli("wait", task).returncode == 125
        ran = agent.cli("run", "-o", str(disk / "run"), "head", "-c", "20000", "/dev/zero")
        assert (ran.returncode, len(ran.stdout)) == (125, 20_000), ran.stderr
        (disk / "filler").unlink()
        wait_until(lambda: (disk / "out").exists() and (disk / "out").stat().st_size == 20_000, 20)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_what_cannot_be_done_is_given_up_and_that_is_told(cluster: Cluster) -> None:
    agent = cluster.agent("n1")
    go = cluster.directory / "go"
    task = submit(
        agent, "sh", "-c", f"until [ -e {go} ]; do sleep 0.02; done", terms={"output_file": place(agent, "x")}
    )
    place_of = cluster.directory / "out"
    place_of.rmdir()
    agent.kill()
    with closing(sqlite3.connect(agent.state / "peerload.db")) as database:
        database.execute("INSERT INTO chores VALUES (99, 'files', 1, -1, 0, 7, 'before')")
        database.commit()
    agent.start()
    go.touch()
    agent.wait(task)
    wait_until(lambda: [state for state, _ in told(agent, task)] == ["abandoned"], 20)
    wait_until(lambda: not left_owed(agent))
