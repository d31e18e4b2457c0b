"""Tests that `make test` leaves out, and what proves the fact of each there: see tests/lanes.py."""

from __future__ import annotations

# By file: patterns of names (fnmatch, with [[] for a bracket), and what proves the same in
# `make test`.
_OF: dict[str, dict[str, str]] = {
    "tests/process/test_recovery.py": {
        "test_with_data_loader_processes_alive": (
            "nearest: test_loaders.py: [stateful], whose DataLoader has a process"
        ),
        "test_kill_of_any_rank_in_the_middle_of_a_step[[][13]]": (
            "ranks 0 and 2; all ranks in test_twenty_in_one_run"
        ),
        "test_kill_at_each_place_of_the_first_second_and_last_step*": (
            "test_twenty_in_one_run kills at each place; the first and the last step: simulation"
        ),
        "test_every_other_way_to_die[[]*": "test_every_other_way_to_die_in_one_run",
        "test_one_that_restores_while_another_recovers": (
            "test_one_during_the_recovery_of_another; simulation"
        ),
        "test_groups_made_outside_the_function[[]in-init]": "[boot]",
        "test_while_the_others_have_already_finished[[]3]": "[0]",
        "test_batch_norm_statistics_are_exact": (
            "test_dump.py trains with batch norm; test_exchange.py compares buffers"
        ),
        "test_the_largest_is_killed_as_by_an_out_of_memory_killer": (
            "SIGKILL from outside is SIGKILL: test_kill_of_any_rank_*[0]"
        ),
        "test_nothing_is_left_when_torchrun_is_ended[[]2]": "SIGTERM and SIGKILL",
        "test_two_agents_on_one_machine*": "test_nodes.py: two on one machine",
        "test_kill_of_any_rank_in_the_middle_of_a_step[[]2]": "[0]",
        "test_before_and_inside_init_process_group[[]before-init]": "[in-init]",
        "test_each_rendezvous*": (
            "static: nearly all process tests; c10d: test_spares.py, test_unmodified.py; "
            "standalone: test_one_command.py"
        ),
        "test_a_manager_that_dies_and_comes_back_still_heals": (
            "test_one_command.py: a manager that is killed"
        ),
        "test_one_that_was_just_replaced*": (
            "test_one_during_the_recovery_of_another; simulation: any death during a recovery"
        ),
    },
    "tests/process/test_unmodified.py": {
        "test_an_unmodified_script_that_always_fails_ends_soon": (
            "tests/unit/core/test_stagnation.py; test_recovery.py: "
            "test_a_spent_budget_ends_the_job_and_says_so"
        ),
        "test_an_unmodified_script_is_restarted_warm[[][cs]t*": "[c10d]",
        "test_an_unmodified_script_is_restarted_warm[[]standalone]": "[c10d]",
        "test_forks_and_fresh_interpreters_meet_after_a_restart": (
            "test_an_unmodified_script_is_restarted_warm; tests/unit/test_trainer_stores.py"
        ),
    },
    "tests/process/test_all_gone.py": {
        "test_all_is_saved_from_node_memory*": (
            "test_all_go_on_from_node_memory[fsdp-1-forward]; test_fsdp1.py: test_a_dump_is_whole_*"
        ),
        "test_all_go_on_from_node_memory[[]fsdp-3-step]": "[fsdp-1-forward] and the record's bound",
        "test_all_go_on_from_node_memory[[]hsdp-1-forward]": "[fsdp-1-forward]",
    },
    "tests/process/test_sharded.py": {
        "test_with_what_debugging_puts_around_groups": (
            "tests/unit/worker/test_device.py: a wrapper for devices; [hsdp-forward] without it"
        ),
        "test_a_dump_takes_the_shards_of_the_dead_from_node_memory*": (
            "test_fsdp1.py: test_a_dump_is_whole_*; test_all_gone.py: from node memory"
        ),
        "test_before_anybody_has_a_version_nobody_passes_for_a_replica*": (
            "tests/unit/worker/test_shard_report.py: test_before_all_have_come_*"
        ),
        "test_a_death_behind_the_vote_never_mixes_versions*": (
            "tests/unit/core/test_advance.py; simulation: a death at any moment of the vote"
        ),
        "test_a_dump_that_lacks_a_shard_is_none": (
            "tests/unit/core/test_dying.py: test_a_part_that_is_nowhere_ends_the_job_*"
        ),
        "test_a_dump_takes_the_shard_of_a_rank_that_hangs": (
            "tests/unit/core/test_dying.py; test_all_gone.py goes on from node memory"
        ),
        "test_a_dump_without_a_rank_is_whole_and_another_world_goes_on_from_it[[]tp-]": (
            "[hsdp-fsdp]; tests/unit/worker/test_sharded_checkpoints.py"
        ),
        "test_a_dump_without_a_rank_is_whole_and_another_world_goes_on_from_it[[]stages-]": (
            "the same"
        ),
        "test_a_shard_that_nobody_has_comes_from_node_memory[[]1-step]": "[1-before-vote]",
        "test_a_shard_that_nobody_has_comes_from_node_memory[[]1-backward-end]": "[1-before-vote]",
        "test_generators_of_the_dead_are_in_a_dump_of_an_older_version": (
            "tests/unit/worker/test_sharded_checkpoints.py: what is a dead rank's alone"
        ),
        "test_a_shard_that_nobody_has_comes_from_node_memory[[]3-forward]": "[1-before-vote]",
        "test_whoever_is_left_behind_by_a_vote_steps_too*": (
            "tests/unit/core/test_advance.py; simulation: a death at any moment of the vote"
        ),
        "test_a_shard_comes_from_its_replica[[]hsdp-[!f]*": (
            "[hsdp-forward]; simulation: a death at any moment of the vote"
        ),
        "test_a_shard_comes_from_its_replica[[][!h]*": (
            "[hsdp-forward]; tests/unit/worker/test_sharded_state.py: tp, stages, zero_pairs"
        ),
    },
    "tests/process/test_fsdp1.py": {
        "test_a_shard_comes_from_node_memory[[]*": (
            "test_all_gone.py: [flat-FULL_SHARD-1-step]; test_sharded.py, the same with FSDP2; "
            "tests/unit/worker/test_units.py"
        ),
        "test_there_are_as_many_digests_as_shards[[]*": "digests are compared by rank in each test",
        "test_a_death_behind_the_vote_never_mixes_versions[[]*": (
            "tests/unit/core/test_advance.py; simulation: a death at any moment of the vote"
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
        "test_a_shard_comes_from_its_replica*": (
            "the dump of HYBRID_SHARD-orig; tests/unit/worker/test_sharded_state.py: flat_hybrid"
        ),
        "test_any_rank_may_die[[]*": (
            "test_all_gone.py: [flat-FULL_SHARD-1-step] loses all; the dump loses rank 3"
        ),
    },
    "tests/process/test_dump.py": {
        "test_replacing_comes_first_and_the_dump_when_no_restart_is_left": (
            "tests/unit/core/test_dying.py: test_replacing_comes_first_*, "
            "test_when_the_restarts_are_used_up; test_the_next_start_goes_on_to_the_last_bit"
        ),
        "test_without_a_manager_the_group_starts_anew_from_its_checkpoints_*": (
            "test_recovery.py: test_without_a_manager_a_death_restarts_the_group_*; "
            "test_periodic_checkpoints_survive_the_death_of_everything"
        ),
        "test_a_node_that_is_to_end_saves_at_the_end_of_the_step": (
            "test_sigterm.py: test_to_everything_at_once, test_to_workers_saves_the_step_*"
        ),
        "test_the_next_start_goes_on_to_the_last_bit[[][021]@[15]:b*": ("[1@5:forward:kill]"),
        "test_the_next_start_goes_on_to_the_last_bit[[]3@5:o*": (
            "[1@5:forward:kill]; tests/unit/core/test_advance.py: test_before_a_dump"
        ),
        "test_the_next_start_goes_on_to_the_last_bit[[]1@7*": (
            "[1@5:forward:kill]; tests/unit/core/test_dying.py"
        ),
        "test_another_number_of_ranks_goes_on_from_it[[]6]": "[2]",
        "test_exit_is_no_dump": "tests/unit/core/test_dying.py",
        "test_a_damaged_dump_is_passed_over_for_the_one_before": (
            "tests/unit/checkpoint/test_bad_input.py"
        ),
        "test_periodic_checkpoints_go_on_after_a_fault": (
            "tests/unit/worker/test_periodic.py; "
            "test_periodic_checkpoints_survive_the_death_of_everything"
        ),
        "test_a_step_is_done_before_a_node_ends_if_it_takes_less_than_half_*": (
            "tests/unit/core/test_dying.py; test_sigterm.py: test_to_everything_at_once"
        ),
    },
    "tests/process/test_sigterm.py": {
        "test_after_a_fault_the_job_may_go_on_from_its_dump": (
            "tests/unit/core/test_dying.py: test_all_processes_start_anew_*, "
            "test_not_if_a_node_is_to_end_meanwhile"
        ),
        "test_without_dump_a_signalled_worker_is_replaced": (
            "nearest: test_recovery.py: test_every_other_way_to_die_in_one_run"
        ),
        "test_to_everything_at_a_moment_of_the_benchmark": (
            "test_to_everything_at_once; benchmarks/sigterm.py has 30 moments"
        ),
        "test_twice_is_once": "tests/unit/core/test_draining.py",
        "test_a_grace_of_one_second[[]]": "[1@5:forward:sleep]",
        "test_to_workers_saves_the_step_that_is_under_way[[]ranks2]": (
            "[ranks0]; test_to_everything_at_once"
        ),
        "test_our_own_signal_is_not_the_platforms": (
            "tests/unit/worker/test_sigterm.py: before and after the agent has hung up"
        ),
        "test_the_manager_that_an_agent_started_stays_too": (
            "test_dump.py::test_the_manager_of_the_same_pod_stays_until_the_job_is_saved"
        ),
        "test_within_a_recovery": (
            "tests/unit/core/test_draining.py; simulation: a node that drains at any moment"
        ),
        "test_within_a_dump": "tests/unit/core/test_dying.py; test_to_everything_at_once",
        "test_the_own_handler_of_the_script_is_called_and_the_job_is_saved*": (
            "tests/unit/worker/test_sigterm.py; [ranks0] of test_to_workers_*"
        ),
    },
    "tests/process/test_one_command.py": {
        "test_a_port_that_is_taken_costs_nothing[[][tn]*": (
            "tests/unit/core/test_automatic.py; "
            "test_manager_attack.py::test_a_taken_port_ends_a_second_manager_*"
        ),
        "test_no_manager_is_started_where_that_is_off[[]-*": (
            "tests/unit/core/test_automatic.py; tests/unit/test_rendezvous.py"
        ),
        "test_a_manager_py_takes_over_on_two_hosts": (
            "tests/unit/core/test_automatic.py; tests/unit/test_manager_place.py; "
            "test_manager_attack.py: a new one takes over"
        ),
        "test_a_manager_that_is_killed_is_started_again_and_recovers[[]True]": (
            "[False]; with a secret: test_manager_attack.py"
        ),
        "test_no_manager_is_started_where_that_is_off[[]TASKD_MANAGER]": (
            "tests/unit/core/test_automatic.py; tests/unit/test_manager_place.py"
        ),
        "test_a_manager_py_that_comes_late_takes_over": (
            "tests/unit/core/test_automatic.py; test_manager_attack.py: a new one takes over"
        ),
        "test_a_port_that_is_taken_costs_nothing[[]another job]": (
            "tests/unit/core/test_automatic.py; "
            "test_manager_attack.py::test_a_taken_port_ends_a_second_manager_*"
        ),
        "test_of_two_hosts_that_of_the_endpoint_has_the_manager": (
            "tests/unit/test_manager_place.py; tests/unit/core/test_automatic.py"
        ),
    },
    "tests/process/test_preloading.py": {
        "test_what_must_not_be_preloaded_is_left_out_*": (
            "nearest: tests/unit/agent/test_preloading.py: test_a_trial_*, test_own_*"
        ),
        "test_what_is_counted_at_the_end_is_freed_whoever_has_imported_it*": (
            "nearest: test_collected_late.py: what is collected when a process ends"
        ),
        "test_a_worker_does_not_copy_what_it_shares_before_its_script_begins": (
            "it is about time alone, which benchmarks/recovery.py shows"
        ),
        "test_a_list_is_exact_and_off_is_off[[]off*": "tests/unit/test_agent_config.py",
        "test_replacements_start_with_the_modules_of_the_first_worker_*[[]0]": "[1]",
        "test_an_import_that_crashes_or_hangs_costs_the_warm_start_*": (
            "nearest: tests/unit/agent/test_preloading.py: test_a_trial_*"
        ),
        "test_nothing_is_preloaded_behind_what_changes_torch_and_is_left_out": (
            "nearest: tests/unit/agent/test_preloading.py: test_a_trial_*"
        ),
        "test_a_rank_in_the_environment_of_torchrun_itself_hides_nobody_*": (
            "tests/unit/agent/test_libraries.py: a module that is preloaded finds no rank"
        ),
        "test_a_list_is_exact_and_off_is_off[[]*": "tests/unit/test_agent_config.py",
        "test_a_process_that_was_forked_beforehand_may_be_killed": (
            "tests/unit/agent/test_standby.py; test_replacements_start_with_*"
        ),
        "test_replacements_were_forked_beforehand_and_others_*": (
            "test_replacements_start_with_*; tests/unit/agent/test_standby.py"
        ),
        "test_workers_of_the_preloaded_process_outlive_it_*": (
            "test_forkserver.py: workers outlive the forkserver; test_replacements_start_with_*"
        ),
        "test_a_preloaded_process_that_*": "test_spawner.py: a forkserver that is stopped, or dies",
    },
    "tests/process/test_entry_point.py": {
        "test_it_is_there_once_however_it_is_asked_for[[][sb]?[!c]*": "[backend]",
        "test_it_is_there_once_however_it_is_asked_for[[]all and the patch]": (
            "[backend]; test_patch.py: sed, the switch"
        ),
        "test_of_two_installations_the_log_says_which_one_is_used": (
            "the log line says the folder of the one that is used in every job"
        ),
        "test_a_wrong_setting_is_told_before_anything_runs": (
            "test_own_signal.py::test_a_signal_that_cannot_be_is_refused_before_anything_runs"
        ),
        "test_the_backend_is_c10d_where_taskd_cannot_be*": (
            "test_patch.py::test_unknown_torch_*; tests/unit/test_rendezvous.py; "
            "test_a_torchrun_that_does_not_ask_for_it_is_left_alone"
        ),
        "test_one_that_cannot_be_imported_costs_a_line": (
            "test_patch.py::test_unknown_torch_is_said_and_left_alone[parameter]"
        ),
    },
    "tests/process/test_hangs.py": {
        "test_a_rank_that_is_stopped_at_the_gate_is_replaced_as_soon_as_in_a_step": (
            "tests/unit/core/test_hangs.py, of the same name; "
            "test_a_rank_that_stands_still_is_replaced[step-stop-*]"
        ),
        "test_a_rank_that_stands_still_is_replaced[[]step-sp*": "[forward-spin-*]",
        "test_a_rank_that_stands_still_is_replaced[[]forward-s[tl]*": (
            "[step-stop-*], [step-sleep-*]"
        ),
        "test_what_ranks_said_before_the_manager_answered_is_known": (
            "tests/unit/core/test_node_alone.py"
        ),
        "test_one_that_gave_its_state_to_another_is_found_like_any_other": (
            "tests/unit/worker/test_pulse.py: what is sent is no collective"
        ),
    },
    "tests/process/test_mirrors.py": {
        "test_the_shards_of_a_lost_node_are_in_the_dump*": (
            "test_another_node_gets_the_shards_of_the_lost_one_*: from mirrors; test_fsdp1.py: "
            "test_a_dump_is_whole_*: a shard of the dead"
        ),
        "test_m*": "tests/contract/test_mirroring.py",
        "test_a_manager_that_was_restarted_knows_the_mirrors": "tests/unit/core/test_pairing.py",
        "test_a_host_whose_network_is_gone": "tests/contract/test_mirroring.py",
        "test_nodes_of_one_host_mirror_nothing_and_say_so_once": "tests/unit/core/test_pairing.py",
    },
    "tests/process/test_profiling.py": {
        "test_a_job_whose_profiles_cannot_be_written_trains_on": (
            "tests/unit/worker/test_profiling.py: a full disk"
        ),
        "test_a_symbolic_link_is_refused_and_the_script_goes_on[[]a_job*": "the first of its cases",
        "test_a_symbolic_link_is_refused_and_the_script_goes_on[[]*": (
            "tests/unit/worker/test_profile_files.py"
        ),
        "test_a_replaced_rank_goes_on_being_profiled": "tests/unit/core/test_profiling.py",
        "test_the_groups_of_each_rank_are_written": (
            "tests/unit/worker/test_groups.py; tests/unit/manager/test_profiling_switch.py"
        ),
        "test_on_and_off_while_the_job_trains": (
            "tests/unit/manager/test_profiling_switch.py; tests/unit/core/test_profiling.py; "
            "tests/unit/worker/test_profiling.py"
        ),
    },
    "tests/process/test_patch.py": {
        "test_what_cannot_be_forked_is_executed": "test_forkserver.py: a fresh interpreter",
        "test_inert_unless_enabled[[]extra[12]]": "[extra0]",
        "test_other_entrypoints_are_left_to_torch[[][of]*": "[no python]",
        "test_spent_budget_without_a_manager": (
            "test_recovery.py::test_a_spent_budget_ends_the_job_and_says_so"
        ),
        "test_unknown_torch_is_said_and_left_alone[[]source]": (
            "[parameter]; tests/compat/test_torch_seams.py"
        ),
        "test_a_torch_that_is_not_tested_and_looks_like_one_that_is_works": (
            "tests/compat/test_torch_seams.py; make test-torch"
        ),
        "test_restart_without_a_manager[[]*": (
            "test_recovery.py::test_without_a_manager_a_death_restarts_the_group_*"
        ),
        "test_redirects_and_tee": "test_spawn.py compares both output streams",
        "test_agents_host_the_store_in_any_case": (
            "test_recovery.py::test_kill_of_any_rank_* kills rank 0"
        ),
        "test_workers_come_from_the_forkserver*": (
            "test_spawn.py: fork and exec; what a job forks is counted in test_recovery.py"
        ),
        "test_no_orphans_when_torchrun_is_ended*": (
            "test_recovery.py::test_nothing_is_left_when_torchrun_is_ended"
        ),
    },
    "tests/unit/worker/test_sharded_checkpoints.py": {
        "test_the_same_world_goes_on_to_the_last_bit[[]rows]": (
            "test_another_world_has_every_tensor[rows-*]; [fsdp]"
        ),
        "test_parts_of_the_dead_are_saved_from_the_memory_of_their_node[[]3-*": "[2-*]",
        "test_the_same_world_goes_on_to_the_last_bit[[]zero_pairs]": "[zero]",
        "test_the_same_world_goes_on_to_the_last_bit[[]buckets]": (
            "[ddp]; tests/process/test_exchange.py: layouts of buckets"
        ),
        "test_the_same_world_goes_on_to_the_last_bit[[]flat_[kwp]*": "[flat], [flat_hybrid_orig]",
        "test_the_same_world_goes_on_to_the_last_bit[[]hsdp]": "[fsdp], [ddp]",
        "test_the_same_world_goes_on_to_the_last_bit[[]tp_fsdp]": "[fsdp], [tp]",
        "test_parts_of_the_dead_are_saved_from_the_memory_of_their_node[[]2-tp_fsdp-*": (
            "[2-fsdp-orphaned1]"
        ),
        "test_parts_of_the_dead_are_saved_from_the_memory_of_their_node[[]2-fsdp-orphaned2]": (
            "[2-fsdp-orphaned1]"
        ),
        "test_parts_of_the_dead_are_saved_from_the_memory_of_their_node[[]2-hsdp-*": (
            "[2-fsdp-orphaned1], [2-zero_pairs-*]: replicas"
        ),
        "test_what_is_a_dead_ranks_alone_is_saved_too[[][!2]*": "[2-*]",
        "test_what_is_a_dead_ranks_alone_is_saved_too[[]2-hsdp-*": "[2-stages-*]",
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
        "test_a_stopped_run_ends_with_the_same_bits[[]tp*-4]": (
            "nearest: [fsdp-4]; test_sharded_checkpoints.py: [tp]"
        ),
        "test_a_stopped_run_ends_with_the_same_bits[[]hsdp-4]": (
            "[fsdp-4]; test_sharded.py: [hsdp-forward]"
        ),
        "test_a_lost_shard_is_received_from_its_replica[[]tp-*": (
            "[zero_pairs-*], [stages-*]; the groups of tp: test_sharded_checkpoints.py: [tp]"
        ),
    },
    "tests/unit/worker/test_units.py": {
        "test_a_step_may_be_cut_short_at_any_call[[]flat_kept]": "[flat_kept_orig]",
        "test_parking_frees_whole_parameters_and_optimizer_memory_changes_hands[[]flat_m*": (
            "[flat-*], [flat_kept_orig-*]"
        ),
        "test_a_step_may_be_cut_short_at_any_call[[]flat_[omh]*": "[flat], [flat_kept_orig]",
    },
    "tests/process/test_exchange.py": {
        "test_averages_in_the_model_are_those_of_the_version[[][!a]*": "[assigned]",
        "test_a_replaced_rank_leaves_no_trace_in_the_result[[][15]]": "[0] and [2]",
        "test_ranks_that_are_one_version_behind_receive_the_newest[[][03]]": "[1]",
        "test_variants_of_the_script_end_with_the_same_bits[[]s*": "[adamw], [accumulate]",
        "test_variants_of_the_script_end_with_the_same_bits[[]late_ddp]": "[outside]",
        "test_variants_of_the_script_end_with_the_same_bits[[]unused]": "[accumulate]",
        "test_variants_of_the_script_end_with_the_same_bits[[]default_cap]": (
            "[adamw], [accumulate], [outside]"
        ),
    },
    "tests/process/test_node_memory.py": {
        "test_a_replaced_pod_has_nothing_of_it": (
            "test_all_gone.py: without snapshots; tests/contract/test_node_memory.py"
        ),
        "test_the_manager_is_lost_with_the_torchrun_and_another_one_elected": (
            "test_a_torchrun_on_the_same_host_has_*; test_elections.py"
        ),
    },
    "tests/process/test_spawn.py": {
        "test_looks_like_a_fresh_interpreter[[]fork-probe b*": "[fork-probe in a folder]",
        "test_looks_like_a_fresh_interpreter[[]fork-probe as module]": "[fork-module]",
        "test_looks_like_a_fresh_interpreter[[]fork-pools]": "[fork-pools of two threads]",
        "test_looks_like_a_fresh_interpreter[[]fork-pool by forkserver]": "[fork-pool by spawn]",
        "test_looks_like_a_fresh_interpreter[[]fork-exit [no]*": "[fork-exit text]",
        "test_looks_like_a_fresh_interpreter[[]fork-chained exception]": "[fork-exception]",
        "test_looks_like_a_fresh_interpreter[[]fork-system exit with cause]": "[fork-exit text]",
        "test_looks_like_a_fresh_interpreter[[]fork-broken excepthook]": "[fork-own excepthook]",
        "test_looks_like_a_fresh_interpreter[[]fork-[ast][be][orgm]*": "[fork-killed]",
        "test_looks_like_a_fresh_interpreter[[]fork-atexit raises]": "[fork-atexit order]",
        "test_looks_like_a_fresh_interpreter[[]fork-thread raises]": "[fork-thread]",
        "test_looks_like_a_fresh_interpreter[[]fork-module raises]": "[fork-module]",
        "test_libraries_have_the_number_of_threads_*": (
            "nearest: test_looks_like_a_fresh_interpreter[fork-pools of two threads]"
        ),
        "test_looks_like_a_fresh_interpreter[[]exec-*": "[fork-*]: the same code after the fork",
        "test_looks_like_a_fresh_interpreter[[]fork-loader by spawn]": (
            "[fork-pool by spawn], [fork-loader by fork]"
        ),
        "test_looks_like_a_fresh_interpreter[[]fork-probe two threads]": (
            "[fork-pools of two threads]"
        ),
        "test_looks_like_a_fresh_interpreter[[]preloaded-*": (
            "[fork-*]: the same code after the fork; test_preloading.py starts replacements so"
        ),
        "test_signals_that_are_ignored_from_outside_are_ignored_by_workers[[]exec]": "[fork]",
    },
    "tests/unit/checkpoint/test_reshard.py": {
        "*": (
            "test_dump.py::test_another_number_of_ranks_goes_on_from_it[2]; test_sharded.py: "
            "[hsdp-fsdp]"
        ),
    },
    "tests/examples/test_examples.py": {
        "test_the_char_gpt_loses_a_rank_and_ends_with_the_same_digest*": (
            "test_the_minimal_script_loses_a_rank_*: another model"
        ),
        "test_a_shard_*": "tests/process/test_sharded.py: from a replica, from node memory",
        "test_a_dump_of_four_ranks_is_gone_on_from_with_two": (
            "tests/process/test_dump.py::test_another_number_of_ranks_goes_on_from_it[2]"
        ),
    },
    "tests/examples/test_digits.py": {
        "test_a_killed_process_changes_nothing*": (
            "test_examples.py: other scripts; test_loops.py: an evaluation is done again; "
            "test_loaders.py: [stateful], whose DataLoader has a process"
        ),
        "test_both_train_to_the_same_in_one_process": "test_examples.py: other scripts",
        "test_the_plain_script_goes_on_from_its_own_checkpoint": "test_unmodified.py",
    },
    "tests/process/test_spares.py": {
        "test_spares_end_with_the_job*": (
            "nearest: tests/unit/core/test_spares.py; tests/unit/manager/test_imports.py"
        ),
        "test_what_is_a_ranks_alone_comes_back_in_a_step_that_the_others_have_completed": (
            "nearest: test_a_spare_takes_the_place_of_a_lost_node[c10d]; "
            "tests/unit/worker/test_settled_extras.py"
        ),
        "test_a_spare_takes_the_place_of_a_lost_node[[]static]": (
            "[c10d]; test_nodes.py: test_another_torchrun_takes_the_place_of_a_lost_node[once]"
        ),
        "test_a_spare_has_imported_what_the_workers_import*": (
            "test_preloading.py; tests/unit/manager/test_imports.py: spares are told"
        ),
    },
    "tests/process/test_forkserver.py": {
        "test_preloaded_thread_makes_workers_cold": (
            "nearest: tests/unit/agent/test_warmth.py: other reasons for a fresh interpreter"
        ),
        "test_close_ends_live_workers": "test_loss_of_the_agent_ends_workers[fork]",
        "test_loss_of_the_agent_ends_workers[[]exec]": "[fork]",
        "test_missing_preload_is_survived": (
            "tests/unit/agent/test_preloading.py; test_spawner.py: where no forkserver can be had"
        ),
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
        "test_a_pod_that_is_to_end_saves_the_training_*": (
            "tests/process/test_sigterm.py: test_to_everything_at_once; "
            "test_the_start_script_hands_a_sigterm_on"
        ),
        "test_the_start_script_ends_with_the_exit_code_of_torchrun": (
            "nearest: tests/process/test_start_script.py; test_the_start_script_hands_a_sigterm_on"
        ),
        "test_the_start_script_runs_a_job_of_one_node*": (
            "tests/process/test_start_script.py runs it, and kills a rank"
        ),
    },
    "tests/process/test_launching_programs.py": {
        "test_its_workers_are_no_copies_of_it_*": (
            "test_forkserver.py: test_programs_that_call_torchrun_are_not_forked"
        ),
    },
    "tests/process/test_half_open.py": {
        "test_connections_that_stop_on_the_way_*[[]open-[szg]*": (
            "[open-connected], [open-handshake], [secret-*]"
        ),
        "test_connections_that_stop_on_the_way_*[[]open-half a command]": "[open-handshake]",
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
        "test_training_goes_on_*[[]none at the *]": "[another]",
    },
    "tests/process/test_elections.py": {
        "test_the_manager_is_lost_with_its_node[[]False]": "[True]: the same with a secret",
        "test_of_two_nodes_a_stopped_manager_goes_on_late": (
            "tests/simulation/test_pair_partitions.py: managers stop and go on"
        ),
        "test_of_two_nodes_the_manager_is_lost_with_its_node[[]True]": (
            "[False]: the same without a secret"
        ),
        "test_of_two_nodes_whether_there_is_a_spare_that_votes*": (
            "test_of_two_nodes_the_manager_is_lost_with_its_node[False]; "
            "tests/simulation/test_pair_partitions.py"
        ),
    },
    "tests/unit/msrun/test_stand_in.py": {
        "test_sigterm_saves_the_last_step_that_all_have[[][oa]*": "[msrun], [workers]",
        "test_a_rank_that_is_stopped_*": (
            "tests/unit/core/test_hangs.py; test_hangs.py; its limit of 30 s is all that it takes"
        ),
        "test_all_start_anew_and_find_what_they_had[[]1*": "[0*]",
    },
    "tests/examples/test_megatron_ttp.py": {
        "test_it_is_saved_by_its_handlers_and_goes_on_from_that": (
            "nearest: test_it_loses_a_rank_and_ends_with_the_same_weights; "
            "tests/unit/mindio_ttp/test_handlers.py: "
            "test_one_rank_of_each_part_saves_and_one_names_it"
        ),
    },
    "tests/process/test_mindio_ttp.py": {
        "test_the_dump_is_made_by_the_handlers_*": (
            "nearest: tests/unit/mindio_ttp/test_handlers.py: "
            "test_one_rank_of_each_part_saves_and_one_names_it; test_dump.py: without handlers"
        ),
        "test_what_cannot_be_repaired_in_place_is_saved_*": (
            "tests/unit/core/test_broken.py; tests/unit/mindio_ttp/test_training.py"
        ),
        "test_a_dump_that_a_handler_cannot_write_is_none": (
            "tests/unit/worker/test_carried_state.py; tests/unit/mindio_ttp/test_handlers.py"
        ),
        "test_a_damaged_memory_is_repaired_in_the_same_process": (
            "tests/unit/mindio_ttp: test_reports.py, test_handlers.py, test_training.py"
        ),
        "test_where_nothing_can_be_repaired_*": "tests/unit/mindio_ttp/test_unrepaired.py",
        "test_handlers_that_fail_again_and_again_*": "tests/unit/mindio_ttp/test_unrepaired.py",
        "test_a_process_whose_clean_handler_fails_is_replaced": (
            "tests/unit/mindio_ttp/test_training.py"
        ),
        "test_a_handler_that_hangs_costs_its_process_alone": (
            "tests/unit/core/test_hang_reports.py; tests/unit/mindio_ttp/test_handlers.py"
        ),
        "test_steps_that_are_counted_wrongly_*": "tests/unit/mindio_ttp/test_steps.py",
        "test_without_a_manager_training_goes_on_*": "tests/process/test_unmodified.py",
        "test_a_script_that_asks_for_its_dump_*": "test_dump.py: SIGTERM to a worker",
        "test_a_rank_that_is_killed_is_repaired_in_place_by_the_handlers*": (
            "tests/examples/test_megatron_ttp.py loses a rank; "
            "tests/unit/mindio_ttp/test_training.py"
        ),
    },
    "tests/process/test_last_words.py": {
        "test_an_exit_is_explained_if_the_library_is_preloaded_*": (
            "tests/native/test_last_words.py; the log: test_a_null_pointer_is_recovered_*"
        ),
    },
    "tests/process/test_worker_secrets.py": {
        "test_workers_and_replacements_have_neither_*[[]exec]": "[fork]",
    },
    "tests/process/test_nodes.py": {
        "test_a_node_that_finds_no_manager_trains_with_the_others": (
            "tests/unit/core/test_missing_nodes.py: "
            "test_a_node_whose_agent_does_not_reach_the_manager_trains_on"
        ),
        "test_a_node_too_many_is_told_at_once_*": (
            "nearest: tests/unit/core/test_recovery_joining.py: test_who_is_refused; what is said: "
            "tests/slurm/test_slurm.py, in `make test-slurm`"
        ),
    },
    "tests/unit/mindx_elastic/test_imports.py": {
        "test_the_wheel_is_installed_*": (
            "tests/unit/mindio_ttp/test_wheel.py builds and installs in the same way"
        ),
    },
    "tests/process/test_bound_workers.py": {
        "test_so_are_those_of_a_torch_that_binds_its_own_thread": (
            "nearest: tests/compat/test_torch_seams.py"
        ),
        "test_without_a_manager_they_are_restarted": (
            "nearest: test_recovery.py: test_without_a_manager_a_death_restarts_the_group_*"
        ),
        "test_bound_workers_are_replaced_by_bound_ones": (
            "nearest: test_forkserver.py: a fresh interpreter"
        ),
    },
    "tests/process/test_loops.py": {
        "test_an_evaluation_at_the_head_of_the_loop_is_done_again_if_its_result_is_lost[[]0*": (
            "[1@8:forward]"
        ),
        "test_a_train_state_for_each_phase_keeps_the_survivors[[][!1]*": "[1@3:maker]",
        "test_a_train_state_for_each_phase_keeps_the_survivors[[]1@3:c*": "[1@3:maker]",
    },
    "tests/process/test_bytes.py": {
        "test_a_worker_and_its_replacement_get_the_same_bytes[[]exec]": "[fork]",
        "test_a_job_whose_folders_have_such_names_is_saved_and_goes_on": (
            "nearest: test_a_worker_and_its_replacement_get_the_same_bytes[fork]; "
            "test_dump.py: other folders"
        ),
        "test_a_name_that_others_are_told_is_refused_before_anything_runs*": (
            "tests/unit/test_config.py: names that are no UTF-8"
        ),
    },
    "tests/process/test_started_again.py": {
        "test_two_nodes_are_started_again_within_the_lease_of_their_manager": (
            "tests/unit/manager/test_begun_anew.py; tests/unit/manager/test_late.py"
        ),
    },
    "tests/process/test_networks.py": {
        "test_a_node_whose_place_a_spare_has_taken_ends_and_can_be_the_next_spare": (
            "test_spares.py: test_a_spare_takes_the_place_of_a_lost_node[c10d]; "
            "tests/unit/core/test_spares.py: "
            "test_the_place_of_a_spare_that_ends_is_offered_to_the_next"
        ),
    },
    "tests/process/test_cut_off.py": {
        "test_a_rank_dies_while_its_node_is_cut_off": (
            "tests/unit/core/test_recovery_reconnecting.py; "
            "test_networks.py: test_a_link_that_is_lossy_and_then_cut_*"
        ),
    },
    "tests/process/test_cut_short.py": {
        "test_the_first_step_after_a_restart_never_comes": "tests/unit/core/test_cut_short.py",
    },
    "tests/simulation/test_simulation.py": {
        "TestSharded::test_a_death_at_any_moment_costs_no_step[[][12]]": (
            "[0], [3]; random histories have deaths at any moment"
        ),
    },
    "tests/simulation/test_partitions.py": {
        "test_without_one_of_the_rules_the_job_is_there_twice*": (
            "that each rule is needed, which changes seldom; that they hold: "
            "test_whatever_happens_two_managers_never_bring_the_job_on"
        ),
    },
    "tests/simulation/test_pair_partitions.py": {
        "test_whatever_has_happened_another_is_elected_once_all_reach_each_other": (
            "nearest: test_in_every_pattern_two_of_the_three_go_on_and_no_others; "
            "tests/simulation/test_partitions.py: test_in_every_pattern_the_larger_part_goes_on_*"
        ),
        "test_without_one_of_the_rules_the_job_is_there_twice*": (
            "that each rule is needed, which changes seldom; that they hold: "
            "test_whatever_happens_two_managers_never_bring_the_job_on"
        ),
    },
    "tests/process/test_lost_store.py": {
        "test_a_survivor_leaves_its_way_to_a_store_that_is_gone": (
            "nearest: tests/unit/core/test_meeting.py: test_the_store_of_the_rendezvous_is_lost_*"
        ),
    },
    "tests/process/test_surroundings.py": {
        "test_a_death_costs_one_process_whatever_its_agent_has_lost": (
            "nearest: test_limits.py: without locked memory and with few descriptors; "
            "test_failed_starts.py: the folder of the script is away"
        ),
    },
    "tests/process/test_ipv6.py": {
        "test_a_rank_and_then_a_whole_node_are_replaced*": (
            "nearest: tests/unit/test_config.py and test_manager_place.py: such addresses; "
            "test_recovery.py and test_nodes.py: the same by IPv4"
        ),
    },
}
EXTENDED: tuple[tuple[str, str], ...] = tuple(
    (f"{file}::{name}", proof) for file, tests in _OF.items() for name, proof in tests.items()
)
