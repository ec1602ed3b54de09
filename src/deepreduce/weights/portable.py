"""Changes of weights that can be read without the old ones: positions by any lossless index codec, then the steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import kernels, registry, specs
from ..codec import IndexCodec
from ..errors import ConfigError, CorruptError, VersionError
from ..indices.rice import Rice
from ..indices.rle import RLE
from ..reader import Reader, text, varint
from ..source import Space
from ..tensor import Support
from .kinds import Kind
from .symbols import read_numbers, write_numbers

_DENSE = 0.5
"""Above this share of changes Rice codes, which take a bit each at least, give way to the lengths of runs."""

Positions = NDArray[np.uint32]
Codes = NDArray[Any]


def index_codec(spec: str) -> IndexCodec:
    """The index codec of a piece of a spec string, which must be lossless.

    >>> index_codec("rice")
    Rice()
    """
    codec = specs.parse_stages(f"nonzero/{spec}/raw")[1]
    if not codec.lossless or codec.slips:
        raise ConfigError(f"differences are exact: {spec!r} does not keep every position")
    return codec


def write_codec(codec: IndexCodec) -> bytes:
    """The index codec as a patch names it."""
    entry = registry.INDEX_STAGE.by_codec(codec)
    return text(entry.name) + text(codec.argument_text)


def read_codec(reader: Reader) -> IndexCodec:
    """The inverse of `write_codec`."""
    name, arguments = reader.text(), reader.text()
    try:
        entry = registry.INDEX_STAGE.by_name(name)
        if entry is None:
            raise VersionError(f"the patch needs index codec {name!r}, which is not installed here")
        codec: IndexCodec = specs.from_wire_arguments(entry, arguments)
    except ConfigError as error:
        raise CorruptError(f"the patch has an index codec that cannot be: {error}") from error
    return codec


def encode(codec: IndexCodec, size: int, positions: Positions, codes: Codes) -> bytes:
    """The changes of a group of `size` weights; there is one at least."""
    selected, space = Support.trusted(positions.astype(np.int64), size), Space((size,))
    dense = isinstance(codec, Rice) and positions.size > _DENSE * size
    chosen = (RLE() if dense else codec).choose(selected, space)
    index_part, _ = chosen.encode(selected, space, 0)
    named = b"\x00" if chosen == codec else b"\x01" + write_codec(chosen)
    return b"".join([named, varint(len(index_part)), index_part, write_numbers(codes)])


def decode(section: Reader, codec: IndexCodec, kind: Kind, size: int, count: int) -> tuple[Positions, Codes]:
    """The positions and the codes of `count` changes in a group of `size` weights."""
    if section.byte():
        codec = read_codec(section)
    part = Reader(section.take(section.varint()))
    decoded: Any = codec.decode(part, count, Space((size,)))
    found = decoded.positions if isinstance(decoded, Support) else decoded
    part.expect_end()
    positions = np.empty(count, np.uint32)
    if found.size != count or not kernels.steps.narrow(found, size, positions):
        raise CorruptError(f"positions of {count} changes that do not increase, or lie outside of {size} weights")
    return positions, read_numbers(section, count, kind.unsigned)
