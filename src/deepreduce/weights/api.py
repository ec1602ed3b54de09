"""`diff`, `apply`, `apply_`, `verify` and `patches` on tensors in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from ..codec import IndexCodec
from ..errors import ConfigError, CorruptError, InputError
from ..message import DEFAULT_MAX_NUMEL
from . import envelope
from .applying import apply_one, check_whole_numel, whole_tensors
from .checking import State, check_chain, entries, state_of
from .comparing import Comparison, MemorySink, Origin
from .kinds import Array, Shape, steps_of
from .opened import Patch, Patched
from .pool import default_threads
from .portable import index_codec
from .records import Action, Changes, Piece, pieces
from .sources import NamedArrays, TensorSource

if TYPE_CHECKING:
    from typing_extensions import Buffer

Mode = Literal["conditional", "portable"]


class TensorPatch(NamedTuple):
    """What a portable patch does to one tensor.

    Of a changed tensor, `indices` are flat and increasing, and `steps` say by how many representable values each moves, as signed integers
    of the width of the dtype. `values` are all elements of a tensor that travels whole, in its shape. Both are empty for a removed tensor.
    """

    name: str
    shape: Shape
    dtype: np.dtype[Any]
    action: str
    indices: Array
    steps: Array
    values: Array | None


def diff(
    old: Mapping[str, Array],
    new: Mapping[str, Array],
    *,
    mode: Mode = "conditional",
    index: str = "rice",
    after: Buffer | None = None,
    threads: int | None = None,
) -> bytes:
    """Return a patch that turns `old` into `new`, bit for bit.

    ``conditional`` patches are the smallest: the reader uses the old weights to decode. ``portable`` ones can be read without them, by
    `patches`; `index` is the index codec for their positions. `after` is the patch before this one, whose result `old` must be: versions
    are counted then, and a patch that is applied too early is recognised.

    >>> import numpy as np
    >>> old = {"w": np.float32([1, 2, 3]), "b": np.zeros(2, np.float16)}
    >>> new = {"w": np.float32([1, 2, 4]), "b": np.zeros(2, np.float16)}
    >>> apply(old, diff(old, new))["w"]
    array([1., 2., 4.], dtype=float32)
    """
    codec = codec_of_mode(mode, index)
    origin = Origin() if after is None else Origin.after(Patch.of_bytes(after).header)
    sink = MemorySink()
    header = Comparison(NamedArrays(old), NamedArrays(new), sink, codec, threads or default_threads()).run(origin)
    return envelope.join(header, [*sink.groups, *sink.wholes])


def codec_of_mode(mode: str, index: str) -> IndexCodec | None:
    """The index codec of portable patches; None for conditional ones, which need none. Both arguments are checked in any case."""
    if mode not in ("conditional", "portable"):
        raise ConfigError(f"mode is conditional or portable, got {mode!r}")
    codec = index_codec(index)
    return codec if mode == "portable" else None


def apply(
    old: Mapping[str, Array], patch: Buffer | Sequence[Buffer], *, threads: int | None = None, max_numel: int = DEFAULT_MAX_NUMEL
) -> dict[str, Array]:
    """Return the weights after a patch, or after several that follow one another. `old` is not changed, and shares no memory with them.

    `WrongBaseError` where `old` is not what the patch was made from. `max_numel` is that of `apply_`.

    >>> import numpy as np
    >>> old, new = {"w": np.float32([1, 2])}, {"w": np.float32([1, 3])}
    >>> patch = diff(old, new)
    >>> apply(new, patch)
    Traceback (most recent call last):
        ...
    deepreduce.errors.WrongBaseError: already applied: the weights are the result of this patch
    """
    tensors = {name: np.array(tensor, order="C") for name, tensor in old.items()}
    apply_(tensors, patch, threads=threads, max_numel=max_numel)
    return tensors


def apply_(
    tensors: MutableMapping[str, Array],
    patch: Buffer | Sequence[Buffer],
    *,
    check: bool = True,
    threads: int | None = None,
    max_numel: int = DEFAULT_MAX_NUMEL,
) -> None:
    """Apply a patch, or several that follow one another, to these tensors, in place.

    Arrays that change are written to, and may share no memory with any other; the mapping itself changes where the patch adds, replaces or
    removes tensors. The base is checked and the whole patch decoded before anything is written, and every tensor that changed is checked
    afterwards: a patch that fails leaves all as it was. Of several patches, the results of those before it are kept; that they follow one
    another, and `max_numel`, are checked for all of them first.

    A patch may bring at most `max_numel` elements of tensors that are added or replaced, as they can take much more memory than the
    patch: raise it for larger models. Changes of tensors that are here are not limited.

    With ``check=False`` neither the old nor the new weights are hashed: for callers that know by other means that these are the weights
    the patch was made from. The patch itself, and the names, shapes and dtypes of the tensors, are checked in any case.

    >>> import numpy as np
    >>> weights = {"w": np.float32([1, 2])}
    >>> apply_(weights, diff(weights, {"w": np.float32([1, 3])}))
    >>> weights["w"]
    array([1., 3.], dtype=float32)
    """
    opened = [Patch.of_bytes(blob) for blob in _several(patch)]
    check_chain([each.header for each in opened])
    for each in opened:
        check_whole_numel(each.header, max_numel)
    for each in opened:
        apply_one(tensors, each, threads or default_threads(), check)


def _several(patch: Buffer | Sequence[Buffer]) -> Sequence[Buffer]:
    return patch if isinstance(patch, list | tuple) else [patch]  # type: ignore[list-item]


def verify(tensors: Mapping[str, Array], patch: Buffer, *, threads: int | None = None) -> State:
    """Return whether these weights are the ``base`` or the ``result`` of a patch; `WrongBaseError` where they are neither.

    >>> import numpy as np
    >>> old, new = {"w": np.float32([1, 2])}, {"w": np.float32([1, 3])}
    >>> verify(old, diff(old, new)), verify(new, diff(old, new))
    ('base', 'result')
    """
    return state_of(Patch.of_bytes(patch).header, entries(NamedArrays(tensors), threads or default_threads()))


def patches(patch: Buffer, *, max_numel: int = DEFAULT_MAX_NUMEL) -> Iterator[TensorPatch]:
    """Yield what a portable patch does, tensor by tensor, without the old weights; unchanged tensors are left out.

    For receivers that apply it on a device: view the float weights as integers, make ordered keys of them (all bits but the sign are
    flipped where the sign is set), add the steps, and turn them back. `max_numel` bounds the elements that change or travel whole.

    >>> import numpy as np
    >>> old, new = {"w": np.float32([1, 2])}, {"w": np.nextafter(np.float32([1, 2]), np.float32([1, 0]))}
    >>> [(name, indices.tolist(), steps.tolist()) for name, _, _, _, indices, steps, _ in patches(diff(old, new, mode="portable"))]
    [('w', [1], [-1])]
    """
    opened = Patch.of_bytes(patch)
    if opened.header.codec is None:
        raise InputError("a conditional patch can be read only with the weights it was made from: use apply, or diff(..., mode='portable')")
    if sum(record.changed for record in opened.header.tensors) > max_numel:
        raise CorruptError(f"the patch asks for more elements than max_numel allows, which are {max_numel}")
    return _patches(opened)


def _patches(patch: Patch) -> Iterator[TensorPatch]:
    wholes = whole_tensors(patch)
    number, group = -1, dict[Piece, Changes]()
    for index, record in enumerate(patch.header.tensors):
        if record.action == Action.UNCHANGED:
            continue
        found: list[Changes] = []
        for piece in pieces(record.numel, index) if record.action == Action.CHANGED else []:
            wanted = patch.group_of[record.name, piece.number]
            if wanted != number:
                number, group = wanted, {change[0]: change for change in patch.decode_group(wanted, None)}
            found.append(group[piece])
        yield TensorPatch(
            record.name,
            record.shape,
            record.kind.dtype,
            record.action.name.lower(),
            np.concatenate([np.empty(0, np.int64), *(positions.astype(np.int64) + piece.start for piece, positions, _ in found)]),
            np.concatenate([np.empty(0, f"i{record.kind.itemsize}"), *(signed(codes, record.kind.itemsize) for _, _, codes in found)]),
            wholes.get(record.name),
        )


def signed(codes: Array, itemsize: int) -> Array:
    """The steps of these codes, as signed integers of this width.

    >>> signed(np.uint8([0, 1, 2, 255]), 1).tolist()
    [1, -1, 2, -128]
    """
    return steps_of(codes).astype(f"u{itemsize}").view(f"i{itemsize}")


def patched(base: TensorSource, opened: Sequence[Patch]) -> TensorSource:
    """The result of several patches, as a source."""
    for patch in opened:
        base = Patched(base, patch)
    return base
