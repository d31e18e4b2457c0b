"""digits_plain.py with taskd.

A process that dies is replaced, and the training goes on in the middle of its epoch.

    TASKD_PROCESS_ENABLE=on python manager.py &
    export TASKD_PROCESS_ENABLE=on
    python -m taskd.run --nproc-per-node=2 examples/digits.py --resume checkpoint.pth.tar

Checkpoints and options are those of digits_plain.py. Under plain python and plain torchrun it runs
like that one.
"""

import argparse
import os
import pathlib
import shutil

import torch
import torch.distributed as dist
from digits_resnet import load_images, resnet
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import taskd

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--epochs", default=5, type=int, metavar="N", help="number of epochs in all")
parser.add_argument(
    "--start-epoch", default=0, type=int, metavar="N", help="number of the first one"
)
parser.add_argument(
    "-b", "--batch-size", default=32, type=int, metavar="N", help="images per process and step"
)
parser.add_argument(
    "--lr",
    "--learning-rate",
    default=0.1,
    type=float,
    metavar="LR",
    help="learning rate of the first epoch",
)
parser.add_argument("--momentum", default=0.9, type=float, metavar="M")
parser.add_argument(
    "--wd", "--weight-decay", default=1e-4, type=float, metavar="W", dest="weight_decay"
)
parser.add_argument(
    "-p", "--print-freq", default=10, type=int, metavar="N", help="steps between two lines"
)
parser.add_argument(
    "--resume", default="", metavar="PATH", help="checkpoint to begin with, if it is there"
)
parser.add_argument(
    "--save-path",
    default=".",
    type=pathlib.Path,
    metavar="DIR",
    help="where checkpoints are written",
)
parser.add_argument("--dist-backend", default="gloo")
parser.add_argument("--seed", default=0, type=int)

TRAIN_SET, VAL_SET = load_images()  # outside main(): processes that live keep it


@taskd.recoverable
def main(args):
    if "WORLD_SIZE" in os.environ:  # started by torchrun
        dist.init_process_group(args.dist_backend)
    torch.manual_seed(args.seed)
    model = resnet()
    parallel = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, args.momentum, weight_decay=args.weight_decay
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
    best_acc1 = 0.0
    if os.path.isfile(args.resume):
        checkpoint = torch.load(args.resume)
        args.start_epoch, best_acc1 = checkpoint["epoch"], checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        print(f"=> loaded {args.resume} (epoch {args.start_epoch})", flush=True)
    state = taskd.TrainState(model=model, optimizer=optimizer, scheduler=scheduler,
                             epoch=args.start_epoch, batch=0, best_acc1=best_acc1)  # fmt: skip
    state.restore()
    train_sampler = DistributedSampler(TRAIN_SET, seed=args.seed) if dist.is_initialized() else None
    val_sampler = DistributedSampler(VAL_SET, shuffle=False) if dist.is_initialized() else None
    train_loader = DataLoader(
        TRAIN_SET, args.batch_size, shuffle=train_sampler is None, sampler=train_sampler
    )
    val_loader = DataLoader(VAL_SET, args.batch_size, sampler=val_sampler)
    for epoch in range(state.epoch, args.epochs):
        if train_sampler is not None:
            train_sampler.set_epoch(epoch)
        train(train_loader, parallel, optimizer, epoch, args, state)
        acc1 = validate(val_loader, parallel)
        scheduler.step()
        is_best, state.best_acc1 = acc1 > state.best_acc1, max(acc1, state.best_acc1)
        if is_first():
            save_checkpoint(
                {
                    "epoch": epoch + 1,
                    "state_dict": model.state_dict(),
                    "best_acc1": state.best_acc1,
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                },
                is_best,
                args.save_path,
            )
        state.epoch, state.batch = epoch + 1, 0


def is_first():
    return not dist.is_initialized() or dist.get_rank() == 0


def train(loader, model, optimizer, epoch, args, state):
    model.train()
    for batch, (images, target) in enumerate(loader):
        if batch < state.batch:  # done before the fault
            continue
        loss = functional.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state.batch = batch + 1
        state.commit()
        if batch % args.print_freq == 0 and is_first():
            print(f"Epoch: [{epoch}][{batch}/{len(loader)}]  loss {loss.item():.4f}", flush=True)


def validate(loader, model):
    model.eval()
    count = torch.zeros(2)  # right answers, images
    with torch.no_grad():
        for images, target in loader:
            count += torch.tensor([(model(images).argmax(1) == target).sum(), len(target)])
    if dist.is_initialized():
        dist.all_reduce(count)
    acc1 = (100 * count[0] / count[1]).item()
    if is_first():
        print(f" * Acc@1 {acc1:.3f}", flush=True)
    return acc1


def save_checkpoint(checkpoint, is_best, directory):
    path = directory / "checkpoint.pth.tar"
    torch.save(checkpoint, path.with_suffix(".tmp"))
    # a process that is killed while it writes leaves the checkpoint before
    path.with_suffix(".tmp").rename(path)
    if is_best:
        shutil.copyfile(path, directory / "model_best.pth.tar")


if __name__ == "__main__":
    main(parser.parse_args())
    if dist.is_initialized():
        dist.destroy_process_group()
