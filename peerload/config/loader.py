"""Effective settings, by precedence: flag, `PEERLOAD_*` variable, user file, conf.d, system file, built-in.

Every key of `AgentConfig` can be set in each of these places. An unknown key or an invalid value raises ConfigError with
the key and its origin, and the agent does not start. `mistakes_in` continues after a mistake, to report all mistakes
in a file."""

from __future__ import annotations

import argparse
import functools
import os
import re
import shutil
import socket
import stat
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from peerload import notification
from peerload.energy.price import read_prices
from peerload.launcher.protocol import MPS_CONTROL
from peerload.launcher.system.settings_rules import objection
from peerload.model.config import AgentConfig, CpusSettings, EnergySettings, GpuConfig, GpuSettings, LoadSettings
from peerload.model.errors import ConfigError
from peerload.model.resources import DEVICES_MAX, GPU, Device
from peerload.policy import registry
from peerload.policy.preset import near
from peerload.security import node_identity_file
from peerload.security.address import parse_address
from peerload.security.broker import BrokerUrl, without_password
from peerload.text.units import duration, size
from peerload.text.web_address import web_address
from peerload.wire.expected import validation_error_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from peerload.model.config import DeviceConfig, FilesSettings, HooksSettings, WebSettings


SYSTEM_FILE = Path("/etc/peerload/peerload.toml")
SYSTEM_DIRECTORY = Path("/etc/peerload/conf.d")
KEYS = AgentConfig.__struct_fields__
TABLES = ("gpu", "load", "cpus", "energy", "files", "hooks", "web", "device", "users")
"""Keys that are, or may be, tables of a file."""
BUILT_IN = "built-in"
ENVIRONMENT = "environment"
FLAG = "flag"
LISTS = ("peer", "mqtt", "label")
PLACES = ("state", "socket")
"""Keys whose value in a file is an absolute path, or begins with `~`; a flag's is relative to the working directory."""
FLAG_ONLY = ("mode",)
"""Keys that neither a file nor a variable can set: a file is read by the agents of all users."""
NODE_NAME_LENGTH_MAX = 40
PRICE_BYTES_MAX = 16 << 20


def load(flags: dict[str, Any], defaults: dict[str, Any], environment: dict[str, str]) -> AgentConfig:
    """Load the settings of one agent.

    ``flags``: only the given ones (``config`` names another user file); ``defaults``: default paths of this
    user (``state``, ``socket``). Raises ConfigError.
    """
    return load_with_origins(flags, defaults, environment)[0]


def load_with_origins(
    flags: dict[str, Any], defaults: dict[str, Any], environment: dict[str, str]
) -> tuple[AgentConfig, dict[str, str]]:
    """Load the settings of one agent, and the origin of each: `built-in`, a file, ENVIRONMENT or `flag`."""
    given = dict(flags)
    named_file = given.pop("config", None)
    layers: list[tuple[str, dict[str, Any]]] = [(BUILT_IN, {**defaults, "node": default_node_name()})]
    is_system = given.get("mode") == "system"
    layers += [(str(path), _file(path)) for path in files(named_file, environment, is_system=is_system)]
    layers.append((ENVIRONMENT, _environment(environment)))
    layers.append((FLAG, given))
    state, where = _last(layers, "state"), _last(layers, "cluster")
    is_path = isinstance(state, str | os.PathLike) and "\0" not in str(state)  # other values are refused below
    joined_as = node_identity_file.settings(Path(state)) if is_path and state else {}
    if joined_as and where in (None, "", joined_as["cluster"]):
        layers.insert(1, (str(Path(state, node_identity_file.NAME)), joined_as))
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for place, layer in layers:
        for key, value in layer.items():
            if key not in KEYS:
                raise unknown(key, place)
            if key in FLAG_ONLY and place != FLAG:
                raise ConfigError(key, f"it cannot be set there ({place})", hint="peerload agent --system")
            merged[key] = value
            origin[key] = place
    return _converted(merged, origin), {key: origin.get(key, BUILT_IN) for key in KEYS}


def unknown(key: str, place: str) -> ConfigError:
    """The error for a key that does not exist, with a suggestion."""
    return ConfigError(key, f"no such setting ({place})", hint=near(key, KEYS))


def _last(layers: list[tuple[str, dict[str, Any]]], key: str) -> Any:  # noqa: ANN401 -- whatever was given
    """The effective value of this key; None if not set."""
    return next((layer[key] for _, layer in reversed(layers) if key in layer), None)


def _converted(merged: dict[str, Any], origin: dict[str, str]) -> AgentConfig:
    """Convert one value at a time, so that the message names the key and where it was set. Variables are text,
    whatever the type of the setting: `PEERLOAD_NODE=17` names a node, `PEERLOAD_SLOTS=17` is a number."""
    converted = {key: converted_value(key, value, origin[key]) for key, value in merged.items()}
    for key in PLACES:  # the launcher and its tasks run in another directory
        converted[key] = str(Path(converted[key]).absolute())
    for key, value in converted.items():
        try:
            _look_at(key, value)
        except ConfigError as error:
            if error.file:  # the error is in a preset's file
                raise
            raise ConfigError(error.key, f"{error.says} ({origin[key]})", why=error.why, hint=error.hint) from None
    return AgentConfig(**converted)


def converted_value(key: str, value: object, place: str) -> Any:  # noqa: ANN401 -- of the setting's own type
    """Convert the value of one setting. Raises ConfigError."""
    one = {"node": "n", "state": "s", "socket": "s", key: value}
    if place != ENVIRONMENT and (why := objection(key, value)):  # the check of the system launcher
        raise ConfigError(
            key, f"{'this' if isinstance(value, dict) else repr(value)} cannot be used ({place})", why=why
        )
    try:
        config = msgspec.convert(one, AgentConfig, strict=place != ENVIRONMENT)
    except msgspec.ValidationError as error:
        raise _unusable(key, value, place, error) from None
    found = getattr(config, key)
    if "\0" in str(found):
        raise ConfigError(key, f"{found!r} cannot be used ({place})", why="it holds a NUL character")
    if why := objection(key, found):
        raise ConfigError(key, f"{value!r} cannot be used ({place})", why=why)
    return found


def _unusable(key: str, value: object, place: str, error: Exception) -> ConfigError:
    """The error for a value. For a table it names the wrong key of the table, and does not show the whole
    table."""
    why = validation_error_text(error)
    within, colon, says = why.partition(": ")
    if colon and key in TABLES and within.startswith(key):
        return ConfigError(within, f"this cannot be used ({place})", why=_choices(within) or says)
    why = _choices(key) or why
    shown = "this" if key in ("mqtt", "hooks") else repr(value)  # the value may contain a password
    return ConfigError(key, f"{shown} cannot be used ({place})", why=why.removeprefix(f"{key}: "))


def _choices(key: str) -> str:
    """The allowed values of a setting as text; "" unless it is one of a few words. ``key``: may be within a table, such as
    `load.foreign`."""
    kind: msgspec.inspect.Type = msgspec.inspect.type_info(AgentConfig)
    for name in key.split("."):
        fields = kind.fields if isinstance(kind, msgspec.inspect.StructType) else ()
        kind = next((field.type for field in fields if field.name == name), msgspec.inspect.AnyType())
    return f"it may be {' or '.join(map(str, kind.values))}" if isinstance(kind, msgspec.inspect.LiteralType) else ""


def gpu_config(settings: GpuSettings, *, users: str | dict[str, str] | None = None) -> GpuConfig:
    """Core configuration of the table `[gpu]`. users: the setting of that name in system mode. Raises ConfigError."""
    return GpuConfig(
        tasks_max=settings.max_tasks,
        activity_max=settings.max_activity,
        memory_share_max=settings.mem_threshold,
        reserve_bytes=int(_with_unit("gpu.reserve", settings.reserve, functools.partial(size, least=0))),
        settle_s=settings.settle_s,
        starve_after_s=_with_unit("gpu.starve_after", settings.starve_after, duration),
        mps="off" if settings.mps == "auto" and shutil.which(MPS_CONTROL) is None else settings.mps,
        pct_oversubscribe=settings.pct_oversubscribe,
        mps_by_user=users is not None,
        mps_users=users or "guest",
    )


def _with_unit(key: str, text: str, parse: Callable[[str], float]) -> float:
    try:
        return parse(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(key, f"{text!r} cannot be used", why=str(error)) from None


def sleep_after_s(settings: EnergySettings) -> float:
    """Time without tasks after which this machine is suspended, 0 = never. Raises ConfigError."""
    if settings.sleep_after and not settings.suspend_cmd:
        raise ConfigError("energy.sleep_after", "suspend_cmd is not set", hint='suspend_cmd = "systemctl suspend"')
    return _with_unit("energy.sleep_after", settings.sleep_after, duration) if settings.sleep_after else 0.0


def cache_bytes(settings: FilesSettings) -> int:
    """The size limit of the file cache. Raises ConfigError."""
    return int(_with_unit("files.cache", settings.cache, size))


def check_web(settings: WebSettings) -> None:
    """Raises ConfigError if the web server could not listen there."""
    if settings.listen and "/" not in settings.listen:
        web_address(settings.listen, settings.tls_cert)


def load_prices(path: Path) -> tuple[tuple[float, float], ...]:
    """Read and check a price file. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            raw = file.read(PRICE_BYTES_MAX + 1)
        if len(raw) > PRICE_BYTES_MAX:
            raise ConfigError("energy.price_file", f"is larger than {PRICE_BYTES_MAX} bytes", file=str(path))
        return read_prices(raw.decode("utf-8-sig"), time.time(), str(path))
    except OSError as error:
        raise ConfigError("energy.price_file", f"{path} cannot be read", why=str(error.strerror)) from None
    except UnicodeDecodeError as error:
        raise ConfigError("energy.price_file", "it is not UTF-8", why=error.reason, file=str(path)) from None


def check_hooks(settings: HooksSettings) -> None:
    """Raises ConfigError if a target cannot be used. The target is not shown, since a URL may be a secret."""
    for name in ("on_end", "on_fail", "on_node_dead"):
        for target in getattr(settings, name):
            if why := notification.objection(target):
                raise ConfigError(f"hooks.{name}", "a target cannot be used", why=why)


def default_node_name() -> str:
    """Host name in lower case, other characters as ``-``, at most 40."""
    name = re.sub(r"[^a-z0-9-]", "-", socket.gethostname().lower())
    return name[:NODE_NAME_LENGTH_MAX] or "node"


def files(named: str | None, environment: dict[str, str], *, is_system: bool = False) -> list[Path]:
    """Existing configuration files, lowest precedence first; for the system-mode agent, no user files. Raises
    ConfigError if a path cannot be checked."""
    files = [SYSTEM_FILE, *sorted(SYSTEM_DIRECTORY.glob("*.toml"))]
    if named is not None:
        if not _is_there(Path(named)):
            raise ConfigError("config", f"no such file: {named}")
        return [path for path in files if _is_there(path)] + [Path(named)]
    if is_system:
        return [path for path in files if _is_there(path)]
    base = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME", "/")) / ".config")
    files.append(Path(base) / "peerload" / "config.toml")
    return [path for path in files if _is_there(path)]


def _is_there(path: Path) -> bool:
    """True if this is a file. `Path.is_file` differs between versions of Python for directories that may not be
    entered."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a name that no file can have
        return False
    except OSError as error:
        raise ConfigError("config", f"{path} cannot be read", why=str(error.strerror)) from None


def _file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", f"{path} is not TOML", why=str(error)) from None
    except OSError as error:
        raise ConfigError("config", f"{path} cannot be read", why=str(error.strerror)) from None
    for key in PLACES:
        if isinstance(values.get(key), str) and values[key]:
            values[key] = _place(key, values[key], str(path))
    return values


def _place(key: str, value: str, file: str) -> str:
    """The path in a setting of a file. Raises ConfigError for a relative one: each start from another directory would
    be another node."""
    path = os.path.expanduser(value)  # noqa: PTH111 -- a path without a home stays as it is
    if not os.path.isabs(path):  # noqa: PTH117 -- as above
        raise ConfigError(key, f"{value!r} cannot be used ({file})", why="it is not an absolute path")
    return path


def _environment(environment: dict[str, str]) -> dict[str, Any]:
    """Settings from PEERLOAD_NODE, PEERLOAD_PEER (comma-separated), … Inside a task these variables mean something
    else: an agent that is started from a task must not take that task's node for its own name."""
    if "PEERLOAD_TASK_ID" in environment:
        return {}
    found: dict[str, Any] = {}
    if (foreign := environment.get("PEERLOAD_LOAD_FOREIGN")) is not None:
        found["load"] = {"foreign": foreign}
    for key in [key for key in KEYS if key not in (*TABLES, *FLAG_ONLY)]:
        value = environment.get(f"PEERLOAD_{key.upper()}")
        if value is None:
            continue
        found[key] = [part.strip() for part in value.split(",") if part.strip()] if key in LISTS else value
    return found


def configured_devices(config: Sequence[DeviceConfig]) -> tuple[Device, ...]:
    """Devices of the configuration. Raises ConfigError if one is named twice, or there are too many."""
    found: dict[str, Device] = {}
    for one in config:
        for number, name in enumerate(one.ids):
            device = Device(f"{one.kind}:{name}", one.kind, number)
            if device.id in found or one.kind == GPU:
                why = "GPUs are detected automatically" if one.kind == GPU else "it is named twice"
                raise ConfigError("device", f"{one.kind} {name} cannot be used", why=why)
            found[device.id] = device
    if len(found) > DEVICES_MAX // 2:
        raise ConfigError("device", f"{len(found)} devices are named", why=f"at most {DEVICES_MAX // 2} can be")
    return tuple(found.values())


FILE_BYTES_MAX = 1 << 20
FLAT_TABLES = {"gpu": GpuSettings, "load": LoadSettings, "energy": EnergySettings, "cpus": CpusSettings}
_LINE = re.compile(r"at line (\d+)")


def mistakes_in(path: Path) -> list[ConfigError]:
    """Find all settings that an agent would refuse."""
    try:
        source = _text_of(path)
    except ConfigError as error:
        return [error]
    try:
        values = tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        found = _LINE.search(str(error))
        line = int(found[1]) if found else source.count("\n") + 1
        return [ConfigError("TOML", str(error), file=str(path), line=line)]
    return [
        ConfigError(
            one.key,
            one.says.removesuffix(" (here)"),
            why=one.why,
            hint=one.hint,
            file=one.file or str(path),
            line=one.line,
        )
        for one in _mistakes(values)
    ]


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError("file", f"{path} cannot be read", why=str(error.strerror)) from None
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError("file", f"{path} is larger than {FILE_BYTES_MAX} bytes")
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError("TOML", "it is not UTF-8", why=error.reason, file=str(path), line=line) from None


def _mistakes(values: dict[str, Any]) -> Iterator[ConfigError]:
    for key, value in values.items():
        if key not in KEYS:
            yield unknown(key, "here")
            continue
        if key in FLAT_TABLES and isinstance(value, dict):
            yield from _of_table(key, value)
            continue
        try:
            converted = converted_value(key, value, "here")
            _look_at(key, _place(key, converted, "here") if key in PLACES else converted)
        except ConfigError as error:
            yield error


def _of_table(name: str, table: dict[str, Any]) -> Iterator[ConfigError]:
    """The mistakes in a table: in each setting, and in combinations of settings."""
    fields = FLAT_TABLES[name].__struct_fields__
    good: dict[str, Any] = {}
    for key, value in table.items():
        if key not in fields:
            yield ConfigError(f"{name}.{key}", "no such setting", hint=f"there are: {', '.join(fields)}")
            continue
        try:
            converted = converted_value(name, {key: value}, "here")
            if name == "gpu":
                gpu_config(converted)
            elif key == "price_file" and value:
                load_prices(Path(value))
            good[key] = value
        except ConfigError as error:
            yield error if error.key.startswith(f"{name}.") else ConfigError(f"{name}.{key}", error.says, why=error.why)
    if name == "energy" and ("suspend_cmd" in good or "suspend_cmd" not in table):
        try:
            sleep_after_s(converted_value(name, good, "here"))
        except ConfigError as error:
            yield error


def _look_at(key: str, value: Any) -> None:  # noqa: ANN401 -- of the setting's own type
    """Run the checks that an agent makes when it starts. Raises ConfigError."""
    each: dict[str, Callable[[Any], object]] = {
        "listen": lambda address: parse_address("listen", address, loopback_only=False),
        "advertise": lambda address: address and parse_address("advertise", address, loopback_only=False),
        "peer": lambda address: parse_address("peer", address, loopback_only=False),
        "mqtt": BrokerUrl.parse,
        "policy": lambda name: registry.live_preset(registry.preset_source(name)),
        "hooks": check_hooks,
        "files": cache_bytes,
        "web": check_web,
        "gpu": gpu_config,
        "energy": sleep_after_s,
    }
    if key == "device":
        configured_devices(value)
    elif key in each:
        for one in value if isinstance(value, tuple) else (value,):
            each[key](one)


def describe(config: AgentConfig, origins: dict[str, str]) -> list[dict[str, object]]:
    """List each setting as `key value origin`, for JSON; brokers without their passwords."""
    return [
        {"key": key, "value": _plain(key, getattr(config, key)), "origin": origins.get(key, BUILT_IN)}
        for key in AgentConfig.__struct_fields__
    ]


def _plain(key: str, value: object) -> object:
    plain = msgspec.json.decode(msgspec.json.encode(value))  # lists instead of tuples, as in answers of an agent
    if key == "hooks":
        hidden = {
            name: list(map(notification.shown, found)) for name, found in plain.items() if isinstance(found, list)
        }
        return plain | hidden
    return [without_password(url) for url in plain] if key == "mqtt" else plain
