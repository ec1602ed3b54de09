"""A training loop of Accelerate with compressed gradients.

accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py        # or torchrun --nproc-per-node 2
"""

import torch
from accelerate import Accelerator

from deepreduce.integrations.accelerate import compress
from deepreduce.torch import DeepReduceState


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    inputs = torch.randn(2048, 64)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :10].argmax(1))
    accelerator = Accelerator(cpu=True)

    # The one line, and the state that it needs.
    state = DeepReduceState("topr:0.01/rice/qsgd")
    compress(accelerator, state)

    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    for epoch in range(3):
        for batch, targets in loader:
            loss = torch.nn.functional.cross_entropy(model(batch), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}, {state.stats().last.ratio:.0f} times fewer bytes than dense")
    state.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
