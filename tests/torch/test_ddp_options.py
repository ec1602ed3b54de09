"""The hook under the options of DDP: without compression the result must be that of plain DDP under the same options."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deepreduce.step.trial import Trial
from deepreduce.torch import DeepReduceState, deepreduce_hook, noop_hook

from .ranks import run_ranks
from .tasks import batch, flat, network, train

OPTIONS = [
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"bucket_cap_mb": 0.001},
    {"bucket_cap_mb": 25},
]


class Branches(torch.nn.Module):
    """The second branch is used in every other step only, and never by rank 0; the third one never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self.third = (torch.nn.Linear(20, 30) for _ in range(3))

    def forward(self, inputs, second):
        return self.first(inputs) + (self.second(inputs) if second else 0)


def with_hook(model, spec="none/all/raw", **options):
    """The model under DDP; the spec "never_slower" sends all values, in the first four steps by a codec, in the others by an allreduce."""
    model = DistributedDataParallel(model, **options)
    if spec == "never_slower":
        state = DeepReduceState("none/all/raw", small_tensor_numel=16, never_slower=True)
        state._trial = Trial(modes=("compressed", "dense"))
        model.register_comm_hook(state, deepreduce_hook)
    elif spec:
        model.register_comm_hook(DeepReduceState(spec, small_tensor_numel=16), deepreduce_hook)
    return model


def branches(rank, spec, set_to_none=True):
    model = with_hook(Branches(), spec, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad(set_to_none)
        model(batch(rank, step)[0], second=rank == 1 and step % 2 == 0).square().mean().backward()
        optimizer.step()
    return flat(model)


def accumulated(rank, spec, set_to_none=True):
    model = with_hook(network(), spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        with model.no_sync():
            torch.nn.functional.cross_entropy(model(batch(rank, 2 * step)[0]), batch(rank, 2 * step)[1]).backward()
        torch.nn.functional.cross_entropy(model(batch(rank, 2 * step + 1)[0]), batch(rank, 2 * step + 1)[1]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none)
    return flat(model)


def uneven(rank, spec, **options):
    """Two passes over data of which rank 1 has more; gradients are kept from step to step, and zeroed after it."""
    model = with_hook(network(), spec, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for first in (0, 20):
        with model.join(divide_by_initial_world_size=True):
            for step in range(first, first + 5 + 2 * rank):
                inputs, targets = batch(rank, step)
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
    return flat(model)


def strided(rank, spec):
    """Parameters that are not laid out row by row."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 1), torch.nn.Flatten(), torch.nn.Linear(64, 5)]
    layers[3].weight = torch.nn.Parameter(layers[3].weight.detach().t().contiguous().t())
    model = with_hook(torch.nn.Sequential(*layers).to(memory_format=torch.channels_last), spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(7):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
        optimizer.step()
    return flat(model)


def in_one_flat_gradient(rank, spec):
    """Gradients are views of one tensor of the user's, which is what the parameters are updated by."""
    model = with_hook(network(), spec)
    parameters = list(model.parameters())
    gradient = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in zip(parameters, gradient.split([parameter.numel() for parameter in parameters]), strict=True):
        parameter.grad = part.view_as(parameter)
    for step in range(7):
        gradient.zero_()
        inputs, targets = batch(rank, step)
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        with torch.no_grad():
            for parameter, part in zip(parameters, gradient.split([parameter.numel() for parameter in parameters]), strict=True):
                parameter -= 0.1 * part.view_as(parameter)
    return flat(model)


def with_options(rank, spec):
    found = []
    for options in OPTIONS:
        model = with_hook(network(), spec, **options)
        train(rank, model, 6)
        found.append(flat(model))
    return found


def every_way(rank):
    return [
        [
            *with_options(rank, spec),
            branches(rank, spec),
            branches(rank, spec, set_to_none=False),
            accumulated(rank, spec),
            accumulated(rank, spec, set_to_none=False),
            uneven(rank, spec),
            uneven(rank, spec, gradient_as_bucket_view=True),
            strided(rank, spec),
            in_one_flat_gradient(rank, spec),
        ]
        for spec in (None, "none/all/raw", "never_slower")
    ]


def test_options_of_ddp():
    for plain, *hooked in run_ranks(every_way, 2):
        for found in hooked:
            for one, other in zip(plain, found, strict=True):
                assert torch.equal(one, other)


def shared_storages(rank):
    model = with_hook(network(), "never_slower")
    train(rank, model, 6)
    for parameter in model.parameters():
        parameter.grad.detach_()  # as some clipping code does
    return len({parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()})


def test_with_never_slower_gradients_lie_in_one_buffer():
    assert run_ranks(shared_storages, 2) == [1, 1]


def compressed_ways(rank):
    spec = "topr:0.1/raw/fp16"
    return [*with_options(rank, spec), branches(rank, spec), accumulated(rank, spec), uneven(rank, spec)]


def test_options_of_ddp_with_compression():
    for one, other in zip(*run_ranks(compressed_ways, 2), strict=True):
        assert torch.equal(one, other)
        assert bool(torch.isfinite(one).all())


class Mixed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(40, 40).to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32))

    def forward(self, inputs):
        return sum(layer(inputs.to(layer.weight.dtype)).float() for layer in self.layers)


def mixed_dtypes(rank):
    model = with_hook(Mixed(), "topr:0.1/raw/raw")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
        optimizer.step()
    return flat(model)


def test_parameters_of_mixed_dtypes():
    one, other = run_ranks(mixed_dtypes, 2)
    assert torch.equal(one, other)
    assert bool(torch.isfinite(one).all())


def in_pairs(rank):
    pair = [0, 1] if rank < 2 else [2, 3]
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = groups[rank // 2]
    state = DeepReduceState("topr:0.1/raw/raw", process_group=group, topology="sharded", small_tensor_numel=16)
    model = DistributedDataParallel(network(), process_group=group)
    model.register_comm_hook(state, deepreduce_hook)
    train(rank, model, 4)
    return pair, flat(model)


def test_sub_groups_do_not_mix():
    results = [parameters for _, parameters in run_ranks(in_pairs, 4)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[2], results[3])
    assert not torch.equal(results[0], results[2])


def headroom(rank):
    model = DistributedDataParallel(network())
    model.register_comm_hook(None, noop_hook)
    train(rank, model, 2)
    return flat(model)


def test_the_no_op_hook_does_not_communicate():
    one, other = run_ranks(headroom, 2)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"topology": "ring"}, "topology is one of allgather, server, sharded or dense"),
        ({"memory": "all"}, "memory is 'residual', 'none' or a ResidualMemory"),
        ({"per": "model"}, "per is 'parameter' or 'bucket'"),
        ({"seed": -1}, "a seed is an int of at least 0, got -1"),
        ({"timeout": 5}, "timeout is a timedelta above 0, got 5"),
        ({"history": "a"}, "history is an int of at least 1, got 'a'"),
    ],
)
def test_wrong_options_are_refused_when_the_state_is_made(options, problem):
    with pytest.raises(ValueError, match=problem):
        DeepReduceState("dense", **options)
