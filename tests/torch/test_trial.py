"""Never slower than dense: the fastest mode is found, on all ranks alike, and nothing is lost on the way."""

import logging

import pytest
import torch

from deepreduce.step.trial import Trial
from deepreduce.torch import DeepReduceState, ResidualMemory, allreduce_, dense

from .ranks import run_ranks
from .tasks import flat, hooked, train

SPEC = "topr:0.05/rice/raw"
FAST_LINK = {"compressed": 0.4, "dense": 0.2, "bf16": 0.25}
SLOW_LINK = {"compressed": 0.5, "dense": 9.0, "bf16": 4.5}
GATHERED = {"allgather": 0.7}  # by the spec without owners


class Simulated:
    """A clock that a step moves on by what its mode takes, with pauses between some steps."""

    def __init__(self, pauses=()):
        self.now, self.pauses = 0.0, pauses

    def __call__(self):
        return self.now

    def run(self, trial, steps, seconds, start=0, agree=list):
        modes = []
        for step in range(start, start + steps):
            modes.append(trial.next_mode(step, agree))
            self.now += seconds[modes[-1]] + (60.0 if step in self.pauses else 0.0)
        return modes


def test_all_ways_are_measured_and_close_ones_once_more():
    clock = Simulated(pauses=[0, 4, 8])  # the first step of each mode is not counted
    trial = Trial(clock=clock)
    modes = clock.run(trial, 40, FAST_LINK)
    assert modes == [*4 * ["compressed"], *4 * ["dense"], *4 * ["bf16"], *4 * ["dense"], *4 * ["bf16"], *20 * ["dense"]]
    assert trial.choice.seconds == pytest.approx(FAST_LINK)
    assert trial.choice.reason == "the first steps"


def test_what_cannot_win_is_not_measured():
    clock = Simulated()
    modes = clock.run(Trial(clock=clock), 20, SLOW_LINK)
    assert modes == [*4 * ["compressed"], *4 * ["dense"], *12 * ["compressed"]]


def test_bf16_is_chosen_where_it_is_the_fastest():
    clock = Simulated()
    assert clock.run(Trial(clock=clock), 40, {"compressed": 1.0, "dense": 1.5, "bf16": 0.9})[-1] == "bf16"


def test_a_link_that_becomes_slow_changes_the_way_within_fifty_steps(caplog):
    clock = Simulated()
    trial = Trial(clock=clock)
    assert clock.run(trial, 107, FAST_LINK)[-1] == "dense"
    with caplog.at_level(logging.INFO, "deepreduce"):
        modes = clock.run(trial, 50, SLOW_LINK, start=107)
    assert modes.count("dense") + modes.count("bf16") < 20
    assert set(modes[20:]) == {"compressed"}
    assert "a step takes 9,000.0 ms dense, 500.0 ms compressed" in str(trial.choice)
    assert "a link that changed: steps took 9,000.0 ms dense instead of 200.0" in str(trial.choice)
    assert str(trial.choice) in caplog.text


def test_an_evaluation_between_two_steps_is_not_a_slow_link():
    clock = Simulated(pauses=range(30, 500, 3))
    trial = Trial(clock=clock)
    clock.run(trial, 30, FAST_LINK)
    first = trial.choice
    assert set(clock.run(trial, 400, FAST_LINK, start=30)) == {"dense"}
    assert trial.choice is first


def test_the_ways_are_compared_again_but_trials_stay_cheap():
    clock = Simulated()
    trial = Trial(period=100, clock=clock)
    clock.run(trial, 30, FAST_LINK)
    first, changed = trial.choice.step, {"compressed": 0.1, "dense": 0.2, "bf16": 0.2}
    assert set(clock.run(trial, first + 400 - 30, FAST_LINK, start=30)) == {"dense"}  # 4 x 0.2 s and 8 x 0.05 s are 1% of 600 steps
    later = clock.run(trial, 250, changed, start=first + 400)
    assert later[-1] == "compressed"
    assert trial.choice.reason.startswith("a look after 600 steps")


def test_ranks_agree_only_in_trials_and_in_every_eighth_dense_step():
    clock, asked = Simulated(), []
    trial = Trial(clock=clock)
    modes = clock.run(trial, 100, FAST_LINK, agree=lambda numbers: asked.append(trial._asked) or numbers)
    first = trial.choice.step
    assert asked == [4, 8, 12, 16, 20, *range(first + 8, 100, 8)]
    asked.clear()
    clock.run(Trial(clock=clock), 100, SLOW_LINK, agree=lambda numbers: asked.append(0) or numbers)
    assert len(asked) == 2
    assert len(modes) == 100


class Scripted(Trial):
    """A trial whose clock says what each mode takes, whatever it takes here."""

    def __init__(self, seconds):
        super().__init__(clock=lambda: self.now, modes=tuple(seconds))
        self.seconds, self.now = seconds, 0.0

    def next_mode(self, step, agree):
        if step != self._asked and step > 0:
            self.now += self.seconds[self._mode]
        return super().next_mode(step, agree)


STEPS = 28
RATIOS = {1.0: "dense", 2.0: "bf16"}


def modes(rank, seconds, topology):
    state = DeepReduceState(SPEC, topology=topology, never_slower=True, small_tensor_numel=16)
    assert state._trial._modes == tuple(seconds)
    skewed = {mode: second * (1 + 0.01 * rank) for mode, second in seconds.items()}
    state._trial = Scripted(skewed)
    model = hooked(state, bucket_cap_mb=25)
    taken = []
    for step in range(STEPS):
        train(rank, model, 1, start=step)
        taken.append(RATIOS.get(state.stats().last.ratio, "compressed"))
    return taken, flat(model), str(state.stats().choice)


@pytest.mark.parametrize("topology", ["allgather", "server", "sharded"])
@pytest.mark.parametrize(
    ("seconds", "chosen"), [(FAST_LINK, "dense"), (SLOW_LINK, "compressed"), ({"compressed": 1.0, "dense": 1.5, "bf16": 0.5}, "bf16")]
)
def test_the_fastest_way_is_kept_on_all_ranks(seconds, chosen, topology):
    seconds = seconds if topology == "allgather" else seconds | GATHERED
    (ours, parameters, reason), (theirs, same, their_reason) = run_ranks(modes, 2, seconds, topology)
    assert ours == theirs
    assert ours[:8] == 4 * ["compressed"] + 4 * ["dense"]
    assert ours[-1] == chosen
    assert torch.equal(parameters, same)
    assert reason == their_reason
    assert reason.startswith(f"{chosen} from step")


@pytest.mark.parametrize("topology", ["server", "sharded"])
def test_the_spec_without_owners_is_kept_where_it_is_the_fastest(topology):
    seconds = {"compressed": 0.5, "dense": 9.0, "bf16": 4.5, "allgather": 0.3}
    (ours, parameters, reason), (theirs, same, _) = run_ranks(modes, 2, seconds, topology)
    assert ours == theirs == 4 * ["compressed"] + 4 * ["dense"] + 20 * ["compressed"]
    assert torch.equal(parameters, same)
    assert reason.startswith("allgather from step 12 on: a step takes 505.0 ms compressed, 9,090.0 ms dense, 303.0 ms allgather")


def sums_over_topologies(rank, topology, kind):
    """What was given, what came and what is left, over steps that have owners, steps that have none, and both again."""
    state = DeepReduceState(SPEC, topology=topology, never_slower=True, small_tensor_numel=16)
    given, got, owned = torch.zeros(2, 4000), torch.zeros(2, 4000), []
    for step in range(8):
        gradients = torch.randn(2, 4000, generator=torch.Generator().manual_seed(100 * step + rank))
        gradients[1] *= rank == 0 or step > 4  # rank 1 has no gradient of the second one, but may own some of it
        given += gradients
        tensors = [gradient.to_sparse() if kind == "sparse" else gradient for gradient in gradients.clone()]
        state.reduce_now(["a", "b"], tensors, mode="allgather" if step in (3, 4, 7) else "compressed")
        got += torch.stack([tensor.to_dense() for tensor in tensors])
        owned.append(len(state.memory.owned.residuals))
    left = [state.memory.own.residuals[name] for name in ("a", "b")]
    return given, got, torch.stack([torch.as_tensor(held.to_dense() if kind == "sparse" else held) for held in left]), owned


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("topology", ["server", "sharded"])
def test_a_change_of_topology_loses_no_residual(topology, kind):
    (mine, got, left, owned), (others, same, left_there, owned_there) = run_ranks(sums_over_topologies, 2, topology, kind)
    assert torch.equal(got, same)
    assert [step for step, counts in enumerate(zip(owned, owned_there, strict=True)) if sum(counts)] == [0, 1, 2, 5, 6]
    torch.testing.assert_close(got + (left + left_there) / 2, (mine + others) / 2, atol=1e-5, rtol=1e-5)


def bf16_means(rank):
    state = DeepReduceState(SPEC, never_slower=True, small_tensor_numel=16)
    state._trial = Scripted({"compressed": 1.0, "dense": 1.0, "bf16": 0.1})
    found = []
    for step in range(13):
        gradient = torch.full((400,), 1e-30 * (rank + 1)) if step < 12 else torch.full((400,), 1e30 * (rank + 1))
        allreduce_(gradient, state)
        found.append((state.stats().last.ratio, float(gradient[0])))
    return found


def test_bf16_loses_neither_small_nor_large_values():
    ours, theirs = run_ranks(bf16_means, 2)
    assert ours == theirs
    assert ours[11] == (2.0, pytest.approx(1.5e-30, rel=0.01))
    assert ours[12] == (2.0, pytest.approx(1.5e30, rel=0.01))


def sums(rank, overflow_step, topology):
    state = DeepReduceState(SPEC, topology=topology, never_slower=True, small_tensor_numel=16)
    given, got = torch.zeros(4000), torch.zeros(4000)
    for step in range(6):  # four of them compressed
        gradient = torch.randn(4000, generator=torch.Generator().manual_seed(100 * step + rank))
        if step == overflow_step:
            gradient *= float("inf") if rank == 1 else 1.0
            allreduce_(gradient, state)
            assert not bool(torch.isfinite(gradient).all())
            continue
        given += gradient
        allreduce_(gradient, state)
        got += gradient
    return given, got, state.stats().last.ratio


@pytest.mark.parametrize(("overflow_step", "topology"), [(None, "allgather"), (4, "allgather"), (None, "server"), (None, "sharded")])
def test_the_first_dense_step_that_is_not_lost_sends_all_residuals(overflow_step, topology):
    (mine, got, ratio), (others, same, _) = run_ranks(sums, 2, overflow_step, topology)
    assert ratio == 1
    assert torch.equal(got, same)
    torch.testing.assert_close(got, (mine + others) / 2, atol=1e-5, rtol=1e-5)


def test_an_unused_parameter_keeps_its_residual():
    state = DeepReduceState("topr:1/raw/raw", small_tensor_numel=0)
    allreduce_(torch.tensor([3.0, 2.0]), state)
    unused = torch.zeros(2)
    assert dense._flush(state, ["tensor 0"], [unused]) == []
    assert unused.tolist() == [0, 0]


def test_the_memory_of_buckets_cannot_be_flushed_to_owners():
    with pytest.raises(ValueError, match=r"never_slower with per='bucket' goes with topology 'allgather' only, got 'sharded'"):
        DeepReduceState(SPEC, topology="sharded", per="bucket", never_slower=True)


def test_momentum_is_for_compressed_steps():
    with pytest.raises(ValueError, match=r"momentum .* got momentum 0.9"):
        DeepReduceState(SPEC, memory=ResidualMemory(momentum=0.9), never_slower=True)


def sparse_sums(rank):
    """Sparse gradients, under which the first dense step must send the residual too."""
    state = DeepReduceState("topr:2/raw/raw", never_slower=True, small_tensor_numel=0)
    given, got = torch.zeros(40), torch.zeros(40)
    for step in range(8):  # four compressed, then four dense: so a trial begins, whatever the clock says
        places = torch.randint(0, 40, (5,), generator=torch.Generator().manual_seed(100 * step + rank)).unique()
        gradient = torch.sparse_coo_tensor(places[None], torch.ones(places.numel()), (40,), check_invariants=True)
        given += gradient.to_dense()
        allreduce_(gradient, state)
        got += gradient.to_dense()
    return given, got


def test_dense_steps_send_the_residuals_of_sparse_gradients():
    (mine, got), (others, same) = run_ranks(sparse_sums, 2)
    assert torch.equal(got, same)
    torch.testing.assert_close(got, (mine + others) / 2)


def test_a_stepped_state_takes_a_checkpoint_and_goes_on():
    state = DeepReduceState(SPEC, never_slower=True, small_tensor_numel=16)
    fresh = state.state_dict()
    for _ in range(5):
        allreduce_(torch.randn(100), state)
    state.load_state_dict(fresh)
    for _ in range(20):
        allreduce_(torch.randn(100), state)
    assert state.step == 20
