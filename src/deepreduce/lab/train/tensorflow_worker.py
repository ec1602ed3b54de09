"""One worker that trains with Keras under MultiWorkerMirroredStrategy; see `contract`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import nan
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...step.stats import StepStats, ring_bytes
from ...tensorflow import DistributedOptimizer
from . import tensorflow_cluster, tensorflow_models
from .batches import Batch
from .contract import Emit, Plan, serve
from .run import Job, Run, train_all
from .tasks import Task, read_data


def train(plan: Plan, emit: Emit) -> None:
    """Join the other workers and train every spec of the plan. Rank 0 emits."""
    tensorflow_cluster.join()
    tf.config.threading.set_intra_op_parallelism_threads(int(os.environ.get("OMP_NUM_THREADS", "0")))
    team = Team()
    job = Job(plan, read_data(plan), team.rank, tensorflow_models.build(plan.model, plan.seed).count_params())

    def warm(spec: str) -> Run:
        run = TensorFlowRun(job, spec, team)
        run.warm_up()
        return run

    train_all(job, warm, emit)
    with suppress(tf.errors.UnavailableError):  # another was faster to leave, after it had trained to the end
        team.gathered([0.0])  # nobody leaves while another still trains


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


def _all_gather(row: Any) -> Any:
    here = tf.identity(row)  # on the device of the replica: that is where the result goes
    return tf.distribute.get_replica_context().all_gather(here, axis=0)


class TensorFlowRun(Run):
    """One spec: a compiled step of the strategy, whose optimizer exchanges gradients."""

    def __init__(self, job: Job, spec: str, team: Team) -> None:
        super().__init__(job, spec)
        self.team = team
        with team.strategy.scope():
            self.model = tensorflow_models.build(job.plan.model, job.plan.seed)
            self.optimizer = _optimizer(job.plan, spec, self.task)
            self.optimizer.build(self.model.trainable_variables)
        self._compiled = tf.function(self._update)
        self._zeros = 0.0

    def warm_up(self) -> None:
        """Compile the step of this run; afterwards all is as before."""
        variables = [*self.model.variables, *self.optimizer.variables]
        before = [variable.numpy() for variable in variables]
        for _, batch in self.batches(self.plan.warm_up):
            self._compiled(*batch)
            gradients = self._gradients(*batch)[1]
        self._zeros = 1 - sum(np.count_nonzero(each) for each in gradients) / self.job.parameters
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)

    def step(self, number: int, batch: Batch) -> float:
        self.optimizer.learning_rate = self.rate(number)
        start = time.perf_counter()
        loss = float(self._compiled(*batch))
        seconds, cost = time.perf_counter() - start, self._cost(number)
        self.ledger.add(seconds, seconds - cost.encode_seconds - cost.exchange_seconds - cost.decode_seconds, cost)
        self.ledger.exchanges.append(cost.exchange_seconds)
        return loss

    def _cost(self, number: int) -> StepStats:
        if isinstance(self.optimizer, DistributedOptimizer):
            return self.optimizer.stats().last
        dense_bytes = 4 * self.job.parameters
        return StepStats(number, dense_bytes, dense_bytes, ring_bytes(dense_bytes, self.team.size), exchange_seconds=nan)

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

    def score(self, batch: Batch) -> float:
        images, labels = batch
        return float((self.model(images).numpy().argmax(1) == labels).sum())

    def weights(self) -> Iterable[NDArray[Any]]:
        arrays: list[NDArray[Any]] = self.model.get_weights()
        return arrays

    def zeros(self) -> float:
        return self._zeros

    def gathered(self, numbers: Sequence[float]) -> NDArray[np.float64]:
        return self.team.gathered(numbers)


def _optimizer(plan: Plan, spec: str, task: Task) -> Any:
    """Return the optimizer of a run. For `dense` it is that of Keras with its own all-reduce, which does not tell its seconds."""
    optimizer = keras.optimizers.SGD(plan.learning_rate, momentum=0.9, weight_decay=task.weight_decay or None)
    if spec == "dense":
        return optimizer
    memory: Any = plan.memory
    return DistributedOptimizer(optimizer, spec, memory=memory, small_tensor_numel=plan.small, topology=plan.topology, seed=plan.seed)


if __name__ == "__main__":
    code = serve(train)
    sys.stderr.flush()
    os._exit(code)  # threads of a broken cluster must not keep a failed worker alive
