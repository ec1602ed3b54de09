"""A replica for `test_torchft`: it trains without an interruption, then once more from a checkpoint that it made half-way.

Arguments: the number of the replica, a spec, and where to save the parameters of both runs.
"""

import sys
from copy import deepcopy

import torch
import torchft_diloco as example
from torchft import ProcessGroupGloo
from torchft.local_sgd import DiLoCo

from deepreduce.integrations.torchft import CompressedManager


class Replica:
    """A model under DiLoCo with a compressed manager; `saved` is what `checkpoint` returned."""

    def __init__(self, number, spec, saved=None):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self.data = torch.Generator().manual_seed(number)
        group = ProcessGroupGloo(timeout=example.TIMEOUT)
        self.store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.manager = CompressedManager(example.make_manager(number, group, self.store, self.model, self.inner), group, spec)
        self.parts = {"model": self.model, "inner": self.inner, "outer": self.outer, "manager": self.manager}
        if saved is not None:
            for name, part in self.parts.items():
                part.load_state_dict(saved[name])
            self.data.set_state(saved["data"])

    def checkpoint(self):
        return deepcopy({name: part.state_dict() for name, part in self.parts.items()} | {"data": self.data.get_state()})

    def train(self, syncs, half=None):
        """Train up to this synchronization; returns the checkpoint of the half-way one."""
        saved = None
        with DiLoCo(self.manager, [self.model], self.inner, self.outer, sync_every=5):
            while self.manager.current_step() < syncs:
                if self.manager.current_step() == half and saved is None:
                    saved = self.checkpoint()
                inputs = torch.randn(32, 64, generator=self.data)
                self.inner.zero_grad()
                torch.nn.functional.cross_entropy(self.model(inputs), inputs[:, :10].argmax(1)).backward()
                self.inner.step()
        self.manager.shutdown()
        return saved


def main(number, spec, path):
    torch.set_num_threads(1)
    straight = Replica(int(number), spec)
    resumed = Replica(int(number), spec, straight.train(6, half=3))
    resumed.train(6)
    torch.save([straight.model.state_dict(), resumed.model.state_dict()], path)


if __name__ == "__main__":
    main(*sys.argv[1:])
