"""Extended tests without real jobs, and those of the examples."""

from __future__ import annotations

TESTS: dict[str, dict[str, str]] = {
    "tests/examples/test_deployment.py": {
        "test_a_pod_that_is_to_end_saves_the_training_*": (
            "tests/process/test_sigterm.py: test_to_everything_at_once; "
            "test_the_start_script_hands_a_sigterm_on"
        ),
        "test_the_start_script_ends_with_the_exit_code_of_torchrun": (
            "nearest: test_the_start_script_hands_a_sigterm_on"
        ),
        "test_the_start_script_runs_a_job_of_one_node*": (
            "nearest: test_the_start_script_hands_a_sigterm_on; "
            "tests/process/test_one_command.py: test_a_killed_rank_is_replaced_in_place"
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
    "tests/examples/test_examples.py": {
        "test_the_char_gpt_loses_a_rank_and_ends_with_the_same_digest*": (
            "test_the_minimal_script_loses_a_rank_*: another model"
        ),
        "test_a_shard_*": "tests/process/test_sharded.py: from a replica, from node memory",
        "test_a_dump_of_four_ranks_is_gone_on_from_with_two": (
            "tests/process/test_dump.py::test_another_number_of_ranks_goes_on_from_it[2]"
        ),
    },
    "tests/examples/test_megatron_ttp.py": {
        "test_it_is_saved_by_its_handlers_and_goes_on_from_that": (
            "nearest: test_it_loses_a_rank_and_ends_with_the_same_weights; "
            "tests/unit/mindio_ttp/test_handlers.py: "
            "test_one_rank_of_each_part_saves_and_one_names_it"
        ),
    },
    "tests/simulation/test_explorer.py": {
        "test_any_fault_at_any_moment_of_two_nodes_with_one_rank[[]True]": (
            "nearest: [False]; test_simulation.py: TestSharded; 6,000 random histories in `.ci/run`"
        ),
        "test_a_node_that_keeps_to_itself_who_waits_is_found": (
            "it proves the check of the explorer itself, which changes seldom"
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
    "tests/simulation/test_partitions.py": {
        "test_without_one_of_the_rules_the_job_is_there_twice*": (
            "that each rule is needed, which changes seldom; that they hold: "
            "test_whatever_happens_two_managers_never_bring_the_job_on"
        ),
    },
    "tests/simulation/test_simulation.py": {
        "TestSharded::test_a_death_at_any_moment_costs_no_step[[][12]]": (
            "[0], [3]; random histories have deaths at any moment"
        ),
    },
    "tests/unit/checkpoint/test_reshard.py": {
        "*": (
            "test_dump.py::test_another_number_of_ranks_goes_on_from_it[2]; test_sharded.py: "
            "[hsdp-fsdp]"
        ),
    },
    "tests/unit/mindx_elastic/test_imports.py": {
        "test_the_wheel_is_installed_*": (
            "tests/unit/mindio_ttp/test_wheel.py builds and installs in the same way"
        ),
    },
    "tests/unit/msrun/test_stand_in.py": {
        "test_sigterm_saves_the_last_step_that_all_have[[][oa]*": "[msrun], [workers]",
        "test_a_rank_that_is_stopped_*": (
            "tests/unit/core/test_hangs.py; test_hangs.py; its limit of 30 s is all that it takes"
        ),
        "test_all_start_anew_and_find_what_they_had[[]1*": "[0*]",
    },
    "tests/unit/worker/test_positions.py": {
        "test_every_sample_comes_once_whatever_is_interrupted[[]s*-2-survivor]": "[*-replacement]",
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
        "test_a_lost_shard_is_received_from_its_replica[[]*victims[468]]": (
            "the other victim of the same layout"
        ),
        "test_a_lost_shard_is_received_from_its_replica[[]hsdp-*": (
            "test_sharded.py: test_a_shard_comes_from_its_replica[hsdp-forward]; [flat_hybrid-*]"
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
}
