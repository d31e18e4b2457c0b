"""Profiling: switches to codes, codes to domains, answers to one state, and who is told when.

Two domains of marks. "default" holds Step, SaveCheckpoint, FP and DataLoader, "communication" the
collectives. The code that is asked for is 700, plus 10 with the default domain on, plus 1 with
communication on. A worker answers with 1400 + 10 * default + communication, where a domain is 0
(off), 1 (on) or 2 (exception).

`Switchboard` is the manager's side, `Exchange` that of a node. Both stand beside the recovery: what
is profiled never decides what becomes of a job.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

COMMUNICATION = "CommunicationOperator"
DEFAULT_DOMAIN = ("Step", "SaveCheckpoint", "FP", "DataLoader")
SWITCHES = (COMMUNICATION, *DEFAULT_DOMAIN)

ALL_OFF = 700
CODES = (700, 701, 710, 711)
RESEND_S = 30.0


class Domain(Enum):
    """What one domain does on a rank, or on all together. UNKNOWN: not said yet, or they differ."""

    OFF = 0
    ON = 1
    EXCEPTION = 2
    UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Domains:
    """Both domains."""

    default: Domain
    communication: Domain

    def __str__(self) -> str:
        return (
            f"default {self.default.name.lower()}, communication {self.communication.name.lower()}"
        )


def code_of(switches: Mapping[str, bool]) -> int:
    """The code for these switches; one that is not named is off.

    The four of the default domain toggle together: they are on unless all five are off.
    """
    if not any(switches.get(name, False) for name in SWITCHES):
        return ALL_OFF
    return 711 if switches.get(COMMUNICATION, False) else 710


def asked_by(code: int) -> Domains:
    """What a code asks for. Raises ValueError if it is none."""
    if code not in CODES:
        raise ValueError(
            f"{code} is no profiling code: expected one of {', '.join(map(str, CODES))}"
        )
    return Domains(Domain((code - ALL_OFF) // 10), Domain((code - ALL_OFF) % 10))


def status_of(domains: Domains) -> int:
    """A worker's answer. Both domains must be known."""
    assert Domain.UNKNOWN not in (domains.default, domains.communication)
    return 1400 + 10 * domains.default.value + domains.communication.value


def said_by(status: int) -> Domains:
    """What an answer says. Raises ValueError if it is none."""
    default, communication = divmod(status - 1400, 10)
    if not (0 <= default <= 2 and 0 <= communication <= 2):
        raise ValueError(f"{status} is no profiling status")
    return Domains(Domain(default), Domain(communication))


def overall(states: Iterable[Domain]) -> Domain:
    """One state for all ranks. An exception anywhere counts; none, or different ones: unknown."""
    found = set(states)
    if Domain.EXCEPTION in found:
        return Domain.EXCEPTION
    return found.pop() if len(found) == 1 else Domain.UNKNOWN


class Switchboard:
    """What the manager asks for, what the workers have answered, and when to ask again."""

    def __init__(self) -> None:
        self.wanted: int | None = None  # None: nobody has ever asked for anything
        self._said: dict[int, tuple[int, Domains]] = {}  # rank -> incarnation and answer
        self._asked_at = float("-inf")

    def ask(self, code: int, now: float) -> bool:
        """Somebody wants this. True: it is news, all workers are to be told.

        That all is off is no news at the beginning.
        """
        asked_by(code)
        if code == (ALL_OFF if self.wanted is None else self.wanted):
            return False
        self.wanted, self._asked_at = code, now
        return True

    def heard(self, rank: int, incarnation: int, status: int) -> bool:
        """A worker's answer. True: it is news. An answer of an earlier life is none.

        Raises ValueError if it makes no sense.
        """
        domains = said_by(status)
        before = self._said.get(rank)
        if before is not None and (incarnation < before[0] or before == (incarnation, domains)):
            return False
        self._said[rank] = (incarnation, domains)
        if self.wanted is None and domains != asked_by(ALL_OFF):
            # an earlier manager had asked, and the switch has gone since: due at once
            self.wanted = ALL_OFF
        return True

    def state(self, ranks: Iterable[int]) -> Domains:
        """Both domains over these ranks."""
        unknown = Domains(Domain.UNKNOWN, Domain.UNKNOWN)
        said = [self._said[rank][1] if rank in self._said else unknown for rank in ranks]
        return Domains(
            overall(one.default for one in said), overall(one.communication for one in said)
        )

    def excepted(self, ranks: Iterable[int]) -> list[int]:
        """Those of these ranks that report an exception in a domain."""
        return [
            rank
            for rank in sorted(ranks)
            if rank in self._said
            and Domain.EXCEPTION in (self._said[rank][1].default, self._said[rank][1].communication)
        ]

    def is_met(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks do what is wanted."""
        return self.wanted is None or self.state(ranks) == asked_by(self.wanted)

    def next_deadline(self, ranks: Iterable[int]) -> float | None:
        """When all are to be told again, because some do not do it; None: nothing is open."""
        known = tuple(ranks)
        return None if not known or self.is_met(known) else self._asked_at + RESEND_S

    def take_due(self, ranks: Iterable[int], now: float) -> bool:
        """Whether all are to be told again now. The next time is `RESEND_S` later."""
        deadline = self.next_deadline(ranks)
        if deadline is None or deadline > now:
            return False
        self._asked_at = now
        return True


class Exchange:
    """What a node knows.

    The code that its manager asked for last, which new workers are told, and its workers' answers.
    """

    def __init__(self) -> None:
        self.wanted: int | None = None
        self._said: dict[int, tuple[int, int]] = {}  # rank -> incarnation and status

    def ask(self, code: int) -> None:
        """The manager wants this of all workers. Raises ValueError if it is no code."""
        asked_by(code)
        self.wanted = code

    def for_new_worker(self) -> int | None:
        """What a worker that has just come up is to be told.

        None: nothing, it begins with everything off.
        """
        return None if self.wanted == ALL_OFF else self.wanted

    def heard(self, rank: int, incarnation: int, status: int) -> None:
        """A worker's answer, to be told to a manager that comes (back) later.

        Raises ValueError if it makes no sense.
        """
        said_by(status)
        self._said[rank] = (incarnation, status)

    def answers(self) -> list[tuple[int, int, int]]:
        """Rank, incarnation and status of all who have answered."""
        return [
            (rank, incarnation, status)
            for rank, (incarnation, status) in sorted(self._said.items())
        ]
