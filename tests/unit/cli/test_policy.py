"""`peerload policy` needs no agent, and says which preset one plays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peerload.model.errors import ConfigError
from peerload.policy import registry
from tests.each import each
from tests.unit.cli.fake_agent import FakeAgent, fixture_agent, peerload  # noqa: F401 -- one is a fixture

OWN = """
import msgspec
from typing import Annotated
from msgspec import Meta
from peerload.policy.api import Keep

class Mine(msgspec.Struct, frozen=True):
    '''Keeps it \x1b[2J here.'''
    patience: Annotated[int, Meta(ge=1, le=9, description="how long")] = 3

    def locate(self, view, task, replies, rng):
        return Keep("mine")
"""
PRESET = """description = "Mine."
[transfer]
accept_below = 3
[location.sender]
policy = "mine.py:Mine"
patience = 4
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    path = tmp_path / "mine.toml"
    path.write_text(PRESET)
    return path


def test_what_there_is_needs_no_agent(tmp_path: Path) -> None:
    done = peerload("policy", XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    for name in registry.presets():
        assert f"\n  {name} " in done.stdout.decode()
    told = json.loads(peerload("policy", "ls", "--json", XDG_RUNTIME_DIR=str(tmp_path)).stdout)
    assert told == {"v": 1, "policies": registry.policies(), "presets": registry.presets(), "in_force": None}


def test_an_agent_that_only_the_environment_names_need_not_be_there(tmp_path: Path) -> None:
    done = peerload("policy", PEERLOAD_SOCKET=str(tmp_path / "none.sock"))
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_agent_that_was_named_must_be_there() -> None:
    done = peerload("policy", "--socket", "/tmp/none/agent.sock")
    assert (done.returncode, b"/tmp/none/agent.sock" in done.stderr) == (125, True)


def test_the_preset_in_force_is_marked(agent: FakeAgent) -> None:
    in_force = {"preset": "symmetric", "description": "…", "load": "c\x1b[2Jpu"}
    agent.answer("policy", policies={}, presets=[], in_force=in_force)
    text = peerload("policy", agent=agent).stdout.decode()
    assert "\n* symmetric  " in text
    assert "\nin force *  symmetric\n  load  c\\x1b[2Jpu\n" in text
    assert json.loads(peerload("policy", "--json", agent=agent).stdout)["in_force"] == in_force


def test_every_preset_and_every_policy_is_shown() -> None:
    names = [*registry.presets(), *(f"{kind}.{name}" for kind, names in registry.policies().items() for name in names)]
    from peerload.cli.verbs.policy import member_lines, preset_lines
    from peerload.policy import describe

    for name in names:
        lines = (
            preset_lines(describe.preset(name))
            if name in registry.presets()
            else member_lines(describe.find_policy(name))
        )
        assert len(lines) > 2, name


def test_a_preset_is_shown_kind_by_kind() -> None:
    text = peerload("policy", "show", "threshold").stdout.decode()
    assert text.startswith("threshold: ")
    assert "\ntransfer = single-threshold\n" in text
    assert "\nlocation.receiver = none " in text
    (probes,) = (line.split() for line in text.splitlines() if line.startswith("  probes "))
    assert probes[:3] == ["probes", "3", "3"]
    told = json.loads(peerload("policy", "show", "threshold", "--json").stdout)
    assert set(told) == {"v", "name", "description", "classes", "file", "memory", "chosen", "reference", "doubts"}
    (sender,) = [one for one in told["chosen"] if one["member"]["kind"] == "location.sender"]
    assert (sender["member"]["name"], sender["values"], sender["written"]) == ("threshold", {"probes": 3}, True)
    assert sender["member"]["sources"] == ["ELZ86"]


def test_baselines_are_marked_and_an_agent_refuses_those_that_need_a_head() -> None:
    from peerload.config.loader import _look_at

    text = peerload("policy", "ls").stdout.decode()
    marked = {line.split()[0] for line in text.splitlines() if "(baseline" in line}
    central = {line.split()[0] for line in text.splitlines() if "only simulated" in line}
    assert {"central-jsq", "central-fcfs"} == central < marked
    for verb in ("show", "check"):
        assert "only simulated" in peerload("policy", verb, "central-jsq").stdout.decode()
        assert "only simulated" not in peerload("policy", verb, "round-robin").stdout.decode()
    for name in registry.presets():
        if name in central:
            with pytest.raises(ConfigError, match="head node"):
                registry.live_preset(registry.preset_source(name))
            with pytest.raises(ConfigError, match="head node"):
                _look_at("policy", name)
        else:
            assert registry.live_preset(registry.preset_source(name)).name == name


def test_what_the_reference_model_changes_is_shown() -> None:
    text = peerload("policy", "show", "adaptive").stdout.decode()
    assert "\n  transfer.prefetch = 0\n" in text


def test_a_policy_is_shown(own: Path) -> None:
    text = peerload("policy", "show", "transfer.double-threshold").stdout.decode()
    assert text.startswith("transfer.double-threshold\n")
    assert "\n  Good: " in text
    assert "\n  Bad: " in text
    assert "[RM]" in text
    assert peerload("policy", "show", "double-threshold").stdout.decode() == text
    text = peerload("policy", "show", f"{own.parent}/mine.py:Mine").stdout.decode()
    assert text.splitlines()[:2] == [f"location.sender: {own.parent}/mine.py:Mine", "  Keeps it \\x1b[2J here."]
    assert "how long" in text
    told = json.loads(peerload("policy", "show", "load.tasks", "--json").stdout)
    assert set(told) == {"v", "kind", "name", "says", "good", "bad", "sources", "target", "parameters"}
    shown = peerload("policy", "show", str(own)).stdout.decode()
    (patience,) = (line.split() for line in shown.splitlines() if line.startswith("  patience "))
    assert patience[:3] == ["patience", "4", "3"]
    assert "doubtful: " in shown


@each(
    ("words", "code", "says"),
    [
        (("show",), 2, "takes one name"),
        (("ls", "x"), 2, "takes no name"),
        (("sohw", "x"), 2, "policy ls | show | check"),
        (("show", "poll"), 125, "information.poll  location.receiver.poll"),
        (("show", "treshold"), 125, "did you mean 'threshold'?"),
        (("show", "gone.toml"), 125, "no such file"),
        (("check", "gone.toml"), 125, "no such file"),
        (("check", "mine.py"), 2, "ends in .toml"),
    ],
)
def test_what_cannot_be_shown_says_why(words: tuple[str, ...], code: int, says: str) -> None:
    done = peerload("policy", *words)
    assert (done.returncode, done.stdout, says in done.stderr.decode()) == (code, b"", True), done.stderr


def test_a_sound_preset_is_ok_and_doubts_are_told(own: Path) -> None:
    done = peerload("policy", "check", str(own))
    assert done.returncode == 0
    assert done.stdout.decode().startswith(f"{own}: ok: ")
    assert f"peerload: {own}: transfer.accept_below: " in done.stderr.decode()
    told = json.loads(peerload("policy", "check", "--json", str(own)).stdout)
    assert (told["ok"], told["mistakes"], told["doubts"][0]["key"], told["played"]) == (
        True,
        [],
        "transfer.accept_below",
        None,
    )
    assert told["chosen"]["location.sender"] == "mine.py:Mine"


def test_every_mistake_is_told_with_its_key(own: Path) -> None:
    own.write_text(PRESET.replace("= 3", "= 'low'").replace("patience = 4", "patience = 10"))
    done = peerload("policy", "check", str(own))
    assert (done.returncode, done.stdout) == (125, b"")
    first, second = done.stderr.decode().splitlines()
    assert first.startswith(f'peerload: {own}: transfer.accept_below: "low" ')
    assert second.startswith(f"peerload: {own}: location.sender.patience: 10 ")
    told = json.loads(peerload("policy", "check", "--json", str(own)).stdout)
    assert (told["ok"], told["chosen"]) == (False, None)
    assert [one["key"] for one in told["mistakes"]] == ["transfer.accept_below", "location.sender.patience"]
    own.write_text("[transfer\n")
    assert f"peerload: {own}:1: policy: " in peerload("policy", "check", str(own)).stderr.decode()
    assert json.loads(peerload("policy", "check", "--json", str(own)).stdout)["mistakes"][0]["line"] == 1


def test_a_preset_that_is_played_says_what_its_nodes_share(own: Path) -> None:
    (own.parent / "mine.py").write_text(
        OWN.replace("return Keep", "SEEN.append(view.node); return Keep") + "SEEN = []\n"
    )
    done = peerload("policy", "check", "--play", "--json", str(own))
    assert done.returncode == 125
    told = json.loads(done.stdout)
    assert (told["ok"], told["mistakes"], told["played"]["shared"]) == (False, [], ["SEEN"])
    done = peerload("policy", "check", "--play", str(own))
    assert (done.returncode, done.stdout, b"share SEEN" in done.stderr) == (125, b"", True)
    assert peerload("policy", "ls", "--play").returncode == 2
