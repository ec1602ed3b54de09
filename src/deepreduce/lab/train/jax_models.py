"""The models of the digits task in JAX: a pytree of weights, and a function of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import ConfigError

Params = list[dict[str, jax.Array]]
Apply = Callable[[Params, jax.Array], jax.Array]


def build(name: str, seed: int) -> tuple[Params, Apply]:
    """The initial weights of this seed, and the function from weights and images to the scores of the classes."""
    if name not in _MODELS:
        raise ConfigError(f"with jax there are the models {', '.join(_MODELS)}, got {name!r}")
    shapes, apply = _MODELS[name]
    draw = np.random.default_rng(seed)
    return [_layer(draw, shape) for shape in shapes], apply


def parameter_count(params: Any) -> int:
    """Elements of all weights.

    >>> parameter_count(build("mlp", seed=0)[0]), parameter_count(build("cnn", seed=0)[0])
    (1126410, 151306)
    """
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _layer(draw: np.random.Generator, shape: Sequence[int]) -> dict[str, jax.Array]:
    """Weights whose first dimension is the output, drawn as PyTorch draws them."""
    bound = prod(shape[1:]) ** -0.5
    return {"weight": _uniform(draw, bound, shape), "bias": _uniform(draw, bound, shape[:1])}


def _uniform(draw: np.random.Generator, bound: float, shape: Sequence[int]) -> jax.Array:
    return jnp.asarray(draw.uniform(-bound, bound, shape), jnp.float32)


def _mlp(params: Params, images: jax.Array) -> jax.Array:
    return _dense(params, images.reshape(len(images), -1))


def _cnn(params: Params, images: jax.Array) -> jax.Array:
    features = images
    for layer in params[:2]:
        convolved = jax.lax.conv_general_dilated(features, layer["weight"], (1, 1), "SAME")
        features = jax.nn.relu(convolved + layer["bias"][:, None, None])
    pooled = jax.lax.reduce_window(features, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    return _dense(params[2:], pooled.reshape(len(pooled), -1))


def _dense(params: Params, features: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        features = jax.nn.relu(features @ layer["weight"].T + layer["bias"])
    return features @ params[-1]["weight"].T + params[-1]["bias"]


_MODELS: dict[str, tuple[list[tuple[int, ...]], Apply]] = {
    "mlp": ([(1024, 64), (1024, 1024), (10, 1024)], _mlp),
    "cnn": ([(32, 1, 3, 3), (64, 32, 3, 3), (128, 1024), (10, 128)], _cnn),
}
