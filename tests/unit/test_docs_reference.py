"""The reference pages name what there is: messages, requests, verbs, flags, settings, keys of JSON, policies. Where on its
page something stands, and in which words, is nobody's business here."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.agent.store.schema import RecordedEvent
from peerload.agent.views import node
from peerload.agent.views import task as answers
from peerload.agent.views.task import completion_object
from peerload.cli import main as verbs
from peerload.cli.verbs import doctor
from peerload.core.estimates import DurationEstimates
from peerload.model import gossip, messages
from peerload.model.config import AgentConfig
from peerload.model.resources import Device, ResourceRequest
from peerload.model.task import NO_TERMS, TaskRecord, TaskSpec, TaskState
from peerload.policy import registry
from peerload.top.actions import KEYS
from peerload.wire import control
from tests import docs_cli
from tests.core.given import Given
from tests.docs_tables import code, rows

if TYPE_CHECKING:
    from collections.abc import Iterable

DOCS = Path(__file__).resolve().parents[2] / "docs"


def text_of(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def set_as_code(page: str) -> set[str]:
    """The words that a page sets as code, in a line or in a block."""
    text = text_of(page)
    blocks = re.findall(r"^```.*?^```", text, re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    return set(re.findall(r"--?[a-zA-Z][\w-]*|[\w.-]*\w", " ".join([*blocks, *spans])))


def fields_of(kinds: Iterable[type[msgspec.Struct]]) -> set[str]:
    kinds = tuple(kinds)
    return {str(kind.__struct_config__.tag) for kind in kinds} | {
        name for kind in kinds for name in kind.__struct_encode_fields__
    }


def test_every_message_and_request_is_told_with_its_fields() -> None:
    there_is = fields_of((*messages.Message.__args__, *gossip.GossipMessage.__args__, *control.Request.__args__))
    assert there_is - set_as_code("wire.md") == set()


def test_every_rule_the_code_names_is_told() -> None:
    cited: set[str] = set()
    for path in (DOCS.parent / "peerload").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for rules in re.findall(r"\((?:rule )?([A-Z]\d{1,2}(?: \+ [A-Z]\d{1,2})?)\)|rule ([A-Z]\d{1,2})\b", text):
            cited |= set(re.findall(r"[A-Z]\d+", " ".join(rules)))
    told = set(re.findall(r"\b[A-Z]\d+\b", text_of("wire.md") + text_of("security.md")))
    assert cited - told == set()


# -- the command line --------------------------------------------------------------------------------------------------


def test_every_verb_and_flag_is_told_and_no_other() -> None:
    flags = {
        verb: {name for action in docs_cli.parser_of(verb)._actions for name in action.option_strings}
        for verb in verbs.VERBS
    }
    every = set().union(*flags.values())
    told = set_as_code("cli.md")
    assert (flags.keys() | every) - told == {"-h"}
    assert {
        code(cells[0]).split()[0] for cells in rows(text_of("cli.md")) if cells[0].startswith("`-")
    } - every == set()


def test_usage_and_flags_of_each_verb_are_those_of_its_parser() -> None:
    page = text_of("cli.md")
    assert docs_cli.written(page) == page, "make docs"


def test_every_setting_is_told_with_its_default() -> None:
    told = {code(cells[0]): code(cells[1]) for cells in rows(text_of("settings.md"))}
    config = AgentConfig(node="n", state="s", socket="s")
    assert set(AgentConfig.__struct_fields__) - told.keys() == set()
    for key in AgentConfig.__struct_fields__:
        if told[key]:
            value = getattr(config, key)
            expected = list(value) if isinstance(value, tuple) else value
            assert msgspec.toml.decode(f"value = {told[key]}".encode())["value"] == expected, key


def test_every_check_of_the_doctor_and_every_key_of_top_is_told() -> None:
    page = text_of("troubleshooting.md")
    assert [check.name for check in doctor.CHECKS if f"`{check.name}`" not in page] == []
    page = text_of("top.md")
    assert [key.shown for key in KEYS if f"`{key.shown}`" not in page] == []


def test_every_key_of_json_is_told() -> None:
    spec = TaskSpec((b"true",), b"/", request=ResourceRequest(gpus=1))
    record = TaskRecord("ws1/1", bytes(16), TaskState.DONE, 1.0)
    event = RecordedEvent(1, 1.0, "task", "queued", "ws1/1", 0, "", "submitted")
    store: Any = SimpleNamespace(output_gone=lambda _task: None)
    x = Given()
    x.node.ledger.devices.set_devices((Device("nvidia:GPU-1", is_read=True, mem_bytes=1 << 30),))
    own, peer, *_ = node.nodes(x.node)
    assert isinstance(own["gpus"], list)
    keys = {"history", "decision"}
    for part in (
        answers.task_object(record, spec, "me"), answers.detail_object(spec, record), answers.submit_options_object(NO_TERMS, record),
        completion_object(store, record, spec, NO_TERMS), answers.output_gone_object(store, record), answers.usage_object(record),
        answers.learned_gpu_memory(DurationEstimates(8, 8), spec), answers.history_step(event), answers.event_object(event), own, peer, *own["gpus"],
    ):  # fmt: skip
        keys |= set(part)
    assert keys - set_as_code("json.md") == set()


# -- policies ----------------------------------------------------------------------------------------------------------


def test_every_policy_with_its_parameters_and_every_preset_is_told() -> None:
    names = {f"{kind}.{name}" for kind, members in registry.policies().items() for name in members}
    assert (names | set(registry.presets())) - set_as_code("policies.md") == set()
    words = set(re.findall(r"\w+", text_of("policies.md")))
    parameters = {
        parameter
        for kind, members in registry.policies().items()
        if kind != "information"  # what an information policy has are facts about it, not knobs
        for name in members
        for parameter in getattr(registry.policy_class(kind, name), "__struct_fields__", ())
    }
    assert parameters - words == set()
