"""Registry: finds policies by name and builds presets from TOML. The shipped policies have no privilege here.

A policy is named ``single-threshold`` (an entry point of the group `peerload.policies`, called
``transfer.single-threshold`` there) or ``path/to/file.py:Class``. A preset is the name of a shipped one
(`policies/presets/<name>.toml`) or the path of a TOML file.
"""

from __future__ import annotations

import copy
import functools
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from peerload.model.errors import ConfigError
from peerload.policy.api import POLICY_FAILURES
from peerload.policy.preset import (
    KINDS,
    NOWHERE,
    REFERENCE,
    PolicySet,
    PresetLoader,
    PresetPlaces,
    near,
    parameters,
    parsed,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

GROUP = "peerload.policies"
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
"""Default policies of the kinds that a preset does not mention."""


def policies() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for registered in _registered():
        kind, _, name = registered.rpartition(".")
        if kind in found:
            found[kind].append(name)
    return {kind: sorted(names) for kind, names in found.items()}


@functools.cache
def _registered() -> dict[str, importlib.metadata.EntryPoint]:
    """Entry points by `kind.name`. Cached, since all installed packages are searched."""
    return {entry.name: entry for entry in reversed(tuple(importlib.metadata.entry_points(group=GROUP)))}


def presets() -> list[str]:
    return sorted(path.stem for path in _presets().glob("*.toml"))


def _presets() -> Path:
    """The directory of the shipped presets."""
    return Path(importlib.import_module("peerload_policies").__path__[0], "presets")


def policy_class(kind: str, name: str, base: Path = Path()) -> type:
    """Load the class of one policy; a file's path is relative to ``base``. Raises ConfigError naming kind and allowed
    names."""
    if ".py:" in name:
        return class_from_file(name, base, key=f"{kind}.policy")
    if (entry := _registered().get(f"{kind}.{name}")) is not None:
        loaded = entry.load()
        if isinstance(loaded, type):
            return loaded
        raise ConfigError(f"{kind}.policy", f"{name!r} is not a class")
    allowed = policies()[kind]
    raise ConfigError(
        f"{kind}.policy",
        f"no policy named {name!r}",
        why=f"there are {', '.join(allowed) or 'none'}",
        hint=near(name, allowed, "your own is named path/to/file.py:Class"),
    )


class PresetSource(msgspec.Struct, frozen=True):
    """Preset as written. name: its short one; file: as its user named it, for messages; base: the directory to which
    the paths of its policies are relative."""

    name: str
    text: str
    file: str = ""
    base: str = ""

    def tables(self) -> tuple[str, dict[str, Any], Path, PresetPlaces]:
        """Arguments of `build_preset`. Raises ConfigError if the preset is not TOML."""
        table, places = parsed(self.text.encode("utf-8", "surrogateescape"), self.file)
        return self.name, table, Path(self.base), places


def load_preset(name: str, *, is_reference: bool = False, changes: Sequence[tuple[str, Any]] = ()) -> PolicySet:
    """Load a preset by name or path; ``is_reference``: with the changes of its table ``reference``, for the reference
    model, in which nothing takes time; ``changes``: new values of parameters, each by its name, or by ``kind.name`` if
    policies of several kinds have it. Raises ConfigError naming the file, the key and the allowed values, also for a
    mistake in that table."""
    short, table, base, places = read_preset(name)
    if changes:
        table = copy.deepcopy(table)
        names = build_preset(short, table, base, places).names
        for path, value in changes:
            _change(short, table, base, names, path, value)
    return build_preset(short, table, base, places, is_reference=is_reference)


def _change(preset: str, table: dict[str, Any], base: Path, names: dict[str, str], path: str, value: object) -> None:
    """Set a parameter of the policies that a preset names, also where its table ``reference`` has another value."""
    asked, _, name = path.rpartition(".")
    known = {kind: [one.name for one in parameters(policy_class(kind, names[kind], base))] for kind in KINDS}
    kinds = [kind for kind, those in known.items() if name in those and asked in ("", kind)]
    if len(kinds) != 1:
        found = [f"{kind}.{one}" for kind, those in known.items() for one in those if not kinds or one == name]
        why = f"several have it: {', '.join(found)}" if kinds else f"there are {', '.join(found)}"
        raise ConfigError(path, f"no such parameter of preset {preset!r}", why=why)
    for place in (table, table.get(REFERENCE, {})):
        inner = place
        for part in kinds[0].split("."):
            inner = inner.setdefault(part, {}) if place is table else inner.get(part, {})
        if place is table or name in inner:
            inner[name] = value


def read_preset(name: str) -> tuple[str, dict[str, Any], Path, PresetPlaces]:
    """Arguments of `build_preset` for a preset by name or path. Raises ConfigError if it does not exist or is not TOML."""
    return preset_source(name).tables()


def preset_source(name: str) -> PresetSource:
    """Read a preset by name or path. Raises ConfigError if it does not exist or cannot be read."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise ConfigError("policy", f"no such file: {name}", hint="peerload policy ls")
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise ConfigError("policy", f"{name} cannot be read", why=error.strerror or str(error)) from None
        return PresetSource(path.stem, _text(raw), name, str(path.parent.absolute()))
    if name not in presets():
        raise ConfigError(
            "policy",
            f"no preset named {name!r}",
            why=f"there are {', '.join(presets())}",
            hint=near(name, presets(), "your own is a path that ends in .toml"),
        )
    path = _presets() / f"{name}.toml"
    return PresetSource(name, _text(path.read_bytes()), str(path))


class LivePreset(NamedTuple):
    """Preset of a running agent: as written, and as built."""

    source: PresetSource
    policies: PolicySet

    @classmethod
    def read(cls, name: str) -> LivePreset:
        """Read a preset by name or path. Raises ConfigError."""
        source = preset_source(name)
        return cls(source, live_preset(source))


def live_preset(source: PresetSource) -> PolicySet:
    """Build a preset for an agent. Raises ConfigError also if only the simulator can play it."""
    preset = build_preset(*source.tables())
    if preset.is_central:
        raise ConfigError(
            "policy",
            f"{preset.name!r} can only be simulated",
            why="it needs a head node that all tasks pass through, and no agent is one",
            hint=f"peerload sim --policy {source.file if source.base else preset.name}",
        )
    return preset


def _text(raw: bytes) -> str:
    """Decode without loss: mistakes in the bytes are reported by the parser."""
    return raw.decode("utf-8", "surrogateescape")


def build_preset(
    name: str, table: dict[str, Any], base: Path = Path(), places: PresetPlaces = NOWHERE, *, is_reference: bool = False
) -> PolicySet:
    """Build a preset from its tables (as TOML gives them); ``base``: directory of a policy's own file. Raises
    ConfigError with the first mistake in it."""
    preset, mistakes = try_preset(name, table, base, places, is_reference=is_reference)
    if preset is None:
        raise mistakes[0]
    return preset


def try_preset(
    name: str, table: dict[str, Any], base: Path = Path(), places: PresetPlaces = NOWHERE, *, is_reference: bool = False
) -> tuple[PolicySet | None, list[ConfigError]]:
    """Build a preset from its tables → the preset, None if there is a mistake, and all mistakes."""
    tables = {key: value for key, value in table.items() if key != REFERENCE}
    changes = table.get(REFERENCE, {})
    if not isinstance(changes, dict):
        return None, [places.mistake((REFERENCE,), "is not a table", why="it has the changes for the reference model")]
    live, mistakes = _built(name, tables, base, places)
    if not changes or mistakes:
        return live, mistakes
    reference, mistakes = _built(name, _changed(tables, changes), base, PresetPlaces(places.file, REFERENCE))
    return (None if mistakes else reference if is_reference else live), mistakes


def _changed(table: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Apply changes to a table; a part that names another policy keeps no parameters of the former one."""
    changed = dict(table)
    for key, value in changes.items():
        before = table.get(key)
        if isinstance(value, dict) and isinstance(before, dict) and "policy" not in value:
            changed[key] = _changed(before, value)
        else:
            changed[key] = value
    return changed


def _built(
    name: str, table: dict[str, Any], base: Path, places: PresetPlaces
) -> tuple[PolicySet | None, list[ConfigError]]:
    reading = PresetLoader(table, places)
    names = {kind: reading.name(kind, DEFAULTS[kind]) for kind in KINDS}
    built: dict[str, Any] = {kind: _member(reading, kind, names[kind], base) for kind in KINDS}
    if reading.mistakes:
        return None, reading.mistakes
    preset = PolicySet(
        name=name,
        description=reading.description,
        load=built["load"],
        transfer=built["transfer"],
        selection=built["selection"],
        information=built["information"],
        sender=built["location.sender"],
        receiver=built["location.receiver"],
        pairing=built["location.pairing"],
        priority=built["priority"],
        migration=built["migration"],
        memory=reading.memory,
        names=names,
        classes=reading.classes,
    )
    return preset, []


def _member(reading: PresetLoader, kind: str, name: str, base: Path) -> object:
    try:
        chosen = policy_class(kind, name, base)
    except ConfigError as error:
        reading.not_found(kind, error)
        return None
    return reading.member(kind, name, chosen)


def class_from_file(name: str, base: Path = Path(), key: str = "policy") -> type:
    """Load the class that ``path/to/file.py:Class`` names. Raises ConfigError about ``key``."""
    written, _, class_name = name.rpartition(":")
    path = str(base / written)
    module_name = f"peerload_policy:{path}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ConfigError(key, f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # where the annotations of its classes are looked up
    try:
        spec.loader.exec_module(module)
    except POLICY_FAILURES as error:
        del sys.modules[module_name]
        raise ConfigError(key, f"{path} cannot be loaded", why=_says(error, path)) from error
    loaded = getattr(module, class_name, None)
    if not isinstance(loaded, type):
        classes = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module_name]
        why = f"there are {', '.join(classes)}" if classes else "there is none"
        raise ConfigError(key, f"{path} has no class {class_name!r}", why=why, hint=near(class_name, classes))
    return loaded


def _says(error: BaseException, path: str) -> str:
    """Message of an error in a user's file, with the last of its lines that led there."""
    line = error.lineno if isinstance(error, SyntaxError) else 0
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == path:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    says = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{f'line {line}: ' if line else ''}{type(error).__name__}: {says}"
