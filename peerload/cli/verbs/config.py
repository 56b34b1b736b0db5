"""`peerload config`: the active settings with their origins; errors in a configuration file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peerload.cli.common.agent_process import compared, default_places, default_state, given_to
from peerload.cli.common.messages import CANNOT, mistake_as_json
from peerload.cli.common.options import Options
from peerload.model.errors import UsageError
from peerload.model.text import printable
from peerload.text.format import coloured, counted, print_json, print_lines, say, table

if TYPE_CHECKING:
    from argparse import Namespace

    from peerload.model.config import AgentConfig
    from peerload.model.errors import ConfigError

AGENT_S_MAX = 2.0
VALUE_CHARACTERS_MAX = 60


def main(words: list[str]) -> int:
    reader = Options(
        "config",
        "show: the settings of the agent that runs here, else of one started now, and what a restart would change.\n"
        "check [FILE]: every error in a configuration file; without FILE in those that an agent reads.",
        usage="[show [--origin] | check [FILE]]",
    )
    reader.add_argument("what", nargs="?", default="show", metavar="show | check")
    reader.add_argument("file", nargs="*", metavar="FILE")
    reader.switch("--origin", help="show: where each setting comes from, with built-in ones")
    flags = reader.read(words)
    if flags.what not in ("show", "check"):
        raise UsageError(
            f"config: unknown action: {flags.what!r}", hint="there are:  peerload config show | check [FILE]"
        )
    if flags.what == "show":
        if flags.file:
            raise UsageError("config show takes no file", hint="to check a file:  peerload config check FILE")
        return _show(flags)
    if len(flags.file) > 1 or flags.origin:
        raise UsageError("config check takes one file and no flags", hint="what it takes:  peerload config --help")
    return _check(flags)


# -- show --------------------------------------------------------------------------------------------------------------


def _show(flags: Namespace) -> int:
    from peerload.config import loader

    environment = dict(os.environ)
    config, origins, mistake = _loaded({}, environment)
    is_named = origins.get("socket", loader.BUILT_IN) != loader.BUILT_IN
    running, node = _of_the_agent(flags, config.socket if config is not None and is_named else None)
    of_agent = {row["key"]: row["value"] for row in running or ()}
    is_service = of_agent.get("mode") == "system"
    if running is not None and is_service:
        given = {"mode": "system", "state": of_agent["state"]}
        # Where another user may not look, those in force are all that can be shown.
        can_look = os.access(of_agent["state"], os.X_OK)
        config, origins, mistake = _loaded(given, {}) if can_look else (None, {}, None)
    elif running is not None:
        usual_state = default_state() if config is None else config.state
        config, origins, mistake = _loaded(given_to(running, usual_state, environment), environment)
    else:
        if config is None:
            assert mistake is not None
            raise mistake
        running = loader.describe(config, origins)
    rows = compared(running, config, origins)
    if flags.json:
        print_json({"agent": node, "settings": rows})
        return 0
    if mistake is not None:
        say(str(mistake), mistake.hint or "an agent started now would not start:  peerload config check")
    _print(flags, rows, node, "sudo systemctl restart peerload" if is_service else "peerload down && peerload up")
    return 0


def _loaded(
    given: dict[str, Any], environment: dict[str, str]
) -> tuple[AgentConfig | None, dict[str, str], ConfigError | None]:
    """The settings of an agent started now with these flags, with their origins; or the error in them."""
    from peerload.config import loader
    from peerload.model.errors import ConfigError

    try:
        return *loader.load_with_origins(given, default_places(given), environment), None
    except ConfigError as error:
        return None, {}, error


def _of_the_agent(flags: Namespace, configured: str | None) -> tuple[list[dict[str, Any]] | None, str | None]:
    """The settings and node of the agent that runs here; None if there is none and the command line names none.
    configured: its socket, if a file or a variable names one."""
    from peerload.client.connection import AgentConnection
    from peerload.model.errors import AgentUnavailable

    place = flags.socket or os.environ.get("PEERLOAD_SOCKET") or configured
    try:
        with AgentConnection(place, timeout_s=AGENT_S_MAX) as client:
            node = str(client.call("info")["node"])
            return client.call("settings")["settings"], node
    except AgentUnavailable:
        if flags.socket:
            raise
    return None, None


def _print(flags: Namespace, rows: list[dict[str, Any]], node: str | None, restarts: str) -> None:
    shown = [
        row
        for row in rows
        if flags.origin or row["origin"] != "built-in" or row["needs_restart"] or row["key"] == "node"
    ]
    headings = ("", "SETTING", "VALUE", *(("FROM",) if flags.origin else ()), "")
    cells = [
        (
            "*" if row["needs_restart"] else "",
            row["key"],
            _value(row["value"]),
            *((row["origin"],) if flags.origin else ()),
            f"a restart makes it {_value(row['now'])} ({row['now_origin']})" if row["needs_restart"] else "",
        )
        for row in shown
    ]
    who = f"the agent that runs here ({printable(node)}):" if node else "no agent is running here; one started now:"
    lines = [who, *table(headings, cells)]
    changed = [row for row in rows if row["needs_restart"]]
    if changed:
        says = f"* {counted(len(changed), 'setting')} changed since it was started; to apply:  {restarts}"
        lines += [coloured(says, "yellow", sys.stdout)]
    if not flags.origin:
        lines += ["with defaults and origins:  peerload config show --origin"]
    print_lines(lines)


def _value(value: object) -> str:
    from peerload.text.format import shortened

    if value is None:
        return "detected"
    if value in ("", [], ()):
        return "none"
    if isinstance(value, dict):
        text = " ".join(f"{key}={_value(one)}" for key, one in value.items())
    elif isinstance(value, (list, tuple)):
        text = ", ".join(_value(one) for one in value)
    else:
        text = str(value)
    return shortened(text, VALUE_CHARACTERS_MAX)


# -- check -------------------------------------------------------------------------------------------------------------


def _check(flags: Namespace) -> int:
    from peerload.config import loader
    from peerload.model.errors import ConfigError

    environment = dict(os.environ)
    paths = [Path(name) for name in flags.file] or loader.files(None, environment)
    mistakes = [mistake for path in paths for mistake in loader.mistakes_in(path)]
    if not flags.file and not mistakes:
        try:
            loader.load({}, default_places({}), environment)  # variables, too
        except ConfigError as error:
            mistakes.append(error)
    if flags.json:
        print_json(
            {
                "files": [str(path) for path in paths],
                "ok": not mistakes,
                "mistakes": list(map(mistake_as_json, mistakes)),
            }
        )
        return CANNOT if mistakes else 0
    for mistake in mistakes:
        say(str(mistake), mistake.hint or "all settings:  peerload config show --origin")
    if not mistakes:
        named = ", ".join(printable(path) for path in paths)
        sys.stdout.write(f"{named}: ok\n" if paths else "there is no configuration file, and none is needed\n")
    return CANNOT if mistakes else 0
