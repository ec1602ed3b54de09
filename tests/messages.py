"""Messages of every codec for tests of hostile bytes, and tools to damage them."""

import zlib

import numpy as np

import deepreduce as dr
from deepreduce.registry import STAGES

from .samples import SAMPLES


def gradient() -> np.ndarray:
    """Small, with structure, both signs and zeros."""
    rng = np.random.default_rng(11)
    return (rng.standard_normal((12, 5)) ** 3 * (rng.random((12, 5)) < 0.7)).astype(np.float32)


def specs() -> list[str]:
    """One spec for every sample of every stage."""
    sparsifiers, indices, values = (SAMPLES[stage] for stage in STAGES)
    wide = [f"{piece}/raw/raw" for piece in sparsifiers]
    wide += [f"topr:0.2/{piece}/raw" for piece in indices]
    return wide + [f"topr:0.2/raw/{piece}" for piece in values] + [f"topr:0.2/bitmap/{piece}" for piece in values]


def messages() -> dict[str, bytes]:
    """One message a spec, and one of many tensors."""
    found = {spec: dr.encode(gradient(), spec, seed=3) for spec in specs()}
    tensors = {f"layer{i}.weight": gradient()[: i + 1] for i in range(5)}
    found["many"] = dr.parse("topr:0.2/bitmap/fp16").encode_many(tensors, seed=3)
    return found


def repaired(blob: bytes) -> bytes:
    """The same bytes with a checksum that fits."""
    return blob[:-4] + zlib.crc32(blob[:-4]).to_bytes(4, "little")


def decode_any(blob: bytes, max_numel: int = 2**20) -> object:
    """Decode a message of either kind."""
    from deepreduce import message

    if message.read(blob, max_numel).names is None:
        return dr.decode(blob, max_numel)
    return dr.decode_many(blob, max_numel)
