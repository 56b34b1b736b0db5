"""The commands of README.md and docs/ work as they stand there, and the JSON has the keys that the pages tell."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from peerload.client.connection import AgentConnection
from peerload.model.errors import AgentUnavailable
from tests.integration import forks
from tests.integration.cluster import ROOT, Cluster, program
from tests.support import kept_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

LONG_PAGES = {
    "simulator.md",
    "quickstart.md",
    "coming-from.md",
}  # test_sim_verb.py and test_story.py have the like in short
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
SKIPPED = ("git clone ", "make ", 'export PATH="$PWD/.venv/bin:')
"""What sets up the checkout that these tests run in."""
COMMAND_S_MAX = 60
PLAIN = re.compile(r"peerload [-\w./:@=,+ ]*")
"""Nothing of it means anything to a shell but the spaces."""
OTHER_MACHINE = {
    "bin/ssh": """#!/bin/sh
shift
cd HERE
export HOME=HERE XDG_CONFIG_HOME=HERE/config XDG_STATE_HOME=HERE/xdg-state XDG_RUNTIME_DIR=HERE/run PEERLOAD_NODE=other
export PATH=HERE/bin:$PATH
exec sh -c "$*"
""",
    "other/bin/make": """#!/bin/sh
mkdir -p "$2/.venv/bin" && ln -sf "$(command -v peerload)" "$2/.venv/bin/peerload"
""",
}
"""Stand-ins for the way to another machine, which is another user's place on this one, and for what installs there."""
TABLE_PAGE = "coming-from.md"
"""Its commands stand in tables, beside those of others."""
CLUSTER_PAGE = "mqtt.md"
"""Its reader has a cluster already."""
GPU_PAGES = {"cookbook.md"}
"""Their reader has GPUs; here they are played."""
FILE = re.compile(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
"""A file that a page has its reader write, with its name before it."""
TABLES = {"json.md": "\n## JSON\n", "wire.md": "\n## The control socket\n"}
TABLE_KEYS = re.compile(r"`([a-z0-9_ ]+)`")


def table_commands(page: Path) -> list[str]:
    """What the last column of its tables says to type, in order."""
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return [
        command.replace("\\|", "|")
        for row in rows
        for command in re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", row)[2])
    ]


def commands(page: Path) -> list[str]:
    """What a page tells its reader to type, in order."""
    typed = [
        line for block in BLOCK.findall(page.read_text(encoding="utf-8")) for line in block.splitlines() if line.strip()
    ]
    if page.name == TABLE_PAGE:
        return table_commands(page)
    assert all(line.startswith("$ ") for line in typed), "a console block holds commands alone"
    return [line.removeprefix("$ ") for line in typed if not line.removeprefix("$ ").startswith(SKIPPED)]


class Desk:
    """A user's own shell on a machine without an agent, in an empty directory."""

    def __init__(self, cluster: Cluster) -> None:
        self.directory = cluster.directory
        self.work = self.directory / "work"
        self.work.mkdir()
        (self.work / "train.py").write_text("print('trained')\n", encoding="utf-8")
        (self.work / "some.log").write_text("said\n", encoding="utf-8")
        bin_directory = self.directory / "bin"
        bin_directory.mkdir()
        script = bin_directory / "peerload"
        script.write_text(f'#!/bin/sh\nexec {shlex.join(program())} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
        (bin_directory / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
        (bin_directory / "python").chmod(0o755)
        self.environment = {**cluster.environment, "PATH": f"{bin_directory}:{cluster.environment['PATH']}"}
        del self.environment["PEERLOAD_CLUSTER"]  # whoever reads the page has none yet
        self.other = self.directory / "other"
        self.other.mkdir()
        (self.other / "run").mkdir(mode=0o700)
        (self.other / "bin").mkdir()
        for name, text in OTHER_MACHINE.items():
            (self.directory / name).write_text(text.replace("HERE", str(self.other)), encoding="utf-8")
            (self.directory / name).chmod(0o755)
        with contextlib.ExitStack() as kept:
            self.port = kept.enter_context(kept_port())
            kept.enter_context(kept_port("127.0.0.2", self.port))
            self._kept = kept.pop_all()
        self.token = ""
        self.gpu_agent: subprocess.Popen[bytes] | None = None

    def as_here(self, command: str) -> str:
        """The line as a reader would type it, with what differs from machine to machine, and shorter simulations."""
        here = command.replace("--tasks 1000", "--tasks 100")
        here = here.replace("/tmp/second", f"{self.directory}/second").replace("/root/", f"{self.directory}/")
        if here == "peerload invite":
            return f"peerload invite --listen 127.0.0.1:{self.port}"
        here = here.replace("TOKEN", f"--listen 127.0.0.2:{self.port} {self.token}")
        here = here.replace("peerload invite |", f"peerload invite --listen 127.0.0.1:{self.port} |")
        here = here.replace("join -", f"join --listen 127.0.0.2:{self.port} -")
        return here.replace("HOST:PORT", self.up()["listen"]) if "HOST:PORT" in here else here

    def types(self, command: str) -> str:
        """Run a line in a shell, or a plain one without → what it printed. Fails if its exit code is not 0."""
        how: dict[str, Any] = {"env": self.environment, "cwd": self.work, "stdin": subprocess.DEVNULL}
        words = [*program(), *command.split()[1:]] if PLAIN.fullmatch(command) else ["bash", "-c", command]
        done = forks.run(words, program(), COMMAND_S_MAX, **how)
        out, errors = done.stdout.decode(), done.stderr.decode()
        assert done.returncode == 0, f"{command}\n{out}{errors}"
        assert "Traceback" not in errors
        if "plj1-" in out:
            self.token = out.split()[-1]
        return out

    def up_with_gpus(self) -> None:
        """Have an agent with two GPUs that are played."""
        (self.directory / "on").mkdir()
        cards = [{"uuid": f"GPU-played-{number}", "name": "played", "mem_bytes": 24 << 30} for number in range(2)]
        machine = self.directory / "machine.json"
        machine.write_text(json.dumps({"gpus": cards, "processes": str(self.directory / "on")}), encoding="utf-8")
        start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from peerload.cli.demo.gpu_agent import main; main()"
        socket = f"{self.directory}/run/peerload/agent.sock"
        words = [sys.executable, "-c", start, str(machine), "--socket", socket, "--slots", "4"]
        with (self.directory / "gpus.log").open("wb") as log:
            self.gpu_agent = subprocess.Popen(
                words, env=self.environment, cwd="/", stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

        def has_its_gpus() -> bool:
            with contextlib.suppress(AgentUnavailable), AgentConnection(socket, timeout_s=60) as client:
                return len(client.call("nodes")["nodes"][0]["gpus"]) == len(cards)
            return False

        wait_until(has_its_gpus, what="the agent with GPUs")

    def ran_on(self) -> set[str]:
        """The nodes of all tasks that have one."""
        return {task["node"] for task in json.loads(self.types("peerload ls --json"))["tasks"]} - {None}

    def close(self) -> None:
        """Give back its ports."""
        self._kept.close()

    def up(self) -> dict[str, Any]:
        """Have an agent, and what it says of itself."""
        told: dict[str, Any] = json.loads(self.types("peerload up --json"))
        return told


@pytest.fixture
def desk() -> Iterator[Desk]:
    with Cluster() as cluster:
        here = Desk(cluster)
        try:
            yield here
        finally:
            own = [f"{cluster.directory}/second.sock"]
            own += [f"{place}/run/peerload/agent.sock" for place in (cluster.directory, here.other)]
            for socket in own:
                if Path(socket).exists():
                    here.types(f"peerload down --all --socket {socket}")
            if here.gpu_agent is not None:
                here.gpu_agent.wait(60)
            here.close()


@pytest.mark.timeout(900)  # dozens of commands
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.long] if page.name in LONG_PAGES else [])
        for page in PAGES
        if commands(page)
    ],
)
def test_commands_work_as_they_stand(page: Path, desk: Desk) -> None:
    typed = commands(page)
    for name, text in FILE.findall(page.read_text(encoding="utf-8")):
        (desk.work / name).write_text(text, encoding="utf-8")
    if page.name in GPU_PAGES:
        desk.up_with_gpus()
    elif page.name == TABLE_PAGE:
        (desk.work / "job.sh").write_text("sleep 0.1; echo job\n", encoding="utf-8")
        desk.types("peerload up --node ws1")
    elif not any("peerload up" in command for command in typed):
        desk.up()  # a page of reference: its reader has one
    if page.name == CLUSTER_PAGE:
        desk.types(desk.as_here("peerload invite"))
    for command in typed:
        if page.name == TABLE_PAGE and command.startswith("peerload prio"):
            desk.types("peerload submit --held true")  # the priority of a task that has ended cannot be changed
        desk.types(desk.as_here(command))


def test_the_quick_start_shows_what_it_says(desk: Desk) -> None:
    first = desk.up()
    assert desk.types("peerload submit --array 1-8 sh -c 'echo member $PEERLOAD_ARRAY_INDEX'").strip().endswith("/1")
    desk.types("peerload wait @")
    assert desk.types("peerload logs 1.7") == "member 7\n"
    second = f"--node second --state {desk.directory}/second --socket {desk.directory}/second.sock"
    desk.types(f"peerload up {second} --peer {first['listen']}")
    desk.types("peerload submit --array 1-8 sh -c 'until [ -e gate ]; do sleep 0.05; done'")
    wait_until(lambda: desk.ran_on() == {first["node"], "second"}, what="both to have some")
    (desk.work / "gate").touch()
    desk.types("peerload wait @")


def test_two_machines_share_as_the_quick_start_says(desk: Desk) -> None:
    desk.up()
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    part = page[page.index("## Two machines") : page.index("## When something goes wrong")]
    typed = [line.removeprefix("$ ") for block in BLOCK.findall(part) for line in block.splitlines()]
    assert len(typed) == 6
    for command in typed:
        desk.types(desk.as_here(command))

    def is_shared() -> bool:
        """With some more tasks where the other was slow to hear of the first."""
        if "other" not in desk.ran_on():
            desk.types("peerload submit --array 1-8 sleep 1; peerload wait @")
        return "other" in desk.ran_on()

    wait_until(is_shared, what="the other to have some")
    assert len(desk.ran_on()) == 2
    assert f"127.0.0.2:{desk.port}" in desk.types("ssh OTHER peerload/.venv/bin/peerload up --json")
    assert json.loads(desk.types("peerload cluster show --json"))["local"] is False


# -- JSON --------------------------------------------------------------------------------------------------------------


def keys_told(page: str, name: str) -> list[set[str]]:
    """The sets of keys in the row of a page's tables that begins with this name, one set a piece of code."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for line in text[text.index(TABLES[page]) :].splitlines():
        if line.startswith("| ") and name in (line.split("|")[1].strip(), *line.split("|")[1].strip().split(", ")):
            cells = [cell.strip() for cell in line.split("|")[2:-1]]
            return [set(found.split()) for cell in cells for found in TABLE_KEYS.findall(cell)]
    raise AssertionError(f"{page} has no row {name!r}")


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def without_version(told: dict[str, Any]) -> set[str]:
    assert told["v"] == 1
    return set(told) - {"v"}


def test_json_has_the_keys_that_the_page_tells(desk: Desk) -> None:
    def typed(command: str) -> list[dict[str, Any]]:
        return json_lines(desk.types(f"peerload {command}"))

    def told(name: str) -> list[set[str]]:
        return keys_told("json.md", name)

    assert [without_version(typed("up --json")[0])] == told("`up`")
    assert without_version(typed("submit --json true")[0]) == {"id"}
    assert without_version(typed("submit --json --array 1-2 true")[0]) == set.union(*told("`submit`"))
    assert [without_version(typed("wait --json @")[0])] == told("`wait`")
    assert [without_version(line) for line in typed("run --json echo told")] == told("`run`")
    assert [without_version(line) for line in typed("logs --json @")] == told("`logs`")
    assert [without_version(typed("cancel --json 1")[0])] == told("`cancel`")
    (listed,) = typed("ls --json")
    assert without_version(listed) == told("`ls`")[0]
    assert [without_version(typed("why --json 1")[0])] == told("`why`")
    assert without_version(typed("events --json --limit 1")[0]) == told("`events`")[0]
    typed("submit --json --held sleep 60")
    assert [without_version(typed("hold --json @")[0])] == told("`hold`")
    assert [without_version(typed("release --json @")[0])] == told("`release`")
    typed("cancel --json --wait @")
    assert without_version(typed("retry --json 1")[0]) == told("`retry`")[0]
    assert [without_version(typed("drain --json")[0])] == told("`drain`")
    assert [without_version(typed("undrain --json")[0])] == told("`undrain`")
    assert [set(listed["tasks"][0])] == told("task")
    (ended,) = typed("history --json")
    assert without_version(ended) == told("`history`")[0]
    assert [set(ended["tasks"][0])] == [set.union(*told("task"), *told("task, in `history` also"))]
    assert without_version(typed("history --json --export t.csv")[0]) == told("`history --export FILE`")[0]
    (shown,) = typed("show --json 1")
    assert without_version(shown) == {"live"}.union(*told("task"), told("task, in `show` also")[0])
    assert [set(shown["history"][0])] == [told("step of `history`")[-1]]
    (nodes,) = typed("nodes --json")
    assert [without_version(nodes)] == told("`nodes`")
    assert [set(nodes["nodes"][0])] == told("node")
    assert [without_version(typed("cluster --json")[0])] == told("`cluster`")
    assert without_version(typed("policy --json")[0]) == told("`policy`")[0]
    (shown,) = typed("policy show --json adaptive")
    preset_keys, _, chosen_keys = told("`policy show`, of a preset")
    assert [without_version(shown), set(shown["chosen"][0])] == [preset_keys, chosen_keys]
    (shown,) = typed("policy show --json transfer.single-threshold")
    policy_keys, _, parameter_keys = told("`policy show`, of a policy")
    assert [without_version(shown), set(shown["parameters"][0])] == [policy_keys, parameter_keys]
    (desk.work / "bad.toml").write_text("transfer = 1", encoding="utf-8")
    (checked,) = typed("policy check --json bad.toml || true")
    check_keys, _, _, _, mistake_keys, _, _ = told("`policy check`")
    assert [without_version(checked), set(checked["mistakes"][0])] == [check_keys, mistake_keys]
    assert [without_version(typed("top --json")[0])] == told("`top`")
    assert [without_version(typed("down --json --all")[0])] == told("`down`")


def test_the_decision_about_a_task_has_the_keys_that_the_page_tells() -> None:
    with Cluster() as cluster:
        home, _ = cluster.linked(2, slots=1)
        gate = home.directory / "gate"
        array = home.submit("sh", "-c", 'until [ -e "$0" ]; do sleep 0.05; done', str(gate), array=[(1, 6, 1)])
        decided: list[dict[str, Any]] = []

        def is_decided() -> bool:
            decided.extend(task["decision"] for task in home.call("show", tasks=[array])["tasks"] if task["decision"])
            return bool(decided)

        wait_until(is_decided, what="a decision")
        gate.touch()
        home.wait(array)
    assert set(decided[0]) == keys_told("json.md", "`decision`, where one was made")[0]


def test_answers_have_the_keys_that_the_page_tells() -> None:
    with Cluster() as cluster:
        agent = cluster.agent("n1")
        task = agent.submit("echo", "told")
        agent.wait(task)
        assert [set(agent.call("info"))] == keys_told("wire.md", "`info`")
        for verb, asked in {
            "tasks": {},
            "history": {},
            "nodes": {},
            "policy": {},
            "stats": {},
            "cancel": {"tasks": [task]},
            "hold": {"tasks": [task]},
            "release": {"tasks": [task]},
            "drain": {},
            "undrain": {},
        }.items():
            told = keys_told("wire.md", f"`{verb}`")  # the fields, the keys, and what there is in some cases besides
            assert set(agent.call(verb, **asked)) == told[1 if verb in ("tasks", "history", "cancel") else -1]
        with agent.client() as client:
            (ended,) = client.stream("wait", tasks=[task])
            _, *told = keys_told("wire.md", "`wait`")
            assert [set(client.last), set(ended)] == told[:2]
            (piece,) = client.stream("output", task=task)
            _, *told = keys_told("wire.md", "`output`")
            assert [set(client.last), set(piece), {"behind"}] == told
        fields = {"token": "a-token-of-mine", "spec": cluster.spec("true"), "array": []}
        first, again = agent.call("submit", **fields), agent.call("submit", **fields)
        _, answer, *sometimes = keys_told("wire.md", "`submit`")
        assert (set(first), set(again) - set(first)) == (answer, {"repeated"})
        assert sometimes == [{"declining"}, {"declining_told"}, {"repeated"}]


# -- inside a task -----------------------------------------------------------------------------------------------------


def test_a_task_has_the_variables_that_the_page_tells() -> None:
    text = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `([A-Z_]+)` \|", text[text.index("## Inside a task") :], re.MULTILINE))
    with Cluster() as cluster:
        agent = cluster.agent("n1")
        task = agent.submit("env", array=[(7, 7, 1)])
        agent.wait(task)
        lines = agent.output(f"{task}.7")[0].decode().splitlines()
    given = dict(line.split("=", 1) for line in lines)
    assert {name for name in given if name not in {*cluster.environment, "PWD", "SHLVL", "_"}} == told
    assert given["PEERLOAD_TASK_ID"] == f"{task}.7"
    assert (given["PEERLOAD_ARRAY_INDEX"], given["PEERLOAD_CPUS"], given["CUDA_VISIBLE_DEVICES"]) == ("7", "1", "")


def test_a_policy_of_ones_own_is_played(desk: Desk) -> None:
    text = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    for language, name in (("python", "mine.py"), ("toml", "mine.toml")):
        block = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[0]
        (desk.work / name).write_text(block.replace("/path/to", str(desk.work)), encoding="utf-8")
    assert "`peerload up --policy /path/to/mine.toml`" in text
    desk.types(f"peerload up --policy {desk.work}/mine.toml")
    (told,) = json_lines(desk.types("peerload policy --json"))
    assert told["in_force"]["preset"] == "mine"
    assert told["in_force"]["location.sender"].endswith("/mine.py:Believe")
    assert desk.types("peerload run echo told") == "told\n"
