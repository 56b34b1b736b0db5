"""Loader of presets: reads their tables and finds every mistake in them. A mistake names the file, the key and what
is allowed."""

from __future__ import annotations

import difflib
import inspect
import tomllib
import typing
from typing import TYPE_CHECKING, Any

import msgspec

from peerload.model.errors import ConfigError
from peerload.policy.parameters import made, parameters, shown, why_not
from peerload.policy.preset import CLASSES, KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable

PRESET_BYTES_MAX = 1 << 20
"""Bound on the size of a preset."""
REFERENCE = "reference"
"""Table of the changes that a preset makes for the reference model."""
TEXTS = ("classes", "description")
"""Keys of a preset that are no tables."""
LOCATION_SWITCHES = ("memory",)
"""Keys of the table [location] beside the tables of its sides."""


class PresetPlaces(msgspec.Struct, frozen=True):
    """Place of mistakes in a preset: the file as its user named it ("": none), and the table that is examined ("":
    the preset itself)."""

    file: str = ""
    table: str = ""

    def mistake(self, path: tuple[str, ...], what: str, *, why: str = "", hint: str = "") -> ConfigError:
        """Make the error about the key at this path."""
        key = ".".join((self.table, *path) if self.table else path)
        return ConfigError(key, what, why=why, hint=hint, file=self.file)


NOWHERE = PresetPlaces()


def parsed(raw: bytes, file: str) -> tuple[dict[str, Any], PresetPlaces]:
    """Parse a preset → its tables, and the place of its mistakes. Raises ConfigError with the line if it is no TOML."""
    if len(raw) > PRESET_BYTES_MAX:
        raise ConfigError("policy", f"has {len(raw)} bytes", why=f"a preset has at most {PRESET_BYTES_MAX}", file=file)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError("policy", "is not UTF-8", why=error.reason, file=file, line=line) from None
    try:
        return tomllib.loads(text), PresetPlaces(file)
    except tomllib.TOMLDecodeError as error:
        says, line = _without_place(str(error), text)
        raise ConfigError("policy", "is not TOML", why=says, file=file, line=line) from None
    except RecursionError:
        raise ConfigError("policy", "is not TOML that can be read", why="it is nested too deeply", file=file) from None


def _without_place(says: str, text: str) -> tuple[str, int]:
    """Split tomllib's message into its text and the line that it names."""
    words, _, place = says.rpartition(" (at ")
    number = place.removeprefix("line ").partition(",")[0]
    return words or says, int(number) if number.isdecimal() else text.count("\n") + 1


def near(name: str, names: Iterable[str], otherwise: str = "") -> str:
    """Hint at the name that was probably meant."""
    found = difflib.get_close_matches(name, list(names), 1)
    return f"did you mean {found[0]!r}?" if found else otherwise


class PresetLoader:
    """Loader of one preset's tables by kind. ``mistakes`` grows meanwhile; nothing is raised."""

    def __init__(self, table: dict[str, Any], places: PresetPlaces = NOWHERE) -> None:
        self.places = places
        self.mistakes: list[ConfigError] = []
        self.description = self._text(table)
        self.classes = self._classes(table.get("classes", []))
        self.tables: dict[str, dict[str, Any]] = {}
        location = table.get("location")
        for key, value in table.items():
            if key == "location" and isinstance(value, dict):
                for side, inner in value.items():
                    if side not in LOCATION_SWITCHES:
                        self._table((key, side), inner)
            elif key not in TEXTS:
                self._table((key,), value)
        self.memory = self._switch(location.get("memory", False) if isinstance(location, dict) else False)

    def _wrong(self, path: tuple[str, ...], what: str, *, why: str = "", hint: str = "") -> None:
        self.mistakes.append(self.places.mistake(path, what, why=why, hint=hint))

    def _text(self, table: dict[str, Any]) -> str:
        description = table.get("description", "")
        if not isinstance(description, str):
            self._wrong(("description",), f"{shown(description)} is no text")
        return str(description)

    def _classes(self, words: object) -> tuple[str, ...]:
        known = [word for group in CLASSES for word in group]
        if not isinstance(words, list) or any(word not in known for word in words):
            self._wrong(
                ("classes",), f"{shown(words)} is no place in the taxonomy", why=f"a list of {', '.join(known)}"
            )
            return ()
        for group in CLASSES:
            if sum(word in group for word in words) > 1:
                self._wrong(("classes",), "two words of one group", why=f"at most one of {', '.join(group)}")
        return tuple(words)

    def _table(self, path: tuple[str, ...], value: object) -> None:
        kind = ".".join(path)
        if kind not in KINDS:
            inside = path[0] == "location" and len(path) > 1
            names = [name for name in KINDS if name.startswith("location.")] if inside else list(KINDS)
            names += [f"location.{switch}" for switch in LOCATION_SWITCHES] if inside else list(TEXTS)
            if not inside and not self.places.table:
                names.append(REFERENCE)
            what = "no such table in a preset" if isinstance(value, dict) else "no such key in a preset"
            self._wrong(path, what, why=f"there are {', '.join(names)}", hint=near(kind, [*names, "location"]))
        elif not isinstance(value, dict):
            self._wrong(path, f"{shown(value)} is no table", hint=f'for example:  {kind} = {{ policy = "…" }}')
        else:
            self.tables[kind] = value

    def _switch(self, memory: object) -> bool:
        if not isinstance(memory, bool):
            self._wrong(("location", "memory"), f"{shown(memory)} is neither true nor false")
        return memory is True

    def name(self, kind: str, default: str) -> str:
        """Name of the policy that is chosen for a kind."""
        chosen = self.tables.get(kind, {}).get("policy", default)
        if isinstance(chosen, str):
            return chosen
        self._wrong((*kind.split("."), "policy"), f"{shown(chosen)} is no name", why="a policy is named by a text")
        return default

    def not_found(self, kind: str, error: ConfigError) -> None:
        """Note that the policy of a kind could not be found or loaded."""
        self._wrong((*kind.split("."), "policy"), error.says, why=error.why, hint=error.hint)

    def member(self, kind: str, name: str, chosen: type) -> object:
        """Make the policy of a kind with its parameters; None if that is impossible."""
        path = tuple(kind.split("."))
        before = len(self.mistakes)
        values = {key: value for key, value in self.tables.get(kind, {}).items() if key != "policy"}
        try:
            known = {parameter.name: parameter for parameter in parameters(chosen)}
        except Exception as error:  # noqa: BLE001 -- a user's class may declare anything
            self._wrong((*path, "policy"), f"the parameters of {name!r} cannot be read", why=_says(error))
            return None
        for key, value in values.items():
            parameter = known.get(key)
            if parameter is None:
                why = f"there are {', '.join(known)}" if known else "it has none"
                self._wrong((*path, key), f"no such parameter of {name!r}", why=why, hint=near(key, known))
            elif reason := why_not(chosen, key, value):
                must = parameter.allowed + ("" if parameter.required else f"; {shown(parameter.default)} if left out")
                self._wrong((*path, key), f"{shown(value)} is {reason}", why=must)
        for parameter in known.values():
            if parameter.required and parameter.name not in values:
                self._wrong((*path, parameter.name), f"{name!r} needs it", why=parameter.allowed)
        return self._made(path, name, chosen, values) if len(self.mistakes) == before else None

    def _made(self, path: tuple[str, ...], name: str, chosen: type, values: dict[str, Any]) -> object:
        try:
            policy = made(chosen, values)
        except msgspec.ValidationError as error:  # the class checks its parameters together
            self._wrong(path, f"{name!r} refuses this", why=str(error))
            return None
        except Exception as error:  # noqa: BLE001 -- a user's class may fail in any way
            self._wrong((*path, "policy"), f"{name!r} cannot be made", why=_says(error))
            return None
        kind = ".".join(path)
        if reason := why_not_fulfilled(kind, policy):
            self._wrong((*path, "policy"), f"{name!r} is no {KINDS[kind].__name__}", why=reason)
            return None
        return policy


# -- the methods of a kind ---------------------------------------------------------------------------------------------


def protocol_members(kind: str) -> dict[str, Any]:
    """Functions and properties that the Protocol of a kind asks for, by name."""
    return {name: member for name, member in vars(KINDS[kind]).items() if not name.startswith("_")}


def why_not_fulfilled(kind: str, policy: object) -> str:
    """Reason why an object cannot be a policy of this kind; "" if it can."""
    for name, member in protocol_members(kind).items():
        takes = "" if isinstance(member, property) else f"({', '.join(list(inspect.signature(member).parameters)[1:])})"
        try:
            have = getattr(policy, name)
        except AttributeError:
            return f"it has no {name}{takes}"
        except Exception as error:  # noqa: BLE001 -- a user's property may fail in any way
            return f"its {name} fails: {_says(error)}"
        reason = _why_no_value(member, have) if isinstance(member, property) else _why_no_method(member, have)
        if reason:
            return f"its {name}{takes} {reason}"
    return ""


def _why_no_method(asked: Any, have: Any) -> str:  # noqa: ANN401 -- whatever the class has
    if not callable(have):
        return "is no method"
    names = list(inspect.signature(asked).parameters)[1:]
    try:
        inspect.signature(have).bind(*names)
    except TypeError as error:
        return f"cannot be called so: {error}"
    except ValueError:  # a method that is not written in Python has no signature
        return ""
    return ""


def _why_no_value(asked: property, have: object) -> str:
    declared = typing.get_type_hints(asked.fget)["return"]
    try:
        msgspec.convert(have, declared)
    except msgspec.ValidationError:
        return f"is {shown(have)}, which is no {getattr(declared, '__name__', declared)}"
    return ""


def _says(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
