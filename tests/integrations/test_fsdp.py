"""Four processes as two nodes of two: FSDP2 inside a node, compressed gradients between nodes."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from deepreduce.errors import ConfigError, InputError, PeerError
from deepreduce.integrations.fsdp import RankState
from deepreduce.torch import DeepReduceState, compress_fsdp

from ..torch.ranks import run_ranks
from ..torch.tasks import batch, network
from .scripts import run_example

LOSSY = "topr:0.01/rice/qsgd"


class Replicas:
    """A network on a mesh of two nodes; without a spec it is native HSDP.

    Odd sizes, so that shards are padded; the last layer belongs to the outermost FSDP module.
    """

    def __init__(self, spec=None, seed=0, **options):
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        self.model, self.state = network(seed, width=49), None
        mesh = self.mesh if spec is None else self.mesh["shard"]
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=mesh, **options)
        if spec is not None:
            self.state = DeepReduceState(spec, process_group=self.mesh["replicate"].get_group(), small_tensor_numel=16)
            compress_fsdp(self.model, self.state)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def backward(self, step):
        inputs, targets = batch(dist.get_rank(), step)
        torch.nn.functional.cross_entropy(self.model(inputs), targets).backward()

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps):
        for step in steps:
            self.backward(step)
            self.update()
        return self.parameters()

    def accumulate(self, setting):
        """Two backward passes in a step, by one of FSDP's settings for that."""
        for step in range(0, 6, 2):
            getattr(self.model, setting)(False)
            self.backward(step)
            getattr(self.model, setting)(True)
            self.backward(step + 1)
            self.update()
        return self.parameters()

    def divided(self, factor):
        """Gradients divided by a factor of the user's, as in training by the number of tokens."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(factor)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
        return self.train(range(3))

    def parameters(self):
        return torch.cat([parameter.full_tensor().detach().float().reshape(-1) for parameter in self.model.parameters()])


def steps_like_native(rank):
    """Pairs that must agree: FSDP's own result, and that through deepreduce without loss."""
    half = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    settings = "set_requires_gradient_sync", "set_requires_all_reduce"
    return {
        "plain": [Replicas(spec).train(range(4)) for spec in (None, "dense")],
        "mixed precision": [Replicas(spec, **half).train(range(4)) for spec in (None, "dense")],
        "divide factor": [Replicas(spec).divided(3.0) for spec in (None, "dense")],
        **{setting: [Replicas(spec).accumulate(setting) for spec in (None, "dense")] for setting in settings},
    }


def test_without_loss_the_parameters_are_those_of_native_hsdp():
    for outcome in run_ranks(steps_like_native, 4):
        for case, (native, ours) in outcome.items():
            assert torch.allclose(native, ours, rtol=0, atol=1e-6), case


def lossy(rank, path):
    """Train with loss, save half-way, and go on twice: without and with an interruption."""
    first = Replicas(LOSSY)
    first.train(range(4))
    dcp.save({"model": first.model.state_dict(), "deepreduce": RankState(first.state)}, checkpoint_id=path)
    resumed = Replicas(LOSSY, seed=1)
    weights = resumed.model.state_dict()
    dcp.load({"model": weights, "deepreduce": RankState(resumed.state)}, checkpoint_id=path)
    resumed.model.load_state_dict(weights)
    stats, names = first.state.stats(), set(dict(first.model.named_parameters()))
    assert [step.step for step in stats.steps] == [0, 1, 2, 3]
    assert set(stats.last.parameters) == names
    assert set(first.state.memory.own.residuals) <= names
    assert 0 < stats.last.message_bytes < stats.last.dense_bytes / 5
    assert stats.last.sent_bytes >= stats.last.message_bytes
    half = Replicas(LOSSY, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)).train(range(3))
    return first.train(range(4, 8)), resumed.train(range(4, 8)), half


def test_replicas_stay_identical_and_a_resumed_run_is_the_same(tmp_path):
    outcomes = run_ranks(lossy, 4, str(tmp_path / "checkpoint"))
    for straight, resumed, half in outcomes:
        assert torch.equal(straight, outcomes[0][0])
        assert torch.equal(resumed, straight)
        assert torch.equal(half, outcomes[0][2])


class Unused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, inputs):
        return self.used(inputs)


def refusals(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    group = mesh["replicate"].get_group()
    with pytest.raises(ConfigError, match="found no FSDP module"):
        compress_fsdp(network(), DeepReduceState(LOSSY, process_group=group))
    with pytest.raises(ConfigError, match="has replicas itself"):
        compress_fsdp(fully_shard(network(), mesh=mesh), DeepReduceState(LOSSY, process_group=group))
    with pytest.raises(ConfigError, match="hold different shards of one model"):
        compress_fsdp(fully_shard(network(), mesh=mesh["shard"]), DeepReduceState(LOSSY))
    with pytest.raises(PeerError, match=r"rank 1 starts with other values of 4\.weight than rank 0 \(and so for 6 of 6\)"):
        Replicas(LOSSY, seed=rank // 2).backward(0)
    torch.manual_seed(0)
    model = fully_shard(Unused(), mesh=mesh["shard"])
    compress_fsdp(model, DeepReduceState(LOSSY, process_group=group))
    with pytest.raises(InputError, match="set_reduce_scatter_unused_params"):
        model(torch.ones(2, 4)).sum().backward()


def test_what_cannot_work_is_refused_with_what_to_do():
    run_ranks(refusals, 4)


def test_the_example_runs():
    assert "step  40: loss" in run_example("fsdp.py", "--nproc-per-node", "4")
