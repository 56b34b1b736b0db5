# ruff: noqa: PTH100, PTH102, PTH103, PTH111, PTH112, PTH118, PTH120, PTH123
# os.path, since pathlib would cost every command its quick start.
"""The flags and settings of an agent: those of `peerload agent` and `up`, and the places of an agent of one's own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from peerload.cli.common.options import Options, speed, whole
from peerload.client.connection import SYSTEM_SOCKET, user_socket_path
from peerload.model.errors import ConfigError, PeerloadError

if TYPE_CHECKING:
    from argparse import Namespace

    from peerload.model.config import AgentConfig

KEYS = (
    "node",
    "state",
    "socket",
    "listen",
    "advertise",
    "cluster",
    "peer",
    "mqtt",
    "mqtt_ca",
    "mqtt_password_file",
    "slots",
    "policy",
    "label",
    "speed",
    "record",
    "config",
)
SYSTEM_STATE = "/var/lib/peerload"
_REPEATABLE = ("peer", "mqtt", "label")


def agent_options(verb: str, says: str) -> Options:
    """The flags of the verb; each of them but --json is a setting of the agent."""
    reader = Options(verb, says)
    reader.flag("--node", metavar="NAME", help="name of this node (default: the host's)")
    reader.flag("--state", metavar="DIR", help="directory of tasks and outputs")
    reader.flag("--listen", metavar="HOST:PORT", help="address for the peers (default 127.0.0.1:0)")
    reader.flag("--advertise", metavar="HOST:PORT", help="address that others dial, if it is another one")
    reader.flag("--cluster", metavar="DIR", help="the cluster's directory, made by `peerload cluster init`")
    reader.flag("--peer", action="append", metavar="HOST:PORT", help="a member of the cluster to join (repeatable)")
    reader.flag("--mqtt", action="append", metavar="URL", help="an MQTT broker (repeatable: for fail-over)")
    reader.flag("--mqtt-ca", metavar="FILE|system", help="CA of the broker's certificate (default: the cluster's)")
    reader.flag("--mqtt-password-file", metavar="FILE", help="a private file with USER:PASSWORD, for the broker")
    reader.flag("--slots", type=whole(0, 65_536), metavar="N", help="tasks at a time (default: as the cpus allow)")
    reader.flag("--policy", metavar="NAME|FILE", help="the preset of policies")
    reader.flag("--label", action="append", metavar="L", help="a label of this node (repeatable)")
    reader.flag(
        "--speed", type=speed, metavar="F", help="speed relative to the reference machine (default: measured once)"
    )
    reader.flag("--record", metavar="FILE", help="record every event and decision in this file, for `peerload replay`")
    reader.flag("--config", metavar="FILE", help="a configuration file")
    if verb == "agent":
        reader.switch("--system", help="serve all users of this machine, as its service")
    return reader


def given_settings(flags: Namespace) -> dict[str, Any]:
    """The settings that the flags give; repeatable ones as lists, files with absolute paths (an agent works in /)."""
    given = {key: value for key in KEYS if (value := getattr(flags, key)) is not None}
    for key in ("config", "policy"):
        if str(given.get(key, "")).endswith(".toml"):
            given[key] = os.path.abspath(given[key])
    for key in ("record", "cluster", "mqtt_ca", "mqtt_password_file"):
        if given.get(key) and given[key] != "system":
            given[key] = os.path.abspath(given[key])
    if any(":" in url.partition("://")[2].rpartition("@")[0] for url in given.get("mqtt", ())):
        why = "every user of this machine can read it there"
        hint = "write USER:PASSWORD into a file, then:  chmod 600 FILE ; peerload up --mqtt mqtts://HOST --mqtt-password-file FILE"
        raise ConfigError("mqtt", "no password on a command line", why=why, hint=hint)
    if getattr(flags, "system", False):
        given["mode"] = "system"
    return given


def default_places(settings: dict[str, Any]) -> dict[str, Any]:
    """The default state directory and socket of an agent with these settings."""
    if settings.get("mode") == "system":
        return {"state": SYSTEM_STATE, "socket": SYSTEM_SOCKET}
    return {"state": default_state(), "socket": settings.get("socket") or user_socket_path()}


def as_words(settings: dict[str, Any]) -> list[str]:
    """The settings as flags again."""
    words = []
    for key, value in settings.items():
        for one in value if key in _REPEATABLE else [value]:
            words += [f"--{key.replace('_', '-')}", str(one)]
    return words


def located(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with `state` and `socket` decided: flag, else variable, else config file, else the user's own."""
    configured = _config_file(settings)
    state = settings.get("state") or os.environ.get("PEERLOAD_STATE") or configured.get("state") or default_state()
    own = settings.get("socket") or os.environ.get("PEERLOAD_SOCKET") or configured.get("socket") or user_socket_path()
    return {**settings, "state": os.path.abspath(str(state)), "socket": os.path.abspath(str(own))}


def configured(given: dict[str, Any]) -> Any:  # noqa: ANN401 -- the agent's settings, whose type only the agent names
    """The settings that an agent started here would have."""
    from peerload.config import loader

    defaults = {"state": default_state(), "socket": given.get("socket") or user_socket_path()}
    return loader.load(given, defaults, loader.environment_now())


def default_state() -> str:
    """`$XDG_STATE_HOME/peerload`, else `~/.local/state/peerload`."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, "peerload")


def make_private(directory: str) -> None:
    """Make a directory that only this user can enter, if it does not exist. Raises PeerloadError."""
    try:
        os.makedirs(os.path.dirname(directory), exist_ok=True)
        if not os.path.isdir(directory):
            os.mkdir(directory, 0o700)
    except OSError as error:
        raise PeerloadError(f"{directory} cannot be made", why=error.strerror or str(error)) from None


def _config_file(settings: dict[str, Any]) -> dict[str, Any]:
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    named = settings.get("config") or os.environ.get("PEERLOAD_CONFIG")
    path = named or os.path.join(base, "peerload", "config.toml")
    import tomllib

    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError as error:
        if named:
            raise ConfigError("config", f"{path} cannot be read", why=error.strerror or "") from None
        return {}
    except OSError as error:
        raise ConfigError("config", f"{path} cannot be read", why=error.strerror or "") from None
    except ValueError as error:
        raise ConfigError("config", f"{path} is not valid TOML", why=str(error)) from None


def compared(
    settings: list[dict[str, Any]], config: AgentConfig | None, origins: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """Each setting in force as `key value origin now now_origin needs_restart`. now: the value that an agent started now would have.
    A setting from a flag or a variable needs no restart, though a file differs."""
    from peerload.config import loader
    from peerload.config.check import describe

    now = {one["key"]: one for one in (describe(config, origins or {}) if config is not None else settings)}
    rows = []
    for one in settings:
        later = now.get(one["key"], one)
        origin = one["origin"]
        same = later["value"] == one["value"]
        if same and origin == loader.FLAG and one["key"] in ("state", "socket"):
            origin = later["origin"]  # `up` passes both on the agent's command line, wherever they come from
        given = origin in (loader.FLAG, loader.ENVIRONMENT)
        rows.append(
            {
                **one,
                "origin": _named(origin, one["key"]),
                "now": later["value"],
                "now_origin": _named(str(later["origin"]), str(one["key"])),
                "needs_restart": not same and not given,
            }
        )
    return rows


def _named(origin: str, key: str) -> str:
    return f"PEERLOAD_{key.upper()}" if origin == "environment" else origin
