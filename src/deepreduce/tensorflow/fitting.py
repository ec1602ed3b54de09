"""Keras 3 does not run `fit` under MultiWorkerMirroredStrategy by itself (keras-team/keras#20585); this is what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import keras
import tensorflow as tf

from .optimizer import DistributedOptimizer
from .private import build_alone


def enable_fit(model: Any) -> Any:
    """Let `fit` and `evaluate` of this model run on several workers: the same model, before its first `fit`.

    Two steps of Keras cannot be taken with more than one worker: it reduces the first batch over all workers to learn its shapes, where
    the part of this worker is enough; and it reduces the metrics of a step along an axis that they do not have. Under any other strategy
    these are left as they are. Where the optimizer takes local steps, `evaluate`, also as part of `fit`, comes after a `sync()`.
    """
    model.evaluate = _after_sync(model, model.evaluate)
    strategy = model.distribute_strategy
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        build_alone(model, strategy)
        model.train_step = _with_axis(model.train_step)
        model.test_step = _with_axis(model.test_step)
    return model


def _with_axis(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def step_with_axis(data: Any) -> Any:
        return keras.tree.map_structure(lambda metric: tf.reshape(metric, [1]), step(data))

    return step_with_axis


def _after_sync(model: Any, evaluate: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(evaluate)
    def evaluate_after_sync(*args: Any, **kwargs: Any) -> Any:
        if isinstance(model.optimizer, DistributedOptimizer):
            model.optimizer.sync()
        return evaluate(*args, **kwargs)

    return evaluate_after_sync
