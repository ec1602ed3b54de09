"""The parameters of a codec: the fields of its dataclass, and the types that they may have.

Parameters travel as text, in specs and in every message, so they are plain Python values of few types: int, float, bool, the choices of a
Literal, None, and unions of these.
"""

from __future__ import annotations

import operator
import types
import typing
from dataclasses import fields
from functools import cache
from typing import Any, Literal

import numpy as np

from .errors import ConfigError

_TITLES = {int: "an int", float: "a float", bool: "a bool", types.NoneType: "None"}


def parameters(codec: Any) -> dict[str, Any]:
    """The parameters of a codec class and their types, in order."""
    return _parameters(codec)


@cache
def _parameters(codec: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(codec)
    kinds = {f.name: hints[f.name] for f in fields(codec)}
    for name, kind in kinds.items():
        if not all(member in _TITLES or typing.get_origin(member) is Literal for member in members(kind)):
            raise ConfigError(f"{codec.__name__}'s {name} is declared {kind}; allowed are int, float, bool, Literal, None and their unions")
    return kinds


def members(kind: Any) -> tuple[Any, ...]:
    """The types of a union; any other type by itself."""
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def check_parameters(codec: Any) -> None:
    """Refuse parameters that are not of their declared types; numpy scalars, and ints where a float is due, become plain values.

    >>> import deepreduce as dr
    >>> dr.QSGD(np.int64(4)), dr.Threshold(2)
    (QSGD(bits=4, group=512, norm='max'), Threshold(level=2.0))
    >>> dr.QSGD(7.0)
    Traceback (most recent call last):
        ...
    deepreduce.errors.ConfigError: QSGD's bits is an int, got 7.0
    """
    for name, kind in parameters(codec.__class__).items():
        object.__setattr__(codec, name, _checked(getattr(codec, name), kind, f"{type(codec).__name__}'s {name}"))


def _checked(given: object, kind: Any, what: str) -> object:
    value = _plain(given)
    kinds = members(kind)
    for member in kinds:
        if _is_choice(value, member) if typing.get_origin(member) is Literal else type(value) is member:
            break
    else:
        if float not in kinds or type(value) is not int:
            raise ConfigError(f"{what} is {_alternatives(kinds)}, got {shown(given)}")
        value = float(value) if abs(value) < 2**63 else value
    if isinstance(value, int) and not -(2**63) < value < 2**63:
        raise ConfigError(f"{what} lies below 2**63, got {shown(given)}")
    return value + 0.0 if isinstance(value, float) else value  # -0.0 equals 0.0, so it is also written as 0.0


def _plain(value: object) -> object:
    """The value as Python's own, so that its text is what a reader expects: of a numpy scalar, or of a subclass such as an enum."""
    if isinstance(value, np.generic):
        value = value.item()
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return str.__str__(value) if isinstance(value, str) else value


def _is_choice(value: object, kind: Any) -> bool:
    return any(type(value) is type(choice) and value == choice for choice in typing.get_args(kind))


def _alternatives(kinds: tuple[Any, ...]) -> str:
    titles: list[str] = []
    for kind in kinds:
        titles += map(repr, typing.get_args(kind)) if typing.get_origin(kind) is Literal else [_TITLES[kind]]
    return " or ".join(filter(None, [", ".join(titles[:-1]), titles[-1]]))


# Parameters as text


def format_value(value: object) -> str:
    """A parameter as text that `parse_value` reads back."""
    if value is None:
        return "auto"
    return str(value).lower() if isinstance(value, bool) else str(value)


def kind_name(kind: Any) -> str:
    """A type as specs and error messages write it."""
    names = []
    for member in members(kind):
        if typing.get_origin(member) is Literal:
            names += [str(choice) for choice in typing.get_args(member)]
        else:
            names.append("auto" if member is type(None) else member.__name__)
    return "|".join(names)


def parse_value(text: str, kind: Any, what: str) -> object:
    """A parameter from its text; ``auto`` is None where the type allows None."""
    for member in members(kind):
        try:
            return _parse_as(text, member)
        except (KeyError, ValueError):
            continue
    raise ConfigError(f"{what} is {kind_name(kind)}, got {shown(text)}")


def _parse_as(text: str, kind: Any) -> object:
    if kind is type(None):
        return {"auto": None}[text]
    if kind is bool:
        return {"true": True, "false": False}[text]
    if typing.get_origin(kind) is Literal:
        return {str(choice): choice for choice in typing.get_args(kind)}[text]
    if not text.isascii() or "_" in text or text.startswith("+") or text != text.strip():
        raise ValueError(text)
    return kind(text)


def natural(value: object, what: str) -> int:
    """A whole number of at least 0.

    >>> natural(np.int32(5), "a seed"), natural(-1, "a seed")
    Traceback (most recent call last):
        ...
    deepreduce.errors.ConfigError: a seed is an int of at least 0, got -1
    """
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigError(f"{what} is an int of at least 0, got {shown(value)}")
    return number


def shown(value: object, most: int = 80) -> str:
    """The repr of what somebody gave, cut to a length that can be read.

    >>> shown("a" * 1000, most=12)
    "'aaaa...aaa'"
    """
    try:
        text = repr(value)
    except Exception:  # an int of thousands of digits has none, and the repr of others may fail as it likes
        return f"{type(value).__name__} that cannot be shown"
    return text if len(text) <= most else f"{text[: most // 2 - 1]}...{text[-(most - most // 2 - 2) :]}"
