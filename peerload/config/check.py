"""Check of one configuration file: every mistake, each with its key, the problem and the allowed values; list of the
settings in force.

`load` stops at the first mistake, since an agent must not start with one. Whoever writes a file wants to know all of
them.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from peerload import notification
from peerload.config import loader
from peerload.config.loader import configured_devices
from peerload.model.config import AgentConfig, CpusSettings, EnergySettings, GpuSettings, LoadSettings
from peerload.model.errors import ConfigError
from peerload.policy import registry
from peerload.security.address import parse_address
from peerload.security.broker import BrokerUrl, without_password

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FILE_BYTES_MAX = 1 << 20
FLAT_TABLES = {"load": LoadSettings, "energy": EnergySettings, "cpus": CpusSettings}
_LINE = re.compile(r"at line (\d+)")


def mistakes_in(path: Path) -> list[ConfigError]:
    """Find all settings that an agent would refuse."""
    try:
        source = _read(path)
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


def _read(path: Path) -> str:
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
        raise ConfigError("TOML", "it is no UTF-8", why=error.reason, file=str(path), line=line) from None


def _mistakes(values: dict[str, Any]) -> Iterator[ConfigError]:
    for key, value in values.items():
        if key not in loader.KEYS:
            yield loader.unknown(key, "here")
            continue
        if key == "gpu" and isinstance(value, dict):
            yield from _of_gpus(value)
            continue
        fields = FLAT_TABLES[key].__struct_fields__ if key in FLAT_TABLES and isinstance(value, dict) else None
        if fields and (unknown := value.keys() - fields):
            yield ConfigError(f"{key}.{min(unknown)}", "no such setting", hint=f"there are: {', '.join(fields)}")
            continue
        try:
            converted = loader.converted_value(key, value, "here")
            _look_at(key, converted)
        except ConfigError as error:
            yield error


def _of_gpus(table: dict[str, Any]) -> Iterator[ConfigError]:
    for key, value in table.items():
        try:
            loader.gpu_config(loader.converted_value("gpu", {key: value}, "here"))
        except ConfigError as error:
            if key not in GpuSettings.__struct_fields__:
                yield ConfigError(
                    f"gpu.{key}", "no such setting", hint=f"there are: {', '.join(GpuSettings.__struct_fields__)}"
                )
            else:
                yield error if error.key.startswith("gpu.") else ConfigError(f"gpu.{key}", error.says, why=error.why)


def _look_at(key: str, value: Any) -> None:  # noqa: ANN401 -- of the setting's own type
    """Run the checks that an agent makes when it starts. Raises ConfigError."""
    each: dict[str, Callable[[Any], object]] = {
        "listen": lambda address: parse_address("listen", address, loopback_only=False),
        "advertise": lambda address: address and parse_address("advertise", address, loopback_only=False),
        "peer": lambda address: parse_address("peer", address, loopback_only=False),
        "mqtt": BrokerUrl.parse,
        "policy": lambda name: registry.live_preset(registry.preset_source(name)),
        "hooks": loader.check_hooks,
    }
    if key == "device":
        configured_devices(value)
    elif key == "energy" and value.price_file:
        loader.load_prices(Path(value.price_file))
    elif key in each:
        for one in value if isinstance(value, tuple) else (value,):
            each[key](one)


def describe(config: AgentConfig, origins: dict[str, str]) -> list[dict[str, object]]:
    """List each setting as `key value origin`, for JSON; brokers without their passwords."""
    return [
        {"key": key, "value": _plain(key, getattr(config, key)), "origin": origins.get(key, loader.BUILT_IN)}
        for key in AgentConfig.__struct_fields__
    ]


def _plain(key: str, value: object) -> object:
    plain = msgspec.json.decode(msgspec.json.encode(value))  # as after a socket: lists, no tuples
    if key == "hooks":
        hidden = {
            name: list(map(notification.shown, found)) for name, found in plain.items() if isinstance(found, list)
        }
        return plain | hidden
    return [without_password(url) for url in plain] if key == "mqtt" else plain
