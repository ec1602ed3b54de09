"""`deepreduce encode` and `deepreduce decode`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from .. import message, pipeline
from . import files


def add(commands: Any) -> None:
    """Add the two commands."""
    encode = commands.add_parser(
        "encode",
        help="a tensor file to a message",
        description="Encode the tensor of an .npy file, or all tensors of an .npz file as one message.",
        epilog="example: deepreduce encode gradient.npz message.dr --codec topr:0.01/bitmap/fp16 --seed 7",
    )
    encode.add_argument("source", type=Path, metavar="TENSORS", help=".npy or .npz file")
    encode.add_argument("target", type=Path, metavar="MESSAGE", help="file to write")
    encode.add_argument("--codec", required=True, metavar="SPEC", help="sparsifier/index/value or a preset; see `deepreduce codecs`")
    encode.add_argument("--seed", type=int, default=0, help="for codecs that draw at random (default 0)")
    encode.set_defaults(run=run_encode)

    decode = commands.add_parser(
        "decode",
        help="a message to a tensor file",
        description="Decode a message to an .npy file (one tensor) or an .npz file (many).",
        epilog="example: deepreduce decode message.dr restored.npz",
    )
    decode.add_argument("source", type=Path, metavar="MESSAGE", help="file written by encode")
    decode.add_argument("target", type=Path, metavar="TENSORS", help=".npy or .npz file to write")
    decode.add_argument(
        "--max-numel",
        type=int,
        default=message.DEFAULT_MAX_NUMEL,
        metavar="N",
        help="refuse messages that ask for more elements (default %(default)s)",
    )
    decode.set_defaults(run=run_decode)


def run_encode(args: argparse.Namespace) -> None:
    """Encode a file and say what became of it."""
    codec = pipeline.parse(args.codec)
    tensors = files.read_tensors(args.source)
    if isinstance(tensors, np.ndarray):
        blob, dense_bytes = codec.encode(tensors, args.seed), tensors.nbytes
    else:
        blob, dense_bytes = codec.encode_many(tensors, args.seed), sum(tensor.nbytes for tensor in tensors.values())
    files.write_blob(args.target, blob)
    print(f"{args.target}: {len(blob):,} bytes, {dense_bytes / len(blob):.1f} times smaller than {dense_bytes:,} dense")


def run_decode(args: argparse.Namespace) -> None:
    """Decode a file."""
    blob = files.read_blob(args.source)
    whole = message.read(blob, args.max_numel)
    tensors = pipeline.decode(blob, args.max_numel) if whole.names is None else pipeline.decode_many(blob, args.max_numel)
    files.write_tensors(args.target, tensors)
    count = 1 if whole.names is None else len(whole.names)
    print(f"{args.target}: {count} tensor(s), {sum(np.prod(record.shape, dtype=int) for record in whole.records):,} elements")
