"""From bytes per step to a spec, and from a spec to bytes: what a message will take, from the sizes of its tensors alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, inf, prod

from ..errors import ConfigError
from ..indices.rice import Rice
from ..parameters import natural, shown
from ..pipeline import DeepReduce, parse
from ..sparsify.topr import TopR
from ..values.qsgd import QSGD
from .arrays import Array
from .items import step_source
from .policy import BySize, ByStep, Policy, policy_at

_HEAD_BITS = 40
"""The header of a tensor in a message."""
_SMALL_NUMEL = 1024
_LAST = 2**62
"""A step after the end of every schedule."""
_DENSE = tuple(map(parse, ("dense", "none/all/fp16", "none/all/qsgd:8")))
_VALUE_BITS = ((2.0, 4), (3.0, 5), (4.0, 6), (6.0, 7), (inf, 8))
"""Bits per value for so many bits per element at most: what has the least squared error on recorded gradients, or nearly."""


def budgeted(bytes_per_step: float, sizes: Iterable[int]) -> BySize:
    """Return a policy whose messages take about `bytes_per_step` bytes for tensors of these sizes.

    It sends ``topr:DENSITY/rice/qsgd:BITS``, with 4 bits per value where there are at most 2 bits per element of the model, and up to 8
    above that; the density is what then fits, with positions at their entropy. A budget that is enough for all elements at 8 bits, at 16
    bits or uncompressed gives `none/all/qsgd:8`, `none/all/fp16` or `dense`. Tensors below 1024 elements travel as they are if that takes
    a quarter of the bytes at most. Goes wherever a spec goes; the bytes are those of one rank's message of float32 gradients.

    >>> import deepreduce as dr
    >>> policy = dr.budgeted(100_000, [25_000_000, 2000, 10])
    >>> str(policy.large), str(policy.small)
    ('topr:0.00223/rice/qsgd:4', 'none/all/raw')
    >>> str(dr.budgeted(10_000_000, [25_000_000]).large)
    'topr:0.371/rice/qsgd:6'
    """
    numels = [natural(size, "the size of a tensor") for size in sizes]
    budget_bits = 8 * _number(bytes_per_step)
    if not sum(numels):
        raise ConfigError("a budget needs the sizes of tensors, at least one of them with elements")
    small_bits = sum(_bits(_DENSE[0], size) for size in numels if size < _SMALL_NUMEL)
    if small_bits > budget_bits / 4:
        return BySize(0, _DENSE[0], _codec_within(budget_bits, numels))
    large = [size for size in numels if size >= _SMALL_NUMEL]
    return BySize(_SMALL_NUMEL, _DENSE[0], _codec_within(budget_bits - small_bits, large) if large else _DENSE[0])


def expected_bytes(codec: DeepReduce, numel: int) -> float:
    """Return about how many bytes a float32 tensor takes in a message; `ConfigError` where its codec cannot tell beforehand.

    >>> round(expected_bytes(parse("topr:0.01/rice/qsgd"), 1_000_000)), round(expected_bytes(parse("none/all/lloyd:2"), 1_000_000))
    (18934, 250021)
    """
    return _bits(codec, numel) / 8


def steps_within(bytes_per_step: float, policy: Policy | ByStep, tensors: Mapping[str, Array]) -> int:
    """Return the smallest number of steps between messages with which the average is at most `bytes_per_step`.

    >>> import numpy as np
    >>> from deepreduce.step.policy import policy_of
    >>> steps_within(10_000, policy_of("none/all/lloyd:2", 1024), {"w": np.zeros(500_000, np.float32)})
    13
    """
    bytes_per_step, last = _number(bytes_per_step), policy_at(policy, _LAST)
    codecs = {name: last.codec_for(name, step_source(tensor)) for name, tensor in tensors.items()}
    return ceil(sum(expected_bytes(codec, prod(tensors[name].shape)) for name, codec in codecs.items()) / bytes_per_step)


def _number(bytes_per_step: object) -> float:
    if not isinstance(bytes_per_step, int | float) or not 0 < bytes_per_step < inf:
        raise ConfigError(f"bytes per step are a number above 0, got {shown(bytes_per_step)}")
    return float(bytes_per_step)


def _codec_within(budget_bits: float, sizes: list[int]) -> DeepReduce:
    for dense in _DENSE:
        if sum(_bits(dense, size) for size in sizes) <= 1.01 * budget_bits:
            return dense
    value = QSGD(next(bits for most, bits in _VALUE_BITS if budget_bits / sum(sizes) <= most))
    least_bits = sum(_bits(DeepReduce(TopR(1), Rice(), value), size) for size in sizes)
    if least_bits > 1.01 * budget_bits:
        raise ConfigError(
            f"{budget_bits / 8:,.0f} bytes are too few: one element of each of {len(sizes)} tensors takes {least_bits / 8:,.0f}"
        )
    low, high = 1e-9, 1.0
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        fits = sum(_bits(DeepReduce(TopR(middle), Rice(), value), size) for size in sizes) <= budget_bits
        low, high = (middle, high) if fits else (low, middle)
    return DeepReduce(TopR(float(f"{low:.3g}")), Rice(), value)


def _bits(codec: DeepReduce, numel: int) -> float:
    """Return about how many bits a tensor takes in a message: the sum of what its codecs expect."""
    sparsifier, index, value = codec.stages
    nnz = sparsifier.expected_nnz(numel)
    if nnz is None:
        raise _unknown(codec, "sparsifier", "topr, randomr, chunktopr, or none")
    index_bits = index.expected_bits(nnz, numel)
    if index_bits is None:
        raise _unknown(codec, "index codec", "rice, auto, shaped, delta, deltahuffman, pco, raw, bitmap, seeded, or after none all")
    value_bits = value.expected_bits(nnz)
    if value_bits is None:
        raise _unknown(codec, "value codec", "qsgd, lloyd, fp16, bf16 or raw")
    return _HEAD_BITS + index_bits + value_bits


def _unknown(codec: DeepReduce, stage: str, allowed: str) -> ConfigError:
    own = "expected_nnz" if stage == "sparsifier" else "expected_bits"
    return ConfigError(f"how many bytes {codec} takes is not known beforehand, because of its {stage}: use {allowed}, or give it {own}")
