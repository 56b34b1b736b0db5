"""The reference pages equal the code: messages, requests, bounds, verbs, flags, settings, policies."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from peerload.agent import (
    access,
    answers,
    forward,
    forward_server,
    launcher,
    launcher_reach,
    launcher_socket,
    node_answers,
    peer_connection,
    peer_streams,
    quotas,
    routes,
)
from peerload.agent.ending_answers import endings_object
from peerload.agent.store_rows import Happened
from peerload.cli import main as cli
from peerload.cli.options import Options
from peerload.core.history import History
from peerload.model import gossip, messages
from peerload.model.config import AgentConfig, CoreConfig
from peerload.model.devices import Device
from peerload.model.resources import Placement, ResourceRequest
from peerload.model.task import TaskRecord, TaskSpec, TaskState, Terminal
from peerload.model.terms import NO_TERMS
from peerload.policy import registry
from peerload.wire import bounds, control, frame, peer
from tests.core.given import Given
from tests.each import each

if TYPE_CHECKING:
    from collections.abc import Iterable

EVENT = Happened(1, 1.0, "task", "queued", "ws1/1", 0, "", "submitted")
DOCS = Path(__file__).resolve().parents[2] / "docs"
SHARED_FLAGS = {"-h", "--help", "--socket", "--json"}


def section(page: str, heading: str) -> str:
    """What stands under a heading, down to the next one of its level or above."""
    text = (DOCS / page).read_text(encoding="utf-8")
    level = len(heading) - len(heading.lstrip("#"))
    start = text.index(f"\n{heading}\n") + len(heading) + 2
    end = re.search(rf"^#{{1,{level}}} ", text[start:], re.MULTILINE)
    return text[start : start + end.start()] if end else text[start:]


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table; `\\|` is a bar inside a cell. Headings and rules are left out."""
    found = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        is_heading = number + 1 < len(lines) and lines[number + 1].startswith("|---")
        if line.startswith("|") and not line.startswith("|---") and not is_heading:
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            found.append([cell.strip().replace("\\|", "|") for cell in cells])
    return found


def code(cell: str) -> str:
    """The first thing set as code in a cell, "" if there is none."""
    found = re.search(r"`([^`]*)`", cell)
    return found[1] if found else ""


def fields(kind: type[msgspec.Struct]) -> str:
    return " ".join(kind.__struct_encode_fields__)


# -- wire.md -----------------------------------------------------------------------------------------------------------


def test_every_message_has_its_row() -> None:
    told = {code(cells[0]): code(cells[2]) for cells in rows(section("wire.md", "## Messages"))}
    kinds: Iterable[type[msgspec.Struct]] = messages.Message.__args__
    assert told == {str(kind.__struct_config__.tag): fields(kind) for kind in kinds}


def test_every_message_of_gossip_has_its_row() -> None:
    told = {code(cells[0]): code(cells[1]) for cells in rows(section("wire.md", "## Gossip"))}
    kinds: Iterable[type[msgspec.Struct]] = gossip.GossipMessage.__args__
    assert told == {str(kind.__struct_config__.tag): fields(kind) for kind in kinds}
    text = section("wire.md", "## Gossip")
    bounds = (gossip.DATAGRAM_BYTES_MAX, gossip.MESSAGES_BYTES_MAX, gossip.MESSAGES_MAX, gossip.ACCUSERS_MAX)
    assert all(re.search(rf"\b{bound}\b", text) for bound in bounds)


def test_the_bounds_of_forwarding_are_told() -> None:
    text = section("wire.md", "### Forwarded requests")
    assert f"{messages.FORWARD_BYTES_MAX >> 20} MiB; " in text
    assert f"{messages.FORWARDED_PART_BYTES_MAX >> 10} KiB" in text
    assert f"at most {forward_server.FORWARDS_MAX} clients" in text
    assert f"{forward_server.PENDING_BYTES_MAX >> 20} MiB of requests" in text
    assert f"{quotas.WAITED_BY_NODE_MAX:,} tasks that its clients wait for" in text
    assert f"at most {forward.TUNNELS_MAX} such streams" in text
    assert f"at most {peer_streams.FORWARDING_MAX} such streams, beside {peer_streams.STREAMS_MAX} for" in text
    assert f"within {forward.OPEN_S_MAX:g} s ({forward.OPEN_DEAD_S_MAX:g} s if" in text
    assert f"says nothing for {forward.SILENT_S_MAX:g} s" in text
    assert f"at most {bounds.DEPTH_MAX} lists within one another" in text
    assert f"has at most {forward.ANSWER_BYTES_MAX >> 20} MiB" in text
    assert f"takes {routes.CLUSTER_WAITED_S_MAX:g} s" in text
    assert f"`hops` is {access.HOPS_MAX}" in text


def test_the_presets_of_gossip_are_told() -> None:
    table = {code(cells[0]): cells[1:] for cells in rows(section("membership.md", "## Presets"))}
    names = gossip.GossipPreset.__struct_fields__
    presets = [gossip.PRESETS[name] for name in ("local", "lan", "wan")]
    assert table == {name: [f"{getattr(preset, name):g}" for preset in presets] for name in names}


def test_the_items_of_batches_are_told() -> None:
    text = section("wire.md", "### Ownership")
    assert f"`{fields(messages.Renewal)}`" in text
    assert f"`{fields(messages.LeaseExtension)}`" in text
    assert str(messages.RENEWALS_MAX) in text
    assert all(f"`{code}`" in text for code in messages.DECLINES)


def test_the_envelope_is_told() -> None:
    told = [
        name
        for cells in rows(section("wire.md", "## Frames and envelopes"))[5:]
        for name in re.findall(r"`(\w+)`", cells[0])
    ]
    assert sorted(told) == sorted(messages.Envelope.__struct_fields__)


def test_every_request_has_its_row() -> None:
    told = {code(cells[0]): code(cells[1]) for cells in rows(section("wire.md", "## The control socket"))}
    kinds: Iterable[type[msgspec.Struct]] = control.Request.__args__
    assert told == {str(kind.__struct_config__.tag): fields(kind).removesuffix("id at").strip() for kind in kinds}


def test_the_spec_is_told() -> None:
    (line,) = re.findall(r"^- `spec`: (.*(?:\n  .*)*)", section("wire.md", "## The control socket"), re.MULTILINE)
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", line)))) - {"bin"}
    assert named == {
        name for kind in (TaskSpec, Terminal, ResourceRequest, Placement) for name in kind.__struct_fields__
    }


def test_the_largest_frames_are_told() -> None:
    sizes = [cells[1] for cells in rows(section("wire.md", "## Frames and envelopes"))[:5]]
    true = [
        peer_connection.HELLO_BYTES_MAX,
        peer.DATA_BYTES_MAX,
        peer.MQTT_BYTES_MAX,
        frame.CONTROL_BYTES_MAX,
        launcher_socket.FRAME_BYTES_MAX,
    ]
    assert launcher_socket.FRAME_BYTES_MAX == launcher_reach.FRAME_BYTES_MAX
    units = {"KiB": 1 << 10, "MiB": 1 << 20}
    assert [int(size.split()[0]) * units[size.split()[1]] for size in sizes] == true


def test_times_and_bounds_are_those_of_the_config() -> None:
    config = CoreConfig()
    for name, default, _ in rows(section("wire.md", "### Times and bounds")):
        assert getattr(config, code(name)) == float(default), name
    assert AgentConfig(node="n", state="s", socket="s").lease_s == config.lease_s


def test_the_launchers_words_are_told() -> None:
    files = sorted(Path(launcher.__file__).parent.glob("launcher*.py"))
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    told = {code(cells[0]) for cells in rows(section("wire.md", "## The launcher's socket"))}
    assert told == set(re.findall(r'do == "(\w+)"', source)) | set(re.findall(r'"is": "(\w+)"', source))


def test_every_rule_the_code_names_is_told() -> None:
    root = DOCS.parent
    cited: set[str] = set()
    for path in (root / "peerload").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for rules in re.findall(r"\((?:rule )?([A-Z]\d{1,2}(?: \+ [A-Z]\d{1,2})?)\)|rule ([A-Z]\d{1,2})\b", text):
            cited |= set(re.findall(r"[A-Z]\d+", " ".join(rules)))
    told = "".join((DOCS / page).read_text(encoding="utf-8") for page in ("wire.md", "security.md"))
    assert {rule for rule in cited if not re.search(rf"\b{rule}\b", told)} == set()


# -- cli.md ------------------------------------------------------------------------------------------------------------


class Read(Exception):
    def __init__(self, reader: Options) -> None:
        self.reader = reader


def flags_of(verb: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What a verb's parser takes, less what every verb takes."""

    def stop(reader: Options, _words: list[str]) -> None:
        raise Read(reader)

    monkeypatch.setattr(Options, "read", stop)
    monkeypatch.setattr(Options, "read_command", stop)
    with pytest.raises(Read) as caught:
        importlib.import_module(f"peerload.cli.{verb}").main([])
    found = {name for action in caught.value.reader._actions for name in action.option_strings}
    assert found >= SHARED_FLAGS
    return found - SHARED_FLAGS


def flags_told(verb: str) -> set[str]:
    """The flags in the tables below each heading that names the verb."""
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    told: set[str] = set()
    for heading in re.findall(r"^### .*$", text, re.MULTILINE):
        if f"`{verb}`" in heading:
            for flag, means in rows(section("cli.md", heading)):
                only = re.match(r"`(\w+)` only", means)
                if only is None or only[1] == verb:
                    told |= {code(one).split(" ")[0] for one in re.findall(r"`-[^`]*`", flag)}
    return told


VERBS = [verb for verb, _ in cli.VERBS]


@each("verb", VERBS)
def test_flags_are_those_of_the_parser(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert flags_told(verb) == flags_of(verb, monkeypatch)


def test_every_verb_is_told() -> None:
    verbs = section("cli.md", "## Verbs")
    assert [code(cells[0]) for cells in rows(verbs[: verbs.index("\n### ")])] == VERBS


def test_settings_are_those_of_the_config() -> None:
    told = {code(key): code(default) for key, default, _ in rows(section("cli.md", "## Settings"))}
    assert list(told) == list(AgentConfig.__struct_fields__)
    config = AgentConfig(node="n", state="s", socket="s")
    for key, default in told.items():
        if default:
            value = getattr(config, key)
            expected = list(value) if isinstance(value, tuple) else value
            assert msgspec.toml.decode(f"value = {default}".encode())["value"] == expected, key


def told_keys(name: str) -> list[str]:
    """What the tables of JSON say of one object."""
    (row,) = [cells for cells in rows(section("cli.md", "## JSON")) if cells[0].replace("`", "") == name]
    return code(row[1]).split()


def test_the_keys_of_tasks_are_told() -> None:
    spec = TaskSpec((b"true",), b"/", request=ResourceRequest(gpus=1))
    record = TaskRecord("ws1/1", bytes(16), TaskState.DONE, 1.0)
    assert sorted(answers.task_object(record, spec, "me")) == sorted(told_keys("task"))
    store: Any = SimpleNamespace(output_gone=lambda _task: None)
    endings = [*endings_object(store, record, spec, NO_TERMS), *answers.output_gone(store, record)]
    beyond = [*answers.detail(spec, record), *answers.agreed(NO_TERMS, record), *endings, "history", "decision"]
    beyond += answers.learned(History(8, 8), spec)
    assert sorted(beyond) == sorted(told_keys("task, in show also"))
    assert list(answers.used(record)) == told_keys("task, in history also")
    assert set(answers.step(EVENT)) == set(told_keys("step of history"))
    assert list(answers.event_object(EVENT)) == told_keys("events")


def test_the_keys_of_nodes_and_their_gpus_are_told() -> None:
    x = Given()
    gpu = Device("nvidia:GPU-1", is_read=True, mem_bytes=1 << 30)
    x.node.ledger.devices.set_devices((gpu,))
    own, peer, *_ = node_answers.nodes(x.node)
    assert set(own) == set(peer) == set(told_keys("node"))
    text = section("cli.md", "## JSON")
    (told,) = re.findall(r"`gpus` of a node: `([^`]+)`", text)
    assert isinstance(own["gpus"], list)
    (gpu_told,) = own["gpus"]
    assert [*told.split(), "why"] == list(gpu_told)


# -- policies.md -------------------------------------------------------------------------------------------------------


def test_every_policy_is_told() -> None:
    told = {code(cells[0]): cells for cells in rows(section("policies.md", "## The kinds and their members"))}
    members = {kind: sorted(re.findall(r"`([^`]+)`", cells[2])) for kind, cells in told.items()}
    assert members == registry.policies()
    assert {kind: code(cells[3]) for kind, cells in told.items()} == registry.DEFAULTS


@each(("kind", "name"), [(kind, name) for kind, names in registry.policies().items() for name in names])
def test_every_policy_says_when_it_is_good_and_when_bad(kind: str, name: str) -> None:
    paragraphs = section("policies.md", "## The kinds and their members").split("\n\n")
    (paragraph,) = [paragraph for paragraph in paragraphs if f"**`{kind}.{name}`**" in paragraph]
    assert "\nGood: " in paragraph
    assert " Bad: " in paragraph
    if not name.startswith("none"):
        for parameter in getattr(registry.policy_class(kind, name), "__struct_fields__", ()):
            if kind != "information":  # what an information policy has are facts about it, not knobs
                assert re.search(rf"[` ]{parameter}[` ]", paragraph), parameter


def test_every_preset_is_told() -> None:
    told = section("policies.md", "## Presets")
    assert sorted({code(cells[0]) for cells in rows(told)}) == registry.presets()
    assert f"| `{registry.DEFAULT_PRESET}` |" in told
