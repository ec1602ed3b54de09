"""One patch on tensors in memory, in place: nothing is written before all of it is decoded, nothing is kept that is not the result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .. import kernels
from ..errors import CorruptError, WrongBaseError
from .checking import check_base, check_tensors, entries, entry
from .digests import BLOCK_BYTES, CHECK_BYTES, digest, hasher
from .kinds import Array
from .opened import Patch
from .records import Action, Changes, Header, TensorRecord, pieces
from .sources import NamedArrays, TensorSource, check_apart, writable

Move = Callable[[Array, Array, Array, np.uint64], None]


def apply_one(tensors: MutableMapping[str, Array], patch: Patch, threads: int, check: bool) -> None:
    """Apply a patch in place: check the base, decode all, write, check the result."""
    source = NamedArrays(tensors)
    _check_tensors(patch, source, threads, check)
    changed = {record.name: tensors[record.name] for record in patch.header.tensors if record.action == Action.CHANGED}
    check_apart(tensors, changed)
    changes = _decode(patch, source, threads, check)
    flat = writable(changed)
    wholes = whole_tensors(patch)
    if check:
        _move_checked(patch, flat, changes, threads)
    else:
        _move(patch, flat, changes, threads, kernels.steps.move)
    tensors.update(wholes)
    for record in patch.header.tensors:
        if record.action == Action.REMOVED:
            del tensors[record.name]


def _check_tensors(patch: Patch, source: TensorSource, threads: int, check: bool) -> None:
    """Refuse other names, shapes or dtypes than those of the base; decoding needs no more memory than these tensors have then."""
    try:
        check_tensors(patch.header, {name: source.describe(name) for name in source.names})
    except WrongBaseError:
        if check:
            check_base(patch.header, entries(source, threads))  # it knows whether they are the result, or an earlier version
        raise


def _decode(patch: Patch, source: TensorSource, threads: int, check: bool) -> list[Changes]:
    """The changes of all groups. The base is hashed beside, if it is to be checked, and what is wrong with it is told first."""
    tensors = patch.header.tensors

    def decode(number: int) -> list[Changes]:
        old = [source.read(tensors[piece.tensor].name, piece.start, piece.stop) for piece in patch.groups[number]]
        return patch.decode_group(number, old)

    pool = ThreadPoolExecutor(threads)
    try:
        hashed = [pool.submit(entry, source, name) for name in source.names if check]
        decoded = [pool.submit(decode, number) for number in range(len(patch.groups))]
        if check:
            check_base(patch.header, [job.result() for job in hashed])
        return [change for job in decoded for change in job.result()]
    finally:
        pool.shutdown(cancel_futures=True)


def _move(patch: Patch, flat: Mapping[str, Array], changes: Iterable[Changes], threads: int, kernel: Move) -> None:
    """Take all steps, in place."""

    def move(change: Changes) -> None:
        piece, positions, codes = change
        record = patch.header.tensors[piece.tensor]
        kernel(flat[record.name][piece.start : piece.stop], positions, codes, np.uint64(record.kind.flip))

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(move, changes))


def _move_checked(patch: Patch, flat: Mapping[str, Array], changes: Sequence[Changes], threads: int) -> None:
    """Take all steps, in place, and check the result; where it is not what the patch promises, all is moved back."""
    by_tensor: dict[int, list[Changes]] = {}
    for change in changes:
        by_tensor.setdefault(change[0].tensor, []).append(change)
    records = [patch.header.tensors[index] for index in by_tensor]
    with ThreadPoolExecutor(threads) as pool:
        digests = list(pool.map(_moved_digest, [flat[record.name] for record in records], by_tensor.values(), records))
    for record, found in zip(records, digests, strict=True):
        if found[:CHECK_BYTES] != record.result_check:
            _move(patch, flat, changes, threads, kernels.steps.move_back)
            raise CorruptError(f"tensor {record.name!r} is not what the patch promises; the weights are as they were")


def _moved_digest(patterns: Array, changes: Sequence[Changes], record: TensorRecord) -> bytes:
    """The digest of a tensor after its steps, which are taken in place, block by block: each is hashed while it is in the cache."""
    state, flip, block = hasher(), np.uint64(record.kind.flip), BLOCK_BYTES // record.kind.itemsize
    for piece, positions, codes in changes:
        part = patterns[piece.start : piece.stop]
        moved = part.view("u1").data
        starts = range(0, part.size, block)
        bounds = np.searchsorted(positions, np.array([*starts, part.size], np.uint32))
        for start, first, last in zip(starts, bounds, bounds[1:], strict=False):
            kernels.steps.move(part, positions[first:last], codes[first:last], flip)
            state.update(moved[start * part.itemsize : (start + block) * part.itemsize])
    return bytes(state.digest())


def check_whole_numel(header: Header, max_numel: int) -> None:
    """Refuse a patch whose whole tensors have more elements together."""
    numel = sum(record.numel for record in header.tensors if record.travels_whole)
    if numel > max_numel:
        raise CorruptError(f"the patch brings {numel} new elements, max_numel allows {max_numel}")


def whole_tensors(patch: Patch) -> dict[str, Array]:
    """The tensors that travel whole, checked."""
    return {record.name: _whole(patch, record) for record in patch.header.tensors if record.travels_whole}


def _whole(patch: Patch, record: TensorRecord) -> Array:
    parts = [patch.read_whole(record.name, piece.number) for piece in pieces(record.numel)]
    flat = np.concatenate(parts) if parts else np.empty(0, record.kind.unsigned)
    if digest(flat)[:CHECK_BYTES] != record.result_check:
        raise CorruptError(f"tensor {record.name!r} is not what the patch promises")
    return flat.view(record.kind.dtype).reshape(record.shape)
