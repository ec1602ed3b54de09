"""The optimizer whose gradients travel compressed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any, Literal, Self

import keras
import numpy as np
import tensorflow as tf

from ..errors import ConfigError
from ..parameters import natural, shown
from ..pipeline import parse
from ..source import SparseSource
from ..step.arrays import accumulation_dtype
from ..step.local import interval
from ..step.policy import BySize, ByStep, Policy, Spec, policy_of
from ..step.recipes import LocalMemory, LocalSettings, local_settings
from ..step.reducer import Reducer
from ..step.stats import Stats
from ..step.threads import Threads
from ..step.topology import Topology, topology_of
from ..tensor import Shape, SparseTensor
from .exchange import exchange, slot_of, when
from .host import HostSteps
from .private import without_all_reduce
from .saving import plain_spec, plain_topology, saved_spec, saved_topology
from .variables import assign, native, value_of

_DENSE = parse("dense")
_EQUAL = -1
"""In the place of the steps since the last sync: all replicas have the same variables."""


@keras.saving.register_keras_serializable("deepreduce")
class DistributedOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """A Keras optimizer that sends its gradients as messages of deepreduce, between the replicas of a `tf.distribute` strategy.

    Gradients are summed over the replicas, as by every Keras optimizer: `model.fit` has divided the loss by their number, and so should
    a loop of your own. Unlike there, clipping comes after the sum.

    - `optimizer`: does the update; a `LossScaleOptimizer` goes in here. It belongs to this one from now on.
    - `spec`: a spec string, a `DeepReduce`, a `Schedule`, or an object with `codec_for(name, source)` such as `BySize`; or leave it to a
      `recipe`.
    - `sends`: ``"gradients"``, or ``"updates"`` for Adam and other adaptive optimizers: each replica takes the step of the optimizer with
      its own gradients, and the mean change of the variables is applied on all of them. With a recipe it is ``"updates"``.
    - `every`: of updates, steps between two syncs, at which the changes are exchanged; default 1.
    - `recipe`: ``"adam"`` for adaptive optimizers, ``"sgd"`` for SGD: sends updates, and sets `spec`, `every`, `memory` and
      `small_tensor_numel` to what was measured to be best; what is given replaces its part.
    - `memory`: ``"residual"`` for error feedback, in variables of this optimizer that are saved with it, or ``"none"``. Of updates also
      ``"parameters"``: what a replica did not send stays in its own variables. Variables are then equal after `sync()` alone.
    - `small_tensor_numel`: smaller tensors travel as they are; default 1024.
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
        spec: Spec | None = None,
        memory: LocalMemory | None = None,
        small_tensor_numel: int | None = None,
        *,
        sends: Literal["gradients", "updates"] | None = None,
        every: int | None = None,
        recipe: str | None = None,
        topology: str | Topology = "allgather",
        threads: int = 1,
        seed: int = 0,
        history: int = 100,
        parameter_names: Sequence[str] | None = None,
        name: str | None = None,
    ) -> None:
        sends = sends or ("gradients" if recipe is None else "updates")
        chosen = local_settings(recipe, spec, every=every, memory=memory, small_tensor_numel=small_tensor_numel)
        _check_settings(optimizer, sends, recipe, chosen)
        seed = natural(seed, "a seed")
        super().__init__(learning_rate=0.0, name=name)
        policy = policy_of(chosen.spec, chosen.small_tensor_numel)
        reducer = Reducer(policy, topology_of(topology), seed, average=False, threads=Threads(threads))
        self._steps = HostSteps(reducer, chosen.memory != "none", history)
        self._settings: dict[str, Any] = {
            "sends": sends,
            "every": chosen.every,
            "memory": chosen.memory,
            "small_tensor_numel": chosen.small_tensor_numel,
        }
        self._settings |= {"seed": seed, "history": history, "threads": threads}
        self._spec, self._names = chosen.spec, None if parameter_names is None else list(parameter_names)
        self._strategy = tf.distribute.get_strategy()
        self._residuals: list[Any] = []
        self._owned: list[Any] = []
        self._anchors: list[Any] = []
        self._sync_graph: Callable[[], Any] | None = None
        self.inner_optimizer = without_all_reduce(optimizer)

    def stats(self) -> Stats:
        """Return the bytes and seconds of the latest steps of this worker."""
        return self._steps.stats

    # A step

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Update the variables, the same on all replicas unless updates wait for a sync; to be called in replica context."""
        if not self.built:
            self.build(list(trainable_variables or ()))
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if self._settings["sends"] == "updates":
            self._take_local_step(list(grads), variables)
        else:
            self.inner_optimizer.apply(self._summed(list(grads), variables), variables)
        self._iterations.assign_add(1)

    def _summed(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients, those that are sent as sums over all replicas."""
        sent = [index for index, pair in enumerate(zip(gradients, variables, strict=True)) if _is_sent(*pair)]
        numbers = [self._get_variable_index(variables[index]) for index in sent]
        like = [(gradients[index], variables[index]) for index in sent]
        end = self._exchange(numbers, like, lambda: [gradients[index] for index in sent])
        results, changed = end(), []
        for index, number, (total, *kept) in zip(sent, numbers, results, strict=True):
            gradients[index] = total
            changed += [(held, after) for held, after in zip(self._kept(number), kept, strict=True) if held is not None]
        assign(changed)
        return gradients

    def _exchange(
        self, numbers: Sequence[int], like: Sequence[tuple[Any, Any]], given: Callable[[], Sequence[Any]], since: Any = 1, due: Any = None
    ) -> Callable[[], list[tuple[Any, Any, Any]]]:
        """Exchange what `given` returns for the variables of these numbers: gradients `like` those, each beside its variable."""
        kept, names = list(map(self._kept, numbers)), self._names or ()
        slots = [slot_of(names[number], *pair, *held) for number, pair, held in zip(numbers, like, kept, strict=True)]

        def rows() -> list[Sequence[Any]]:
            return [(gradient, *map(value_of, held)) for gradient, held in zip(given(), kept, strict=True)]

        scale = getattr(self.inner_optimizer, "dynamic_scale", 1.0)
        return exchange(self._steps, slots, rows, self._iterations.value, scale, since, due)

    def _kept(self, number: int) -> tuple[Any, Any]:
        return self._residuals[number], self._owned[number]

    # Local steps

    def sync(self) -> None:
        """Bring all replicas to the same variables now: all workers call it, outside `strategy.run`. After a sync it sends nothing.

        `fit` does so at its end and, by `enable_fit`, before every evaluation. Without local steps, variables are always the same, and
        this does nothing.
        """
        if not (self.built and self._has_own_variables):
            return
        if self._sync_graph is None:
            graph = tf.function(partial(self._strategy.run, self._sync_replica), autograph=False)
            self._sync_graph = graph.__call__  # as Keras would save the graph itself with the optimizer
        self._sync_graph()

    @property
    def _has_own_variables(self) -> bool:
        """Whether replicas have other variables between two syncs."""
        settings = self._settings
        return bool(settings["sends"] == "updates" and (settings["every"] > 1 or settings["memory"] == "parameters"))

    def _take_local_step(self, gradients: list[Any], variables: Sequence[Any]) -> None:
        """Take a step with the gradients of this replica alone; after `every` of them, apply the mean of what they changed."""
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync  # by which the loss was divided
        pairs = zip(gradients, variables, strict=True)
        own = [_scaled(gradient, replicas) if _is_sent(gradient, variable) else gradient for gradient, variable in pairs]
        since, every = tf.convert_to_tensor(self._since_sync), self._settings["every"]
        assign([(self._anchors[number], self._trainable_variables[number]) for number in self._numbers()], since == _EQUAL)
        self.inner_optimizer.apply(own, variables)
        steps = tf.maximum(since, 0) + 1
        assign([(self._since_sync, steps)])
        self._synchronize(steps, None if every == 1 else steps >= every, self._settings["memory"] == "parameters")

    def _sync_replica(self) -> None:
        """Synchronize; or, right after a sync, move what this replica has not sent from its variables to the residuals."""
        since, moves = tf.convert_to_tensor(self._since_sync), [(self._since_sync, tf.constant(_EQUAL))]
        for number in self._numbers():
            anchor, variable, residual = self._anchors[number], self._trainable_variables[number], self._residuals[number]
            if residual is not None:
                moves += [(residual, residual + tf.cast(tf.subtract(anchor, variable), residual.dtype)), (variable, anchor)]
        self._synchronize(since, since > 0, unsent_in_variables=False)
        assign(moves, since == 0)

    def _numbers(self) -> list[int]:
        """Return the numbers of the variables that a sync makes equal."""
        return [number for number, variable in enumerate(self._trainable_variables) if not _is_overwritten(variable)]

    def _synchronize(self, steps: Any, due: Any, unsent_in_variables: bool) -> None:
        """Move the anchors by the mean of what the latest steps changed, and the variables with them."""
        replicas, numbers = tf.distribute.get_replica_context().num_replicas_in_sync, self._numbers()
        variables, anchors = self._trainable_variables, self._anchors

        def changes() -> list[Any]:
            return [tf.subtract(anchors[number], variables[number]) for number in numbers]

        def moved() -> list[Any]:
            """Return the values of `targets`."""
            values = [tf.constant(0 if unsent_in_variables else _EQUAL)]
            for number, (total, residual, owned) in zip(numbers, end(), strict=True):
                anchor = _constrained(variables[number], anchors[number] - total / replicas)
                own, later = anchor, residual
                if unsent_in_variables and residual is not None:
                    own, later = _constrained(variables[number], anchor - tf.cast(residual, anchor.dtype)), tf.zeros_like(residual)
                values += [anchor, own, *(after for after in (later, owned) if after is not None)]
            return values

        like = [(native(variables[number]), variables[number]) for number in numbers]
        end = self._exchange(numbers, like, changes, steps, due)
        of_each = [(anchors[number], variables[number], *self._kept(number)) for number in numbers]
        targets = [self._since_sync, *(target for of_one in of_each for target in of_one if target is not None)]
        values = when(due, moved, [target.dtype for target in targets])
        assign(list(zip(targets, values, strict=True)), due)

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
        if self._settings["sends"] == "updates":
            self._anchors = [
                self._variable_for(variable, tuple(variable.shape), f"{name}_anchor", variable.dtype) for variable, name in named
            ]
            self._since_sync = self.add_variable((), keras.initializers.Constant(_EQUAL), dtype="int32", name="since_sync")

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

    def _variable_for(self, variable: Any, shape: Shape, name: str, dtype: Any = None) -> Any:
        """A variable of zeros beside another one, by default in the accumulation dtype."""
        dtype = dtype or str(accumulation_dtype(tf.as_dtype(variable.dtype).as_numpy_dtype))
        with self._strategy.extended.colocate_vars_with(native(variable)):
            return self.add_variable(shape, dtype=dtype, name=name.replace("/", "_"))

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
        """As the optimizer inside does, after a sync. Keras calls it at the end of `fit`."""
        self.sync()
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


def _check_settings(optimizer: Any, sends: str, recipe: str | None, chosen: LocalSettings) -> None:
    """Refuse what does not go together."""
    if sends not in ("gradients", "updates"):
        raise ConfigError(f"sends is 'gradients' or 'updates', got {sends!r}")
    memories = ("residual", "none") if sends == "gradients" else ("residual", "parameters", "none")
    if chosen.memory not in memories:
        raise ConfigError(f"memory is {' or '.join(map(repr, memories))} with sends={sends!r}, got {shown(chosen.memory)}")
    interval(chosen.every)
    if sends == "gradients":
        if recipe is not None or chosen.every != 1:
            raise ConfigError(f"a recipe and every={chosen.every} are for sends='updates'")
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigError("each replica would have a loss scale of its own: a LossScaleOptimizer goes with sends='gradients'")
    if getattr(optimizer, "use_ema", False):
        raise ConfigError("each replica would average weights of its own: use_ema goes with sends='gradients'")


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
    return gradient is not None and not _is_overwritten(variable)


def _is_overwritten(variable: Any) -> bool:
    """Whether the gradient of a variable is not one, but its next value."""
    return getattr(variable, "overwrite_with_gradient", False)


def _scaled(gradient: Any, factor: int) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def _constrained(variable: Any, value: Any) -> Any:
    """Return the value as the constraint of the variable wants it."""
    return value if variable.constraint is None else variable.constraint(value)
