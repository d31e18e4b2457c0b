"""A training with ExceptionCheckpoint in which a test can do what it likes; says what it does."""

import glob
import logging
import os
import sys
import time

import mindspore as ms
from mindspore import nn, ops
from mindspore.train import Callback, CheckpointConfig, ModelCheckpoint, serialization

from mindx_elastic.terminating_message import ExceptionCheckpoint
from tests.mindspore.mindx import net

logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
FOLDER = sys.argv[1]
TOTAL = 60
WORLD = int(os.environ.get("MS_WORKER_NUM", "1"))


def wanted(name: str, rank: int, step: int) -> bool:
    return os.environ.get(name) == f"{rank}@{step}"


class Torn(nn.Momentum):
    """Fails in the middle of its 30th step, as a device does."""

    def __call__(self, gradients):
        if int(self.global_step.asnumpy()[0]) == 29:
            ops.assign_add(self.global_step, ms.Tensor([1], ms.int32))
            ops.assign(self.parameters[0], self.parameters[0] * 2)
            raise RuntimeError("injected into the optimizer")
        return super().__call__(gradients)


class FailingLoss(nn.MSELoss):
    """Fails in a step, before the optimizer runs."""

    calls = 0

    def construct(self, logits, labels):
        FailingLoss.calls += 1
        if FailingLoss.calls == 30:
            raise RuntimeError("injected into the loss")
        return super().construct(logits, labels)


class Says(Callback):
    """Steps; faults behind them."""

    def __init__(self, rank: int, base: int) -> None:
        super().__init__()
        self.rank, self.base = rank, base

    def on_train_step_begin(self, run_context):
        step = self.base + run_context.original_args().cur_step_num
        if wanted("WAIT_BEFORE", self.rank, step):
            self.wait("before")
        if wanted("SLOW", self.rank, step):
            print("slow", flush=True)
            pass_gate("STEP_GATE")

    def on_train_step_end(self, run_context):
        step = self.base + run_context.original_args().cur_step_num
        print("step", step, flush=True)
        time.sleep(0.02)
        if wanted("HANG", self.rank, step):
            self.wait("hangs")
        if wanted("RAISE", self.rank, step):
            raise RuntimeError("injected into a call-back")

    def on_eval_end(self, run_context):
        print("evaluated", flush=True)

    @staticmethod
    def wait(what: str) -> None:
        print(what, flush=True)
        time.sleep(1000)


def gated_save(original):
    """The first breakpoint file is half written when it stops at a gate."""

    def save(obj, name, *args, **kwargs):
        original(obj, name, *args, **kwargs)
        if "breakpoint" in name:
            print("saving", flush=True)
            pass_gate("GATE")

    return save


def pass_gate(name: str) -> None:
    """Wait until the test writes to it."""
    with open(os.environ[name]) as gate:
        gate.read()


def main() -> None:
    mode = ms.PYNATIVE_MODE if os.environ.get("PYNATIVE") else ms.GRAPH_MODE
    ms.set_context(mode=mode, device_target="CPU")
    rank = 0
    if WORLD > 1:
        from mindspore.communication import get_rank, init

        init()
        rank = get_rank()
        ms.set_auto_parallel_context(
            parallel_mode="data_parallel", gradients_mean=True, device_num=WORLD
        )
    model = net.model(Torn if os.environ.get("TORN") else nn.Momentum)
    if os.environ.get("FAIL_LOSS"):
        model._train_network.network._loss_fn = FailingLoss()
    folder = os.path.join(FOLDER, f"rank_{rank}")
    base = load(model, folder)
    if "GATE" in os.environ:
        serialization.save_checkpoint = gated_save(serialization.save_checkpoint)
    config = CheckpointConfig(
        save_checkpoint_steps=25,
        async_save=bool(os.environ.get("ASYNC")),
        append_info=[{"epoch_num": 0, "step_num": base}],
        exception_save=os.environ.get("EXCEPTION_SAVE", "1") == "1",
    )
    callbacks = [
        Says(rank, base),
        ModelCheckpoint(prefix="net", directory=folder, config=config),
        ExceptionCheckpoint(prefix="net", directory=folder, config=config),
    ]
    if os.environ.get("WRONG_ORDER"):
        callbacks.reverse()
    if os.environ.get("FIT"):
        model.fit(9, net.dataset(rank, 20), net.dataset(rank, 2), callbacks=callbacks)
    model.train(1, net.dataset(rank, TOTAL - base), callbacks=callbacks, dataset_sink_mode=False)
    print("digest", net.digest(model), flush=True)


def load(model, folder: str) -> int:
    found = sorted(glob.glob(f"{folder}/*_breakpoint.ckpt"), key=os.path.getmtime)
    if not found:
        return 0
    parameters = ms.load_checkpoint(found[-1])
    ms.load_param_into_net(model._train_network, parameters)
    print("loaded", os.path.basename(found[-1]), int(parameters["step_num"].asnumpy()), flush=True)
    return int(parameters["step_num"].asnumpy())


main()
