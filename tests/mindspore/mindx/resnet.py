"""The documented dying gasp of ResNet: its functions as they are there, a smaller net."""

import datetime
import glob
import os
import sys
import types

import mindspore as ms
from mindspore import load_checkpoint
from mindspore.train import CheckpointConfig, LossMonitor, ModelCheckpoint, TimeMonitor

from mindx_elastic.terminating_message import ExceptionCheckpoint
from tests.mindspore.mindx import net

config = types.SimpleNamespace(
    output_path=sys.argv[1],
    checkpoint_path="./checkpoint/",
    pre_trained=sys.argv[1],
    has_trained_epoch=0,
    has_trained_step=0,
    save_checkpoint=True,
    save_checkpoint_epochs=5,
    keep_checkpoint_max=3,
    epoch_size=int(os.environ.get("EPOCHS", "100000")),
)


def set_save_ckpt_dir():
    return os.path.join(config.output_path, config.checkpoint_path, "ckpt_0")


def _is_time_interval_valid():
    ckpt_save_dir = os.path.join(config.output_path, config.checkpoint_path, "ckpt_0")
    ckpt_pattern = os.path.join(ckpt_save_dir, "*breakpoint.ckpt")
    ckpt_files = glob.glob(ckpt_pattern)
    if not ckpt_files:
        return True
    ckpt_files.sort(key=os.path.getmtime, reverse=True)
    last_breakpoint_ckpt = ckpt_files[0]
    last_breakpoint_ckpt_timestamp = os.path.getmtime(last_breakpoint_ckpt)
    return int((datetime.datetime.now() - datetime.timedelta(minutes=1)).timestamp()) > int(
        last_breakpoint_ckpt_timestamp
    )


def load_pre_trained_checkpoint():
    param_dict = None
    if config.pre_trained and os.path.isdir(config.pre_trained):
        ckpt_save_dir = os.path.join(config.output_path, config.checkpoint_path, "ckpt_0")
        ckpt_pattern = os.path.join(ckpt_save_dir, "*.ckpt")
        ckpt_files = glob.glob(ckpt_pattern)
        if not ckpt_files:
            print(f"There is no ckpt file in {ckpt_save_dir}, pre_trained is unsupported.")
        else:
            ckpt_files.sort(key=os.path.getmtime, reverse=True)
            print(f"pre trained ckpt model {ckpt_files[0]} loading", flush=True)
            param_dict = load_checkpoint(ckpt_files[0])
    return param_dict


def train_net():
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    model = net.model()
    param_dict = load_pre_trained_checkpoint()
    if param_dict is not None:
        config.has_trained_epoch = int(param_dict["epoch_num"].asnumpy())
        config.has_trained_step = int(param_dict["step_num"].asnumpy())
        ms.load_param_into_net(model._train_network, param_dict)
        print("has trained", config.has_trained_epoch, config.has_trained_step, flush=True)
    step_size = 20
    cb = [TimeMonitor(data_size=step_size), LossMonitor()]
    ckpt_save_dir = set_save_ckpt_dir()
    if config.save_checkpoint:
        ckpt_append_info = [
            {"epoch_num": config.has_trained_epoch, "step_num": config.has_trained_step}
        ]
        config_ck = CheckpointConfig(
            save_checkpoint_steps=config.save_checkpoint_epochs * step_size,
            keep_checkpoint_max=config.keep_checkpoint_max,
            append_info=ckpt_append_info,
            exception_save=_is_time_interval_valid(),
        )
        ckpt_cb = ModelCheckpoint(prefix="resnet", directory=ckpt_save_dir, config=config_ck)
        cb += [ckpt_cb]
        if _is_time_interval_valid():
            ckpoint_exp = ExceptionCheckpoint(
                prefix="resnet", directory=ckpt_save_dir, config=config_ck
            )
            cb += [ckpoint_exp]
            print("dying gasp", flush=True)
    model.train(config.epoch_size, net.dataset(0, step_size), callbacks=cb, dataset_sink_mode=False)


train_net()
print("done", flush=True)
