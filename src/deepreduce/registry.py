"""Names, wire ids and spec strings of all codecs.

A spec is ``sparsifier/index/value``, each ``name[:first-argument][,key=value]*``. The tables below are the whole registration of the
built-in codecs; other packages add theirs by entry points in the groups named in `STAGES`.
"""

from __future__ import annotations

import difflib
import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .codec import IndexCodec, Sparsifier, ValueCodec
from .errors import ConfigError
from .indices.all import All
from .indices.auto import Auto
from .indices.bitmap import Bitmap
from .indices.bloom import Bloom
from .indices.delta import Delta
from .indices.deltahuffman import DeltaHuffman
from .indices.huffman import HuffmanIndex
from .indices.pco import PcoIndex
from .indices.raw import RawIndex
from .indices.rice import Rice
from .indices.rle import RLE
from .indices.seeded import Seeded
from .indices.shaped import Shaped
from .parameters import members, parameters, shown
from .sparsify.chunktopr import ChunkTopR
from .sparsify.none import Keep
from .sparsify.nonzero import NonZero
from .sparsify.randomr import RandomR
from .sparsify.threshold import Threshold
from .sparsify.topr import TopR
from .values.deflate import Deflate
from .values.fitdexp import FitDExp
from .values.fitpoly import FitPoly
from .values.half import BF16, FP16
from .values.pco import PcoValue
from .values.qsgd import QSGD
from .values.raw import RawValue
from .values.sketch import Sketch
from .values.threelc import ThreeLC

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class Entry(NamedTuple):
    """One codec: the id that messages carry (never reused), the name in specs, and the class."""

    wire_id: int
    name: str
    codec: Any


NAMED = 0
"""The wire id of a third-party codec: its name follows, as ids of other packages could clash."""

SPARSIFIERS = (
    Entry(1, "none", Keep),
    Entry(2, "nonzero", NonZero),
    Entry(3, "topr", TopR),
    Entry(4, "randomr", RandomR),
    Entry(5, "threshold", Threshold),
    Entry(6, "chunktopr", ChunkTopR),
)

INDICES = (
    Entry(1, "raw", RawIndex),
    Entry(2, "bitmap", Bitmap),
    Entry(3, "all", All),
    Entry(4, "seeded", Seeded),
    Entry(5, "rle", RLE),
    Entry(6, "huffman", HuffmanIndex),
    Entry(7, "delta", Delta),
    Entry(8, "deltahuffman", DeltaHuffman),
    Entry(9, "rice", Rice),
    Entry(10, "pco", PcoIndex),
    Entry(11, "bloom", Bloom),
    Entry(12, "auto", Auto),
    Entry(13, "shaped", Shaped),
)

VALUES = (
    Entry(1, "raw", RawValue),
    Entry(2, "fp16", FP16),
    Entry(3, "bf16", BF16),
    Entry(4, "deflate", Deflate),
    Entry(5, "pco", PcoValue),
    Entry(6, "qsgd", QSGD),
    Entry(7, "fitpoly", FitPoly),
    Entry(8, "fitdexp", FitDExp),
    Entry(9, "sketch", Sketch),
    Entry(10, "threelc", ThreeLC),
)

PRESETS = {
    "dense": "none/all/raw",
    "threelc": "none/all/threelc",
    "sketchml": "nonzero/delta/sketch:bits=6",
    "skcompress": "nonzero/deltahuffman/sketch:bits=7,huffman=true",
}
"""Whole specs by name."""


@dataclass(frozen=True)
class Stage:
    """One of the three places in a spec: its table, and the entry-point group by which other packages add to it."""

    title: str
    group: str
    base: type[Any]
    table: tuple[Entry, ...]

    def by_name(self, name: str) -> Entry | None:
        """The codec of this name. Another package is imported only if it is the one that has it; `ConfigError` if that fails."""
        built_in = next((entry for entry in self.table if entry.name == name), None)
        return built_in or (_load(self, name) if name in third_party(self) else None)

    def by_id(self, wire_id: int) -> Entry | None:
        """The built-in codec of this wire id."""
        return next((entry for entry in self.table if entry.wire_id == wire_id), None)

    def by_codec(self, codec: object) -> Entry:
        """The row of a codec object."""
        for entry in (*self.table, *_imported(self)):
            if entry.codec is type(codec):
                return entry
        raise ConfigError(f"{type(codec).__name__} is not a registered {self.title}; allowed: {', '.join(self.names())}")

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted([*(entry.name for entry in self.table), *third_party(self)])


@cache
def third_party(stage: Stage) -> Mapping[str, EntryPoint]:
    """What other packages add, by name; a built-in name cannot be taken. Nothing of theirs is imported."""
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    taken = {entry.name for entry in stage.table}
    found: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=stage.group), key=lambda point: (point.name, point.value)):
        if point.name not in taken:
            found.setdefault(point.name, point)
    return found


@cache
def _load(stage: Stage, name: str) -> Entry:
    point = third_party(stage)[name]
    try:
        codec = point.load()
    except Exception as error:  # whatever the code of another package does when it is imported
        problem = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{stage.title} {name!r} is installed, but {point.value!r} does not load: {problem}") from error
    if not (isinstance(codec, type) and issubclass(codec, stage.base) and is_dataclass(codec)):
        raise ConfigError(f"entry point {point.value!r} in group {stage.group!r} is not a {stage.base.__name__} and a dataclass")
    return Entry(NAMED, name, codec)


def _imported(stage: Stage) -> Iterator[Entry]:
    """The codecs of other packages that are in use already: the class of an object is one of them, or it is not registered."""
    for name, point in third_party(stage).items():
        if point.value.partition(":")[0].partition(".")[0] in sys.modules:
            try:
                yield _load(stage, name)
            except ConfigError:
                continue


SPARSIFIER_STAGE = Stage("sparsifier", "deepreduce.sparsifiers", Sparsifier, SPARSIFIERS)
INDEX_STAGE = Stage("index codec", "deepreduce.indices", IndexCodec, INDICES)
VALUE_STAGE = Stage("value codec", "deepreduce.values", ValueCodec, VALUES)
STAGES = (SPARSIFIER_STAGE, INDEX_STAGE, VALUE_STAGE)


# Spec strings: text to codecs


def parse_stages(spec: str) -> tuple[Sparsifier, IndexCodec, ValueCodec]:
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
    return ", ".join(f"{key}={_kind_name(kind)}" for key, kind in parameters(entry.codec).items()) or "no parameters"


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


def _kind_name(kind: Any) -> str:
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
    raise ConfigError(f"{what} is {_kind_name(kind)}, got {shown(text)}")


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


# Spec strings: codecs to text


def format_value(value: object) -> str:
    """A parameter as text that `parse_value` reads back."""
    if value is None:
        return "auto"
    return str(value).lower() if isinstance(value, bool) else str(value)


def format_codec(stage: Stage, codec: object) -> str:
    """The text that gives this codec back; defaults are left out, unless they are `spelled`.

    >>> format_codec(SPARSIFIER_STAGE, ChunkTopR(32))
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


def wire_arguments(codec: Any) -> str:
    """All parameters in order, defaults too: a message must not change its meaning when a default does.

    >>> wire_arguments(ChunkTopR(32))
    '32,4096'
    """
    return ",".join(format_value(getattr(codec, f.name)) for f in fields(codec))


def from_wire_arguments(entry: Entry, arguments: str) -> Any:
    """The codec of a message. Parameters that a later version appended take their default."""
    texts = arguments.split(",") if arguments else []
    kinds = parameters(entry.codec)
    if len(texts) > len(kinds):
        raise ConfigError(f"{entry.name} takes {len(kinds)} parameters, got {shown(arguments)}")
    given = {key: parse_value(text, kind, f"{entry.name}'s {key}") for text, (key, kind) in zip(texts, kinds.items(), strict=False)}
    return build(entry, given)
