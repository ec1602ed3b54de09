"""States come and go: copies, pickles, threads and connections, and what a failed call leaves behind."""

import copy
import gc
import os
import pickle
import threading
from datetime import timedelta

import pytest
import torch

import deepreduce as dr
from deepreduce.step import owner
from deepreduce.torch import DeepReduceState, allreduce_
from deepreduce.torch.transport import Gloo, without_group

from .ranks import run_ranks
from .tasks import flat, hooked, train

SPEC = "topr:0.05/rice/qsgd"


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def come_and_go(rank):
    """Threads and descriptors before and after twenty states, half of which were closed and half just dropped."""
    allreduce_(torch.ones(100), DeepReduceState(SPEC, small_tensor_numel=0))  # what torch itself opens once
    gc.collect()
    before = threading.active_count(), open_descriptors()
    for number in range(20):
        state = DeepReduceState(SPEC, small_tensor_numel=0, topology=("allgather", "server", "sharded")[number % 3])
        state.reduce(["w"], [torch.randn(1000)]).result()
        if number % 2:
            state.close()
        del state
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("deepreduce"):
            thread.join(10)
    return before, (threading.active_count(), open_descriptors())


def test_dropped_states_leave_no_threads_and_no_descriptors():
    for before, after in run_ranks(come_and_go, 2):
        assert after[0] <= before[0]
        assert after[1] <= before[1]


def stepped_copies(rank):
    """The parameters after going on with a state itself, with its copy, and with what was pickled of it."""
    state = DeepReduceState(SPEC, small_tensor_numel=16)
    before_any_step = copy.deepcopy(state)
    assert repr(before_any_step) == repr(state)
    model = hooked(state, bucket_cap_mb=25)
    state.bind(model)
    train(rank, model, 3)
    saved = copy.deepcopy(model.module.state_dict())
    twins = [copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
    train(rank, model, 3, start=3)
    results = [flat(model)]
    for twin in twins:
        again = hooked(twin, bucket_cap_mb=25)
        twin.bind(again)
        again.module.load_state_dict(saved)
        train(rank, again, 3, start=3)
        results.append(flat(again))
    return results


def test_copies_and_pickles_go_on_with_the_same_bits():
    for itself, copied, pickled in run_ranks(stepped_copies, 2):
        assert torch.equal(itself, copied)
        assert torch.equal(itself, pickled)


def test_a_pickled_state_asks_for_its_model():
    model = torch.nn.Linear(40, 50)
    state = pickle.loads(pickle.dumps(DeepReduceState(SPEC, model=model)))
    with pytest.raises(dr.ConfigError, match=r"state.bind\(model\)"):
        state.names.of(model.weight)
    state.bind(model)
    assert state.names.of(model.weight) == "weight"


def test_a_bad_input_spoils_nothing():
    state = DeepReduceState("topr:1/raw/raw", small_tensor_numel=0)
    allreduce_(torch.tensor([3.0, 2.0]), state)
    before = state.state_dict()
    with pytest.raises(dr.InputError, match="int32"):
        allreduce_(torch.ones(2, dtype=torch.int32), state)
    after = state.state_dict()
    assert after["step"] == before["step"] + 1  # as on the ranks that are told of it
    assert torch.equal(after["memory"]["residuals"]["tensor 0"], before["memory"]["residuals"]["tensor 0"])
    gradient = torch.tensor([3.0, 2.0])
    allreduce_(gradient, state)
    assert gradient.tolist() == [0, 4]


class NeedsLuck:
    """A policy that fails once, on one rank."""

    def __init__(self, fails):
        self.fails = fails

    def codec_for(self, name, source):
        if self.fails:
            self.fails = False
            raise LookupError("not today")
        return dr.parse("topr:1/raw/raw")


def unlucky(rank, topology, failing):
    state = DeepReduceState(NeedsLuck(rank == failing), topology=topology, small_tensor_numel=0)
    with pytest.raises((LookupError, dr.PeerError)) as failure:
        allreduce_(torch.tensor([3.0, 2.0]), state)
    gradient = torch.tensor([5.0, 1.0])
    allreduce_(gradient, state)
    return type(failure.value).__name__, str(failure.value), gradient.tolist()


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("topology", ["allgather", "server", "sharded"])
def test_a_failure_that_all_ranks_were_told_of_is_over_with_its_step(topology, failing):
    results = run_ranks(unlucky, 2, topology, failing)
    (own, said, same), (peer, told, mean) = results[failing], results[1 - failing]
    assert (own, peer) == ("LookupError", "PeerFailure")
    assert said == "not today"
    assert f"rank {failing} failed: LookupError: not today" in told
    assert mean == same == [5, 0]


def owner_failing(rank, topology, failing):
    """A rank fails once while it adds up what it was sent; the next step goes well."""
    mean = owner._mean

    def fail_once(*given):
        owner._mean = mean
        raise LookupError("not today")

    if rank == failing:
        owner._mean = fail_once
    return next_step(topology)


def next_step(topology):
    """What a failed step raises, and the mean of the one after it."""
    state = DeepReduceState("topr:0.5/raw/raw", topology=topology, small_tensor_numel=0, timeout=timedelta(seconds=10))
    with pytest.raises((LookupError, dr.CorruptError, dr.PeerError)) as failure:
        allreduce_(torch.ones(5000), state)
    gradient = torch.ones(5000)
    allreduce_(gradient, state)
    return type(failure.value).__name__, str(failure.value), int(gradient.sum())


@pytest.mark.parametrize(("topology", "failing"), [("server", 0), ("sharded", 0), ("sharded", 1)])
def test_a_failure_of_an_owner_is_over_with_its_step(topology, failing):
    results = run_ranks(owner_failing, 2, topology, failing)
    (own, said, mean), (peer, told, same) = results[failing], results[1 - failing]
    assert (own, peer) == ("LookupError", "PeerFailure")
    assert said == "not today"
    assert f"rank {failing} failed: LookupError: not today" in told
    assert mean == same > 0


def corrupted_once(rank, topology):
    """The message of rank 1 to the owner, rank 0, is changed on its way in the first step."""
    name = {"server": "gather", "sharded": "all_to_all"}[topology]
    send = getattr(Gloo, name)

    def change(self, outgoing, tag):
        setattr(Gloo, name, send)
        changed = [bytearray(frame) for frame in (outgoing if isinstance(outgoing, list) else [outgoing])]
        changed[0][-1] ^= 0xFF
        return send(self, [bytes(frame) for frame in changed] if isinstance(outgoing, list) else bytes(changed[0]), tag)

    if rank == 1:
        setattr(Gloo, name, change)
    return next_step(topology)


@pytest.mark.parametrize("topology", ["server", "sharded"])
def test_a_message_that_reached_an_owner_corrupt_is_over_with_its_step(topology):
    (own, said, mean), (peer, told, same) = run_ranks(corrupted_once, 2, topology)
    assert (own, peer) == ("CorruptError", "PeerFailure")
    assert "message of rank 1" in said
    assert "rank 0 failed: CorruptError: message of rank 1" in told
    assert mean == same > 0


def wrong_kind(rank, kind):
    """One rank has a gradient that cannot be sent."""
    wrong = {"dtype": torch.ones(50, 2, dtype=torch.int32), "layout": torch.eye(50, 2).to_sparse_csr()}[kind]
    state = DeepReduceState(SPEC, small_tensor_numel=0, timeout=timedelta(seconds=10))
    with pytest.raises((dr.InputError, dr.PeerError)) as failure:
        allreduce_(wrong if rank else torch.ones(50, 2), state)
    gradient = torch.ones(50, 2)
    allreduce_(gradient, state)
    return type(failure.value).__name__, str(failure.value), int(gradient.sum())


@pytest.mark.parametrize(
    ("kind", "why"), [("dtype", "float64, got torch.int32"), ("layout", "sparse COO tensor, got layout torch.sparse_csr")]
)
def test_a_gradient_of_a_wrong_kind_is_told_to_the_other_ranks(kind, why):
    (peer, told, mean), (own, said, same) = run_ranks(wrong_kind, 2, kind)
    assert (own, peer) == ("InputError", "PeerFailure")
    assert "rank 1 failed" in told
    assert why in told
    assert why in said
    assert mean == same > 0


def in_another_order(rank):
    names = ["a", "b"] if rank == 0 else ["b", "a"]
    with pytest.raises(dr.PeerError, match="tensors of the same names in the same order"):
        allreduce_([torch.ones(100), torch.zeros(100)], DeepReduceState(SPEC, timeout=timedelta(seconds=10)), names)


def test_tensors_of_equal_shapes_in_another_order_are_refused():
    run_ranks(in_another_order, 2)


def test_a_configuration_error_keeps_its_type():
    class Misspelled:
        def codec_for(self, name, source):
            return dr.parse("topr:1/rave/raw")

    with pytest.raises(dr.ConfigError, match=r"tensor 0: unknown index codec 'rave'"):
        allreduce_(torch.ones(4), DeepReduceState(Misspelled()))


def test_processes_that_would_train_apart_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    without_group.cache_clear()
    with pytest.raises(dr.ConfigError, match="WORLD_SIZE is 2, but there is no process group"):
        allreduce_(torch.ones(3), DeepReduceState("dense"))
