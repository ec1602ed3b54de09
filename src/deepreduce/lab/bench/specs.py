"""The specs that are measured when none is given: the methods of the paper's Figure 10, then those we would choose today."""

from __future__ import annotations

FIGURE_10 = {
    "Top-r": "topr:0.01/raw/raw",
    "RLE": "topr:0.01/rle/raw",
    "Huffman": "topr:0.01/huffman/raw",
    "BF-P0": "topr:0.01/bloom:p0,fpr=0.001/raw",
    "BF-P2": "topr:0.01/bloom:p2,fpr=0.001/raw",
    "Deflate": "topr:0.01/raw/deflate",
    "QSGD": "topr:0.01/raw/qsgd",
    "Fit-Poly": "topr:0.01/raw/fitpoly",
    "Fit-DExp": "topr:0.01/raw/fitdexp",
    "BF-P2 + QSGD": "topr:0.01/bloom:p2,fpr=0.001/qsgd",
    "BF-P2 + Fit-Poly": "topr:0.01/bloom:p2,fpr=0.001/fitpoly",
    "SKCompress": "topr:0.01/deltahuffman/sketch:7,huffman=true",
}
"""Name in the paper: spec, all on the top 1%."""

TODAY = {
    "Rice + QSGD": "topr:0.01/rice/qsgd",
    "auto": "topr:0.01/auto/raw",
    "auto + QSGD": "topr:0.01/auto/qsgd",
}
"""The same 1% by newer codecs."""

DEFAULT = FIGURE_10 | TODAY
