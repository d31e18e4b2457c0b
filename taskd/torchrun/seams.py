"""Where taskd touches torch, as a table.

What is replaced, and what is relied upon, with what it looks like in each version of torch that we
have read: the names of its parameters, and a hash of the source of what we rely on closely.
`taskd.torchrun.known` compares it with the torch that is installed, before anything is changed.

A test that finds another hash: read the difference upstream, decide whether our override still
fits, then add the new one here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

# Those whose seams are below, oldest first.
KNOWN_TORCH = (
    "2.7.1",
    "2.8.0",
    "2.9.1",
    "2.10.0",
    "2.11.0",
    "2.12.1",
    "2.13.0",
    "2.14.1",
    "2.15.0",
)
# Those that jobs were run on (`make test-torch`, docs/measured/torch): all of them.
TESTED_TORCH = KNOWN_TORCH


@dataclass(frozen=True, slots=True)
class Seam:
    """One attribute of torch.

    `signatures`: from which known version on it has which parameters, their names separated by
    spaces. `sources`: the same for the first 12 digits of the SHA-256 of its source; empty where we
    do not rely on how it works. `replacement` is "module:attribute" of ours, None where we only
    rely on it.
    """

    module: str
    attribute: str
    why: str
    signatures: Mapping[str, str]
    sources: Mapping[str, str] = field(default_factory=dict)
    replacement: str | None = None

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.module}.{self.attribute}"

    def parameters(self, version: str) -> tuple[str, ...]:
        """The names of its parameters in this known version."""
        return tuple(_in_force(self.signatures, version).split())

    def source(self, version: str) -> str:
        """The hash of its source in this known version; "": any will do."""
        return _in_force(self.sources, version)


def _in_force(since: Mapping[str, str], version: str) -> str:
    """The newest entry that is not newer than `version`; "": there is none."""
    upto = KNOWN_TORCH[: KNOWN_TORCH.index(version) + 1]
    return next((since[known] for known in reversed(upto) if known in since), "")


_LAUNCHER = "torch.distributed.launcher.api"
_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent"
_AGENT_BASE = "torch.distributed.elastic.agent.server.api"
_PROCESSES = "torch.distributed.elastic.multiprocessing.api"

SEAMS = (
    Seam(
        _LAUNCHER,
        "launch_agent",
        "the forkserver starts before any store or thread exists; max_restarts 0 means 32767",
        {
            "2.7.1": "config entrypoint args",
            "2.13.0": "config entrypoint args health_check_server",
        },
        {
            "2.7.1": "15bdb51d1116",
            "2.8.0": "bad8792fb5f6",
            "2.9.1": "b5a685f45fe3",
            "2.10.0": "9934607c0f66",
            "2.12.1": "a456bbb12f20",
            "2.13.0": "f934e13458aa",
            "2.15.0": "0a276a2f0a2b",
        },
        "taskd.torchrun.patch:wrap_launch_agent",
    ),
    Seam(
        _LAUNCHER,
        "LocalElasticAgent",
        "the agent whose workers are replaced one by one",
        {
            "2.7.1": "spec logs_specs start_method exit_barrier_timeout log_line_prefix_template",
            "2.12.1": "spec logs_specs start_method exit_barrier_timeout log_line_prefix_template "
            "shutdown_timeout health_check_server",
            "2.13.0": "spec logs_specs start_method exit_barrier_timeout log_line_prefix_template "
            "shutdown_timeout health_check_server uninterruptible_state_timeout",
        },
        replacement="taskd.torchrun.patch:make_agent_class",
    ),
    Seam(
        _AGENT,
        "start_processes",
        "substituted while our agent's _start_workers runs, called by keyword",
        {
            "2.7.1": "name entrypoint args envs logs_specs log_line_prefixes start_method",
            "2.9.1": "name entrypoint args envs logs_specs log_line_prefixes start_method "
            "numa_options",
            "2.10.0": "name entrypoint args envs logs_specs log_line_prefixes start_method "
            "numa_options duplicate_stdout_filters duplicate_stderr_filters",
        },
    ),
    Seam(
        _AGENT,
        "LocalElasticAgent._start_workers",
        "builds environment and logs, for us too",
        {"2.7.1": "self worker_group"},
        {
            "2.7.1": "73b0666f2f22",
            "2.9.1": "771da600676d",
            "2.10.0": "217c7345051d",
            "2.12.1": "5d0d871f0a47",
            "2.14.1": "5755057401a0",
        },
    ),
    Seam(
        _AGENT,
        "LocalElasticAgent._monitor_workers",
        "torch's loop over our context",
        {"2.7.1": "self worker_group"},
        {"2.7.1": "0cff09af07fe", "2.12.1": "bfc0bdc1d2d8", "2.13.0": "aa22a44e4a80"},
    ),
    Seam(
        _AGENT,
        "LocalElasticAgent._shutdown",
        "closes our context",
        {
            "2.7.1": "self death_sig is_restart",
            "2.8.0": "self death_sig",
            "2.12.1": "self death_sig timeout",
        },
        {"2.7.1": "c1a95560beea", "2.8.0": "1b24d307b4e0", "2.12.1": "aea9b0d1c8d3"},
    ),
    Seam(
        _AGENT_BASE,
        "SimpleElasticAgent._invoke_run",
        "overridden; called when there is no manager",
        {"2.7.1": "self role"},
        {"2.7.1": "e964f45ed063", "2.12.1": "d63c8016bb24"},
    ),
    Seam(
        _AGENT_BASE,
        "SimpleElasticAgent._initialize_workers",
        "rendezvous and start",
        {"2.7.1": "self worker_group"},
        {"2.7.1": "c4386e7a747c", "2.8.0": "329aecd2a8a6"},
    ),
    Seam(
        _AGENT_BASE,
        "SimpleElasticAgent._restart_workers",
        "warm restart without a manager",
        {"2.7.1": "self worker_group"},
    ),
    Seam(
        _AGENT_BASE,
        "SimpleElasticAgent._exit_barrier",
        "waits for the other agents at the end",
        {"2.7.1": "self"},
        {"2.7.1": "50cddf8d66f4", "2.12.1": "17a943b048da"},
    ),
    Seam(
        _PROCESSES,
        "PContext.__init__",
        "base of our context",
        {
            "2.7.1": "self name entrypoint args envs logs_specs log_line_prefixes",
            "2.10.0": "self name entrypoint args envs logs_specs log_line_prefixes "
            "duplicate_stdout_filters duplicate_stderr_filters",
        },
        {"2.7.1": "ab92867c8e69", "2.8.0": "9f51476194bb", "2.10.0": "95b6c5cd3aa4"},
    ),
    Seam(
        _PROCESSES,
        "PContext.start",
        "registers torchrun's signal handlers, starts log tails",
        {"2.7.1": "self"},
        {"2.7.1": "ab29244deb28", "2.10.0": "6be0c1e0fbf3"},
    ),
    Seam(
        _PROCESSES,
        "PContext.close",
        "stops log tails",
        {"2.7.1": "self death_sig timeout"},
        {"2.7.1": "a51f436ec8dc", "2.10.0": "fc80a47daee5"},
    ),
    Seam(
        "torch.distributed.distributed_c10d",
        "rendezvous",
        "wrapped in the worker: stores are prefixed by generation",
        {"2.7.1": "url rank world_size kwargs"},
    ),
)
