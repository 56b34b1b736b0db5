"""Presets and policies as text: what each is, and a table of its parameters."""

from __future__ import annotations

import shutil
import textwrap

from peerload.model.text import printable
from peerload.policy.parameters import shown
from peerload.text.format import table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Any

    from peerload.policy.describe import Chosen, PolicyChoice, Preset
    from peerload.policy.parameters import Parameter

WIDTH_MAX = 100


def preset_lines(preset: Preset) -> list[str]:
    """A preset: its description, then each kind with the policy chosen, and its parameters."""
    lines = [
        *_wrapped(f"{preset.name}: {preset.description or 'it does not say what it is'}"),
        f"  {printable(preset.file)}",
    ]
    for chosen in preset.chosen:
        lines += ["", *_chosen_lines(chosen)]
    lines += ["", f"location.memory = {shown(preset.memory)}"]
    lines.append("  searches leave footprints, and follow them" if preset.memory else "  searches leave no footprints")
    if preset.reference:
        lines += ["", "in the reference model of the simulator instead:", *_changes(preset.reference)]
    for doubt in preset.doubts:
        lines += ["", *_wrapped(f"doubtful: {doubt}")]
    return lines


def _changes(tables: Mapping[str, Any], path: str = "") -> list[str]:
    """The keys of tables in tables, with their values."""
    lines: list[str] = []
    for key, value in tables.items():
        inner = f"{path}.{key}" if path else key
        lines += _changes(value, inner) if isinstance(value, dict) else [f"  {printable(inner)} = {shown(value)}"]
    return lines


def _chosen_lines(chosen: Chosen) -> list[str]:
    member = chosen.member
    by = "" if chosen.written else "   (the preset does not say; this is the default)"
    first = member.says.partition(". ")[0].rstrip(".")
    return [
        f"{member.kind} = {printable(member.name)}{by}",
        *_wrapped(f"{first}.", "  "),
        *(f"  {line}" for line in _parameter_table(member.parameters, chosen.values)),
    ]


def member_lines(member: PolicyChoice) -> list[str]:
    """A policy: what it is, when it is good and bad, and its parameters."""
    own = f"{member.kind}: {printable(member.name)}" if ".py:" in member.name else f"{member.kind}.{member.name}"
    lines = [own, *_wrapped(member.says or "It does not say what it is.", "  ")]
    lines += _wrapped(f"Good: {member.good}", "  ") if member.good else []
    lines += _wrapped(f"Bad: {member.bad}", "  ") if member.bad else []
    if member.sources:
        lines.append(f"  Sources: {', '.join(f'[{source}]' for source in member.sources)} (docs/references.md)")
    lines += ["", *(_parameter_table(member.parameters) or ["It has no parameters."])]
    return lines


def _parameter_table(parameters: Iterable[Parameter], values: Mapping[str, Any] | None = None) -> list[str]:
    rows = []
    for parameter in parameters:
        default = "must be given" if parameter.required else shown(parameter.default)
        value = [] if values is None else [shown(values[parameter.name])]
        rows.append([parameter.name, *value, default, parameter.allowed, parameter.means])
    headings = ["PARAMETER", *([] if values is None else ["VALUE"]), "DEFAULT", "ALLOWED", "MEANS"]
    return table(headings, rows) if rows else []


def _wrapped(text: str, indent: str = "") -> list[str]:
    width = min(shutil.get_terminal_size((WIDTH_MAX, 24)).columns, WIDTH_MAX)
    return textwrap.wrap(printable(text), max(width, 40), initial_indent=indent, subsequent_indent="  ")
