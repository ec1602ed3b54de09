"""Every number of the paper that results are put beside, with the section it was read from. Its curves are pictures, and not here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Printed:
    """A number as the paper prints it."""

    value: float
    section: str

    def __str__(self) -> str:
        return f"{self.value:g}"


@dataclass(frozen=True)
class Benchmark:
    """A row of Table 1."""

    model: str
    data: str
    parameters: int
    metric: str
    baseline: float


TABLE_1 = (
    Benchmark("ResNet-20", "CIFAR-10", 269_722, "top-1 accuracy", 0.9094),
    Benchmark("DenseNet40-K12", "CIFAR-10", 357_491, "top-1 accuracy", 0.9176),
    Benchmark("ResNet-50", "ImageNet", 25_557_032, "top-1 accuracy", 0.7378),
    Benchmark("NCF", "MovieLens-20M", 31_832_577, "best hit rate", 0.9497),
)
"""Section 6, Table 1."""

TABLE_2 = {
    "Baseline": (Printed(1, "6.3, Table 2"), Printed(0.9497, "6.3, Table 2")),
    "BF-P2 + Fit-Poly": (Printed(0.5879, "6.3, Table 2"), Printed(0.9519, "6.3, Table 2")),
    "SKCompress": (Printed(0.2175, "6.3, Table 2"), Printed(0.9513, "6.3, Table 2")),
    "BF-P0 + QSGD": (Printed(0.2063, "6.3, Table 2"), Printed(0.9496, "6.3, Table 2")),
}
"""Method: relative data volume, best hit rate."""

P0_CROSSING_FPR = Printed(0.004, "6.1")
"""Above this false positive rate, BF-P0 sends more than plain Top-r."""

P2_SAVING = Printed(0.33, "6.1")
"""How much less than plain Top-r BF-P2 sends."""

FIT_DEXP_SAVING = Printed(0.5, "6.2")
FIT_POLY_SAVING = Printed(0.4, "6.2")
"""How much less than plain Top-r the two curve fits send."""

FIT_DEXP_SLOWER = Printed(3.5, "6.2")
"""Time of Fit-DExp over that of Fit-Poly."""

NCF_ZEROS = Printed(0.4, "6.3")
"""The share of zeros in the gradients of NCF."""

SKCOMPRESS_SLOWER_THAN_P0_QSGD = Printed(380, "6.3")
SKCOMPRESS_SLOWER_THAN_QSGD = Printed(1000, "6.4")
"""Times of encoding and decoding over each other; the second is printed as three orders of magnitude."""

PAPER_CODE_SECONDS = {
    "BF-P0": 5.1e-3,
    "RLE": 207e-3,
    "Huffman": 263e-3,
    "Deflate": 3.2e-3,
    "QSGD": 0.38e-3,
    "Fit-Poly": 0.9e-3,
}
"""Not printed: encoding plus decoding by the authors' code (github.com/hangxu0304/DeepReduce), measured anew on one core of a CPU, on the
top 1% of 36,864 elements. Its Bloom filter is the one in PyTorch with a precomputed table of hashes and the leftmost policy."""
