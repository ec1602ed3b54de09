"""DiLoCo of torchft: a lighthouse and two replicas, each a process of its own."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deepreduce.errors import ConfigError

from .scripts import EXAMPLES

LOSSY = "topr:0.01/rice/qsgd"
LIGHTHOUSE = """
import time
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas={min_replicas}, join_timeout_ms=1000)
print(server.address(), flush=True)
time.sleep(600)
"""
REPLICA = """
import sys, time, torch
sys.path.insert(0, {examples!r})
import torchft_diloco

class Patient(torchft_diloco.CompressedManager):
    "Takes its time for as long as it is alone, so that another replica can join before the end."

    def should_commit(self, timeout=None):
        time.sleep(0.5 if self.num_participants() == 1 else 0)
        return super().should_commit(timeout)

torch.set_num_threads(1)
torchft_diloco.CompressedManager = Patient
torch.save(torchft_diloco.train({replica}, {syncs}, {spec!r}).state_dict(), {path!r})
"""


@contextlib.contextmanager
def started(code, **environment):
    """A Python process that does not outlive the block; what it logs is kept apart from what it prints."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | environment
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        process.log = log
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def logged(process):
    process.log.seek(0)
    return process.log.read()[-4000:]


def lighthouse(min_replicas):
    return started(LIGHTHOUSE.format(min_replicas=min_replicas))


def replica(server_address, number, syncs, spec, path):
    code = REPLICA.format(examples=str(EXAMPLES), replica=number, syncs=syncs, spec=spec, path=str(path))
    return started(code, TORCHFT_LIGHTHOUSE=server_address)


def ended(process):
    try:
        output = process.communicate(timeout=240)[0]
    except subprocess.TimeoutExpired as late:
        raise AssertionError(logged(process)) from late
    assert process.returncode == 0, logged(process)
    return output


def trained(folder, spec):
    """The parameters of two replicas that ran from start to end."""
    paths = [folder / f"{number}.pt" for number in range(2)]
    with lighthouse(min_replicas=2) as server:
        address = server.stdout.readline().strip()
        with replica(address, 0, 3, spec, paths[0]) as first, replica(address, 1, 3, spec, paths[1]) as second:
            ended(first), ended(second)
    return [torch.cat([values.reshape(-1) for values in torch.load(path).values()]) for path in paths]


def test_without_loss_the_parameters_are_those_of_torchft(tmp_path):
    own, ours = (trained(tmp_path, spec) for spec in (None, "dense"))
    assert torch.equal(ours[0], ours[1])
    assert torch.allclose(own[0], ours[0], rtol=0, atol=1e-6)


def wait_for_sync(process, number):
    """Read what a replica prints until it is so far; returns how far it is."""
    for line in process.stdout:
        if line.startswith("sync ") and (reached := int(line.split()[1].rstrip(":"))) >= number:
            return reached
    raise AssertionError(logged(process))


def test_a_replica_that_was_killed_rejoins_and_ends_with_the_same_parameters(tmp_path):
    paths = [tmp_path / f"{number}.pt" for number in range(2)]
    with lighthouse(min_replicas=1) as server:
        address = server.stdout.readline().strip()
        with replica(address, 0, 250, LOSSY, paths[0]) as survivor:
            with replica(address, 1, 250, LOSSY, paths[1]) as killed:
                reached = wait_for_sync(killed, 5)
            alone = wait_for_sync(survivor, reached + 3)
            with replica(address, 1, 250, LOSSY, paths[1]) as again:
                assert wait_for_sync(again, 0) > alone  # it went on from where the survivor was
                output = ended(again)
                ended(survivor)
    ratios = [int(ratio) for ratio in re.findall(r"(\d+) times fewer bytes", output)]
    assert min(ratios) > 5
    first, second = map(torch.load, paths)
    assert all(torch.equal(first[name], second[name]) for name in first)


RESUME = """
import sys
sys.path[:0] = {folders!r}
from torchft_resume import main
main({replica}, {spec!r}, {path!r})
"""


def test_a_run_that_resumes_from_a_checkpoint_is_the_same(tmp_path):
    folders, paths = [str(EXAMPLES), str(Path(__file__).parent)], [str(tmp_path / f"{number}.pt") for number in range(2)]
    with lighthouse(min_replicas=2) as server:
        address = {"TORCHFT_LIGHTHOUSE": server.stdout.readline().strip()}
        first, second = (RESUME.format(folders=folders, replica=number, spec=LOSSY, path=path) for number, path in enumerate(paths))
        with started(first, **address) as one, started(second, **address) as other:
            ended(one), ended(other)
    (straight, resumed), others = map(torch.load, paths)
    for weights in (resumed, *others):
        assert all(torch.equal(straight[name], weights[name]) for name in straight)


class Alone:
    """A process group of one."""

    def rank(self):
        return 0

    def size(self):
        return 1

    def allgather(self, outputs, inputs, options):
        outputs[0][0].copy_(inputs[0])
        return SimpleNamespace(wait=lambda: True)


class Manager:
    """A manager of one replica that commits when it is told to."""

    def __init__(self):
        self.commits, self.step, self.errors = True, 0, []

    def errored(self):
        return self.errors[0] if self.errors else None

    def report_error(self, error):
        self.errors.append(error)

    def wait_quorum(self):
        pass

    def is_participating(self):
        return True

    def num_participants(self):
        return 1

    def current_step(self):
        return self.step

    def should_commit(self, timeout=None):
        committed = self.commits and not self.errors
        self.step += committed
        self.errors = []
        return committed


def compressed(spec="topr:1/raw/raw"):
    from deepreduce.integrations.torchft import CompressedManager

    manager = Manager()
    return manager, CompressedManager(manager, Alone(), spec, small_tensor_numel=0)


def synchronized(manager, values):
    gradient = torch.tensor(values)
    work = manager.allreduce(gradient, should_quantize=False)
    assert gradient.tolist() == values  # nothing happens before someone waits
    assert work.wait()
    assert work.get_future().value() is gradient
    return gradient.tolist(), manager.should_commit()


def test_the_residual_rolls_back_where_a_synchronization_is_not_committed():
    own, manager = compressed()
    assert synchronized(manager, [3.0, 2.0]) == ([3.0, 0.0], True)
    own.commits = False
    assert synchronized(manager, [1.0, 2.5]) == ([0.0, 4.5], False)
    own.commits = True
    assert synchronized(manager, [1.0, 2.5]) == ([0.0, 4.5], True)
    assert np.array_equal(manager.memory.own.residuals["fragment 0 tensor 0"], [1.0, 0.0])


def test_an_error_is_the_managers_to_handle():
    _, manager = compressed()
    manager.process_group.allgather = lambda *arguments: 1 / 0
    assert synchronized(manager, [3.0, 2.0])[1] is False
    assert manager.memory.own.residuals == {}


def test_a_checkpoint_keeps_the_residual():
    own, manager = compressed()
    own.state_dict, own.load_state_dict = lambda: {"step": 1}, lambda state: None
    synchronized(manager, [3.0, 2.0])
    other, resumed = compressed()
    other.load_state_dict = lambda state: None
    resumed.load_state_dict(manager.state_dict())
    other.commits = False  # what was loaded is what the first synchronization rolls back to
    assert synchronized(resumed, [1.0, 0.0]) == ([0.0, 2.0], False)
    other.commits = True
    assert synchronized(resumed, [1.0, 0.0]) == synchronized(manager, [1.0, 0.0]) == ([0.0, 2.0], True)


def test_parameters_are_not_compressed_by_mistake():
    _, manager = compressed()
    with pytest.raises(ConfigError, match="LocalSGD averages parameters"):
        manager.allreduce(torch.ones(2))
    with pytest.raises(ConfigError, match="leave it False"):
        manager.allreduce(torch.ones(2), should_quantize=True)
