"""Config dict and environment to frozen, validated dataclasses, once, at start.

The only reader of the environment.

(Torch's own variables are written and read where workers are started: `taskd.torchrun`,
`taskd.agent.spawn`.) Every error is a `ConfigError` that names the key, the value and what is
accepted. Nothing here opens a socket or logs.
"""

from __future__ import annotations

import ipaddress
import os
import pathlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskd import settings
from taskd.core.policy.ladder import STRATEGY_NAMES

if TYPE_CHECKING:
    from taskd.settings import Environment, Settings

PROCESS_ENABLE_ENV = "TASKD_PROCESS_ENABLE"
PORT_ENV = "TASKD_PORT"
BIND_ADDR_ENV = "TASKD_BIND_ADDR"
MANAGER_ADDR_ENV = "TASKD_MANAGER_ADDR"
FAULT_TIMEOUT_ENV = "TASKD_FAULT_TIMEOUT"
HANG_DETECTION_ENV = "TASKD_HANG_DETECTION"
HANG_FLOOR_ENV = "TASKD_HANG_FLOOR"
HANG_CEILING_ENV = "TASKD_HANG_CEILING"
LOG_PATH_ENV = "TASKD_LOG_PATH"
FILE_LOG_LEVEL_ENV = "TASKD_FILE_LOG_LEVEL"
STD_LOG_LEVEL_ENV = "TASKD_STD_LOG_LEVEL"
LOG_STDOUT_ENV = "TASKD_LOG_STDOUT"
SECRET_FILE_ENV = "TASKD_SECRET_FILE"  # noqa: S105
NATIVE_ENV = "TASKD_NATIVE"
FORKSERVER_ENV = "TASKD_FORKSERVER"
PRELOAD_ENV = "TASKD_PRELOAD"
PROFILING_SWITCH_ENV = "TASKD_PROFILING_SWITCH"
PROFILING_PATH_ENV = "TASKD_PROFILING_PATH"
STRATEGY_ENV = "TASKD_RECOVER_STRATEGY"
HIGH_AVAILABILITY_ENV = "HIGH_AVAILABILITY"
IN_PLACE_ENV = "ENABLE_RESTART_FAULT_PROCESS"
CHECKPOINT_ENV = "TASKD_CHECKPOINT_DIR"
GRACE_ENV = "TASKD_GRACE_S"
DEFAULT_CHECKPOINT_DIR = "./taskd_checkpoints"
DEFAULT_GRACE_S = 25.0  # Kubernetes gives a pod 30 s
GROUP_BASE_DIR_ENV = "GROUP_BASE_DIR"
JOB_ID_ENV = "MINDX_TASK_ID"
POD_IP_ENV = "POD_IP"
HOST_ENV = "TASKD_HOST"
LOCAL_PROXY_ENV = "LOCAL_PROXY_ENABLE"
RANK_ENV = "RANK"
LOCAL_WORLD_SIZE_ENV = "LOCAL_WORLD_SIZE"
MS_NODE_RANK_ENV = "MS_NODE_RANK"

DEFAULT_JOB_ID = "default_job"
DEFAULT_HOST = "127.0.0.1"
# What a cluster mounts into its pods; profiling goes there if it is there.
CLUSTER_INFO = pathlib.Path("/user/cluster-info")
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")
DEFAULT_PROFILING_SWITCH = CLUSTER_INFO / "datatrace-config" / "profilingSwitch"
MANAGER_PORT = 9601
RELAY_PORT = 9602
DEFAULT_FAULT_TIMEOUT_S = 30.0
DEFAULT_HANG_FLOOR_S = 2.0
DEFAULT_HANG_CEILING_S = 1800.0
MIN_SECRET_BYTES = 16  # 128 bits, if they are random
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Where log lines go. `directory` is not created or looked at here."""

    directory: pathlib.Path
    file_level: str = "INFO"
    std_level: str = "INFO"
    to_std: bool = True

    @classmethod
    def load(cls, environment: Environment = os.environ) -> LogConfig:
        """From TASKD_LOG_PATH, TASKD_FILE_LOG_LEVEL, TASKD_STD_LOG_LEVEL, TASKD_LOG_STDOUT."""
        return cls(
            directory=pathlib.Path(environment.get(LOG_PATH_ENV) or "./taskd_log/"),
            file_level=settings.choice(environment, FILE_LOG_LEVEL_ENV, LEVELS, "INFO"),
            std_level=settings.choice(environment, STD_LOG_LEVEL_ENV, LEVELS, "INFO"),
            to_std=settings.choice(environment, LOG_STDOUT_ENV, ("True", "False"), "True")
            == "True",
        )


@dataclass(frozen=True, slots=True)
class HangConfig:
    """Whether ranks that stand still are looked for, and the bounds, in seconds, of the limits that are learnt."""

    is_on: bool = True
    floor_s: float = DEFAULT_HANG_FLOOR_S
    ceiling_s: float = DEFAULT_HANG_CEILING_S

    @classmethod
    def load(cls, environment: Environment = os.environ) -> HangConfig:
        """From the environment."""
        floor_s = settings.seconds(environment, HANG_FLOOR_ENV, DEFAULT_HANG_FLOOR_S)
        ceiling_s = settings.seconds(environment, HANG_CEILING_ENV, DEFAULT_HANG_CEILING_S)
        if floor_s >= ceiling_s:
            raise settings.refusal(
                HANG_FLOOR_ENV, floor_s, f"less than {HANG_CEILING_ENV}, {ceiling_s:g}"
            )
        return cls(
            settings.choice(environment, HANG_DETECTION_ENV, ("on", "off"), "on") == "on",
            floor_s,
            ceiling_s,
        )


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    """The manager of one job.

    `node_count` and `ranks_per_node` None: the agents' registrations give them.
    """

    job_id: str
    bind_address: str
    fault_timeout_s: float
    secret: bytes | None
    log: LogConfig
    node_count: int | None = None
    ranks_per_node: int | None = None
    is_enabled: bool = True
    hang: HangConfig = HangConfig()
    profiling_switch: pathlib.Path = DEFAULT_PROFILING_SWITCH
    strategies: tuple[str, ...] = ()
    grace_s: float = DEFAULT_GRACE_S

    @classmethod
    def load(
        cls, config: Settings | None = None, environment: Environment = os.environ
    ) -> ManagerConfig:
        """From the dict of `init_taskd_manager` and the environment.

        plugin_dir, fault_recover, taskd_enable and cluster_infos are accepted and decide nothing.
        """
        config = settings.checked(config)
        for key in ("plugin_dir", "fault_recover", "taskd_enable"):
            settings.typed(config, key, str, "a string")
        if not isinstance(config.get("cluster_infos", {}), dict | list):
            raise settings.refusal(
                "cluster_infos", config["cluster_infos"], "a dict or a list of dicts"
            )
        return cls(
            job_id=_job_id(config, environment),
            bind_address=_bind_address(environment),
            fault_timeout_s=_fault_timeout(environment),
            secret=_secret(environment),
            log=LogConfig.load(environment),
            node_count=settings.count(config, "node_nums"),
            ranks_per_node=settings.count(config, "proc_per_node"),
            is_enabled=settings.choice(environment, PROCESS_ENABLE_ENV, ("on", "off"), "on")
            == "on",
            hang=HangConfig.load(environment),
            profiling_switch=profiling_switch(
                environment, settings.typed(config, "profiling_switch", str, "a path")
            ),
            strategies=strategies(
                environment,
                settings.typed(config, "recover_strategy", str, "names separated by commas"),
            ),
            grace_s=settings.seconds(environment, GRACE_ENV, DEFAULT_GRACE_S),
        )


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """The agent inside torchrun.

    `wait_for_exit`: a replacement starts only when the device of the dead one is free.
    """

    job_id: str
    manager_address: str
    fault_timeout_s: float
    secret: bytes | None
    log: LogConfig
    wait_for_exit: bool = False
    native: bool = True
    forkserver: str = "auto"
    preload: tuple[str, ...] = ()
    strategies: tuple[str, ...] = ()
    grace_s: float = DEFAULT_GRACE_S
    own_address: str = DEFAULT_HOST
    host: str = ""

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
    ) -> AgentConfig:
        """From the environment.

        `master_addr` and `rendezvous_host` (torchrun's) locate the manager if nothing else does.

        `own_address`: of this node for others, if POD_IP does not say it.
        `job_id` is what to use when MINDX_TASK_ID is not set.
        """
        preload = [
            name.strip() for name in environment.get(PRELOAD_ENV, "").split(",") if name.strip()
        ]
        for name in preload:
            if _MODULE.fullmatch(name) is None:
                raise settings.refusal(
                    PRELOAD_ENV, environment[PRELOAD_ENV], "module names, separated by commas"
                )
        return cls(
            job_id=environment.get(JOB_ID_ENV) or job_id or DEFAULT_JOB_ID,
            manager_address=_manager_address(
                environment, master_addr or rendezvous_host or DEFAULT_HOST
            ),
            fault_timeout_s=_fault_timeout(environment),
            secret=_secret(environment),
            log=LogConfig.load(environment),
            wait_for_exit=wait_for_exit,
            native=settings.choice(environment, NATIVE_ENV, ("on", "off"), "on") == "on",
            forkserver=settings.choice(
                environment, FORKSERVER_ENV, ("auto", "fork", "exec"), "auto"
            ),
            preload=tuple(preload),
            strategies=strategies(environment),
            grace_s=settings.seconds(environment, GRACE_ENV, DEFAULT_GRACE_S),
            own_address=environment.get(POD_IP_ENV) or own_address or DEFAULT_HOST,
            host=environment.get(HOST_ENV) or _name_of_host(),
        )


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A training process that introduces itself (`init_taskd_worker`)."""

    job_id: str
    rank: int
    node_rank: int
    disk_limit_mb: int
    framework: str
    upstream_address: str
    secret: bytes | None

    @classmethod
    def load(
        cls,
        rank_id: object,
        disk_limit_mb: object,
        framework: object,
        environment: Environment = os.environ,
    ) -> WorkerConfig:
        """From the arguments of `init_taskd_worker` and the environment."""
        rank = settings.natural("rank_id", rank_id)
        disk_limit = settings.natural("upper_limit_of_disk_in_mb", disk_limit_mb)
        if framework == "pt":
            local_world_size = settings.digits(environment, LOCAL_WORLD_SIZE_ENV)
            if local_world_size == 0:
                raise settings.refusal(LOCAL_WORLD_SIZE_ENV, "0", "a positive integer")
            node_rank = settings.digits(environment, RANK_ENV) // local_world_size
        elif framework == "ms":
            node_rank = settings.digits(environment, MS_NODE_RANK_ENV)
        else:
            raise settings.refusal("framework", framework, '"pt" or "ms"')
        if environment.get(MANAGER_ADDR_ENV):
            upstream = _manager_address(environment, DEFAULT_HOST)
        else:
            upstream = f"{DEFAULT_HOST}:{RELAY_PORT}"
        return cls(
            _job_id({}, environment),
            rank,
            node_rank,
            disk_limit,
            framework,
            upstream,
            _secret(environment),
        )


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """The relay of one node (`init_taskd_proxy`)."""

    listen_address: str
    upstream_address: str
    node_rank: int
    secret: bytes | None

    @classmethod
    def load(
        cls, config: Settings | None = None, environment: Environment = os.environ
    ) -> RelayConfig:
        """From ListenAddr, ListenPort, UpstreamAddr, UpstreamPort, ServerRank and the environment."""
        config = settings.checked(config)
        rank_text = environment.get(RANK_ENV) or environment.get(MS_NODE_RANK_ENV) or "0"
        return cls(
            listen_address=_literal_address(config, "Listen", RELAY_PORT),
            upstream_address=_literal_address(config, "Upstream", MANAGER_PORT),
            node_rank=_server_rank(config, rank_text),
            secret=_secret(environment),
        )


@dataclass(frozen=True, slots=True)
class CallbackAgentConfig:
    """An agent that drives callbacks (`init_taskd_agent`)."""

    job_id: str
    framework: str
    upstream_address: str
    node_rank: int
    fault_timeout_s: float
    secret: bytes | None

    @classmethod
    def load(
        cls, config: Settings | None = None, environment: Environment = os.environ
    ) -> CallbackAgentConfig:
        """From Framework, UpstreamAddr, UpstreamPort, ServerRank and the environment."""
        config = settings.checked(config)
        framework = config.get("Framework")
        if framework == "PyTorch":
            rank_name = RANK_ENV
        elif framework == "MindSpore":
            rank_name = MS_NODE_RANK_ENV
        else:
            raise settings.refusal("Framework", framework, '"PyTorch" or "MindSpore"')
        return cls(
            job_id=_job_id({}, environment),
            framework=framework,
            upstream_address=_literal_address(config, "Upstream", RELAY_PORT),
            node_rank=_server_rank(config, environment.get(rank_name)),
            fault_timeout_s=_fault_timeout(environment),
            secret=_secret(environment),
        )


def job_id(environment: Environment = os.environ) -> str:
    """Name of the job, for those who have no runtime that knows better."""
    return environment.get(JOB_ID_ENV) or DEFAULT_JOB_ID


def strategies(environment: Environment = os.environ, given: str | None = None) -> tuple[str, ...]:
    """The `recover-strategy` list.

    TASKD_RECOVER_STRATEGY, else what the operator says in HIGH_AVAILABILITY, else `given`. () if
    nobody says.

    Names of HIGH_AVAILABILITY that are no strategies are passed over; its "recover" means
    recover-in-place as well if ENABLE_RESTART_FAULT_PROCESS is on.
    """
    for name, text in ((STRATEGY_ENV, environment.get(STRATEGY_ENV)), ("recover_strategy", given)):
        names = tuple(part.strip() for part in (text or "").split(",") if part.strip())
        unknown = sorted(set(names) - set(STRATEGY_NAMES))
        if unknown:
            raise settings.refusal(
                name, text, f"names out of {', '.join(STRATEGY_NAMES)}, separated by commas"
            )
        if name == STRATEGY_ENV and not names:
            names = tuple(
                part.strip()
                for part in environment.get(HIGH_AVAILABILITY_ENV, "").split(",")
                if part.strip() in STRATEGY_NAMES
            )
            if "recover" in names and environment.get(IN_PLACE_ENV) == "on":
                names = (*names, "recover-in-place")
        if names:
            return names
    return ()


def checkpoint_directory(
    given: str | os.PathLike[str] | None = None, environment: Environment = os.environ
) -> pathlib.Path:
    """Where dumps and periodic checkpoints go.

    `given`, else TASKD_CHECKPOINT_DIR, else ./taskd_checkpoints.
    """
    return pathlib.Path(given or environment.get(CHECKPOINT_ENV) or DEFAULT_CHECKPOINT_DIR)


def profiling_switch(
    environment: Environment = os.environ, given: str | None = None
) -> pathlib.Path:
    """The file that says what is to be profiled; `given`: in the config."""
    return pathlib.Path(given or environment.get(PROFILING_SWITCH_ENV) or DEFAULT_PROFILING_SWITCH)


def profiling_base(environment: Environment = os.environ, directory: str = "") -> pathlib.Path:
    """The folder of all profiles.

    As the user says, else what the cluster has mounted, else one in the working directory.

    `directory`: the working directory, if it may have changed since.
    """
    given = environment.get(PROFILING_PATH_ENV) or environment.get(GROUP_BASE_DIR_ENV)
    if not given and CLUSTER_INFO.is_dir():
        mounted = CLUSTER_INFO / "profiling"
        if os.access(mounted if mounted.exists() else CLUSTER_INFO, os.W_OK | os.X_OK):
            return mounted
    return pathlib.Path(directory, given or "taskd_profiling").absolute()


def is_patch_enabled(environment: Environment = os.environ) -> bool:
    """Whether torchrun is to be patched: only if TASKD_PROCESS_ENABLE says "on"."""
    return environment.get(PROCESS_ENABLE_ENV) == "on"


# ---------------------------------------------------------------- values


def _job_id(config: Settings, environment: Environment) -> str:
    given = settings.typed(config, "job_id", str, "a string")
    return given or environment.get(JOB_ID_ENV) or DEFAULT_JOB_ID


def _fault_timeout(environment: Environment) -> float:
    return settings.seconds(environment, FAULT_TIMEOUT_ENV, DEFAULT_FAULT_TIMEOUT_S)


def _name_of_host() -> str:
    """The same in all containers of a machine, and in no other machine.

    The kernel's number for its own start.
    """
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return os.uname().nodename


def _secret(environment: Environment) -> bytes | None:
    path = environment.get(SECRET_FILE_ENV)
    if not path:
        return None
    accepted = f"the path of a readable file with at least {MIN_SECRET_BYTES} bytes"
    try:
        secret = pathlib.Path(path).read_bytes().strip()
    except OSError as error:
        raise settings.refusal(SECRET_FILE_ENV, path, f"{accepted} ({error.strerror})") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise settings.refusal(SECRET_FILE_ENV, path, f"{accepted} (it holds {len(secret)})")
    return secret


# ---------------------------------------------------------------- addresses


def _port(key: str, value: object, shown: object = None) -> int:
    """`shown`: what the value was a part of."""
    is_number = isinstance(value, str) and value.isascii() and value.isdigit()
    if not is_number or not 0 < int(str(value)) < 65536:
        raise settings.refusal(
            key,
            shown or value,
            "a port from 1 to 65535" if shown is None else "an address with a port from 1 to 65535",
        )
    return int(str(value))


def join_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(key: str, text: str, default_port: int) -> tuple[str, int]:
    """Host and port of "host", "host:port", "[v6]", "[v6]:port" or a bare IPv6 address."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise settings.refusal(key, text, "host, host:port or [IPv6 address]:port")
        return host, _port(key, rest[1:], text) if rest else default_port
    if text.count(":") > 1:
        return text, default_port
    host, colon, port = text.partition(":")
    if not host or any(character.isspace() or character == "/" for character in host):
        raise settings.refusal(key, text, "host, host:port or [IPv6 address]:port")
    return host, _port(key, port, text) if colon else default_port


def _manager_port(environment: Environment) -> int:
    value = environment.get(PORT_ENV)
    return _port(PORT_ENV, value) if value else MANAGER_PORT


def _is_local_proxy(environment: Environment) -> bool:
    return settings.choice(environment, LOCAL_PROXY_ENV, ("on", "off"), "off") == "on"


def _bind_address(environment: Environment) -> str:
    """TASKD_BIND_ADDR, else loopback if LOCAL_PROXY_ENABLE is on, else POD_IP, else loopback."""
    key, text = BIND_ADDR_ENV, environment.get(BIND_ADDR_ENV)
    if not text and not _is_local_proxy(environment):
        key, text = POD_IP_ENV, environment.get(POD_IP_ENV)
    host, port = split_address(key, text or DEFAULT_HOST, _manager_port(environment))
    host = {"localhost": DEFAULT_HOST, "*": "0.0.0.0"}.get(host, host)  # noqa: S104
    if not _is_literal(host):
        raise settings.refusal(key, text, "an IP address of this host")
    return join_address(host, port)


def _manager_address(environment: Environment, otherwise: str) -> str:
    """TASKD_MANAGER_ADDR, else loopback if LOCAL_PROXY_ENABLE is on, else `otherwise`."""
    text = environment.get(MANAGER_ADDR_ENV)
    if not text:
        host = DEFAULT_HOST if _is_local_proxy(environment) else otherwise
        return join_address(host, _manager_port(environment))
    return join_address(*split_address(MANAGER_ADDR_ENV, text, _manager_port(environment)))


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _literal_address(config: Settings, side: str, default_port: int) -> str:
    """`<side>Addr` and `<side>Port`: an IP address (no host name) and a port as text."""
    host = config.get(f"{side}Addr", DEFAULT_HOST)
    if not isinstance(host, str) or not _is_literal(host):
        raise settings.refusal(f"{side}Addr", host, "an IPv4 or IPv6 address")
    return join_address(host, _port(f"{side}Port", config.get(f"{side}Port", str(default_port))))


def _server_rank(config: Settings, default: str | None) -> int:
    value = config.get("ServerRank", default)
    if not isinstance(value, str) or not (value.isascii() and value.isdigit()):
        raise settings.refusal(
            "ServerRank", value, "digits, here or in the environment (RANK, MS_NODE_RANK)"
        )
    return int(value)
