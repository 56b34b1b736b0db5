"""The documentation says what is so: links lead somewhere, and drawn tables equal the code's."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from peerload.model.task import TRANSITIONS
from tests.each import each

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / "deploy").glob("*.md"),
]
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


def links(page: Path) -> list[str]:
    text = CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    return [target for target in LINK.findall(text) if "://" not in target]


@each("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    missing = [target for target in links(page) if not (page.parent / target).exists()]
    assert not missing


def test_the_walk_names_its_files_in_order() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    walk: list[str] = LINK.findall(text[text.index("## The walk") : text.index("## Inside the agent")])
    stations = (
        "peerload/cli/submit.py",
        "peerload/client.py",
        "peerload/agent/control.py",
        "peerload/agent/connection.py",
        "peerload/agent/requests.py",
        "peerload/agent/daemon.py",
        "peerload/core/node.py",
        "peerload/core/queue.py",
        "peerload/core/sharing.py",
        "peerload/core/sender.py",
        "policies/location/threshold.py",
        "peerload/core/handoff_home.py",
        "peerload/core/home.py",
        "peerload/core/handoff_executor.py",
        "peerload/agent/launcher_link.py",
        "peerload/agent/launcher.py",
    )
    places = [walk.index(f"../{station}") for station in stations]
    assert places == sorted(places)


def test_functions_named_beside_their_rule_exist() -> None:
    methods: dict[str, set[str]] = {}
    for path in (ROOT / "peerload").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
                methods.setdefault(node.name, set()).update(names)
    rules = [
        line
        for line in (ROOT / "docs/wire.md").read_text(encoding="utf-8").splitlines()
        if re.match(r"\| [DR]\d", line)
    ]
    assert len(rules) == 7 + 12
    for rule in rules:
        class_name = ""  # the first name in a row that has one, and then those it is left out for
        for named, method in re.findall(r"`(?:([A-Z]\w+)\.)?(_?[a-z][a-z_]*)`", rule.split("|")[-2]):
            class_name = named or class_name
            assert not class_name or method in methods[class_name], rule
        assert class_name, rule


def test_the_life_cycle_is_drawn_as_it_is() -> None:
    text = (ROOT / "docs/lifecycle.md").read_text(encoding="utf-8")
    drawn = re.findall(r"^ +(\w+) --> (\w+)$", text, re.MULTILINE)
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == {(state.value, after.value) for state, follows in TRANSITIONS.items() for after in follows}
    described = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert described == {state.value for state in TRANSITIONS}


def test_every_source_cited_in_the_code_is_listed() -> None:
    references = (ROOT / "docs/references.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^- \*\*\[(\w+)\]\*\*", references, re.MULTILINE))
    cited = set()
    for top in ("peerload", "policies"):
        for path in (ROOT / top).rglob("*"):
            if path.suffix in {".py", ".toml"}:
                cited |= set(re.findall(r"\[([A-Z][A-Za-z]+\d\d|RM)\]", path.read_text(encoding="utf-8")))
    assert cited <= listed


def test_decisions_are_numbered_in_order() -> None:
    names = sorted(path.name for path in (ROOT / "docs/adr").glob("*.md"))
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))
    for name in names:
        text = (ROOT / "docs/adr" / name).read_text(encoding="utf-8")
        assert text.startswith(f"# {int(name[:4])}. ")
        assert all(f"\n## {part}\n" in text for part in ("Context", "Decision", "Consequences")), name


def test_the_unit_is_sound(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    unit = (ROOT / "deploy/peerload-user.service").read_text(encoding="utf-8")
    assert "\nKillMode=process\n" in unit
    assert "%h/.local/bin/peerload" in unit
    copy = tmp_path / "peerload-user.service"
    copy.write_text(unit.replace("%h/.local/bin/peerload", "/bin/true"), encoding="utf-8")
    (tmp_path / "run").mkdir()
    done = subprocess.run(
        [analyze, "verify", "--user", "--man=no", str(copy)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "run")},
        capture_output=True,
        text=True,
        check=False,
    )
    if "Failed to initialize manager" in done.stderr:
        pytest.skip(f"systemd-analyze cannot work here: {done.stderr.strip()}")
    complaints = [line for line in done.stderr.splitlines() if "peerload-user" in line]
    complaints = [line for line in complaints if "Unknown key 'DelegateSubgroup'" not in line]  # systemd before 254
    assert not complaints


def test_the_sleep_unit_is_sound(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    copy = tmp_path / "peerload-sleep@me.service"
    unit = (ROOT / "deploy/peerload-sleep@.service").read_text(encoding="utf-8")
    copy.write_text(unit, encoding="utf-8")
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(copy)],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "Failed to initialize manager" in done.stderr:
        pytest.skip(f"systemd-analyze cannot work here: {done.stderr.strip()}")
    assert not [line for line in done.stderr.splitlines() if "peerload-sleep" in line]
    assert "peerload-user.service" in unit


def test_the_brokers_configuration_is_accepted(mosquitto: Path, tmp_path: Path) -> None:
    lines = (ROOT / "deploy/mosquitto.conf").read_text(encoding="utf-8")
    assert "\nlistener 1883 127.0.0.1\n" in lines
    configuration = tmp_path / "mosquitto.conf"
    # A socket in a directory that is not there: it reads all of the configuration, then fails at this and ends.
    nowhere = tmp_path / "no-such-directory" / "socket"
    configuration.write_text(lines.replace("listener 1883 127.0.0.1", f"listener 0 {nowhere}"), encoding="utf-8")
    done = subprocess.run(
        [str(mosquitto), "-c", str(configuration)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "unix socket" in done.stderr
    assert not re.search("unknown|recommended|deprecated|found at", done.stderr, re.IGNORECASE)
