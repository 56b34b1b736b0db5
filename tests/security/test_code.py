"""What the code does not do at all: fetch anything from an address that somebody has named."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
FETCHING_MODULES = {"aiohttp", "ftplib", "http.client", "httpx", "requests", "urllib.request", "urllib3", "xmlrpc"}
ASKING = {"peerload/web/server.py": {"http.client"}, "peerload/notification.py": {"urllib.request"}}
"""`peerload web --open` asks the web server of the same user for a visit; its address is that of the settings. Notifications are
posted where a user or the settings say, by a process of their own; no body of an answer is read."""


def imported(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def fetching(text: str) -> set[str]:
    if not re.search("|".join(name.partition(".")[0] for name in FETCHING_MODULES), text):
        return set()  # most files need not be parsed
    return {
        module
        for module in imported(text)
        if any(module == name or module.startswith(f"{name}.") for name in FETCHING_MODULES)
    }


@pytest.mark.rule("S15")
def test_nothing_is_fetched_from_a_url() -> None:
    paths = [path for top in ("peerload", "policies") for path in (ROOT / top).rglob("*.py")]
    assert len(paths) > 300
    found = {str(path.relative_to(ROOT)): fetching(path.read_text(encoding="utf-8")) for path in paths}
    assert {path: modules for path, modules in found.items() if modules} == ASKING


@pytest.mark.rule("S15")
@pytest.mark.parametrize("line", ["import urllib.request", "from urllib import request", "import requests.sessions"])
def test_what_would_fetch_is_found(line: str) -> None:
    assert fetching(line)
