"""The one writer of golden messages: adds those that are missing, and refuses to change one that exists.

A golden message pins the format: a change that alters it breaks everyone's stored and running peers.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import deepreduce as dr
from tests.golden.cases import cases, encode_case
from tests.golden.patches import encode_patch, patch_cases

FOLDER = Path(__file__).parent


def main() -> None:
    """Write what is missing."""
    for name, case in cases().items():
        blob = encode_case(case)
        if write(FOLDER / f"{name}.dr", blob):
            np.save(FOLDER / f"{name}.npy", np.concatenate([tensor.reshape(-1).astype(np.float64) for tensor in decoded(blob)]))
    for name, patch in patch_cases().items():
        write(FOLDER / f"{name}.dr-patch", encode_patch(patch))


def write(path: Path, blob: bytes) -> bool:
    """Write a file that is missing; returns whether it was. One that exists must have these bytes."""
    if path.exists():
        if path.read_bytes() != blob:
            sys.exit(f"{path} exists and would change: give the new form another name, and keep decoding the old one")
        return False
    path.write_bytes(blob)
    print("wrote", path.name)
    return True


def decoded(blob: bytes) -> list[np.ndarray]:
    """All tensors of a message, one after the other."""
    info = dr.inspect(blob)
    return list(dr.decode_many(blob).values()) if isinstance(info, dr.MessageInfo) else [dr.decode(blob)]


if __name__ == "__main__":
    main()
