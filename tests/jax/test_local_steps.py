"""Local steps in real processes: the same anchors bit for bit, nothing lost, and states that go on; and in one process what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import deepreduce as dr
from deepreduce.jax import AllGather, local_steps
from deepreduce.step.local import LocalTraining
from deepreduce.step.policy import policy_of
from deepreduce.step.reducer import ErrorFeedback, Reducer
from deepreduce.step.transport import SingleRank

from . import local_tasks

HOW = pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])


@HOW
def test_dense_local_steps_average_the_parameters(pair, jitted):
    here, there = pair.run(local_tasks.dense_every_step, jitted, 4)
    for (params, stepped), (other_params, other_stepped) in zip(here, there, strict=True):
        np.testing.assert_allclose(params, (stepped + other_stepped) / 2, rtol=0, atol=1e-6)
        np.testing.assert_allclose(other_params, params, rtol=0, atol=1e-6)


@HOW
@pytest.mark.parametrize("topology", ["allgather", "server", "sharded"])
def test_anchors_are_bit_identical_and_sync_returns_them(pair, topology, jitted):
    task = partial(local_tasks.train, recipe="adam", topology=topology)
    here, there = pair.run(task, 42, jitted)
    (anchors, own, synced, exact, loss, counted), (other_anchors, other_own, other_synced, other_exact, _, other_counted) = here, there
    assert anchors == other_anchors
    assert own != other_own  # anchor plus what was not sent
    assert synced == other_synced
    assert exact
    assert other_exact
    assert loss < 2.0  # 2.3 at the start
    assert counted[:2] == other_counted[:2] == (45, 12)  # ten syncs in 42 steps, and two by hand
    assert 9 < counted[2] < 120  # three steps


@HOW
@pytest.mark.parametrize("memory", ["residual", "none"])
def test_parameters_are_equal_after_every_sync_where_nothing_unsent_is_in_them(pair, memory, jitted):
    (anchors, _, synced, exact, _, _), (other_anchors, _, other_synced, _, _, _) = pair.run(
        local_tasks.train, 8, jitted, "topr:0.05/rice/qsgd", 4, memory
    )
    assert (anchors, synced) == (other_anchors, other_synced)
    assert exact


@HOW
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_mean_of_the_parameters_is_that_of_all_steps(pair, dtype, jitted):
    here, there = pair.run(local_tasks.kept_mean, jitted, dtype, 5)
    assert here[4] == [dtype, "float32"]
    assert here[5] == there[5]
    (start, total, params, residuals, _, _), (_, other_total, other_params, other_residuals, _, _) = here, there
    expected = start + (total + other_total) / 2
    found = (params - residuals + other_params - other_residuals) / 2
    rounding = {"float32": 1e-6, "bfloat16": 2**-6, "float16": 2**-9}[dtype]  # of five steps
    np.testing.assert_allclose(found, expected, rtol=0, atol=rounding * 4)
    assert abs(params - other_params).max() > 0.1
    assert np.any(residuals) == (dtype != "float32")  # only what rounding left


@HOW
@pytest.mark.parametrize(
    ("topology", "memory"), [("allgather", "parameters"), ("allgather", "residual"), ("server", "parameters"), ("sharded", "residual")]
)
def test_a_state_goes_on_bit_for_bit_in_the_middle_of_a_period(pair, tmp_path, topology, memory, jitted):
    for whole, resumed in pair.run(local_tasks.resume, str(tmp_path), jitted, topology, memory):
        assert whole == resumed


@HOW
def test_parameters_that_are_not_finite_are_told_to_all(pair, jitted):
    for told in pair.run(local_tasks.failing, "nan", jitted):
        assert "InputError: ['w'] is not finite on some rank after 2 local steps" in told


@HOW
def test_other_initial_parameters_are_told_to_all(pair, jitted):
    for told in pair.run(local_tasks.failing, "start", jitted):
        assert "PeerError: rank 1 starts with other values of ['w'] than rank 0" in told


def quadratic(optimizer, steps, jitted=True):
    """Parameters and state after steps towards ones."""
    params = {"w": jnp.zeros((30, 50)), "layers": [jnp.zeros(3), None]}
    state, update = optimizer.init(params), jax.jit(optimizer.update) if jitted else optimizer.update
    for _ in range(steps):
        updates, state = update(jax.tree.map(lambda leaf: leaf - 1, params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_the_host_is_called_at_syncs_alone():
    optimizer = local_steps(optax.sgd(0.1), "topr:0.1/rice/qsgd", 3)
    _, state = quadratic(optimizer, 8)
    assert (int(state.steps), int(state.mean.step)) == (2, 6)
    assert [step.step for step in optimizer.stats().steps] == [2, 5]
    assert optimizer.stats().dense_bytes == 6 * 4 * (30 * 50 + 3)


@HOW
def test_alone_with_everything_sent_it_is_the_optimizer(jitted):
    params, _ = quadratic(local_steps(optax.adam(0.1), "dense", 3), 9, jitted)
    expected, _ = quadratic(optax.adam(0.1), 9, jitted)
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@HOW
@pytest.mark.parametrize("memory", ["parameters", "residual", "none"])
def test_a_second_sync_sends_nothing_and_changes_nothing(memory, jitted):
    optimizer = local_steps(optax.sgd(0.1), "topr:0.1/rice/qsgd", 4, memory)
    params, state = optimizer.sync(*quadratic(optimizer, 4, jitted))
    sync = jax.jit(optimizer.sync) if jitted else optimizer.sync
    again, after = sync(params, state)
    for tree, other in ((params, again), (state, after)):
        assert all(np.array_equal(one, two) for one, two in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))
    assert int(after.mean.step) == 4


@HOW
def test_what_was_not_sent_goes_back_into_the_parameters_after_a_sync(jitted):
    optimizer = local_steps(optax.sgd(0.1), "topr:0.1/rice/raw", 4, "parameters")
    plain, _ = quadratic(optax.sgd(0.1), 4)
    params, state = quadratic(optimizer, 4, jitted)
    np.testing.assert_allclose(params["w"], plain["w"], atol=1e-6)  # alone, the mean of all steps is what this process did
    params, state = optimizer.sync(params, state)
    assert float(abs(params["w"] - plain["w"]).max()) > 0.1
    update = jax.jit(optimizer.update) if jitted else optimizer.update
    updates, state = update(jax.tree.map(jnp.zeros_like, params), state, params)
    np.testing.assert_allclose(optax.apply_updates(params, updates)["w"], plain["w"], atol=1e-6)
    assert not np.any(state.mean.residuals["w"])


@HOW
@pytest.mark.parametrize("memory", ["parameters", "residual", "none"])
def test_anchors_and_parameters_are_those_of_the_core(memory, jitted):
    name, spec, start = "['w']", "topr:0.02/rice/raw", np.zeros((40, 50), np.float32)
    feedback = ErrorFeedback(None if memory == "none" else dr.ResidualMemory(), None)
    core, weight = LocalTraining(Reducer(policy_of(spec, 0), AllGather()), feedback, every=3), start.copy()
    core.add_anchors({name: weight})
    optimizer = local_steps(optax.sgd(1.0), spec, 3, memory, 0)
    params, update = {"w": jnp.asarray(start)}, jax.jit(optimizer.update) if jitted else optimizer.update
    state = optimizer.init(params)
    for number in range(10):
        gradient = np.random.default_rng(number).integers(-20, 20, start.shape).astype(np.float32)  # all sums are exact
        updates, state = update({"w": jnp.asarray(gradient)}, state, params)
        params = optax.apply_updates(params, updates)
        weight -= gradient
        if core.count_step():
            means, _ = core.sync({name: weight}, SingleRank())
            core.apply({name: weight}, means)
            if memory == "parameters":
                core.move_residuals_into_({name: weight})
        np.testing.assert_array_equal(params["w"], weight)
        np.testing.assert_array_equal(state.anchors["w"], core.anchors[name])
    assert core.syncs == len(optimizer.stats().steps) == 3
    assert int(state.mean.step) == 9


def test_the_update_of_the_wrapped_optimizer_can_be_jitted_alone():
    adam = optax.adam(0.1)
    jitted = local_steps(optax.GradientTransformation(adam.init, jax.jit(adam.update)), recipe="adam")
    ours, expected = (quadratic(optimizer, 6, jitted=False)[0]["w"] for optimizer in (jitted, local_steps(adam, recipe="adam")))
    np.testing.assert_allclose(ours, expected, atol=1e-6)


def test_it_runs_inside_a_scan():
    optimizer = local_steps(optax.sgd(0.1), "topr:0.1/rice/qsgd", 2, "parameters")
    params = {"w": jnp.zeros(2000)}

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update({"w": params["w"] - 1}, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, length=6))((params, optimizer.init(params)))
    assert int(state.mean.step) == 6
    np.testing.assert_allclose(params["w"], 1 - 0.9**6, atol=1e-6)


def test_arguments_of_the_wrapped_optimizer_reach_it():
    def update(updates, state, params=None, *, value):
        return jax.tree.map(lambda leaf: leaf * value, updates), state

    optimizer = local_steps(optax.GradientTransformationExtraArgs(lambda params: (), update), "dense")
    params = {"w": jnp.zeros(3)}
    updates, _ = optimizer.update({"w": jnp.ones(3)}, optimizer.init(params), params, value=2.0)
    assert updates["w"].tolist() == [2, 2, 2]


def test_a_tree_without_leaves_trains():
    optimizer = local_steps(optax.sgd(0.1), recipe="adam", every=1)
    updates, state = jax.jit(optimizer.update)((), optimizer.init(()), ())
    assert updates == ()
    assert int(state.mean.step) == 1


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({}, "give a spec, or a recipe: adam"),
        ({"recipe": "adamw"}, "recipes for local steps are adam, sgd, got 'adamw'"),
        ({"recipe": "adam", "every": 0}, "every is a number of steps, at least 1; got 0"),
        ({"recipe": "adam", "every": 2.5}, "every is an int"),
        ({"recipe": "adam", "memory": "all"}, "memory is 'residual', 'parameters' or 'none', got 'all'"),
        ({"recipe": "adam", "topology": "ring"}, "ring"),
        ({"spec": "topr:0.01/nonsense/raw"}, "nonsense"),
        ({"recipe": "adam", "inner": 0.1}, "local_steps takes an optimizer of optax first, got 0.1"),
    ],
)
def test_wrong_options_are_refused(wrong, told):
    with pytest.raises(dr.ConfigError, match=told):
        local_steps(**{"inner": optax.adam(1e-3)} | wrong)


def test_what_does_not_fit_is_refused_by_name():
    optimizer = local_steps(optax.sgd(0.1), recipe="adam")
    with pytest.raises(dr.InputError, match=r"parameter \['count'\] holds float16.*got int32"):
        optimizer.init({"count": jnp.zeros(3, jnp.int32)})
    params = {"w": jnp.zeros(3)}
    state = optimizer.init(params)
    for call in (partial(optimizer.update, params, state), partial(optimizer.sync, None, state)):
        with pytest.raises(dr.InputError, match=r"optimizer\.update\(gradients, state, params\)"):
            call()
    with pytest.raises(dr.InputError, match=r"\['w'\] needs its anchor as float32 of shape \(4,\)"):
        optimizer.sync({"w": jnp.zeros(4)}, state)
    with pytest.raises(dr.InputError, match="residuals are a tree"):
        optimizer.update(params, state._replace(mean=state.mean._replace(residuals=None)), params)
    with pytest.raises(dr.InputError, match="anchors are a tree"):
        jax.jit(optimizer.sync)({"v": jnp.zeros(3)}, state)
