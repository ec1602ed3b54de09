"""Seeds of a step: no rank, tensor, step or run repeats the draws of another."""

from itertools import product

import numpy as np

import deepreduce as dr
from deepreduce.step.seeds import StepSeed


def test_no_two_draws_share_a_seed():
    names = [f"layer.{number}.weight" for number in range(10)]
    seeds = [StepSeed(run, step, rank).of(name) for run, step, rank, name in product(range(3), range(100), range(4), names)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**48 for seed in seeds)


def test_runs_are_not_each_other_shifted():
    first, second = ([StepSeed(run, step, 0).of("w") for step in range(50)] for run in (0, 1))
    assert not set(first) & set(second)


def test_a_shared_seed_is_the_same_on_all_ranks_and_no_ranks_own():
    shared = {StepSeed(0, 5, rank).of("w", shared=True) for rank in range(8)}
    assert len(shared) == 1
    assert not shared & {StepSeed(0, 5, rank).of("w") for rank in range(8)}


def test_tensors_of_a_message_do_not_repeat_the_draws_of_others():
    gradient = np.linspace(-1, 1, 5000, dtype=np.float32)
    codec = dr.parse("none/all/qsgd:3")
    decoded = [dr.decode_many(codec.encode_many(dict.fromkeys("abc", gradient), seed=step))[name] for step in range(3) for name in "abc"]
    assert len({tensor.tobytes() for tensor in decoded}) == 9
