"""The models of the digits task in Keras."""

from __future__ import annotations

from typing import Any

import keras

from ...errors import ConfigError


def mlp(hidden: int = 1024) -> list[Any]:
    """Two wide hidden layers for 8x8 images: 1,126,410 parameters, so that there is something to compress."""
    wide = [keras.layers.Dense(hidden, activation="relu") for _ in range(2)]
    return [keras.layers.Flatten(), *wide, keras.layers.Dense(10)]


def cnn() -> list[Any]:
    """Two convolutions and a layer for 8x8 images: 151,306 parameters."""
    convolutions = [keras.layers.Conv2D(width, 3, padding="same", activation="relu") for width in (32, 64)]
    head = [keras.layers.MaxPooling2D(), keras.layers.Flatten(), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
    return [keras.layers.Permute((2, 3, 1)), *convolutions, *head]


_LAYERS = {"mlp": mlp, "cnn": cnn}


def build(name: str, seed: int) -> Any:
    """The model of this name with the initial weights of this seed.

    >>> build("mlp", seed=0).count_params(), build("cnn", seed=0).count_params()
    (1126410, 151306)
    """
    if name not in _LAYERS:
        raise ConfigError(f"with tensorflow there are the models {', '.join(_LAYERS)}, got {name!r}")
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((1, 8, 8)), *_LAYERS[name]()], name=name)
