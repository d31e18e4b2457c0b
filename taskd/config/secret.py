"""The secret of the job: read, checked, and not left to those who must not have it."""

import itertools
import os
import stat
from collections.abc import Iterable

from taskd.config.names import SECRET_FILE_ENV
from taskd.config.values import Environment, refusal

MIN_SECRET_BYTES = 16  # 128 bits, if they are random
_CHUNK_BYTES = 1 << 16
_ACCEPTED = f"the path of a readable file with at least {MIN_SECRET_BYTES} bytes"


def secret(environment: Environment) -> bytes | None:
    """The content of TASKD_SECRET_FILE; None: connections are not encrypted. Raises ConfigError."""
    content = _read(environment)
    return None if content is None else bytes(content).strip()


def check_secret(environment: Environment) -> bool:
    """The same check, for a process of which workers are forked: nothing of it stays in memory.

    Returns whether there is one.
    """
    content = _read(environment)
    if content is not None:
        _wipe(content)
    return content is not None


def exposure(environment: Environment = os.environ) -> str | None:
    """Who else may read or replace the secret, and what to do; None: nobody, or there is none."""
    path = environment.get(SECRET_FILE_ENV)
    if not path:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None  # nobody reads it any more
    others = found.st_mode & (stat.S_IRWXO | stat.S_IWGRP)
    if found.st_uid not in (0, os.geteuid()):
        who = f"belongs to user {found.st_uid}, who can replace it"
    elif others:
        who = f"can be read or replaced by other users (mode {stat.S_IMODE(found.st_mode):04o})"
    else:
        return None
    return f"{SECRET_FILE_ENV}={path} {who}: whoever has it can join the job. chmod 600 {path}"


def without_secret(environment: Environment = os.environ) -> dict[str, str]:
    """What a training process gets of torchrun's environment: its agent speaks for it."""
    return {name: value for name, value in environment.items() if name != SECRET_FILE_ENV}


def _read(environment: Environment) -> bytearray | None:
    path = environment.get(SECRET_FILE_ENV)
    if not path:
        return None
    content, chunk = bytearray(), bytearray(_CHUNK_BYTES)
    try:
        with open(path, "rb", buffering=0) as file:
            mode = os.fstat(file.fileno()).st_mode
            while count := file.readinto(chunk):
                content += memoryview(chunk)[:count]
    except OSError as error:
        raise refusal(SECRET_FILE_ENV, path, f"{_ACCEPTED} ({error.strerror})") from None
    finally:
        _wipe(chunk)
    size = len(content) - _spaces(content) - _spaces(reversed(content))
    problem = ""
    if size < MIN_SECRET_BYTES:
        problem = f" (it holds {max(0, size)})"
    elif mode & stat.S_IWOTH:
        problem = ", which only its owner can write"
    if problem:
        _wipe(content)
        raise refusal(SECRET_FILE_ENV, path, _ACCEPTED + problem)
    return content


def _spaces(content: Iterable[int]) -> int:
    """So many at its beginning."""
    return sum(1 for _ in itertools.takewhile(lambda byte: bytes((byte,)).isspace(), content))


def _wipe(content: bytearray) -> None:
    content[:] = bytes(len(content))
