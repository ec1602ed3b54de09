"""The optimizer whose gradients travel compressed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any, Literal, Self

import keras
import numpy as np
import tensorflow as tf

from ..errors import ConfigError
from ..parameters import natural
from ..pipeline import parse
from ..source import SparseSource
from ..step.arrays import accumulation_dtype
from ..step.policy import BySize, ByStep, Policy, Spec, policy_of
from ..step.reducer import Reducer
from ..step.stats import Stats
from ..step.threads import Threads
from ..step.topology import Topology, topology_of
from ..tensor import Shape, SparseTensor
from .exchange import exchange, slot_of
from .host import HostSteps
from .private import without_all_reduce
from .saving import plain_spec, plain_topology, saved_spec, saved_topology

_DENSE = parse("dense")


@keras.saving.register_keras_serializable("deepreduce")
class DistributedOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """A Keras optimizer that sends its gradients as messages of deepreduce, between the replicas of a `tf.distribute` strategy.

    Gradients are summed over the replicas, as by every Keras optimizer: `model.fit` has divided the loss by their number, and so should
    a loop of your own. Unlike there, clipping comes after the sum.

    - `optimizer`: does the update; a `LossScaleOptimizer` goes in here. It belongs to this one from now on.
    - `spec`: a spec string, a `DeepReduce`, a `Schedule`, or an object with `codec_for(name, source)` such as `BySize`.
    - `sends`: ``"gradients"``, or ``"updates"`` for Adam and other adaptive optimizers: each replica takes the step of the optimizer with
      its own gradients, and the mean change of the variables is applied on all of them.
    - `memory`: ``"residual"`` for error feedback, in variables of this optimizer that are saved with it, or ``"none"``.
    - `small_tensor_numel`: smaller tensors travel as they are.
    - `topology`: ``"allgather"``, ``"server"``, ``"sharded"`` or a `Sharded(budget=...)`. A strategy has an all-gather only, of which the
      others are made here: they save no bytes.
    - `threads`: number of threads that encode and decode, at most as many as this process may use cores; results do not depend on it.
    - `seed`: of all that is drawn at random. `history`: steps of which `stats()` keeps the details.
    - `parameter_names`: for policies, errors, seeds and tables, in the order of the variables, all different; default their paths, numbered
      where they repeat. They are saved with the model, as paths change when Keras loads it.

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
        spec: Spec,
        memory: Literal["residual", "none"] = "residual",
        small_tensor_numel: int = 1024,
        *,
        sends: Literal["gradients", "updates"] = "gradients",
        topology: str | Topology = "allgather",
        threads: int = 1,
        seed: int = 0,
        history: int = 100,
        parameter_names: Sequence[str] | None = None,
        name: str | None = None,
    ) -> None:
        if memory not in ("residual", "none"):
            raise ConfigError(f"memory is 'residual' or 'none', got {memory!r}")
        if sends not in ("gradients", "updates"):
            raise ConfigError(f"sends is 'gradients' or 'updates', got {sends!r}")
        if sends == "updates" and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise ConfigError("each replica would have a loss scale of its own: a LossScaleOptimizer goes with sends='gradients'")
        if sends == "updates" and getattr(optimizer, "use_ema", False):
            raise ConfigError("each replica would average weights of its own: use_ema goes with sends='gradients'")
        seed = natural(seed, "a seed")
        super().__init__(learning_rate=0.0, name=name)
        reducer = Reducer(policy_of(spec, small_tensor_numel), topology_of(topology), seed, average=False, threads=Threads(threads))
        self._steps = HostSteps(reducer, memory == "residual", history)
        self._settings = {"sends": sends, "memory": memory, "small_tensor_numel": small_tensor_numel, "seed": seed, "history": history}
        self._settings["threads"] = threads
        self._spec, self._names = spec, None if parameter_names is None else list(parameter_names)
        self._strategy = tf.distribute.get_strategy()
        self._residuals: list[Any] = []
        self._owned: list[Any] = []
        self.inner_optimizer = without_all_reduce(optimizer)

    def stats(self) -> Stats:
        """Return the bytes and seconds of the latest steps of this worker."""
        return self._steps.stats

    # A step

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Update the variables, the same on all replicas; to be called in replica context."""
        if not self.built:
            self.build(list(trainable_variables or ()))
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if self._settings["sends"] == "updates":
            self._apply_mean_update(list(grads), variables)
        else:
            self.inner_optimizer.apply(self._summed(list(grads), variables), variables)
        self._iterations.assign_add(1)

    def _apply_mean_update(self, gradients: list[Any], variables: Sequence[Any]) -> None:
        """Take a step with the gradients of this replica alone, and replace what it changed by the mean over all replicas."""
        context = tf.distribute.get_replica_context()
        replicas = context.num_replicas_in_sync  # by which the loss was divided
        sent = [_is_sent(*pair) for pair in zip(gradients, variables, strict=True)]
        starts = [tf.identity(variable) for variable in variables]
        own = [_scaled(gradient, replicas) if is_sent else gradient for gradient, is_sent in zip(gradients, sent, strict=True)]
        self.inner_optimizer.apply(own, variables)
        moved = zip(starts, variables, sent, strict=True)
        changes = [start - tf.identity(variable) if is_sent else None for start, variable, is_sent in moved]
        totals = zip(variables, starts, self._summed(changes, variables), strict=True)
        changed = [
            (_native(variable), _constrained(variable, start - total / replicas)) for variable, start, total in totals if total is not None
        ]
        context.merge_call(_assign_all, args=(changed,))

    def _summed(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        sent = [index for index, pair in enumerate(zip(gradients, variables, strict=True)) if _is_sent(*pair)]
        numbers = [self._get_variable_index(variables[index]) for index in sent]
        kept = [(self._residuals[number], self._owned[number]) for number in numbers]
        names = [(self._names or ())[number] for number in numbers]
        slots = [slot_of(name, gradients[index], variables[index], *held) for name, index, held in zip(names, sent, kept, strict=True)]
        given = [(gradients[index], *map(_value, held)) for index, held in zip(sent, kept, strict=True)]
        scale = getattr(self.inner_optimizer, "dynamic_scale", 1.0)
        results = exchange(self._steps, slots, given, self._iterations.value, scale)
        changed = [
            (variable.value, after)
            for held, (_, *rest) in zip(kept, results, strict=True)
            for variable, after in zip(held, rest, strict=True)
            if variable is not None
        ]
        tf.distribute.get_replica_context().merge_call(_assign_all, args=(changed,))
        for index, (total, *_) in zip(sent, results, strict=True):
            gradients[index] = total
        return gradients

    # What Keras asks of an optimizer

    def build(self, variables: Sequence[Any]) -> None:
        """Make the variables: those of the optimizer inside, and the residuals of every parameter that is compressed."""
        if self._names is None:
            self._names = _numbered([str(getattr(variable, "path", variable.name)) for variable in variables])
        if len(self._names) != len(variables):
            raise ConfigError(f"{len(self._names)} parameter names were given for {len(variables)} variables")
        if len(set(self._names)) < len(self._names):
            repeated, count = Counter(self._names).most_common(1)[0]
            raise ConfigError(f"each variable needs a parameter name of its own, got {repeated!r} {count} times")
        self.inner_optimizer.build(variables)
        super().build(variables)
        named = list(zip(variables, self._names, strict=True))
        self._residuals = [self._residual(variable, name) for variable, name in named]
        self._owned = [self._owned_residual(*each, residual) for each, residual in zip(named, self._residuals, strict=True)]

    def _residual(self, variable: Any, name: str) -> Any:
        if not self._steps.feedback or _is_always_dense(self._steps.reducer.policy, tuple(variable.shape)):
            return None
        return self._variable_for(variable, tuple(variable.shape), f"{name}_residual")

    def _owned_residual(self, variable: Any, name: str, residual: Any) -> Any:
        """A variable with room for the largest range that any rank owns: a strategy gives the variables of all ranks one shape."""
        topology, ranks = self._steps.reducer.topology, self._strategy.num_replicas_in_sync
        if not topology.has_owners or residual is None:
            return None
        ranges = [topology.owned_range(name, prod(variable.shape), rank, ranks) for rank in range(ranks)]
        return self._variable_for(variable, (max(high - low for low, high in ranges),), f"{name}_owned_residual")

    def _variable_for(self, variable: Any, shape: Shape, name: str) -> Any:
        native = _native(variable)
        dtype = accumulation_dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)
        with self._strategy.extended.colocate_vars_with(native):
            return self.add_variable(shape, dtype=str(dtype), name=name.replace("/", "_"))

    @property
    def variables(self) -> list[Any]:
        """All variables that are saved."""
        return [*self._variables, *self.inner_optimizer.variables]

    @property
    def learning_rate(self) -> Any:
        """The learning rate of the optimizer inside."""
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
        """Return what `from_config` needs."""
        inner, topology = keras.saving.serialize_keras_object(self.inner_optimizer), self._steps.reducer.topology
        plain = {"spec": plain_spec(self._spec), "topology": plain_topology(topology), "parameter_names": self._names and list(self._names)}
        return {"name": self.name, "optimizer": inner, **self._settings, **plain}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Self:
        """Return an optimizer with these settings."""
        inner = keras.saving.deserialize_keras_object(config["optimizer"], custom_objects=custom_objects)
        given = {"optimizer": inner, "spec": saved_spec(config["spec"]), "topology": saved_topology(config["topology"])}
        return cls(**config | given)


def _numbered(paths: Sequence[str]) -> list[str]:
    """Return the paths with a number where one repeats: Keras does not make them unique.

    >>> _numbered(["block/kernel", "block/bias", "block/kernel"])
    ['block/kernel', 'block/bias', 'block/kernel#2']
    """
    counts: Counter[str] = Counter()
    names = []
    for path in paths:
        counts[path] += 1
        names.append(path if counts[path] == 1 else f"{path}#{counts[path]}")
    return names


def _is_always_dense(policy: Policy | ByStep, shape: Shape) -> bool:
    """Whether a parameter can have no residual. Policies other than `BySize` may change their mind from step to step."""
    like = SparseSource(SparseTensor([], np.empty(0, np.float32), shape))
    return isinstance(policy, BySize) and policy.codec_for("", like) == _DENSE


def _is_sent(gradient: Any, variable: Any) -> bool:
    """Whether a gradient is one: some variables are overwritten with theirs."""
    return gradient is not None and not getattr(variable, "overwrite_with_gradient", False)


def _scaled(gradient: Any, factor: int) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _constrained(variable: Any, value: Any) -> Any:
    """Return the value as the constraint of the variable wants it."""
    return value if variable.constraint is None else variable.constraint(value)


def _native(variable: Any) -> Any:
    """The variable of TensorFlow."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def _value(variable: Any) -> Any:
    return None if variable is None else tf.convert_to_tensor(variable)


def _assign_all(strategy: Any, changed: Sequence[tuple[Any, Any]]) -> None:
    """Assign each variable its new value, on every replica."""
    for variable, after in changed:
        strategy.extended.update(variable, _assign, args=(after,), group=False)


def _assign(variable: Any, after: Any) -> None:
    if isinstance(after, tf.IndexedSlices):
        variable.scatter_update(after)
    else:
        variable.assign(after)
