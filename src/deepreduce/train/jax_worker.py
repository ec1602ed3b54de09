"""One worker that trains the digits with JAX and optax; see `contract`. Gradients are compressed between two jitted halves of a step."""

# mypy: allow-untyped-calls
# (much of JAX has no annotations)

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from ..errors import ConfigError
from ..jax import StepStats, compressed_mean
from . import jax_models
from .batches import Batch, Data
from .contract import Emit, Event, Plan, Record, Throttle, evaluation_steps, serve
from .tasks import read_data, task_of

_WARM_UP_STEPS = 3
_CURVE_POINTS = 200
_PROBED_STEP = 5

Reduce = Callable[[Any], tuple[Any, StepStats]]


def train(plan: Plan, emit: Emit) -> None:
    """Join the other workers and train every spec of the plan. Rank 0 emits."""
    if plan.topology != "allgather":
        raise ConfigError(f"with jax the topology is allgather, got {plan.topology!r}")
    if task_of(plan.task).optimizer != "sgd":
        raise ConfigError(f"with jax there is the task digits, got {plan.task!r}")
    with _processes():
        data = read_data(plan.task, Path(plan.data) if plan.data else None, plan.seed, plan.negatives)
        per_epoch = data.steps_per_epoch(plan.workers, plan.batch)
        steps = plan.steps or plan.epochs * per_epoch
        say = emit if jax.process_index() == 0 else _silent
        size = jax_models.parameter_count(jax_models.build(plan.model, plan.seed)[0])
        say({"event": "ready", "parameters": size, "steps": steps, "steps_per_epoch": per_epoch})
        programs = Programs(plan)
        for spec in plan.specs:
            Run(plan, programs, spec, data, min(steps, _WARM_UP_STEPS), _silent).go()  # compiles what it needs, outside the measurement
            say(Run(plan, programs, spec, data, steps, say).go().to_event())


@contextmanager
def _processes() -> Iterator[None]:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    environment = os.environ
    address = f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    jax.distributed.initialize(address, int(environment["WORLD_SIZE"]), int(environment["RANK"]))
    yield
    jax.distributed.shutdown()


def _silent(event: Event) -> None:
    """Not rank 0."""


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


class Run:
    """One spec, trained from the initial weights of the plan's seed."""

    def __init__(self, plan: Plan, programs: Programs, spec: str, data: Data, steps: int, emit: Emit) -> None:
        self.plan, self.programs, self.spec, self.data, self.steps, self._emit = plan, programs, spec, data, steps, emit
        self.params = programs.params
        self._optimizer_state = programs.optimizer.init(self.params)
        self._reduce = _dense(programs) if spec == "dense" else _compressed(plan, spec, self.params)
        self._costs: list[StepStats] = []
        self._total = self._exposed = self._zeros = 0.0
        self._losses: list[tuple[int, float]] = []
        self._curve: list[dict[str, float]] = []

    def go(self) -> Record:
        """Train, measure quality now and then, and sum up."""
        measured = evaluation_steps(self.steps, self.plan.evaluations)
        batches = self.data.train_batches(jax.process_index(), self.plan.workers, self.plan.batch, self.plan.seed)
        throttle = Throttle()
        identical = True
        for number, batch in enumerate(itertools.islice(batches, self.steps), start=1):
            loss = self._step(number, batch)
            if number % max(1, self.steps // _CURVE_POINTS) == 0 or number == self.steps:
                self._losses.append((number, loss))
            if throttle.ready():
                self._emit({"event": "step", "spec": self.spec, "step": number, "loss": loss})
            if number in measured:
                self._evaluate(number, loss)
                identical = identical and _identical(self.params)
        return self._record(identical)

    def _step(self, number: int, batch: Batch) -> float:
        start = time.perf_counter()
        loss, gradients = jax.block_until_ready(self.programs.gradients(self.params, *batch))
        ready = time.perf_counter()
        means, cost = self._reduce(gradients)
        rate = self.plan.learning_rate * _schedule(number / self.steps)
        advanced = self.programs.advance(self.params, self._optimizer_state, means, rate)
        self.params, self._optimizer_state = jax.block_until_ready(advanced)
        end = time.perf_counter()
        self._costs.append(cost)
        self._total += end - start
        self._exposed += end - ready
        if number == min(_PROBED_STEP + 1, self.steps):
            leaves = jax.tree.leaves(gradients)
            self._zeros = 1 - sum(int(jnp.count_nonzero(leaf)) for leaf in leaves) / sum(leaf.size for leaf in leaves)
        return float(loss)

    def _evaluate(self, step: int, loss: float) -> None:
        counts = np.zeros(2)
        for images, labels in self.data.test_batches(jax.process_index(), self.plan.workers):
            counts += int(self.programs.right(self.params, images, labels)), len(labels)
        right, seen = _gathered(counts).sum(0).tolist()
        quality = right / seen
        sent = sum(cost.message_bytes for cost in self._costs)
        self._curve.append({"step": step, "loss": loss, "quality": quality, "bytes_sent": sent, "seconds": self._total})
        self._emit({"event": "evaluation", "spec": self.spec, "step": step, "quality": quality})

    def _record(self, identical: bool) -> Record:
        qualities = [point["quality"] for point in self._curve]
        counted = [[cost.message_bytes, cost.dense_bytes, cost.sent_bytes] for cost in self._costs]
        sent, dense, wire = _gathered(np.sum(counted, 0, dtype=np.float64)).max(0).astype(int).tolist()
        return Record(
            spec=self.spec,
            metric=task_of(self.plan.task).metric,
            quality=qualities[-1],
            best_quality=max(qualities),
            parameters=jax_models.parameter_count(self.params),
            steps=self.steps,
            steps_per_epoch=self.data.steps_per_epoch(self.plan.workers, self.plan.batch),
            bytes_sent=sent,
            bytes_dense=dense,
            wire_bytes=wire,
            seconds=self._seconds(),
            replicas_identical=identical,
            gradient_zeros=self._zeros,
            losses=self._losses,
            curve=self._curve,
        )

    def _seconds(self) -> dict[str, float]:
        """The parts, over all ranks. The rank that comes last to an exchange waits for nobody: its time is the network's."""
        exchanges = _gathered(np.array([cost.exchange_seconds for cost in self._costs]))
        communication = float(exchanges.min(0).sum())
        return {
            "total": self._total,
            "forward_backward": self._total - self._exposed,
            "encode": sum(cost.encode_seconds for cost in self._costs),
            "decode": sum(cost.decode_seconds for cost in self._costs),
            "communication": communication,
            "waiting": float(exchanges[jax.process_index()].sum()) - communication,
        }


def _compressed(plan: Plan, spec: str, params: Any) -> Reduce:
    mean = compressed_mean(spec, plan.memory, plan.small, seed=plan.seed)  # type: ignore[arg-type]
    state = mean.init(params)

    def reduce(gradients: Any) -> tuple[Any, StepStats]:
        nonlocal state
        means, state = mean.update(gradients, state)
        return means, mean.stats().last

    return reduce


def _dense(programs: Programs) -> Reduce:
    """JAX's own mean: one all-reduce, which its compiler puts in."""
    size = jax.process_count()
    dense_bytes = 4 * jax_models.parameter_count(programs.params)
    ring_bytes = 2 * (size - 1) * dense_bytes // size

    def reduce(gradients: Any) -> tuple[Any, StepStats]:
        start = time.perf_counter()
        stacked = jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(programs.spread, leaf[None]), gradients)
        means = jax.tree.map(lambda leaf: leaf.addressable_data(0), jax.block_until_ready(programs.average(stacked)))
        seconds = time.perf_counter() - start
        return means, StepStats(0, dense_bytes, dense_bytes, ring_bytes, exchange_seconds=seconds)

    return reduce


def _schedule(progress: float) -> float:
    """A short rise, then half a cosine down.

    >>> [round(_schedule(progress), 2) for progress in (0.025, 0.05, 0.5, 1.0)]
    [0.5, 0.99, 0.5, 0.0]
    """
    return min(1.0, progress / 0.05) * 0.5 * (1 + float(np.cos(np.pi * progress)))


# Over all ranks


def _gathered(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    """A row a rank. They travel as bytes: JAX would round them to 32 bits."""
    rows = multihost_utils.process_allgather(np.frombuffer(numbers.tobytes(), np.uint8))
    return np.frombuffer(np.ascontiguousarray(rows).tobytes(), np.float64).reshape(jax.process_count(), *numbers.shape)


def _identical(params: Any) -> bool:
    """Whether all ranks have the same weights, bit for bit."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).tobytes())
    rows = multihost_utils.process_allgather(np.frombuffer(digest.digest(), np.uint8))
    return bool((rows == rows[:1]).all())


if __name__ == "__main__":
    code = serve(train)
    sys.stderr.flush()
    os._exit(code)  # the threads of JAX must not keep a failed worker alive
