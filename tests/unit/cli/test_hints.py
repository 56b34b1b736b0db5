"""What errors and hints tell people to type exists: each verb is one, and each of its flags is taken."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from peerload.cli.main import OPTIONS, VERBS
from peerload.cli.verbs.completions import flags_of

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3] / "peerload"
COMMAND = re.compile(r"(?:^|  |:|`|&& |; |ssh \S+ )peerload ([a-z-]+)((?: [^ `;&]+)*)")
COMMANDS = ("run", "submit", "map")
NOT_TYPED = {"is", "itself", "agent", "executor"}
"""What follows the name in sentences."""


def texts() -> Iterator[tuple[str, str]]:
    """Every text in the program that is no docstring, what is filled in as a word; and where it stands."""
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
        }
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.JoinedStr):
                yield where, "".join(str(one.value) if isinstance(one, ast.Constant) else "X" for one in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | parts:
                yield where, node.value


@functools.cache
def flags(verb: str) -> frozenset[str]:
    return frozenset(flags_of(verb))


@pytest.mark.long
def test_every_command_in_a_hint_can_be_typed() -> None:
    seen = 0
    for where, text in texts():
        for verb, rest in COMMAND.findall(text):
            if verb in NOT_TYPED and verb not in VERBS:
                continue
            if verb.startswith("-"):
                assert verb in OPTIONS, (where, text)
                continue
            assert verb in VERBS or verb in ("help", "VERB"), (where, text)
            seen += 1
            for word in rest.split():
                if verb in COMMANDS and not word.startswith("-"):
                    break
                flag = word.partition("=")[0].rstrip(",.)")
                if re.fullmatch(r"--[a-z-]+", flag) and "X" not in flag:
                    assert flag in flags(verb), (where, text)
    assert seen > 100
