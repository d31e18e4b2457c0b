"""Ranks that park, move and restore a state, each in a process of its own: see test_exchange.py.

python exchanging.py WORLD SCENARIO FOLDER OPTIONS
"""

import json
import os
import random
import sys
from pathlib import Path

FOLLOWING = ("assigned", "through data", "in place")
ROOT = Path(__file__).resolve().parents[3]


def _follow(variant, target, source):
    """An average of another layer, past every optimizer."""
    import torch

    if variant == "assigned":
        target.data = target.data * 0.9 + source.data * 0.1
    elif variant == "through data":
        target.data.mul_(0.9).add_(source.data, alpha=0.1)
    elif variant == "in place":
        with torch.no_grad():
            target.mul_(0.9).add_(source, alpha=0.1)


def _make(variant, seed):
    import torch
    from torch import nn

    torch.manual_seed(seed)

    class Net(nn.Module):
        """Uses its layers in another order than it defines them.

        Two share a weight, one is frozen.
        """

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(7)])
            self.layers[6].weight = self.layers[1].weight
            self.layers[2].weight.requires_grad = False
            self.norm = nn.BatchNorm1d(32)
            self.drop = nn.Dropout(0.2)
            self.register_buffer("cache", torch.zeros(1), persistent=False)
            self.register_buffer("updates", torch.zeros(1))
            self.heat = 1.0
            self.layers[2].bias.requires_grad = variant not in FOLLOWING

        def get_extra_state(self):
            return {"heat": self.heat}

        def set_extra_state(self, state):
            self.heat = state["heat"]

        def follow(self, name):
            _follow(variant, getattr(self.layers[2], name), getattr(self.layers[3], name))

        def forward(self, x):
            self.follow("weight")
            x = x * self.heat
            for index in (3, 1, 5, 6, 0, 4, 2):
                x = torch.relu(self.layers[index](x)) + x
            return self.drop(self.norm(x))

    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    if variant == "sgd":
        optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9)
    elif variant == "adamw":
        optimizer = torch.optim.AdamW(
            [{"params": trained[:3], "lr": 0.003}, {"params": trained[3:]}], lr=0.01, amsgrad=True
        )
    else:
        optimizer = torch.optim.Adam(trained, lr=0.01)
    return model, optimizer


class Ema:
    """A replica that is no module: its state_dict is large."""

    def __init__(self, model):
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model):
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state):
        self.shadow = dict(state["shadow"])


class Schedule:
    """One of the script's own: small, the same on all ranks, one further behind each step."""

    def __init__(self):
        self.done = []

    def step(self, drawn):
        self.done.append(drawn)

    def state_dict(self):
        return {"done": list(self.done)}

    def load_state_dict(self, state):
        self.done = list(state["done"])


class Rank:
    """One forked process through all its entries."""

    def __init__(self, rank, world, options):
        import torch.distributed as dist

        sys.path.insert(0, str(ROOT / "tests" / "unit" / "worker"))
        from job import Job

        from taskd.worker.state import buckets

        self.rank, self.world, self.options = rank, world, options
        self.variant = options.get("variant", "")
        self.faults = list(options.get("faults", []))
        self.job = Job(rank, world)
        self.restored, self.retired, self.attempt = [], [], 0
        self.dist = dist
        self.keep_layout = options.get("keep_layout", True)
        self.outside = _make("", 7) if self.variant == "outside" else None
        self.behind = False
        buckets.install()

    def connect(self):
        store = self.dist.PrefixStore(str(self.attempt), self.store)
        self.dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world)
        self.retired.append(self.dist.group.WORLD)  # never freed, see taskd.worker.process.groups

    def run(self, store):
        self.store = store
        while True:
            result, report = self.job.enter(self.entry)
            if result is not None:
                return {**result, "restored": self.restored}
            self.recover(report)

    def recover(self, report):
        """What manager and runtime do: agree on the cut, replace the victims."""
        from taskd.core.policy.cut import Copy, plan_cut

        fault = self.faults.pop(0)
        is_victim = self.rank in fault["victims"]
        if is_victim:
            self.job.replace()
            self.outside = _make("", 99) if self.outside else None
        mine = [None, True] if is_victim else [report.version, report.clean]
        copies = [None] * self.world
        self.dist.all_gather_object(copies, mine)
        cut = plan_cut([Copy(rank, version, clean) for rank, (version, clean) in enumerate(copies)])
        self.dist.destroy_process_group()
        self.attempt += 1
        self.job.resume(cut.version, {move.rank: move for move in cut.moves})
        if not self.keep_layout or self.rank in self.options.get("forgetful", ()):
            from taskd.worker.state import buckets

            self.job.life.records.inherited_layout = None
            buckets._layouts_of(self.job.life).by_order.clear()

    def entry(self):
        import torch
        from job import Stop
        from torch.nn.parallel import DistributedDataParallel

        from taskd.worker.train_state import TrainState

        self.connect()
        # A replacement starts with other weights: nothing but the restore may bring the right ones.
        model, optimizer = self.outside or _make(
            self.variant, 7 if self.attempt == 0 else 50 + self.rank
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        temperature = torch.nn.Parameter(torch.ones(3))
        second = torch.optim.SGD([temperature], lr=0.1, momentum=0.9)
        cap = {} if self.variant == "default_cap" else {"bucket_cap_mb": 0.01}
        wrap = {"static": {"static_graph": True}, "unused": {"find_unused_parameters": True}}.get(
            self.variant, {}
        )
        ddp = None if self.variant == "late_ddp" else DistributedDataParallel(model, **cap, **wrap)
        self.ema = Ema(model)
        self.schedule = Schedule()
        state = TrainState(
            model=ddp or model,
            optimizer=optimizer,
            scheduler=scheduler,
            scaler=scaler,
            second=second,
            ema=self.ema,
            seen=0,
            cursor=1000 * self.rank,
            spent=1000 * self.rank,
            schedule=self.schedule,
        )
        torch.manual_seed(1000 + self.rank)
        random.seed(7)  # the same on all ranks
        unborn = self.faults[0].get("unborn") if self.faults else None
        if unborn and self.rank in unborn:
            raise Stop  # it has never had a state
        restored = state.restore()
        if unborn:
            raise Stop
        if restored.version is not None:
            self.restored.append(str(restored))
        ddp = ddp or DistributedDataParallel(model, **cap)
        while state.step < 8:
            self.step(ddp, optimizer, second, scheduler, scaler, temperature, state)
        return self.result(model, temperature, state)

    def step(self, ddp, optimizer, second, scheduler, scaler, temperature, state):
        import torch
        from job import Stop

        fault = self.faults[0] if self.faults else None
        now = fault is not None and state.step == fault["version"]
        optimizer.zero_grad()
        second.zero_grad()
        state.cursor += 1
        if self.variant == "accumulate":
            with ddp.no_sync():
                ddp(torch.randn(5, 32)).square().mean().backward()
        loss = ddp(torch.randn(5, 32)).square().mean() + temperature.square().sum()
        if now and "behind" not in fault and "torn" not in fault:
            raise Stop
        scaler.scale(loss).backward()
        self.dist.all_reduce(temperature.grad)
        if now and self.rank in fault.get("behind", ()):
            raise Stop
        scaler.step(optimizer)
        if now and self.rank in fault.get("torn", ()):
            raise Stop
        scaler.step(second)
        scaler.update()
        scheduler.step()
        self.ema.update(ddp.module)
        state.seen += 5
        state.spent += 1
        self.schedule.step(random.random())
        ddp.module.heat *= 0.9
        ddp.module.updates += 1
        ddp.module.follow("bias")
        state.commit()
        if now:
            raise Stop

    def result(self, model, temperature, state):
        import hashlib

        import torch

        parts = model.state_dict()
        heat = parts.pop("_extra_state")
        data = b"".join(
            t.detach().numpy().tobytes()
            for t in (*parts.values(), *self.ema.shadow.values(), temperature)
        )
        common = repr((heat, state.seen, self.schedule.done, random.random()))
        return {
            "digest": hashlib.sha256(data + common.encode()).hexdigest(),
            "random": torch.rand(1).item(),
            "cursor": state.cursor,
            "spent": state.spent,
        }

    # -------------------------------------------------------- other scenarios

    def mismatch(self, store):
        import torch

        from taskd.core.commands import Move
        from taskd.errors import StateError
        from taskd.worker.train_state import TrainState

        self.store = store
        self.connect()

        def entry():
            TrainState(model=torch.nn.Sequential(torch.nn.Linear(2, 3 + self.rank))).restore()

        self.job.enter(entry)
        self.job.resume(0, {0: Move(0), 1: Move(1, 0)})
        try:
            self.job.enter(entry)
        except StateError as error:
            return {"error": str(error)}
        return {"error": "none"}

    def odd(self, store):
        import torch

        from taskd.core.commands import Move
        from taskd.worker.restore import chunks
        from taskd.worker.train_state import TrainState

        chunks._CHUNK_BYTES, chunks._PACKED_BYTES = 100_000, 10_000
        self.store = store
        self.connect()

        class Odd(torch.nn.Module):
            def __init__(self, seed):
                super().__init__()
                g = torch.Generator().manual_seed(seed)
                rand = lambda *shape: torch.rand(*shape, generator=g)  # noqa: E731
                self.big = torch.nn.Parameter(rand(70_001))
                self.last = torch.nn.Parameter(
                    rand(8, 30, 20, 20).contiguous(memory_format=torch.channels_last)
                )
                self.narrow = torch.nn.Parameter(rand(3001).to(torch.bfloat16))
                for name, value in {
                    "scalar": rand(1)[0],
                    "empty": rand(0, 3),
                    "flag": rand(7) > 0.5,
                    "integers": (rand(5) * 99).long(),
                    "pairs": torch.complex(rand(4), rand(4)),
                    "turned": rand(60, 70).t(),
                    "small": rand(2000),
                }.items():
                    self.register_buffer(name, value)

        def entry(seed):
            model = Odd(seed)
            optimizer = torch.optim.Adam(model.parameters())
            state = TrainState(model=model, optimizer=optimizer)
            state.restore()
            if seed == 0 and self.rank == 0:
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                optimizer.step()
                state.commit()
            own = [
                *model.state_dict().values(),
                *(t for s in optimizer.state.values() for t in s.values()),
            ]
            return [t.clone() for t in own]

        expected, _ = self.job.enter(entry, 0)
        if self.rank:
            self.job.replace()
        self.job.resume(1, {0: Move(0), 1: Move(1, 0), 2: Move(2, 0)})
        got, _ = self.job.enter(entry, 5 + self.rank)
        shared = [None] * self.world
        self.dist.all_gather_object(shared, got)
        if self.rank == 0:
            return {"equal": all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))}
        return {
            "equal": len(got) == 19
            and all(torch.equal(a, b) for a, b in zip(shared[0], got, strict=True))
        }


def main():
    world, scenario, directory, options = (
        int(sys.argv[1]),
        sys.argv[2],
        sys.argv[3],
        json.loads(sys.argv[4]),
    )
    import torch
    import torch._dynamo  # before the fork: the first optimizer step needs it
    import torch.distributed as dist

    torch.set_num_threads(1)
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            ranks = Rank(rank, world, options)
            store = dist.FileStore(f"{directory}/store", world)
            result = ranks.run(store) if scenario == "train" else getattr(ranks, scenario)(store)
            Path(directory, f"rank{rank}").write_text(json.dumps(result))
            sys.stderr.flush()
            os._exit(0)
        pids.append(pid)
    codes = [os.waitpid(pid, 0)[1] for pid in pids]
    sys.exit(1 if any(codes) else 0)


if __name__ == "__main__":
    main()
