"""Finds policies by name and builds presets from TOML. The shipped policies have no privilege here.

A policy is named ``single-threshold`` (an entry point of the group `peerload.policies`, called
``transfer.single-threshold`` there) or ``path/to/file.py:Class``. A preset is the name of a shipped one
(`policies/presets/<name>.toml`) or the path of a TOML file.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.resources
import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from peerload.model.errors import ConfigError
from peerload.policy.preset import KINDS, PolicySet

GROUP = "peerload.policies"
DEFAULT_PRESET = "adaptive"
DEFAULTS = {
    "load": "tasks",
    "transfer": "single-threshold",
    "selection": "oldest",
    "information": "poll",
    "location.sender": "none",
    "location.receiver": "none",
    "location.pairing": "none",
    "priority": "fcfs",
    "migration": "irrevocable",
}
"""What a preset gets for a kind it does not mention."""


def policies() -> dict[str, list[str]]:
    """kind → the names of its registered members, sorted."""
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for entry in importlib.metadata.entry_points(group=GROUP):
        kind, _, name = entry.name.rpartition(".")
        if kind in found:
            found[kind].append(name)
    return {kind: sorted(names) for kind, names in found.items()}


def presets() -> list[str]:
    """The names of the shipped presets, sorted."""
    directory = importlib.resources.files("peerload_policies") / "presets"
    return sorted(entry.name.removesuffix(".toml") for entry in directory.iterdir() if entry.name.endswith(".toml"))


def policy_class(kind: str, name: str, base: Path = Path()) -> type:
    """The class of one policy; a file's path counts from ``base``. Raises ConfigError naming kind and allowed names."""
    if ".py:" in name:
        return _class_from_file(kind, name, base)
    for entry in importlib.metadata.entry_points(group=GROUP, name=f"{kind}.{name}"):
        loaded = entry.load()
        if isinstance(loaded, type):
            return loaded
        raise ConfigError(f"{kind}.policy", f"{name!r} is not a class")
    allowed = policies()[kind]
    near = difflib.get_close_matches(name, allowed, 1)
    raise ConfigError(
        f"{kind}.policy",
        f"no policy named {name!r}",
        why=f"there are {', '.join(allowed) or 'none'}",
        hint=f"did you mean {near[0]!r}?" if near else "your own is named path/to/file.py:Class",
    )


def load_preset(name: str) -> PolicySet:
    """A preset by name or path. Raises ConfigError naming the key and what is allowed."""
    short, table = _read(name)
    return build_preset(short, table, Path(name).parent if name.endswith(".toml") else Path())


def build_preset(name: str, table: dict[str, Any], base: Path = Path()) -> PolicySet:
    """A preset from its tables (as TOML gives them); ``base``: where a policy's own file is looked for."""
    tables = _flatten(table)
    names = {kind: str(tables.get(kind, {}).get("policy", DEFAULTS[kind])) for kind in KINDS}
    built: dict[str, Any] = {kind: _build(kind, names[kind], tables.get(kind, {}), base) for kind in KINDS}
    return PolicySet(
        name=name,
        description=str(table.get("description", "")),
        load=built["load"],
        transfer=built["transfer"],
        selection=built["selection"],
        information=built["information"],
        sender=built["location.sender"],
        receiver=built["location.receiver"],
        pairing=built["location.pairing"],
        priority=built["priority"],
        migration=built["migration"],
        memory=_memory(table),
        names=names,
    )


def _read(name: str) -> tuple[str, dict[str, Any]]:
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise ConfigError("policy", f"no such file: {name}", hint="peerload policy ls")
        text, short = path.read_text(encoding="utf-8"), path.stem
    elif name in presets():
        resource = importlib.resources.files("peerload_policies") / "presets" / f"{name}.toml"
        text, short = resource.read_text(encoding="utf-8"), name
    else:
        near = difflib.get_close_matches(name, presets(), 1)
        raise ConfigError(
            "policy",
            f"no preset named {name!r}",
            why=f"there are {', '.join(presets())}",
            hint=f"did you mean {near[0]!r}?" if near else "your own is a path that ends in .toml",
        )
    try:
        return short, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("policy", f"{name} is not TOML", why=str(error)) from None


def _flatten(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The preset's tables by kind; ``[location.sender]`` lies one deeper."""
    tables: dict[str, dict[str, Any]] = {}
    for key, value in table.items():
        if key == "description":
            continue
        parts = {key: value}
        if key == "location" and isinstance(value, dict):
            parts = {f"location.{side}": inner for side, inner in value.items() if side != "memory"}
        for kind, inner in parts.items():
            if kind not in KINDS or not isinstance(inner, dict):
                raise ConfigError(kind, "no such table in a preset", why=f"there are {', '.join(KINDS)}, description")
            tables[kind] = inner
    return tables


def _memory(table: dict[str, Any]) -> bool:
    memory = table.get("location", {}).get("memory", False)
    if not isinstance(memory, bool):
        raise ConfigError("location.memory", f"{memory!r} is neither true nor false")
    return memory


def _build(kind: str, name: str, table: dict[str, Any], base: Path) -> object:
    chosen = policy_class(kind, name, base)
    parameters = {key: value for key, value in table.items() if key != "policy"}
    try:
        policy: object = msgspec.convert(parameters, chosen)
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        allowed = ", ".join(getattr(chosen, "__struct_fields__", ())) or "none"
        raise ConfigError(f"{kind}", f"{name}: {error}", why=f"its parameters are: {allowed}") from None
    if not isinstance(policy, KINDS[kind]):
        raise ConfigError(f"{kind}.policy", f"{name!r} does not fulfil {KINDS[kind].__name__}")
    return policy


def _class_from_file(kind: str, name: str, base: Path) -> type:
    written, _, class_name = name.rpartition(":")
    path = str(base / written)
    spec = importlib.util.spec_from_file_location(f"peerload_policy_{Path(path).stem}", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ConfigError(f"{kind}.policy", f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may fail in any way; we say how
        raise ConfigError(f"{kind}.policy", f"{path} cannot be loaded", why=repr(error)) from error
    loaded = getattr(module, class_name, None)
    if not isinstance(loaded, type):
        raise ConfigError(f"{kind}.policy", f"{path} has no class {class_name!r}")
    return loaded
