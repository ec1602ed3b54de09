"""The same gradients, spec and seed make the same bytes in every framework, and each decodes what the others wrote."""

from importlib.util import find_spec
from itertools import combinations

import ml_dtypes
import numpy as np
import pytest

import deepreduce as dr
from deepreduce.steps import Seed

FRAMEWORKS = ["torch", "tensorflow", "jax"]
SPECS = ["topr:0.01/rice/qsgd", "topr:0.05/bloom:p2/fitpoly", "randomr:0.1/seeded/fp16", "none/all/raw"]
STEP, RANK, SIZE, SMALL = 7, 1, 2, 32


def gradients():
    draw = np.random.default_rng(0).standard_normal
    return {
        "kernel": draw((40, 50)).astype(np.float32),
        "bias": draw(20).astype(np.float32),
        "half": draw(300).astype(np.float16),
        "brain": draw((30, 4)).astype(ml_dtypes.bfloat16),
        "unused": np.zeros(100, np.float32),
        "overflowed": np.where(np.arange(200) == 150, np.inf, draw(200)).astype(np.float32),
    }


def policy_of(spec):
    return dr.BySize(SMALL, small=dr.parse("dense"), large=dr.parse(spec))


class Torch:
    """The adapter as its hook uses it."""

    def __init__(self, spec):
        from deepreduce.torch import messages
        from deepreduce.torch.convert import to_torch
        from deepreduce.torch.units import Unit, as_source

        tensors = {name: to_torch(array) for name, array in gradients().items()}
        codecs = [policy_of(spec).choose(name, as_source(tensor)) for name, tensor in tensors.items()]
        self._units = [Unit(name, number, tensors[name], codecs[number]) for number, name in enumerate(tensors)]
        self._messages, self._seed = messages, Seed(STEP, RANK, SIZE)

    def encode(self):
        return self._messages.encode(self._units, self._seed).blob

    def decode(self, blob):
        return self._messages.decode(np.frombuffer(blob, np.uint8), self._units, sender=RANK)


class TensorFlow:
    """The adapter as its optimizer uses it, in a graph."""

    def __init__(self, spec):
        import tensorflow as tf

        from deepreduce.tensorflow import exchange, messages

        self._tf, self._messages, self._on_host = tf, messages, exchange._on_host
        self._tensors = [tf.constant(array) for array in gradients().values()]
        variables = [tf.Variable(tensor, name=name) for name, tensor in zip(gradients(), self._tensors, strict=True)]
        self._slots = [exchange.slot_of(self._tensors[number], variable, number, False) for number, variable in enumerate(variables)]
        self._messenger = messages.Messenger(policy_of(spec), seed=0, history=1)

    def encode(self):
        def pack(*inputs):
            return self._messenger.pack(self._slots, SIZE, *inputs)

        (words,) = self._tf.function(lambda: self._on_host(pack, [STEP, RANK, *self._tensors], [self._tf.int32]))()
        (blob,) = self._messages.from_words(words.numpy())
        return bytes(blob)

    def decode(self, blob):
        (received,) = self._messages.from_words(self._messages.to_words(blob))
        return self._messages.decode(received, self._slots, sender=RANK)


class Jax:
    """The adapter as its transformation uses it."""

    def __init__(self, spec):
        import jax.numpy as jnp

        from deepreduce.jax import messages

        self._names = list(gradients())
        self._arrays = [np.asarray(jnp.asarray(array)) for array in gradients().values()]
        self._messages, self._policy = messages, policy_of(spec)

    def encode(self):
        return self._messages.encode(self._names, self._arrays, self._policy, Seed(STEP, RANK, SIZE))

    def decode(self, blob):
        return self._messages.decode(blob, self._names, self._arrays, sender=RANK)


def adapter(framework, spec):
    if find_spec(framework) is None or find_spec(f"deepreduce.{framework}") is None:
        pytest.skip(f"{framework} is not installed")
    return {"torch": Torch, "tensorflow": TensorFlow, "jax": Jax}[framework](spec)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("one", "other"), list(combinations(FRAMEWORKS, 2)))
def test_same_bytes_and_each_decodes_the_other(one, other, spec):
    first, second = adapter(one, spec), adapter(other, spec)
    blob = first.encode()
    assert second.encode() == blob
    expected = dr.decode_many_sparse(blob)
    for decoded in (first.decode(blob), second.decode(blob)):
        for tensor, reference in zip(decoded, expected.values(), strict=True):
            np.testing.assert_array_equal(tensor.indices, reference.indices)
            assert tensor.values.tobytes() == reference.values.tobytes()
            assert tensor.shape == reference.shape
