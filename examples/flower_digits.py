"""Federated learning with Flower: four clients, compressed both ways.

python examples/flower_digits.py        # simulates the clients; see docs/integrations.md for a SuperLink with SuperNodes
"""

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import Message
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from sklearn.datasets import load_digits

from deepreduce.integrations.flower import CompressedGrid, CompressMod

CLIENTS, ROUNDS, SPEC = 4, 10, "topr:0.05/rice/qsgd"
inputs, targets = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
order = torch.from_numpy(np.random.default_rng(0).permutation(len(inputs)))
inputs, targets = inputs[order].float() / 16, targets[order]
client_app = ClientApp(mods=[CompressMod(SPEC)])
server_app = ServerApp()


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))


@client_app.train()
def train(message, context):
    mine = slice(context.node_config["partition-id"], 1400, CLIENTS)
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(5):
        for x, y in zip(inputs[mine].split(32), targets[mine].split(32), strict=True):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    metrics = MetricRecord({"num-examples": len(inputs[mine])})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@server_app.main()
def main(grid, context):
    grid = CompressedGrid(grid, downlink=SPEC)
    result = FedAvg(fraction_evaluate=0.0).start(grid, ArrayRecord(network().state_dict()), num_rounds=ROUNDS)
    model = network()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    accuracy = (model(inputs[1400:]).argmax(1) == targets[1400:]).float().mean()
    print(f"accuracy {accuracy:.3f}, {grid.uplink.ratio:.1f} times fewer bytes up and {grid.downlink.ratio:.1f} down", flush=True)


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server_app, client_app, CLIENTS)
