"""Where the means of dense steps go under DDP, so that such a step passes over memory as often as one of plain DDP."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class Means:
    """A buffer for the mean of a bucket, and a tensor on it for each of the parameters of the bucket."""

    buffer: torch.Tensor
    gradients: Sequence[torch.Tensor]
    _parameters: Sequence[weakref.ref[torch.Tensor]]

    @classmethod
    def of(cls, bucket: dist.GradBucket) -> Means:  # type: ignore[name-defined]
        """Return new means for a bucket."""
        buffer = torch.empty_like(bucket.buffer())
        views = [buffer.as_strided(view.size(), view.stride(), view.storage_offset()) for view in bucket.gradients()]
        return cls(buffer, [view.data for view in views], [weakref.ref(parameter) for parameter in bucket.parameters()])

    @cached_property
    def are_laid_out(self) -> bool:
        """Whether the parameters have the dtype and the strides of these gradients, as those that DDP writes have."""
        pairs = [(known(), gradient) for known, gradient in zip(self._parameters, self.gradients, strict=True)]
        return all(each is not None and each.dtype == gradient.dtype and each.stride() == gradient.stride() for each, gradient in pairs)

    def fit(self, parameters: Sequence[torch.Tensor], buffer: torch.Tensor) -> bool:
        """Whether they were made for this bucket: DDP forms its buckets anew after the first step."""
        same = self.buffer.shape == buffer.shape and self.buffer.dtype == buffer.dtype and len(parameters) == len(self._parameters)
        return same and all(known() is parameter for known, parameter in zip(self._parameters, parameters, strict=True))

    def become_gradients(self) -> None:
        """Let the parameters have these gradients instead of their own."""
        for known, gradient in zip(self._parameters, self.gradients, strict=True):
            parameter = known()
            if parameter is not None:
                parameter.grad = gradient


class MeanBuffers:
    """The means of each bucket, which become the gradients.

    Without a hook, DDP divides gradients by the number of ranks while it copies them into a bucket, and copies the sum back to them. A hook
    must divide in a pass of its own. It divides into another buffer; as the gradients then lie in that one, DDP has nothing to copy back.
    (DDP looks at the gradients again when the future of a hook is done, and a copy of a tensor to itself does nothing: seen in torch 2.13.)
    """

    def __init__(self) -> None:
        self._means: dict[int, Means] = {}

    def of(self, bucket: dist.GradBucket) -> Means | None:  # type: ignore[name-defined]
        """Return the means of a bucket; None where its gradients must stay where they are, or would gain nothing."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if buffer.layout != torch.strided or buffer.device.type != "cpu" or not _are_new([each.grad for each in parameters], buffer):
            return None
        means = self._means.get(bucket.index())
        if means is None or not means.fit(parameters, buffer):
            means = self._means[bucket.index()] = Means.of(bucket)
        return means if means.are_laid_out else None

    def clear(self) -> None:
        """Free the buffers that no gradient lies in."""
        self._means.clear()


def _are_new(gradients: Sequence[torch.Tensor | None], buffer: torch.Tensor) -> bool:
    """Whether this backward pass made all the gradients, as tensors of their own that nobody changed since: nobody else writes to them.

    Version 0 says so: adding to a gradient that is there already counts up, as zeroing does. Outside of a backward pass, DDP calls hooks
    for a rank that has no more data (`join`), whose gradients stay as they are. With `gradient_as_bucket_view=True`, all are in the bucket.
    """
    if not _in_backward_pass() or any(gradient is None or gradient._version for gradient in gradients):
        return False
    first = gradients[0]
    return first is not None and not first.requires_grad and first.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()


def _in_backward_pass() -> bool:
    """Whether autograd is in the middle of a backward pass on this thread. Seen in torch 2.13; False where torch does not tell."""
    current = getattr(torch._C, "_current_graph_task_id", None)
    return current is not None and current() != -1
