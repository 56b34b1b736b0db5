"""The settings in force: flag, `PEERLOAD_*` variable, user file, conf.d, system file, built-in, in that order.

Every key of `AgentConfig` can be set in each of these places. A key that does not exist or a value that cannot be used
raises ConfigError naming the key and where it stands.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
import tomllib
from pathlib import Path
from typing import Any

import msgspec

from peerload.model.config import AgentConfig, GpuConfig, GpuSettings
from peerload.model.errors import ConfigError
from peerload.wire.expected import in_words

SYSTEM_FILE = Path("/etc/peerload/peerload.toml")
SYSTEM_DIRECTORY = Path("/etc/peerload/conf.d")
KEYS = AgentConfig.__struct_fields__
TABLES = ("gpu", "device")
"""Keys that are tables of a file, and nothing else."""
ENVIRONMENT = "environment"
LISTS = ("peer", "mqtt", "label")
NODE_NAME_LENGTH_MAX = 40


def load(flags: dict[str, Any], defaults: dict[str, Any], environment: dict[str, str]) -> AgentConfig:
    """The settings of one agent.

    ``flags`` holds only what was given (``config`` names another user file); ``defaults`` where things are for this
    user (``state``, ``socket``). Raises ConfigError.
    """
    given = dict(flags)
    named_file = given.pop("config", None)
    layers: list[tuple[str, dict[str, Any]]] = [("built-in", {**defaults, "node": default_node_name()})]
    layers += [(str(path), _file(path)) for path in _files(named_file, environment)]
    layers.append((ENVIRONMENT, _environment(environment)))
    layers.append(("flag", given))
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for place, layer in layers:
        for key, value in layer.items():
            if key not in KEYS:
                near = difflib.get_close_matches(key, KEYS, 1)
                raise ConfigError(key, f"no such setting ({place})", hint=f"did you mean {near[0]!r}?" if near else "")
            merged[key] = value
            origin[key] = place
    return _converted(merged, origin)


def _converted(merged: dict[str, Any], origin: dict[str, str]) -> AgentConfig:
    """One value at a time, so that the message names the key and where it was set. Variables are text, whatever the
    type of the setting: `PEERLOAD_NODE=17` names a node, `PEERLOAD_SLOTS=17` is a number."""
    converted = {}
    for key, value in merged.items():
        one = {"node": "n", "state": "s", "socket": "s", key: value}
        try:
            config = msgspec.convert(one, AgentConfig, strict=origin[key] != ENVIRONMENT)
        except msgspec.ValidationError as error:
            raise ConfigError(
                key, f"{value!r} cannot be used ({origin[key]})", why=in_words(error).removeprefix(f"{key}: ")
            ) from None
        converted[key] = getattr(config, key)
    return AgentConfig(**converted)


_SIZES = {"B": 1} | {f"{unit}{end}": 1 << 10 * power for power, unit in enumerate("KMGT", 1) for end in ("", "IB")}
_TIMES = {"S": 1.0, "M": 60.0, "H": 3600.0, "D": 86_400.0}


def gpu_config(settings: GpuSettings) -> GpuConfig:
    """What the core is told of the table `[gpu]`. Raises ConfigError."""
    return GpuConfig(
        tasks_max=settings.max_tasks,
        memory_share_max=settings.mem_threshold,
        reserve_bytes=int(_with_unit("gpu.reserve", settings.reserve, _SIZES)),
        settle_s=settings.settle_s,
        starve_after_s=_with_unit("gpu.starve_after", settings.starve_after, _TIMES),
    )


def _with_unit(key: str, text: str, units: dict[str, int] | dict[str, float]) -> float:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]+)", text.strip())
    factor = units.get(found[2].upper()) if found is not None else None
    if found is None or factor is None:
        raise ConfigError(key, f"{text!r} cannot be used", why=f"a number and a unit, one of {' '.join(units)}")
    return float(found[1]) * factor


def default_node_name() -> str:
    """The host's name, lower-cased, other characters as ``-``, at most 40."""
    name = re.sub(r"[^a-z0-9-]", "-", socket.gethostname().lower())
    return name[:NODE_NAME_LENGTH_MAX] or "node"


def _files(named: str | None, environment: dict[str, str]) -> list[Path]:
    """The files there are, the weakest first."""
    files = [SYSTEM_FILE, *sorted(SYSTEM_DIRECTORY.glob("*.toml"))]
    if named is not None:
        if not Path(named).is_file():
            raise ConfigError("config", f"no such file: {named}")
        return [path for path in files if path.is_file()] + [Path(named)]
    base = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME", "/")) / ".config")
    files.append(Path(base) / "peerload" / "config.toml")
    return [path for path in files if path.is_file()]


def _file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", f"{path} is not TOML", why=str(error)) from None
    except OSError as error:
        raise ConfigError("config", f"{path} cannot be read", why=str(error.strerror)) from None


def _environment(environment: dict[str, str]) -> dict[str, Any]:
    """PEERLOAD_NODE, PEERLOAD_PEER (comma-separated), … Variables that mean something else inside a task are not
    settings: an agent started from a task must not take that task's node for its own name."""
    if "PEERLOAD_TASK_ID" in environment:
        return {}
    found: dict[str, Any] = {}
    for key in [key for key in KEYS if key not in TABLES]:
        value = environment.get(f"PEERLOAD_{key.upper()}")
        if value is None:
            continue
        found[key] = [part.strip() for part in value.split(",") if part.strip()] if key in LISTS else value
    return found


def environment_now() -> dict[str, str]:
    """This process's environment."""
    return dict(os.environ)
