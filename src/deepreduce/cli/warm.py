"""`deepreduce warmup`: compile the kernels of training steps once, so that the first step does not."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib.util import find_spec
from itertools import chain
from multiprocessing import get_context
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import kernels, pipeline, registry, specs
from ..cores import usable_cores
from ..tensor import FLOAT_DTYPES


def add(commands: Any) -> None:
    """Add the command."""
    warmup = commands.add_parser(
        "warmup",
        help="compile the kernels now",
        description="Compile the kernels of messages and training steps for all dtypes, and most of those of weights. They are cached on "
        "disk, so that no training step waits for it.",
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
    _be_quiet()
    chosen = args.codec or all_specs()
    for spec in chosen:
        pipeline.parse(spec)
    dtypes = args.dtype or [dtype.name for dtype in FLOAT_DTYPES]
    # What all specs share comes with the first one, a dtype at a time: else every process would compile it.
    first = [partial(compile_spec, chosen[0], [dtype]) for dtype in dtypes]
    others = [partial(compile_spec, spec, dtypes) for spec in chosen[1:]]
    weights = [compile_for_weights] if not args.codec and find_spec("xxhash") else []
    in_processes([first, [*weights, *others]])
    print(f"compiled the kernels of {len(chosen)} spec(s) in {time.perf_counter() - start:.1f} s")


def in_processes(rounds: Sequence[Sequence[Callable[[], None]]]) -> None:
    """Run rounds of tasks one after another, the tasks of a round side by side on the cores that this process may use."""
    processes = min(len(usable_cores()), max(len(tasks) for tasks in rounds))
    if processes == 1:
        for task in chain(*rounds):
            task()
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_be_quiet) as pool:
        for tasks in rounds:
            for done in [pool.submit(task) for task in tasks]:
                done.result()


def _be_quiet() -> None:
    """Do not log that kernels are compiled: this command is for that."""
    logging.getLogger("deepreduce").setLevel(logging.ERROR)


def compile_spec(spec: str, dtypes: Sequence[str]) -> None:
    """Compile what messages and training steps of a spec need."""
    for dtype in FLOAT_DTYPES:
        if dtype.name in dtypes:
            compile_messages(spec, dtype)
            compile_steps(spec, dtype)
            compile_local_steps(spec, dtype)


def compile_messages(spec: str, dtype: np.dtype[Any]) -> None:
    """Encode and decode a small tensor, and a large one whose largest elements no sample tells.

    Writable and not: each is a type of its own to the compiler.
    """
    codec = pipeline.parse(spec)
    for array in (_gradient((8, 40), dtype), np.ones(kernels.selection.SMALL, dtype)):
        pipeline.decode(codec.encode(array))
        array.flags.writeable = False
        codec.encode(array)


def compile_steps(spec: str, dtype: np.dtype[Any]) -> None:
    """Take two training steps: in the second one there is a residual."""
    from ..step.policy import policy_of
    from ..step.reducer import Bucket, ErrorFeedback, Reducer
    from ..step.residual import ResidualMemory
    from ..step.topology import AllGather, Sharded
    from ..step.transport import SingleRank

    for topology in (AllGather(), Sharded()):
        reducer, memory = Reducer(policy_of(spec, small_numel=100), topology), ErrorFeedback(ResidualMemory(), ResidualMemory())
        for step in range(2):
            gradients = [_gradient(shape, dtype) for shape in ((512, 256), (64, 80), (10,), (10,))]  # large ones are sampled
            reducer.reduce(Bucket([f"tensor {number}" for number in range(4)], gradients, step), memory, SingleRank())


def compile_local_steps(spec: str, dtype: np.dtype[Any]) -> None:
    """Take local steps with two syncs, whose residuals go into the parameters."""
    from ..step.local import LocalTraining
    from ..step.policy import policy_of
    from ..step.reducer import ErrorFeedback, Reducer
    from ..step.residual import ResidualMemory
    from ..step.topology import AllGather
    from ..step.transport import SingleRank

    training = LocalTraining(Reducer(policy_of(spec, small_numel=100), AllGather()), ErrorFeedback(ResidualMemory(), None))
    parameters = {f"tensor {number}": _gradient(shape, dtype) for number, shape in enumerate(((64, 80), (10,)))}
    training.add_anchors(parameters)
    for _ in range(2):
        for parameter in parameters.values():
            parameter += parameter
        training.count_step()
        means, _ = training.sync(parameters, SingleRank())
        training.apply(parameters, means)
        training.move_residuals_into_(parameters)


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
