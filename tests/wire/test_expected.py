"""What a schema says, in the words of people."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import Meta

from peerload.model.errors import BadMessage
from peerload.model.resources import NodeName
from peerload.wire.control import decode_request
from peerload.wire.expected import _FORMS, validation_error_text

ROOT = Path(__file__).resolve().parents[2]


class Sample(msgspec.Struct, forbid_unknown_fields=True):
    number: Annotated[int, Meta(ge=1, le=9)] = 1
    part: Annotated[float, Meta(gt=0.0)] = 1.0
    name: Annotated[str, Meta(min_length=2, max_length=3)] = "ab"
    code: Annotated[str, Meta(pattern="^[a-z]+$")] = "a"
    node: NodeName = "n"
    named: dict[NodeName, int] = {}
    many: tuple[int, ...] = ()
    maybe: int | None = None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"number": 0}, "number: a whole number of at least 1 is wanted"),
        ({"number": 10}, "number: a whole number of at most 9 is wanted"),
        ({"number": "x"}, "number: a whole number is wanted, and this is text"),
        ({"part": 0.0}, "part: a number of more than 0.0 is wanted"),
        ({"name": "a"}, "name: text with a length of at least 2 is wanted"),
        ({"code": "A"}, "code: text of the form ^[a-z]+$ is wanted"),
        ({"node": "A"}, "node: a name of a-z, 0-9 and -, at most 40 characters, is wanted"),
        ({"named": {"A": 1}}, "named: a name of a-z, 0-9 and -, at most 40 characters, is wanted"),
        ({"named": {"a": "x"}}, "named: a whole number is wanted, and this is text"),
        ({"many": {}}, "many: a list is wanted, and this is a table"),
        ({"many": [1, "x"]}, "many[1]: a whole number is wanted, and this is text"),
        ({"maybe": "x"}, "maybe: a whole number or nothing is wanted, and this is text"),
        ({"other": 1}, "other is unknown"),
        ([], "a table is wanted, and this is a list"),
    ],
)
def test_each_kind_of_mistake_is_said_in_words(given: Any, said: str) -> None:
    with pytest.raises(msgspec.ValidationError) as failed:
        msgspec.convert(given, Sample)
    assert validation_error_text(failed.value) == said


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"verb": "show"}, "tasks is missing"),
        ({"verb": "dance"}, "verb: 'dance' is not an allowed value"),
        ({"verb": "tasks", "limit": 0}, "limit: a whole number of at least 1 is wanted"),
    ],
)
def test_a_request_that_is_none_is_told_in_words(request_: dict[str, Any], said: str) -> None:
    with pytest.raises(BadMessage) as refused:
        decode_request(msgspec.msgpack.encode(request_))
    assert refused.value.why == said


def test_every_form_has_its_words() -> None:
    found = [
        match
        for room in ("model", "wire")
        for path in (ROOT / "peerload" / room).glob("*.py")
        for match in re.findall(r'pattern=r"([^"]+)"', path.read_text(encoding="utf-8"))
    ]
    assert found
    assert set(found) == set(_FORMS)


def test_other_words_stay_as_they_are() -> None:
    assert validation_error_text(ValueError("the sky is falling")) == "the sky is falling"
