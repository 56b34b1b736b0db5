"""Validation errors of msgspec in plain words: ``Expected `int` >= 1 - at `$.limit` `` becomes "limit: a whole
number of at least 1 is wanted"."""

from __future__ import annotations

import ast
import re

_PLACE = re.compile(r" - at (?P<key>`key` in )?`\$?(?P<path>[^`]*)`$")
_EXPECTED = re.compile(r"^Expected `(?P<types>[^`]*)`(?P<more>.*)$")
_GOT = re.compile(r", got `(?P<types>[^`]*)`$")
_BOUND = re.compile(r"^ (?P<of>of length )?(?P<sign>>=|<=|>|<|==) (?P<number>\S+)$")
_NAMED = (
    (re.compile(r"^Object missing required field `([^`]*)`$"), "{0} is missing"),
    (re.compile(r"^Object contains unknown field `([^`]*)`$"), "{0} is unknown"),
    (re.compile(r"^Invalid (?:enum )?value (.*)$"), "{0} is not an allowed value"),
)
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bytes": "bytes",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
    "ext": "an extension",
}
_FORMS = {
    r"^[a-z0-9-]{1,40}\Z": "a name of a-z, 0-9 and -, at most 40 characters,",
    r"^([a-z0-9-]{1,40})?\Z": "a name of a-z, 0-9 and -, at most 40 characters, or none,",
    r"^[a-z][a-z0-9-]{0,30}\Z": "a word of a-z, 0-9 and -, a letter first, at most 31 characters,",
    r"^[A-Za-z0-9._:/@+-]{1,80}\Z": "a word of letters, digits and . _ : / @ + -, at most 80 characters,",
    r"^[A-Za-z_][A-Za-z0-9_]{0,127}\Z": "the name of a variable (letters, digits and _, no digit first, at most 128 characters)",
    r"^[a-z0-9-]{1,40}/[0-9]{1,18}(\.[0-9]{1,9})?\Z": "the name of a task, such as ws1/42 or ws1/42.7,",
    r"^[a-z][a-z0-9-]{0,30}:[!-~]{1,80}\Z": "the name of a device, such as nvidia:GPU-1 or fpga:0,",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}\Z": "the name of a group (letters, digits, . _ and -, at most 40 characters)",
    r"^([A-Za-z0-9][A-Za-z0-9._-]{0,39})?\Z": "the name of a group (letters, digits, . _ and -, at most 40 characters), or none,",
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}=[^\x00-\x1f\x7f]{0,128}\Z": "a tag, such as project=mnist,",
    r"^[^\x00-\x20/:,\x7f-\x9f]{1,64}\Z": "the name of an account (no space, / : or comma, at most 64 characters)",
    r"^[a-z0-9-]{1,40}:[^\x00-\x20/:,\x7f-\x9f]{1,64}\Z": "a user of a node, such as ws1:alice,",
    r"^/[^\x00]*\Z": "an absolute path",
    r"^[0-9a-f]+$": "a number in hexadecimal digits",
    r"^([0-9a-f]{2}:){5}[0-9a-f]{2}\Z": "the address of a network card, such as 52:54:00:12:34:56,",
    r"^[a-z_]{0,32}\Z": "a word of a-z and _, at most 32 characters, or none,",
}
"""Descriptions of formats of texts, by their regular expressions."""
_SIGNS = {">=": "at least {0}", "<=": "at most {0}", ">": "more than {0}", "<": "less than {0}", "==": "exactly {0}"}


def validation_error_text(error: Exception) -> str:
    """Describe a validation error: the place and the problem. Any other message is returned unchanged."""
    text = str(error)
    where = _PLACE.search(text)
    place = ""
    if where is not None:
        text = text[: where.start()]
        place = where["path"].replace("[...]", "").lstrip(".")
    said = _plain_text(text)
    return f"{place}: {said}" if place else said


def _plain_text(text: str) -> str:
    for pattern, words in _NAMED:
        if (named := pattern.match(text)) is not None:
            return words.format(*named.groups())
    expected = _EXPECTED.match(text)
    if expected is None:
        return text
    wanted, more = _kinds(expected["types"]), expected["more"]
    if (got := _GOT.match(more)) is not None:
        return f"{wanted} is wanted, and this is {_kinds(got['types'])}"
    if (bound := _BOUND.match(more)) is not None:
        amount = _SIGNS[bound["sign"]].format(bound["number"])
        return f"{wanted} {'with a length of ' if bound['of'] else 'of '}{amount} is wanted"
    if more.startswith(" matching regex "):
        form = ast.literal_eval(more.removeprefix(" matching regex "))
        return f"{_FORMS.get(form, f'text of the form {form}')} is wanted"
    return f"{wanted} is wanted{more}"


def _kinds(types: str) -> str:
    return " or ".join(_TYPES.get(name.strip(), name.strip()) for name in types.split("|"))
