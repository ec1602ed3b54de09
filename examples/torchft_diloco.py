"""DiLoCo of torchft with compressed pseudo-gradients: replicas may leave and come back.

torchft_lighthouse --min_replicas 1 &
TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/torchft_diloco.py 0 &
TORCHFT_LIGHTHOUSE=http://localhost:29510 python examples/torchft_diloco.py 1
"""

import sys
from datetime import timedelta

import torch
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

from deepreduce.integrations.torchft import CompressedManager

TIMEOUT = timedelta(seconds=60)


def make_manager(replica, group, store, model, inner):
    place = {"store_addr": "localhost", "store_port": store.port, "rank": 0, "world_size": 1, "replica_id": f"replica_{replica}"}
    manager = Manager(
        group, None, None, min_replica_size=1, use_async_quorum=False, init_sync=False, timeout=TIMEOUT, quorum_timeout=TIMEOUT, **place
    )
    for name, part in (("model", model), ("inner", inner)):  # what a replica that joins gets from another
        manager.register_state_dict_fn(name, part.load_state_dict, part.state_dict)
    return manager


def train(replica, syncs, spec):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    group = ProcessGroupGloo(timeout=TIMEOUT)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = make_manager(replica, group, store, model, inner)
    if spec:  # the one line
        manager = CompressedManager(manager, group, spec)
    data = torch.Generator().manual_seed(replica)
    with DiLoCo(manager, [model], inner, outer, sync_every=10):
        while (step := manager.current_step()) < syncs:
            inputs = torch.randn(32, 64, generator=data)
            loss = torch.nn.functional.cross_entropy(model(inputs), inputs[:, :10].argmax(1))
            inner.zero_grad()
            loss.backward()
            inner.step()
            if manager.current_step() > step:
                ratio = manager.stats().last.ratio if spec else 1
                print(f"sync {manager.current_step()}: loss {loss.item():.3f}, {ratio:.0f} times fewer bytes than dense", flush=True)
    manager.shutdown()
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(int(sys.argv[1]), syncs=20, spec="topr:0.01/rice/qsgd")
