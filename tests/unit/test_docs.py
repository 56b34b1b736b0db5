"""What the documentation says is so: links lead to files, the drawn life cycle is that of the code, units are sound."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from peerload.agent.store.schema import KEPT_S
from peerload.core.handoff.executor import RENEWALS_PER_LEASE
from peerload.core.handoff.home import DRIFT_MAX
from peerload.core.work import HOME_TRANSITIONS, REMOTE_TRANSITIONS
from peerload.model.config import CoreConfig
from peerload.model.task import TRANSITIONS
from tests.docs_sentences import WORDS_MAX, user_pages, words_in

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / "deploy").glob("*.md"),
]
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")
FRAGMENT = re.compile(r"\[[^\]]*\]\(([^)\s]*#[^)\s]+)\)")


def links(page: Path) -> list[str]:
    text = CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    return [target for target in LINK.findall(text) if "://" not in target]


def test_links_lead_somewhere() -> None:
    links_of = {page: links(page) for page in PAGES}
    assert sum(map(len, links_of.values())) > len(PAGES)
    missing = [(page, target) for page in PAGES for target in links_of[page] if not (page.parent / target).exists()]
    assert not missing


def test_files_are_called_by_their_names() -> None:
    """A link whose text is a file's name leads to that file, and a file named in a comment exists."""
    files = [path for top in ("peerload", "policies", "tests") for path in (ROOT / top).rglob("*.py")]
    wrong = [
        (page, name, target)
        for page in PAGES
        for name, target in re.findall(r"\[([\w/]+\.py)\]\(([^)#\s]+)\)", page.read_text(encoding="utf-8"))
        if not f"/{target}".endswith(f"/{name}")
    ]
    for path in files:
        named = re.findall(r"`([a-z_][a-z_/]*\.py)`", path.read_text(encoding="utf-8"))
        wrong += [(path, name, "") for name in named if not any(f"{file}".endswith(f"/{name}") for file in files)]
    assert not wrong


def anchors(page: Path) -> set[str]:
    """The fragments that its headings can be linked by, made as GitHub makes them."""
    headings = re.findall(r"^#+ .*$", CODE_BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return set(map(anchor, headings))


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower()).replace(" ", "-")


def test_links_into_a_page_lead_to_a_heading() -> None:
    missing = []
    for page in PAGES:
        for target in FRAGMENT.findall(CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))):
            path, _, fragment = target.partition("#")
            file = page.parent / path if path else page
            if "://" not in target and file.suffix == ".md" and fragment not in anchors(file):
                missing.append((page.name, target))
    assert not missing


NEWCOMER = (
    ("Install", "install.md", "make setup"),
    ("run a command wherever there is room", "cli.md#run", "Ctrl-C"),
    ("see the output of a task", "cli.md#logs", "--follow"),
    ("run a command for many parameters", "cli.md#submit", "--param"),
    ("take files there and bring results back", "cli.md#files-that-travel", "--out"),
    ("use GPUs", "devices.md#requests", "--gpu-mem"),
    ("see why a task waits", "troubleshooting.md#my-task-does-not-start", "peerload why"),
    ("get a message when a task ends", "notifications.md", "mail:"),
    ("add or remove a machine", "quickstart.md#two-machines", "peerload invite"),
    ("start at boot, upgrade", "../deploy/README.md#for-everyone-on-this-machine", "deploy/upgrade"),
)
"""Ten tasks of a newcomer: a line of the index, the section that it links, and what stands there."""


def test_what_a_newcomer_wants_is_one_click_from_the_index() -> None:
    lines = (ROOT / "docs/index.md").read_text(encoding="utf-8").splitlines()
    for words, target, says in NEWCOMER:
        assert any(words in line and f"({target})" in line for line in lines), words
        page, _, fragment = target.partition("#")
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        starts = [
            found.start() for found in re.finditer(r"^##+ .*$", text, re.MULTILINE) if anchor(found[0]) == fragment
        ]
        start, *_ = starts if fragment else [0]
        section, _, _ = text[start:].partition("\n## ")
        assert says in (section if fragment else text), words


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs/index.md"
    linked = {(index.parent / target).resolve() for target in links(index)}
    assert {page for page in (ROOT / "docs").glob("*.md") if page != index} <= linked


def test_the_pages_for_users_stay_short() -> None:
    assert words_in(user_pages()) <= WORDS_MAX


def test_the_life_cycle_is_drawn_as_it_is() -> None:
    text = (ROOT / "docs/lifecycle.md").read_text(encoding="utf-8")
    pages = text + (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    drawings = re.findall(r"^```mermaid\nstateDiagram-v2\n(.*?)^```$", pages, re.MULTILINE | re.DOTALL)
    tables: list[Mapping[Any, Iterable[Any]]] = [TRANSITIONS, HOME_TRANSITIONS, REMOTE_TRANSITIONS]
    for drawing, table in zip(drawings, tables, strict=True):
        drawn = re.findall(r"^ +(\w+) --> (\w+)$", drawing, re.MULTILINE)
        assert sorted(drawn) == sorted(
            (state.value, after.value) for state, follows in table.items() for after in follows
        )
    described = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert described == {state.value for state in TRANSITIONS}


def test_the_figures_of_the_guarantees_are_those_of_the_code() -> None:
    core = CoreConfig()
    text = (ROOT / "docs/guarantees.md").read_text(encoding="utf-8")
    figures = (
        f"for {KEPT_S / 86_400:g} days",
        f"differ by less than {100 * DRIFT_MAX:.0f} %",
        f"*lease* of {core.lease_s:g} s",
        {4: "renewed every quarter"}[RENEWALS_PER_LEASE],
        f"; {core.lease_grace_s:g} s later home",
        f"is free after {core.reservation_s:g} s",
        f"queued after at most {core.lease_s + core.lease_grace_s:g} s",
        f"{core.lease_s:g} s to {core.lease_auto_s_max / 60:g} min",
        {60.0: "ended after a minute"}[core.frozen_kept_s],
    )
    assert [figure for figure in figures if figure not in text] == []


def test_every_source_cited_in_the_code_is_listed() -> None:
    references = (ROOT / "docs/references.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^- \*\*\[(\w+)\]\*\*", references, re.MULTILINE))
    cited = set()
    for top in ("peerload", "policies"):
        for path in (ROOT / top).rglob("*"):
            if path.suffix in {".py", ".toml"}:
                cited |= set(re.findall(r"\[([A-Z][A-Za-z]+\d\d|RM)\]", path.read_text(encoding="utf-8")))
    assert cited <= listed


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
