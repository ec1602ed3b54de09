"""The Trainer of transformers with local steps of AdamW, on a small GPT-2 that is made here: nothing is downloaded.

torchrun --nproc-per-node 2 examples/trainer_gpt2.py
torchrun --nproc-per-node 2 examples/trainer_gpt2.py --gradients     # compressed gradients instead, which suit SGD
"""

import argparse
from tempfile import TemporaryDirectory

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from deepreduce.integrations.accelerate import compress
from deepreduce.integrations.trainer import LocalStepsCallback
from deepreduce.torch import DeepReduceState


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradients", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=32))
    words = torch.arange(32) + torch.randint(0, 224, (512, 1))  # counting upwards
    data = [{"input_ids": row, "labels": row} for row in words]
    with TemporaryDirectory() as folder:
        way = {"optim": "sgd", "learning_rate": 0.5} if options.gradients else {"learning_rate": 3e-3}  # without optim: AdamW
        fixed = {"save_strategy": "no", "use_cpu": True, "report_to": [], "disable_tqdm": True}
        arguments = TrainingArguments(folder, max_steps=30, logging_steps=10, **way, **fixed)

        trainer = Trainer(model, arguments, train_dataset=data)

        # Either line is enough.
        if options.gradients:
            compress(trainer, DeepReduceState("topr:0.01/rice/qsgd"))
        else:
            trainer.add_callback(LocalStepsCallback(trainer, recipe="adam"))

        trainer.train()


if __name__ == "__main__":
    main()
