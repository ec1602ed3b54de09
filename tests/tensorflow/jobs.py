"""Small trainings that the workers of a test run."""

import keras
import numpy as np
import tensorflow as tf

from deepreduce.tensorflow import DistributedOptimizer, enable_fit


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def network(optimizer, strategy=None, width=48):
    """A compiled classifier with the same initial weights everywhere."""
    keras.utils.set_random_seed(0)
    with (strategy or tf.distribute.get_strategy()).scope():
        layers = [keras.layers.Dense(size, activation="relu", name=f"hidden{number}") for number, size in enumerate((width, width))]
        model = keras.Sequential([keras.Input((20,)), *layers, keras.layers.Dense(5, name="scores")], name="network")
        model.compile(optimizer(), loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return enable_fit(model)


def batches(rows=32, count=50, start=0):
    """The batches of all workers together; each takes its part."""
    inputs = np.random.default_rng(0).standard_normal((rows * count, 20)).astype(np.float32)
    targets = (inputs[:, :5] + inputs[:, 5:10] * inputs[:, 10:15]).argmax(1)
    return tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(rows).skip(start)


def adam():
    return keras.optimizers.Adam(0.003)


def compressed(spec, inner=sgd, **options):
    return lambda: DistributedOptimizer(inner(), spec, **{"small_tensor_numel": 16} | options)


def fitted(strategy, optimizer, steps=50):
    model = network(optimizer, strategy)
    model.fit(batches(count=steps), verbose=0, shuffle=False)
    return model


def trained_together(rank, strategy, optimizers, steps=20):
    """Models that each optimizer trained, in one loop: tracing a graph and making its input take most of the time of a `fit`."""
    models = [network(optimizer, strategy) for optimizer in optimizers]

    def replica(inputs, targets):
        for model in models:
            with tf.GradientTape() as tape:
                loss = model.loss(targets, model(inputs)) / strategy.num_replicas_in_sync
            model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    @tf.function(autograph=False)
    def step(inputs, targets):
        strategy.run(replica, args=(inputs, targets))

    with strategy.scope():
        for model in models:
            model.optimizer.build(model.trainable_variables)
    for inputs, targets in batches(count=steps):
        step(inputs[rank::2], targets[rank::2])
    return models


def flat(model):
    return np.concatenate([weight.reshape(-1) for weight in model.get_weights()])
