"""Lightning with compressed gradients: a callback. Lightning starts the second process itself.

python examples/lightning_fit.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer

from deepreduce.integrations.lightning import Compress


class Classifier(LightningModule):
    """Finds the largest of ten numbers among 64."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))

    def training_step(self, batch):
        inputs, targets = batch
        return torch.nn.functional.cross_entropy(self.layers(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    torch.manual_seed(0)
    inputs = torch.randn(2048, 64)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :10].argmax(1))

    # The callback is all that is added.
    compress = Compress("topr:0.01/rice/qsgd")
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3, callbacks=[compress], **quiet)
    trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        print(f"{trainer.callback_metrics['deepreduce/ratio']:.0f} times fewer bytes than dense")


if __name__ == "__main__":
    main()
