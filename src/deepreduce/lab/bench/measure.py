"""One gradient, one spec: check the round trip, count the bytes, then time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...codec import ValueCodec
from ...errors import DeepReduceError
from ...inspection import MessageInfo, TensorInfo, inspect
from ...pipeline import DeepReduce, decode, decode_many, decode_many_sparse, decode_sparse, parse
from ...tensor import SparseTensor, Values

if TYPE_CHECKING:
    from typing_extensions import Buffer

BenchInput = Values | Mapping[str, Values]

_BUDGET_SECONDS = 1.0  # a slow codec is timed less often, not for minutes


class RoundTripError(DeepReduceError, AssertionError):
    """A codec does not give back what its contract promises."""


@dataclass(frozen=True)
class Row:
    """What one spec made of one gradient. Bytes and bits are those of `deepreduce.inspect`; seconds are the best of several runs.

    `relative_error` is the distance from the whole gradient, `codec_error` that of the sent values from what they stood for, each
    relative to the norm of what it is compared with. Throughput counts dense bytes.
    """

    gradient: str
    method: str
    spec: str
    used: str
    kind: str
    numel: int
    nnz: int
    dense_bytes: int
    nbytes: int
    header_bytes: int
    index_bytes: int
    order_bytes: int
    value_bytes: int
    bits_per_index: float
    bits_per_value: float
    relative_error: float
    codec_error: float
    encode_seconds: float | None
    decode_seconds: float | None

    @property
    def relative_volume(self) -> float:
        """Bytes of the message over bytes of the dense gradient."""
        return self.nbytes / self.dense_bytes if self.dense_bytes else 1.0

    @property
    def encode_mb_per_second(self) -> float | None:
        """Dense megabytes encoded in a second."""
        return self.dense_bytes / self.encode_seconds / 1e6 if self.encode_seconds else None

    @property
    def decode_mb_per_second(self) -> float | None:
        """Dense megabytes decoded in a second."""
        return self.dense_bytes / self.decode_seconds / 1e6 if self.decode_seconds else None


def measure(name: str, gradient: BenchInput, spec: str, method: str | None = None, repeat: int = 5) -> Row:
    """Encode and decode `gradient` by `spec`: a named mapping goes as one message.

    >>> import numpy as np
    >>> row = measure("ramp", np.arange(1000, dtype=np.float32), "topr:0.01/bitmap/raw", repeat=1)
    >>> row.nnz, row.index_bytes, row.value_bytes, row.bits_per_value
    (10, 125, 40, 32.0)
    """
    codec = parse(spec)
    blob = _encode(codec, gradient)
    received = _decode_sparse(blob)
    infos = _infos(inspect(blob))
    check(_tensors(gradient), infos, received)
    relative_error, codec_error = _errors(_tensors(gradient), received)
    return Row(
        gradient=name,
        method=method or spec,
        spec=str(codec),
        used=" ".join(dict.fromkeys(info.spec for info in infos.values())),
        kind="codec",
        **_sizes(infos.values(), len(blob)),
        relative_error=relative_error,
        codec_error=codec_error,
        encode_seconds=best_seconds(lambda: _encode(codec, gradient), repeat),
        decode_seconds=best_seconds(lambda: _decode(gradient, blob), repeat),
    )


def best_seconds(action: Callable[[], object], repeat: int) -> float:
    """The shortest of `repeat` runs after one that is not counted, or of fewer where they are slow."""
    action()
    best, spent = float("inf"), 0.0
    for _ in range(repeat):
        start = perf_counter()
        action()
        seconds = perf_counter() - start
        best, spent = min(best, seconds), spent + seconds
        if spent > _BUDGET_SECONDS:
            break
    return best


def check(gradients: Mapping[str, Values], infos: Mapping[str, TensorInfo], received: Mapping[str, SparseTensor]) -> None:
    """Raise `RoundTripError` unless every tensor came back as its codecs promise: exactly, or within their bound."""
    if list(gradients) != list(received):
        raise RoundTripError(f"sent {list(gradients)}, received {list(received)}")
    for name, gradient in gradients.items():
        sparse, codec = received[name], parse(infos[name].spec)
        if sparse.shape != gradient.shape or sparse.dtype != gradient.dtype or sparse.indices.size != infos[name].nnz:
            raise RoundTripError(f"{name!r} came back with another shape, dtype or number of elements")
        if not codec.index.slips and not _within_bound(codec.value, gradient.reshape(-1)[sparse.indices], sparse.values):
            raise RoundTripError(f"{name!r} came back with values that {infos[name].spec} does not allow")


def _within_bound(codec: ValueCodec, sent: Values, received: Values) -> bool:
    if codec.lossless:
        return sent.tobytes() == received.tobytes()
    wanted, got = sent.astype(np.float64), received.astype(np.float64)
    with np.errstate(invalid="ignore"):  # Inf - Inf
        close = np.abs(got - wanted) <= np.asarray(codec.error_bound(sent)) * (1 + 1e-5)
    return bool(np.all(np.where(np.isfinite(wanted), close, _same(wanted, got))))


def _encode(codec: DeepReduce, gradient: BenchInput) -> bytes:
    return codec.encode(gradient) if isinstance(gradient, np.ndarray) else codec.encode_many(gradient)


def _decode(gradient: BenchInput, blob: Buffer) -> object:
    return decode(blob) if isinstance(gradient, np.ndarray) else decode_many(blob)


def _decode_sparse(blob: Buffer) -> Mapping[str, SparseTensor]:
    return decode_many_sparse(blob) if isinstance(inspect(blob), MessageInfo) else {"": decode_sparse(blob)}


def _tensors(gradient: BenchInput) -> Mapping[str, Values]:
    return {"": gradient} if isinstance(gradient, np.ndarray) else gradient


def _infos(info: TensorInfo | MessageInfo) -> Mapping[str, TensorInfo]:
    return info.tensors if isinstance(info, MessageInfo) else {"": info}


def _sizes(infos: Iterable[TensorInfo], nbytes: int) -> dict[str, Any]:
    tensors = list(infos)
    names = ("numel", "nnz", "dense_bytes", "index_bytes", "order_bytes", "value_bytes")
    total = {name: sum(getattr(info, name) for info in tensors) for name in names}
    sections = total["index_bytes"] + total["order_bytes"] + total["value_bytes"]
    nnz = total["nnz"] or 1
    return total | {
        "nbytes": nbytes,
        "header_bytes": nbytes - sections,
        "bits_per_index": 8 * total["index_bytes"] / nnz,
        "bits_per_value": 8 * (total["value_bytes"] + total["order_bytes"]) / nnz,
    }


def _errors(gradients: Mapping[str, Values], received: Mapping[str, SparseTensor]) -> tuple[float, float]:
    """Return what is missing of the whole gradient, and of the sent values alone. Inf and NaN that came back as they were are no error."""
    whole, lost, sent, changed = 0.0, 0.0, 0.0, 0.0
    for name, gradient in gradients.items():
        dense, support = gradient.reshape(-1).astype(np.float64), received[name].indices
        values = received[name].values.astype(np.float64)
        kept_bad = np.where(_same(dense[support], values), 0.0, np.inf)[~np.isfinite(dense[support])]
        changed += float(kept_bad.sum())
        lost += float("inf") if np.count_nonzero(~np.isfinite(dense)) > kept_bad.size else 0.0
        values = np.where(np.isfinite(dense[support]), values, 0.0)
        dense = np.where(np.isfinite(dense), dense, 0.0)
        at_support = dense[support]
        whole += float(dense @ dense)
        sent += float(at_support @ at_support)
        changed += float((values - at_support) @ (values - at_support))
        lost += float(dense @ dense) - float(at_support @ at_support)
    return _root(lost + changed, whole), _root(changed, sent)


def _same(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.bool_]:
    return np.asarray((one == other) | (np.isnan(one) & np.isnan(other)))


def _root(part: float, whole: float) -> float:
    return float(np.sqrt(max(part, 0.0) / whole)) if whole else 0.0
