"""Codecs with the parameters that the contract is checked for. Every registered name must have its line here or work by default."""

from deepreduce import registry
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
INDEX_SAMPLES = ["raw", "bitmap", "all", "seeded", "pco"]
VALUE_SAMPLES = ["raw", "fp16", "bf16"]

SAMPLES = dict(zip(registry.STAGES, (SPARSIFIER_SAMPLES, INDEX_SAMPLES, VALUE_SAMPLES), strict=True))

_PLAIN = ["none", "raw", "raw"]


def codec_of(stage: Stage, piece: str):
    """The codec that this piece of a spec gives."""
    number = registry.STAGES.index(stage)
    pieces = [*_PLAIN[:number], piece, *_PLAIN[number + 1 :]]
    return registry.parse_stages("/".join(pieces))[number]


def codecs_of(stage: Stage) -> list[tuple[str, object]]:
    """All samples of a stage, with their codecs."""
    return [(piece, codec_of(stage, piece)) for piece in SAMPLES[stage]]


def default_pieces(stage: Stage) -> list[str]:
    """One sample for every registered name."""
    found = {}
    for piece in SAMPLES[stage]:
        found.setdefault(piece.partition(":")[0], piece)
    return [found[entry.name] for entry in stage.table]
