"""deepreduce: compressed communication of sparse tensors.

>>> import deepreduce as dr, numpy as np
>>> codec = dr.parse("topr:0.01/bitmap/fp16")
>>> blob = codec.encode(np.random.default_rng(0).standard_normal((100, 100), np.float32), seed=0)
>>> dense = dr.decode(blob)
>>> dense.shape, int((dense != 0).sum())
((100, 100), 100)
"""

from .codec import IndexCodec, LossyValueCodec, Sparsifier, ValueCodec
from .errors import (
    ConfigError,
    CorruptError,
    DeepReduceError,
    FormatError,
    InputError,
    PeerError,
    TruncatedError,
    VersionError,
    WrongBaseError,
)
from .indices.all import All
from .indices.auto import Auto
from .indices.bitmap import Bitmap
from .indices.bloom import Bloom
from .indices.delta import Delta
from .indices.deltahuffman import DeltaHuffman
from .indices.huffman import HuffmanIndex
from .indices.pco import PcoIndex
from .indices.raw import RawIndex
from .indices.rice import Rice
from .indices.rle import RLE
from .indices.seeded import Seeded
from .indices.shaped import Shaped
from .inspection import MessageInfo, TensorInfo, inspect
from .pipeline import DeepReduce, decode, decode_many, decode_many_sparse, decode_sparse, encode, parse
from .reader import Reader
from .registry import register
from .reorder import Order
from .source import Space
from .sparsify.chunktopr import ChunkTopR
from .sparsify.none import Keep
from .sparsify.nonzero import NonZero
from .sparsify.randomr import RandomR
from .sparsify.threshold import Threshold
from .sparsify.topr import TopR
from .step.budget import budgeted
from .step.policy import BySize
from .step.residual import ResidualMemory
from .step.schedule import Schedule
from .tensor import SparseTensor
from .values.deflate import Deflate
from .values.fitdexp import FitDExp
from .values.fitpoly import FitPoly
from .values.half import BF16, FP16
from .values.lloyd import Lloyd
from .values.pco import PcoValue
from .values.qsgd import QSGD
from .values.raw import RawValue
from .values.sketch import Sketch
from .values.threelc import ThreeLC

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "FP16",
    "QSGD",
    "RLE",
    "All",
    "Auto",
    "Bitmap",
    "Bloom",
    "BySize",
    "ChunkTopR",
    "ConfigError",
    "CorruptError",
    "DeepReduce",
    "DeepReduceError",
    "Deflate",
    "Delta",
    "DeltaHuffman",
    "FitDExp",
    "FitPoly",
    "FormatError",
    "HuffmanIndex",
    "IndexCodec",
    "InputError",
    "Keep",
    "Lloyd",
    "LossyValueCodec",
    "MessageInfo",
    "NonZero",
    "Order",
    "PcoIndex",
    "PcoValue",
    "PeerError",
    "RandomR",
    "RawIndex",
    "RawValue",
    "Reader",
    "ResidualMemory",
    "Rice",
    "Schedule",
    "Seeded",
    "Shaped",
    "Sketch",
    "Space",
    "SparseTensor",
    "Sparsifier",
    "TensorInfo",
    "ThreeLC",
    "Threshold",
    "TopR",
    "TruncatedError",
    "ValueCodec",
    "VersionError",
    "WrongBaseError",
    "budgeted",
    "decode",
    "decode_many",
    "decode_many_sparse",
    "decode_sparse",
    "encode",
    "inspect",
    "parse",
    "register",
]
