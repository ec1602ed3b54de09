"""One worker that trains with Keras under MultiWorkerMirroredStrategy; see `contract`."""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ..errors import ConfigError
from ..tensorflow import DistributedOptimizer, StepStats
from . import tensorflow_cluster, tensorflow_models
from .batches import Batch, Data
from .contract import Emit, Plan, Record, Throttle, evaluation_steps, serve
from .tasks import Task, read_data, task_of

_WARM_UP_STEPS = 3
_CURVE_POINTS = 200


def train(plan: Plan, emit: Emit) -> None:
    """Join the other workers and train every spec of the plan. Rank 0 emits."""
    if plan.topology != "allgather":
        raise ConfigError(f"with tensorflow the topology is allgather, got {plan.topology!r}")
    tensorflow_cluster.join()
    tf.config.threading.set_intra_op_parallelism_threads(int(os.environ.get("OMP_NUM_THREADS", "0")))
    team = Team()
    data = read_data(plan.task, Path(plan.data) if plan.data else None, plan.seed, plan.negatives)
    per_epoch = data.steps_per_epoch(plan.workers, plan.batch)
    steps = plan.steps or plan.epochs * per_epoch
    say = emit if team.rank == 0 else _silent
    size = tensorflow_models.build(plan.model, plan.seed).count_params()
    say({"event": "ready", "parameters": size, "steps": steps, "steps_per_epoch": per_epoch})
    for spec in plan.specs:
        run = Run(plan, spec, data, steps, team, say)
        run.warm_up()
        say(run.go().to_event())
    with suppress(tf.errors.UnavailableError):  # another was faster to leave, after it had trained to the end
        team.gathered([0.0])  # nobody leaves while another still trains


def _silent(event: dict[str, Any]) -> None:
    """Not rank 0."""


class Team:
    """All workers."""

    def __init__(self) -> None:
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
        self.rank, self.size = int(os.environ["RANK"]), self.strategy.num_replicas_in_sync
        self._gather = tf.function(lambda row: self.strategy.run(_all_gather, args=(row,)), reduce_retracing=True)

    def gathered(self, numbers: Sequence[float]) -> NDArray[np.float64]:
        """The numbers of every worker, a row for each."""
        row = np.array([numbers], np.float64)
        return row if self.size == 1 else np.asarray(self._gather(tf.constant(row)).numpy())

    def identical(self, model: Any) -> bool:
        """Whether all workers have the same parameters, bit for bit."""
        digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights()))
        digests = self.gathered(list(digest.digest()))
        return bool((digests == digests[0]).all())


def _all_gather(row: Any) -> Any:
    here = tf.identity(row)  # on the device of the replica: that is where the result goes
    return tf.distribute.get_replica_context().all_gather(here, axis=0)


@dataclass
class Ledger:
    """What every step cost this worker."""

    total: float = 0.0
    encode: float = 0.0
    decode: float = 0.0
    message_bytes: int = 0
    dense_bytes: int = 0
    wire_bytes: int = 0
    exchanges: list[float] = field(default_factory=list)

    def add(self, seconds: float, step: StepStats) -> None:
        """Count one step."""
        self.total += seconds
        self.encode += step.encode_seconds
        self.decode += step.decode_seconds
        self.message_bytes += step.message_bytes
        self.dense_bytes += step.dense_bytes
        self.wire_bytes += step.sent_bytes
        self.exchanges.append(step.exchange_seconds)

    def seconds(self, team: Team) -> dict[str, float]:
        """The parts. The worker that comes last to an exchange waits for nobody: its time is the network's."""
        communication, mine = float(team.gathered(self.exchanges).min(0).sum()), sum(self.exchanges)
        return {
            "total": self.total,
            "forward_backward": self.total - self.encode - self.decode - mine,
            "encode": self.encode,
            "decode": self.decode,
            "communication": communication,
            "waiting": mine - communication,
        }


class Run:
    """One spec, trained from the initial weights of the plan's seed."""

    def __init__(self, plan: Plan, spec: str, data: Data, steps: int, team: Team, emit: Emit) -> None:
        self.plan, self.spec, self.data, self.steps, self.team, self._emit = plan, spec, data, steps, team, emit
        self.task: Task = task_of(plan.task)
        with team.strategy.scope():
            self.model = tensorflow_models.build(plan.model, plan.seed)
            self.optimizer = _optimizer(plan, spec, self.task)
            self.optimizer.build(self.model.trainable_variables)
        self._compiled = tf.function(self._update)
        self.ledger, self.zeros = Ledger(), 0.0
        self.losses: list[tuple[int, float]] = []
        self.curve: list[dict[str, float]] = []

    def warm_up(self) -> None:
        """Compile what this spec needs, outside the measurement; afterwards all is as before."""
        variables = [*self.model.variables, *self.optimizer.variables]
        before = [variable.numpy() for variable in variables]
        for batch in itertools.islice(self._batches(), min(self.steps, _WARM_UP_STEPS)):
            self._compiled(*batch)
            gradients = self._gradients(*batch)[1]
        self.zeros = 1 - sum(np.count_nonzero(each) for each in gradients) / self.model.count_params()
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)

    def go(self) -> Record:
        """Train, measure quality now and then, and sum up."""
        measured = evaluation_steps(self.steps, self.plan.evaluations)
        throttle, identical = Throttle(), True
        for number, batch in enumerate(itertools.islice(self._batches(), self.steps), start=1):
            loss = self._step(number, batch)
            if number % max(1, self.steps // _CURVE_POINTS) == 0 or number == self.steps:
                self.losses.append((number, loss))
            if throttle.ready():
                self._emit({"event": "step", "spec": self.spec, "step": number, "loss": loss})
            if number in measured:
                self._evaluate(number, loss)
                identical = identical and self.team.identical(self.model)
        return self._record(identical)

    def _batches(self) -> Any:
        return self.data.train_batches(self.team.rank, self.plan.workers, self.plan.batch, self.plan.seed)

    def _step(self, number: int, batch: Batch) -> float:
        self.optimizer.learning_rate = self.plan.learning_rate * _schedule(number / self.steps)
        start = time.perf_counter()
        loss = float(self._compiled(*batch))
        self.ledger.add(time.perf_counter() - start, self._cost(number))
        return loss

    def _cost(self, number: int) -> StepStats:
        if isinstance(self.optimizer, DistributedOptimizer):
            return self.optimizer.stats().last
        dense_bytes = 4 * self.model.count_params()
        return StepStats(number, dense_bytes, dense_bytes, 2 * (self.team.size - 1) * dense_bytes // self.team.size)

    def _update(self, images: Any, labels: Any) -> Any:
        def replica(images: Any, labels: Any) -> Any:
            loss, gradients = self._gradients(images, labels)
            self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
            return loss

        return self.team.strategy.run(replica, args=(images, labels))

    def _gradients(self, images: Any, labels: Any) -> tuple[Any, list[Any]]:
        """The loss of this worker's batch, and its share of the gradient: optimizers sum over all workers."""
        with tf.GradientTape() as tape:
            scores = self.model(images, training=True)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, scores, from_logits=True))
            share = loss / self.team.size
        return loss, tape.gradient(share, [variable.value for variable in self.model.trainable_variables])

    def _evaluate(self, step: int, loss: float) -> None:
        right, seen = 0, 0
        for images, labels in self.data.test_batches(self.team.rank, self.plan.workers):
            right += int((self.model(images).numpy().argmax(1) == labels).sum())
            seen += len(labels)
        everyone = self.team.gathered([right, seen]).sum(0)
        quality = float(everyone[0] / everyone[1])
        point = {"step": step, "loss": loss, "quality": quality, "bytes_sent": self.ledger.message_bytes, "seconds": self.ledger.total}
        self.curve.append(point)
        self._emit({"event": "evaluation", "spec": self.spec, "step": step, "quality": quality})

    def _record(self, identical: bool) -> Record:
        qualities = [point["quality"] for point in self.curve]
        ledger = self.ledger
        largest = self.team.gathered([ledger.message_bytes, ledger.dense_bytes, ledger.wire_bytes]).max(0)
        return Record(
            spec=self.spec,
            metric=self.task.metric,
            quality=qualities[-1],
            best_quality=max(qualities),
            parameters=self.model.count_params(),
            steps=self.steps,
            steps_per_epoch=self.data.steps_per_epoch(self.plan.workers, self.plan.batch),
            bytes_sent=int(largest[0]),
            bytes_dense=int(largest[1]),
            wire_bytes=int(largest[2]),
            seconds=ledger.seconds(self.team),
            replicas_identical=identical,
            gradient_zeros=self.zeros,
            losses=self.losses,
            curve=self.curve,
        )


def _optimizer(plan: Plan, spec: str, task: Task) -> Any:
    """For `dense`, the optimizer of Keras with its own all-reduce, whose seconds are not told and count as computing."""
    if task.optimizer == "adam":
        optimizer = keras.optimizers.Adam(plan.learning_rate)
    else:
        optimizer = keras.optimizers.SGD(plan.learning_rate, momentum=0.9, weight_decay=task.weight_decay or None)
    if spec == "dense":
        return optimizer
    memory: Any = plan.memory
    return DistributedOptimizer(optimizer, spec, memory=memory, small_tensor_numel=plan.small, seed=plan.seed)


def _schedule(progress: float) -> float:
    """A short rise, then half a cosine down.

    >>> [round(_schedule(progress), 2) for progress in (0.025, 0.05, 0.5, 1.0)]
    [0.5, 0.99, 0.5, 0.0]
    """
    return min(1.0, progress / 0.05) * 0.5 * (1 + float(np.cos(np.pi * progress)))


if __name__ == "__main__":
    code = serve(train)
    sys.stderr.flush()
    os._exit(code)  # threads of a broken cluster must not keep a failed worker alive
