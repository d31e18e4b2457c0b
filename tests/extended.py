"""Tests that `make test` leaves out, and what proves the fact of each there: see tests/lanes.py."""

from __future__ import annotations

# By file: patterns of names (fnmatch, with [[] for a bracket), and what proves the same in
# `make test`.
_OF: dict[str, dict[str, str]] = {
    "tests/process/test_recovery.py": {
        "test_kill_of_any_rank_in_the_middle_of_a_step[[][13]]": (
            "ranks 0 and 2; all ranks in test_twenty_in_one_run"
        ),
        "test_kill_at_each_place_of_the_first_second_and_last_step[[][12]-*": (
            "test_twenty_in_one_run kills at each place"
        ),
        "test_kill_at_each_place_of_the_first_second_and_last_step[[]0-[sbo]*": (
            "the same, and [0-forward] for the first step"
        ),
        "test_kill_at_each_place_of_the_first_second_and_last_step[[]11-[sof]*": (
            "the same, and [11-backward] and [11-before-commit] for the last step"
        ),
        "test_every_other_way_to_die[[]*": "test_every_other_way_to_die_in_one_run",
        "test_one_that_restores_while_another_recovers": (
            "test_one_during_the_recovery_of_another; simulation"
        ),
        "test_one_that_was_just_replaced[[]0@0:boot]": (
            "[0@5:step]; simulation: any death during a recovery"
        ),
        "test_groups_made_outside_the_function[[]in-init]": "[boot]",
        "test_while_the_others_have_already_finished[[]3]": "[0]",
        "test_batch_norm_statistics_are_exact": (
            "test_dump.py trains with batch norm; test_exchange.py compares buffers"
        ),
        "test_the_largest_is_killed_as_by_an_out_of_memory_killer": (
            "SIGKILL from outside is SIGKILL: test_kill_of_any_rank"
        ),
        "test_each_rendezvous[[]0-*": (
            "[1-standalone] and [1-c10d]; the static one is that of nearly all process tests"
        ),
        "test_each_rendezvous[[]1-static]": "the static one is that of nearly all process tests",
        "test_nothing_is_left_when_torchrun_is_ended[[]2]": "SIGTERM and SIGKILL",
        "test_two_agents_on_one_machine[[]3]": "[0]",
        "test_kill_of_any_rank_in_the_middle_of_a_step[[]2]": "[0]",
        "test_kill_at_each_place_of_the_first_second_and_last_step[[]11-backward]": (
            "[11-before-commit]; test_twenty_in_one_run kills at each place"
        ),
        "test_before_and_inside_init_process_group[[]before-init]": "[in-init]",
        "test_groups_made_above_the_decorated_function": "[boot]",
        "test_each_rendezvous[[]1-standalone]": "[1-c10d]; test_one_command.py",
    },
    "tests/process/test_unmodified.py": {
        "test_an_unmodified_script_is_restarted_warm[[][cs]t*": "[c10d]",
        "test_an_unmodified_script_is_restarted_warm[[]standalone]": "[c10d]",
        "test_forks_and_fresh_interpreters_meet_after_a_restart": (
            "test_an_unmodified_script_is_restarted_warm; tests/unit/test_trainer_stores.py"
        ),
    },
    "tests/process/test_sharded.py": {
        "test_a_shard_comes_from_its_replica[[]hsdp-step]": "[hsdp-forward], [hsdp-before-vote]",
        "test_a_shard_comes_from_its_replica[[]hsdp-backward-*": (
            "[hsdp-forward], [hsdp-before-vote]"
        ),
        "test_a_shard_comes_from_its_replica[[]stages-*": (
            "[zero-before-vote]; tests/unit/worker/test_sharded_state.py: stages"
        ),
        "test_whoever_is_left_behind_by_a_vote_steps_too[[][ts]*": (
            "[hsdp-0]; simulation: a death at any moment of the vote"
        ),
        "test_whoever_is_left_behind_by_a_vote_steps_too[[]hsdp-1]": (
            "[hsdp-0]; simulation: a death at any moment of the vote"
        ),
        "test_a_death_behind_the_vote_never_mixes_versions[[]before-commit]": (
            "[optimizer]; simulation"
        ),
        "test_a_dump_takes_the_shard_of_a_rank_that_hangs": (
            "tests/unit/core/test_dying.py; [1@5:forward:kill] takes shards from node memory"
        ),
        "test_a_dump_without_a_rank_is_whole_and_another_world_goes_on_from_it[[]tp-]": (
            "[hsdp-fsdp]; tests/unit/worker/test_sharded_checkpoints.py"
        ),
        "test_a_dump_without_a_rank_is_whole_and_another_world_goes_on_from_it[[]stages-]": (
            "the same"
        ),
        "test_a_shard_that_nobody_has_comes_from_node_memory[[]1-step]": (
            "[1-before-vote], [3-forward]"
        ),
        "test_a_shard_that_nobody_has_comes_from_node_memory[[]1-backward-end]": (
            "[1-before-vote], [3-forward]"
        ),
        "test_a_dump_takes_the_shards_of_the_dead_from_node_memory[[]1@5:forward:together*": (
            "[1@5:forward:kill]"
        ),
        "test_generators_of_the_dead_are_in_a_dump_of_an_older_version": (
            "tests/unit/worker/test_sharded_checkpoints.py: what is a dead rank's alone"
        ),
        "test_a_shard_comes_from_its_replica[[]tp-*": (
            "[hsdp-forward]; tests/unit/worker/test_sharded_state.py: tp_fsdp"
        ),
        "test_a_shard_comes_from_its_replica[[]hsdp-before-vote]": (
            "[hsdp-forward], [zero-before-vote]; simulation: a death at any moment of the vote"
        ),
        "test_a_shard_that_nobody_has_comes_from_node_memory[[]3-forward]": "[1-before-vote]",
    },
    "tests/process/test_fsdp1.py": {
        "test_a_shard_comes_from_node_memory[[]flat-FULL_SHARD-1-[so]*": (
            "[flat-FULL_SHARD-1-backward-end]"
        ),
        "test_a_shard_comes_from_node_memory[[]flat-FULL_SHARD-1-before-vote]": (
            "test_sharded.py, the same with FSDP2"
        ),
        "test_a_shard_comes_from_node_memory[[]flat-FULL_SHARD-orig-*": (
            "[flat-SHARD_GRAD_OP-orig-3-forward]; tests/unit/worker/test_units.py"
        ),
        "test_a_shard_comes_from_node_memory[[]flat-SHARD_GRAD_OP-1-*": (
            "[flat-SHARD_GRAD_OP-orig-3-forward]; tests/unit/worker/test_units.py"
        ),
        "test_a_shard_comes_from_node_memory[[]flat-SHARD_GRAD_OP-orig-3-before-commit]": (
            "[flat-SHARD_GRAD_OP-orig-3-forward]"
        ),
        "test_there_are_as_many_digests_as_shards[[]*": "digests are compared by rank in each test",
        "test_any_rank_may_die[[]*": "test_a_shard_comes_from_node_memory: ranks 0 and 1",
        "test_a_shard_comes_from_its_replica[[]flat-HYBRID_SHARD-before-vote]": (
            "[flat-HYBRID_SHARD-forward]"
        ),
        "test_a_shard_comes_from_its_replica[[]flat-HYBRID_SHARD-orig-*": (
            "[flat-HYBRID_SHARD-forward]; the dump of HYBRID_SHARD-orig"
        ),
        "test_a_death_behind_the_vote_never_mixes_versions[[]*": (
            "test_sharded.py, the same with HSDP; simulation"
        ),
        "test_an_optimizer_step_is_voted_on": (
            "test_sharded.py: the vote of FSDP2; tests/unit/worker/test_units.py"
        ),
        "test_a_dump_is_whole_and_the_next_start_goes_on_from_it[[]flat-FULL_SHARD-*": (
            "[flat-HYBRID_SHARD-orig-*]; test_sharded_checkpoints.py"
        ),
        "test_a_dump_is_whole_and_the_next_start_goes_on_from_it[[]flat-SHARD*": (
            "[flat-HYBRID_SHARD-orig-*]; test_sharded_checkpoints.py"
        ),
        "test_another_number_of_ranks_is_told_why_it_cannot_go_on": (
            "tests/unit/worker/test_sharded_checkpoints.py"
        ),
    },
    "tests/process/test_dump.py": {
        "test_the_next_start_goes_on_to_the_last_bit[[][021]@[15]:b*": (
            "[1@5:forward:kill], [3@5:optimizer:last-kill]"
        ),
        "test_the_next_start_goes_on_to_the_last_bit[[]1@7*": (
            "[1@5:forward:kill]; tests/unit/core/test_dying.py"
        ),
        "test_a_step_is_done_before_a_node_ends_if_it_takes_less_than_half_of_the_grace[[]8-1]": (
            "[60-2]; tests/unit/core/test_dying.py"
        ),
        "test_another_number_of_ranks_goes_on_from_it[[]6]": "[2]",
        "test_exit_is_no_dump": "tests/unit/core/test_dying.py",
        "test_a_damaged_dump_is_passed_over_for_the_one_before": (
            "tests/unit/checkpoint/test_bad_input.py"
        ),
        "test_two_jobs_in_one_folder_leave_each_other_alone": (
            "tests/unit/checkpoint: folders hold several jobs"
        ),
        "test_periodic_checkpoints_go_on_after_a_fault": (
            "tests/unit/worker/test_periodic.py; "
            "test_periodic_checkpoints_survive_the_death_of_everything"
        ),
    },
    "tests/process/test_sigterm.py": {
        "test_to_workers_saves_the_step_that_is_under_way[[]ranks1]": "[ranks0], [ranks2]",
        "test_to_everything_at_a_moment_of_the_benchmark": (
            "test_to_everything_at_once; benchmarks/sigterm.py has 30 moments"
        ),
        "test_the_own_handler_of_the_script_is_called_and_the_job_is_saved[[][fl]*": (
            "[exit]; tests/unit/worker/test_sigterm.py"
        ),
        "test_twice_is_once": "tests/unit/core/test_draining.py",
        "test_a_grace_of_one_second[[]]": "[1@5:forward:sleep]",
        "test_to_workers_saves_the_step_that_is_under_way[[]ranks2]": (
            "[ranks0]; test_to_everything_at_once"
        ),
    },
    "tests/process/test_one_command.py": {
        "test_a_port_that_is_taken_costs_nothing[[][tn]*": (
            "[another job]; tests/unit/core/test_automatic.py"
        ),
        "test_no_manager_is_started_where_that_is_off[[]-*": (
            "[TASKD_MANAGER]; tests/unit/test_rendezvous.py"
        ),
        "test_a_manager_py_takes_over_on_two_hosts": "test_a_manager_py_that_comes_late_takes_over",
        "test_a_manager_that_is_killed_is_started_again_and_recovers[[]True]": (
            "[False]; with a secret: test_manager_attack.py"
        ),
        "test_no_manager_is_started_where_that_is_off[[]TASKD_MANAGER]": (
            "tests/unit/core/test_automatic.py; tests/unit/test_config.py"
        ),
        "test_a_manager_py_that_is_there_is_used": (
            "nearly all process tests start a manager first, and count one"
        ),
        "test_a_manager_py_that_comes_late_takes_over": (
            "tests/unit/core/test_automatic.py; test_manager_attack.py: a new one takes over"
        ),
        "test_a_port_that_is_taken_costs_nothing[[]another job]": (
            "tests/unit/core/test_automatic.py; "
            "test_manager_attack.py::test_a_taken_port_ends_a_second_manager_*"
        ),
    },
    "tests/process/test_preloading.py": {
        "test_an_import_that_crashes_or_hangs_costs_the_warm_start_*[[]crashes]": (
            "[hangs]; test_a_preloaded_process_that_dies_costs_the_warm_start_alone"
        ),
        "test_a_list_is_exact_and_off_is_off[[]off*": "tests/unit/test_config.py",
        "test_replacements_start_with_the_modules_of_the_first_worker_*[[]0]": "[1]",
        "test_a_process_that_was_forked_beforehand_may_be_killed": (
            "test_a_preloaded_process_that_dies_costs_the_warm_start_alone"
        ),
        "test_an_import_that_crashes_or_hangs_costs_the_warm_start_*": (
            "test_what_must_not_be_preloaded_is_left_out_*; tests/unit/agent/test_preloading.py"
        ),
        "test_a_preloaded_process_that_*": (
            "test_workers_of_the_preloaded_process_outlive_it_*; test_spawner.py: a forkserver "
            "that is stopped, or dies"
        ),
        "test_nothing_is_preloaded_behind_what_changes_torch_and_is_left_out": (
            "test_what_must_not_be_preloaded_is_left_out_*"
        ),
        "test_a_rank_in_the_environment_of_torchrun_itself_hides_nobody_*": (
            "tests/unit/agent/test_libraries.py: a module that is preloaded finds no rank"
        ),
        "test_a_list_is_exact_and_off_is_off[[]*": "tests/unit/test_config.py",
    },
    "tests/process/test_entry_point.py": {
        "test_it_is_there_once_however_it_is_asked_for[[][sb]?[!c]*": (
            "[backend], [all and the patch]"
        ),
        "test_it_is_there_once_however_it_is_asked_for[[]all and the patch]": (
            "[backend]; test_patch.py: sed, the switch"
        ),
        "test_the_backend_is_c10d_where_taskd_cannot_be[[]unknown torch]": (
            "[switched off]; test_patch.py::test_unknown_torch_is_said_and_left_alone"
        ),
        "test_of_two_installations_the_log_says_which_one_is_used": (
            "the log line says the folder of the one that is used in every job"
        ),
        "test_a_wrong_setting_is_told_before_anything_runs": (
            "test_own_signal.py::test_a_signal_that_cannot_be_is_refused_before_anything_runs"
        ),
    },
    "tests/process/test_hangs.py": {
        "test_a_rank_that_stands_still_is_replaced[[]step-sp*": "[forward-spin-*]",
        "test_a_rank_that_stands_still_is_replaced[[]forward-s[tl]*": (
            "[step-stop-*], [step-sleep-*]"
        ),
        "test_what_ranks_said_before_the_manager_answered_is_known": "tests/unit/core/test_node.py",
        "test_one_that_gave_its_state_to_another_is_found_like_any_other": (
            "tests/unit/worker/test_pulse.py: what is sent is no collective"
        ),
    },
    "tests/process/test_mirrors.py": {
        "test_the_shards_of_a_lost_node_are_in_the_dump[[]0]": "[1]",
        "test_m*": "tests/contract/test_mirroring.py",
        "test_a_manager_that_was_restarted_knows_the_mirrors": "tests/unit/core/test_pairing.py",
        "test_a_host_whose_network_is_gone": "tests/contract/test_mirroring.py",
        "test_nodes_of_one_host_mirror_nothing_and_say_so_once": "tests/unit/core/test_pairing.py",
    },
    "tests/process/test_profiling.py": {
        "test_a_replaced_rank_goes_on_being_profiled": "tests/unit/core/test_profiling.py",
        "test_a_job_whose_profiles_cannot_be_written_trains_on": (
            "tests/unit/worker/test_profiling.py: a full disk"
        ),
        "test_a_symbolic_link_is_refused_and_the_script_goes_on[[]a_job*": "the first of its cases",
        "test_a_symbolic_link_is_refused_and_the_script_goes_on[[]*": (
            "tests/unit/worker/test_profiling.py"
        ),
    },
    "tests/process/test_patch.py": {
        "test_workers_come_from_the_forkserver[[]auto-[nc]*": "[auto-standalone], [exec-static]",
        "test_workers_come_from_the_forkserver[[]auto-static]": "[auto-standalone], [exec-static]",
        "test_workers_come_from_the_forkserver[[]exec-[nc]*": "[auto-standalone], [exec-static]",
        "test_workers_come_from_the_forkserver[[]exec-standalone]": (
            "[auto-standalone], [exec-static]"
        ),
        "test_agents_host_the_store_in_any_case": (
            "test_recovery.py::test_each_rendezvous kills rank 0"
        ),
        "test_inert_unless_enabled[[]extra[12]]": "[extra0]",
        "test_other_entrypoints_are_left_to_torch[[][of]*": "[no python]",
        "test_restart_without_a_manager[[][sc]t*": "[c10d]",
        "test_restart_without_a_manager[[]standalone]": "[c10d]",
        "test_spent_budget_without_a_manager": (
            "test_recovery.py::test_a_spent_budget_ends_the_job_and_says_so"
        ),
        "test_no_orphans_when_torchrun_is_ended[[]*[29]]": (
            "SIGTERM; test_recovery.py::test_nothing_is_left_when_torchrun_is_ended"
        ),
        "test_workers_come_from_the_forkserver[[]exec-static]": "test_spawn.py; [auto-*]",
        "test_unknown_torch_is_said_and_left_alone[[]source]": (
            "[parameter]; tests/compat/test_torch_seams.py"
        ),
        "test_a_torch_that_is_not_tested_and_looks_like_one_that_is_works": (
            "tests/compat/test_torch_seams.py; make test-torch"
        ),
        "test_restart_without_a_manager[[]c10d]": (
            "test_recovery.py::test_without_a_manager_a_death_restarts_the_group_*"
        ),
        "test_redirects_and_tee": "test_spawn.py compares both output streams",
    },
    "tests/unit/worker/test_sharded_checkpoints.py": {
        "test_parts_of_the_dead_are_saved_from_the_memory_of_their_node[[]3-*": "[2-*]",
        "test_what_is_a_dead_ranks_alone_is_saved_too[[]4-*": "[2-*]",
        "test_the_same_world_goes_on_to_the_last_bit[[]zero_pairs]": "[zero]",
        "test_the_same_world_goes_on_to_the_last_bit[[]buckets]": (
            "[ddp]; tests/process/test_exchange.py: layouts of buckets"
        ),
        "test_the_same_world_goes_on_to_the_last_bit[[]flat_[kwp]*": "[flat], [flat_hybrid_orig]",
    },
    "tests/unit/worker/test_sharded_state.py": {
        "test_a_stopped_run_ends_with_the_same_bits[[][wom]*": (
            "[fsdp-4]: the same groups of parameters"
        ),
        "test_a_stopped_run_ends_with_the_same_bits[[]kept-2]": "[fsdp-4]",
        "test_a_stopped_run_ends_with_the_same_bits[[]flat_[omw]*": (
            "[flat-4], [flat_kept_orig-4], [flat_hybrid-4]"
        ),
        "test_a_stopped_run_ends_with_the_same_bits[[]flat_kept-2]": "[flat_kept_orig-4]",
        "test_a_stopped_run_ends_with_the_same_bits[[]flat_hybrid_orig-4]": (
            "[flat_hybrid-4], [flat_kept_orig-4]"
        ),
        "test_a_lost_shard_is_received_from_its_replica[[]*victims[1468]]": (
            "the other victim of the same layout"
        ),
        "test_a_shard_that_was_torn_is_overwritten[[]*[ps]]": "[hsdp], [zero_pairs], [flat_hybrid]",
        "test_a_shard_that_was_torn_is_overwritten[[]flat_hybrid_orig]": "[flat_hybrid]",
        "test_a_stopped_run_ends_with_the_same_bits[[]tp_fsdp-4]": "[fsdp-4], [tp-4]",
    },
    "tests/unit/worker/test_units.py": {
        "test_a_step_may_be_cut_short_at_any_call[[]flat_[om]*": (
            "[flat], [flat_kept_orig], [flat_hybrid_orig]"
        ),
        "test_a_step_may_be_cut_short_at_any_call[[]flat_kept]": "[flat_kept_orig]",
        "test_parking_frees_whole_parameters_and_optimizer_memory_changes_hands[[]flat_m*": (
            "[flat-*], [flat_kept_orig-*]"
        ),
    },
    "tests/process/test_exchange.py": {
        "test_a_replaced_rank_leaves_no_trace_in_the_result[[][15]]": "[0] and [2]",
        "test_ranks_that_are_one_version_behind_receive_the_newest[[][03]]": "[1]",
        "test_variants_of_the_script_end_with_the_same_bits[[]s*": "[adamw], [default_cap]",
        "test_variants_of_the_script_end_with_the_same_bits[[]late_ddp]": "[outside]",
        "test_variants_of_the_script_end_with_the_same_bits[[]unused]": "[accumulate]",
        "test_variants_of_the_script_end_with_the_same_bits[[]default_cap]": (
            "[adamw], [accumulate], [outside]"
        ),
    },
    "tests/process/test_spawn.py": {
        "test_looks_like_a_fresh_interpreter[[]exec-*": "[fork-*]: the same code after the fork",
        "test_looks_like_a_fresh_interpreter[[]preloaded-*": (
            "[fork-*]: the same code after the fork; test_preloading.py starts replacements so"
        ),
    },
    "tests/unit/checkpoint/test_reshard.py": {
        "*": (
            "test_dump.py::test_another_number_of_ranks_goes_on_from_it[2]; test_sharded.py: "
            "[hsdp-fsdp]"
        ),
    },
    "tests/examples/test_examples.py": {
        "test_the_char_gpt_loses_a_rank_and_ends_with_the_same_digest[[]1]": "[0]",
        "test_a_shard_that_another_rank_has_too_comes_from_there": (
            "tests/process/test_sharded.py: [hsdp-forward]"
        ),
    },
    "tests/examples/test_digits.py": {
        "test_a_killed_process_changes_nothing[[]in a*": "[in the first step of an epoch]",
        "test_a_killed_process_changes_nothing[[]nobody]": "[in the first step of an epoch]",
        "test_both_train_to_the_same_in_one_process": (
            "test_a_killed_process_changes_nothing compares with that run"
        ),
    },
    "tests/process/test_spares.py": {
        "test_a_spare_takes_the_place_of_a_lost_node[[]static]": (
            "[c10d]; test_node_0_is_lost[static]"
        ),
    },
    "tests/process/test_forkserver.py": {
        "test_loss_of_the_agent_ends_workers[[]exec]": "[fork]",
    },
    "tests/unit/worker/test_positions.py": {
        "test_every_sample_comes_once_whatever_is_interrupted[[]s*-2-survivor]": "[*-replacement]",
    },
    "tests/simulation/test_explorer.py": {
        "test_a_node_that_keeps_to_itself_who_waits_is_found": (
            "it proves the check of the explorer itself, which changes seldom"
        ),
    },
    "tests/examples/test_deployment.py": {
        "test_the_start_script_runs_a_job_of_one_node[[]off]": "[on]",
        "test_the_start_script_ends_with_the_exit_code_of_torchrun": (
            "test_a_pod_that_is_to_end_saves_the_training_*: the exit code says that it was saved"
        ),
        "test_the_start_script_hands_a_sigterm_on": (
            "test_a_pod_that_is_to_end_saves_the_training_and_the_next_one_goes_on"
        ),
    },
    "tests/process/test_half_open.py": {
        "test_connections_that_stop_on_the_way_*[[]open-[szg]*": (
            "[open-connected], [open-handshake], [secret-*]"
        ),
        "test_connections_that_stop_on_the_way_*[[]open-half a command]": "[secret-half a command]",
        "test_connections_that_stop_on_the_way_*[[]secret-[czgh]?????*": (
            "[open-*], [secret-signature]"
        ),
    },
    "tests/process/test_limits.py": {
        "test_where_no_black_box_can_be_made_one_line_says_why": (
            "tests/unit/test_black_box.py; "
            "test_a_job_trains_and_recovers_without_locked_memory_and_with_few_descriptors"
        ),
    },
    "tests/process/test_own_signal.py": {
        "test_with_another_signal_*[[]49]": "[SIGRTMIN+15]; tests/unit/test_config.py: numbers",
    },
    "tests/process/test_other_secret.py": {
        "test_training_goes_on_*[[]none at the manager]": "[another], [none at the agent]",
    },
    "tests/process/test_elections.py": {
        "test_the_manager_is_lost_with_its_node[[]False]": "[True]: the same with a secret",
    },
    "tests/unit/msrun/test_stand_in.py": {
        "test_a_rank_that_is_stopped_*": (
            "tests/unit/core/test_hangs.py; test_hangs.py; its limit of 30 s is all that it takes"
        ),
    },
    "tests/examples/test_megatron_ttp.py": {
        "test_it_is_saved_by_its_handlers_and_goes_on_from_that": (
            "test_mindio_ttp.py: test_the_dump_is_made_by_the_handlers_*"
        ),
    },
    "tests/process/test_mindio_ttp.py": {
        "test_a_rank_that_is_killed_is_repaired_in_place_by_the_handlers[[]parts-*": (
            "[whole-*]; tests/process/test_sharded.py: the vote"
        ),
        "test_the_dump_is_made_by_the_handlers_*[[]whole-*": "[parts-*]",
        "test_what_cannot_be_repaired_in_place_is_saved_*": (
            "tests/unit/core/test_broken.py; tests/unit/mindio_ttp/test_training.py"
        ),
        "test_a_dump_that_a_handler_cannot_write_is_none": (
            "tests/unit/worker/test_carried_state.py; tests/unit/mindio_ttp/test_handlers.py"
        ),
        "test_a_damaged_memory_is_repaired_in_the_same_process": (
            "tests/unit/mindio_ttp: test_reports.py, test_handlers.py, test_training.py"
        ),
        "test_where_nothing_can_be_repaired_*": "tests/unit/mindio_ttp/test_training.py",
        "test_handlers_that_fail_again_and_again_*": "tests/unit/mindio_ttp/test_training.py",
        "test_a_process_whose_clean_handler_fails_is_replaced": (
            "tests/unit/mindio_ttp/test_training.py"
        ),
        "test_a_handler_that_hangs_costs_its_process_alone": (
            "tests/unit/core/test_hang_reports.py; tests/unit/mindio_ttp/test_handlers.py"
        ),
        "test_steps_that_are_counted_wrongly_*": "tests/unit/mindio_ttp/test_steps.py",
        "test_without_a_manager_training_goes_on_*": "tests/process/test_unmodified.py",
        "test_a_script_that_asks_for_its_dump_*": "test_dump.py: SIGTERM to a worker",
    },
}
EXTENDED: tuple[tuple[str, str], ...] = tuple(
    (f"{file}::{name}", proof) for file, tests in _OF.items() for name, proof in tests.items()
)
