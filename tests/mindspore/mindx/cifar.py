"""The script of the page on graceful exits, filled up where the page has dots."""

import argparse
import glob
import os
import sys

import mindspore as ms
from mindspore.train import CheckpointConfig, LossMonitor, ModelCheckpoint

# The documented lines.
from mindx_elastic.terminating_message import ExceptionCheckpoint
from tests.mindspore.mindx import net

args_opt = argparse.Namespace(do_train=True, train_url=sys.argv[1])
ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
model = net.model()
cur_epoch_num = 0
found = sorted(glob.glob(f"{args_opt.train_url}/*_breakpoint.ckpt"), key=os.path.getmtime)
if found:
    param_dict = ms.load_checkpoint(found[-1])
    cur_epoch_num = int(param_dict["epoch_num"].asnumpy())
    ms.load_param_into_net(model._train_network, param_dict)
    print("loaded", os.path.basename(found[-1]), cur_epoch_num, flush=True)


def create_dataset():
    return net.dataset(0, 20)


if args_opt.do_train:
    dataset = create_dataset()
    loss_cb = LossMonitor()
    cb = [loss_cb]
    if int(os.getenv("RANK_ID")) == 0:
        batch_num = dataset.get_dataset_size()
        config_ck = CheckpointConfig(
            save_checkpoint_steps=batch_num,
            keep_checkpoint_max=35,
            async_save=True,
            append_info=[{"epoch_num": cur_epoch_num}],
            exception_save=True,
        )
        ckpoint_cb = ModelCheckpoint(
            prefix="train_resnet_cifar10", directory=args_opt.train_url, config=config_ck
        )
        ckpoint_exp = ExceptionCheckpoint(
            prefix="train_resnet_cifar10", directory=args_opt.train_url, config=config_ck
        )
        cb += [ckpoint_cb, ckpoint_exp]
    epochs = int(os.environ.get("EPOCHS", "100000"))
    model.train(epochs, dataset, callbacks=cb, dataset_sink_mode=False)
print("done", flush=True)
