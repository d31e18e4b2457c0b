"""The settings of the agent inside torchrun."""

import os
import pathlib
import re
from dataclasses import dataclass, field

from taskd.config.addresses import DEFAULT_HOST, join_address, manager_addresses, pod_ip
from taskd.config.job import (
    DEFAULT_GRACE_S,
    DEFAULT_RESCHEDULE_S,
    fault_timeout,
    grace,
    process_enable,
    reschedule,
    strategies,
)
from taskd.config.job import job_id as name_of_job
from taskd.config.log import LogConfig
from taskd.config.names import (
    FORKSERVER_ENV,
    HOST_ENV,
    MANAGER_ENV,
    NATIVE_ENV,
    NODE_MEMORY_ENV,
    NUMERIC_NAMES_ENV,
    PRELOAD_ENV,
    SPARE_ENV,
)
from taskd.config.secret import check_secret, secret
from taskd.config.signals import interrupt_signal
from taskd.config.slurm import nodes_of_allocation
from taskd.config.values import Environment, choice, listed, refusal, switch, utf8
from taskd.core.policy.ladder import Strategy, allowed

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The agent inside torchrun.

    `wait_for_exit`: a replacement starts only when the device of the dead one is free.
    `starts_manager`: the agent of the first node may start one where nobody else has.
    `is_spare`: it has no place in the job, and waits for that of a lost node.
    `other_addresses`: where the manager may be when its host was lost, and another one elected.
    `node_memory`: the folder for snapshots that outlive the agent; "": there is none.
    `reschedule_s`: for so long a lost node is waited for.
    `preload`: modules for the forkserver; `learns_preload`: and those that the script imports.
    """

    job_id: str
    manager_address: str
    fault_timeout_s: float
    secret: bytes | None = field(repr=False)
    log: LogConfig
    wait_for_exit: bool = False
    starts_manager: bool = True
    native: bool = True
    forkserver: str = "auto"
    preload: tuple[str, ...] = ()
    learns_preload: bool = True
    strategies: tuple[str, ...] = ()
    grace_s: float = DEFAULT_GRACE_S
    own_address: str = DEFAULT_HOST
    host: str = ""
    is_spare: bool = False
    other_addresses: tuple[str, ...] = ()
    node_memory: str = ""
    reschedule_s: float = DEFAULT_RESCHEDULE_S

    @property
    def replaces_nodes(self) -> bool:
        """Whether the user asks for that. Without a list nobody does: it costs a message a step."""
        return not {"recover", "elastic-training"}.isdisjoint(self.strategies)

    @property
    def elects(self) -> bool:
        """Whether the agents elect another manager where theirs is lost with its host."""
        return "recover" in self.strategies and self.starts_manager

    @property
    def memory_kept_s(self) -> float:
        """For so long after its last sign of life a lost torchrun's node memory may be of use.

        It has to be missed, perhaps by a manager that is new; then its place is free for a while.
        """
        return 4 * self.fault_timeout_s + self.reschedule_s

    @property
    def drain_s(self) -> float | None:
        """Seconds from SIGTERM to the end, in which the job is saved; None: it is not saved."""
        return self.grace_s if Strategy.DUMP in allowed(self.strategies) else None

    @classmethod
    def load(
        cls,
        environment: Environment = os.environ,
        *,
        job_id: str | None = None,
        master_addr: str | None = None,
        rendezvous_host: str | None = None,
        wait_for_exit: bool = False,
        own_address: str | None = None,
        keeps_secret: bool = True,
    ) -> "AgentConfig":
        """From the environment.

        `master_addr` and `rendezvous_host` (torchrun's) locate the manager if nothing else does.

        `own_address`: of this node for others, if POD_IP does not say it.
        `keeps_secret`: False: it is checked only, by a process that will be forked.
        `job_id` is what to use when MINDX_TASK_ID is not set.
        """
        preload, learns_preload = _preload(environment)
        # its workers read these, and they are refused here
        interrupt_signal(environment)
        switch(environment, NUMERIC_NAMES_ENV, default=True)
        if not keeps_secret:
            check_secret(environment)
        managers = manager_addresses(environment, master_addr or rendezvous_host or DEFAULT_HOST)
        port = int(managers[0].rpartition(":")[2])  # an elected manager has the same
        nodes = [join_address(name, port) for name in nodes_of_allocation(environment)]
        return cls(
            job_id=name_of_job(environment, job_id),
            manager_address=managers[0],
            other_addresses=tuple(dict.fromkeys([*managers, *nodes]))[1:],
            fault_timeout_s=fault_timeout(environment),
            secret=secret(environment) if keeps_secret else None,
            log=LogConfig.load(environment),
            wait_for_exit=wait_for_exit,
            starts_manager=choice(environment, MANAGER_ENV, ("auto", "off"), "auto") == "auto",
            native=switch(environment, NATIVE_ENV, default=True),
            forkserver=choice(environment, FORKSERVER_ENV, ("auto", "fork", "exec"), "auto"),
            preload=preload,
            learns_preload=learns_preload,
            strategies=strategies(environment),
            grace_s=grace(environment),
            own_address=pod_ip(environment) or own_address or DEFAULT_HOST,
            host=utf8(HOST_ENV, environment.get(HOST_ENV, "")) or _name_of_host(),
            node_memory=_node_memory(environment),
            reschedule_s=reschedule(environment),
            is_spare=choice(environment, SPARE_ENV, ("1", "on", "0", "off"), "off") in ("1", "on"),
        )


def _node_memory(environment: Environment) -> str:
    text = environment.get(NODE_MEMORY_ENV, "")
    if text and not os.path.isabs(text):
        raise refusal(NODE_MEMORY_ENV, text, "the absolute path of a folder on a tmpfs")
    return text


def _preload(environment: Environment) -> tuple[tuple[str, ...], bool]:
    """The modules that are named, and whether the forkserver finds out by itself instead."""
    text = environment.get(PRELOAD_ENV, "").strip()
    if text in ("", "auto"):
        return (), True
    names = listed(text) if text != "off" else ()
    for name in names:
        if _MODULE.fullmatch(name) is None:
            raise refusal(PRELOAD_ENV, text, "auto, off, or module names, separated by commas")
    return names, False


def _name_of_host() -> str:
    """The same in all containers of a machine, and in no other machine.

    The kernel's number for its own start.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return os.uname().nodename


def is_patch_enabled(environment: Environment = os.environ) -> bool:
    """Whether torchrun is to be patched: only if TASKD_PROCESS_ENABLE says "on"."""
    return process_enable(environment) == "on"
