"""What one could use instead, as far as it is installed. Each peer gives rows like those of a codec."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from typing import Any

import numpy as np

from ...sparsify.amount import count_of
from ...tensor import Values
from .measure import BenchInput, RoundTripError, Row, best_seconds

_KEPT = 0.01
_LOW_RANK = 1


@dataclass(frozen=True)
class PeerTrial:
    """One peer on one gradient: how to encode and decode it, and what that is made of. No functions: only the volume is known."""

    method: str
    note: str
    index_bytes: int
    value_bytes: int
    nnz: int
    received: Values | None = None
    encode: Callable[[], object] | None = None
    decode: Callable[[], object] | None = None


def measure_peers(name: str, gradient: BenchInput, repeat: int = 5) -> list[Row]:
    """A row for every peer that is installed.

    >>> rows = measure_peers("ramp", np.arange(1000, dtype=np.float32), repeat=1)
    >>> "zlib" in [row.method for row in rows]
    True
    """
    tensors = [tensor for tensor in _tensors(gradient) if tensor.size]
    if not tensors:
        return []
    with _one_thread():
        return [_row(name, tensors, trial, repeat) for trial in _trials(tensors)]


def _trials(tensors: list[Values]) -> Iterator[PeerTrial]:
    yield _zlib(tensors)
    yield _pcodec(tensors)
    if find_spec("torch") is not None:
        yield _torch_topk(tensors)
        yield _fp16_hook(tensors)
        yield _powersgd_hook(tensors)


def _flat(tensors: list[Values], dtype: Any) -> Values:
    return np.concatenate([tensor.reshape(-1).astype(dtype, copy=False) for tensor in tensors])


@contextmanager
def _one_thread() -> Iterator[None]:
    """All codecs run on one thread, so torch does too."""
    if find_spec("torch") is None:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _row(name: str, tensors: list[Values], trial: PeerTrial, repeat: int) -> Row:
    dense = _flat(tensors, np.float64)
    error = float("nan")
    if trial.received is not None:
        norm = float(np.linalg.norm(dense))
        error = float(np.linalg.norm(trial.received.astype(np.float64) - dense)) / norm if norm else 0.0
    return Row(
        gradient=name,
        method=trial.method,
        spec=trial.note,
        used=trial.note,
        kind="peer",
        numel=dense.size,
        nnz=trial.nnz,
        dense_bytes=sum(tensor.nbytes for tensor in tensors),
        nbytes=trial.index_bytes + trial.value_bytes,
        header_bytes=0,
        index_bytes=trial.index_bytes,
        order_bytes=0,
        value_bytes=trial.value_bytes,
        bits_per_index=8 * trial.index_bytes / max(trial.nnz, 1),
        bits_per_value=8 * trial.value_bytes / max(trial.nnz, 1),
        relative_error=error,
        codec_error=float("nan"),
        encode_seconds=None if trial.encode is None else best_seconds(trial.encode, repeat),
        decode_seconds=None if trial.decode is None else best_seconds(trial.decode, repeat),
    )


def _zlib(tensors: list[Values]) -> PeerTrial:
    raw = b"".join(tensor.tobytes() for tensor in tensors)
    packed = zlib.compress(raw)
    if zlib.decompress(packed) != raw:
        raise RoundTripError("zlib did not give back the gradient")
    exact = _flat(tensors, np.float64)
    note = "all elements, lossless"
    return PeerTrial("zlib", note, 0, len(packed), exact.size, exact, lambda: zlib.compress(raw), lambda: zlib.decompress(packed))


def _pcodec(tensors: list[Values]) -> PeerTrial:
    from pcodec import ChunkConfig, standalone

    dtypes = {tensor.dtype for tensor in tensors}
    native = len(dtypes) == 1 and tensors[0].dtype.name in ("float16", "float32", "float64")
    values = _flat(tensors, tensors[0].dtype if native else np.float32)
    packed = standalone.simple_compress(values, ChunkConfig())
    received = standalone.simple_decompress(packed)
    if values.tobytes() != received.tobytes():
        raise RoundTripError("pcodec did not give back the gradient")
    return PeerTrial(
        "pcodec",
        "all elements, lossless" if native else "all elements as float32",
        0,
        len(packed),
        values.size,
        received,
        lambda: standalone.simple_compress(values, ChunkConfig()),
        lambda: standalone.simple_decompress(packed),
    )


def _torch_topk(gradient: list[Values]) -> PeerTrial:
    """The usual way, tensor by tensor: 64-bit indices as torch gives them, and the values in their dtype."""
    import torch

    tensors = [torch.from_numpy(tensor.reshape(-1).astype(np.float32)) for tensor in gradient]

    def encode() -> Any:
        positions = [torch.topk(tensor.abs(), count_of(_KEPT, tensor.numel()), sorted=False).indices for tensor in tensors]
        return [(each, tensor[each]) for tensor, each in zip(tensors, positions, strict=True)]

    def decode() -> Any:
        return [torch.zeros_like(tensor).index_copy_(0, *kept) for tensor, kept in zip(tensors, sent, strict=True)]

    sent = encode()
    counts = [values.numel() for _, values in sent]
    value_bytes = sum(count * tensor.itemsize for count, tensor in zip(counts, gradient, strict=True))
    received = torch.cat(decode()).numpy()
    return PeerTrial(
        "torch.topk", f"top {_KEPT:.0%} with int64 indices", 8 * sum(counts), value_bytes, sum(counts), received, encode, decode
    )


def _fp16_hook(tensors: list[Values]) -> PeerTrial:
    """PyTorch's fp16_compress_hook: every element as a half."""
    import torch

    flat = torch.from_numpy(_flat(tensors, np.float32))
    halves = flat.half()
    received = halves.float().numpy()
    return PeerTrial("fp16 hook", "all elements as halves", 0, 2 * flat.numel(), flat.numel(), received, flat.half, halves.float)


def _powersgd_hook(tensors: list[Values]) -> PeerTrial:
    """The elements that PyTorch's PowerSGD sends: two low-rank factors of each matrix that this makes smaller by half at least."""
    value_bytes = sum(_low_rank_elements(tensor.shape) * tensor.itemsize for tensor in tensors)
    return PeerTrial("PowerSGD hook", f"rank {_LOW_RANK}: volume only", 0, value_bytes, sum(tensor.size for tensor in tensors))


def _low_rank_elements(shape: tuple[int, ...]) -> int:
    numel = prod(shape)
    if len(shape) < 2:
        return numel
    factors = (shape[0] + numel // max(shape[0], 1)) * _LOW_RANK
    return factors if factors * 2 < numel else numel


def _tensors(gradient: BenchInput) -> list[Values]:
    return list(gradient.values()) if isinstance(gradient, Mapping) else [gradient]
