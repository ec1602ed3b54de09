"""Local steps: each replica steps by itself, and the mean of what some steps changed is applied on all."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import deepreduce as dr
from deepreduce.step.local import LocalTraining
from deepreduce.step.policy import policy_of
from deepreduce.step.reducer import ErrorFeedback, Reducer
from deepreduce.step.residual import ResidualMemory
from deepreduce.step.topology import AllGather
from deepreduce.step.transport import SingleRank
from deepreduce.tensorflow import DistributedOptimizer, enable_fit

from .jobs import adam, batches, compressed, flat, network, sgd
from .workers import run_workers

SPARSE = {"spec": "topr:0.1/rice/lloyd:1", "sends": "updates", "memory": "parameters"}


def local(inner=adam, **options):
    return compressed(options.pop("spec", None), inner, **options)


# One replica


def stepped(optimizer, weight, steps):
    for _ in range(steps):
        optimizer.apply([tf.constant([4.0, 3.0, 1.0])], [weight])
    return weight.numpy().tolist()


@pytest.mark.parametrize(
    ("memory", "between", "at_the_sync", "after_sync"),
    [
        ("parameters", [-4, -3, -1], [-8, -6, -2], [-8, 0, 0]),
        ("residual", [-4, -3, -1], [-8, 0, 0], [-8, 0, 0]),
        ("none", [-4, -3, -1], [-8, 0, 0], [-8, 0, 0]),
    ],
)
def test_what_was_not_sent_is_where_the_memory_says(memory, between, at_the_sync, after_sync):
    optimizer = local(
        lambda: keras.optimizers.SGD(1.0), spec="topr:1/raw/raw", sends="updates", every=2, memory=memory, small_tensor_numel=0
    )()
    weight = keras.Variable(np.zeros(3, np.float32))
    assert stepped(optimizer, weight, 1) == between
    assert stepped(optimizer, weight, 1) == at_the_sync
    optimizer.sync()
    assert weight.numpy().tolist() == after_sync
    optimizer.sync()
    assert weight.numpy().tolist() == after_sync
    stepped(optimizer, weight, 2)
    optimizer.sync()
    assert weight.numpy().tolist() == ([-16, 0, 0] if memory == "none" else [-8, -12, 0])
    assert len(optimizer.stats().steps) == 2
    assert optimizer.stats().dense_bytes == 4 * 3 * 4  # four steps of three elements


@pytest.mark.parametrize("memory", ["residual", "parameters", "none"])
def test_steps_have_the_bits_of_the_core(memory):
    spec, generator = "topr:0.1/rice/lloyd:1", np.random.default_rng(0)
    optimizer = local(lambda: keras.optimizers.SGD(1.0), spec=spec, sends="updates", every=3, memory=memory, parameter_names=["w"])()
    weight, expected = keras.Variable(np.ones((20, 30), np.float32)), np.ones((20, 30), np.float32)
    kept = ResidualMemory() if memory != "none" else None
    training = LocalTraining(Reducer(policy_of(spec, 16), AllGather()), ErrorFeedback(kept, None), every=3)
    training.add_anchors({"w": expected})
    for _ in range(10):
        gradient = generator.standard_normal((20, 30), np.float32)
        optimizer.apply([tf.constant(gradient)], [weight])
        expected -= gradient
        if training.count_step():
            training.apply({"w": expected}, training.sync({"w": expected}, SingleRank())[0])
            if memory == "parameters":
                training.move_residuals_into_({"w": expected})
        assert weight.numpy().tobytes() == expected.tobytes()


def test_weights_that_are_set_after_a_sync_are_where_training_goes_on():
    optimizer = local(lambda: keras.optimizers.SGD(1.0), spec="topr:1/raw/raw", sends="updates", every=2, memory="parameters")()
    weight = keras.Variable(np.zeros(3, np.float32))
    optimizer.sync()  # before it is built
    stepped(optimizer, weight, 3)
    optimizer.sync()
    weight.assign([100, 100, 100])
    optimizer.sync()
    assert weight.numpy().tolist() == [100, 100, 100]
    assert stepped(optimizer, weight, 2) == [92, 94, 98]


def test_a_recipe_is_its_settings():
    optimizer = DistributedOptimizer(adam(), recipe="adam", every=8)
    config = optimizer.get_config()
    assert {key: config[key] for key in ("spec", "sends", "every", "memory", "small_tensor_numel")} == {
        "spec": "topr:0.15/rice/lloyd:1",
        "sends": "updates",
        "every": 8,
        "memory": "parameters",
        "small_tensor_numel": 1024,
    }
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert again.get_config() == config


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"spec": "dense", "every": 4}, "every=4 .* for sends='updates'"),
        ({"spec": "dense", "memory": "parameters"}, "'residual' or 'none' with sends='gradients', got 'parameters'"),
        ({"recipe": "adam", "sends": "gradients"}, "with sends='gradients'"),
        ({"recipe": "adamw"}, "recipes for local steps are adam, sgd, got 'adamw'"),
        ({}, "give a spec, or a recipe"),
        ({"recipe": "adam", "every": 0}, "every is a number of steps, at least 1; got 0"),
        ({"recipe": "adam", "memory": "local"}, "'residual' or 'parameters' or 'none' with sends='updates', got 'local'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options, why):
    with pytest.raises(dr.ConfigError, match=why):
        DistributedOptimizer(adam(), **options)


# Two workers

WAYS = [
    {**SPARSE, "every": 4},
    {**SPARSE, "every": 4, "topology": "sharded"},
    {**SPARSE},
    {"spec": "none/all/lloyd:2", "sends": "updates", "every": 3},
]


def trained(rank, strategy):
    """The weights of each way before and after a sync, an evaluation, and the ratio of bytes; and the mean of parameters taken by hand."""
    found = []
    for options in WAYS:
        model = network(local(**options), strategy)
        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        by_loop(model, strategy, rank, steps=14)
        before = flat(model)
        loss = model.evaluate(batches(count=4), verbose=0)
        found.append((before, flat(model), loss, model.optimizer.stats().ratio))
    return found, averaged_by_hand(rank, strategy, every=3, steps=12)


def by_loop(model, strategy, rank, steps, start=0):
    @tf.function(autograph=False)
    def step(inputs, targets):
        strategy.run(take_step, args=(model, inputs, targets))

    for inputs, targets in batches(count=start + steps, start=start):
        step(inputs[rank::2], targets[rank::2])


def take_step(model, inputs, targets):
    with tf.GradientTape() as tape:
        loss = model.loss(targets, model(inputs))  # which Keras divides by the number of replicas
    model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


def averaged_by_hand(rank, strategy, every, steps):
    """The weights by the optimizer, and by a model of each worker alone whose weights are averaged after every few steps."""
    ours = network(local(sgd, spec="dense", sends="updates", every=every), strategy)
    by_loop(ours, strategy, rank, steps)
    workers = [network(sgd) for _ in range(2)]
    for start in range(0, steps, every):
        for number, model in enumerate(workers):
            for inputs, targets in batches(count=start + every, start=start):
                take_step(model, inputs[number::2], targets[number::2])
        mean = [np.mean(pair, axis=0) for pair in zip(*(model.get_weights() for model in workers), strict=True)]
        for model in workers:
            model.set_weights(mean)
    return flat(ours), flat(workers[0])


def test_two_workers_are_equal_after_a_sync():
    (mine, (ours, by_hand)), (others, _) = run_workers(trained, 2)
    for options, (before, after, loss, ratio), (other_before, other_after, other_loss, _) in zip(WAYS, mine, others, strict=True):
        assert not np.array_equal(before, other_before), options
        assert after.tobytes() == other_after.tobytes(), options
        assert np.isfinite(after).all(), options
        assert loss == other_loss, options
        assert ratio > 8, options
    np.testing.assert_allclose(ours, by_hand, rtol=0, atol=1e-6)


def resumed(rank, strategy, folder):
    """The weights of a `fit` without a break, and of one that goes on from files that each worker wrote between two syncs."""
    optimizer = local(every=4, **SPARSE)
    whole = network(optimizer, strategy)
    by_loop(whole, strategy, rank, 14)
    first = network(optimizer, strategy)
    by_loop(first, strategy, rank, 6)
    first.save(f"{folder}/{rank}.keras")
    with strategy.scope():
        second = enable_fit(keras.models.load_model(f"{folder}/{rank}.keras"))
    by_loop(second, strategy, rank, 8, start=6)
    between = flat(whole).tobytes() == flat(second).tobytes()
    for model in (whole, second):
        model.optimizer.sync()
    return between, flat(whole).tobytes(), flat(second).tobytes()


def test_a_run_that_was_interrupted_between_two_syncs_is_the_run_that_was_not(tmp_path):
    (between, whole, second), (_, other, _) = run_workers(resumed, 2, str(tmp_path))
    assert between
    assert whole == second == other


def fitted(rank, strategy):
    model = network(local(recipe="adam", every=5), strategy)
    seen = []
    after = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append((flat(model).tobytes(), logs["val_loss"])))
    model.fit(batches(count=12), validation_data=batches(count=2), epochs=2, verbose=0, shuffle=False, callbacks=[after])
    return seen, flat(model).tobytes()


def test_fit_is_in_sync_when_it_evaluates_and_when_it_ends():
    (mine, at_the_end), (others, other_at_the_end) = run_workers(fitted, 2)
    assert mine == others
    assert at_the_end == other_at_the_end
