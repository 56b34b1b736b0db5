"""The generated part of docs/cli.md: the verbs by group, and of each its usage, purpose and
flags, from `peerload --help` and the verb's own parser.

`make docs` writes it. In the section of a verb the first paragraph and the table of flags that may follow are generated; what
comes after them is written by hand. A test compares the page with the parsers.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from peerload.cli.common.options import Options
from peerload.cli.main import GROUPS, VERBS, load

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
GENERAL = {"--help", "--socket", "--json"}
AT = "ask this node of the cluster, not this one"
"""Flags of every verb, and the help of `--at`, which the page explains once."""
TASK_VERBS = ("run", "submit", "map")
TASK_HEADING = "### Flags of `run`, `submit` and `map`"
SELECT_VERBS = ("ls", "cancel", "signal", "hold", "release", "prio", "retry", "wait", "logs", "clean")
SELECT_HEADING = "### Flags that select tasks"
SELECT = ("--name", "--group", "--node", "--tag", "--state", "--all-users", "--yes")
HEAD = re.compile(r"\A\n(?!\| flag)[^\n]+\n(?:\n\| flag \|.*?\n(?=\n|\Z))?|\A\n\| flag \|.*?\n(?=\n|\Z)", re.DOTALL)
"""What is generated, after the heading: a paragraph of one line, and a table of flags."""


class Read(Exception):
    """Thrown from a verb as soon as it has built its parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(verb: str) -> argparse.ArgumentParser:
    """The parser of a verb, taken when it is about to read the command line."""

    def stop(parser: Options, *_words: object) -> None:
        raise Read(parser.parser())

    kept = Options.read, Options.read_command
    Options.read = Options.read_command = stop  # type: ignore[assignment,method-assign]
    try:
        load(verb)([])
    except Read as read:
        return read.parser
    finally:
        Options.read, Options.read_command = kept  # type: ignore[method-assign]
    raise AssertionError(f"{verb} has read no flags")


def flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Its own flags by their long name (of one without: the short one), in the order of its help."""
    found = {action.option_strings[-1]: action for action in parser._actions if action.option_strings}
    return {name: action for name, action in found.items() if name not in GENERAL and action.help != AT}


def row(action: argparse.Action, formatter: argparse.HelpFormatter) -> str:
    """One flag as a row of the table."""
    value = ""
    if action.nargs != 0:
        value = " " + str(action.metavar or "|".join(map(str, action.choices or ())) or action.dest.upper())
    names = ", ".join(f"`{name}{value}`" for name in action.option_strings)
    cells = (names, " ".join(formatter._expand_help(action).split()))
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def table(parser: argparse.ArgumentParser, names: list[str]) -> str:
    """The table of some flags of a verb; "" where there are none."""
    if not names:
        return ""
    formatter, own = parser._get_formatter(), flags(parser)
    return "\n| flag | meaning |\n|---|---|\n" + "".join(row(own[name], formatter) + "\n" for name in names)


def head(verb: str, parser: argparse.ArgumentParser, shared: set[str]) -> str:
    """A verb's usage, its purpose, and the flags that it does not share."""
    usage = (parser.usage or "").removeprefix(f"peerload {verb}").strip()
    if not usage:
        wrapped = {"*": "[{} …]", "+": "{} …", "?": "[{}]"}
        words = [
            wrapped.get(str(action.nargs), "{}").format(action.metavar or action.dest)
            for action in parser._actions
            if not action.option_strings
        ]
        usage = " ".join(["[flags]"] * bool(flags(parser)) + words)
    purpose = VERBS[verb][:1].upper() + VERBS[verb][1:] + "."
    shown = f"`peerload {verb} {usage}`".replace(" `", "`").replace("\n", " ")
    return f"\n{purpose} {shown}\n" + table(parser, [name for name in flags(parser) if name not in shared])


def generated() -> dict[str, str]:
    """Heading → what stands below it."""
    parsers = {verb: parser_of(verb) for verb in VERBS}
    own = {verb: flags(parser) for verb, parser in parsers.items()}
    first = own[TASK_VERBS[0]]
    task = [name for name in first if all(name in own[verb] for verb in TASK_VERBS)]
    task = [name for name in task if len({own[verb][name].help for verb in TASK_VERBS}) == 1]
    parts = {
        TASK_HEADING: table(parsers["run"], task),
        SELECT_HEADING: table(parsers["cancel"], [name for name in SELECT if name in own["cancel"]]),
    }
    for group, names in GROUPS.items():
        parts[f"## {group}"] = "\n" + " · ".join(f"[{verb}](#{verb})" for verb in names) + "\n"
    for verb, parser in parsers.items():
        shared = set(task) if verb in TASK_VERBS else set()
        if verb == "agent":
            shared = set(own["up"])
        elif verb in SELECT_VERBS:
            shared = {name for name in SELECT if name in own[verb] and own[verb][name].help == own["cancel"][name].help}
        parts[f"### `{verb}`"] = head(verb, parser, shared)
    return parts


def written(text: str) -> str:
    """The page, its generated parts as the parsers are now."""
    for heading, part in generated().items():
        before, found, after = text.partition(f"\n{heading}\n")
        if not found:
            raise SystemExit(f"docs/cli.md has no section {heading!r}")
        match = HEAD.match(after)
        text = f"{before}{found}{part}" + (after[match.end() :] if match else f"\n{after}")
    return text


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written(page), encoding="utf-8")
    elif written(page) != page:
        raise SystemExit("docs/cli.md is not as the parsers are: make docs")
