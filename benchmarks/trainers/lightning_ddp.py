"""A small regression with Lightning's Trainer, as its users write it. A workload of preload.py.

Knows nothing of taskd. Lightning saves a checkpoint every 20 steps and resumes from the newest.
"""

import os
import pathlib
import time

from testbed.script import fact

fact("begin")
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

fact("imported")


class Regression(lightning.LightningModule):
    """One layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def training_step(self, batch, _index):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

    def on_train_start(self):
        fact("train")

    def on_train_batch_end(self, *_):
        fact("step", step=self.global_step)
        time.sleep(0.02)


folder = pathlib.Path(os.environ["CHECKPOINTS"])
data = torch.utils.data.TensorDataset(torch.randn(4096, 8))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    strategy="ddp",
    max_steps=int(os.environ["STEPS"]),
    default_root_dir=str(folder),
    logger=False,
    enable_progress_bar=False,
    callbacks=[ModelCheckpoint(dirpath=folder, every_n_train_steps=20, save_last=True)],
)
fact("group")
newest = folder / "last.ckpt"
trainer.fit(
    Regression(),
    torch.utils.data.DataLoader(data, batch_size=4),
    ckpt_path=str(newest) if newest.exists() else None,
)
