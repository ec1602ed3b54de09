"""What other projects send for a difference of weights: their formats in a few lines of numpy each, and packages for differences of files.

None of the formats has names, shapes or checksums here. Packages that are not installed are left out:
``pip install -c constraints.txt z4ai bsdiff4 pyxdelta``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray
from pcodec import ChunkConfig, standalone

Patterns = NDArray[np.uint16]
WINDOW_LOG = 27


class Side(NamedTuple):
    """One way to send the difference of two flat arrays: `encode` returns its parts, `apply` takes them to the old weights in place."""

    name: str
    encode: Callable[[Patterns, Patterns], tuple[Any, ...]]
    apply: Callable[[Patterns, tuple[Any, ...]], None]


def ordered(bits: Patterns) -> NDArray[np.int32]:
    """Integers in the order of the bfloat16 values."""
    wide = bits.astype(np.int32)
    return np.where(wide & 0x8000, -(wide & 0x7FFF) - 1, wide)


def vllm_encode(old: Patterns, new: Patterns) -> tuple[Any, ...]:
    positions = np.flatnonzero(old != new).astype(np.int32)
    return positions, new[positions]


def vllm_apply(weights: Patterns, parts: tuple[Any, ...]) -> None:
    weights[parts[0]] = parts[1]


def slime_encode(old: Patterns, new: Patterns) -> tuple[Any, ...]:
    return (zstandard.ZstdCompressor(1).compress(old ^ new),)


def slime_apply(weights: Patterns, parts: tuple[Any, ...]) -> None:
    weights ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(parts[0]), np.uint16)


def nemo_encode(old: Patterns, new: Patterns) -> tuple[Any, ...]:
    """Gaps above 65534 are cut by entries that change nothing."""
    positions = np.flatnonzero(old != new)
    gaps = np.diff(positions, prepend=-1) - 1
    repeats = gaps // 65535 + 1
    wide = np.full(int(repeats.sum()), 65535, np.uint16)
    wide[np.cumsum(repeats) - 1] = gaps % 65535
    xors = np.zeros(wide.size, np.uint16)
    xors[np.cumsum(repeats) - 1] = old[positions] ^ new[positions]
    compressor = zstandard.ZstdCompressor(1)
    return compressor.compress(wide), compressor.compress(xors)


def nemo_apply(weights: Patterns, parts: tuple[Any, ...]) -> None:
    gaps, xors = (np.frombuffer(zstandard.ZstdDecompressor().decompress(part), np.uint16) for part in parts)
    real = gaps != 65535
    positions = (np.cumsum(gaps.astype(np.int64) + real) - 1)[real]
    weights[positions] ^= xors[real]


def pcodec_encode(old: Patterns, new: Patterns) -> tuple[Any, ...]:
    positions = np.flatnonzero(old != new)
    gaps = np.diff(positions, prepend=-1).astype(np.uint32)
    steps = (ordered(new[positions]) - ordered(old[positions])).astype(np.int16)
    return standalone.simple_compress(gaps, ChunkConfig()), standalone.simple_compress(steps, ChunkConfig())


def pcodec_apply(weights: Patterns, parts: tuple[Any, ...]) -> None:
    gaps, steps = (standalone.simple_decompress(part) for part in parts)
    positions = np.cumsum(gaps.astype(np.int64)) - 1
    keys = ordered(weights[positions]) + steps
    weights[positions] = np.where(keys < 0, -keys - 1 | 0x8000, keys).astype(np.uint16)


def old_as_prefix(old: Patterns) -> zstandard.ZstdCompressionDict:
    return zstandard.ZstdCompressionDict(old.tobytes(), dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def patch_from_encode(old: Patterns, new: Patterns) -> tuple[Any, ...]:
    parameters = zstandard.ZstdCompressionParameters.from_level(19, window_log=WINDOW_LOG, enable_ldm=True)
    return (zstandard.ZstdCompressor(dict_data=old_as_prefix(old), compression_params=parameters).compress(new.tobytes()),)


def patch_from_apply(weights: Patterns, parts: tuple[Any, ...]) -> None:
    decompressor = zstandard.ZstdDecompressor(dict_data=old_as_prefix(weights), max_window_size=1 << WINDOW_LOG)
    weights[:] = np.frombuffer(decompressor.decompress(parts[0]), np.uint16)


def z4ai_encode(old: Patterns, new: Patterns) -> tuple[Any, ...]:
    import z4ai

    return (z4ai.compress_delta(new.tobytes(), old.tobytes(), dtype="bf16"),)


def z4ai_apply(weights: Patterns, parts: tuple[Any, ...]) -> None:
    import z4ai

    weights[:] = np.frombuffer(z4ai.decompress_delta(parts[0], weights.tobytes()), np.uint16)


def bsdiff_encode(old: Patterns, new: Patterns) -> tuple[Any, ...]:
    import bsdiff4

    return (bsdiff4.diff(old.tobytes(), new.tobytes()),)


def bsdiff_apply(weights: Patterns, parts: tuple[Any, ...]) -> None:
    import bsdiff4

    weights[:] = np.frombuffer(bsdiff4.patch(weights.tobytes(), parts[0]), np.uint16)


def xdelta_encode(old: Patterns, new: Patterns) -> tuple[Any, ...]:
    import pyxdelta

    with tempfile.TemporaryDirectory() as folder:
        old.tofile(f"{folder}/old")
        new.tofile(f"{folder}/new")
        assert pyxdelta.run(f"{folder}/old", f"{folder}/new", f"{folder}/patch")
        return (Path(folder, "patch").read_bytes(),)


def xdelta_apply(weights: Patterns, parts: tuple[Any, ...]) -> None:
    import pyxdelta

    with tempfile.TemporaryDirectory() as folder:
        weights.tofile(f"{folder}/old")
        Path(folder, "patch").write_bytes(parts[0])
        assert pyxdelta.decode(f"{folder}/old", f"{folder}/patch", f"{folder}/new")
        weights[:] = np.fromfile(f"{folder}/new", np.uint16)


def checked(side: Side) -> Side:
    """A side that hashes both versions, as ours do, and refuses weights that are not the base or do not become the result."""

    def encode(old: Patterns, new: Patterns) -> tuple[Any, ...]:
        return (digest(old), digest(new), *side.encode(old, new))

    def apply(weights: Patterns, parts: tuple[Any, ...]) -> None:
        base, result, *rest = parts
        if digest(weights) not in (base, result):  # the result too: it is timed over and over on the same weights, and XOR goes both ways
            raise ValueError("wrong base")
        side.apply(weights, tuple(rest))
        if digest(weights) not in (base, result):
            raise ValueError("wrong result")

    return Side(f"{side.name}, both versions hashed", encode, apply)


def digest(weights: Patterns) -> bytes:
    return xxhash.xxh3_128_digest(weights.view(np.uint8).data)


NEMO = Side("uint16 gaps + XOR, zstd-1 (NeMo-RL)", nemo_encode, nemo_apply)
FORMATS = [
    Side("int32 positions + new values (vLLM, verl, vime)", vllm_encode, vllm_apply),
    Side("XOR + zstd-1 (slime, miles, SkyRL)", slime_encode, slime_apply),
    NEMO,
    Side("pcodec on gaps and steps", pcodec_encode, pcodec_apply),
]
"""What other projects send after every step, and pcodec."""

_PACKAGES = {
    "zstandard": Side("zstd-19 with the old weights as prefix (--patch-from)", patch_from_encode, patch_from_apply),
    "z4ai": Side("z4ai compress_delta", z4ai_encode, z4ai_apply),
    "bsdiff4": Side("bsdiff4", bsdiff_encode, bsdiff_apply),
    "pyxdelta": Side("xdelta3 (pyxdelta)", xdelta_encode, xdelta_apply),
}


def packages() -> list[Side]:
    """Packages for differences of files or of checkpoints, those that are installed."""
    return [side for package, side in _PACKAGES.items() if find_spec(package)]
