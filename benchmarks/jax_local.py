"""How well Adam trains a small transformer in JAX: dense gradients, compressed updates of every step, and local steps.

python benchmarks/jax_local.py --steps 200 --rates 0.004 --seeds 3

Two processes of jax.distributed, each with 4 windows of 64 bytes per step, of the sources of Python's standard library. Prints the
validation loss of every run, and how many times fewer bytes its messages had than dense gradients.
"""

import argparse
import socket
import subprocess
import sys
from itertools import islice, product

import jax
import jax.numpy as jnp
import numpy as np
import optax

from deepreduce.jax import compressed_mean, local_steps
from deepreduce.lab.train import text

WORKERS, WIDTH, HEADS, BLOCKS, BATCH = 2, 96, 4, 2, 4
SPEC = "topr:0.025/rice/lloyd:1"
METHODS = ("dense", "updates", "every step", "adam recipe")


def transformations(method, adam):
    """The whole optimizer of a method, and the part of it that exchanges."""
    if method in ("dense", "updates"):
        mean = compressed_mean("dense" if method == "dense" else SPEC, small_tensor_numel=64)
        return optax.chain(*((mean, adam) if method == "dense" else (adam, mean))), mean
    options = {"recipe": "adam"} if method == "adam recipe" else {"spec": SPEC, "memory": "parameters"}
    local = local_steps(adam, small_tensor_numel=64, **options)
    return local, local


def initial(seed):
    draw = np.random.default_rng(seed)

    def matrix(rows, columns, scale=1.0):
        return jnp.asarray(draw.normal(0, scale * rows**-0.5, (rows, columns)), jnp.float32)

    block = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    blocks = [{name: matrix(*shape) for name, shape in block.items()} | {"norms": jnp.ones((2, WIDTH))} for _ in range(BLOCKS)]
    positions = matrix(text.CONTEXT, WIDTH, 0.1 * text.CONTEXT**0.5)
    return {"bytes": matrix(256, WIDTH, 1.6), "positions": positions, "blocks": blocks, "norm": jnp.ones(WIDTH), "head": matrix(WIDTH, 256)}


def normalized(values, scale):
    return scale * values * jax.lax.rsqrt((values**2).mean(-1, keepdims=True) + 1e-5)


def loss(params, inputs, targets):
    values = params["bytes"][inputs] + params["positions"]
    for block in params["blocks"]:
        parts = jnp.split(normalized(values, block["norms"][0]) @ block["qkv"], 3, axis=-1)
        heads = [part.reshape(*part.shape[:2], HEADS, -1) for part in parts]
        mixed = jax.nn.dot_product_attention(*heads, is_causal=True)
        values = values + mixed.reshape(values.shape) @ block["out"]
        values = values + jax.nn.gelu(normalized(values, block["norms"][1]) @ block["up"]) @ block["down"]
    scores = normalized(values, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()


def run(data, method, rate, seed, steps):
    """The validation loss of one run, and how many times fewer bytes its messages had than dense ones."""
    params = initial(seed)
    adam = optax.adamw(optax.warmup_cosine_decay_schedule(0, rate, steps // 10, steps), weight_decay=0.1)
    optimizer, sender = transformations(method, adam)
    state = optimizer.init(params)

    def step(params, state, batch):
        updates, state = optimizer.update(gradients_of(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    step = step if method == "dense" else jax.jit(step)  # large messages go by a collective, which works outside jit only
    for batch in islice(data.train_batches(jax.process_index(), WORKERS, BATCH, seed), steps):
        params, state = jax.block_until_ready(step(params, state, batch))
    if method in ("every step", "adam recipe"):
        params, state = optimizer.sync(params, state)
    losses = [float(loss_of(params, *batch)) for batch in data.test_batches(0, 1)]
    dense_bytes = 4 * steps * sum(leaf.size for leaf in jax.tree.leaves(params))
    return np.mean(losses), dense_bytes / sender.stats().message_bytes


loss_of, gradients_of = jax.jit(loss), jax.jit(jax.grad(loss))


def train(options):
    """All runs, in one of the processes."""
    jax.distributed.initialize(options.coordinator, WORKERS, options.process)
    data = text.read(None, 0)
    for seed, rate, method in product(range(options.seeds), options.rates, options.methods):
        quality, ratio = run(data, method, rate, seed, options.steps)
        if jax.process_index() == 0:
            print(f"seed {seed}, rate {rate}, {method}: loss {quality:.3f}, {ratio:.0f} times fewer bytes", flush=True)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--rates", type=float, nargs="+", default=[0.004])
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    arguments.add_argument("--coordinator", help=argparse.SUPPRESS)
    arguments.add_argument("--process", type=int, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.coordinator:
        return train(options)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, *sys.argv, "--coordinator", address, "--process"]
    children = [subprocess.Popen([*command, str(process)]) for process in range(WORKERS)]
    sys.exit(max(child.wait() for child in children))


if __name__ == "__main__":
    main()
