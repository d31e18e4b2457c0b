"""Extended tests on real processes, of how workers start, live and end."""

from __future__ import annotations

TESTS: dict[str, dict[str, str]] = {
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
    "tests/process/test_last_words.py": {
        "test_an_exit_is_explained_if_the_library_is_preloaded_*": (
            "tests/native/test_last_words.py; the log: test_a_null_pointer_is_recovered_*"
        ),
    },
    "tests/process/test_launching_programs.py": {
        "test_its_workers_are_no_copies_of_it_*": (
            "test_forkserver.py: test_programs_that_call_torchrun_are_not_forked"
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
    "tests/process/test_patch.py": {
        "test_what_cannot_be_forked_is_executed": "test_forkserver.py: a fresh interpreter",
        "test_inert_unless_enabled*": (
            "test_inert_import_loads_nothing; test_entry_point.py: "
            "test_a_torchrun_that_does_not_ask_for_it_is_left_alone"
        ),
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
    "tests/process/test_surroundings.py": {
        "test_a_death_costs_one_process_whatever_its_agent_has_lost": (
            "nearest: test_limits.py: without locked memory and with few descriptors; "
            "test_failed_starts.py: the folder of the script is away"
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
    "tests/process/test_worker_secrets.py": {
        "test_workers_and_replacements_have_neither_*[[]exec]": "[fork]",
    },
}
