"""The Trainer of transformers with compressed gradients, on a small GPT-2 that is made here: nothing is downloaded.

torchrun --nproc-per-node 2 examples/trainer_gpt2.py
"""

from tempfile import TemporaryDirectory

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from deepreduce.integrations.accelerate import compress
from deepreduce.torch import DeepReduceState


def main():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=32))
    words = torch.arange(32) + torch.randint(0, 224, (512, 1))  # counting upwards
    data = [{"input_ids": row, "labels": row} for row in words]
    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=30, logging_steps=10, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True
        )
        trainer = Trainer(model, arguments, train_dataset=data)

        # The one line, and the state that it needs.
        compress(trainer, DeepReduceState("topr:0.01/rice/qsgd"))

        trainer.train()


if __name__ == "__main__":
    main()
