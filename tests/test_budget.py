"""Messages of recorded gradients take what was asked for."""

import numpy as np
import pytest

import deepreduce as dr
from deepreduce.lab import data
from deepreduce.step.budget import expected_bytes
from deepreduce.step.policy import policy_of
from deepreduce.step.reducer import Bucket, ErrorFeedback, Reducer
from deepreduce.step.topology import AllGather
from deepreduce.step.transport import SingleRank

BUDGETS = (0.002, 0.005, 0.01, 0.03, 0.0625, 0.1, 0.14, 0.2, 0.25)
"""As parts of dense gradients."""


@pytest.mark.parametrize("name", data.NAMES)
@pytest.mark.parametrize("part", BUDGETS)
def test_messages_of_recorded_gradients_take_what_was_asked_for(name, part):
    gradients = data.load(name)
    budget_bytes = part * sum(gradient.nbytes for gradient in gradients.values())
    policy = dr.budgeted(budget_bytes, [gradient.size for gradient in gradients.values()])
    reducer, memory = Reducer(policy_of(policy, 1024), AllGather()), ErrorFeedback(dr.ResidualMemory(), None)
    for step in range(2):  # the second one has residuals
        bucket = Bucket(list(gradients), [gradient.copy() for gradient in gradients.values()], step)
        _, cost = reducer.reduce(bucket, memory, SingleRank())
        assert cost.message_bytes == pytest.approx(budget_bytes, rel=0.1), (str(policy.large), step)


@pytest.mark.parametrize("spec", ["none/all/raw", "none/all/bf16", "none/all/lloyd:2", "topr:0.01/rice/qsgd", "topr:500/rice/fp16",
                                  "randomr:0.02/seeded/qsgd:4", "chunktopr:41,chunk=4096/rice/raw",
                                  "topr:0.01/raw/raw", "topr:0.1/bitmap/fp16"])  # fmt: skip
def test_the_size_of_a_message_is_foretold(spec):
    codec, gradients = dr.parse(spec), data.load("gpt")
    expected = sum(expected_bytes(codec, gradient.size) for gradient in gradients.values())
    assert expected == pytest.approx(len(codec.encode_many(gradients)), rel=0.06, abs=150)  # names and seeds


@pytest.mark.parametrize(
    ("spec", "stage"),
    [
        ("threshold:0.1/rice/qsgd", "sparsifier"),
        ("nonzero/auto/qsgd", "sparsifier"),
        ("topr:0.01/bloom:p2,fpr=0.01/raw", "index codec"),
        ("topr:0.01/all/raw", "index codec"),
        ("topr:0.01/rice/deflate", "value codec"),
    ],
)
def test_what_depends_on_the_values_is_not_foretold(spec, stage):
    with pytest.raises(dr.ConfigError, match=f"not known beforehand, because of its {stage}: use "):
        expected_bytes(dr.parse(spec), 1000)


def test_more_bytes_are_all_used():
    sizes = [1_000_000, 10]
    specs = [str(dr.budgeted(4 * part * sum(sizes), sizes).large) for part in (0.01, 0.3, 0.6, 1.1)]
    assert specs == ["topr:0.0304/rice/qsgd:4", "none/all/qsgd:8", "none/all/fp16", "none/all/raw"]


def test_small_tensors_travel_as_they_are_where_they_take_little():
    assert dr.budgeted(10_000, [100_000, 500]).numel == 1024
    assert dr.budgeted(5_000, [100_000, 500]).numel == 0


def test_a_model_of_small_tensors_has_a_policy():
    policy = dr.budgeted(100_000, [500, 10])
    blob = policy.encode_many({"w": np.ones(500, np.float32)})
    assert dr.decode_many(blob)["w"].tolist() == [1] * 500


@pytest.mark.parametrize(("budget", "sizes"), [(0, [10]), (-1, [10]), (float("nan"), [10]), (None, [10]), ("1k", [10]),
                                               (100, []), (100, [0]), (100, [-5])])  # fmt: skip
def test_a_budget_is_above_zero(budget, sizes):
    with pytest.raises(dr.ConfigError):
        dr.budgeted(budget, sizes)


def test_too_few_bytes_are_refused():
    with pytest.raises(dr.ConfigError, match=r"100 bytes are too few: one element of each of 100 tensors takes [\d,]+"):
        dr.budgeted(100, [5000] * 100)
