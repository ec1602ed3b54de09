"""The grammar of specs: ``sparsifier/index/value``, each ``name[:first-argument][,key=value]*``; and of the arguments in messages."""

from __future__ import annotations

import difflib
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any

from .codec import IndexCodec, Sparsifier, ValueCodec
from .errors import ConfigError
from .parameters import format_value, kind_name, parameters, parse_value, shown
from .presets import PRESETS
from .registry import STAGES, Entry, Stage

Codecs = tuple[Sparsifier, IndexCodec, ValueCodec]

# Text to codecs


def parse_stages(spec: str) -> Codecs:
    """The three codecs of a spec or preset.

    >>> parse_stages("topr:0.01/raw/fp16")
    (TopR(amount=0.01), RawIndex(), FP16())
    >>> parse_stages("topr:0.01/row/raw")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    deepreduce.errors.ConfigError: unknown index codec 'row': did you mean 'raw'? allowed: all, ... shaped
      topr:0.01/row/raw
                ^^^
    """
    whole = PRESETS.get(spec, spec)
    pieces = whole.split("/")
    if len(pieces) != len(STAGES):
        close = difflib.get_close_matches(spec, PRESETS, 1) if "/" not in spec else []
        hint = f": did you mean {close[0]!r}?" if close else ""
        allowed = f"a spec is sparsifier/index/value or one of the presets {', '.join(sorted(PRESETS))}"
        raise ConfigError(f"{allowed}; got {shown(spec)} with {len(pieces)} part(s){hint}")
    starts = [0, len(pieces[0]) + 1, len(pieces[0]) + len(pieces[1]) + 2]
    sparsifier, index, value = (
        _parse_piece(stage, whole, start, piece) for stage, start, piece in zip(STAGES, starts, pieces, strict=True)
    )
    return sparsifier, index, value


def _parse_piece(stage: Stage, spec: str, start: int, piece: str) -> Any:
    name, colon, arguments = piece.partition(":")
    try:
        entry = stage.by_name(name)
    except ConfigError as error:
        raise _pointed(str(error), spec, start, name) from error
    if entry is None:
        close = difflib.get_close_matches(name, stage.names(), 1)
        hint = f": did you mean {close[0]!r}?" if close else ";"
        raise _pointed(f"unknown {stage.title} {shown(name)}{hint} allowed: {', '.join(stage.names())}", spec, start, name)
    if colon and not arguments:
        raise _pointed(f"{name!r} has a ':' but no argument", spec, start, piece)
    given = {}
    at = start + len(name) + 1
    for number, argument in enumerate(arguments.split(",") if arguments else []):
        try:
            key, value = _parse_argument(entry, argument, number)
            if key in given:
                raise ConfigError(f"{name} got {key!r} twice")
        except ConfigError as error:
            raise _pointed(str(error), spec, at, argument) from None
        given[key] = value
        at += len(argument) + 1
    try:
        return build(entry, given)
    except ConfigError as error:
        raise _pointed(str(error), spec, start, piece) from None


_POINTED = 80
"""Characters that an error shows of a piece, and on each side of it."""


def _pointed(problem: str, spec: str, start: int, piece: str) -> ConfigError:
    """The problem, and under it the piece; of a very long spec, the surroundings of the piece."""
    first, last = max(0, start - _POINTED), start + min(len(piece), _POINTED)
    before, after = "..." if first else "", "..." if last + _POINTED < len(spec) else ""
    line = before + spec[first : last + _POINTED] + after
    return ConfigError(f"{problem}\n  {line}\n  {' ' * (len(before) + start - first)}{'^' * max(1, last - start)}")


def _parse_argument(entry: Entry, argument: str, number: int) -> tuple[str, object]:
    kinds = parameters(entry.codec)
    key, equals, value = argument.partition("=")
    if not equals:
        if number or not kinds:
            raise ConfigError(f"{entry.name} takes {signature(entry)}, got {shown(argument)}")
        key, value = next(iter(kinds)), argument
    if key not in kinds:
        raise ConfigError(f"{entry.name} has no parameter {shown(key)}; it takes {signature(entry)}")
    return key, parse_value(value, kinds[key], f"{entry.name}'s {key}")


def signature(entry: Entry) -> str:
    """The parameters of a codec and their types, for people."""
    return ", ".join(f"{key}={kind_name(kind)}" for key, kind in parameters(entry.codec).items()) or "no parameters"


def build(entry: Entry, given: dict[str, Any]) -> Any:
    """The codec object; a missing required parameter is an error that lists the parameters."""
    missing = missing_parameters(entry, given)
    if missing:
        raise ConfigError(f"{entry.name} needs {', '.join(missing)}; it takes {signature(entry)}")
    return entry.codec(**given)


def missing_parameters(entry: Entry, given: dict[str, Any]) -> list[str]:
    """The parameters without a default that are not given."""
    required = (f.name for f in fields(entry.codec) if f.default is MISSING and f.default_factory is MISSING)
    return [name for name in required if name not in given]


# Codecs to text


def format_codec(stage: Stage, codec: object) -> str:
    """The text that gives this codec back; defaults are left out, unless they are `spelled`.

    >>> from deepreduce import ChunkTopR, registry
    >>> format_codec(registry.SPARSIFIER_STAGE, ChunkTopR(32))
    'chunktopr:32'
    """
    entry = stage.by_codec(codec)
    arguments = []
    for number, f in enumerate(fields(entry.codec)):
        value = getattr(codec, f.name)
        if f.metadata.get("spelled") or value != f.default or type(value) is not type(f.default):
            text = format_value(value)
            arguments.append(text if number == 0 else f"{f.name}={text}")
    return entry.name + (":" + ",".join(arguments) if arguments else "")


def format_spec(codecs: Codecs) -> str:
    """The spec of three codecs: ``parse_stages(format_spec(codecs)) == codecs``."""
    return "/".join(format_codec(stage, codec) for stage, codec in zip(STAGES, codecs, strict=True))


# The arguments of a codec in a message


@lru_cache(maxsize=1024)
def from_wire_arguments(entry: Entry, arguments: str) -> Any:
    """The codec of a message. Parameters that a later version appended take their default."""
    texts = arguments.split(",") if arguments else []
    kinds = parameters(entry.codec)
    if len(texts) > len(kinds):
        raise ConfigError(f"{entry.name} takes {len(kinds)} parameters, got {shown(arguments)}")
    given = {key: parse_value(text, kind, f"{entry.name}'s {key}") for text, (key, kind) in zip(texts, kinds.items(), strict=False)}
    return build(entry, given)
