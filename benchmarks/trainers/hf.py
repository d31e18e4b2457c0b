"""GPT-2 with the Trainer of transformers, as its users write it. A workload of preload.py.

Knows nothing of taskd. The Trainer saves a checkpoint every 20 steps and resumes from the newest.
"""

import os
import pathlib
import time

from testbed.script import fact

fact("begin")
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

fact("imported")


class Numbers(torch.utils.data.Dataset):
    """Sentences of random words."""

    def __init__(self):
        self.words = torch.randint(0, 64, (512, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return {"input_ids": self.words[index], "labels": self.words[index]}


class Steps(TrainerCallback):
    """Notes each step."""

    def on_train_begin(self, args, state, control, **kwargs):
        fact("train")

    def on_step_end(self, args, state, control, **kwargs):
        fact("step", step=state.global_step)
        time.sleep(0.02)


folder = pathlib.Path(os.environ["CHECKPOINTS"])
arguments = TrainingArguments(
    output_dir=str(folder),
    max_steps=int(os.environ["STEPS"]),
    per_device_train_batch_size=4,
    save_steps=20,
    save_total_limit=2,
    logging_steps=100,
    use_cpu=True,
    report_to=[],
    disable_tqdm=True,
    seed=7,
)
fact("group")
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
trainer = Trainer(model=model, args=arguments, train_dataset=Numbers(), callbacks=[Steps()])
trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")) or None)
