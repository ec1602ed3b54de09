"""Where the means of dense steps go under DDP, so that such a step passes over memory as often as one of plain DDP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

import torch
import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class _Means:
    """A buffer for the mean of a bucket, and its views, one for each of the parameters of the bucket."""

    parameters: Sequence[torch.Tensor]
    buffer: torch.Tensor
    views: Sequence[torch.Tensor]

    @classmethod
    def of(cls, bucket: dist.GradBucket) -> _Means:  # type: ignore[name-defined]
        buffer = torch.empty_like(bucket.buffer())
        views = [buffer.as_strided(view.size(), view.stride(), view.storage_offset()) for view in bucket.gradients()]
        return cls(bucket.parameters(), buffer, views)

    def fits(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether a bucket of these parameters is the one that this was made for; DDP forms its buckets anew after the first step."""
        return len(parameters) == len(self.parameters) and all(map(is_, parameters, self.parameters))


class MeanBuffers:
    """A buffer for the means of each bucket, of which the gradients become views.

    Without a hook, DDP divides gradients by the number of ranks while it copies them into a bucket, and copies the sum back to them. A hook
    must divide in a pass of its own. It divides into another buffer; as the gradients are views of that one, DDP has nothing to copy back.
    """

    def __init__(self) -> None:
        self._means: dict[int, _Means] = {}

    def attach(self, bucket: dist.GradBucket) -> torch.Tensor | None:  # type: ignore[name-defined]
        """Return the buffer for the mean of a bucket, and let the gradients be views of it; None where that would save nothing.

        That is so where gradients are views of the bucket already (`gradient_as_bucket_view=True`), or sparse, or have another dtype than
        the bucket. In device memory, a pass is short beside an exchange.
        """
        buffer, parameters = bucket.buffer(), bucket.parameters()
        gradients = [parameter.grad for parameter in parameters]
        if buffer.layout != torch.strided or buffer.device.type != "cpu" or not _are_copied(gradients, buffer):
            return None
        means = self._means.get(bucket.index())
        if means is None or not means.fits(parameters) or means.buffer.dtype != buffer.dtype:
            means = self._means[bucket.index()] = _Means.of(bucket)
        for parameter, gradient, view in zip(parameters, gradients, means.views, strict=True):
            if gradient is not None:  # DDP leaves a parameter that no rank used without a gradient
                parameter.grad = view
        return means.buffer


def _are_copied(gradients: Sequence[torch.Tensor | None], buffer: torch.Tensor) -> bool:
    """Whether DDP copied these gradients into the buffer. All gradients of a DDP model are views of its buckets, or none is."""
    first = next((gradient for gradient in gradients if gradient is not None), None)
    return first is None or (
        first.dtype == buffer.dtype
        and not first.requires_grad
        and first.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
    )
