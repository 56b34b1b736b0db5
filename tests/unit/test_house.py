"""The house keeps its own rules: packages, pins, entry points and files that must not come back."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import peerload
from tests.each import each

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REQUIREMENTS = (ROOT / ".ci/requirements.txt").read_text(encoding="utf-8")
TOP_LEVEL = {
    ".ci", ".git", ".github", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "Makefile", "README.md", "SECURITY.md",
    "deploy", "docs", "peerload", "policies", "pyproject.toml", "tests",
}  # fmt: skip
POLICY_LINES_MAX = 150
FOLDER_FILES_MAX = 25
PARAMETERS_MAX = 7


def tracked_or_new() -> list[Path]:
    """The files of the project, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def packages_on_disk() -> set[str]:
    found = {ROOT / "policies/presets"}
    for top in ("peerload", "policies"):
        found |= {path.parent for path in (ROOT / top).rglob("*.py")}
    names = {str(path.relative_to(ROOT)).replace("/", ".") for path in found}
    return {re.sub(r"^policies\b", "peerload_policies", name) for name in names}


def pinned() -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ]+)", REQUIREMENTS, re.MULTILINE))


def test_every_package_is_listed() -> None:
    assert packages_on_disk() == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_room_has_its_import_rules() -> None:
    ruled = {room for contract in PROJECT["tool"]["importlinter"]["contracts"] for room in contract["source_modules"]}
    rooms = {name for name in packages_on_disk() if name.startswith("peerload.")}
    assert {room for room in rooms if not any(room == rule or room.startswith(f"{rule}.") for rule in ruled)} == set()
    for name in rooms:
        # The linter sees no package without it.
        assert (ROOT / name.replace(".", "/") / "__init__.py").is_file(), name


def test_every_policy_can_be_loaded() -> None:
    entries = PROJECT["project"]["entry-points"]["peerload.policies"]
    assert entries
    for name, target in entries.items():
        module, _, attribute = target.partition(":")
        assert isinstance(getattr(import_module(module), attribute), type), name


def test_every_policy_file_is_an_entry_point() -> None:
    named = {target.partition(":")[0] for target in PROJECT["project"]["entry-points"]["peerload.policies"].values()}
    files = {
        f"peerload_policies.{path.parent.name}.{path.stem}"
        for path in (ROOT / "policies").glob("*/*.py")
        if not path.stem.startswith("_")
    }
    assert {name for name in files if _defines_a_policy(name)} == named


def _defines_a_policy(module_name: str) -> bool:
    module = import_module(module_name)
    return any(isinstance(value, type) and value.__module__ == module_name for value in vars(module).values())


def test_each_dependency_is_pinned_with_hashes() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    wanted = PROJECT["project"]["dependencies"] + extras["broker"] + extras["dev"]
    names = {re.split(r"[<>=!~ \[]", requirement)[0].lower() for requirement in wanted}
    assert names <= set(pinned())
    for block in re.split(r"\n(?=\S)", REQUIREMENTS):
        if "==" in block:
            assert "--hash=sha256:" in block, block.splitlines()[0]


def test_no_file_names_a_package_index() -> None:
    words = [b"py" + b"pi." + b"org", b"index" + b"-url", b"find" + b"-links", b"trusted" + b"-host"]
    allowed = {ROOT / ".ci/lock": [b"--no-emit-" + words[1]]}  # says that none is to be named
    for path in tracked_or_new():
        content = path.read_bytes()
        for exception in allowed.get(path, []):
            content = content.replace(exception, b"")
        found = [word.decode() for word in words if word in content]
        assert not found, f"{path.relative_to(ROOT)}: {found}"
    assert "http" not in REQUIREMENTS


def test_top_level_holds_nothing_else() -> None:
    names = {path.relative_to(ROOT).parts[0] for path in tracked_or_new()}
    assert names <= TOP_LEVEL


def test_policies_stay_short() -> None:
    for path in sorted((ROOT / "policies").rglob("*.py")):
        lines = path.read_text(encoding="utf-8").count("\n")
        assert lines < POLICY_LINES_MAX, f"{path.relative_to(ROOT)} has {lines} lines"


def test_a_folder_of_many_files_says_why() -> None:
    for name in packages_on_disk():
        folder = ROOT / name.replace("peerload_policies", "policies").replace(".", "/")
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        docstring = (folder / "__init__.py").read_text(encoding="utf-8") if len(files) > FOLDER_FILES_MAX else ""
        assert len(files) <= FOLDER_FILES_MAX or f"More than {FOLDER_FILES_MAX} files, because" in docstring, name


@functools.cache
def classes() -> list[tuple[Path, ast.ClassDef]]:
    """The classes of the product with their files."""
    files = sorted([*(ROOT / "peerload").rglob("*.py"), *(ROOT / "policies").rglob("*.py")])
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    return [(path, node) for path, tree in trees.items() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def test_no_two_public_classes_share_a_name() -> None:
    files: dict[str, list[str]] = {}
    for path, node in classes():
        if not node.name.startswith("_"):
            files.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: places for name, places in files.items() if len(places) > 1} == {}


def constructor_parameters(node: ast.ClassDef) -> int:
    """The number of parameters of a class's constructor: those of its `__init__`, or the fields of a dataclass. Plain values have
    as many as they need: structs, named tuples and frozen dataclasses count as none."""
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            return len(part.args.posonlyargs + part.args.args + part.args.kwonlyargs) - 1
    made_by = [ast.unparse(decorator) for decorator in node.decorator_list]
    if not any(re.match(r"(dataclasses\.)?dataclass\b", call) and "frozen=True" not in call for call in made_by):
        return 0
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    no_parameters = re.compile(r"^ClassVar\b|^KW_ONLY$|\binit=False\b")
    return sum(
        not any(no_parameters.search(ast.unparse(side)) for side in (field.annotation, field.value) if side is not None)
        for field in fields
    )


def test_no_constructor_takes_more_than_seven_parameters() -> None:
    found = {f"{path.relative_to(ROOT)} {node.name}": constructor_parameters(node) for path, node in classes()}
    assert {name: number for name, number in found.items() if number > PARAMETERS_MAX} == {}


@each(
    ("source", "number"),
    [
        ("class A:\n def __init__(self, a, /, b, *, c): ...", 3),
        ("@dataclass(eq=False)\nclass A:\n a: A\n _: KW_ONLY\n b: B = 1\n c: int = field(default=0, init=False)", 2),
        ("@dataclass\nclass A:\n a: A\n b: ClassVar[int] = 1", 1),
        ("@dataclass(frozen=True)\nclass A:\n a: A", 0),
        ("class A(Struct):\n a: A", 0),
    ],
)
def test_collaborators_made_by_dataclass_count_as_well(source: str, number: int) -> None:
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    assert constructor_parameters(node) == number


def test_the_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", peerload.__version__)
    assert peerload.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@each("script", [".ci/setup", ".ci/run", ".ci/lock"])
def test_scripts_are_sound(script: str) -> None:
    path = ROOT / script
    assert path.stat().st_mode & 0o111
    assert re.search(r"^set -eu", path.read_text(encoding="utf-8"), re.MULTILINE)
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_too_old_a_python_is_refused_in_one_line(tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\necho 9\n")
    old.chmod(0o755)
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci/setup").write_bytes((ROOT / ".ci/setup").read_bytes())
    done = subprocess.run(
        ["bash", str(tmp_path / ".ci/setup"), "requirements"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(old)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed" in done.stderr
    assert not (tmp_path / ".venv").exists()


@each(
    ("module", "heavy"),
    [
        (
            "peerload.client.connection",
            {"asyncio", "cryptography", "dataclasses", "importlib.metadata", "msgspec", "rich", "ssl", "tomllib"},
        ),
        (
            "peerload.agent.daemon",
            {"aiomqtt", "difflib", "h11", "http.client", "paho.mqtt", "prometheus_client", "psutil"},
        ),
        (
            "peerload.agent.main, peerload.policy.registry as registry; registry.load_preset('adaptive')",
            {"logging.handlers", "pickle"},
        ),
    ],
)
def test_programs_start_without_modules_that_few_need(module: str, heavy: set[str]) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path[:0] = {sys.path!r}; import {module}; print(' '.join(sys.modules))",
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert not heavy & set(done.stdout.split())
