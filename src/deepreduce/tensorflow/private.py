"""What is private in Keras and has no public way: one function each, with the version it was seen in."""

from __future__ import annotations

from typing import Any

import keras

from ..errors import ConfigError


def without_all_reduce(optimizer: Any) -> Any:
    """Return the same optimizer, which from now on takes gradients as they are: they were summed before.

    Keras has no public way to say so. Seen in Keras 3.15: `_backend_update_step` calls `_all_reduce_sum_gradients`, and nothing else does.
    """
    updating = optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer
    if not isinstance(updating, keras.optimizers.Optimizer):
        raise ConfigError(f"need an optimizer of Keras, got {optimizer!r}")
    step = getattr(updating, "_backend_update_step", None)
    if "_all_reduce_sum_gradients" not in getattr(getattr(step, "__code__", None), "co_names", ()):
        raise ConfigError(
            f"cannot keep {type(updating).__name__} from summing gradients again: need Keras 3 on TensorFlow, as in 3.15, found Keras "
            f"{keras.__version__} on {keras.backend.backend()}"
        )
    updating._all_reduce_sum_gradients = list
    return optimizer


def build_alone(model: Any, strategy: Any) -> None:
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
