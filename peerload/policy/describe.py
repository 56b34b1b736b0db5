"""Descriptions of policies and presets for people: purpose, parameters, values and meaning."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from peerload.model.errors import ConfigError
from peerload.policy import registry
from peerload.policy.api import POLICY_FAILURES
from peerload.policy.preset import (
    KINDS,
    REFERENCE,
    LintWarning,
    Parameter,
    PolicySet,
    lint_warnings,
    made,
    near,
    parameters,
    protocol_members,
    why_not_fulfilled,
)

SOURCE = re.compile(r"\[(RM|[A-Z][A-Za-z]+\d\d)\]")
"""Pattern of a citation; docs/references.md lists the sources."""


class PolicyDescription(msgspec.Struct, frozen=True):
    """Description of one policy. says: its purpose; good, bad: conditions under which it is ("" if not stated); target:
    ``module:Class`` or the file."""

    kind: str
    name: str
    says: str
    good: str
    bad: str
    sources: tuple[str, ...]
    target: str
    parameters: tuple[Parameter, ...]


class ChosenPolicy(msgspec.Struct, frozen=True):
    """Policy of one kind in a preset. written: the preset names it, it is no default; values: of its parameters, by
    name."""

    member: PolicyDescription
    written: bool
    values: dict[str, Any]


class PresetDescription(msgspec.Struct, frozen=True):
    """Description of a preset, kind by kind. classes: its place in the taxonomy; reference: its changes for the
    reference model, from its tables."""

    name: str
    description: str
    classes: tuple[str, ...]
    file: str
    memory: bool
    chosen: tuple[ChosenPolicy, ...]
    reference: dict[str, Any]
    doubts: tuple[LintWarning, ...]


class CheckedPolicy(msgspec.Struct, frozen=True):
    """Result of checking a preset: the preset, or None and its mistakes."""

    preset: PolicySet | None
    mistakes: list[ConfigError]
    doubts: list[LintWarning]


def check(name: str) -> CheckedPolicy:
    """Find every mistake in a preset, or build the preset and lint it. Raises ConfigError if it cannot be read."""
    short, table, base, places = registry.read_preset(name)
    preset, mistakes = registry.try_preset(short, table, base, places)
    return CheckedPolicy(
        preset, mistakes, [] if preset is None else lint_warnings(preset, places.file, table.get("transfer", {}))
    )


def preset(name: str) -> PresetDescription:
    """Describe a preset, by name or path. Raises ConfigError as `registry.load_preset` does."""
    short, table, base, places = registry.read_preset(name)
    built = registry.build_preset(short, table, base, places)
    chosen = []
    for kind, of_kind in built.names.items():
        policy = registry.policy_class(kind, of_kind, base)
        written = table
        for part in kind.split("."):
            written = written.get(part, {})
        values = {parameter.name: parameter.default for parameter in parameters(policy)}
        values |= {key: value for key, value in written.items() if key in values}
        chosen.append(ChosenPolicy(member(kind, of_kind, policy), "policy" in written, values))
    told = lint_warnings(built, places.file, table.get("transfer", {}))
    reference = table.get(REFERENCE, {})
    return PresetDescription(
        short, built.description, built.classes, places.file, built.memory, tuple(chosen), reference, tuple(told)
    )


def member(kind: str, name: str, policy: type) -> PolicyDescription:
    """Describe a policy by its class."""
    says, good, bad = _parted(inspect.cleandoc(policy.__doc__ or ""))
    module = sys.modules.get(policy.__module__)
    about = f"{policy.__doc__ or ''} {module.__doc__ if module is not None and module.__doc__ else ''}"
    return PolicyDescription(
        kind=kind,
        name=name,
        says=says,
        good=good,
        bad=bad,
        sources=tuple(dict.fromkeys(SOURCE.findall(about))),
        target=name if ".py:" in name else f"{policy.__module__}:{policy.__qualname__}",
        parameters=parameters(policy),
    )


def find_policy(name: str) -> PolicyDescription:
    """A policy by ``kind.name``, by a name that only one kind has, or as ``path/to/file.py:Class``. Raises ConfigError."""
    if ".py:" in name:
        policy = registry.class_from_file(name, Path())
        return member(_kind_of(policy, name), name, policy)
    every = registry.policies()
    kind, _, short = name.rpartition(".")
    if kind:
        if kind not in every:
            raise ConfigError(
                "policy", f"no kind {kind!r}", why=f"there are {', '.join(every)}", hint=near(kind, every)
            )
        return member(kind, short, registry.policy_class(kind, short))
    kinds = [kind for kind, names in every.items() if name in names]
    if len(kinds) == 1:
        return member(kinds[0], name, registry.policy_class(kinds[0], name))
    if kinds:
        full = "  ".join(f"{kind}.{name}" for kind in kinds)
        raise ConfigError("policy", f"more than one kind has a {name!r}", hint=f"which is meant?  {full}")
    names = [*registry.presets(), *dict.fromkeys(one for of_kind in every.values() for one in of_kind)]
    raise ConfigError(
        "policy", f"no preset and no policy named {name!r}", hint=near(name, names, "all of them:  peerload policy ls")
    )


def _kind_of(policy: type, name: str) -> str:
    """Kind of a class from a file: of the kinds whose methods it has, the one with most methods."""
    required = {parameter.name: parameter.default for parameter in parameters(policy) if parameter.required}
    if required:
        raise ConfigError(
            "policy",
            f"{name} needs {', '.join(required)}",
            hint="show a preset that gives them:  peerload policy show FILE.toml",
        )
    try:
        policy_made = made(policy, {})
    except POLICY_FAILURES as error:
        raise ConfigError("policy", f"{name} cannot be made", why=f"{type(error).__name__}: {error}") from error
    fulfilled = [kind for kind in KINDS if not why_not_fulfilled(kind, policy_made)]
    if not fulfilled:
        wanted = "; ".join(f"{kind}: {', '.join(protocol_members(kind))}" for kind in KINDS)
        raise ConfigError("policy", f"{name} is a policy of no kind", why=f"what they have: {wanted}")
    return max(fulfilled, key=lambda kind: len(protocol_members(kind)))


def _parted(text: str) -> tuple[str, str, str]:
    """Split a docstring into purpose, good and bad, each on one line."""
    says, _, rest = text.partition("\nGood: ")
    good, _, bad = rest.partition("\nBad: ")
    return _plain(says), _plain(good), _plain(bad)


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")


def plain(value: PolicyDescription | PresetDescription) -> dict[str, Any]:
    """Plain dicts and lists of a description, for JSON."""
    told: dict[str, Any] = msgspec.to_builtins(value)
    return told
