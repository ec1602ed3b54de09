"""NaN and Inf reach every worker and leave no trace; a worker that cannot send tells the others."""

import keras
import numpy as np
import tensorflow as tf

import deepreduce as dr
from deepreduce.tensorflow import DistributedOptimizer

from .workers import run_workers

NAN, INF = float("nan"), float("inf")


def stepper(strategy, inner, spec="topr:1/raw/raw", start=(0.0, 0.0, 0.0), **options):
    """An optimizer on one weight, and a compiled step that takes a gradient."""
    with strategy.scope():
        optimizer = DistributedOptimizer(inner, spec, small_tensor_numel=0, **options)
        weight = keras.Variable(np.float32(start), name="weight")
        optimizer.build([weight])

    @tf.function
    def step(gradient):
        strategy.run(lambda given: optimizer.apply_gradients([(given, weight)]), args=(gradient,))

    return optimizer, weight, step


def overflowing(rank, strategy):
    """One worker overflows in the second step; a loss scale of 4 is in force, and the step is skipped."""
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    _, weight, step = stepper(strategy, scaled)
    step(tf.constant([12.0, 8.0, 0.0]))
    first = weight.numpy()
    step(tf.constant([INF, 1.0, 1.0] if rank else [0.0, 0.0, 0.0]))
    skipped, scale = weight.numpy(), float(scaled.dynamic_scale.numpy())
    step(tf.constant([0.0, 0.0, 0.5]))  # the residual is what the first step left: 8 at a scale of 4
    return first, skipped, scale, weight.numpy()


def test_an_overflow_on_one_worker_skips_the_step_on_all():
    for first, skipped, scale, last in run_workers(overflowing, 2):
        np.testing.assert_array_equal(first, [-6, 0, 0])
        np.testing.assert_array_equal(skipped, first)
        assert scale == 2
        np.testing.assert_array_equal(last, [-6, -4, 0])


def poisoned(rank, strategy, spec):
    optimizer, weight, step = stepper(strategy, keras.optimizers.SGD(1.0), spec)
    step(tf.constant([3.0, 2.0, 1.0]))
    residual = optimizer._residuals[0].numpy()
    step(tf.constant([1.0, NAN, 1.0] if rank == 0 else [1.0, 1.0, 1.0]))
    return weight.numpy(), residual, optimizer._residuals[0].numpy()


def test_nan_reaches_all_workers_and_leaves_the_residual_alone():
    for weight, before, after in run_workers(poisoned, 2, "randomr:1/seeded/raw"):
        assert np.isnan(weight).any()
        assert before.any()
        np.testing.assert_array_equal(before, after)


class Picky:
    """A policy that refuses large gradients."""

    def codec_for(self, name, source):
        if source.top(1).nnz and float(source.gather(source.top(1))[0]) > 100:
            raise dr.InputError("too large for me")
        return dr.parse("topr:1/raw/raw")


def refusing(rank, strategy, topologies):
    told = []
    for topology in topologies:
        _, weight, step = stepper(strategy, keras.optimizers.SGD(1.0), Picky(), topology=topology)
        step(tf.constant([1.0, 2.0, 3.0]))
        try:
            step(tf.constant([1.0, 2.0, 1000.0 if rank else 3.0]))
        except tf.errors.OpError as error:
            told.append(str(error))
        step(tf.constant([1.0, 2.0, 3.0]))  # and they go on
        told.append(weight.numpy().tolist())
    return told


def test_a_worker_that_cannot_encode_tells_the_others_and_they_go_on():
    here, there = run_workers(refusing, 2, ["allgather", "server", "sharded"])
    for other, failed in zip(here[::2], there[::2], strict=True):
        assert "PeerFailure: rank 1 failed: InputError: weight: too large for me" in other
        assert "InputError: weight: too large for me" in failed
        assert "PeerFailure" not in failed
    assert here[1::2] == there[1::2]
