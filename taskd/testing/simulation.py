"""A whole job in virtual time.

The real machines over a network in memory, with modelled workers and scripted troubles.

Judges what only an onlooker can see: a rank is resumed only when it really is outside its function,
the final state holds every step once and in order, and the job ends: whenever everybody waits,
something is to come that ends it (`taskd.testing.liveness`).
"""

import functools
import random
from dataclasses import dataclass, field, replace

from taskd.core import commands as do
from taskd.core.job.machine import RecoveryMachine
from taskd.core.node import NodeMachine
from taskd.core.phase import JobPhase
from taskd.core.story import Story
from taskd.core.timeouts import Timeouts
from taskd.testing.clock import FakeClock
from taskd.testing.liveness import Onlooker, Stuck, why_stuck
from taskd.testing.network import MemoryNetwork, NetworkQuality
from taskd.testing.script import OF_A_NODE, FaultScript, Trouble
from taskd.testing.shells import MANAGER, SimulatedAgent, SimulatedManager
from taskd.testing.watching import Checks, PartialWatch, Watch
from taskd.testing.worker import SimulatedWorker, World


@dataclass
class Result:
    """What became of the job. `states`: the committed steps that each rank held at its end."""

    succeeded: bool | None
    reason: str
    ended_at: float
    records: list[do.RecoveryRecord]
    states: dict[int, list[int] | None]
    outcomes: dict[int, do.FinishRun | do.FallBack | None]
    stories: list[Story]
    missed: list[Trouble] = field(default_factory=list)


_GATHER_S = 0.005  # as `Timeouts.of_job` of a large one
_SMALL = 512  # ranks that can be looked at after each event
_ELECTION_S = 4.0  # to miss a manager, to vote, and to start the next one


class SimulatedJob:
    """Set up with what is wanted, then `run`."""

    def __init__(
        self,
        *,
        nodes: int = 1,
        ranks_per_node: int = 4,
        steps: int = 30,
        script: FaultScript | None = None,
        seed: int = 0,
        quality: NetworkQuality | None = None,
        is_declared: bool = True,
        is_sharded: bool = False,
        max_restarts: int = 32767,
        fault_timeout_s: float = 30.0,
        wait_for_exit: bool = False,
        has_manager: bool = True,
        reschedule_s: float = 0.0,
        strategies: tuple[str, ...] = (),
        checks_all: bool | None = None,
        gathers: bool = False,
    ) -> None:
        """`reschedule_s`: a lost node is waited for, and another one takes its place.

        `strategies`: what the user allows; with "elastic-training" the others go on without it.
        `checks_all`: every invariant is asserted after each event of the manager; None: in a job
        that is small (`taskd.testing.watching`). `gathers`: agents tell reports that are alike
        together, as those of a large job do.
        """
        self._rng = rng = random.Random(seed)  # noqa: S311
        self.clock = FakeClock()
        self.timeouts = Timeouts.derive(fault_timeout_s)
        self._agent_timeouts = self.timeouts.of_job(nodes)
        if gathers:
            self._agent_timeouts = replace(self._agent_timeouts, gather_s=_GATHER_S)
        self.network = MemoryNetwork(self.clock, rng, quality)
        world = nodes * ranks_per_node, steps
        self.world = World(self.clock, rng, *world, is_declared=is_declared, is_sharded=is_sharded)
        self._note_nothing()
        self._checks_all = world[0] <= _SMALL if checks_all is None else checks_all
        self._reschedule_s, self.strategies = reschedule_s, strategies
        self._first_host = seed % nodes  # any node may have the store of the rendezvous
        self.manager: SimulatedManager | None = None
        if has_manager:
            self._start_manager()
        self._make_machine = functools.partial(
            NodeMachine,
            timeouts=self._agent_timeouts,
            node_count=nodes,
            world_size=world[0],
            max_restarts=max_restarts,
            wait_for_exit=wait_for_exit,
            awaited_s=self._awaited_s if nodes > 1 and self._replaces_nodes else None,
        )
        per = ranks_per_node
        self._ranks = [range(node * per, (node + 1) * per) for node in range(nodes)]
        self.agents = [self._start_agent(node, f"agent {node}") for node in range(nodes)]
        self._play(script or FaultScript())

    def _note_nothing(self) -> None:
        """What is written down while it runs."""
        self.records: list[do.RecoveryRecord] = []
        self.commands: list[do.Command] = []
        self.stories: list[Story] = []
        self.checks = Checks()
        self._missed: list[Trouble] = []
        self._ended: do.EndJob | None = None
        self._managers = self._substitutes = 0
        self._onlooker = Onlooker()

    def _play(self, script: FaultScript) -> None:
        self.script = script
        for trouble in script.each():
            self.clock.call_at(
                trouble.at, functools.partial(self.hurt, trouble), is_background=True
            )

    def run(self, until: float = 20_000.0) -> Result:
        """Until the manager has ended the job, or all have left and nobody can say so.

        Raises `Stuck`.
        """
        while self._ended is None and self.clock.now() < until:
            alone = self.manager is None and not any(agent.is_alive for agent in self.agents)
            if alone or not self.clock.run_next():
                break
            if self._ended is None and not self.clock.expected and not self._is_awaited():
                self._check_liveness()
                if not any(agent.is_alive for agent in self.agents):
                    break  # a manager that came after the last agent had left has nothing to end
        states = {
            rank: worker.state if worker.state is not None else worker.parked
            for rank, worker in sorted(self.world.workers.items())
        }
        ended = self._ended
        return Result(
            None if ended is None else ended.succeeded,
            "did not end" if ended is None else ended.reason,
            self.clock.now(),
            self.records,
            states,
            {agent.node_rank: agent.outcome for agent in self.agents},
            self.stories,
            self._missed,
        )

    def _is_awaited(self) -> bool:
        return self._onlooker.is_awaited(self.manager, self.agents)

    def _check_liveness(self) -> None:
        reason = why_stuck(self.manager, self.agents, self.world.workers)
        # torch's, which are all that a script without taskd has, and whoever waits in a collective
        # for the ranks of a node that has found no manager and goes on as plain torchrun
        is_alone = any(isinstance(agent.outcome, do.FallBack) for agent in self.agents)
        has_timeouts_of_its_own = is_alone or not self.world.is_declared
        if reason is not None and not (has_timeouts_of_its_own and self.world.time_out()):
            raise Stuck(f"at {self.clock.now():.3f} s: {reason}")

    def hurt(self, trouble: Trouble) -> None:
        """Let it happen now."""
        if not self._apply(trouble):
            self._missed.append(trouble)

    def _apply(self, trouble: Trouble) -> bool:
        """Whether there was something to hurt."""
        if trouble.kind == "manager":
            return self._kill_manager(trouble.lasts_s)
        if trouble.kind == "host":
            was_hurt = self._hurt_node(trouble)
            return was_hurt and self._kill_manager(_ELECTION_S, is_elected=True)
        if trouble.kind in OF_A_NODE:
            return self._hurt_node(trouble)
        worker = self.world.workers.get(trouble.target)
        if worker is None or not worker.is_alive or worker.is_frozen:
            return False
        return self._hurt_worker(trouble, worker)

    def _hurt_node(self, trouble: Trouble) -> bool:
        if trouble.target >= len(self.agents):
            return False
        agent = self.agents[trouble.target]
        if trouble.kind == "cut":
            self.network.cut(MANAGER, agent.address)
            return True
        if trouble.kind in {"partition", "slow", "stall"}:
            return agent.is_alive and self._delay_node(trouble, agent)
        if not agent.is_known or not agent.is_alive:
            return False  # a node that never comes is waited for
        agent.kill()
        if self._replaces_nodes:
            start = functools.partial(self._start_substitute, trouble.target)
            self.clock.call_in(trouble.lasts_s, start)
        return True

    def _delay_node(self, trouble: Trouble, agent: SimulatedAgent) -> bool:
        """It is there, and is not heard, or later than it should be."""
        lasts_s = trouble.lasts_s
        if not agent.is_known and lasts_s > self.timeouts.manager_silence_s:
            return False  # a node that never comes is waited for
        if trouble.kind == "slow":
            self.network.slow_down(agent.address, lasts_s)
            return True
        if trouble.kind == "stall":
            agent.stand_still(lasts_s)
        else:
            is_lossy = self._rng.random() < 0.5
            self.network.part(MANAGER, agent.address, lasts_s, is_lossy=is_lossy)
        self.clock.call_in(lasts_s, lambda: None)  # that it ends is to come: nobody waits in vain
        if self._replaces_nodes and self._rng.random() < 0.5:  # else it comes back itself, perhaps
            lost_s = self._agent_timeouts.agent_lease_s + self._agent_timeouts.lease_recheck_s
            replace_it = functools.partial(self._replace_lost, agent)
            self.clock.call_in(lost_s + self._agent_timeouts.heartbeat_s, replace_it)
        return True

    @property
    def _awaited_s(self) -> float:
        timeouts = self._agent_timeouts
        return timeouts.agent_lease_s + timeouts.lease_recheck_s + self._reschedule_s

    @property
    def _replaces_nodes(self) -> bool:
        return bool(self._reschedule_s) or "elastic-training" in self.strategies

    def _replace_lost(self, agent: SimulatedAgent) -> None:
        """Another host gets the place of one that counts as lost, and may be there still."""
        node, manager = agent.node_rank, self.manager
        is_there = self.agents[node] is agent and agent.is_alive
        if is_there and manager is not None and node in manager.machine.lost_nodes:
            self._start_substitute(node)

    def _start_agent(
        self, node: int, incarnation: str, substitute_until: float | None = None
    ) -> SimulatedAgent:
        machine = self._make_machine(
            node,
            self._ranks[node],
            agent_incarnation=incarnation,
            substitute_until=substitute_until,
            store=incarnation,  # a name is as good as an address
            first_host=self._first_host if substitute_until is None else None,
        )
        return SimulatedAgent(node, machine, self._agent_timeouts, self.world, self.network)

    def _start_substitute(self, node: int) -> None:
        """Another host has the index of a lost one."""
        self._substitutes += 1
        name = f"agent {node}, substitute {self._substitutes}"
        until = self.clock.now() + 4 * self.timeouts.agent_lease_s
        self.agents[node] = self._start_agent(node, name, until)

    def _hurt_worker(self, trouble: Trouble, worker: SimulatedWorker) -> bool:
        if trouble.kind == "fail start":
            next(
                agent for agent in self.agents if trouble.target in agent.machine.lives.present
            ).fail_starts += 1
            worker.die(-9)
        elif trouble.kind == "raise":
            worker.raise_next = True
        elif trouble.kind == "tear":
            worker.tear_next = True
        elif trouble.kind == "freeze":
            is_alone = all(peer is worker or peer.is_frozen for peer in self.world.workers.values())
            if (
                is_alone
                or worker.phase not in {"step", "vote"}
                or (worker.version or 0) >= self.world.steps - 1
            ):
                return False  # nobody would ever notice: hangs are another module's business
            worker.freeze()
        elif (
            trouble.kind == "exit early"
            and self.world.is_declared
            and not (worker.is_entered or worker.phase == "paused")
        ):
            # a script that has not come to its function may end well: others may not need it
            return False
        else:
            worker.die({"kill": -9, "crash": -11, "exit": 3, "exit early": 0}[trouble.kind])
        return True

    def _start_manager(self) -> None:
        self._managers += 1
        self.manager = SimulatedManager(
            f"manager {self._managers}",
            self.timeouts,
            self.clock,
            self.network,
            self._look_at,
            self._make_watch,
            self._reschedule_s,
            self.strategies,
        )
        self.stories.append(self.manager.machine.story)

    def _kill_manager(self, lasts_s: float, *, is_elected: bool = False) -> bool:
        if self.manager is None or not self.manager.is_alive:
            return False
        self.manager.kill()
        self.clock.call_in(lasts_s, self._elect_manager if is_elected else self._start_manager)
        return True

    def _elect_manager(self) -> None:
        """As all agents that are there have agreed; too few: somebody starts one."""
        self._start_manager()
        assert self.manager is not None
        there = [agent for agent in self.agents if agent.is_alive and agent.is_known]
        voters = tuple(agent.node_rank for agent in there)
        if 2 * len(voters) > len(self.agents):
            self.manager.is_elected_by(len(self.agents), len(self._ranks[0]), voters)

    def _make_watch(self, machine: RecoveryMachine) -> Watch:
        kind = Watch if self._checks_all else PartialWatch
        return kind(machine, self.checks)

    def _look_at(self, machine: RecoveryMachine, command: do.Command) -> None:
        """Look at each command of the manager as it is made."""
        self.commands.append(command)
        if isinstance(command, do.Resume) and machine.phase is JobPhase.RESUMED:
            hosts = {node.agent_incarnation for node in machine.membership.nodes.values()}
            firsts = {"agent 0", f"agent {self._first_host}"}
            stores = {command.store} if command.store else firsts
            assert stores <= hosts, f"resumed at a store of {stores - hosts}, which was replaced"
            world = set(command.active) or self.world.workers.keys()
            if not command.store:
                meeting = [one for one in self.world.workers.values() if one.rank in world]
                starts = {one.rank: one.start for one in meeting if one.is_alive}
                assert len(set(starts.values())) < 2, f"ranks meet at the stores of {starts}"
            for worker in self.world.workers.values():
                if worker.rank not in world:
                    continue  # of a node that is out of reach, and the job goes on without it
                is_out = (
                    not worker.is_alive
                    or worker.is_frozen
                    or worker.phase in {"paused", "raised", "asking"}
                )
                has_it = worker.generation == command.generation  # said again after a registration
                assert is_out or has_it, (
                    f"rank {worker.rank} is in {worker.phase} when resumed as {command}"
                )
        elif isinstance(command, do.RecordRecovery):
            self.records.append(command.record)
        elif isinstance(command, do.EndJob):
            self._ended = command
