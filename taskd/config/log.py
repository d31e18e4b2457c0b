"""Where log lines go, and from which level on."""

import os
import pathlib
from dataclasses import dataclass

from taskd.config.names import FILE_LOG_LEVEL_ENV, LOG_PATH_ENV, LOG_STDOUT_ENV, STD_LOG_LEVEL_ENV
from taskd.config.values import Environment, choice

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
DEFAULT_LEVEL = "INFO"
DEFAULT_DIRECTORY = "./taskd_log/"


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Where log lines go. `directory` is not created or looked at here."""

    directory: pathlib.Path
    file_level: str = DEFAULT_LEVEL
    std_level: str = DEFAULT_LEVEL
    to_std: bool = True

    @classmethod
    def load(cls, environment: Environment = os.environ) -> "LogConfig":
        """From TASKD_LOG_PATH, TASKD_FILE_LOG_LEVEL, TASKD_STD_LOG_LEVEL, TASKD_LOG_STDOUT."""
        return cls(
            directory=pathlib.Path(environment.get(LOG_PATH_ENV) or DEFAULT_DIRECTORY),
            file_level=choice(environment, FILE_LOG_LEVEL_ENV, LEVELS, DEFAULT_LEVEL),
            std_level=choice(environment, STD_LOG_LEVEL_ENV, LEVELS, DEFAULT_LEVEL),
            to_std=choice(environment, LOG_STDOUT_ENV, ("True", "False"), "True") == "True",
        )
