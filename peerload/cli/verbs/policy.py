"""`peerload policy`: list and explain policies and presets, and check a preset. It needs no agent."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from peerload.cli.common.messages import CANNOT, mistake_as_json
from peerload.cli.common.options import Options
from peerload.client.connection import AgentConnection
from peerload.model.errors import AgentUnavailable, UsageError
from peerload.model.text import printable
from peerload.text.format import counted, print_json, print_lines, print_result, say, table

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterable, Mapping

    from peerload.policy.describe import CheckedPolicy, ChosenPolicy, PolicyDescription, PresetDescription
    from peerload.policy.preset import Parameter
    from peerload.sim.rehearsal import Rehearsal

AGENT_S_MAX = 2.0
WORDS = {"ls": 0, "show": 1, "check": 1}
"""The actions, and how many names each accepts."""


def main(words: list[str]) -> int:
    reader = Options(
        "policy",
        "ls: list the presets, and the policies of each kind. show NAME: explain a preset (threshold, mine.toml) or a policy\n"
        "(transfer.double-threshold, mine.py:Class) and its parameters. check FILE: find errors in a preset.",
        usage="[ls | show NAME | check [--play] FILE]",
    )
    reader.switch("--play", help="with check: also run the preset in a short simulation, and report problems")
    reader.add_argument("what", nargs="?", default="ls", metavar="ls | show | check")
    reader.add_argument("name", nargs="*", metavar="NAME")
    flags = reader.read(words)
    if flags.what not in WORDS:
        raise UsageError(
            f"policy: unknown action: {flags.what!r}", hint="there are:  peerload policy ls | show | check"
        )
    if len(flags.name) != WORDS[flags.what]:
        takes = "one name" if WORDS[flags.what] else "no name"
        raise UsageError(f"policy {flags.what} takes {takes}", hint="what it takes:  peerload policy --help")
    if flags.play and flags.what != "check":
        raise UsageError(f"policy {flags.what} takes no --play", hint="peerload policy check --play FILE")
    return {"ls": _ls, "show": _show, "check": _check}[flags.what](flags)


def _ls(flags: Namespace) -> int:
    from peerload.policy import registry
    from peerload.policy.preset import BASELINE

    in_force = _in_force(flags)
    if flags.json:
        print_json({"policies": registry.policies(), "presets": registry.presets(), "in_force": in_force})
        return 0
    chosen = str((in_force or {}).get("preset", ""))
    lines = ["presets"]
    width = max(len(name) for name in registry.presets())
    for name in registry.presets():
        mark, preset = "*" if name == chosen else " ", registry.load_preset(name)
        note = " (baseline)" if BASELINE in preset.classes else ""
        note = " (baseline; only simulated)" if preset.is_central else note
        lines.append(f"{mark} {name.ljust(width)}  {preset.description}{note}")
    if in_force is None:
        lines += ["", "no agent is running here, so no preset is in force"]
    else:
        lines += ["", f"in force *  {printable(chosen)}", *_kinds(in_force)]
    lines += ["", "policies"]
    width = max(len(kind) for kind in registry.policies())
    lines += [f"  {kind.ljust(width)}  {'  '.join(names)}" for kind, names in registry.policies().items()]
    lines += ["", "explain one:  peerload policy show NAME        check your own:  peerload policy check FILE.toml"]
    print_lines(lines)
    return 0


def _in_force(flags: Namespace) -> dict[str, Any] | None:
    """The preset of the agent that runs here; None if there is no agent and the command line names none."""
    try:
        with AgentConnection(flags.socket, timeout_s=AGENT_S_MAX) as client:
            in_force = client.call("policy").get("in_force")
    except AgentUnavailable:
        if flags.socket:
            raise
        return None
    return in_force if isinstance(in_force, dict) else None


def _kinds(in_force: dict[str, Any]) -> list[str]:
    kinds = {key: value for key, value in in_force.items() if key not in ("preset", "description")}
    width = max((len(kind) for kind in kinds), default=0)
    return [f"  {printable(kind).ljust(width)}  {printable(name)}" for kind, name in kinds.items()]


def _show(flags: Namespace) -> int:
    from peerload.policy import describe, registry

    (name,) = flags.name
    if name.endswith(".toml") or name in registry.presets():
        preset = describe.preset(name)
        print_result(describe.plain(preset), preset_lines(preset), as_json=flags.json)
    else:
        policy = describe.find_policy(name)
        print_result(describe.plain(policy), member_lines(policy), as_json=flags.json)
    return 0


def _check(flags: Namespace) -> int:
    from peerload.model.errors import ConfigError
    from peerload.policy import describe, registry

    (name,) = flags.name
    if not name.endswith(".toml") and name not in registry.presets():
        raise UsageError(
            f"policy check: {name!r} is not a preset", hint="a preset of your own is a file that ends in .toml"
        )
    try:
        checked = describe.check(name)
    except ConfigError as error:
        checked = describe.CheckedPolicy(None, [error], [])
    played = None
    if flags.play and checked.preset is not None:
        from peerload.sim.rehearsal import rehearse

        played = rehearse(name)
    is_ok = checked.preset is not None and (played is None or played.is_good)
    if flags.json:
        print_json(_as_json(name, checked, played) | {"ok": is_ok})
        return 0 if is_ok else CANNOT
    for mistake in checked.mistakes:
        say(str(mistake), mistake.hint)
    for doubt in checked.doubts:
        say(f"{doubt} (the preset can be used anyway)")
    if played is not None:
        _say_played(name, played)
    if is_ok and checked.preset is not None:
        chosen = "  ".join(f"{kind} {policy}" for kind, policy in checked.preset.names.items())
        memory = "  with memory" if checked.preset.memory else ""
        note = f"{ONLY_SIMULATED}\n" * checked.preset.is_central
        sys.stdout.write(f"{printable(name)}: ok: {printable(chosen)}{memory}\n{note}")
        if played is not None:
            sys.stdout.write(f"simulated: {counted(played.tasks, 'task')} on {counted(played.nodes, 'node')}\n")
    return 0 if is_ok else CANNOT


def _say_played(name: str, played: Rehearsal) -> None:
    if played.shared:
        say(
            f"{printable(name)}: all nodes share {', '.join(map(printable, played.shared))}, which changed during the simulation",
            "a policy keeps its state in its instance (self.… in __init__): each node has its own, while a class or a "
            "module is shared here and by no two agents",
        )
    if played.policy_errors:
        say(
            f"{printable(name)}: a policy failed {counted(played.policy_errors, 'time')} in the simulation",
            f"the first time:  {printable(played.policy_failure)}",
        )
    if not played.repeats:
        say(
            f"{printable(name)}: the same seed gave two different runs",
            "a policy draws random numbers only from its rng, reads no clock, and keeps state in its instance",
        )


def _as_json(name: str, checked: CheckedPolicy, played: Rehearsal | None) -> dict[str, Any]:
    return {
        "preset": name,
        "played": None
        if played is None
        else {
            "nodes": played.nodes,
            "tasks": played.tasks,
            "policy_errors": played.policy_errors,
            "policy_failure": played.policy_failure or None,
            "shared": list(played.shared),
            "repeats": played.repeats,
        },
        "chosen": checked.preset.names if checked.preset is not None else None,
        "mistakes": list(map(mistake_as_json, checked.mistakes)),
        "doubts": [
            {"file": one.file or None, "line": None, "key": one.key, "what": one.says} for one in checked.doubts
        ],
    }


WIDTH_MAX = 100
ONLY_SIMULATED = "only simulated: it needs a head node, and an agent refuses it"


def preset_lines(preset: PresetDescription) -> list[str]:
    from peerload.policy.preset import CENTRAL, shown

    lines = [*_wrapped(f"{preset.name}: {preset.description or 'no description'}"), f"  {printable(preset.file)}"]
    lines += [f"  {', '.join(preset.classes)}"] * bool(preset.classes)
    lines += [f"  {ONLY_SIMULATED}"] * (CENTRAL in preset.classes)
    for chosen in preset.chosen:
        lines += ["", *_chosen_lines(chosen)]
    lines += ["", f"location.memory = {shown(preset.memory)}"]
    lines.append("  searches remember where they found room" if preset.memory else "  searches remember nothing")
    if preset.reference:
        lines += ["", "in the reference model of the simulator instead:", *_changes(preset.reference)]
    for doubt in preset.doubts:
        lines += ["", *_wrapped(f"doubtful: {doubt}")]
    return lines


def _changes(tables: Mapping[str, Any], path: str = "") -> list[str]:
    """The keys of nested tables as dotted paths, with their values."""
    from peerload.policy.preset import shown

    lines: list[str] = []
    for key, value in tables.items():
        inner = f"{path}.{key}" if path else key
        lines += _changes(value, inner) if isinstance(value, dict) else [f"  {printable(inner)} = {shown(value)}"]
    return lines


def _chosen_lines(chosen: ChosenPolicy) -> list[str]:
    member = chosen.member
    by = "" if chosen.written else "   (the default; the preset does not choose)"
    first = member.says.partition(". ")[0].rstrip(".")
    return [
        f"{member.kind} = {printable(member.name)}{by}",
        *_wrapped(f"{first}.", "  "),
        *(f"  {line}" for line in _parameter_table(member.parameters, chosen.values)),
    ]


def member_lines(member: PolicyDescription) -> list[str]:
    own = f"{member.kind}: {printable(member.name)}" if ".py:" in member.name else f"{member.kind}.{member.name}"
    lines = [own, *_wrapped(member.says or "No description.", "  ")]
    lines += _wrapped(f"Good: {member.good}", "  ") if member.good else []
    lines += _wrapped(f"Bad: {member.bad}", "  ") if member.bad else []
    if member.sources:
        lines.append(f"  Sources: {', '.join(f'[{source}]' for source in member.sources)} (docs/references.md)")
    lines += ["", *(_parameter_table(member.parameters) or ["It has no parameters."])]
    return lines


def _parameter_table(parameters: Iterable[Parameter], values: Mapping[str, Any] | None = None) -> list[str]:
    from peerload.policy.preset import shown

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
