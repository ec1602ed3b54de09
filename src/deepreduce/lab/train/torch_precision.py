"""Training in 16 bits: weights and gradients are halves, and so is what travels; the optimizer works on copies in 32 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_LOSS_SCALE = {"fp32": 1.0, "fp16": 1024.0, "bf16": 1.0}  # small gradients would vanish below the smallest half


class Optimizer:
    """An optimizer of the parameters of a model in any precision. `loss_scale` is what losses are to be multiplied by.

    Gradients are clipped to the norm `clip`, if there is one.
    """

    def __init__(
        self, model: nn.Module, precision: str, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], clip: float | None = None
    ) -> None:
        self._parameters = list(model.parameters())
        self._copies = self._parameters if precision == "fp32" else [nn.Parameter(each.detach().float()) for each in self._parameters]
        self.inner, self._clip = make(self._copies), clip
        self.loss_scale = _LOSS_SCALE[precision]

    def zero_grad(self) -> None:
        """Forget the gradients of the model."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the model by its gradients. A step whose gradients are not finite is left out, as loss scaling does."""
        for group in self.inner.param_groups:
            group["lr"] = learning_rate
        if self._copies is self._parameters:
            self._step()
            return
        gradients = [parameter.grad for parameter in self._parameters]
        if not all(gradient is None or torch.isfinite(gradient).all() for gradient in gradients):
            return
        for copy, gradient in zip(self._copies, gradients, strict=True):
            copy.grad = None if gradient is None else gradient.float().div_(self.loss_scale)
        self._step()
        for parameter, copy in zip(self._parameters, self._copies, strict=True):
            parameter.copy_(copy)

    def _step(self) -> None:
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._copies, self._clip)
        self.inner.step()
