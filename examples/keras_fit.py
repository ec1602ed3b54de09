"""Keras on two workers: `model.fit` as ever, with gradients that travel compressed.

Without arguments it starts both workers here. On several machines, set TF_CONFIG on each, and start it there with `worker`.
"""

import json
import os
import socket
import subprocess
import sys

SPEC = "topr:0.01/rice/qsgd"


def worker() -> None:
    import keras
    import numpy as np
    import tensorflow as tf

    from deepreduce.tensorflow import DistributedOptimizer, enable_fit

    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # first of all: TensorFlow wants to know its workers before it computes
    inputs = np.random.default_rng(0).standard_normal((8192, 20)).astype(np.float32)
    targets = (inputs[:, :5] + inputs[:, 5:10]).argmax(1)
    batches = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(128)

    keras.utils.set_random_seed(0)
    with strategy.scope():
        hidden = [keras.layers.Dense(256, activation="relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((20,)), *hidden, keras.layers.Dense(5)])
        optimizer = DistributedOptimizer(keras.optimizers.SGD(0.2, momentum=0.9), SPEC)
        model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    enable_fit(model)
    history = model.fit(batches, epochs=2, shuffle=False, verbose=0).history

    stats = optimizer.stats()
    print(f"accuracy {history['accuracy'][-1]:.0%}, {stats.message_bytes:,} bytes instead of {stats.dense_bytes:,}")
    print(f"{stats.dense_bytes / stats.message_bytes:.0f} times fewer bytes")


def main() -> None:
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in (one, other)]
    workers = []
    for index in range(2):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        environment = os.environ | {"TF_CONFIG": json.dumps(config), "TF_CPP_MIN_LOG_LEVEL": "3"}
        quiet = None if index == 0 else subprocess.DEVNULL
        workers.append(subprocess.Popen([sys.executable, __file__, "worker"], env=environment, stdout=quiet))
    sys.exit(max(each.wait() for each in workers))


if __name__ == "__main__":
    worker() if "worker" in sys.argv else main()
