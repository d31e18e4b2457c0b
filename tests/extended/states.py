"""Extended tests on real processes, of the training's state and its checkpoints."""

from __future__ import annotations

TESTS: dict[str, dict[str, str]] = {
    "tests/process/test_all_gone.py": {
        "test_all_is_saved_from_node_memory*": (
            "test_all_go_on_from_node_memory[fsdp-1-forward]; test_fsdp1.py: test_a_dump_is_whole_*"
        ),
        "test_all_go_on_from_node_memory[[]fsdp-3-step]": "[fsdp-1-forward] and the record's bound",
        "test_all_go_on_from_node_memory[[]hsdp-1-forward]": "[fsdp-1-forward]",
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
    "tests/process/test_loops.py": {
        "test_an_evaluation_at_the_head_of_the_loop_is_done_again_if_its_result_is_lost[[]0*": (
            "[1@8:forward]"
        ),
        "test_a_train_state_for_each_phase_keeps_the_survivors[[][!1]*": "[1@3:maker]",
        "test_a_train_state_for_each_phase_keeps_the_survivors[[]1@3:c*": "[1@3:maker]",
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
    "tests/process/test_node_memory.py": {
        "test_a_replaced_pod_has_nothing_of_it": (
            "test_all_gone.py: without snapshots; tests/contract/test_node_memory.py"
        ),
        "test_the_manager_is_lost_with_the_torchrun_and_another_one_elected": (
            "test_a_torchrun_on_the_same_host_has_*; test_elections.py"
        ),
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
}
