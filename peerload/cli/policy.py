"""`peerload policy`: the policies there are, what each is and what its knobs do; and whether a preset is sound.

The only verb besides `agent`, `demo` and `sim` that sees the policies themselves: no agent is needed to ask about them.
"""

from __future__ import annotations

import sys

from peerload.cli.main import CANNOT, UsageError
from peerload.cli.options import Options
from peerload.cli.text import print_json, printable, say
from peerload.client import Client
from peerload.model.errors import AgentUnavailable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from argparse import Namespace
    from typing import Any

    from peerload.policy.describe import Checked

AGENT_S_MAX = 2.0
"""An agent that does not say within this what it plays is not waited for."""
WORDS = {"ls": 0, "show": 1, "check": 1}
"""What may follow the verb, and how many names each takes."""


def main(words: list[str]) -> int:
    """Run the verb."""
    reader = Options(
        "policy",
        "ls: the presets, and the policies kind by kind. show NAME: what a preset (threshold, mine.toml) or a policy\n"
        "(transfer.double-threshold, mine.py:Class) is, and what its parameters mean. check FILE: whether a preset is sound.",
        usage="[ls | show NAME | check FILE]",
    )
    reader.add_argument("what", nargs="?", default="ls", metavar="ls | show | check")
    reader.add_argument("name", nargs="*", metavar="NAME")
    flags = reader.read(words)
    if flags.what not in WORDS:
        raise UsageError(f"policy: no such word: {flags.what!r}", hint="there are:  peerload policy ls | show | check")
    if len(flags.name) != WORDS[flags.what]:
        takes = "one name" if WORDS[flags.what] else "no name"
        raise UsageError(f"policy {flags.what} takes {takes}", hint="what it takes:  peerload policy --help")
    return {"ls": _ls, "show": _show, "check": _check}[flags.what](flags)


def _ls(flags: Namespace) -> int:
    from peerload.policy import describe, registry

    in_force = _in_force(flags)
    if flags.json:
        print_json({"policies": registry.policies(), "presets": registry.presets(), "in_force": in_force})
        return 0
    chosen = str((in_force or {}).get("preset", ""))
    lines = ["presets"]
    width = max(len(name) for name in registry.presets())
    for name in registry.presets():
        mark = "*" if name == chosen else " "
        lines.append(f"{mark} {name.ljust(width)}  {describe.preset(name).description}")
    if in_force is None:
        lines += ["", "no agent is running here: none is in force"]
    else:
        lines += ["", f"in force *  {printable(chosen)}", *_kinds(in_force)]
    lines += ["", "policies"]
    width = max(len(kind) for kind in registry.policies())
    lines += [f"  {kind.ljust(width)}  {'  '.join(names)}" for kind, names in registry.policies().items()]
    lines += ["", "what one is:  peerload policy show NAME        of your own:  peerload policy check FILE.toml"]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _in_force(flags: Namespace) -> dict[str, Any] | None:
    """What the agent plays; None if there is no agent, unless the command line named one."""
    try:
        with Client(flags.socket, timeout_s=AGENT_S_MAX) as client:
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
        shown = describe.preset(name)
        if flags.json:
            print_json(describe.plain(shown))
            return 0
        from peerload.cli.policy_text import preset_lines

        lines = preset_lines(shown)
    else:
        found = describe.find_member(name)
        if flags.json:
            print_json(describe.plain(found))
            return 0
        from peerload.cli.policy_text import member_lines

        lines = member_lines(found)
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _check(flags: Namespace) -> int:
    from peerload.model.errors import ConfigError
    from peerload.policy import describe, registry

    (name,) = flags.name
    if not name.endswith(".toml") and name not in registry.presets():
        raise UsageError(
            f"policy check: {name!r} is no preset", hint="a preset of your own is a file that ends in .toml"
        )
    try:
        checked = describe.check(name)
    except ConfigError as error:
        checked = describe.Checked(None, [error], [])
    if flags.json:
        print_json(_as_json(name, checked))
    else:
        for mistake in checked.mistakes:
            say(str(mistake), mistake.hint)
        for doubt in checked.doubts:
            say(f"{doubt} (it plays all the same)")
        if checked.preset is not None:
            chosen = "  ".join(f"{kind} {policy}" for kind, policy in checked.preset.names.items())
            memory = "  with memory" if checked.preset.memory else ""
            sys.stdout.write(f"{printable(name)}: ok: {printable(chosen)}{memory}\n")
    return 0 if checked.preset is not None else CANNOT


def _as_json(name: str, checked: Checked) -> dict[str, Any]:
    return {
        "preset": name,
        "ok": checked.preset is not None,
        "chosen": checked.preset.names if checked.preset is not None else None,
        "mistakes": [
            {
                "file": one.file or None,
                "line": one.line or None,
                "key": one.key,
                "what": one.says,
                "why": one.why,
                "hint": one.hint,
            }
            for one in checked.mistakes
        ],
        "doubts": [
            {"file": one.file or None, "line": one.line or None, "key": one.key, "what": one.says}
            for one in checked.doubts
        ],
    }
