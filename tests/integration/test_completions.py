"""TAB in real shells: bash, zsh and fish complete verbs, flags, ids, nodes and presets from the scripts they are given."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from peerload.cli.verbs.completions import SCRIPTS
from tests.conftest import require_program
from tests.in_process import cli
from tests.integration.cluster import Cluster, program
from tests.support import PATIENCE_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.integration.cluster import Agent

    Case = tuple[list[str], set[str], set[str]]

BASH = """\
source <(peerload completions bash)
complete_it() {
    COMP_WORDS=("$@"); COMP_CWORD=$(( $# - 1 )); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; COMPREPLY=()
    _peerload
    printf '%s\\n' "${COMPREPLY[@]}"
}
"""
PRESSED_AGAIN_S = 5.0
CASES: list[Case] = [
    (["peerload", "su"], {"submit"}, {"run"}),
    (["peerload", "help", "compl"], {"completions"}, {"run"}),
    (["peerload", "submit", "--pri"], {"--prio"}, {"--node"}),
    (["peerload", "show", "n1/"], {"n1/1"}, {"--json"}),
    (["peerload", "cancel", "1"], {"1"}, {"2"}),
    (["peerload", "retry", "n1/"], {"n1/2"}, {"n1/1"}),
    (["peerload", "submit", "--node", "n"], {"n1"}, {"n1/1"}),
    (["peerload", "policy", "show", "thre"], {"threshold"}, {"adaptive"}),
    (["peerload", "ls", "--state", "q"], {"queued"}, {"done"}),
    (["peerload", "group", "pause", "cp"], {"cpu"}, {"pause"}),
    (["peerload", "submit", "--after", "n1/"], {"n1/1", "n1/2"}, {"cpu"}),
    (["peerload", "submit", "--after-ok", ""], {"@"}, {"cpu"}),
    (["peerload", "submit", "--group", "c"], {"cpu"}, {"--group"}),
    (["peerload", "completions", "f"], {"fish"}, {"bash"}),
    (["peerload", "up", "--policy", "ada"], {"adaptive"}, {"random"}),
    (["peerload", "events", "--what", "s"], {"store", "security"}, {"task"}),
]
IN_A_SHELL = [CASES[0], CASES[2], CASES[3], CASES[6]]
"""A verb, a flag, a task and a node: each costs a process."""


@pytest.fixture(scope="module")
def desk() -> Iterator[Agent]:
    """An agent with a task that runs and one that has ended, and a `peerload` to type."""
    with Cluster() as cluster:
        agent = cluster.agent("n1")
        agent.call("group", name="cpu", slots=2)
        running = agent.submit("sleep", "600")
        agent.wait(agent.submit("true"))
        agent.await_state(running, "running")
        script = cluster.directory / "bin" / "peerload"
        script.parent.mkdir()
        script.write_text(f'#!/bin/sh\nexec {shlex.join(program())} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
        yield agent


def variables(agent: Agent) -> dict[str, str]:
    cluster = agent.cluster
    path = f"{cluster.directory}/bin:{cluster.environment['PATH']}"
    return {**cluster.environment, "PATH": path, "PEERLOAD_SOCKET": agent.socket, "TERM": "dumb"}


def bash(agent: Agent, text: str) -> list[str]:
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH + text],
        env=variables(agent),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=agent.directory,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def each_is_offered(cases: list[Case], complete: Callable[[list[list[str]]], list[set[str]]]) -> None:
    """Complete these cases, and those again that lack something: an agent that does not answer in half a second is not
    waited for."""
    left = cases

    def are_offered() -> bool:
        nonlocal left
        found = complete([typed for typed, _, _ in left])
        assert not [answer for (_, _, unwanted), answer in zip(left, found, strict=True) if unwanted & answer]
        left = [case for case, answer in zip(left, found, strict=True) if not case[1] <= answer]
        return not left

    wait_until(are_offered, what="all to be offered")


def test_what_the_scripts_of_all_shells_are_told(desk: Agent) -> None:
    def complete(lines: list[list[str]]) -> list[set[str]]:
        answers = [cli(desk, "completions", "answer", "plain", *line[1:]) for line in lines]
        return [set(answer.stdout.decode().split("\n")) for answer in answers]

    each_is_offered(CASES, complete)


def test_bash(desk: Agent) -> None:
    def complete(lines: list[list[str]]) -> list[set[str]]:
        text = "; echo NEXT; ".join(f"complete_it {shlex.join(line)}" for line in lines)
        return [set(answer.split("\n")) for answer in "\n".join(bash(desk, text)).split("NEXT")]

    each_is_offered(IN_A_SHELL, complete)


def test_bash_completes_files_commands_and_flags_with_values(desk: Agent) -> None:
    assert "config.toml" in bash(desk, "touch config.toml; complete_it peerload config check con")
    assert "sleep" in bash(desk, "complete_it peerload submit -c 2 slee")
    assert "some-file" in bash(desk, "touch some-file; complete_it peerload run cat some")
    wait_until(lambda: bash(desk, "complete_it peerload submit --node = n") == ["n1"], what="the node to be offered")
    assert bash(desk, "complete_it peerload ls --state queued,do") == ["queued,done"]
    assert bash(desk, "complete_it peerload nosuch x") == [""]


def test_without_an_agent_there_is_no_noise(desk: Agent) -> None:
    assert bash(desk, "export PEERLOAD_SOCKET=/nowhere; complete_it peerload show n") == [""]
    desk.pause()
    try:
        assert bash(desk, "complete_it peerload show @") == ["@"]
    finally:
        desk.resume()


@pytest.fixture(scope="session")
def zsh() -> str:
    return str(require_program("zsh", "zsh"))


@pytest.fixture(scope="session")
def fish() -> str:
    return str(require_program("fish", "fish"))


class Typist:
    """A shell on a terminal of its own, to which keys are sent; what it shows is gathered."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._pid, self._terminal = pty.fork()
        if not self._pid:
            os.execve(command[0], command, environment)
        self.shown = ""

    def types(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def completes(self, typed: str, wanted: str) -> None:
        """Wait until TAB after this shows that; it is pressed again where nothing comes, since an agent that does not
        answer in half a second is not waited for."""

        def is_completed() -> bool:
            self.types(f"\x15{typed}\t")
            return self.has_seen(wanted, PRESSED_AGAIN_S)

        wait_until(is_completed, what=f"{wanted!r} after {typed!r}")

    def sees(self, wanted: str) -> None:
        """Wait until this is shown."""
        assert self.has_seen(wanted, PATIENCE_S), f"not shown: {wanted!r} in {self.shown!r}"

    def has_seen(self, wanted: str, within_s: float) -> bool:
        """Whether this is shown by then."""
        deadline = time.monotonic() + within_s
        while wanted not in self.shown:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            ready, _, _ = select.select([self._terminal], [], [], left_s)
            if ready:
                try:
                    self.shown += os.read(self._terminal, 65536).decode("utf-8", "replace")
                except OSError:
                    raise AssertionError(f"it has ended: {self.shown!r}") from None
        return True

    def close(self) -> None:
        os.close(self._terminal)
        os.waitpid(self._pid, 0)


def test_zsh(desk: Agent, zsh: str) -> None:
    environment = variables(desk) | {"TERM": "dumb", "PS1": "READY> ", "ZDOTDIR": str(desk.directory)}
    typist = Typist([zsh, "-f", "-i"], environment)
    try:
        typist.types("autoload -Uz compinit; compinit -u -D; source <(peerload completions zsh); print LOA''DED\n")
        typist.sees("LOADED")
        typist.completes("peerload completi", "peerload completions")
        typist.completes("peerload show n1/", "n1/1")
        typist.completes("peerload submit --pri", "--prio")
        typist.completes("peerload policy show thresh", "threshold")
    finally:
        typist.close()


def test_fish(desk: Agent, fish: str) -> None:
    def complete(lines: list[list[str]]) -> list[set[str]]:
        completions = "; echo NEXT; ".join(f"complete -C {shlex.quote(' '.join(line))}" for line in lines)
        done = subprocess.run(
            [fish, "--no-config", "-c", f"peerload completions fish | source; {completions}"],
            env=variables(desk),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        answers = done.stdout.split("NEXT")
        return [{line.partition("\t")[0] for line in answer.splitlines()} for answer in answers]

    each_is_offered(IN_A_SHELL, complete)


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_scripts_are_sound(shell: str) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"no {shell} here")
    done = subprocess.run([path, "-n"], input=SCRIPTS[shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
