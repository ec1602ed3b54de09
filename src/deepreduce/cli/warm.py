"""`deepreduce warmup`: compile every kernel once, so that the first training step does not."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import pipeline, registry, specs
from ..tensor import FLOAT_DTYPES


def add(commands: Any) -> None:
    """Add the command."""
    warmup = commands.add_parser(
        "warmup",
        help="compile the kernels now",
        description="Compile all kernels for all dtypes and cache them on disk, so that no training step waits for it.",
        epilog="example: deepreduce warmup --codec topr:0.01/bitmap/fp16 --dtype float32",
    )
    warmup.add_argument("--codec", action="append", metavar="SPEC", help="only what this spec needs (may be repeated)")
    warmup.add_argument(
        "--dtype", action="append", choices=[dtype.name for dtype in FLOAT_DTYPES], help="only for this dtype (may be repeated)"
    )
    warmup.set_defaults(run=run_warmup)


def run_warmup(args: argparse.Namespace) -> None:
    """Compile, and say how long it took."""
    start = time.perf_counter()
    chosen = args.codec or all_specs()
    dtypes = [dtype for dtype in FLOAT_DTYPES if not args.dtype or dtype.name in args.dtype]
    for spec in chosen:
        compile_for(spec, dtypes)
        compile_steps(spec, dtypes)
    if not args.codec and find_spec("xxhash"):
        compile_for_weights()
    print(f"compiled the kernels of {len(chosen)} spec(s) in {time.perf_counter() - start:.1f} s")


def compile_for(spec: str, dtypes: Sequence[np.dtype[Any]] = FLOAT_DTYPES) -> None:
    """Encode and decode a small tensor of every dtype, writable and not: each is a type of its own to the compiler."""
    codec = pipeline.parse(spec)
    for dtype in dtypes:
        array = _gradient((8, 40), dtype)
        pipeline.decode(codec.encode(array))
        array.flags.writeable = False
        codec.encode(array)


def compile_steps(spec: str, dtypes: Sequence[np.dtype[Any]] = FLOAT_DTYPES) -> None:
    """Take two training steps with gradients of every dtype: in the second one there is a residual."""
    from ..step.policy import policy_of
    from ..step.reducer import Bucket, Memory, Reducer
    from ..step.residual import ResidualMemory
    from ..step.topology import AllGather, Sharded
    from ..step.transport import Alone

    for dtype in dtypes:
        for topology in (AllGather(), Sharded()):
            reducer, memory = Reducer(policy_of(spec, small_numel=100), topology), Memory(ResidualMemory(), ResidualMemory())
            for step in range(2):
                gradients = [_gradient(shape, dtype) for shape in ((512, 256), (64, 80), (10,), (10,))]  # large ones are sampled
                reducer.reduce(Bucket([f"tensor {number}" for number in range(4)], gradients, step), memory, Alone())


def _gradient(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def compile_for_weights() -> None:
    """Take differences of weights of every width in both modes, and apply them."""
    from .. import weights

    for width in (1, 2, 4, 8):
        old = {"w": np.arange(200, dtype=f"u{width}")}
        new = {"w": old["w"][::-1].copy()}
        for mode in ("conditional", "portable"):
            weights.apply(old, weights.diff(old, new, mode=mode, threads=1), threads=1)


def all_specs() -> list[str]:
    """Specs that name every codec that needs no argument, and the common sparsifiers."""
    indices = [f"topr:0.1/{name}/raw" for name in _without_arguments(registry.INDEX_STAGE)]
    values = [f"topr:0.1/raw/{name}" for name in _without_arguments(registry.VALUE_STAGE)]
    sparsifiers = [f"{piece}/raw/raw" for piece in ("nonzero", "randomr:0.1", "threshold:0.1", "chunktopr:2,chunk=8")]
    return indices + values + sparsifiers


def _without_arguments(stage: registry.Stage) -> list[str]:
    return [entry.name for entry in stage.table if not specs.missing_parameters(entry, {})]
