"""Where the means of dense steps go under DDP, so that such a step passes over memory as often as one of plain DDP."""

from __future__ import annotations

import torch
import torch.distributed as dist


class MeanBuffers:
    """A buffer for the means of each bucket, of which the gradients become views.

    Without a hook, DDP divides gradients by the number of ranks while it copies them into a bucket, and copies the sum back to them. A hook
    must divide in a pass of its own. It divides into another buffer; as the gradients are views of that one, DDP has nothing to copy back.
    """

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def attach(self, bucket: dist.GradBucket) -> torch.Tensor | None:  # type: ignore[name-defined]
        """Return the buffer for the mean of a bucket, and let the gradients be views of it; None where DDP has nothing to copy anyway.

        That is so where gradients are views of the bucket already (`gradient_as_bucket_view=True`), or sparse. In device memory, a pass is
        short beside an exchange.
        """
        buffer, parameters = bucket.buffer(), bucket.parameters()
        held = [parameter.grad for parameter in parameters]
        if buffer.layout != torch.strided or buffer.device.type != "cpu" or any(not _is_apart(grad, buffer) for grad in held):
            return None
        kept = self._kept.get(bucket.index())
        if kept is None or kept.shape != buffer.shape or kept.dtype != buffer.dtype:
            kept = self._kept[bucket.index()] = torch.empty_like(buffer)
        for parameter, view, grad in zip(parameters, bucket.gradients(), held, strict=True):
            if grad is not None:  # DDP gives a parameter that no rank used no gradient
                parameter.grad = kept.as_strided(view.size(), view.stride(), view.storage_offset())
        return kept


def _is_apart(grad: torch.Tensor | None, buffer: torch.Tensor) -> bool:
    """Whether a gradient is none, or a plain one of its own that was copied into the buffer."""
    return grad is None or (
        grad.layout == torch.strided
        and grad.dtype == buffer.dtype
        and not grad.requires_grad
        and grad.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr()
    )
