"""Of an embedding only the rows that a batch touched are sent."""

import keras
import numpy as np
import tensorflow as tf

from deepreduce.tensorflow import DistributedOptimizer, enable_fit

from .workers import run_workers

ROWS, WIDTH, BATCH = 5000, 8, 16


def words(steps):
    tokens = np.random.default_rng(0).integers(0, ROWS, (steps * BATCH, 3))
    tokens[:, 2] = tokens[:, 1]  # some rows are touched twice by one example
    return tokens, (tokens[:, 0] % 2).astype(np.float32)


def model_of(optimizer, strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [
            keras.Input((3,), dtype="int64"),
            keras.layers.Embedding(ROWS, WIDTH, name="table"),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential(layers, name="words")
        model.compile(optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True))
    return enable_fit(model)


def trained(rank, strategy, steps):
    tokens, labels = words(steps)
    weights, touched = [], [len(np.unique(part)) for part in np.split(tokens, steps * 2)[rank::2]]
    with strategy.scope():
        optimizers = [keras.optimizers.SGD(0.5)]
        optimizers += [DistributedOptimizer(keras.optimizers.SGD(0.5), spec) for spec in ("none/rice/raw", "topr:0.0005/rice/qsgd")]
    for optimizer in optimizers:
        model = model_of(optimizer, strategy)
        model.fit(tf.data.Dataset.from_tensor_slices((tokens, labels)).batch(BATCH), verbose=0, shuffle=False)
        weights.append(model.get_layer("table").get_weights()[0])
    return weights, touched, [optimizer.stats() for optimizer in optimizers[1:]]


def test_only_touched_rows_are_sent():
    steps = 6
    results = run_workers(trained, 2, steps)
    for (plain, exact, lossy), touched, (exact_stats, lossy_stats) in results:
        np.testing.assert_allclose(exact, plain, rtol=0, atol=1e-6)
        assert not np.array_equal(lossy, plain)
        sent = [step.parameters["words/table/embeddings"] for step in exact_stats.steps]
        assert [part.nnz for part in sent] == [rows * WIDTH for rows in touched]
        assert all(part.dense_bytes == 4 * ROWS * WIDTH and part.ratio > 100 for part in sent)
        assert all(step.parameters["words/table/embeddings"].nnz == ROWS * WIDTH // 2000 for step in lossy_stats.steps)
    assert all(mine.tobytes() == other.tobytes() for mine, other in zip(*(weights for weights, _, _ in results), strict=True))
