"""What a schema says of a wrong value, in the words of people: ``Expected `int` >= 1 - at `$.limit` `` is said as "limit: a
whole number of at least 1 is wanted"."""

from __future__ import annotations

import re

_PLACE = re.compile(r" - at `(?P<key>key in )?\$?(?P<path>[^`]*)`$")
_EXPECTED = re.compile(r"^Expected `(?P<types>[^`]*)`(?P<more>.*)$")
_GOT = re.compile(r", got `(?P<types>[^`]*)`$")
_BOUND = re.compile(r"^ (?P<of>of length )?(?P<sign>>=|<=|>|<|==) (?P<number>\S+)$")
_NAMED = (
    (re.compile(r"^Object missing required field `([^`]*)`$"), "{0} is missing"),
    (re.compile(r"^Object contains unknown field `([^`]*)`$"), "{0} is nothing that is known here"),
    (re.compile(r"^Invalid (?:enum )?value (.*)$"), "{0} is none of what it may be"),
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
    "ext": "something else",
}
_SIGNS = {">=": "at least {0}", "<=": "at most {0}", ">": "more than {0}", "<": "less than {0}", "==": "exactly {0}"}


def in_words(error: Exception) -> str:
    """What was wrong and where. What is no message of a schema comes back as it is."""
    text = str(error)
    where = _PLACE.search(text)
    place = ""
    if where is not None:
        text = text[: where.start()]
        place = where["path"].replace("[...]", "").lstrip(".")
    said = _said(text)
    return f"{place}: {said}" if place else said


def _said(text: str) -> str:
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
        return f"{wanted} in another form is wanted: {more.removeprefix(' matching regex ')}"
    return f"{wanted} is wanted{more}"


def _kinds(types: str) -> str:
    return " or ".join(_TYPES.get(name.strip(), name.strip()) for name in types.split("|"))
