"""Codecs as messages name them, and back."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from .errors import ConfigError, CorruptError, VersionError
from .message import NAMED, CodecId, Layout
from .registry import INDEX_STAGE, SPARSIFIER_STAGE, VALUE_STAGE, Stage
from .specs import Codecs, from_wire_arguments


def layout_of(codecs: Codecs) -> Layout:
    """Return what a message says of three codecs; `ConfigError` for one that is not registered.

    >>> import deepreduce as dr
    >>> layout_of((dr.TopR(0.01), dr.Rice(), dr.QSGD(4)))[0]
    CodecId(wire_id=3, name='', arguments='0.01')
    """
    sparsifier, index, value = codecs
    return _named(SPARSIFIER_STAGE, sparsifier), _named(INDEX_STAGE, index), _named(VALUE_STAGE, value)


@lru_cache(maxsize=1024)
def codecs_of(layout: Layout) -> Codecs:
    """Return the codecs that a message names: `VersionError` for one that is not here, `CorruptError` for arguments that it refuses."""
    sparsifier, index, value = layout
    return _built(SPARSIFIER_STAGE, sparsifier), _built(INDEX_STAGE, index), _built(VALUE_STAGE, value)


def _named(stage: Stage, codec: Any) -> CodecId:
    entry = stage.by_codec(codec)
    return CodecId(entry.wire_id, entry.name if entry.wire_id == NAMED else "", codec.argument_text)


def _built(stage: Stage, codec: CodecId) -> Any:
    try:
        entry = stage.by_name(codec.name) if codec.wire_id == NAMED else stage.by_id(codec.wire_id)
    except ConfigError as error:
        raise VersionError(f"the message needs a codec that is broken here: {error}") from error
    if entry is None:
        raise VersionError(f"the message needs {stage.title} {codec.name or codec.wire_id!r}, which is not installed here")
    try:
        return from_wire_arguments(entry, codec.arguments)
    except ConfigError as error:
        raise CorruptError(f"the message has a {stage.title} that cannot be: {error}") from error
