"""The documented restoration of a hybrid parallel model, pangu_alpha: its functions as they are.

On a CPU MindSpore splits no model, and refuses GROUP_INFO_FILE: the test writes the group files,
and the variable is taken away after the script has read it. `model.build` is for Ascend, too.
"""

import glob
import json
import os
import sys
import time
import types

import mindspore as ms
import mindspore.communication.management as D  # noqa: N812 - as it is documented
from mindspore import load_checkpoint, load_param_into_net
from mindspore.train import Callback, CheckpointConfig, ModelCheckpoint

from mindx_elastic.restore_module import RestoreStrategyGenerator
from mindx_elastic.terminating_message import ExceptionCheckpoint
from tests.mindspore.mindx import net

TOTAL = 60
args_opt = types.SimpleNamespace(
    save_checkpoint_path=sys.argv[1],
    ckpt_name_prefix="pangu",
    has_trained_epoches=0,
    has_trained_steps=0,
    save_checkpoint_steps=1000,
    keep_checkpoint_max=1,
)


def add_checkpoint_callback_policy(args_param, callback, rank_id):
    ckpt_append_info = [
        {"epoch_num": args_param.has_trained_epoches, "step_num": args_param.has_trained_steps}
    ]
    ckpt_config = CheckpointConfig(
        save_checkpoint_steps=args_param.save_checkpoint_steps,
        keep_checkpoint_max=args_param.keep_checkpoint_max,
        integrated_save=False,
        append_info=ckpt_append_info,
    )
    ckpoint_cb = ModelCheckpoint(
        prefix=args_param.ckpt_name_prefix + str(rank_id),
        directory=os.path.join(args_param.save_checkpoint_path, f"rank_{rank_id}"),
        config=ckpt_config,
    )
    ckpoint_exp = ExceptionCheckpoint(
        prefix=args_param.ckpt_name_prefix + str(rank_id),
        directory=os.path.join(args_param.save_checkpoint_path, f"rank_{rank_id}"),
        config=ckpt_config,
    )
    callback.append(ckpoint_cb)
    callback.append(ckpoint_exp)


def get_exception_checkpoints(args_param):
    print("======start exception checkpoint", flush=True)
    restore_ranks = os.getenv("RESTORE_RANKS")
    if not restore_ranks:
        return None
    restore_rank_list = list(map(int, restore_ranks.split(",")))
    ckpt_file_list = []
    ckpt_name = args_param.ckpt_name_prefix
    for ckpt_rank in restore_rank_list:
        ckpt_pattern = os.path.join(
            args_param.save_checkpoint_path, f"rank_{ckpt_rank}", f"{ckpt_name}*_breakpoint.ckpt"
        )
        ckpt_files = glob.glob(ckpt_pattern)
        if not ckpt_files:
            print(f"There is no ckpt file with pattern {ckpt_pattern}, so skip the loading.")
            return None
        ckpt_files.sort(key=os.path.getmtime, reverse=True)
        ckpt_file_list.append(ckpt_files[0])
    print(f"checkpoint file {ckpt_file_list}")
    return ckpt_file_list


def check_exception_checkpoints(ckpt_file_list):
    ckpt_size_list = [os.path.getsize(ckpt_file) for ckpt_file in ckpt_file_list]
    return not len(set(ckpt_size_list)) > 1


def restore_exception_checkpoint(args_param, network):
    restore_strategy_generator = RestoreStrategyGenerator()
    res_query = restore_strategy_generator.gen_fault_tolerance_strategy()
    if not res_query:
        return False
    restore_ranks, restore_dict = res_query
    print(f"restore ranks: {restore_ranks}, restore dict: {restore_dict}", flush=True)
    if not restore_ranks:
        return False
    if not restore_dict:
        return False
    os.environ["RESTORE_RANKS"] = restore_ranks
    os.environ["RESTORE_RANKS_MAP"] = str(restore_dict)
    if os.getenv("RESTORE_RANKS") == "-1":
        return False
    ckpt_file_list = get_exception_checkpoints(args_param)
    restore_flag = False
    if ckpt_file_list:
        restore_flag = check_exception_checkpoints(ckpt_file_list)
    if not restore_flag:
        return False
    ckpt_name = args_param.ckpt_name_prefix
    restore_ranks_map = os.getenv("RESTORE_RANKS_MAP")
    if not restore_ranks_map:
        return False
    try:
        restore_ranks_map_json = json.loads(restore_ranks_map)
        map_rank_id = D.get_rank()
        for key in restore_ranks_map_json:
            key_list = list(key.split(","))
            if str(D.get_rank()) in key_list:
                map_rank_id = restore_ranks_map_json.get(key)
        print(f"loading map rank id {map_rank_id}", flush=True)
        ckpt_pattern = os.path.join(
            args_param.save_checkpoint_path, f"rank_{map_rank_id}", f"{ckpt_name}*breakpoint.ckpt"
        )
        ckpt_files = glob.glob(ckpt_pattern)
        ckpt_files.sort(key=os.path.getmtime, reverse=True)
        param_dict = load_checkpoint(ckpt_files[0])
        print(f" checkpoint param dict epoch num {param_dict.get('epoch_num')}")
        if param_dict.get("epoch_num") and param_dict.get("step_num"):
            args_param.has_trained_epoches = int(param_dict["epoch_num"].data.asnumpy())
            args_param.has_trained_steps = int(param_dict["step_num"].data.asnumpy())
        load_param_into_net(network, param_dict)
    except TypeError:
        return False
    else:
        return True


class Steps(Callback):
    def on_train_step_end(self, run_context):
        print("step", run_context.original_args().cur_step_num, flush=True)
        time.sleep(0.02)


def run_train():
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    D.init()
    rank = D.get_rank()
    ms.set_auto_parallel_context(
        parallel_mode="data_parallel", gradients_mean=True, device_num=D.get_group_size()
    )
    group_info_file = os.getenv("GROUP_INFO_FILE")
    if group_info_file:
        os.environ["GROUP_INFO_FILE_REFLECT"] = group_info_file
    if group_info_file:
        with open(os.environ["GROUP_INFO_ENV"], "a") as outfile:
            outfile.write(f"export GROUP_INFO_FILE_REFLECT={group_info_file}\n")
        del os.environ["GROUP_INFO_FILE"]
    model = net.model()
    flag = restore_exception_checkpoint(args_opt, model._train_network)
    print("flag", flag, args_opt.has_trained_steps, flush=True)
    callback = [Steps()]
    add_checkpoint_callback_policy(args_opt, callback, rank)
    rest = TOTAL - args_opt.has_trained_steps
    model.train(1, net.dataset(rank, rest), callbacks=callback, dataset_sink_mode=False)
    print("digest", net.digest(model), flush=True)


run_train()
