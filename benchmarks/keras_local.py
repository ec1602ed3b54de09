"""How well Adam trains a small transformer in Keras: dense gradients, compressed updates of every step, and local steps.

python benchmarks/keras_local.py --steps 200 --rates 0.004 --seeds 3

Two workers of MultiWorkerMirroredStrategy, each with 4 windows of 64 bytes per step, of the sources of Python's standard library. Prints
the validation loss of every run, and how many times fewer bytes its messages had than dense gradients.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from itertools import islice, product

WORKERS, WIDTH, HEADS, BLOCKS, BATCH = 2, 96, 4, 2, 4
SPEC = "topr:0.025/rice/lloyd:1"
OPTIONS = {
    "dense": None,
    "updates": {"spec": SPEC, "sends": "updates"},
    "every step": {"spec": SPEC, "sends": "updates", "memory": "parameters"},
    "adam recipe": {"recipe": "adam"},
}


def transformer(keras, context, seed):
    """A model of the next byte; the same initial weights in all processes."""

    class Positions(keras.layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(context, WIDTH), initializer=keras.initializers.RandomNormal(stddev=0.02))

        def call(self, values):
            return values + self.table

    keras.utils.set_random_seed(seed)
    inputs = keras.Input((context,), dtype="int32")
    values = Positions()(keras.layers.Embedding(256, WIDTH)(inputs))
    for _ in range(BLOCKS):
        normal = keras.layers.LayerNormalization()(values)
        values = values + keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(normal, normal, use_causal_mask=True)
        wide = keras.layers.Dense(4 * WIDTH, activation="gelu")(keras.layers.LayerNormalization()(values))
        values = values + keras.layers.Dense(WIDTH)(wide)
    return keras.Model(inputs, keras.layers.Dense(256)(keras.layers.LayerNormalization()(values)))


def run(strategy, data, method, rate, seed, steps):
    """The validation loss of one run, and how many times fewer bytes its messages had than dense ones."""
    import keras
    import tensorflow as tf

    from deepreduce.lab.train import text
    from deepreduce.tensorflow import DistributedOptimizer

    rank = strategy.cluster_resolver.task_id
    schedule = keras.optimizers.schedules.CosineDecay(0.0, steps - steps // 10, warmup_target=rate, warmup_steps=steps // 10)
    with strategy.scope():
        model = transformer(keras, text.CONTEXT, seed)
        optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.1)
        if OPTIONS[method] is not None:
            optimizer = DistributedOptimizer(optimizer, small_tensor_numel=64, **OPTIONS[method])
        optimizer.build(model.trainable_variables)

    def replica(inputs, targets):
        with tf.GradientTape() as tape:
            losses = keras.ops.sparse_categorical_crossentropy(targets, model(inputs), from_logits=True)
            loss = keras.ops.mean(losses) / WORKERS
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    train = tf.function(lambda inputs, targets: strategy.run(replica, args=(inputs, targets)), autograph=False)
    for inputs, targets in islice(data.train_batches(rank, WORKERS, BATCH, seed), steps):
        train(tf.constant(inputs), tf.constant(targets))
    if OPTIONS[method] is not None:
        optimizer.sync()
    score = tf.function(lambda inputs: model(inputs), autograph=False)
    batches = list(data.test_batches(0, 1))
    losses = [
        keras.ops.sparse_categorical_crossentropy(targets, score(tf.constant(inputs)), from_logits=True) for inputs, targets in batches
    ]
    return float(sum(keras.ops.mean(each) for each in losses) / len(losses)), 1.0 if OPTIONS[method] is None else optimizer.stats().ratio


def train_all(options):
    """All runs, in one of the processes."""
    import tensorflow as tf

    from deepreduce.lab.train import text

    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    data = text.read(None, 0)
    for seed, rate, method in product(range(options.seeds), options.rates, options.methods):
        quality, ratio = run(strategy, data, method, rate, seed, options.steps)
        if strategy.cluster_resolver.task_id == 0:
            print(f"seed {seed}, rate {rate}, {method}: loss {quality:.3f}, {ratio:.0f} times fewer bytes", flush=True)


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--steps", type=int, default=200)
    arguments.add_argument("--rates", type=float, nargs="+", default=[0.004])
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--methods", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    arguments.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.worker:
        return train_all(options)
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(WORKERS)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    places = [{"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}} for index in range(WORKERS)]
    environments = [os.environ | {"TF_CONFIG": json.dumps(place), "TF_CPP_MIN_LOG_LEVEL": "3"} for place in places]
    children = [subprocess.Popen([sys.executable, *sys.argv, "--worker"], env=environment) for environment in environments]
    sys.exit(max(child.wait() for child in children))


if __name__ == "__main__":
    main()
