"""One patch on tensors in memory, in place: nothing is written before all of it is decoded, nothing is kept that is not the result."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from .. import kernels
from ..errors import CorruptError
from .checking import check_base, entries
from .digests import CHECK_BYTES, digest, hasher
from .kinds import Array
from .lanes import Lanes
from .opened import Changes, Patch
from .records import Action, Piece, TensorRecord, pieces
from .sources import Arrays, Source, writable


def apply_one(tensors: MutableMapping[str, Array], patch: Patch, threads: int, max_numel: int) -> None:
    """Apply a patch in place: check the base, decode all, write, check the result."""
    source = Arrays(tensors)
    touched = [record for record in patch.header.tensors if record.action == Action.CHANGED]
    changes = _check_and_decode(patch, source, threads)
    flat = writable({record.name: tensors[record.name] for record in touched})
    wholes = whole_tensors(patch, max_numel)
    found = _move_and_digest(patch, flat, changes, threads)
    for record in touched:
        if found[record.name][:CHECK_BYTES] != record.result_check:
            _move_back(patch, flat, changes)
            raise CorruptError(f"tensor {record.name!r} is not what the patch promises; the weights are as they were")
    tensors.update(wholes)
    for record in patch.header.tensors:
        if record.action == Action.REMOVED:
            del tensors[record.name]


def _check_and_decode(patch: Patch, source: Source, threads: int) -> list[Changes]:
    """The changes of all groups. With threads, they are decoded while the base is checked: what is wrong with the base is told first."""
    if threads == 1 or not _has_shapes(patch, source):
        check_base(patch.header, entries(source, threads))
        return _decode_all(patch, source, threads)
    with ThreadPoolExecutor(1) as pool:
        decoding = pool.submit(_decode_all, patch, source, threads)
        check_base(patch.header, entries(source, threads))
        return decoding.result()


def _has_shapes(patch: Patch, source: Source) -> bool:
    """Whether the tensors that change have the shapes that the patch says, so that decoding needs no more memory than they have."""
    names = set(source.names)
    changed = (record for record in patch.header.tensors if record.action == Action.CHANGED)
    return all(record.name in names and source.describe(record.name) == (record.kind, record.shape) for record in changed)


def _decode_all(patch: Patch, source: Source, threads: int) -> list[Changes]:
    changes: list[Changes] = []
    tensors = patch.header.tensors
    with Lanes[list[Changes]](threads, changes.extend) as lanes:
        for number, group in enumerate(patch.groups):
            old = [source.read(tensors[piece.tensor].name, piece.start, piece.stop) for piece in group]
            lanes.run(partial(patch.decode_group, number, old))
    return changes


def _move_and_digest(patch: Patch, flat: Mapping[str, Array], changes: Sequence[Changes], threads: int) -> dict[str, bytes]:
    """Take all steps, in place; returns the digests of the tensors after them. Each piece is hashed while it is in the cache."""
    states = {name: hasher() for name in flat}

    def move(piece: Piece, positions: Array, codes: Array) -> tuple[str, Array]:
        record = patch.header.tensors[piece.tensor]
        part = flat[record.name][piece.start : piece.stop]
        kernels.steps.move(part, positions, codes, np.uint64(record.kind.flip))
        return record.name, part

    def update(moved: tuple[str, Array]) -> None:
        states[moved[0]].update(moved[1].view("u1").data)

    with Lanes(threads, update) as lanes:
        for change in changes:
            lanes.run(partial(move, *change))
    return {name: bytes(state.digest()) for name, state in states.items()}


def _move_back(patch: Patch, flat: Mapping[str, Array], changes: Sequence[Changes]) -> None:
    for piece, positions, codes in changes:
        record = patch.header.tensors[piece.tensor]
        kernels.steps.move_back(flat[record.name][piece.start : piece.stop], positions, codes, np.uint64(record.kind.flip))


def whole_tensors(patch: Patch, max_numel: int) -> dict[str, Array]:
    """The tensors that travel whole, checked."""
    wanted = [record for record in patch.header.tensors if record.travels_whole]
    if sum(record.numel for record in wanted) > max_numel:
        raise CorruptError(f"the patch brings {sum(record.numel for record in wanted)} new elements, max_numel allows {max_numel}")
    return {record.name: _whole(patch, record) for record in wanted}


def _whole(patch: Patch, record: TensorRecord) -> Array:
    parts = [patch.read_whole(record.name, piece.number) for piece in pieces(record.numel)]
    flat = np.concatenate(parts) if parts else np.empty(0, record.kind.unsigned)
    if digest(flat)[:CHECK_BYTES] != record.result_check:
        raise CorruptError(f"tensor {record.name!r} is not what the patch promises")
    return flat.view(record.kind.dtype).reshape(record.shape)
