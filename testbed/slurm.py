"""A real Slurm of several nodes on this machine, each of them a host of its own.

    host 0: "control"          host 1: "node1"        host 2: "node2"
    munged, slurmctld   ◄────  slurmd          ...    slurmd, slurmstepd, tasks

A node has an address, a name that all of them resolve, and a boot id (`testbed.hosts`). Nothing of
the machine itself is changed. Needs root and the programs of Debian's packages slurmctld, slurmd,
slurm-client and munge; `missing` says what is not there.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import secrets
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

from testbed import hosts

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from testbed.hosts import Host

PACKAGES = "slurmctld slurmd slurm-client munge"
_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scancel", "scontrol", "nsenter")
_FREEZER = pathlib.Path("/sys/fs/cgroup/freezer")  # version 1: what Slurm tracks processes with
_START_S = 60  # until all nodes are idle
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}

_CONF = """\
ClusterName=local
SlurmctldHost=control({control})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
KillWait={kill_wait_s}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
MessageTimeout=30
"""


def missing() -> str | None:
    """Why there can be no Slurm here, or None."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    gone = [program for program in _PROGRAMS if shutil.which(program, path=path) is None]
    if gone:
        return f"no {', '.join(gone)}: apt-get install {PACKAGES}"
    return hosts.missing()


class Node:
    """One host of the cluster. `prefix`: of a command that is to run there."""

    def __init__(self, host: Host, name: str, names: pathlib.Path) -> None:
        """`names`: the file that all hosts have as /etc/hosts."""
        self.host, self.name, self.address = host, name, host.address
        there = (
            f'mount --bind "{host.boot_id}" {hosts.BOOT_ID} && mount --bind "{names}" /etc/hosts'
            f' && hostname {name} && exec "$@"'
        )
        namespaces = (f"--net={host.namespace}", "unshare", "--mount", "--uts")
        self.prefix = ("nsenter", *namespaces, "sh", "-c", there, "sh")


class Cluster:
    """See the module. A context; what still runs in it when it ends is killed."""

    def __init__(self, folder: pathlib.Path, count: int, kill_wait_s: int = 30) -> None:
        """`kill_wait_s`: from the SIGTERM of a cancelled job to SIGKILL."""
        self.folder, self._kill_wait_s = folder, kill_wait_s
        self._stack = contextlib.ExitStack()
        self._count = count
        self.nodes: list[Node] = []
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._env = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }

    def __enter__(self) -> Self:
        """Returns when all nodes are idle."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.callback(self._remove_groups)
            stack.callback(self._reap)
            found = stack.enter_context(hosts.Hosts(self.folder, self._count + 1))
            names = self.folder / "hosts"
            titles = ["control", *(f"node{number}" for number in range(1, self._count + 1))]
            lines = [f"{host.address} {title}" for host, title in zip(found, titles, strict=True)]
            names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
            self._control, *self.nodes = (
                Node(host, title, names) for host, title in zip(found, titles, strict=True)
            )
            self._configure()
            self._start("munged", *self._munged(), on=self._control)
            self._wait((self.folder / "munge.socket").exists, "munged")
            self._start("slurmctld", "slurmctld", "-D", "-c", on=self._control)
            for node in self.nodes:
                (self.folder / node.name).mkdir(exist_ok=True)
                self._start(f"slurmd-{node.name}", "slurmd", "-D", "-N", node.name, on=node)
            self._wait(lambda: self._idle() == self._count, "all nodes")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ------------------------------------------------------------------ what users do

    def run(self, *command: str, check: bool = True, env: dict[str, str] | None = None) -> str:
        """What a command of Slurm prints, given on the host of the controller.

        `env`: of the user; else that of this process.
        """
        ended = subprocess.run(
            [*self._control.prefix, *command],
            env=self._env if env is None else env | {"SLURM_CONF": self._env["SLURM_CONF"]},
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        told = ended.stdout + ended.stderr
        assert ended.returncode == 0 or not check, f"{' '.join(command)}: {told}"
        return told

    def submit(self, script: pathlib.Path, *options: str, env: dict[str, str]) -> int:
        """Number of the job. `env`: all that it inherits."""
        told = self.run("sbatch", "--parsable", *options, str(script), env=env)
        return int(told.split()[0].partition(";")[0])

    def about(self, job: int) -> dict[str, str]:
        """What `scontrol show job` says of it."""
        told = self.run("scontrol", "--oneliner", "show", "job", str(job))
        return dict(re.findall(r"(\w+)=(\S*)", told))

    def wait(self, job: int, timeout_s: float) -> dict[str, str]:
        """Until it has ended. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not self.has_ended(job):
            if time.monotonic() > deadline:
                state = self.about(job)["JobState"]
                raise TimeoutError(f"job {job} is still {state} after {timeout_s} s")
            time.sleep(0.2)  # each look starts a process
        return self.about(job)

    def has_ended(self, job: int) -> bool:
        """Whether it is over, and will not be started again."""
        return self.about(job)["JobState"] in _ENDED

    # ------------------------------------------------------------------ what befalls nodes

    def lose(self, node: Node) -> set[int]:
        """Its power fails, and Slurm is told at once. Which pids it had."""
        killed = node.host.kill()
        self.run("scontrol", "update", f"nodename={node.name}", "state=down", "reason=lost")
        return killed

    def log(self) -> str:
        """What the controller has said so far."""
        return (self.folder / "slurmctld.log").read_text()

    # ------------------------------------------------------------------ own

    def _idle(self) -> int:
        found = self.run("sinfo", "--noheader", "--states=idle", "--format=%D", check=False).split()
        return int(found[0]) if found and found[0].isdigit() else 0

    def _configure(self) -> None:
        is_frozen = _FREEZER.is_dir() and os.access(_FREEZER, os.W_OK)
        conf = _CONF.format(
            control=self._control.address,
            folder=self.folder,
            proctrack="cgroup" if is_frozen else "pgid",
            kill_wait_s=self._kill_wait_s,
        )
        cpus = os.cpu_count()
        lines = [
            f"NodeName={node.name} NodeAddr={node.address} CPUs={cpus} RealMemory=1000"
            for node in self.nodes
        ]
        names = ",".join(node.name for node in self.nodes)
        lines += [f"PartitionName=all Nodes={names} Default=YES State=UP", ""]
        (self.folder / "slurm.conf").write_text(conf + "\n".join(lines))
        (self.folder / "cgroup.conf").write_text(
            "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n"
        )
        (self.folder / "state").mkdir(exist_ok=True)

    def _munged(self) -> list[str]:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {"key": key, "socket": self.folder / "munge.socket"}
        files |= {"pid": self.folder / "munge.pid", "seed": self.folder / "munge.seed"}
        files |= {"log": self.folder / "munge.log"}
        told = [
            f"--{name}{'' if name == 'socket' else '-file'}={path}" for name, path in files.items()
        ]
        return ["munged", "--foreground", "--force", *told]

    def _start(self, name: str, *command: str, on: Node) -> None:
        # Ended with its host. A session of its own: it may signal its group.
        with (self.folder / f"{name}.out").open("ab") as out:
            started = subprocess.Popen(
                [*on.prefix, *command],
                env=self._env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._daemons.append(started)

    def _wait(self, is_there: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _START_S
        while not is_there():
            if time.monotonic() > deadline:
                said = [
                    f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}"
                    for pattern in ("*.out", "*.log")
                    for path in sorted(self.folder.glob(pattern))
                ]
                raise TimeoutError("\n".join([f"no {what} within {_START_S} s", *said]))
            time.sleep(0.1)

    def _reap(self) -> None:
        for daemon in self._daemons:
            daemon.wait(_START_S)  # its host is no more

    def _remove_groups(self) -> None:
        """What slurmd leaves in the freezer's hierarchy when it is killed."""
        for node in self.nodes:
            for top in _FREEZER.glob(f"slurm_{node.name}"):
                for folder, _, _ in os.walk(top, topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)
