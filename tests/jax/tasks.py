"""What the processes of the tests do. Every process sees other data, and starts from the same weights."""

import hashlib
from datetime import timedelta

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from deepreduce.jax import PeerError, compressed_mean
from deepreduce.jax.transport import Collective, Coordinator, store
from deepreduce.step.frame import FrameTag, read_frames, write_frame


def weights():
    draw = np.random.default_rng(0)
    return {"layers": [jnp.asarray(draw.normal(0, 0.1, shape), jnp.float32) for shape in ((64, 96), (96, 10))], "bias": jnp.zeros(10)}


def batch(rank, step):
    inputs = np.random.default_rng([rank, step]).normal(size=(16, 64)).astype(np.float32)
    return jnp.asarray(inputs), jnp.asarray(inputs[:, :10].argmax(1))


def loss(params, inputs, targets):
    first, second = params["layers"]
    logits = jax.nn.relu(inputs @ first) @ second + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


gradient = jax.jit(jax.grad(loss))


def stepper(optimizer, jitted):
    """One step of training: the whole of it inside `jit`, or only the gradient."""

    def step(params, state, inputs, targets):
        updates, state = optimizer.update(gradient(params, inputs, targets), state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step) if jitted else step


def digest(tree):
    hasher = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        hasher.update(np.asarray(leaf).tobytes())
    return hasher.hexdigest()


def train(rank, spec, steps, jitted, topology="allgather"):
    """A digest of the weights, their distance from the start, and what was counted."""
    mean = compressed_mean(spec, topology=topology)
    optimizer = optax.chain(mean, optax.sgd(0.1, momentum=0.9))
    params = weights()
    state, step = optimizer.init(params), stepper(optimizer, jitted)
    for number in range(steps):
        params, state = step(params, state, *batch(rank, number))
    moved = float(optax.tree.norm(jax.tree.map(jnp.subtract, params, weights())))
    return (
        digest(params),
        digest(state[0].residuals),
        moved,
        (mean.stats().message_bytes, mean.stats().dense_bytes, mean.stats().sent_bytes),
    )


def train_updates(rank, spec, steps, jitted):
    """A digest of the weights after training with Adam, whose updates are compressed, and the mean loss of the last steps."""
    mean = compressed_mean(spec)
    optimizer = optax.chain(optax.adam(3e-3), mean)
    params = weights()
    state, step = optimizer.init(params), stepper(optimizer, jitted)
    for number in range(steps):
        params, state = step(params, state, *batch(rank, number))
    last = [float(loss(params, *batch(rank, number))) for number in range(steps, steps + 20)]
    return digest(params), digest(state[0]), float(np.mean(last)), mean.stats().last.parameters["['layers'][0]"].nnz


def mean_of_updates(rank):
    """The weights after Adam with uncompressed updates, and with the mean of updates as JAX makes it."""
    found = []
    for chain in ((optax.adam(3e-3), compressed_mean("none/all/raw")), (optax.adam(3e-3),)):
        optimizer, params = optax.chain(*chain), weights()
        state = optimizer.init(params)
        for number in range(5):
            updates, state = optimizer.update(gradient(params, *batch(rank, number)), state, params)
            params = optax.apply_updates(params, updates if len(chain) == 2 else own_mean(updates))
        found.append(np.concatenate([np.asarray(leaf).reshape(-1) for leaf in jax.tree.leaves(params)]))
    return found


def own_mean(tree):
    """The mean over all processes as JAX makes it: an all-reduce that its compiler puts in."""
    mesh = Mesh(np.array(jax.devices()), ("process",))
    spread, whole = NamedSharding(mesh, PartitionSpec("process")), NamedSharding(mesh, PartitionSpec())
    stacked = jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(spread, np.asarray(leaf)[None]), tree)
    means = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf.mean(0), tree), out_shardings=whole)(stacked)
    return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_data(0)), means)


def identity(rank, jitted):
    """The largest distance of the identity codec from both means that JAX offers, over gradients of every dtype."""
    draw = np.random.default_rng(rank)
    gradients = {
        "f32": jnp.asarray(draw.normal(size=(40, 50)), jnp.float32),
        "bf16": jnp.asarray(draw.normal(size=3000), jnp.bfloat16),
        "f16": (jnp.asarray(draw.normal(size=(3, 5)), jnp.float16), None, jnp.asarray(draw.normal(), jnp.float32)),
    }
    mean = compressed_mean("none/all/raw")
    update = jax.jit(mean.update) if jitted else mean.update
    ours, _ = update(gradients, mean.init(gradients))
    distances = {}
    gathered = jax.tree.map(lambda leaf: multihost_utils.process_allgather(leaf).astype(np.float64).mean(0), gradients)
    for name, theirs in (("allgather", gathered), ("allreduce", own_mean(gradients))):
        pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
        distances[name] = [
            (str(our.dtype), float(abs(np.asarray(our, np.float64) - their.astype(np.float64)).max())) for our, their in pairs
        ]
    return distances, jax.tree.structure(ours) == jax.tree.structure(gradients), digest(ours)


def resume(rank, folder, jitted, topology, forgotten):
    """The digests of an uninterrupted run, of one that goes on from a file in between, and of one that forgets a table of residuals."""

    def optimizer():
        return optax.chain(compressed_mean("topr:0.02/rice/qsgd", topology=topology, seed=5), optax.sgd(0.1, momentum=0.9))

    def run(step, first, last, params, state):
        for number in range(first, last):
            params, state = step(params, state, *batch(rank, number))
        return params, state

    before, after = stepper(optimizer(), jitted), stepper(optimizer(), jitted)
    half = run(before, 0, 4, weights(), optimizer().init(weights()))
    whole = run(before, 4, 8, *half)
    leaves, tree = jax.tree.flatten(half)
    np.savez(f"{folder}/{rank}.npz", *leaves)
    with np.load(f"{folder}/{rank}.npz") as saved:
        params, state = jax.tree.unflatten(tree, [jnp.asarray(saved[name]) for name in saved.files])
    forgetful = state[0]._replace(**{forgotten: jax.tree.map(jnp.zeros_like, getattr(state[0], forgotten))}), *state[1:]
    return digest(whole), digest(run(after, 4, 8, params, state)), digest(run(after, 4, 8, params, forgetful))


def lost_step(rank, jitted):
    """A step in which process 1 has an infinity, between two ordinary ones."""
    mean = compressed_mean("topr:0.01/rice/qsgd")
    update = jax.jit(mean.update) if jitted else mean.update
    ordinary = {"w": jnp.asarray(np.random.default_rng(rank).normal(size=5000), jnp.float32)}
    broken = {"w": ordinary["w"].at[77].set(jnp.inf)} if rank == 1 else ordinary
    _, before = update(ordinary, mean.init(ordinary))
    means, after = update(broken, before)
    following, _ = update(ordinary, after)
    untouched = digest(before.residuals) == digest(after.residuals)
    return bool(jnp.isfinite(means["w"]).all()), int(after.step), untouched, bool(jnp.isfinite(following["w"]).all()), digest(means)


class Refusing:
    """A policy that fails in one process."""

    def __init__(self, rank):
        self.rank = rank

    def codec_for(self, name, source):
        from deepreduce import InputError, parse

        if self.rank == 1:
            raise InputError("this process refuses")
        return parse("dense")


def one_fails(rank, jitted, topology):
    """What every process is told when process 1 cannot encode; afterwards they can go on."""
    mean = compressed_mean(Refusing(rank), topology=topology)
    ones = {"w": jnp.ones(2000)}
    update = jax.jit(mean.update) if jitted else mean.update
    try:
        jax.block_until_ready(update(ones, mean.init(ones)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def exchanged(transport, payload, tag):
    """What an all-gather brings."""
    return [bytes(body) for body in read_frames(transport.all_gather(write_frame(payload, tag), tag), tag, transport.rank)]


def out_of_step(rank):
    """Two processes that are not at the same step."""
    try:
        exchanged(Collective(), b"message", FrameTag("demo", channel=7, step=3 + rank, limit_bytes=100))
    except PeerError as error:
        return str(error)
    return "nothing"


def sizes(rank, lengths):
    """Messages of all lengths, by both transports, come as they were sent."""
    collective, coordinator = Collective(), Coordinator(timedelta(seconds=30))
    right = []
    for step, length in enumerate(lengths):
        expected = [bytes([17 * step % 256, sender]) * (length * (1 + sender)) for sender in range(jax.process_count())]
        for transport in (collective, coordinator):
            right.append(exchanged(transport, expected[rank], FrameTag("demo", channel=1, step=step, limit_bytes=10**7)) == expected)
    return all(right), collective.sent_bytes, coordinator.sent_bytes


def every_exchange(rank, steps):
    """All four exchanges by both transports, several times, and what of them is left in the store."""
    size, right, kept = jax.process_count(), [], []
    for transport in (Collective(), Coordinator(timedelta(seconds=30))):
        for step in range(steps):
            tag = FrameTag("demo", channel=1, step=step, limit_bytes=10**6)
            frames = [
                [write_frame(bytes([step, sender, reader]) * (50 * reader + sender), tag) for reader in range(size)]
                for sender in range(size)
            ]
            gathered = transport.gather(frames[rank][0], tag)
            right.append(gathered is None if rank else list(map(bytes, gathered)) == [row[0] for row in frames])
            right.append(bytes(transport.broadcast(None if rank else frames[0][0], tag)) == frames[0][0])
            right.append(list(map(bytes, transport.all_to_all(frames[rank], tag))) == [row[rank] for row in frames])
            right.append(list(map(bytes, transport.all_gather(frames[rank][0], tag))) == [row[0] for row in frames])
        kept.append(len(getattr(transport, "_unread", ())))
    return all(right), kept


def alone(rank):
    """Process 1 comes too late: process 0 learns that after the timeout, and process 1 still finds the message."""
    client, tag = store(), FrameTag("demo", channel=1, step=0, limit_bytes=100)
    if rank == 1:
        client.blocking_key_value_get("given up", 30_000)
        return str(exchanged(Coordinator(timedelta(seconds=30)), b"late", tag))
    try:
        return str(exchanged(Coordinator(timedelta(seconds=0.1)), b"early", tag))
    except PeerError as error:
        client.key_value_set("given up", "")
        return str(error)
