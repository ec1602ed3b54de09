"""Threads that share the tensors of a bucket: nothing of what a step gives may depend on how many there are."""

import copy
import gc
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import deepreduce as dr
from deepreduce.errors import ConfigError, FormatError, InputError
from deepreduce.step import items, threads
from deepreduce.step.items import OutgoingTensor, step_source
from deepreduce.step.policy import policy_of
from deepreduce.step.reducer import Bucket, ErrorFeedback, Reducer
from deepreduce.step.residual import ResidualMemory
from deepreduce.step.seeds import StepSeed
from deepreduce.step.threads import Threads, ranges
from deepreduce.step.topology import topology_of
from deepreduce.step.transport import SingleRank
from deepreduce.tensor import SparseTensor

SPECS = ["topr:0.01/rice/qsgd", "topr:0.01/bloom:p2,fpr=0.001/fitpoly", "randomr:0.1/seeded/raw", "nonzero/auto/fp16", "none/all/lloyd:2"]
BUCKETS = {
    "one": [(70, 90)],
    "two": [(3000,), (40_000,)],
    "many": [(40, 60), (7,), (2048,), (1,), (0,), (3, 5, 100), (40_000,), (1024,), (300, 300), (9, 9)],
}


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(threads, "usable_cores", lambda: [0, 1, 2, 3])


@pytest.fixture
def team():
    """Makes threads, and closes them after the test."""
    made = []

    def make(count):
        made.append(Threads(count))
        return made[-1]

    yield make
    for each in made:
        each.close()


def gradients(shapes, step):
    """Dense ones, one of half precision and one that is sparse, if there are so many; one is not used in some steps."""
    rng = np.random.default_rng(step)
    made = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    if len(made) > 2:
        made[2][:] *= step % 2
        made[-2] = made[-2].astype(np.float16)
        made[-1] = SparseTensor([3, 50], np.float32([step, -1]), shapes[-1])
    return made


def as_bytes(gradient):
    parts = [gradient.indices, gradient.values] if isinstance(gradient, SparseTensor) else [gradient]
    return [part.tobytes() for part in parts]


def trained(spec, topology, shapes, shared, memory=None):
    """The messages, the means and the residuals of some steps."""
    reducer, seen = Reducer(policy_of(spec, 1024), topology_of(topology), threads=shared), []
    memory = ErrorFeedback(memory or ResidualMemory(), ResidualMemory())
    names = [f"layer {number}" for number in range(len(shapes))]
    for step in range(4):
        bucket = Bucket(names, gradients(shapes, step), step)
        messages = reducer.prepare(bucket, memory, reducer.context(bucket, memory, SingleRank())).messages
        means, _ = reducer.reduce(bucket, memory, SingleRank())
        seen.append(([bytes(message.blob) for message in messages], list(map(as_bytes, means))))
    return seen, {name: as_bytes(held) for name, held in memory.own.residuals.items()}


@pytest.mark.parametrize("topology", ["allgather", "server", "sharded"])
@pytest.mark.parametrize("shapes", BUCKETS.values(), ids=BUCKETS)
@pytest.mark.parametrize("spec", SPECS)
def test_messages_means_and_residuals_have_the_same_bits(team, spec, shapes, topology):
    one, two, three = (trained(spec, topology, shapes, team(count)) for count in (1, 2, 3))
    assert one == two == three


@pytest.mark.parametrize("topology", ["allgather", "server", "sharded"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_thread_has_a_range_of_the_tensors(team, monkeypatch, count, topology):
    calls = []
    for name in ("encode_batch", "decode_batch"):
        counted = partial(lambda function, *given: calls.append(len(given[0])) or function(*given), getattr(items, name))
        monkeypatch.setattr(items, name, counted)
    arrays = [np.random.default_rng(number).standard_normal(3000).astype(np.float32) for number in range(6)]
    bucket = Bucket([f"layer {number}" for number in range(6)], arrays, 0)
    reducer = Reducer(policy_of(SPECS[0], 1024), topology_of(topology), threads=team(count))
    reducer.reduce(bucket, ErrorFeedback(None, None), SingleRank())
    tensors = [6, 6] if topology == "allgather" else [6, 6, 6, 12]  # to send and received; those of the owner, and all of both
    assert calls == [number // count for number in tensors for _ in range(count)]


def test_momentum_and_clipping_have_the_same_bits(team):
    one, three = (trained(SPECS[0], "allgather", BUCKETS["many"], team(count), ResidualMemory(momentum=0.9, clip=5.0)) for count in (1, 3))
    assert one == three


# Errors


class Refuses(dr.TopR):
    """A sparsifier that takes nothing."""

    def select(self, source, seed):
        raise InputError("not this one")

    def select_batch(self, sources, seeds):
        raise InputError("not these")


class OneFails:
    """A policy with a codec that fails for one tensor."""

    def __init__(self, name):
        self._name = name

    def codec_for(self, name, source):
        return replace(dr.parse(SPECS[0]), sparsifier=Refuses(1)) if name == self._name else dr.parse(SPECS[0])


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("number", [0, 3, 8])
def test_an_error_names_its_tensor(team, number, count):
    shapes = BUCKETS["many"][:-1]
    bucket = Bucket([f"layer {index}" for index in range(len(shapes))], [np.ones(shape, np.float32) for shape in shapes], 0)
    reducer = Reducer(OneFails(f"layer {number}"), topology_of("allgather"), threads=team(count))
    with pytest.raises(InputError, match=f"^layer {number}: not this one$"):
        reducer.reduce(bucket, ErrorFeedback(None, None), SingleRank())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_error_of_a_residual_names_its_tensor(team, count):
    shapes = [(40_000,), (50_000,), (60_000,)]
    memory = ResidualMemory.of({"layer 2": np.ones(5, np.float32)})
    bucket = Bucket([f"layer {index}" for index in range(3)], [np.ones(shape, np.float32) for shape in shapes], 0)
    reducer = Reducer(policy_of(SPECS[0], 1024), topology_of("allgather"), threads=team(count))
    with pytest.raises(InputError, match=r"^layer 2: 'layer 2' is float32 of shape \(60000,\), but its residual"):
        reducer.reduce(bucket, ErrorFeedback(memory, None), SingleRank())


@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_cannot_be_decoded_names_rank_and_tensor(team, count):
    arrays = [np.random.default_rng(number).standard_normal(3000).astype(np.float32) for number in range(6)]
    codec = dr.parse(SPECS[0])
    tensors = [OutgoingTensor(f"layer {number}", array, codec, step_source(array)) for number, array in enumerate(arrays)]
    (message,) = items.encode([tensors], StepSeed(0, 0, 7))
    records = list(message.records)
    records[4] = records[4]._replace(value_part=records[4].value_part[:-1])
    with pytest.raises(FormatError, match=r"^layer 4 of rank 7: "):
        items.decode([replace(message, records=records)], team(count))


def test_the_first_error_is_raised_when_no_thread_is_at_work_any_more(team):
    begun, done = threading.Event(), []

    def work(part):
        if part.start == 0:
            begun.wait(10)
            raise ValueError("first")
        begun.set()
        time.sleep(0.1)
        done.append(part)
        raise ValueError("second")

    with pytest.raises(ValueError, match="first"):
        team(2).share([np.ones(3), np.ones(3)], work)
    assert done == [slice(1, 2)]


# Who works


def test_threads_work_at_the_same_time(team):
    together = threading.Barrier(3)
    arrays = [np.ones(10)] * 3
    assert team(3).share(arrays, lambda part: [together.wait(10) >= 0]) == [True] * 3


def test_a_thread_that_is_busy_with_another_bucket_is_not_waited_for(team):
    shared, busy, go_on = team(2), threading.Event(), threading.Event()
    arrays, here = [np.ones(10)] * 2, threading.current_thread()

    def block(part):
        if part.start:
            busy.set()
            go_on.wait(10)
        else:
            busy.wait(10)
        return [threading.current_thread()]

    other = threading.Thread(target=shared.share, args=(arrays, block))
    other.start()
    busy.wait(10)
    try:
        assert shared.share(arrays, lambda part: [threading.current_thread()]) == [here, here]
    finally:
        go_on.set()
        other.join(10)


def test_one_thread_has_no_ranges():
    before = threading.active_count()
    assert Threads().share([np.ones(5)] * 4, lambda part: [part] * 4) == [slice(None)] * 4
    assert threading.active_count() == before


def test_tensors_of_a_device_are_left_to_the_thread_that_calls(team):
    arrays = [np.ones(5), object(), np.ones(5)]
    assert team(2).share(arrays, lambda part: [threading.current_thread()]) == [threading.current_thread()]


@pytest.mark.parametrize("sizes", [[1], [0, 0, 0], [5, 1, 1, 4], [0, 100, 0], [1] * 7, [9, 1, 1], [1, 1, 9], list(range(50))])
@pytest.mark.parametrize("count", [1, 2, 3, 8, 100])
def test_ranges_are_all_there_is_in_order_and_balanced(sizes, count):
    found = ranges(sizes, count)
    assert [index for part in found for index in range(len(sizes))[part]] == list(range(len(sizes)))
    assert 1 <= len(found) <= count
    assert all(part.start < part.stop for part in found)
    assert max(sum(sizes[part]) for part in found) <= sum(sizes) / count + max(sizes)


# Life


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "2", None])
def test_what_is_no_number_of_threads_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"^threads is an int of at least"):
        Threads(wrong)


def test_there_are_no_more_than_usable_cores():
    assert [len(Threads(count)) for count in (1, 3, 4, 5, 1000)] == [1, 3, 4, 4, 4]


def named():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("deepreduce thread")]


def test_closed_threads_end_and_start_again():
    shared, arrays = Threads(3), [np.ones(5)] * 3
    for _ in range(2):
        assert shared.share(arrays, lambda part: [1] * len(arrays[part])) == [1, 1, 1]
        assert len(named()) == 2
        shared.close()
        assert named() == []


def test_dropped_threads_end():
    Threads(2).share([np.ones(5)] * 2, lambda part: [part])
    for thread in threading.enumerate():
        if thread.name.startswith("deepreduce thread"):
            thread.join(10)
    assert named() == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
def test_a_copy_has_threads_of_its_own(team, copied, monkeypatch):
    reducer = Reducer(policy_of(SPECS[0], 1024), topology_of("allgather"), threads=team(6))
    reducer.threads.share([np.ones(5)] * 2, lambda part: [part])
    assert len(reducer.threads) == 4
    monkeypatch.setattr(threads, "usable_cores", lambda: range(64))
    again = copied(reducer)
    assert again.threads is not reducer.threads
    assert len(again.threads) == 6  # what was asked for, on a machine that has it


WORKS = """
    import os, threading
    import numpy as np
    from deepreduce.step import threads

    threads.usable_cores = lambda: [0, 1]
    shared, together = threads.Threads(2), threading.Barrier(2)

    def work():
        return shared.share([np.ones(5), np.ones(5)], lambda part: [together.wait(20)])

    assert sorted(work()) == [0, 1]
"""
FORKS = """
    child = os.fork()
    if child == 0:
        together = threading.Barrier(2)
        os._exit(0 if sorted(work()) == [0, 1] else 3)
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(work()) == [0, 1]
"""


@pytest.mark.parametrize("more", ["", pytest.param(FORKS, marks=pytest.mark.skipif(sys.platform == "win32", reason="no fork"))])
def test_a_process_ends_with_its_threads_and_a_forked_one_has_its_own(more):
    script = textwrap.dedent(WORKS) + textwrap.dedent(more)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_no_range_is_at_work_when_a_thread_cannot_start(team, monkeypatch):
    several, at_work, release = team(3), threading.Event(), threading.Event()
    arrays = [np.zeros(10) for _ in range(3)]

    def refuse(work):
        at_work.wait(10)
        release.set()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(several._workers[1], "submit", refuse)
    ended = []

    def work(part):
        at_work.set()
        release.wait(10)
        ended.append(part)
        return [None]

    with pytest.raises(RuntimeError, match="can't start"):
        several.share(arrays, work)
    assert len(ended) == 1


def test_an_error_keeps_no_tensor_alive(team):
    several, arrays, begun = team(2), [np.zeros(10), np.zeros(10)], threading.Event()
    held = weakref.ref(arrays[1])

    def work(part, arrays=arrays):
        if part.start:
            begun.set()
            raise ValueError(f"{arrays[part][0].size} elements")
        begun.wait(10)
        return [None]

    gc.disable()
    try:
        with pytest.raises(ValueError, match="10 elements"):
            several.share(arrays, work)
        several.close()
        del arrays, work
        assert held() is None
    finally:
        gc.enable()
