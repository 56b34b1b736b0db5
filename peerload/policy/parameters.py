"""Parameters of policies: their types, bounds, defaults and meaning, as the fields of the class declare them;
validation of values.

A policy whose class is a `msgspec.Struct` (or a dataclass) has its fields as parameters; ``Annotated[int, Meta(ge=0,
le=64, description="…")]`` says what is allowed and what it means. Any other class has none.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from typing import Any

import msgspec
from msgspec import inspect as kinds_of

VALUE_SHOWN_MAX = 60
"""Characters of a wrong value that are shown."""


class Parameter(msgspec.Struct, frozen=True):
    """Parameter of a policy. allowed: in words; default: None also if it must be given (``required``); means: "" if
    its field does not say."""

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
        return "no finite number"
    try:
        msgspec.convert(value, declared)
    except msgspec.ValidationError:
        return "not allowed"
    return ""


def made(policy: type, values: dict[str, Any]) -> object:
    """Make an instance. Raises ValueError (the class refuses this combination) or whatever else its constructor
    raises."""
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
