"""Index codecs on plain arrays: what a test writes down is the positions, not the support around them."""

import numpy as np

from deepreduce import IndexCodec, Space
from deepreduce.tensor import Support


def array_of(support) -> np.ndarray:
    """What a sparsifier or an index codec returned, as an array."""
    return support.positions if isinstance(support, Support) else support


def choose(codec: IndexCodec, positions, space: Space) -> IndexCodec:
    """The codec for these positions."""
    return codec.choose(Support(positions, space.numel), space)


def encode(codec: IndexCodec, positions, space: Space, seed: int = 0) -> tuple[bytes, np.ndarray]:
    """The section and the positions that the reader will see."""
    part, support = codec.encode(Support(positions, space.numel), space, seed)
    return part, array_of(support)


def decode(codec: IndexCodec, part, nnz: int, space: Space) -> np.ndarray:
    """The positions that the reader sees."""
    return array_of(codec.decode(part, nnz, space))
