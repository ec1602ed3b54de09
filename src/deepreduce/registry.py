"""All codecs: their wire ids, names and classes.

The tables below are the whole registration of the built-in codecs. Others come in by `register`, in the same process, or by entry points in
the groups named in `STAGES`, from an installed package.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cache, cached_property
from inspect import isabstract
from typing import TYPE_CHECKING, Any, NamedTuple

from .codec import Codec, IndexCodec, Sparsifier, ValueCodec
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
from .message import NAMED
from .parameters import parameters, shown
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
from .values.lloyd import Lloyd
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
    Entry(11, "lloyd", Lloyd),
)


@dataclass(frozen=True, eq=False)
class Stage:
    """One of the three parts of a spec: its table, what `register` added, and the entry-point group of other packages."""

    title: str
    group: str
    base: type[Any]
    table: tuple[Entry, ...]
    added: dict[str, Entry] = field(default_factory=dict, repr=False)

    def by_name(self, name: str) -> Entry | None:
        """The codec of this name. Another package is imported only if it is the one that has it; `ConfigError` if that fails."""
        known = self._names.get(name) or self.added.get(name)
        return known or (_load(self, name) if name in third_party(self) else None)

    def by_id(self, wire_id: int) -> Entry | None:
        """The built-in codec of this wire id."""
        return self._ids.get(wire_id)

    def by_codec(self, codec: object) -> Entry:
        """The row of a codec object."""
        known = self._classes.get(type(codec))
        if known is not None:
            return known
        for entry in (*self.added.values(), *_imported(self)):
            if entry.codec is type(codec):
                return entry
        raise ConfigError(
            f"{type(codec).__name__} is not a registered {self.title}: deepreduce.register(name, {type(codec).__name__}) adds it; "
            f"known are {', '.join(self.names())}"
        )

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted({*self._names, *self.added, *third_party(self)})

    @cached_property
    def _names(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.table}

    @cached_property
    def _ids(self) -> dict[int, Entry]:
        return {entry.wire_id: entry for entry in self.table}

    @cached_property
    def _classes(self) -> dict[type[Any], Entry]:
        return {entry.codec: entry for entry in self.table}


SPARSIFIER_STAGE = Stage("sparsifier", "deepreduce.sparsifiers", Sparsifier, SPARSIFIERS)
INDEX_STAGE = Stage("index codec", "deepreduce.indices", IndexCodec, INDICES)
VALUE_STAGE = Stage("value codec", "deepreduce.values", ValueCodec, VALUES)
STAGES = (SPARSIFIER_STAGE, INDEX_STAGE, VALUE_STAGE)


# Codecs of the user: by a call in the same process


def register(name: str, codec: type[Codec]) -> None:
    """Make a codec class known in this process, by a name that specs can use and messages carry.

    Whoever decodes has to register it under the same name. Its stage follows from its base class. To register a class again, or one
    that was defined anew in the same place (a notebook cell that ran twice), is fine.

    >>> from dataclasses import dataclass
    >>> import deepreduce as dr, numpy as np
    >>> @dataclass(frozen=True)
    ... class Every(dr.Sparsifier):
    ...     step: int = 2
    ...     def select(self, source, seed):
    ...         return np.arange(0, source.numel, self.step)
    >>> dr.register("every", Every)
    >>> dr.decode(dr.encode(np.float32([1, 2, 3, 4, 5]), "every:3/raw/raw"))
    array([1., 0., 0., 4., 0.], dtype=float32)
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]{0,99}", name):
        raise ConfigError(f"a codec has a name of at most 100 letters, digits and _ . -, letters first, got {shown(name)}")
    stage = _stage_of(codec)
    parameters(codec)
    taken = stage.by_name(name)
    if taken is not None and not _same_class(taken.codec, codec):
        raise ConfigError(f"{stage.title} {name!r} is {taken.codec.__module__}.{taken.codec.__qualname__} already: take another name")
    if taken is None or name in stage.added:
        stage.added[name] = Entry(NAMED, name, codec)


def _stage_of(codec: Any) -> Stage:
    stage = next((stage for stage in STAGES if isinstance(codec, type) and issubclass(codec, stage.base)), None)
    if stage is None:
        raise ConfigError(f"a codec is a class derived from Sparsifier, IndexCodec or ValueCodec, got {shown(codec)}")
    if "__dataclass_params__" not in vars(codec) or not vars(codec)["__dataclass_params__"].frozen:
        raise ConfigError(f"{codec.__name__} is not a frozen dataclass: write @dataclass(frozen=True) before the class")
    if isabstract(codec):
        raise ConfigError(f"{codec.__name__} lacks {', '.join(sorted(codec.__abstractmethods__))}")
    return stage


def _same_class(one: type[Any], other: type[Any]) -> bool:
    return one is other or (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


# Codecs of other packages: by entry points


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
