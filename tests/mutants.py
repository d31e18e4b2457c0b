"""Mutation run: one small change at a time, made in a copy of the sources; do the tests notice?

    make mutants                                            # 60 changes of core, seed 1
    python tests/mutants.py --count 20 --seed 7 --modules 'taskd/agent/*.py' --jobs 2
    python tests/mutants.py --show taskd/core/policy/cut.py:107    # what can be changed there

Owns which tests have to notice a change of which module
(`KILLERS`), and the verdicts: killed (a test failed), timeout (the tests did not end: that was
noticed, too), survived. The working tree is never touched: each job has a copy of it in a temporary
folder. A run begins with two checks of itself: the tests pass in the unchanged copy, and fail if a
module of the copy cannot be imported.

Exit code: 0 all were noticed, 1 some survived, 2 the run itself is not sound. Survivors that were
looked at are explained in docs/measured/mutants.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tests.mutations import Mutant, mutants_of  # noqa: E402

CORE = ("taskd/core/**/*.py",)
# A change that makes the tests so many times slower was noticed ...
SLOWER = 3.0
# ... and takes at least this long, as the machine may have more to do than in the beginning.
AT_LEAST_S = 60.0

_PYTEST = (
    "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:randomly", "-p", "no:xdist", "-p", "no:cov",
    "-p", "no:cacheprovider",
)  # fmt: skip
_PROPERTIES = (
    "tests/unit/core/test_recovery_properties.py", "tests/unit/core/test_node_properties.py",
    "tests/unit/core/test_cut_properties.py",
)  # fmt: skip
_HISTORIES = ("-m", "taskd.testing.histories", "--seed", "1", "--count", "100")
_OF_CORE = (
    (*_PYTEST, "tests/unit/core", *(f"--ignore={path}" for path in _PROPERTIES)),
    (*_PYTEST, *_PROPERTIES),
    _HISTORIES,
)
_OF_MIRRORS = (
    (
        *_PYTEST, "tests/contract/test_mirroring.py", "tests/contract/test_mirror_strangers.py",
        "tests/unit/wire/test_mirroring.py",
    ),
)  # fmt: skip
_OF_AGENT = (
    (
        *_PYTEST,
        "tests/unit/agent",
        "tests/unit/test_endings.py",
        "tests/unit/test_reports.py",
        "tests/unit/test_vitals.py",
    ),
)
# Which commands (arguments of the interpreter, cheap ones first) have to notice a change of a
# module. The first beginning of its path counts.
KILLERS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("taskd/core/", _OF_CORE),
    ("taskd/agent/mirror", _OF_MIRRORS),
    ("taskd/agent/", _OF_AGENT),
)


# ---------------------------------------------------------------------- the tests


@dataclass(frozen=True)
class Verdict:
    """What became of one mutant. `outcome`: "killed", "timeout", "survived"; `by`: what noticed."""

    mutant: Mutant
    outcome: str
    by: str = ""
    took_s: float = 0.0


def killers_of(module: str) -> tuple[tuple[str, ...], ...]:
    """The commands that have to notice a change of this module."""
    found = next((commands for start, commands in KILLERS if module.startswith(start)), None)
    if found is None:
        raise SystemExit(
            f"no tests are known for {module}: see KILLERS in {pathlib.Path(__file__).name}"
        )
    return found


class Copy:
    """A copy of the sources and the tests, in which one module at a time is changed."""

    def __init__(self, parent: pathlib.Path, name: str) -> None:
        self.root = parent / name
        ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
        for part in ("taskd", "testbed", "tests"):
            shutil.copytree(ROOT / part, self.root / part, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self._written = 0

    @contextlib.contextmanager
    def changed(self, module: str, source: bytes) -> Iterator[None]:
        """With this text in the place of the module."""
        path = self.root / module
        before = path.read_bytes()
        try:
            self._write(path, source)
            yield
        finally:
            self._write(path, before)

    def _write(self, path: pathlib.Path, source: bytes) -> None:
        """Bytecode is found by the second of a file's date: each text has a second of its own."""
        path.write_bytes(source)
        self._written += 1
        os.utime(path, (self._written, self._written))

    def run(self, command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
        """Exit code (None: not within the limit) and output of this interpreter."""
        environment = os.environ | {
            "HYPOTHESIS_PROFILE": "mutants",
            "PYTHONPATH": str(self.root),
            "OMP_NUM_THREADS": "1",
        }
        with subprocess.Popen(
            [sys.executable, *command], cwd=self.root, env=environment, text=True,
            start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return None, ""
        return process.returncode, output


def judge(copy: Copy, mutant: Mutant, limits_s: dict[tuple[str, ...], float]) -> Verdict:
    """Run the tests until one fails."""
    began = time.monotonic()
    with copy.changed(mutant.module, mutant.apply((copy.root / mutant.module).read_bytes())):
        for command in killers_of(mutant.module):
            code, output = copy.run(command, limits_s[command])
            took_s = time.monotonic() - began
            if code is None:
                return Verdict(mutant, "timeout", _name(command), took_s)
            if code != 0:
                return Verdict(mutant, "killed", _failed_test(output) or _name(command), took_s)
    return Verdict(mutant, "survived", took_s=time.monotonic() - began)


def _name(command: Sequence[str]) -> str:
    return next(part for part in command[1:] if "." in part or "/" in part)


def _failed_test(output: str) -> str:
    """The name of the first failed test in pytest's short summary."""
    lines = (line.split(" ", 2) for line in output.splitlines())
    return next(
        (words[1] for words in lines if words[0] in {"FAILED", "ERROR"} and len(words) > 1), ""
    )


def check_itself(copy: Copy, modules: Sequence[str]) -> dict[tuple[str, ...], float]:
    """How long each command may take. Raises SystemExit (2) if the verdicts would mean nothing."""
    limits_s: dict[tuple[str, ...], float] = {}
    for module in modules:
        for command in killers_of(module):
            if command in limits_s:
                continue
            began = time.monotonic()
            code, output = copy.run(command, 3600.0)
            if code != 0:
                print(output[-3000:])
                raise SystemExit(2)
            took_s = time.monotonic() - began
            limits_s[command] = max(AT_LEAST_S, SLOWER * took_s)
            print(f"{took_s:6.1f} s without a change: {_name(command)} ...", flush=True)
            with copy.changed(module, b"raise ImportError('not the copy')\n"):
                if copy.run(command, 3600.0)[0] == 0:
                    print(f"{_name(command)} passes without {module}: it tests something else")
                    raise SystemExit(2)
    return limits_s


# ---------------------------------------------------------------------- the command


def choose(modules: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """`count` of all changes of these modules, the same ones for the same seed and sources."""
    every = [
        mutant for module in modules for mutant in mutants_of(module, (ROOT / module).read_bytes())
    ]
    return sorted(random.Random(seed).sample(every, min(count, len(every))))


def judge_all(mutants: Sequence[Mutant], jobs: int) -> Iterator[Verdict]:
    """Each verdict as it is known."""
    with tempfile.TemporaryDirectory(prefix="taskd-mutants-") as folder:
        copies: queue.Queue[Copy] = queue.Queue()
        for number in range(jobs):
            copies.put(Copy(pathlib.Path(folder), str(number)))
        first = copies.get()
        limits_s = check_itself(first, sorted({mutant.module for mutant in mutants}))
        copies.put(first)

        def judge_one(mutant: Mutant) -> Verdict:
            copy = copies.get()
            try:
                return judge(copy, mutant, limits_s)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            for done in as_completed([pool.submit(judge_one, mutant) for mutant in mutants]):
                yield done.result()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="tests/mutants.py", description="Do the tests notice small changes of the code?"
    )
    parser.add_argument("--count", type=int, default=60, help="how many changes")
    parser.add_argument("--seed", type=int, default=1, help="which ones")
    parser.add_argument(
        "--modules",
        nargs="+",
        default=CORE,
        metavar="PATTERN",
        help="of which modules, as patterns of paths",
    )
    parser.add_argument("--jobs", type=int, default=1, help="copies that are tested side by side")
    parser.add_argument(
        "--show",
        metavar="PATH[:LINE]",
        help="print all changes of a module, or of one of its lines, and end",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="TEXT",
        help="of the chosen changes, those whose description contains a text",
    )
    wanted = parser.parse_args(arguments)
    if wanted.show:
        path, _, line = wanted.show.partition(":")
        shown = mutants_of(path, (ROOT / path).read_bytes())
        print(*(mutant for mutant in shown if not line or mutant.line == int(line)), sep="\n")
        return 0
    modules = sorted(
        {
            path.relative_to(ROOT).as_posix()
            for pattern in wanted.modules
            for path in ROOT.glob(pattern)
        }
    )
    chosen = choose(modules, wanted.count, wanted.seed)
    if wanted.only:
        chosen = [mutant for mutant in chosen if any(text in str(mutant) for text in wanted.only)]
    print(f"{len(chosen)} changes of {len(modules)} modules, seed {wanted.seed}", flush=True)
    verdicts = []
    for verdict in judge_all(chosen, wanted.jobs):
        verdicts.append(verdict)
        print(
            f"{verdict.outcome:8} {verdict.took_s:6.1f} s  {verdict.mutant}  {verdict.by}",
            flush=True,
        )
    survivors = sorted(verdict.mutant for verdict in verdicts if verdict.outcome == "survived")
    print(f"{len(survivors)} of {len(verdicts)} survived", *survivors, sep="\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
