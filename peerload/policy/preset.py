"""Preset: one policy of each kind, chosen independently, with its parameters; reading and checking its tables.

`PresetLoader` finds every mistake in the tables; a message names the file, the key and the allowed values. The lint
(`lint_warnings`) warns of choices that are valid but work against each other.

The parameters of a policy are the fields of its class, if that is a `msgspec.Struct` or a dataclass: ``Annotated[int,
Meta(ge=0, le=64, description="…")]`` gives the allowed values and the meaning. Any other class has none.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import tomllib
import typing
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from msgspec import inspect as kinds_of

from peerload.model.errors import ConfigError
from peerload.model.resources import Thresholds
from peerload.policy.api import (
    POLICY_FAILURES,
    InformationPolicy,
    LoadPolicy,
    MigrationPolicy,
    PairingPolicy,
    PriorityPolicy,
    ReceiverPolicy,
    SelectionPolicy,
    SenderPolicy,
    TransferPolicy,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from peerload.model.resources import LoadReport
    from peerload.policy.api import KnownReport, Reported, RunningView, Said


KINDS: dict[str, type] = {
    "load": LoadPolicy,
    "transfer": TransferPolicy,
    "selection": SelectionPolicy,
    "information": InformationPolicy,
    "location.sender": SenderPolicy,
    "location.receiver": ReceiverPolicy,
    "location.pairing": PairingPolicy,
    "priority": PriorityPolicy,
    "migration": MigrationPolicy,
}
"""Kinds of policy, each with the Protocol of its policies; the names are those of the tables in a preset."""


BASELINE, CENTRAL = "baseline", "centralized"
CLASSES = (
    ("static", "dynamic"),
    ("deterministic", "probabilistic"),
    (CENTRAL, "distributed"),
    ("cooperative", "non-cooperative"),
    ("load balancing", "load sharing"),
    ("sender-initiated", "receiver-initiated", "symmetric"),
    (BASELINE,),
)
"""Taxonomy of presets [RM, CK88]: at most one word of each group. A baseline is for comparison."""


class PolicySet(msgspec.Struct, frozen=True, kw_only=True):
    """Policies of one node; made by `peerload.policy.registry.load_preset`."""

    name: str
    description: str
    load: LoadPolicy
    transfer: TransferPolicy
    selection: SelectionPolicy
    information: InformationPolicy
    sender: SenderPolicy
    receiver: ReceiverPolicy
    pairing: PairingPolicy
    priority: PriorityPolicy
    migration: MigrationPolicy
    memory: bool = False
    """True if searches leave footprints and follow them (`NodeView.idle_list`, `busy_list`)."""
    names: dict[str, str]
    """kind → the name its policy was chosen by, for people and decision records."""
    classes: tuple[str, ...] = ()
    """Place in the taxonomy: words of CLASSES."""

    @property
    def is_central(self) -> bool:
        """True if all tasks pass through a head node."""
        return CENTRAL in self.classes


# -- parameters of policies: types, bounds, defaults and meaning, as the fields of the class declare them ----------------

VALUE_SHOWN_MAX = 60
"""Characters of a wrong value that are displayed."""


class Parameter(msgspec.Struct, frozen=True):
    """Parameter of a policy. allowed: in words; default: None also if it must be given (``required``); means: "" if
    its field has no description."""

    name: str
    allowed: str
    default: Any
    required: bool
    means: str


def parameters(policy: type) -> tuple[Parameter, ...]:
    """Parameters of a policy's class, in the order of its fields. Raises TypeError or NameError if the class
    declares something that cannot be read."""
    return tuple(
        Parameter(
            name=field.encode_name,
            allowed=_allowed(field.type),
            default=_default(field),
            required=field.required,
            means=_means(field.type),
        )
        for field in _fields(policy)
    )


def why_not(policy: type, name: str, value: object) -> str:
    """Reason why the parameter ``name`` of a policy's class cannot have this value; "" if it can."""
    declared = _type_of(policy, name)
    if isinstance(value, float) and not math.isfinite(value):
        return "not a finite number"
    try:
        msgspec.convert(value, declared)
    except msgspec.ValidationError:
        return "not allowed"
    return ""


def made(policy: type, values: dict[str, Any]) -> object:
    """Make an instance. Raises ValueError (the class refuses this combination) or any other error of its
    constructor."""
    return msgspec.convert(values, policy) if _has_fields(policy) else policy(**values)


def shown(value: object) -> str:
    """Text of a value as TOML writes it, shortened."""
    if value is None:
        return "-"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, (bool, int, float, str, list)) else str(value)
    return text if len(text) <= VALUE_SHOWN_MAX else f"{text[:VALUE_SHOWN_MAX]}…"


# -- reading the declarations ------------------------------------------------------------------------------------------


def _has_fields(policy: type) -> bool:
    return issubclass(policy, msgspec.Struct) or dataclasses.is_dataclass(policy)


def _fields(policy: type) -> tuple[kinds_of.Field, ...]:
    if not _has_fields(policy):
        return ()
    told: Any = kinds_of.type_info(policy)
    return tuple(told.fields)


def _type_of(policy: type, name: str) -> Any:  # noqa: ANN401 -- any type there is
    if issubclass(policy, msgspec.Struct):
        return {field.encode_name: field.type for field in msgspec.structs.fields(policy)}[name]
    return typing.get_type_hints(policy, include_extras=True)[name]


def _default(field: kinds_of.Field) -> Any:  # noqa: ANN401 -- any value
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return field.default_factory() if callable(field.default_factory) else None


def _means(declared: kinds_of.Type) -> str:
    if isinstance(declared, kinds_of.Metadata):
        return str((declared.extra_json_schema or {}).get("description", "")) or _means(declared.type)
    if isinstance(declared, kinds_of.UnionType):
        return next((means for inner in declared.types if (means := _means(inner))), "")
    return ""


def _allowed(declared: kinds_of.Type) -> str:
    match declared:
        case kinds_of.Metadata():
            return _allowed(declared.type)
        case kinds_of.UnionType():
            others = [inner for inner in declared.types if not isinstance(inner, kinds_of.NoneType)]
            return " or ".join(_allowed(inner) for inner in others)
        case kinds_of.BoolType():
            return "true or false"
        case kinds_of.IntType() | kinds_of.FloatType():
            noun = "a whole number" if isinstance(declared, kinds_of.IntType) else "a number"
            return noun + _range(declared)
        case kinds_of.LiteralType():
            return "one of " + ", ".join(shown(value) for value in declared.values)
        case kinds_of.StrType():
            return "a text"
        case kinds_of.ListType() | kinds_of.VarTupleType():
            return f"a list, each {_allowed(declared.item_type)}"
        case _:
            return type(declared).__name__.removesuffix("Type").lower()


def _range(declared: kinds_of.IntType | kinds_of.FloatType) -> str:
    low, high = declared.ge, declared.le
    if low is not None and high is not None:
        return f", {_number(low)} … {_number(high)}"
    bounds = {"at least": low, "more than": declared.gt, "at most": high, "less than": declared.lt}
    return "".join(f", {words} {_number(bound)}" for words, bound in bounds.items() if bound is not None)


def _number(bound: float) -> str:
    return f"{bound:g}" if abs(bound) >= 10**9 else f"{bound:.9g}"


# -- reading the tables of a preset --------------------------------------------------------------------------------------

PRESET_BYTES_MAX = 1 << 20
"""Bound on the size of a preset."""
REFERENCE = "reference"
"""Table of the changes that a preset makes for the reference model."""
TEXTS = ("classes", "description")
"""Keys of a preset that are not tables."""
LOCATION_SWITCHES = ("memory",)
"""Keys of the table [location] besides the tables of its sides."""


class PresetPlaces(msgspec.Struct, frozen=True):
    """Place of mistakes in a preset: the file as its user named it ("": none), and the table that is examined ("":
    the preset itself)."""

    file: str = ""
    table: str = ""

    def mistake(self, path: tuple[str, ...], what: str, *, why: str = "", hint: str = "") -> ConfigError:
        key = ".".join((self.table, *path) if self.table else path)
        return ConfigError(key, what, why=why, hint=hint, file=self.file)


NOWHERE = PresetPlaces()


def parsed(raw: bytes, file: str) -> tuple[dict[str, Any], PresetPlaces]:
    """Parse a preset → its tables, and the place of its mistakes. Raises ConfigError with the line if it is not TOML."""
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
    """Hint at the most similar name."""
    import difflib  # noqa: PLC0415 -- costs memory, and is for mistakes only

    found = difflib.get_close_matches(name, list(names), 1)
    return f"did you mean {found[0]!r}?" if found else otherwise


class PresetLoader:
    """Loader of one preset's tables by kind. It collects ``mistakes`` and raises nothing."""

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
            self._wrong(("description",), f"{shown(description)} is not a text")
        return str(description)

    def _classes(self, words: object) -> tuple[str, ...]:
        known = [word for group in CLASSES for word in group]
        if not isinstance(words, list) or any(word not in known for word in words):
            self._wrong(("classes",), f"{shown(words)} is not in the taxonomy", why=f"a list of {', '.join(known)}")
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
            self._wrong(path, f"{shown(value)} is not a table", hint=f'for example:  {kind} = {{ policy = "…" }}')
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
        self._wrong((*kind.split("."), "policy"), f"{shown(chosen)} is not a name", why="a policy is named by a text")
        return default

    def not_found(self, kind: str, error: ConfigError) -> None:
        """Record that the policy of a kind could not be found or loaded."""
        self._wrong((*kind.split("."), "policy"), error.says, why=error.why, hint=error.hint)

    def member(self, kind: str, name: str, chosen: type) -> object:
        """Make the policy of a kind with its parameters; None if that is impossible."""
        path = tuple(kind.split("."))
        before = len(self.mistakes)
        values = {key: value for key, value in self.tables.get(kind, {}).items() if key != "policy"}
        try:
            known = {parameter.name: parameter for parameter in parameters(chosen)}
        except POLICY_FAILURES as error:
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
        except POLICY_FAILURES as error:
            self._wrong((*path, "policy"), f"{name!r} cannot be made", why=_says(error))
            return None
        kind = ".".join(path)
        if reason := why_not_fulfilled(kind, policy):
            self._wrong((*path, "policy"), f"{name!r} is not a {KINDS[kind].__name__}", why=reason)
            return None
        return policy


# -- the methods of a kind ---------------------------------------------------------------------------------------------


def protocol_members(kind: str) -> dict[str, Any]:
    """Functions and properties that the Protocol of a kind asks for, by name."""
    return {name: member for name, member in vars(KINDS[kind]).items() if not name.startswith("_")}


OPTIONAL_VALUES = {"information": {"believed_s": Annotated[float, Meta(gt=0.0, le=86_400.0)]}}
"""Values that policies of a kind may have, but no Protocol requires."""


def why_not_fulfilled(kind: str, policy: object) -> str:
    """Reason why an object cannot be a policy of this kind; "" if it can."""
    for name, member in protocol_members(kind).items():
        takes = "" if isinstance(member, property) else f"({', '.join(list(inspect.signature(member).parameters)[1:])})"
        try:
            have = getattr(policy, name)
        except AttributeError:
            return f"it has no {name}{takes}"
        except POLICY_FAILURES as error:
            return f"its {name} fails: {_says(error)}"
        if isinstance(member, property):
            reason = _why_no_value(typing.get_type_hints(member.fget, include_extras=True)["return"], have)
        else:
            reason = _why_no_method(member, have)
        if reason:
            return f"its {name}{takes} {reason}"
    for name, declared in OPTIONAL_VALUES.get(kind, {}).items():
        if hasattr(policy, name) and (reason := _why_no_value(declared, getattr(policy, name))):
            return f"its {name} {reason}"
    return ""


def _why_no_method(asked: Any, have: Any) -> str:  # noqa: ANN401 -- whatever the class has
    if not callable(have):
        return "is not a method"
    names = list(inspect.signature(asked).parameters)[1:]
    try:
        inspect.signature(have).bind(*names)
    except TypeError as error:
        return f"cannot be called with these arguments: {error}"
    except ValueError:  # a method that is not written in Python has no signature
        return ""
    return ""


def _why_no_value(declared: Any, have: object) -> str:  # noqa: ANN401 -- any type there is
    try:
        msgspec.convert(have, declared)
    except msgspec.ValidationError:
        return f"is {shown(have)}, which is not {_allowed(kinds_of.type_info(declared))}"
    return ""


def _says(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# -- lint ----------------------------------------------------------------------------------------------------------------


class LintWarning(msgspec.Struct, frozen=True):
    """Warning of the linter: the key, the problem, and the file ("": none)."""

    key: str
    says: str
    file: str = ""

    def __str__(self) -> str:
        return f"{f'{self.file}: ' if self.file else ''}{self.key}: {self.says}"


class IdleNode:
    """View of an idle node without peers."""

    node = ""
    load_tasks = 0
    slots = 1
    cpus = 1.0
    cpus_requested = 0.0
    cpus_busy = 0.0
    cpus_foreign = 0.0
    foreign_slots = 0
    gpus = 0
    gpu_tasks = 0
    gpus_busy = 0.0
    gpus_foreign = 0.0
    speed = 1.0
    mean_s = 1.0
    waiting_s = 0.0
    running: Sequence[RunningView] = ()
    load = 0.0
    load_mean = 0.0
    load_unit = 1.0
    thresholds = Thresholds(1.0, 1.0, 1.0, 1.0)
    peers: Sequence[str] = ()
    reports_guide_probing = False
    idle_list: Sequence[str] = ()
    busy_list: Sequence[str] = ()
    starts_here = False
    asleep: Mapping[str, float] = {}
    cpus_started = 0.0
    backlog = 0
    price = None

    def profile(self, node: str) -> None:
        """Return None: no node is known."""
        del node

    def report(self, node: str) -> KnownReport | None:
        """Return None: no peer has reported."""
        del node
        return None

    def reports(self, age_s_max: float = math.inf, wanted: Said | None = None) -> Iterator[tuple[str, LoadReport]]:
        del age_s_max, wanted
        return iter(())

    def reporting(self, wanted: Reported) -> Sequence[str]:
        del wanted
        return ()


def lint_warnings(preset: PolicySet, file: str = "", thresholds_written: Container[str] = ()) -> list[LintWarning]:
    """Lint a preset. file: where it is written; thresholds_written: the keys of its table `transfer`."""
    found = [*_about_thresholds(preset, thresholds_written), *_about_reports(preset), *_about_sharing(preset)]
    return [LintWarning(".".join(path), says, file) for path, says in found]


_Found = list[tuple[tuple[str, ...], str]]


def _about_thresholds(preset: PolicySet, thresholds_written: Container[str]) -> _Found:
    try:
        thresholds = preset.transfer.thresholds(IdleNode())
    except POLICY_FAILURES as error:
        return [(("transfer", "policy"), f"it fails on an idle node: {error!r}")]
    goes = {"send_at": ("sends", thresholds.send_at), "give_above": ("gives", thresholds.give_above)}
    comes = {
        "accept_below": ("accepts", thresholds.accept_below),
        "receive_below": ("asks for", thresholds.receive_below),
    }
    found: _Found = []
    for take, (takes, below) in comes.items():
        for give, (gives, above) in goes.items():
            if below > above:
                both = f"between them a node both {takes} and {gives} tasks, which then move back and forth"
                says = (take, f"{below:g} is above {give} = {above:g}: {both}")
                if give in thresholds_written and take not in thresholds_written:
                    says = (give, f"{above:g} is below {take} = {below:g}: {both}")
                found.append((("transfer", says[0]), says[1]))
    return found


def _about_reports(preset: PolicySet) -> _Found:
    if preset.information.reports_guide_probing:
        return []
    found: _Found = []
    for kind, policy in (("transfer", preset.transfer), ("location.sender", preset.sender)):
        if getattr(policy, "wants_reports", False):
            tells = f"with information {preset.names['information']!r} hardly any are sent"
            found.append(((*kind.split("."), "policy"), f"{preset.names[kind]!r} needs reports, and {tells}"))
    return found


def _about_sharing(preset: PolicySet) -> _Found:
    sides = [kind for kind in preset.names if kind.startswith("location.")]
    shares = any(preset.names[kind] != "none" for kind in sides)
    found: _Found = []
    if preset.memory and not shares:
        found.append((("location", "memory"), "searches are off on both sides, so there is nothing to remember"))
    if preset.migration.migrations_max == 0 and shares:
        found.append((("migration", "limit"), "0 keeps every task at its home, whatever the location policies find"))
    return found
