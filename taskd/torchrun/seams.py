"""Where taskd touches torch, as a table.

What is replaced, and what is relied upon, with the signatures that we know.

The parameters are compared by name before anything is changed. Sources that we rely on more closely
are pinned by hash in tests/compat/test_torch_seams.py.
"""

from dataclasses import dataclass

SUPPORTED_TORCH = ((2, 13), (2, 14))  # from, up to but not including: those that the tests run on


@dataclass(frozen=True, slots=True)
class Seam:
    """One attribute of torch.

    `signature`: the names of its parameters, separated by spaces. `replacement` is
    "module:attribute" of ours, None where we only rely on it.
    """

    module: str
    attribute: str
    signature: str
    why: str
    replacement: str | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return tuple(self.signature.split())


_LAUNCHER = "torch.distributed.launcher.api"
_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent"
_AGENT_BASE = "torch.distributed.elastic.agent.server.api"
_PROCESSES = "torch.distributed.elastic.multiprocessing.api"

SEAMS = (
    Seam(
        _LAUNCHER,
        "launch_agent",
        "config entrypoint args health_check_server",
        "the forkserver starts before any store or thread exists; max_restarts 0 means 32767",
        "taskd.torchrun.patch:wrap_launch_agent",
    ),
    Seam(
        _LAUNCHER,
        "LocalElasticAgent",
        "spec logs_specs start_method exit_barrier_timeout log_line_prefix_template "
        "shutdown_timeout health_check_server uninterruptible_state_timeout",
        "the agent whose workers are replaced one by one",
        "taskd.torchrun.patch:make_agent_class",
    ),
    Seam(
        _AGENT,
        "start_processes",
        "name entrypoint args envs logs_specs log_line_prefixes start_method numa_options "
        "duplicate_stdout_filters duplicate_stderr_filters",
        "substituted while our agent's _start_workers runs, called by keyword",
    ),
    Seam(
        _AGENT,
        "LocalElasticAgent._start_workers",
        "self worker_group",
        "builds environment and logs, for us too",
    ),
    Seam(
        _AGENT,
        "LocalElasticAgent._monitor_workers",
        "self worker_group",
        "torch's loop over our context",
    ),
    Seam(_AGENT, "LocalElasticAgent._shutdown", "self death_sig timeout", "closes our context"),
    Seam(
        _AGENT_BASE,
        "SimpleElasticAgent._invoke_run",
        "self role",
        "overridden; called when there is no manager",
    ),
    Seam(
        _AGENT_BASE,
        "SimpleElasticAgent._initialize_workers",
        "self worker_group",
        "rendezvous and start",
    ),
    Seam(
        _AGENT_BASE,
        "SimpleElasticAgent._restart_workers",
        "self worker_group",
        "warm restart without a manager",
    ),
    Seam(
        _AGENT_BASE,
        "SimpleElasticAgent._exit_barrier",
        "self",
        "waits for the other agents at the end",
    ),
    Seam(
        _PROCESSES,
        "PContext.__init__",
        "self name entrypoint args envs logs_specs log_line_prefixes duplicate_stdout_filters "
        "duplicate_stderr_filters",
        "base of our context",
    ),
    Seam(
        _PROCESSES,
        "PContext.start",
        "self",
        "registers torchrun's signal handlers, starts log tails",
    ),
    Seam(_PROCESSES, "PContext.close", "self death_sig timeout", "stops log tails"),
    Seam(
        "torch.distributed.distributed_c10d",
        "rendezvous",
        "url rank world_size kwargs",
        "wrapped in the worker: stores are prefixed by generation",
    ),
)
