"""What the processes of the tests of local steps do. Every process sees other data."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from deepreduce.jax import local_steps

from .tasks import batch, digest, gradient, loss, weights


def stepper(optimizer, jitted):
    """One step of training: the whole of it inside `jit`, or only the gradient."""

    def step(params, state, inputs, targets):
        updates, state = optimizer.update(gradient(params, inputs, targets), state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1)) if jitted else step


def run(rank, step, first, last, params, state):
    for number in range(first, last):
        params, state = step(params, state, *batch(rank, number))
    return params, state


def train(rank, steps, jitted, *arguments, **options):
    """Digests of anchors, parameters before and after a sync, and residuals; the loss; and what was counted."""
    optimizer = local_steps(optax.adam(3e-3), *arguments, **options)
    step, params = stepper(optimizer, jitted), weights()
    params, state = run(rank, step, 0, steps, params, optimizer.init(params))
    anchors, own = digest(state.anchors), digest(params)
    params, state = optimizer.sync(params, state)
    synced = digest(params), digest(state.anchors)
    exact = all(bool((one == other).all()) for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(state.anchors), strict=True))
    params, state = run(rank, step, steps, steps + 3, params, state)  # what `sync` returned can be donated
    params, state = optimizer.sync(params, state)
    losses = [float(loss(params, *batch(rank, number))) for number in range(1000, 1020)]
    stats = optimizer.stats()
    return anchors, own, synced, exact, float(np.mean(losses)), (int(state.mean.step), len(stats.steps), stats.last.ratio)


def dense_every_step(rank, jitted, steps):
    """The parameters after local steps that average after each of them, and those that this process would step to from there."""
    optimizer, plain, params = local_steps(optax.adam(3e-3), "dense"), optax.adam(3e-3), weights()
    step, plain_step = stepper(optimizer, jitted), stepper(plain, False)
    state, plain_state, seen = optimizer.init(params), plain.init(params), []
    for number in range(steps):
        stepped, plain_state = plain_step(params, plain_state, *batch(rank, number))
        params, state = step(params, state, *batch(rank, number))
        seen.append((flat(params), flat(stepped)))
    return seen


def flat(tree):
    return np.concatenate([np.asarray(leaf, np.float64).reshape(-1) for leaf in jax.tree.leaves(tree)])


def resume(rank, folder, jitted, topology, memory):
    """The digests of an uninterrupted run and of one that goes on from a file in the middle of a period."""

    def optimizer():
        return local_steps(optax.adam(3e-3), "topr:0.05/rice/lloyd:1", 4, memory, topology=topology, seed=5)

    def rest(optimizer, params, state):
        params, state = run(rank, stepper(optimizer, jitted), 6, 11, params, state)
        return digest((params, state, optimizer.sync(params, state)))

    first = optimizer()
    half = run(rank, stepper(first, jitted), 0, 6, weights(), first.init(weights()))
    leaves, tree = jax.tree.flatten(half)
    np.savez(f"{folder}/{rank}.npz", *leaves)
    whole = rest(first, *half)
    with np.load(f"{folder}/{rank}.npz") as saved:
        loaded = jax.tree.unflatten(tree, [jnp.asarray(saved[name]) for name in saved.files])
    return whole, rest(optimizer(), *loaded)


def kept_mean(rank, jitted, dtype, steps):
    """The start, all steps of this process, its parameters, what they are without the anchor and the anchor; parameters after a sync."""
    optimizer = local_steps(optax.sgd(1.0), "topr:0.05/rice/lloyd:1", 2, "parameters", 0)
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(40, 50)), dtype)}
    state, start, total = optimizer.init(params), flat(params), 0
    step = jax.jit(optimizer.update) if jitted else optimizer.update
    for number in range(steps):
        gradients = {"w": jnp.asarray(np.random.default_rng([rank, number]).normal(0, 0.1, (40, 50)), dtype)}
        updates, state = step(gradients, state, params)
        params, total = optax.apply_updates(params, updates), total - flat(gradients)
    before, dtypes = flat(params), [str(leaf.dtype) for leaf in (params["w"], state.anchors["w"])]
    unrounded = flat(state.mean.residuals)
    synced, _ = optimizer.sync(params, state)
    return start, total, before, unrounded, dtypes, digest(synced)


def failing(rank, what, jitted):
    """What every process is told when the parameters of process 1 are not finite, or others from the start."""
    optimizer, params = local_steps(optax.sgd(0.1), "topr:0.05/rice/qsgd", every=2), {"b": jnp.zeros(10), "w": jnp.ones(2000)}
    if what == "start" and rank == 1:
        params["w"] = params["w"].at[7].set(2)
    gradients = {"b": jnp.ones(10), "w": jnp.full(2000, np.nan if what == "nan" and rank == 1 else 1.0)}
    state, update = optimizer.init(params), jax.jit(optimizer.update) if jitted else optimizer.update
    try:
        for _ in range(2):
            updates, state = update(gradients, state, params)
            params = jax.block_until_ready(optax.apply_updates(params, updates))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
