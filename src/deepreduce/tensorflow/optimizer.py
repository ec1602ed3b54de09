"""The optimizer whose gradients travel compressed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import keras
import numpy as np
import tensorflow as tf

from ..accounting import Stats
from ..errors import ConfigError
from ..parameters import natural
from ..pipeline import DeepReduce, parse
from ..policy import BySize, Policy, policy_of
from ..source import as_source
from ..steps import wide_dtype
from .exchange import exchange, label_of, slot_of
from .messages import Messenger

_DENSE = parse("dense")


@keras.saving.register_keras_serializable("deepreduce")
class DistributedOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """A Keras optimizer that sends its gradients as messages of deepreduce, between the replicas of a `tf.distribute` strategy.

    Gradients are summed over the replicas, as by every Keras optimizer: `model.fit` has divided the loss by their number, and so should
    a loop of your own. Unlike there, clipping comes after the sum.

    - `optimizer`: does the update; a `LossScaleOptimizer` goes in here. It belongs to this one from now on.
    - `spec`: a spec string, a `DeepReduce`, or an object with `choose(name, source)` such as `BySize`.
    - `memory`: ``"residual"`` for error feedback, in variables of this optimizer that are saved with it, or ``"none"``.
    - `small_tensor_numel`: smaller tensors travel as they are.
    - `seed`: of all that is drawn at random. `history`: steps of which `stats()` keeps the details.

    >>> optimizer = DistributedOptimizer(keras.optimizers.SGD(0.5), "topr:1/raw/raw", small_tensor_numel=0)
    >>> weight = keras.Variable([0.0, 0.0, 0.0])
    >>> for _ in range(2):
    ...     optimizer.apply([tf.constant([3.0, 0.0, 2.0])], [weight])
    >>> weight.numpy()
    array([-1.5,  0. , -2. ], dtype=float32)
    """

    def __init__(
        self,
        optimizer: Any,
        spec: str | DeepReduce | Policy,
        memory: Literal["residual", "none"] = "residual",
        small_tensor_numel: int = 1024,
        *,
        seed: int = 0,
        history: int = 100,
        name: str | None = None,
    ) -> None:
        if memory not in ("residual", "none"):
            raise ConfigError(f"memory is 'residual' or 'none', got {memory!r}")
        seed = natural(seed, "a seed")
        super().__init__(learning_rate=0.0, name=name)
        self._messenger = Messenger(policy_of(spec, small_tensor_numel), seed, history)
        self._settings = {"spec": spec, "memory": memory, "small_tensor_numel": small_tensor_numel, "seed": seed, "history": history}
        self._residuals: list[Any] = []
        self.inner_optimizer = _without_all_reduce(optimizer)

    def stats(self) -> Stats:
        """Bytes and seconds of the latest steps of this worker."""
        return self._messenger.stats

    # A step

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Sum the gradients over all replicas and update the variables; to be called in replica context."""
        if not self.built:
            self.build(list(trainable_variables or ()))
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        self.inner_optimizer.apply(self._summed(list(grads), variables), variables)
        self._iterations.assign_add(1)

    def _summed(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        sent = [place for place, pair in enumerate(zip(gradients, variables, strict=True)) if self._is_sent(*pair)]
        numbers = [self._get_variable_index(variables[place]) for place in sent]
        residuals = [self._residuals[number] for number in numbers]
        owed = [None if residual is None else tf.convert_to_tensor(residual) for residual in residuals]
        scale = getattr(self.inner_optimizer, "dynamic_scale", None)  # a loss scale changes, what is owed does not
        unscaled = [_scaled(gradients[place], None if scale is None else 1 / scale) for place in sent]
        slots = [
            slot_of(gradient, variables[place], number, debt is not None)
            for place, number, gradient, debt in zip(sent, numbers, unscaled, owed, strict=True)
        ]
        sums, rests = exchange(self._messenger, slots, unscaled, owed, self._iterations.value)
        changed = [(residual.value, rest) for residual, rest in zip(residuals, rests, strict=True) if residual is not None]
        tf.__internal__.distribute.interim.maybe_merge_call(_remember, self._distribution_strategy, changed)
        for place, total in zip(sent, sums, strict=True):
            gradients[place] = _scaled(total, scale)
        return gradients

    def _is_sent(self, gradient: Any, variable: Any) -> bool:
        return gradient is not None and not self._overwrite_variable_with_gradient(variable)

    # What Keras asks of an optimizer

    def build(self, variables: Sequence[Any]) -> None:
        """Make the variables: those of the optimizer inside, and what every compressed parameter is owed."""
        self.inner_optimizer.build(variables)
        super().build(variables)
        self._residuals = [self._residual(variable) for variable in variables]

    def _residual(self, variable: Any) -> Any:
        like = as_source(np.zeros(variable.shape, tf.as_dtype(variable.dtype).as_numpy_dtype))
        if self._settings["memory"] == "none" or self._messenger.policy.choose(label_of(variable), like) == _DENSE:
            return None
        native = variable.value if isinstance(variable, keras.Variable) else variable
        with self._distribution_strategy.extended.colocate_vars_with(native):
            label = f"{label_of(variable).replace('/', '_')}_residual"
            return self.add_variable(tuple(variable.shape), dtype=str(wide_dtype(like.dtype)), name=label)

    @property
    def variables(self) -> list[Any]:
        """All that is saved."""
        return [*self._variables, *self.inner_optimizer.variables]

    @property
    def learning_rate(self) -> Any:
        """That of the optimizer inside."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        self.inner_optimizer.learning_rate = learning_rate

    @property
    def iterations(self) -> Any:
        """Updates so far."""
        return self.inner_optimizer.iterations

    def scale_loss(self, loss: Any) -> Any:
        """As the optimizer inside does."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Sequence[Any]) -> None:
        """As the optimizer inside does."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """What `from_config` needs."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "optimizer": inner, **self._settings, "spec": _plain(self._settings["spec"])}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Self:
        """An optimizer with these settings."""
        inner = keras.saving.deserialize_keras_object(config["optimizer"], custom_objects=custom_objects)
        return cls(**config | {"optimizer": inner, "spec": _spec_of(config["spec"])})


def _plain(spec: Any) -> Any:
    """A spec as JSON has it."""
    if isinstance(spec, BySize):
        return {"numel": spec.numel, "small": str(spec.small), "large": str(spec.large)}
    if isinstance(spec, str | DeepReduce):
        return str(spec)
    raise ConfigError(f"a model is saved with a spec, a DeepReduce or a BySize in its optimizer, got {spec!r}")


def _spec_of(plain: Any) -> str | BySize:
    """The spec of `_plain`."""
    return BySize(**plain) if isinstance(plain, dict) else str(plain)


def _without_all_reduce(optimizer: Any) -> Any:
    """The same optimizer, which from now on takes gradients as they are: they were summed before."""
    updating = optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer
    if not hasattr(updating, "_all_reduce_sum_gradients"):
        raise ConfigError(f"need an optimizer of Keras 3 on its TensorFlow backend, got {optimizer!r}")
    updating._all_reduce_sum_gradients = list
    return optimizer


def _scaled(gradient: Any, scale: Any) -> Any:
    if scale is None:
        return gradient
    factor = tf.cast(scale, gradient.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _remember(strategy: Any, changed: Sequence[tuple[Any, Any]]) -> None:
    """Give every replica what it owes now."""
    for residual, rest in changed:
        strategy.extended.update(residual, _assign, args=(rest,), group=False)


def _assign(residual: Any, rest: Any) -> None:
    if isinstance(rest, tf.IndexedSlices):
        residual.scatter_update(rest)
    else:
        residual.assign(rest)
