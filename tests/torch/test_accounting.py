"""Bytes: how many are sent, and what the stats say about them."""

import io

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

import deepreduce as dr
from deepreduce.step.frame import FrameTag, read_frames, write_frame
from deepreduce.torch import DeepReduceState, Sharded, allreduce_
from deepreduce.torch.names import Names
from deepreduce.torch.transport import connect

from .ranks import run_ranks

NUMEL = 60_000


def gradient(rank, step, numel=NUMEL):
    """A part that all ranks share, and noise of their own."""
    shared = torch.randn(numel, generator=torch.Generator().manual_seed(step))
    return shared + 2 * torch.randn(numel, generator=torch.Generator().manual_seed(1000 + 100 * step + rank))


def sent_bytes(rank, topology):
    state = DeepReduceState("topr:0.01/raw/raw", topology=topology)
    for step in range(3):
        allreduce_(gradient(rank, step), state)
    return state.stats().last.sent_bytes


def volumes(rank):
    return [sent_bytes(rank, topology) for topology in ("allgather", "sharded")]


def test_sharded_stays_flat_and_allgather_grows():
    found = {size: run_ranks(volumes, size) for size in (2, 4, 8)}
    gathered, sharded = ({size: sum(column) / size for size, column in zip(found, columns, strict=True)} for columns in _columns(found))
    assert max(sharded.values()) < 1.2 * min(sharded.values())
    assert gathered[8] > 3 * gathered[4] / 2 > 3 * gathered[2]


def _columns(found):
    return ([[row[kind] for row in rows] for rows in found.values()] for kind in (0, 1))


LENGTHS = [0, 5000, 100, 5200, 90_000, 1]


def letters(rank):
    """Messages whose lengths jump from step to step, and are different for every pair: no step knows how much room the next one needs."""
    transport, size = connect(None, None), dist.get_world_size()
    for step in range(len(LENGTHS)):
        tag = FrameTag("letters", channel=7, step=step, limit_bytes=300_000)
        frames = transport.all_to_all([write_frame(letter(step, rank, other), tag) for other in range(size)], tag)
        received = read_frames(frames, tag, rank)
        assert [bytes(message) for message in received] == [letter(step, other, rank) for other in range(size)]
    return transport.sent_bytes


def letter(step, sender, receiver):
    return bytes([step, sender, receiver]) * LENGTHS[(step + sender + 2 * receiver) % len(LENGTHS)]


def test_messages_of_any_length_reach_every_rank():
    for sender, sent_bytes in enumerate(run_ranks(letters, 3)):
        others = {0, 1, 2} - {sender}
        assert sent_bytes >= sum(len(letter(step, sender, other)) for step in range(len(LENGTHS)) for other in others)


def lossy_volumes(rank, topology):
    state = DeepReduceState("topr:0.01/raw/qsgd", topology=topology)
    for step in range(6):
        allreduce_(gradient(rank, step), state)
    return [step.sent_bytes for step in state.stats().steps]


@pytest.mark.parametrize("topology", ["server", "sharded"])
def test_what_owners_remember_does_not_swell_their_messages(topology):
    for first, *_, last in run_ranks(lossy_volumes, 2, topology):
        assert last < 1.1 * first


def summed(rank, topology):
    """What all steps together gave, and what they should have: what was not sent is in the residuals."""
    state = DeepReduceState("topr:0.05/raw/fp16", topology=topology)
    given, got = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for step in range(8):
        mine = gradient(rank, step)
        given += mine
        allreduce_(mine, state)
        got += mine
    held = state.state_dict()
    owned = list(held["owned"]["residuals"].values())
    return given, got, held["memory"]["residuals"]["tensor 0"], torch.cat(owned) if owned else None


@pytest.mark.parametrize("topology", ["allgather", "server", "sharded"])
def test_what_was_not_sent_is_in_the_residuals(topology):
    given, got, residuals, owned = zip(*run_ranks(summed, 4, topology), strict=True)
    parts = [part for part in owned if part is not None]
    at_owners = torch.cat(parts) if parts else 0.0
    assert all(torch.equal(one, got[0]) for one in got)
    torch.testing.assert_close(got[0] + sum(residuals) / 4 + at_owners, sum(given) / 4, rtol=0, atol=1e-4)


def test_a_budget_below_one_message_is_refused():
    with pytest.raises(ValueError, match="above 1"):
        Sharded(budget=1.0)


# Stats


@pytest.fixture
def measured():
    state = DeepReduceState("topr:0.01/rice/qsgd", history=2)
    for _ in range(3):
        allreduce_([torch.randn(200, 200), torch.randn(10)], state, names=["weight", "bias"])
    return state


def test_stats_of_a_step(measured):
    stats = measured.stats()
    assert [step.step for step in stats.steps] == [1, 2]
    last = stats.last
    assert last.dense_bytes == 4 * 40_010
    assert stats.dense_bytes == 3 * last.dense_bytes
    assert set(last.parameters) == {"weight", "bias"}
    assert last.parameters["weight"].nnz == 400
    assert 5 < last.parameters["weight"].bits_per_index < 10
    assert 2 < last.parameters["weight"].bits_per_value < 12
    assert last.parameters["bias"].bits_per_value == 32
    assert last.parameters["weight"].ratio > 50
    assert sum(part.message_bytes for part in last.parameters.values()) < last.message_bytes < 2000
    assert last.ratio == last.dense_bytes / last.message_bytes
    assert last.sent_bytes == 0  # there is nobody to send to
    assert min(last.encode_seconds, last.decode_seconds) > 0


def test_message_bytes_are_those_of_the_core():
    tensor = torch.randn(5000)
    state = DeepReduceState("topr:0.01/raw/raw")
    allreduce_(tensor.clone(), state)
    assert state.stats().last.message_bytes == len(dr.parse("topr:0.01/raw/raw").encode_many({"0": tensor.numpy()}))


def test_the_table_names_the_parameters(measured):
    console = Console(file=io.StringIO(), width=120)
    console.print(measured.stats().table())
    text = console.file.getvalue()
    assert "weight" in text
    assert "all, with headers" in text
    assert "more" not in text


def test_the_table_says_what_it_leaves_out(measured):
    console = Console(file=io.StringIO(), width=120)
    console.print(measured.stats().table(rows=1))
    assert "1 more" in console.file.getvalue()


def test_tensorboard_gets_all_numbers(measured):
    class Writer:
        def __init__(self):
            self.written = {}

        def add_scalar(self, tag, number, step):
            self.written[tag] = (number, step)

    writer = Writer()
    measured.stats().write(writer, parameters=True)
    assert writer.written["deepreduce/ratio"] == (measured.stats().last.ratio, 2)
    assert writer.written["deepreduce/parameters/bias"] == (40, 2)


# Lists, dtypes and sparse gradients


def test_a_list_of_tensors_and_no_memory():
    state = DeepReduceState("topr:2/raw/raw", memory="none", small_tensor_numel=3)
    tensors = [torch.tensor([1.0, -4.0, 2.0, -3.0]), torch.tensor([[1.0, 2.0]]), torch.empty(0)]
    allreduce_(tensors, state)
    assert torch.equal(tensors[0], torch.tensor([0.0, -4.0, 0.0, -3.0]))
    assert torch.equal(tensors[1], torch.tensor([[1.0, 2.0]]))
    assert state.state_dict()["memory"]["residuals"] == {}


def test_names_must_be_as_many_as_tensors():
    with pytest.raises(ValueError, match="2 tensors, but 1 names"):
        allreduce_([torch.ones(2), torch.ones(2)], DeepReduceState("dense"), names=["one"])


def test_tensors_do_not_share_a_residual():
    state, gradients = DeepReduceState("topr:1/raw/raw"), [torch.ones(3), torch.ones(3)]
    with pytest.raises(ValueError, match="needs a name of its own, got 'w' twice"):
        allreduce_(gradients, state, ["w", "w"])
    with pytest.raises(ValueError, match="a step of several calls needs names"):
        allreduce_(gradients, state, last=False)
    names, parameters = Names(), [torch.ones(1) for _ in range(3)]
    assert [names.of(parameter) for parameter in parameters] == ["parameter 0", "parameter 1", "parameter 2"]
    parameters[0] = torch.ones(1)
    assert names.of(parameters[0]) == "parameter 3"


def embeddings(rank, spec, topology):
    state = DeepReduceState(spec, topology=topology, small_tensor_numel=0)
    total, rows = torch.zeros(50, 6), torch.zeros(50, 6)
    for step in range(4):
        table = torch.nn.Embedding(50, 6, sparse=True)
        picked = torch.randint(0, 50, (5,), generator=torch.Generator().manual_seed(10 * step + rank))
        table(picked).square().sum().backward()
        mine = table.weight.grad
        rows += mine.to_dense()
        allreduce_(mine, state)
        total += mine.to_dense()
    return rows, total, mine.is_sparse


@pytest.mark.parametrize("topology", ["allgather", "server", "sharded"])
def test_sparse_gradients(topology):
    (mine, mean, is_sparse), (other, same, _) = run_ranks(embeddings, 2, "nonzero/raw/raw", topology)
    assert is_sparse
    assert torch.equal(mean, same)
    torch.testing.assert_close(mean, (mine + other) / 2)


def test_sparse_gradients_keep_their_residual():
    state = DeepReduceState("topr:1/raw/raw", small_tensor_numel=0)
    means = []
    for _ in range(2):
        gradient = torch.sparse_coo_tensor([[0, 2]], [3.0, 2.0], (4,), check_invariants=True)
        allreduce_(gradient, state)
        means.append(gradient.to_dense())
    assert torch.equal(means[0], torch.tensor([3.0, 0.0, 0.0, 0.0]))
    assert torch.equal(means[1], torch.tensor([0.0, 0.0, 4.0, 0.0]))

    resumed = DeepReduceState("topr:1/raw/raw", small_tensor_numel=0)
    resumed.load_state_dict(state.state_dict())
    gradient = torch.sparse_coo_tensor([[1]], [1.0], (4,), check_invariants=True)
    allreduce_(gradient, resumed)
    assert torch.equal(gradient.to_dense(), torch.tensor([3.0, 0.0, 0.0, 0.0]))


def dense_buffers(rank):
    """The means of tensors of several kinds by a dense allreduce, and the dtypes of what was sent."""
    sent, all_reduce = [], dist.all_reduce

    def noting(buffer, **options):
        sent.append((buffer.dtype, buffer.layout))
        return all_reduce(buffer, **options)

    dist.all_reduce = noting
    tensors = [
        torch.full((4,), 1.0 + rank),
        torch.full((3, 2), 3.0 + rank, dtype=torch.float64),
        torch.arange(6.0).reshape(2, 3).t() + rank,
        torch.full((2,), float(rank)).to_sparse(),
        torch.full((), 5.0 + rank),
        torch.full((2, 2), 7.0 + rank, dtype=torch.float64).t(),
    ]
    state = DeepReduceState("dense", topology="dense")
    allreduce_(tensors, state)
    return [tensor.to_dense().tolist() for tensor in tensors], sent, state.step, state.stats().last.dense_bytes


def test_dense_tensors_of_a_dtype_are_one_allreduce():
    for means, sent, step, dense_bytes in run_ranks(dense_buffers, 2):
        assert means == [[1.5] * 4, [[3.5, 3.5]] * 3, [[0.5, 3.5], [1.5, 4.5], [2.5, 5.5]], [0.5, 0.5], 5.5, [[7.5, 7.5]] * 2]
        assert sent == [(torch.float32, torch.strided), (torch.float64, torch.strided), (torch.float32, torch.sparse_coo)]
        assert step == 1
        assert dense_bytes == 4 * 11 + 8 * 10 + 4 * 2
