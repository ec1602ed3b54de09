"""Two real processes: they agree bit for bit, they go on from a checkpoint, and they tell each other what went wrong."""

import numpy as np
import pytest

from deepreduce.step.frame import HEADER_BYTES

from . import tasks

HOW = pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])


@HOW
@pytest.mark.parametrize("spec", ["topr:0.01/rice/qsgd", "topr:0.01/bloom:p2/qsgd"])
def test_replicas_are_bit_identical_after_50_steps(pair, spec, jitted):
    (weights, residuals, moved, counted), (other_weights, other_residuals, _, other_counted) = pair.run(tasks.train, spec, 50, jitted)
    assert weights == other_weights
    assert residuals != other_residuals  # each has its own data
    assert moved > 1
    for message_bytes, dense_bytes, sent_bytes in (counted, other_counted):
        assert dense_bytes == 50 * 4 * (64 * 96 + 96 * 10 + 10)
        assert message_bytes < dense_bytes / 4  # the second layer and the bias travel dense
        assert message_bytes < sent_bytes < 1.5 * message_bytes


@HOW
@pytest.mark.parametrize("topology", ["server", "sharded"])
def test_replicas_are_bit_identical_with_owners(pair, topology, jitted):
    answers = pair.run(tasks.train, "topr:0.01/rice/qsgd", 20, jitted, topology)
    (weights, residuals, moved, _), (other_weights, other_residuals, _, _) = answers
    assert weights == other_weights
    assert residuals != other_residuals
    assert moved > 0.5


@HOW
def test_updates_of_adam_are_compressed(pair, jitted):
    (weights, moments, loss, nnz), (other_weights, other_moments, _, _) = pair.run(tasks.train_updates, "topr:0.01/rice/qsgd", 60, jitted)
    assert weights == other_weights
    assert moments != other_moments  # each process has an Adam of its own
    assert nnz == round(0.01 * 64 * 96)
    assert loss < 1.95  # 2.3 at the start


def test_uncompressed_updates_of_adam_are_the_mean_of_updates(pair):
    for ours, expected in pair.run(tasks.mean_of_updates):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-6)


@HOW
def test_the_identity_codec_gives_the_mean_of_jax(pair, jitted):
    answers = pair.run(tasks.identity, jitted)
    limits = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-10}  # the halves are rounded once at the end
    for distances, same_tree, _ in answers:
        assert same_tree
        for theirs in distances.values():
            assert all(distance <= limits[dtype] for dtype, distance in theirs), theirs
    assert answers[0][2] == answers[1][2]


@HOW
@pytest.mark.parametrize(("topology", "forgotten"), [("allgather", "residuals"), ("server", "owned"), ("sharded", "owned")])
def test_a_checkpoint_goes_on_bit_for_bit(pair, tmp_path, jitted, topology, forgotten):
    resumed = pair.run(tasks.resume, str(tmp_path), jitted, topology, forgotten)
    for whole, restored, forgetful in resumed:
        assert whole == restored
        assert whole != forgetful  # residuals matter


@HOW
def test_an_infinity_reaches_all_and_leaves_no_trace(pair, jitted):
    answers = pair.run(tasks.lost_step, jitted)
    for mean_is_finite, step, residuals_untouched, next_is_finite, _ in answers:
        assert not mean_is_finite
        assert step == 2
        assert residuals_untouched
        assert next_is_finite
    assert answers[0][-1] == answers[1][-1]


@HOW
@pytest.mark.parametrize("topology", ["allgather", "server", "sharded"])
def test_a_failure_is_told_to_all_and_they_go_on(pair, jitted, topology):
    here, there = pair.run(tasks.one_fails, jitted, topology)
    assert "rank 1 failed: InputError: ['w']: this process refuses" in here
    assert "['w']: this process refuses" in there
    assert "PeerFailure" in here
    assert "PeerFailure" not in there
    assert pair.run(tasks.sizes, [3]) == [(True, 256, HEADER_BYTES + 6), (True, 256, HEADER_BYTES + 12)]


def test_messages_of_all_sizes_arrive(pair):
    lengths = [0, 1, 100, 5000, 200_000, 30, 100, 6000]
    for right, _, _ in pair.run(tasks.sizes, lengths):
        assert right


def test_every_exchange_of_both_transports(pair):
    for right, (_, kept_in_the_store) in pair.run(tasks.every_exchange, 5):
        assert right
        assert kept_in_the_store <= 2  # what the last exchanges left, however many there were


def test_processes_that_are_not_in_step_are_told(pair):
    here, there = pair.run(tasks.out_of_step)
    assert "rank 1 is at step 4" in here
    assert "rank 0 is at step 3" in there


def test_a_process_that_does_not_come_in_time_is_named(pair):
    here, there = pair.run(tasks.alone)
    assert "rank 0 got nothing from rank 1" in here
    assert there == "[b'early', b'late']"
