"""One process is enough to see what the transformation does to trees, dtypes and residuals, and what it refuses."""

import os
from collections import OrderedDict
from datetime import timedelta

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import deepreduce as dr
from deepreduce.jax import CompressedMeanState, PeerError, Sharded, compressed_mean, transport
from deepreduce.step import threads
from deepreduce.step.seeds import StepSeed

SPEC = "topr:0.05/rice/qsgd"
HOW = pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])


def updater(mean, jitted):
    return jax.jit(mean.update) if jitted else mean.update


def noise(shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@HOW
@pytest.mark.parametrize(
    "tree",
    [
        noise((30, 50)),
        {"b": noise(3), "a": [noise(2000), None, (noise(()), noise((0, 4)))]},
        CompressedMeanState(noise(5), OrderedDict(z=noise(1500), y=optax.MaskedNode())),
        (),
    ],
    ids=["array", "nested", "named tuple", "empty"],
)
def test_a_tree_of_any_structure_comes_back_as_it_was(tree, jitted):
    mean = compressed_mean("none/all/raw")
    ours, state = updater(mean, jitted)(tree, mean.init(tree))
    assert jax.tree.structure(ours) == jax.tree.structure(tree)
    for before, after in zip(jax.tree.leaves(tree), jax.tree.leaves(ours), strict=True):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
        np.testing.assert_array_equal(before, after)
    assert int(state.step) == 1
    assert not any(map(np.any, jax.tree.leaves(state.residuals)))


@HOW
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_what_was_not_sent_is_the_residual_in_every_dtype(dtype, jitted):
    with jax.enable_x64(dtype == "float64"):
        gradient = noise(4000, dtype)
        mean = compressed_mean("topr:0.05/rice/raw")
        update, state = updater(mean, jitted), mean.init(gradient)
        assert state.residuals.dtype == ("float64" if dtype == "float64" else "float32")
        total = np.zeros(4000)
        for _ in range(3):
            sent, state = update(gradient, state)
            assert sent.dtype == dtype
            total += np.asarray(sent, np.float64)
        residual = np.asarray(state.residuals, np.float64)
        np.testing.assert_allclose(total + residual, 3 * np.asarray(gradient, np.float64), rtol=1e-6, atol=1e-5)
        assert np.count_nonzero(residual)


@HOW
def test_residuals_are_those_of_the_core(jitted):
    mean, memory, codec = compressed_mean(SPEC, seed=3), dr.ResidualMemory(), dr.parse(SPEC)
    update = updater(mean, jitted)
    state = mean.init(noise(3000))
    for step in range(4):
        gradient = noise(3000, seed=step)
        sent, state = update(gradient, state)
        compensated = memory.compensate("w", np.asarray(gradient))
        expected = dr.decode_sparse(codec.encode(compensated, seed=StepSeed(3, step, rank=0).of("")))
        memory.update("w", compensated, expected)
        np.testing.assert_array_equal(sent, expected.to_dense())
        np.testing.assert_array_equal(state.residuals, memory.state_dict()["residuals"]["w"])


@HOW
def test_threads_change_nothing(jitted, monkeypatch):
    monkeypatch.setattr(threads, "usable_cores", lambda: [0, 1, 2])
    tree, seen = {"a": noise(40_000), "b": noise((50, 60), seed=1), "c": noise(7, seed=2), "d": noise((300, 200), seed=3)}, []
    for count in (1, 3):
        mean = compressed_mean(SPEC, threads=count)
        state = mean.init(tree)
        for _ in range(3):
            updates, state = updater(mean, jitted)(tree, state)
        seen.append([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((updates, state.residuals))])
    assert seen[0] == seen[1]


@HOW
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_step_that_is_not_finite_leaves_no_trace(value, jitted):
    mean = compressed_mean(SPEC)
    update, gradient = updater(mean, jitted), {"w": noise(3000), "b": noise(10)}
    _, before = update(gradient, mean.init(gradient))
    means, after = update({"w": gradient["w"].at[7].set(value), "b": gradient["b"]}, before)
    assert not np.isfinite(means["w"][7])
    for name in gradient:
        np.testing.assert_array_equal(before.residuals[name], after.residuals[name])


@HOW
def test_bytes_are_counted(jitted):
    mean = compressed_mean("topr:0.01/raw/fp16", history=2)
    update, gradient = updater(mean, jitted), {"w": noise((100, 100)), "b": noise(10)}
    state = mean.init(gradient)
    for _ in range(3):
        _, state = update(gradient, state)
    jax.block_until_ready(state)
    jax.effects_barrier()
    stats = mean.stats()
    assert [step.step for step in stats.steps] == [1, 2]
    assert stats.dense_bytes == 3 * 40_040
    assert stats.sent_bytes == 0  # nobody else is there
    weight = stats.last.parameters["['w']"]
    assert (weight.nnz, weight.value_bytes, weight.dense_bytes) == (100, 200, 40_000)
    assert stats.last.parameters["['b']"].message_bytes == 40
    assert 240 < stats.last.message_bytes < 800
    assert stats.last.scalars()["ratio"] == 40_040 / stats.last.message_bytes


def test_it_composes_and_learns_without_memory_too():
    for memory in ("residual", "none"):
        optimizer = optax.chain(optax.clip(1.0), compressed_mean("topr:0.2/rice/fp16", memory, small_tensor_numel=0), optax.adam(0.1))
        target = noise(200)
        params, step = jnp.zeros(200), jax.jit(optimizer.update)
        state = optimizer.init(params)
        for _ in range(60):
            updates, state = step(params - target, state, params)
            params = optax.apply_updates(params, updates)
        assert float(jnp.abs(params - target).mean()) < 0.3 * float(jnp.abs(target).mean())


def test_a_policy_may_choose_by_name():
    class OnlyEmbeddings:
        def codec_for(self, name, source):
            return dr.parse("topr:1/raw/raw" if "embedding" in name else "dense")

    mean = compressed_mean(OnlyEmbeddings())
    gradient = {"embedding": jnp.array([1.0, 5.0]), "head": jnp.array([1.0, 5.0])}
    means, _ = mean.update(gradient, mean.init(gradient))
    assert means["embedding"].tolist() == [0, 5]
    assert means["head"].tolist() == [1, 5]


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": "all"},
        {"seed": -1},
        {"seed": 1.5},
        {"seed": None},
        {"timeout": 300},
        {"threads": 0},
        {"threads": 1.5},
        {"history": 0},
        {"history": "a"},
        {"topology": "ring"},
        {"topology": None},
        {"timeout": timedelta()},
        {"small_tensor_numel": -1},
        {"small_tensor_numel": "7"},
        {"spec": "topr:0.01/nonsense/raw"},
        {"spec": None},
        {"spec": dr.TopR(1)},
    ],
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(dr.ConfigError):
        compressed_mean(**{"spec": SPEC} | wrong)


def test_what_does_not_fit_is_refused_by_name():
    mean = compressed_mean(SPEC)
    with pytest.raises(dr.InputError, match=r"\['count'\] holds float16.*got int32"):
        mean.init({"count": jnp.zeros(3, jnp.int32)})
    state = mean.init({"w": jnp.zeros(3)})
    with pytest.raises(dr.InputError, match=r"\['w'\] needs its residual as float32 of shape \(4,\)"):
        mean.update({"w": jnp.zeros(4)}, state)
    with pytest.raises(dr.InputError, match="tree"):
        jax.jit(mean.update)({"v": jnp.zeros(3)}, state)


@HOW
@pytest.mark.parametrize("topology", ["allgather", "server", "sharded", Sharded(budget=2.0)], ids=str)
def test_alone_every_topology_sends_what_allgather_does(topology, jitted):
    gradient = {"w": noise((40, 50)), "b": noise(3), "s": noise(())}
    mean = compressed_mean("topr:0.05/rice/raw", topology=topology)
    update, state, total = updater(mean, jitted), mean.init(gradient), jax.tree.map(jnp.zeros_like, gradient)
    assert (state.owned is None) == (topology == "allgather")
    for _ in range(3):
        means, state = update(gradient, state)
        total = jax.tree.map(jnp.add, total, means)
    for name in gradient:
        np.testing.assert_allclose(total[name] + state.residuals[name], 3 * gradient[name], rtol=1e-5, atol=1e-5)
        assert state.owned is None or state.owned[name].shape == (gradient[name].size,)


def test_owners_residuals_that_do_not_fit_are_refused():
    mean, gradient = compressed_mean(SPEC, topology="sharded"), {"w": jnp.ones(4)}
    state = mean.init(gradient)
    with pytest.raises(dr.InputError, match=r"\['w'\] needs the residual that this process owns .* shape \(4,\).* shape \(2,\)"):
        mean.update(gradient, state._replace(owned={"w": jnp.zeros(2)}))
    with pytest.raises(dr.InputError, match="tree"):
        mean.update(gradient, state._replace(owned=None))


def test_what_is_sent_of_an_embedding_stays_in_proportion_to_what_is_touched():
    mean, draw, sizes = compressed_mean("nonzero/auto/qsgd"), np.random.default_rng(0), []
    state = mean.init(jnp.zeros((20_000, 16)))
    for _ in range(60):
        gradient = np.zeros((20_000, 16), np.float32)
        gradient[draw.choice(20_000, 200, replace=False)] = draw.standard_normal((200, 16))
        _, state = mean.update(jnp.asarray(gradient), state)
        sizes.append(mean.stats().last.message_bytes)
    assert max(sizes) < 1.2 * sizes[0]


def test_a_policy_that_fails_comes_out_as_itself():
    class Broken:
        def codec_for(self, name, source):
            return {}[name]

    mean, ones = compressed_mean(Broken()), {"w": jnp.ones(3)}
    with pytest.raises(KeyError, match=r"\['w'\]"):
        mean.update(ones, mean.init(ones))


def test_a_jax_without_the_store_is_named(monkeypatch):
    class Client:
        key_value_set_bytes = None

    from jax._src import distributed

    monkeypatch.setattr(distributed.global_state, "client", Client())
    with pytest.raises(PeerError, match=rf"found JAX {jax.__version__}, without blocking_key_value_get_bytes, key_value_delete"):
        transport.store()
    monkeypatch.delattr(distributed, "global_state")
    with pytest.raises(PeerError, match="call update outside jit"):
        transport.store()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores are counted otherwise here")
def test_one_core_is_warned_of(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    mean = compressed_mean(SPEC)
    with pytest.warns(RuntimeWarning, match="jax_cpu_enable_async_dispatch"):
        jax.jit(mean.update)(jnp.ones(3), mean.init(jnp.ones(3)))
