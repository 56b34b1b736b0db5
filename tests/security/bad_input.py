"""The table of bad input: what is said or done to an agent to break it. Each entry is tried by a test that is marked with it,
`@pytest.mark.bad_input("slow-loris")`, at every door where it can be said.

No exception comes of it but the protocol's own, nothing outside is touched, the connection is closed cleanly, and an event
is kept.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

ENTRIES = {
    "garbage": "bytes that are nothing",
    "truncated": "a frame that is cut off",
    "too-long": "a frame that claims 4 GiB",
    "slow-loris": "one byte a second",
    "wrong-ca": "a certificate of another CA",
    "expired": "a certificate that has expired",
    "skewed-clock": "a certificate of a clock that is off",
    "duplicate-node": "a second node of the same name",
    "replayed-join": "a request to join that was made before",
    "foreign-result": "RESULT of a task that was never given to the sender",
    "foreign-commit": "COMMIT of somebody who is not the task's home",
    "id-prefix": "the name of a task whose home's name begins with the sender's",
    "attempt-2-63": "an attempt that no 64-bit number holds",
    "negative-size": "a size below zero",
    "path-outside": "../../etc/passwd as the name of a file",
    "swapped-link": "a symbolic link put in a file's place",
    "hard-link": "a hard link to a file of another",
    "fifo": "a FIFO in a file's place",
    "growing-file": "a file that grows while it is copied",
    "terminal-escape": "title and clipboard escapes in a task's name",
    "log-newline": "a line break in what goes into the log",
    "fork-bomb": "a task that makes processes without end",
    "memory-bomb": "a task that takes memory without end",
    "disk-filler": "a task that writes without end",
    "tiny-outputs": "a task that writes a million times a little",
    "stop-own-group": "a task that stops its own process group",
    "ptrace": "a task that traces the agent",
    "kill-launcher": "a task that kills the process that started it",
    "agent-socket": "a task that writes to the agent's socket",
}


def tried() -> dict[str, list[str]]:
    """Entry → the tests that try it, `tests/…/test_x.py::test_y`."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.bad_input" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for call in node.decorator_list:
                if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("mark.bad_input"):
                    for word in call.args:
                        entry = ast.literal_eval(word)
                        found.setdefault(entry, []).append(f"{path.relative_to(ROOT).as_posix()}::{node.name}")
    return found
