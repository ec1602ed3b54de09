"""Data-parallel training in JAX, all of a step inside `jit`: compressed gradients with SGD, or local steps with Adam (`--recipe adam`).

python examples/jax_optax.py --coordinator 127.0.0.1:4321 --processes 2 --process 0 &
python examples/jax_optax.py --coordinator 127.0.0.1:4321 --processes 2 --process 1
"""

import argparse

import jax
import jax.numpy as jnp
import optax

from deepreduce.jax import compressed_mean, local_steps


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--spec", default="topr:0.01/rice/qsgd")
    arguments.add_argument("--recipe", choices=["adam"], help="local steps with Adam, with the settings of this recipe")
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--coordinator", help="address of process 0; without it, there is one process")
    arguments.add_argument("--processes", type=int, default=1)
    arguments.add_argument("--process", type=int, default=0)
    options = arguments.parse_args()
    if options.coordinator:
        jax.distributed.initialize(options.coordinator, options.processes, options.process)

    if options.recipe:
        sender = optimizer = local_steps(optax.adam(1e-3), recipe=options.recipe)
    else:
        # The one link of the chain: what comes after it sees the mean over all processes.
        sender = compressed_mean(options.spec)
        optimizer = optax.chain(sender, optax.sgd(0.1, momentum=0.9))

    first, second = jax.random.split(jax.random.key(0))
    params = {"first": jax.random.normal(first, (64, 512)) / 8, "second": jax.random.normal(second, (512, 10)) / 23, "bias": jnp.zeros(10)}
    state = optimizer.init(params)

    def loss(params, inputs, targets):
        scores = jax.nn.relu(inputs @ params["first"]) @ params["second"] + params["bias"]
        return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()

    @jax.jit
    def train(params, state, inputs, targets):
        error, gradients = jax.value_and_grad(loss)(params, inputs, targets)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, error

    data = jax.random.key(1 + jax.process_index())
    for step in range(options.steps):
        data, now = jax.random.split(data)
        inputs = jax.random.normal(now, (32, 64))
        params, state, error = train(params, state, inputs, inputs[:, :10].argmax(1))
        if jax.process_index() == 0 and step % 20 == 0:
            print(f"step {step:3}: loss {float(error):.3f}")

    if options.recipe:
        params, state = optimizer.sync(params, state)  # the same parameters in all processes
    jax.effects_barrier()
    stats = sender.stats()
    print(f"process {jax.process_index()}: {stats.sent_bytes:,} bytes sent, messages {stats.last.ratio:.0f} times smaller than dense ones")


if __name__ == "__main__":
    main()
