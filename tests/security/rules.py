"""The rules of docs/security.md, and the tests that are marked with their ids, `@pytest.mark.rule("J2")`."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/security.md").read_text(encoding="utf-8")
TESTS = {
    rule: tuple(re.findall(r"`(tests/[^`]+)`", tests))
    for rule, tests in re.findall(r"^\| ([CFJLMPSTX]\d+) \| .* \| (.*?) \|$", PAGE, re.MULTILINE)
}
"""Rule id → the tests that the page names for it."""
IDS = tuple(TESTS)


@cache
def marked() -> dict[str, list[str]]:
    """Rule id → the tests that hold it, `tests/…/test_x.py::test_y`, by the markers of functions, classes and files."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.rule" not in text:
            continue
        tree = ast.parse(text)
        of_file = [rule for node in tree.body if _is_pytestmark(node) for rule in _rules(node)]
        name = path.relative_to(ROOT).as_posix()
        for node in tree.body:
            of_class = [rule for decorator in getattr(node, "decorator_list", []) for rule in _rules(decorator)]
            parts = node.body if isinstance(node, ast.ClassDef) else [node]
            for part in parts:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name.startswith("test_"):
                    own = [rule for decorator in part.decorator_list for rule in _rules(decorator)]
                    within = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
                    for rule in dict.fromkeys([*of_file, *of_class, *own]):
                        found.setdefault(rule, []).append(f"{name}::{within}{part.name}")
    return found


def _is_pytestmark(node: ast.stmt) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in targets)


def _rules(node: ast.AST) -> list[str]:
    """The ids in `mark.rule(…)` anywhere within, such as in a list of marks or of a parameter's."""
    return [
        str(word.value)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "rule"
        for word in call.args
        if isinstance(word, ast.Constant)
    ]
