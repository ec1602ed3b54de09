"""Lightning, two processes."""

from pathlib import Path

import pytest
import torch

from ..torch.ranks import run_ranks
from ..torch.tasks import batch, flat, network
from .launched import as_if_launched, free_port
from .scripts import run_example

LOSSY = "topr:0.01/rice/qsgd"


def fitted(rank, spec, folder, seed=0, ckpt_path=None, epochs=4, **options):
    """The parameters after a fit, and its trainer and callback. One epoch has one batch of this rank."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from deepreduce.integrations.lightning import Compress

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network(seed)

        def training_step(self, data):
            inputs, targets = data
            return torch.nn.functional.cross_entropy(self.network(inputs), targets)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def train_dataloader(self):
            return torch.utils.data.DataLoader([batch(rank, self.trainer.current_epoch)], batch_size=None)

    callbacks = [ModelCheckpoint(folder, filename="{epoch}", save_top_k=1, monitor="step", mode="max")]
    if spec is not None:
        callbacks.append(Compress(spec, small_tensor_numel=16))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "reload_dataloaders_every_n_epochs": 1}
    fixed = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    trainer = Trainer(max_epochs=epochs, callbacks=callbacks, **fixed, **quiet, **options)
    module = Module()
    trainer.fit(module, ckpt_path=ckpt_path)
    return flat(module), trainer, callbacks[-1]


def fits(rank, port, path):
    as_if_launched(rank, 2, port)
    folder = Path(path)
    own, dense = (fitted(rank, spec, folder / str(spec))[0] for spec in (None, "dense"))
    straight, trainer, callback = fitted(rank, LOSSY, folder / "straight")
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("deepreduce/")}
    assert logged["deepreduce/ratio"] == pytest.approx(callback.state.stats().last.ratio)
    assert logged["deepreduce/ratio"] > 5
    assert set(callback.state.memory.own.residuals) <= {f"network.{name}" for name, _ in network().named_parameters()}
    assert len(list((folder / "straight").glob(f"*.rank{rank}"))) <= 2  # those of checkpoints that are gone are removed
    fitted(rank, LOSSY, folder / "half", epochs=2)
    resumed, *_ = fitted(rank, LOSSY, folder / "rest", seed=1, ckpt_path=str(folder / "half" / "epoch=1.ckpt"))
    return own, dense, straight, resumed


def follows_the_loss_scale(rank, port, path):
    as_if_launched(rank, 2, port)
    from lightning.pytorch.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    precision = MixedPrecision("16-mixed", "cpu", scaler)  # what Trainer(precision="16-mixed") makes on GPUs
    _, _, callback = fitted(rank, LOSSY, Path(path), plugins=[precision])
    return callback.state.memory.own.state_dict()["scale"], scaler.get_scale()


def test_the_residuals_follow_the_loss_scale_of_lightning(tmp_path):
    found = run_ranks(follows_the_loss_scale, 2, free_port(), str(tmp_path), timeout=150)
    assert found == [(64, 128)] * 2  # the scale of the last step, and of the next


def test_lightning(tmp_path):
    (own, dense, straight, resumed), other = run_ranks(fits, 2, free_port(), str(tmp_path), timeout=300)
    assert torch.allclose(own, dense, rtol=0, atol=1e-6)
    assert torch.equal(straight, other[2])
    assert torch.equal(resumed, straight)
    assert torch.equal(resumed, other[3])


def test_the_example_runs():
    assert "times fewer bytes" in run_example("lightning_fit.py")
