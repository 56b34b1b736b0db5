"""Rule C1: what can run code because of the data it reads is found by the lint, each of it, and is nowhere let pass but once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FORBIDDEN = {
    "pickle": "import pickle\n",
    "pickle, by name": "from pickle import loads\n",
    "marshal": "import marshal\n",
    "shelve": "import shelve\n",
    "cloudpickle": "import cloudpickle\n",
    "eval": "eval(input())\n",
    "exec": "exec(input())\n",
    "yaml.load": "import yaml\n\nyaml.load(input())\n",
    "tarfile": "import tarfile\n",
    "zipfile.extractall": "import zipfile\n",
    "unpack_archive": "import shutil\n\nshutil.unpack_archive(input())\n",
    "shell=True": "import subprocess\n\nsubprocess.run(input(), shell=True)\n",
    "os.system": "import os\n\nos.system(input())\n",
    "os.popen": "import os\n\nos.popen(input())\n",
    "create_subprocess_shell": "import asyncio\n\nasyncio.create_subprocess_shell(input())\n",
    "tempfile.mktemp": "import tempfile\n\ntempfile.mktemp()\n",
}
CODES = {"S102", "S301", "S302", "S306", "S307", "S506", "S602", "S604", "S605", "S202", "TID251"}
LET_PASS = {
    "peerload/client/call.py": ["TID251"],
    "peerload/client/function.py": ["TID251"],
}
"""The function that a user submits, and its outcome: bytes to every agent, launcher and node in between."""


def refused(directory: Path) -> dict[str, set[str]]:
    """File name → what the lint says of it, as the project's own settings have it."""
    command = [sys.executable, "-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    done = subprocess.run(
        [*command, "--output-format", "json", str(directory)], capture_output=True, text=True, check=False, timeout=60
    )
    found: dict[str, set[str]] = {}
    for one in json.loads(done.stdout):
        found.setdefault(Path(one["filename"]).name, set()).add(one["code"])
    return found


@pytest.mark.rule("C1")
@pytest.mark.rule("S20")
def test_each_of_them_is_found(tmp_path: Path) -> None:
    for number, text in enumerate(FORBIDDEN.values()):
        (tmp_path / f"n{number}.py").write_text(text, encoding="utf-8")
    (tmp_path / "validation.py").write_text('"""Nothing."""\n', encoding="utf-8")
    found = refused(tmp_path)
    passed = [name for number, name in enumerate(FORBIDDEN) if not found.get(f"n{number}.py", set()) & CODES]
    assert not passed
    assert not found.get("validation.py", set()) & CODES


@pytest.mark.rule("C1")
def test_it_is_let_pass_where_functions_travel_and_nowhere_else() -> None:
    silenced = re.compile(r"#\s*noqa(?::\s*([A-Z0-9, ]+))?")
    found: dict[str, list[str]] = {}
    for room in ("peerload", "policies"):
        for path in sorted((ROOT / room).rglob("*.py")):
            for line in path.read_text(encoding="utf-8").splitlines():
                if (word := silenced.search(line)) is not None:
                    assert word[1], f"{path}: says not what is let pass"
                    codes = sorted(CODES & set(re.findall(r"[A-Z]+[0-9]+", word[1])))
                    if codes:
                        found.setdefault(path.relative_to(ROOT).as_posix(), []).extend(codes)
    assert found == LET_PASS


@pytest.mark.rule("C1")
def test_launcher_and_agent_start_isolated() -> None:
    for file in ("peerload/agent/launcher/process.py", "peerload/cli/common/agent_process.py"):
        text = (ROOT / file).read_text(encoding="utf-8")
        started = re.findall(r"\[sys\.executable, [^\]]*\]", text)
        assert started
        assert all('"-I"' in command for command in started), started
