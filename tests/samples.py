"""Codecs with the parameters that the contract is checked for. Every registered name must have its line here or work by default."""

from deepreduce import registry, specs
from deepreduce.registry import Stage

SPARSIFIER_SAMPLES = [
    "none",
    "nonzero",
    "topr:0.1",
    "topr:3",
    "topr:1.0",
    "randomr:0.2",
    "randomr:3",
    "threshold:0.5",
    "chunktopr:2,chunk=16",
]
INDEX_SAMPLES = [
    "raw",
    "bitmap",
    "all",
    "seeded",
    "rle",
    "huffman",
    "delta",
    "deltahuffman",
    "rice",
    "pco",
    "auto",
    "shaped",
    "bloom:p0",
    "bloom:p0,fpr=0.001",
    "bloom:p1,fpr=0.1",
    "bloom:p2",
    "bloom:p2,fpr=0.3",
    "bloom:p2exact,fpr=0.3",
    "bloom:naive,fpr=0.01",
    "bloom:leftmost,fpr=0.01",
    "bloom:middle,fpr=0.05",
    "bloom:rightmost,fpr=0.5",
]
VALUE_SAMPLES = [
    "raw",
    "fp16",
    "bf16",
    "deflate",
    "deflate:9,shuffle=false",
    "pco",
    "fitpoly",
    "fitpoly:3,degree=2,block=16",
    "fitpoly:paper,degree=0,block=1000000",
    "fitpoly:2,degree=15,block=64",
    "fitdexp",
    "fitdexp:16",
    "qsgd",
    "qsgd:2,group=7,norm=l2",
    "sketch",
    "sketch:3,huffman=true",
    "sketch:4,groups=2",
    "threelc",
    "threelc:1.75",
    "lloyd",
    "lloyd:5",
]

SAMPLES = dict(zip(registry.STAGES, (SPARSIFIER_SAMPLES, INDEX_SAMPLES, VALUE_SAMPLES), strict=True))

_PLAIN = ["none", "raw", "raw"]


def codec_of(stage: Stage, piece: str):
    """The codec that this piece of a spec gives."""
    number = registry.STAGES.index(stage)
    pieces = [*_PLAIN[:number], piece, *_PLAIN[number + 1 :]]
    return specs.parse_stages("/".join(pieces))[number]


def codecs_of(stage: Stage) -> list[tuple[str, object]]:
    """All samples of a stage, with their codecs."""
    return [(piece, codec_of(stage, piece)) for piece in SAMPLES[stage]]


def default_pieces(stage: Stage) -> list[str]:
    """One sample for every registered name."""
    found = {}
    for piece in SAMPLES[stage]:
        found.setdefault(piece.partition(":")[0], piece)
    return [found[entry.name] for entry in stage.table]
