"""Keras 3 does not run `fit` under MultiWorkerMirroredStrategy by itself (keras-team/keras#20585); this is what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from .private import build_alone


def enable_fit(model: Any) -> Any:
    """Let `fit` and `evaluate` of this model run on several workers: the same model, before its first `fit`.

    Two steps of Keras cannot be taken with more than one worker: it reduces the first batch over all workers to learn its shapes, where
    the part of this worker is enough; and it reduces the metrics of a step along an axis that they do not have. Under any other strategy
    nothing is changed.
    """
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
