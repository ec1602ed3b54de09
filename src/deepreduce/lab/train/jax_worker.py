"""One worker that trains the digits with JAX and optax; see `contract`. Gradients are compressed between two jitted halves of a step."""

# mypy: allow-untyped-calls
# (much of JAX has no annotations)

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from ...jax import compressed_mean
from ...step.stats import StepStats, ring_bytes
from . import jax_models
from .batches import Batch
from .contract import Emit, Plan, serve
from .run import Job, Run, train_all
from .tasks import read_data, task_of

_PROBED_STEP = 5

Reduce = Callable[[Any], tuple[Any, StepStats]]


def train(plan: Plan, emit: Emit) -> None:
    """Join the other workers and train every spec of the plan. Rank 0 emits."""
    with _processes():
        programs = Programs(plan)
        job = Job(plan, read_data(plan), jax.process_index(), jax_models.parameter_count(programs.params))

        def warm(spec: str) -> Run:
            JaxRun(job, spec, programs).warm_up()
            return JaxRun(job, spec, programs)

        train_all(job, warm, emit)


@contextmanager
def _processes() -> Iterator[None]:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    environment = os.environ
    address = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    jax.distributed.initialize(address, int(environment["WORLD_SIZE"]), int(environment["RANK"]))
    yield
    jax.distributed.shutdown()


class Programs:
    """What is compiled once for all runs of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.params, apply = jax_models.build(plan.model, plan.seed)
        self.optimizer = optax.chain(optax.add_decayed_weights(task_of(plan.task).weight_decay), optax.trace(decay=0.9))
        mesh = Mesh(np.array(jax.devices()), ("process",))
        self.spread, whole = NamedSharding(mesh, PartitionSpec("process")), NamedSharding(mesh, PartitionSpec())

        def loss(params: Any, images: Any, labels: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(apply(params, images), labels).mean()

        def advance(params: Any, state: Any, gradients: Any, rate: Any) -> tuple[Any, Any]:
            directions, state = self.optimizer.update(gradients, state, params)
            return jax.tree.map(lambda param, direction: param - rate * direction, params, directions), state

        self.gradients = jax.jit(jax.value_and_grad(loss))
        self.advance = jax.jit(advance)
        self.right = jax.jit(lambda params, images, labels: (apply(params, images).argmax(1) == labels).sum())
        self.average = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf.mean(0), tree), out_shardings=whole)


class JaxRun(Run):
    """One spec: the gradients of one jitted program are reduced, and given to the next."""

    def __init__(self, job: Job, spec: str, programs: Programs) -> None:
        super().__init__(job, spec)
        self.programs, self.params = programs, programs.params
        self._optimizer_state = programs.optimizer.init(self.params)
        self._reduce = _dense(job, programs) if spec == "dense" else _compressed(job.plan, spec, self.params)
        self._zeros = 0.0

    def step(self, number: int, batch: Batch) -> float:
        start = time.perf_counter()
        loss, gradients = jax.block_until_ready(self.programs.gradients(self.params, *batch))
        ready = time.perf_counter()
        means, cost = self._reduce(gradients)
        advanced = self.programs.advance(self.params, self._optimizer_state, means, self.rate(number))
        self.params, self._optimizer_state = jax.block_until_ready(advanced)
        self.ledger.add(time.perf_counter() - start, ready - start, cost)
        self.ledger.exchanges.append(cost.exchange_seconds)
        if number == min(_PROBED_STEP + 1, self.job.steps):
            self._zeros = _zeros(gradients)
        return float(loss)

    def score(self, batch: Batch) -> float:
        return float(self.programs.right(self.params, *batch))

    def weights(self) -> Iterable[NDArray[Any]]:
        return map(np.asarray, jax.tree.leaves(self.params))

    def zeros(self) -> float:
        return self._zeros

    def gathered(self, numbers: Sequence[float]) -> NDArray[np.float64]:
        """They travel as bytes: JAX would round them to 32 bits."""
        mine = np.array(numbers, np.float64)
        rows = multihost_utils.process_allgather(np.frombuffer(mine.tobytes(), np.uint8))
        return np.frombuffer(np.ascontiguousarray(rows).tobytes(), np.float64).reshape(jax.process_count(), mine.size)


def _zeros(gradients: Any) -> float:
    leaves = jax.tree.leaves(gradients)
    return 1 - sum(int(jnp.count_nonzero(leaf)) for leaf in leaves) / sum(int(leaf.size) for leaf in leaves)


def _compressed(plan: Plan, spec: str, params: Any) -> Reduce:
    mean = compressed_mean(spec, plan.memory, plan.small, topology=plan.topology, seed=plan.seed)  # type: ignore[arg-type]
    state = mean.init(params)

    def reduce(gradients: Any) -> tuple[Any, StepStats]:
        nonlocal state
        means, state = mean.update(gradients, state)
        return means, mean.stats().last

    return reduce


def _dense(job: Job, programs: Programs) -> Reduce:
    """JAX's own mean: one all-reduce, which its compiler puts in."""
    dense_bytes = 4 * job.parameters
    sent_bytes = ring_bytes(dense_bytes, job.plan.workers)

    def reduce(gradients: Any) -> tuple[Any, StepStats]:
        start = time.perf_counter()
        stacked = jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(programs.spread, leaf[None]), gradients)
        means = jax.tree.map(lambda leaf: leaf.addressable_data(0), jax.block_until_ready(programs.average(stacked)))
        seconds = time.perf_counter() - start
        return means, StepStats(0, dense_bytes, dense_bytes, sent_bytes, exchange_seconds=seconds)

    return reduce


if __name__ == "__main__":
    code = serve(train)
    sys.stderr.flush()
    os._exit(code)  # the threads of JAX must not keep a failed worker alive
