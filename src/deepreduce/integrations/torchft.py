"""torchft: DiLoCo between replicas that come and go, with compressed pseudo-gradients."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]
from torch.futures import Future
from torchft.manager import Manager
from torchft.process_group import ProcessGroup

from ..errors import ConfigError, PeerError
from ..parameters import natural
from ..step.frame import Buffer, FrameTag
from ..step.policy import Spec, policy_of
from ..step.reducer import Bucket, ErrorFeedback, Reducer
from ..step.residual import ResidualMemory
from ..step.stats import Stats
from ..step.topology import AllGather
from ..step.transport import Padded
from ..torch.convert import mapped_to_numpy, mapped_to_torch
from ..torch.views import view, write_gradient


class CompressedManager:
    """A manager for torchft's `DiLoCo` that compresses the pseudo-gradients of a synchronization into one message.

    ::

        group = ProcessGroupGloo(timeout=timedelta(seconds=30))
        manager = CompressedManager(Manager(pg=group, use_async_quorum=False, ...), group, "topr:0.01/rice/qsgd")
        with DiLoCo(manager, [model], inner, outer, sync_every=20): ...

    What was not sent is added to the next pseudo-gradient; where `should_commit()` is False it is as it was before. With several model
    fragments, `fragments` is their number. Everything else is the manager's own.
    """

    def __init__(
        self,
        manager: Manager,
        process_group: ProcessGroup,
        spec: Spec,
        *,
        fragments: int = 1,
        small_tensor_numel: int = 1024,
        seed: int = 0,
        history: int = 100,
    ) -> None:
        if fragments < 1:
            raise ConfigError(f"a model has at least one fragment, got {fragments}")
        self.manager, self.process_group, self.fragments = manager, process_group, fragments
        self._own = ResidualMemory()
        self.memory = ErrorFeedback(self._own, None)
        self._policy, self._seed, self._small = policy_of(spec, small_tensor_numel), natural(seed, "a seed"), small_tensor_numel
        self._stats = Stats(history)
        self._pending: list[_PendingTensor] = []
        self._committed: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def stats(self) -> Stats:
        """Return the bytes and seconds of the latest synchronizations."""
        return self._stats

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the manager, and what was not sent yet by this replica."""
        kept: dict[str, Any] = mapped_to_torch(self._own.state_dict())
        return {"manager": self.manager.state_dict(), "deepreduce": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint of this replica."""
        self._own.load_state_dict(mapped_to_numpy(state["deepreduce"]))
        self._committed = dict(self._own.residuals)
        self.manager.load_state_dict(state["manager"])

    # What DiLoCo calls

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool | None = None, **options: Any) -> _PendingTensor:
        """Replace a pseudo-gradient by its mean over the replicas, when it is waited for, with all others since the last time."""
        if should_quantize is None or options:
            raise ConfigError(
                "CompressedManager is for DiLoCo, whose pseudo-gradients can be compressed; LocalSGD averages parameters, which cannot "
                "(DiLoCo with torch.optim.SGD(lr=1) as its outer optimizer does the same)"
            )
        if should_quantize:
            raise ConfigError("should_quantize=True would round what the spec selects: leave it False")
        self._pending.append(_PendingTensor(tensor, self._exchange))
        return self._pending[-1]

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Ask all replicas whether the synchronization went well; if not, restore the residuals from before it."""
        self._exchange()
        committed = bool(self.manager.should_commit(timeout))
        if not committed:
            self._own.residuals = self._committed
        self._committed = dict(self._own.residuals)
        return committed

    # The exchange

    def _exchange(self) -> None:
        """Reduce all that is pending. An error is the manager's to handle: the synchronization will not be committed."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        if self.manager.errored() is None:
            try:
                self._reduce([work.tensor for work in pending])
            except Exception as error:
                self.manager.report_error(error)
        for work in pending:
            work.complete()

    @torch.no_grad()
    def _reduce(self, tensors: list[torch.Tensor]) -> None:
        self.manager.wait_quorum()
        if not self.manager.is_participating():
            for tensor in tensors:
                tensor.zero_()
        step = self.manager.current_step()
        names = [f"fragment {step % self.fragments} tensor {index}" for index in range(len(tensors))]
        views = [view(name, tensor) for name, tensor in zip(names, tensors, strict=True)]
        reducer = Reducer(self._policy, AllGather(), self._seed, small_numel=self._small, average=False)
        sums, cost = reducer.reduce(Bucket(names, views, step), self.memory, _Quorum(self.process_group))
        for tensor, total in zip(tensors, sums, strict=True):
            write_gradient(tensor, total)
            tensor /= self.manager.num_participants()
        self._stats.add(cost)


class _PendingTensor:
    """The work of a tensor that is not reduced yet: waiting for it reduces all that is pending."""

    def __init__(self, tensor: torch.Tensor, exchange: Callable[[], None]) -> None:
        self.tensor, self._exchange = tensor, exchange
        self._future: Future[torch.Tensor] = Future()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the tensor is reduced."""
        self._exchange()
        self._future.wait()
        return True

    def get_future(self) -> Future[torch.Tensor]:
        """Return a future of the reduced tensor."""
        return self._future

    def complete(self) -> None:
        """Give the tensor to those who wait for it."""
        self._future.set_result(self.tensor)


class _Quorum(Padded):
    """The replicas of a quorum, for one synchronization: the next may have others, which do not know the capacity of this one's buffers."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group, self.size = group, group.size()
        self.rank = self._find_rank()

    def _find_rank(self) -> int:
        """Return the rank of this replica in the quorum: the groups of torchft know their size, but not all of them their rank."""
        token = np.frombuffer(os.urandom(16), np.uint8).copy()
        found = [rank for rank, each in enumerate(self._gather(token)) if np.array_equal(each, token)]
        if len(found) != 1:
            raise PeerError(f"{len(found)} of the {self.size} replicas of this quorum have the token of this one")
        return found[0]

    def _all_gather(self, buffer: Buffer, tag: FrameTag) -> list[Buffer]:
        return self._gather(buffer)

    def _gather(self, buffer: Buffer) -> list[Buffer]:
        gathered = [torch.empty(buffer.size, dtype=torch.uint8) for _ in range(self.size)]
        self.group.allgather([gathered], [torch.from_numpy(buffer)], AllgatherOptions()).wait()
        self.sent_bytes += (self.size - 1) * buffer.size
        return [np.asarray(each.numpy()) for each in gathered]
