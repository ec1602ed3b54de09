"""Keras 3 does not run `fit` under MultiWorkerMirroredStrategy by itself (keras-team/keras#20585); this is what it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ..errors import ConfigError


def enable_fit(model: Any) -> Any:
    """Let `fit` and `evaluate` of this model run on several workers: the same model, before its first `fit`.

    Two steps of Keras cannot be taken with more than one worker: it reduces the first batch over all workers to learn its shapes, where
    the part of this worker is enough; and it reduces the metrics of a step along an axis that they do not have. Under any other strategy
    nothing is changed.
    """
    strategy = model.distribute_strategy
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        _build_alone(model, strategy)
        model.train_step = _with_axis(model.train_step)
        model.test_step = _with_axis(model.test_step)
    return model


def _build_alone(model: Any, strategy: Any) -> None:
    """Let the model learn its shapes from the batch of this worker. Keras has no public way for it; the names are those of 3.15."""
    if not (callable(getattr(model, "_maybe_symbolic_build", None)) and callable(getattr(model, "_symbolic_build", None))):
        raise ConfigError(
            f"enable_fit needs Keras 3 on TensorFlow, as in 3.15, found Keras {keras.__version__}; a loop of your own does not"
        )

    def own_part(value: Any) -> Any:
        return strategy.experimental_local_results(value)[0]

    def build(iterator: Any = None, data_batch: Any = None) -> None:
        if iterator is not None:
            _, _, batches = next(iter(iterator))
            data_batch = keras.tree.map_structure(own_part, next(batches))
        with strategy.scope():
            model._symbolic_build(data_batch=data_batch)

    model._maybe_symbolic_build = build


def _with_axis(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def step_with_axis(data: Any) -> Any:
        return keras.tree.map_structure(lambda metric: tf.reshape(metric, [1]), step(data))

    return step_with_axis
