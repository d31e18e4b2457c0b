"""A character-level GPT, trained with DDP on the Python standard library's own sources.

Survives kill -9 of any rank.

    TASKD_PROCESS_ENABLE=on python manager.py &
    TASKD_PROCESS_ENABLE=on python -m taskd.run --nproc-per-node=4 examples/char_gpt.py --steps 60

Runs the same under plain torchrun, without recovery.
"""

import argparse
import hashlib
import os
import pathlib
import sysconfig

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import taskd

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 96, 4, 3, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = (
            functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, length, WIDTH)
        )
        x = x + self.out(attended)
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.blocks(x))


def load_text(limit: int = 1_000_000) -> tuple[torch.Tensor, int]:
    """The standard library as a tensor of character codes, and the size of the alphabet."""
    text = ""
    for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace")
        if len(text) > limit:
            break
    alphabet = {char: index for index, char in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[char] for char in text]), len(alphabet)


TEXT, VOCABULARY = load_text()  # outside train(): survivors of a fault keep it


@taskd.recoverable
def train(steps: int) -> tuple[float, str]:
    """Entered again in every surviving process after a fault.

    Continues at the step where the job was.
    """
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = CharGPT(VOCABULARY)
    torch.manual_seed(1000 + rank)  # from here on each rank draws its own batches and dropout masks
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    state = taskd.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, loss=0.0)
    restored = state.restore()
    print(f"rank {rank} (pid {os.getpid()}) starts at step {state.step}: {restored}", flush=True)
    while state.step < steps:
        offsets = torch.randint(len(TEXT) - CONTEXT - 1, (BATCH,)).tolist()
        batch = torch.stack([TEXT[offset : offset + CONTEXT + 1] for offset in offsets])
        optimizer.zero_grad()
        loss = functional.cross_entropy(ddp(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        state.loss = loss.item()
        state.commit()
        if rank == 0 and state.step % 5 == 0:
            print(f"step {state.step:4d}  loss {state.loss:.4f}", flush=True)
    digest = hashlib.sha256(
        b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    ).hexdigest()[:16]
    return state.loss, digest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    final_loss, final_digest = train(parser.parse_args().steps)
    if dist.get_rank() == 0:
        print(f"final: digest {final_digest} loss {final_loss:.6f}", flush=True)
    dist.destroy_process_group()
