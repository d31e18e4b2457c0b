"""The GPT of char_gpt.py with FSDP2.

Each rank holds one shard of weights and optimizer, and nobody holds it twice.

    TASKD_PROCESS_ENABLE=on python manager.py &
    export TASKD_PROCESS_ENABLE=on
    python -m taskd.run --nproc-per-node=4 examples/fsdp2_char_gpt.py --steps 60

The shard of a killed rank is lost: all ranks start again from the newest checkpoint in
./taskd_checkpoints. hsdp.py shows how to lose nothing. Runs the same under plain torchrun, without
checkpoints and recovery.
"""

import argparse
import hashlib
import os
import warnings

import torch
import torch.distributed as dist
from char_gpt import CONTEXT, TEXT, VOCABULARY, CharGPT
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import taskd

BATCH = 8
# it returns a view, which nobody writes to
warnings.filterwarnings("ignore", "FSDP2-wrapped module")


@taskd.recoverable
def train(steps: int, checkpoint_every: int) -> tuple[float, str]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = CharGPT(VOCABULARY)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    torch.manual_seed(1000 + rank)  # from here on each rank draws its own batches and dropout masks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    state = taskd.TrainState(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loss=0.0,
        checkpoint_every=checkpoint_every,
    )
    restored = state.restore()
    print(f"rank {rank} (pid {os.getpid()}) starts at step {state.step}: {restored}", flush=True)
    while state.step < steps:
        offsets = torch.randint(len(TEXT) - CONTEXT - 1, (BATCH,)).tolist()
        batch = torch.stack([TEXT[offset : offset + CONTEXT + 1] for offset in offsets])
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        scheduler.step()
        state.loss = loss.item()
        # every checkpoint_every-th one begins a checkpoint; training goes on meanwhile
        state.commit()
        if rank == 0 and state.step % 5 == 0:
            print(f"step {state.step:4d}  loss {state.loss:.4f}", flush=True)
    whole = [parameter.full_tensor().detach() for parameter in model.parameters()]
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in whole)).hexdigest()[:16]
    return state.loss, digest


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint-every", type=int, default=10)
    options = parser.parse_args()
    final_loss, final_digest = train(options.steps, options.checkpoint_every)
    if dist.get_rank() == 0:
        print(f"final: digest {final_digest} loss {final_loss:.6f}", flush=True)
    dist.destroy_process_group()
