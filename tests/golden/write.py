"""The one writer of golden messages: adds those that are missing, and refuses to change one that exists.

A golden message pins the format: a change that alters it breaks everyone's stored and running peers.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

import deepreduce as dr
from tests.golden.cases import cases, encode_case

FOLDER = Path(__file__).parent


def main() -> None:
    """Write what is missing."""
    for name, case in cases().items():
        message, dense = FOLDER / f"{name}.dr", FOLDER / f"{name}.npy"
        blob = encode_case(case)
        if message.exists():
            if message.read_bytes() != blob:
                sys.exit(f"{message} exists and would change: give the new form another name, and keep decoding the old one")
            continue
        message.write_bytes(blob)
        np.save(dense, np.concatenate([tensor.reshape(-1).astype(np.float64) for tensor in decoded(blob)]))
        print("wrote", message.name)


def decoded(blob: bytes) -> list[np.ndarray]:
    """All tensors of a message, one after the other."""
    info = dr.inspect(blob)
    return list(dr.decode_many(blob).values()) if isinstance(info, dr.MessageInfo) else [dr.decode(blob)]


if __name__ == "__main__":
    main()
