"""Whole specs by name: presets, and the methods of the paper by its own names."""

from __future__ import annotations

PRESETS = {
    "dense": "none/all/raw",
    "threelc": "none/all/threelc",
    "sketchml": "nonzero/delta/sketch:bits=6,groups=8",
    "skcompress": "nonzero/deltahuffman/sketch:bits=7,huffman=true",
}
"""What `parse` takes in place of a spec."""

_TOP = "topr:0.01"
_FPR = "fpr=0.001"

TABLE_3 = {
    "DR[BF-Naive, raw]": f"{_TOP}/bloom:naive,{_FPR}/raw",
    "DR[BF-P0, raw]": f"{_TOP}/bloom:p0,{_FPR}/raw",
    "DR[BF-P1, raw]": f"{_TOP}/bloom:p1,{_FPR}/raw",
    "DR[BF-P2, raw]": f"{_TOP}/bloom:p2exact,{_FPR}/raw",
    "DR[RLE, raw]": f"{_TOP}/rle/raw",
    "DR[Huffman, raw]": f"{_TOP}/huffman/raw",
    "DR[raw, Fit-Poly]": f"{_TOP}/raw/fitpoly:degree=5",
    "DR[raw, Fit-DExp]": f"{_TOP}/raw/fitdexp",
    "DR[raw, Deflate]": f"{_TOP}/raw/deflate:shuffle=false",
    "DR[raw, QSGD]": f"{_TOP}/raw/qsgd:7,norm=l2",
    "DR[BF-P0, Fit-Poly]": f"{_TOP}/bloom:p0,{_FPR}/fitpoly:degree=5",
    "DR[BF-P1, Fit-Poly]": f"{_TOP}/bloom:p1,{_FPR}/fitpoly:degree=5",
    "DR[BF-P2, QSGD]": f"{_TOP}/bloom:p2exact,{_FPR}/qsgd:7,norm=l2",
    "3LC": "none/all/threelc:s=1",
    "SketchML": "nonzero/delta/sketch:bits=6,groups=8",
    "SKCompress": "nonzero/deltahuffman/sketch:bits=7,huffman=true",
}
"""Every row of the paper's Table 3, on the largest 1% where the method takes a sparse gradient.

``DR[index, value]`` is the paper's DR with the two as sub- and superscript; `raw` stands for its empty set.
"""
