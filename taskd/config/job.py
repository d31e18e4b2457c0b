"""What several processes of one job are told alike: its name, times, strategies."""

import json
import os
import pathlib

from taskd.config.names import (
    ANNOTATIONS_ENV,
    FAULT_TIMEOUT_ENV,
    GRACE_ENV,
    HIGH_AVAILABILITY_ENV,
    IN_PLACE_ENV,
    JOB_ID_ENV,
    PROCESS_ENABLE_ENV,
    RESCHEDULE_ENV,
    STRATEGY_ENV,
)
from taskd.config.values import Environment, listed, refusal, seconds, utf8
from taskd.core.policy.ladder import STRATEGY_NAMES
from taskd.core.timeouts import DEFAULT_FAULT_TIMEOUT_S

DEFAULT_JOB_ID = "default_job"
DEFAULT_GRACE_S = 25.0  # Kubernetes gives a pod 30 s
DEFAULT_RESCHEDULE_S = 270.0  # as MindCluster's wait-reschedule-timeout
# Of a pod, as MindCluster's schedulers know them.
STRATEGY_ANNOTATION, RESCHEDULE_ANNOTATION = "recover-strategy", "wait-reschedule-timeout"


def job_id(environment: Environment = os.environ, otherwise: str | None = None) -> str:
    """Name of the job, for those who have no runtime that knows better."""
    return utf8(JOB_ID_ENV, environment.get(JOB_ID_ENV) or otherwise or DEFAULT_JOB_ID)


def process_enable(environment: Environment) -> str:
    """TASKD_PROCESS_ENABLE, as all who read it take it: " ON" is "on"; "": nobody says it."""
    return environment.get(PROCESS_ENABLE_ENV, "").strip().lower()


def fault_timeout(environment: Environment) -> float:
    """Seconds from which all timeouts are derived (`taskd.core.timeouts`)."""
    return seconds(environment, FAULT_TIMEOUT_ENV, DEFAULT_FAULT_TIMEOUT_S)


def grace(environment: Environment = os.environ) -> float:
    """Seconds between SIGTERM and the end of a node."""
    return seconds(environment, GRACE_ENV, DEFAULT_GRACE_S)


def reschedule(
    environment: Environment = os.environ, default: float = DEFAULT_RESCHEDULE_S
) -> float:
    """Seconds that a lost node is waited for, as the environment or the pod says."""
    annotation = annotations(environment).get(RESCHEDULE_ANNOTATION)
    if annotation is not None and not (annotation.isascii() and annotation.isdigit()):
        raise refusal(f"the annotation {RESCHEDULE_ANNOTATION}", annotation, "seconds")
    return seconds(environment, RESCHEDULE_ENV, float(annotation or default))


def strategies(environment: Environment = os.environ, given: str | None = None) -> tuple[str, ...]:
    """The `recover-strategy` list; () if nobody says. See `named_strategies`."""
    return named_strategies(environment, given)[0]


def named_strategies(
    environment: Environment = os.environ, given: str | None = None
) -> tuple[tuple[str, ...], str]:
    """The `recover-strategy` list, and who says it; (), "" if nobody does.

    TASKD_RECOVER_STRATEGY, else the annotation `recover-strategy` of the pod where its annotations
    are mounted (TASKD_ANNOTATIONS), else what the operator says in HIGH_AVAILABILITY, else `given`.
    Names of HIGH_AVAILABILITY that are no strategies are passed over; its "recover" means
    recover-in-place as well if ENABLE_RESTART_FAULT_PROCESS is on.
    """
    annotation = annotations(environment).get(STRATEGY_ANNOTATION)
    where = f"{STRATEGY_ANNOTATION} in {environment.get(ANNOTATIONS_ENV)}"
    sources = (
        (_checked_strategies(STRATEGY_ENV, environment.get(STRATEGY_ENV)), STRATEGY_ENV),
        (_checked_strategies(where, annotation), where),
        (_strategies_of_operator(environment), HIGH_AVAILABILITY_ENV),
        (_checked_strategies("recover_strategy", given), "recover_strategy"),
    )
    return next(((names, source) for names, source in sources if names), ((), ""))


def annotations(environment: Environment = os.environ) -> dict[str, str]:
    """Ours among those of this pod, as Kubernetes mounts them (downward API): lines of key="value".

    {} if TASKD_ANNOTATIONS names no file. Raises ConfigError: it names one that cannot be read.
    """
    path = environment.get(ANNOTATIONS_ENV)
    if not path:
        return {}
    found = {}
    try:
        for line in pathlib.Path(path).read_text(encoding="utf-8").splitlines():
            key, equals, value = line.partition("=")
            if equals and key in (STRATEGY_ANNOTATION, RESCHEDULE_ANNOTATION):
                found[key] = str(json.loads(value))
    except (OSError, ValueError) as error:
        accepted = 'a readable file with lines of key="value"'
        raise refusal(ANNOTATIONS_ENV, path, f"{accepted} ({error})") from None
    return found


def _checked_strategies(key: str, text: str | None) -> tuple[str, ...]:
    names = listed(text)
    if not set(names) <= set(STRATEGY_NAMES):
        raise refusal(key, text, f"names out of {', '.join(STRATEGY_NAMES)}, separated by commas")
    return names


def _strategies_of_operator(environment: Environment) -> tuple[str, ...]:
    named = listed(environment.get(HIGH_AVAILABILITY_ENV))
    names = tuple(name for name in named if name in STRATEGY_NAMES)
    if "recover" in names and environment.get(IN_PLACE_ENV) == "on":
        names = (*names, "recover-in-place")
    return names
