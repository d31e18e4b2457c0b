"""Extended tests on real processes, of recoveries on one node and on several."""

from __future__ import annotations

TESTS: dict[str, dict[str, str]] = {
    "tests/process/test_cut_off.py": {
        "test_a_rank_dies_while_its_node_is_cut_off": (
            "tests/unit/core/test_recovery_reconnecting.py; "
            "test_networks.py: test_a_link_that_is_lossy_and_then_cut_*"
        ),
    },
    "tests/process/test_cut_short.py": {
        "test_the_first_step_after_a_restart_never_comes": "tests/unit/core/test_cut_short.py",
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
    "tests/process/test_half_open.py": {
        "test_connections_that_stop_on_the_way_*[[]open-[szg]*": (
            "[open-connected], [open-handshake], [secret-*]"
        ),
        "test_connections_that_stop_on_the_way_*[[]open-half a command]": "[open-handshake]",
        "test_connections_that_stop_on_the_way_*[[]secret-[czgh]?????*": (
            "[open-*], [secret-signature]"
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
    "tests/process/test_ipv6.py": {
        "test_a_rank_and_then_a_whole_node_are_replaced*": (
            "nearest: tests/unit/test_config.py and test_manager_place.py: such addresses; "
            "test_recovery.py and test_nodes.py: the same by IPv4"
        ),
    },
    "tests/process/test_lost_store.py": {
        "test_a_survivor_leaves_its_way_to_a_store_that_is_gone": (
            "nearest: tests/unit/core/test_meeting.py: test_the_store_of_the_rendezvous_is_lost_*"
        ),
    },
    "tests/process/test_networks.py": {
        "test_a_node_whose_place_a_spare_has_taken_ends_and_can_be_the_next_spare": (
            "test_spares.py: test_a_spare_takes_the_place_of_a_lost_node[c10d]; "
            "tests/unit/core/test_spares.py: "
            "test_the_place_of_a_spare_that_ends_is_offered_to_the_next"
        ),
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
    "tests/process/test_other_secret.py": {
        "test_training_goes_on_*[[]none at the *]": "[another]",
    },
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
    "tests/process/test_started_again.py": {
        "test_two_nodes_are_started_again_within_the_lease_of_their_manager": (
            "tests/unit/manager/test_begun_anew.py; tests/unit/manager/test_late.py"
        ),
    },
}
