"""Local steps: every rank trains by itself, and after some steps all ranks synchronize and go on from the same anchor.

::

    parameters ─ train alone           ─ change since the last sync ─┐
                                                                     ├ Reducer: the mean of all changes, with error feedback
    parameters ─ the same on all ranks ─ applied to the anchor      ─┘

The change is written as a gradient is, ``anchor - parameters``, so that an optimizer can take a step with its mean.

The exchange may run beside the next local steps: `capture` takes the changes, `exchange` can be called from another thread, and when its
means are applied, `set_anchor_plus_` puts what this rank did since the capture on top of the new anchor. That is part of the next change.

A rank may keep what it did not send in its parameters, instead of beside them: `move_residuals_into_` after a sync. The parameters of the
ranks then differ by their residuals, which are part of the next change, and `move_residuals_out_of_` makes them equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, InputError, PeerError
from ..parameters import natural, shown
from .arrays import Array, arrays_of
from .frame import FrameTag
from .reducer import Bucket, ErrorFeedback, Reducer
from .residual import Gradient
from .stats import StepStats
from .transport import Transport, all_gather_array, close_unless_reported

_DIGEST = np.dtype("<u8")
_OTHER_START = (
    "training starts from equal parameters: set one seed, broadcast them from rank 0 before, or load one checkpoint, with the state of the "
    "local steps if it has one; after other local steps, call their sync() first"
)
_CHANGED_WITHOUT_STEPS = (
    "something else than the steps of the optimizer changed them since the last sync. Was another optimizer made? Local steps follow the "
    "one that they were given: close() them, and make new ones with the other"
)


@dataclass(frozen=True, eq=False)
class Capture:
    """The changes of `steps` local steps, and the values that the anchored tensors had after them."""

    bucket: Bucket
    steps: int
    values: Mapping[str, Array]


@dataclass
class LocalTraining:
    """The parameters of one rank between two syncs.

    `anchors` holds what the last sync made of every tensor, in the accumulation dtype, the same on all ranks. A tensor without an
    anchor counts from zero: all ranks get the mean of its values. `steps` counts the local steps since the last sync, `all_steps` those
    since the beginning, which ranks must agree on when they synchronize. Each of the first `warmup` steps ends with a sync. The first of
    the others comes after `first` steps, default `every`, and so does the next one after `restart`.

    >>> from deepreduce.step.policy import policy_of
    >>> from deepreduce.step.residual import ResidualMemory
    >>> from deepreduce.step.topology import AllGather
    >>> from deepreduce.step.transport import SingleRank
    >>> training = LocalTraining(Reducer(policy_of("topr:1/raw/raw", 0), AllGather()), ErrorFeedback(ResidualMemory(), None), every=2)
    >>> weight = np.float32([5, 5])
    >>> training.add_anchors({"w": weight})
    ['w']
    >>> for _ in range(4):
    ...     weight -= np.float32([3, 2])
    ...     if training.count_step():
    ...         means, _ = training.sync({"w": weight}, SingleRank())
    ...         training.apply({"w": weight}, means)
    ...     print(weight)
    [2. 3.]
    [-1.  5.]
    [-4.  3.]
    [-1. -3.]
    """

    reducer: Reducer
    memory: ErrorFeedback
    every: int = 1
    anchors: dict[str, Array] = field(default_factory=dict)
    steps: int = 0
    all_steps: int = 0
    syncs: int = 0
    warmup: int = 0
    first: int | None = None
    due_after: int = field(init=False)
    """How many steps after the last sync the next one is."""

    def __post_init__(self) -> None:
        self.every, self.warmup = interval(self.every), natural(self.warmup, "warmup")
        self.restart()
        if self.memory.own is not None and (self.memory.own.momentum or self.memory.own.clip is not None):
            raise ConfigError(f"momentum and clip of a memory are for gradients, not for changes of parameters; got {self.memory.own}")

    def add_anchors(self, tensors: Mapping[str, Array]) -> list[str]:
        """Copy tensors that have no anchor yet as their anchors; return their names."""
        new = [name for name in tensors if name not in self.anchors]
        for name in new:
            self._set_anchor(name, tensors[name])
        return new

    def count_step(self) -> bool:
        """Count a local step, and return whether the ranks synchronize after it."""
        self.steps += 1
        self.all_steps += 1
        if self.is_warming_up:
            return True
        if self.steps < self.due_after:
            return False
        self.due_after = self.every
        return True

    def restart(self) -> None:
        """Let the next sync come as the first one did."""
        self.due_after = self.every if self.first is None else self.first

    @property
    def is_warming_up(self) -> bool:
        """Whether the latest step is one of the first `warmup`."""
        return self.all_steps <= self.warmup

    def sync(self, tensors: Mapping[str, Array], transport: Transport) -> tuple[dict[str, Gradient], StepStats]:
        """Return the mean over all ranks of ``anchor - tensor``, the same everywhere, and what it cost. No tensor is changed yet.

        Raises `InputError` on all ranks where some rank has a NaN or an infinity.
        """
        means, cost = self.exchange(self.capture(tensors, with_values=False), transport)
        self.syncs += 1
        self.steps = 0
        return means, cost

    def capture(self, tensors: Mapping[str, Array], with_values: bool = True) -> Capture:
        """Return the changes since the last sync; `values` are copies, and empty unless they are asked for."""
        bucket = Bucket(list(tensors), [self._change(name, tensor) for name, tensor in tensors.items()], self.all_steps - 1)
        anchored = {name: tensor for name, tensor in tensors.items() if name in self.anchors} if with_values else {}
        return Capture(bucket, self.steps, {name: _accumulation_copy(tensor) for name, tensor in anchored.items()})

    def exchange(self, capture: Capture, transport: Transport) -> tuple[dict[str, Gradient], StepStats]:
        """Return what `sync` does for changes that were captured. It changes the residuals, and nothing else of this object."""
        bucket = capture.bucket
        try:
            means, cost = self.reducer.reduce(bucket, self.memory, transport)
        except BaseException as error:
            close_unless_reported(transport, error)
            raise
        for name, mean in zip(bucket.names, means, strict=True):
            if arrays_of(mean).first_nonfinite(mean) is not None:
                raise not_finite(name, capture.steps)
        cost.count_dense_steps(capture.steps, self.anchors)
        return dict(zip(bucket.names, means, strict=True)), cost

    def apply(self, tensors: Mapping[str, Array], means: Mapping[str, Gradient]) -> None:
        """Subtract the mean changes from the anchors, and write these over the tensors, in place."""
        for name, mean in means.items():
            arrays, tensor = arrays_of(tensors[name]), tensors[name]
            moved = arrays.add_scaled(self._anchor_or_zeros(name, tensor), [(mean, -1.0)])
            if name in self.anchors:
                self.anchors[name] = moved
            arrays.assign_(tensor, moved)

    def move_residuals_into_(self, tensors: Mapping[str, Array]) -> None:
        """Subtract the residuals of tensors from them, in place; what a half precision cannot hold of its residual stays one."""
        if self.memory.own is None or not self.memory.own.residuals:
            return
        for name, tensor in tensors.items():
            arrays, residual = arrays_of(tensor), self.memory.own.take(name, tensor)
            if residual is None:
                continue
            moved = arrays.add_scaled(tensor, [(residual, -1.0)])
            arrays.assign_(tensor, moved)
            if arrays.dtype(tensor) != arrays.dtype(moved):
                self.memory.own.add(name, arrays.add_scaled(tensor, [(moved, -1.0)]))

    def move_residuals_out_of_(self, tensors: Mapping[str, Array]) -> None:
        """Write the anchors over the tensors that have one, in place; the difference goes to the residuals."""
        for name, tensor in tensors.items():
            if name not in self.anchors:
                continue
            if self.memory.own is not None:
                self.memory.own.add(name, self._change(name, tensor))
            self.reset_to_anchor_(name, tensor)

    def reset_to_anchor_(self, name: str, tensor: Array) -> None:
        """Write the anchor over a tensor, in place."""
        arrays_of(tensor).assign_(tensor, self.anchors[name])

    def set_anchors(self, tensors: Mapping[str, Array]) -> None:
        """Copy these tensors as their new anchors."""
        for name, tensor in tensors.items():
            self._set_anchor(name, tensor)

    def local_change(self, values: Mapping[str, Array], tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Return tensor minus value, for each value."""
        return {name: arrays_of(tensors[name]).add_scaled(tensors[name], [(value, -1.0)]) for name, value in values.items()}

    def set_anchor_plus_(self, tensors: Mapping[str, Array], moves: Mapping[str, Array]) -> None:
        """Write the anchor plus a move over each tensor, in place."""
        for name, move in moves.items():
            arrays = arrays_of(tensors[name])
            arrays.assign_(tensors[name], arrays.add_scaled(self.anchors[name], [(move, 1.0)]))

    def _set_anchor(self, name: str, tensor: Array) -> None:
        self.anchors[name] = _accumulation_copy(tensor)

    def _change(self, name: str, tensor: Array) -> Gradient:
        arrays = arrays_of(tensor)
        start = arrays.cast_saturating(self._anchor_or_zeros(name, tensor), arrays.dtype(tensor))  # as half precisions have rounded it
        return arrays.add_scaled(start, [(arrays.to_accumulation_dtype(tensor), -1.0)])

    def _anchor_or_zeros(self, name: str, tensor: Array) -> Array:
        return self.anchors[name] if name in self.anchors else arrays_of(tensor).zeros(tensor)


def _accumulation_copy(tensor: Array) -> Array:
    arrays = arrays_of(tensor)
    return arrays.copy(arrays.to_accumulation_dtype(tensor))


def interval(every: object) -> int:
    """Return a number of steps between two syncs, checked."""
    steps = natural(every, "every")
    if steps < 1:
        raise ConfigError(f"every is a number of steps, at least 1; got {shown(every)}")
    return steps


def not_finite(name: str, steps: int) -> InputError:
    """Return the error for a mean change that has a NaN or an infinity."""
    return InputError(f"{name} is not finite on some rank after {steps} local steps: training diverged there")


def digest(array: NDArray[Any]) -> bytes:
    """Return 8 bytes by which an array is told from others.

    >>> digest(np.zeros(3)) == digest(np.zeros(3)), digest(np.zeros(3)) == digest(np.ones(3))
    (True, False)
    """
    return blake2b(array.tobytes(), digest_size=_DIGEST.itemsize).digest()


def are_equal(content: bytes, transport: Transport) -> bool:
    """Return whether all ranks have the same content, the same answer on all.

    >>> from deepreduce.step.transport import SingleRank
    >>> are_equal(b"gradients", SingleRank())
    True
    """
    own = np.frombuffer(digest(np.frombuffer(content, np.uint8)), _DIGEST)
    rows = all_gather_array(own, transport, FrameTag("a digest", 0, 0, _DIGEST.itemsize))
    return bool((rows == rows[0]).all())


def check_equal(names: Sequence[str], digests: Iterable[bytes], transport: Transport, step: int, synced: bool = False) -> None:
    """Raise `PeerError` on all ranks unless these tensors have the same digests everywhere: initial parameters, or those after a sync.

    >>> from deepreduce.step.transport import SingleRank
    >>> check_equal(["weight"], [digest(np.ones(3))], SingleRank(), step=0)
    """
    tag = FrameTag("the digests of the parameters", len(names), step, _DIGEST.itemsize * len(names))
    rows = all_gather_array(np.frombuffer(b"".join(digests), _DIGEST), transport, tag)
    for rank, row in enumerate(rows):
        different = np.flatnonzero(row != rows[0])
        if different.size:
            other = f"rank {rank} {'has' if synced else 'starts with'} other values of {names[different[0]]} than rank 0"
            why = _CHANGED_WITHOUT_STEPS if synced else _OTHER_START
            raise PeerError(f"{other} (and so for {different.size} of {len(names)}): {why}")
