"""A run that was interrupted and resumed is, bit for bit, the run that was not."""

import keras
import pytest
import tensorflow as tf

from deepreduce.tensorflow import enable_fit

from .jobs import batches, compressed, flat, network
from .workers import run_workers

SPEC, STEPS, INTERRUPTED = "topr:0.05/rice/qsgd", 12, 5


def resumed(rank, strategy, folder, topology):
    """The weights of the whole run, and of two that go on: from a TensorFlow checkpoint and from a Keras file, one for each worker."""
    whole = network(compressed(SPEC, topology=topology), strategy)
    whole.fit(batches(count=STEPS), verbose=0, shuffle=False)

    first = network(compressed(SPEC, topology=topology), strategy)
    first.fit(batches(count=STEPS).take(INTERRUPTED), verbose=0, shuffle=False)
    tf.train.Checkpoint(model=first, optimizer=first.optimizer).write(f"{folder}/{rank}")
    first.save(f"{folder}/{rank}.keras")

    by_checkpoint = network(compressed(SPEC, topology=topology), strategy)
    with strategy.scope():
        by_checkpoint.optimizer.build(by_checkpoint.trainable_variables)
        saved = tf.train.Checkpoint(model=by_checkpoint, optimizer=by_checkpoint.optimizer)
        saved.read(f"{folder}/{rank}").assert_existing_objects_matched()
        by_file = enable_fit(keras.models.load_model(f"{folder}/{rank}.keras"))
    for model in (by_checkpoint, by_file):
        model.fit(batches(count=STEPS, start=INTERRUPTED), verbose=0, shuffle=False)
    return [flat(model).tobytes() for model in (whole, first, by_checkpoint, by_file)]


@pytest.mark.parametrize("topology", ["allgather", "sharded"])
def test_resumed_runs_equal_the_uninterrupted_one(tmp_path, topology):
    for whole, first, by_checkpoint, by_file in run_workers(resumed, 2, str(tmp_path), topology):
        assert first != whole
        assert by_checkpoint == whole
        assert by_file == whole
