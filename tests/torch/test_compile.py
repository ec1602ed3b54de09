"""The hook under torch.compile: however model and DDP are nested, the parameters are those of an eager run."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from deepreduce.errors import ConfigError
from deepreduce.torch import DeepReduceState, deepreduce_hook

from .ranks import run_ranks
from .tasks import flat, network, train

SPECS = None, "dense", "topr:0.01/rice/qsgd"
WAYS = "compile(DDP)", "DDP(compile)", "compile(DDP), optimize_ddp=False"


def compiled(rank, way):
    """The parameters after some steps. `aot_eager` traces and splits the graph as any backend does, and needs no C++ compiler."""
    torch._dynamo.config.optimize_ddp = "optimize_ddp=False" not in way
    return [_trained(rank, way, spec) for spec in SPECS]


def _trained(rank, way, spec):
    model = network(width=520)  # more than a bucket, of which DDP's first has 1 MB at least
    ddp = DistributedDataParallel(torch.compile(model, backend="aot_eager") if way == "DDP(compile)" else model, bucket_cap_mb=1)
    state = None if spec is None else DeepReduceState(spec, model=model)
    if state:
        ddp.register_comm_hook(state, deepreduce_hook)
    train(rank, torch.compile(ddp, backend="aot_eager") if way.startswith("compile(DDP)") else ddp, steps=3)
    if state:
        assert len(state.stats().steps) == 3
        assert set(state.stats().last.parameters) == set(dict(model.named_parameters()))
        assert state.stats().last.ratio > (0.99 if spec == "dense" else 20)
    return flat(model)


@pytest.fixture(scope="module")
def eager():
    return run_ranks(compiled, 2, "eager")


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_trains_as_an_eager_one(eager, way):
    first, second = run_ranks(compiled, 2, way)
    for parameters, same, expected in zip(first, second, eager[0], strict=True):
        assert torch.equal(parameters, same)
        assert torch.allclose(parameters, expected, rtol=0, atol=1e-6)
    own, dense, _ = first
    assert torch.allclose(own, dense, rtol=0, atol=1e-6)


def named(rank):
    """The names of parameters, however the model is wrapped."""
    wraps = [
        lambda model: model,
        DistributedDataParallel,
        torch.compile,
        lambda model: DistributedDataParallel(torch.compile(model)),
        lambda model: torch.compile(DistributedDataParallel(model)),
        lambda model: torch.nn.Sequential(*map(torch.compile, model)),
    ]
    return [DeepReduceState("dense", model=wrap(network())).names.known for wrap in wraps]


def test_names_do_not_depend_on_ddp_and_compile():
    (found,) = run_ranks(named, 1)
    assert found == [list(dict(network().named_parameters()))] * 6


def python_reduced(rank):
    torch._dynamo.config.optimize_ddp = "python_reducer"
    model = DistributedDataParallel(network())
    model.register_comm_hook(DeepReduceState("topr:0.1/rice/qsgd"), deepreduce_hook)
    with pytest.raises(ConfigError, match="optimize_ddp='python_reducer' gives its hooks single gradients"):
        train(rank, model, steps=1)


def test_the_python_reducer_is_refused_with_what_to_set():
    run_ranks(python_reduced, 2)
