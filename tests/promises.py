"""What README.md promises, in its own words, and what proves it on real processes in `make test`.

tests/lanes.py sees to it that each pattern fits a test that is not extended, and
tests/unit/test_promises.py, that the words are there, and that no promise of a list is left out.
"""

from __future__ import annotations

_RECOVERY = "tests/process/test_recovery.py::"
_HANGS = "tests/process/test_hangs.py::"
_ENTRY = "tests/process/test_entry_point.py::"
_COMMAND = "tests/process/test_one_command.py::"
_DUMP = "tests/process/test_dump.py::"
_ALL_GONE = "tests/process/test_all_gone.py::"
_ANY_RANK = f"{_RECOVERY}test_kill_of_any_rank_in_the_middle_of_a_step[[]0]"
_TWENTY = f"{_RECOVERY}test_twenty_in_one_run"
_ANY_WAY = f"{_RECOVERY}test_every_other_way_to_die_in_one_run"
_UNMODIFIED = "tests/process/test_unmodified.py::test_an_unmodified_script_is_restarted_warm*"
_MINIMAL = "tests/examples/test_examples.py::test_the_minimal_script_*"

# By words of the page, white space aside: patterns of tests (fnmatch, with [[] for a bracket).
PROMISES: dict[str, tuple[str, ...]] = {
    # the introduction
    "all others keep their processes and their state, and training goes on with the same step": (
        _ANY_RANK,
        _TWENTY,
    ),
    "If TaskD itself fails (no manager, an unknown torch, no C library), training goes on": (
        f"{_RECOVERY}test_without_a_manager_the_job_trains_after_a_warning",
        f"{_RECOVERY}test_without_a_manager_a_death_restarts_the_group_as_torchrun_does",
        "tests/process/test_patch.py::test_unknown_torch_is_said_and_left_alone*",
        "tests/process/test_surroundings.py::test_without_libtaskd_*",
    ),
    "A script that uses neither name gets a restart of all its processes": (
        _UNMODIFIED,
        "tests/examples/test_examples.py::test_the_unmodified_script_*",
    ),
    # Use
    "the manager is started with the job, and ends with it": (
        f"{_COMMAND}test_a_killed_rank_is_replaced_in_place",
        f"{_COMMAND}test_a_manager_that_is_killed_is_started_again_and_recovers*",
        f"{_COMMAND}test_the_manager_does_not_outlive_a_killed_torchrun",
    ),
    "Settings fit into the same line": (f"{_COMMAND}test_a_killed_rank_is_replaced_in_place",),
    "or edit torch once": ("tests/process/test_patch.py::test_sed_installs_it",),
    "All of them do nothing unless `TASKD_PROCESS_ENABLE` is `on`": (
        f"{_ENTRY}test_a_torchrun_that_does_not_ask_for_it_is_left_alone",
    ),
    "To use two of them is the same as to use one": (
        f"{_ENTRY}test_it_is_there_once_however_it_is_asked_for*",
    ),
    "it has precedence over the automatic one": (
        f"{_COMMAND}test_a_manager_py_that_is_there_is_used",
    ),
    "This is the whole difference between a plain DDP script and": (_MINIMAL,),
    "What is expensive and does not change (data set, tokenizer) can stay outside": (
        f"{_RECOVERY}test_groups_made_outside_the_function*",
        f"{_RECOVERY}test_groups_made_above_the_decorated_function",
    ),
    "`TrainState` takes modules, optimizers, schedulers, grad scalers": (
        "tests/process/test_exchange.py::test_variants_of_the_script_end_with_the_same_bits*",
        "tests/process/test_modes.py::test_gradients_and_weights_of_autocast_*",
    ),
    "Under plain `python` or plain `torchrun` the script runs as before": (
        "tests/process/test_loaders.py::test_each_sample_is_read_once_*",
    ),
    "New processes find imported what takes long to import": (
        "tests/process/test_preloading.py::test_replacements_start_with_the_modules_*",
    ),
    "The same facts are appended to `taskd_log/recoveries.jsonl`": (_ANY_RANK,),
    # What is promised
    "It does not matter how it ends": (
        _ANY_WAY,
        f"{_RECOVERY}test_an_exception_in_one_rank_replaces_no_process",
        "tests/process/test_last_words.py::test_a_null_pointer_is_recovered_*",
    ),
    "which rank it is, rank 0 included": (_ANY_RANK, _TWENTY),
    "before and inside `init_process_group`": (
        f"{_RECOVERY}test_before_and_inside_init_process_group[[]in-init]",
        f"{_RECOVERY}test_groups_made_outside_the_function[[]boot]",
    ),
    "in the forward or backward pass, in the optimizer, before `commit()`": (_TWENTY,),
    "while others have already finished": (
        f"{_RECOVERY}test_while_the_others_have_already_finished*",
    ),
    "or in the middle of another recovery": (
        f"{_RECOVERY}test_one_during_the_recovery_of_another",
    ),
    "Healthy processes are not replaced and keep their memory": (
        _TWENTY,
        f"{_RECOVERY}test_two_at_once",
    ),
    "No step that a surviving process has committed is done again": (
        _TWENTY,
        "tests/process/test_exchange.py::test_ranks_that_are_one_version_behind_*",
    ),
    "Results are bit-identical": (
        _TWENTY,
        _ANY_WAY,
        "tests/process/test_exchange.py::test_a_replaced_rank_leaves_no_trace_in_the_result*",
    ),
    "An error that comes back at the same step, even in a new process, ends the job": (
        f"{_RECOVERY}test_an_exception_that_comes_back_at_the_same_step_ends_the_job",
        f"{_RECOVERY}test_a_process_that_is_broken_is_replaced_the_second_time",
    ),
    "so does a job that recovers again and again without a new step": (
        "tests/process/test_no_progress.py::test_exceptions_that_differ_*",
        "tests/process/test_no_progress.py::test_a_rank_that_is_killed_at_one_step_*",
    ),
    "is found, named with its stacks, and replaced": (
        f"{_HANGS}test_a_rank_that_stands_still_is_replaced*",
    ),
    "A process that is slow, writes a checkpoint or evaluates is not taken for hung": (
        f"{_HANGS}test_slow_steps_a_long_checkpoint_and_a_slow_start_are_no_hangs",
    ),
    "However the job ends, no process, socket file or shared memory is left": (
        f"{_RECOVERY}test_nothing_is_left_when_torchrun_is_ended[[]15]",
        f"{_RECOVERY}test_nothing_is_left_when_torchrun_is_ended[[]9]",
        f"{_RECOVERY}test_a_spent_budget_ends_the_job_and_says_so",
    ),
    # What is not, but can be had
    "A lost node is replaced only if you ask for it": (
        "tests/process/test_spares.py::test_a_spare_takes_the_place_of_a_lost_node*",
        "tests/process/test_nodes.py::test_another_torchrun_takes_the_place_of_a_lost_node*",
    ),
    "may be lost in a job of at least three nodes, or of two and a spare": (
        "tests/process/test_elections.py::test_the_manager_is_lost_with_its_node*",
        "tests/process/test_elections.py::test_of_two_nodes_the_manager_is_lost_with_its_node*",
    ),
    "until it is back only with `elastic-training` in that list": (
        "tests/process/test_elastic.py::test_the_others_go_on_and_the_node_comes_back*",
    ),
    "it leaves a checkpoint first, from which the same command line goes on": (
        f"{_DUMP}test_the_next_start_goes_on_to_the_last_bit*",
        "tests/process/test_networks.py::test_a_host_that_is_killed_is_named_and_the_job_saved",
    ),
    "State may be replicated (DDP) or sharded (FSDP2, HSDP, TP, FSDP1, ZeroRedundancyOptimizer)": (
        "tests/process/test_sharded.py::test_a_shard_comes_from_its_replica*",
        "tests/process/test_fsdp1.py::test_a_dump_is_whole_and_the_next_start_goes_on_from_it*",
    ),
    "at most k steps are done again, also if all processes die at once": (
        "tests/process/test_sharded.py::test_a_shard_that_nobody_has_comes_from_node_memory*",
        f"{_ALL_GONE}test_all_go_on_from_node_memory[[]fsdp-*",
        f"{_ALL_GONE}test_all_go_on_from_node_memory[[]flat-FULL_SHARD-*",
    ),
    "Else it is lost, and all processes are restarted": (
        f"{_ALL_GONE}test_without_snapshots_all_start_anew_and_the_record_says_why",
    ),
    "A script run has one recoverable function": (
        "tests/process/test_entering.py::test_a_script_may_decorate_a_function_and_not_call_it",
    ),
    "all processes are restarted. Put no collective between the two": (
        "tests/process/test_loops.py::test_one_for_both_phases_keeps_them_in_the_first_alone*",
        "tests/process/test_loops.py::test_an_evaluation_at_the_head_of_the_loop_*",
    ),
    "`DataLoader(shuffle=True)` by itself draws another order after a fault": (
        "tests/process/test_loaders.py::test_an_order_that_nothing_carries_is_warned_of",
        "tests/process/test_loaders.py::test_each_sample_is_read_once_*",
    ),
    "takes anybody's messages unless a secret is set": (
        "tests/process/test_keys.py::test_another_holder_of_the_secret_*",
        "tests/process/test_other_secret.py::test_training_goes_on_and_the_logs_name_the_secret*",
    ),
    # Checkpoints
    "writes a checkpoint every 1000 steps while training goes on": (
        f"{_DUMP}test_periodic_checkpoints_survive_the_death_of_everything",
    ),
    "it outlives a torchrun or a container that is": (
        "tests/process/test_node_memory.py::test_a_torchrun_on_the_same_host_has_the_snapshots_*",
    ),
    "keeps another one in the memory of a node on another host": (
        "tests/process/test_mirrors.py::test_another_node_gets_the_shards_of_the_lost_one_*",
    ),
    "or a pod that is evicted": (
        "tests/process/test_sigterm.py::test_to_workers_saves_the_step_that_is_under_way*",
        "tests/process/test_sigterm.py::test_to_everything_at_once",
    ),
    "`restore()` reads the newest whole one, whatever the number of processes now": (
        f"{_DUMP}test_another_number_of_ranks_goes_on_from_it*",
        "tests/process/test_sharded.py::test_a_dump_without_a_rank_is_whole_and_another_world_*",
    ),
    "Whose they are is said by the name of the job": (
        f"{_DUMP}test_two_jobs_in_one_folder_leave_each_other_alone",
    ),
    # More
    "faults into your own job, by a seed, and a verdict": (
        "tests/process/test_chaos.py::test_two_faults_of_a_seed_*",
    ),
}

# Words of those points of a list that promise nothing: they say what the reader has to see to.
LIMITS = (
    "draws from a global random generator between `restore()` and its first step",
    "A `DataLoader` draws one number from torch's generator whenever a pass begins",
    "Do not catch what collectives raise",
)
