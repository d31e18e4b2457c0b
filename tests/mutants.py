"""Mutation run: one small change at a time, made in a copy of the sources; do the tests notice?

    make mutants                                            # 60 changes of core, seed 1
    python tests/mutants.py --count 20 --seed 7 --modules 'taskd/agent/*.py' --jobs 2
    python tests/mutants.py --show taskd/core/policy/cut.py:107    # what can be changed there

Owns the kinds of change (`mutants_of`), which tests have to notice a change of which module
(`KILLERS`), and the verdicts: killed (a test failed), timeout (the tests did not end: that was
noticed, too), survived. The working tree is never touched: each job has a copy of it in a temporary
folder. A run begins with two checks of itself: the tests pass in the unchanged copy, and fail if a
module of the copy cannot be imported.

Exit code: 0 all were noticed, 1 some survived, 2 the run itself is not sound. Survivors that were
looked at are explained in docs/measured/mutants.md.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
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

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, order=True)
class Mutant:
    """One change: the bytes from `start` to `end` of a module become `text`."""

    module: str
    line: int
    what: str
    start: int
    end: int
    text: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line}  {self.what}"

    def apply(self, source: bytes) -> bytes:
        """The module with the change."""
        return source[: self.start] + self.text.encode() + source[self.end :]


# ---------------------------------------------------------------------- the changes


def mutants_of(module: str, source: bytes) -> list[Mutant]:
    """Every change of this module that is known here, in the order of the lines."""
    return sorted(set(_Finder(module, source).found))


class _Finder(ast.NodeVisitor):
    """Collects the changes of one module.

    Left alone: annotations, decorators, asserts, words, and what only types need.
    """

    def __init__(self, module: str, source: bytes) -> None:
        self.found: list[Mutant] = []
        self._module, self._source = module, source
        self._starts = [
            0,
            *itertools.accumulate(len(line) for line in source.splitlines(keepends=True)),
        ]
        self._returns: list[str] = []
        self.visit(ast.parse(source))

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[
            node.end_lineno - 1
        ] + node.end_col_offset

    def _add(self, node: ast.expr | ast.stmt, text: str) -> None:
        start, end = self._span(node)
        before = " ".join(self._source[start:end].decode().split())
        self.found.append(
            Mutant(self._module, node.lineno, f"{before}  ->  {text}", start, end, text)
        )

    def _change(self, node: ast.expr, changed: ast.expr) -> None:
        self._add(node, f"({ast.unparse(changed)})")

    # ------------------------------------------------------------------ what is left alone

    def visit_If(self, node: ast.If) -> None:
        """`if TYPE_CHECKING:` is not run at all."""
        if ast.unparse(node.test) in {"TYPE_CHECKING", "__name__ == '__main__'"}:
            return
        self._test(node.test)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """The body, and the default values."""
        self._returns.append("" if node.returns is None else ast.unparse(node.returns))
        for thing in (*node.args.defaults, *node.args.kw_defaults, *node.body):
            if thing is not None:
                self.visit(thing)
        self._returns.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """The body."""
        for thing in node.body:
            self.visit(thing)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """The value."""
        if isinstance(node.target, ast.Attribute):
            self._add(node, "pass")
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        """States what holds anyway."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Words."""

    # ------------------------------------------------------------------ statements

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call is left out. Docstrings are no calls."""
        if isinstance(node.value, ast.Call):
            self._add(node, "pass")
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Left out where a variable that is not set would show at once otherwise."""
        if any(
            isinstance(part, ast.Attribute | ast.Subscript)
            for target in node.targets
            for part in ast.walk(target)
        ):
            self._add(node, "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Left out."""
        self._add(node, "pass")
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        """Left out."""
        self._add(node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        """Left out."""
        self._add(node, "pass")

    def visit_Return(self, node: ast.Return) -> None:
        """Nothing is returned, or the opposite."""
        returns = self._returns[-1]
        if node.value is None:
            return
        is_plain = isinstance(node.value, ast.Constant) or ast.unparse(node.value) in {"[]", "()"}
        if not is_plain and (returns.endswith("Commands") or returns.startswith("list[")):
            self._add(node.value, "[]")
        elif not is_plain and returns.startswith("tuple[") and returns.endswith(", ...]"):
            self._add(node.value, "()")
        elif not is_plain and returns.endswith("| None"):
            self._add(node.value, "None")
        elif returns == "bool" and not isinstance(node.value, ast.Constant):
            self._add(node.value, f"(not ({ast.unparse(node.value)}))")
        self.visit(node.value)

    # ------------------------------------------------------------------ expressions

    def _test(self, node: ast.expr) -> None:
        for value in ("True", "False"):
            self._add(node, value)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """Always the one, always the other."""
        self._test(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """Nothing is filtered."""
        for test in node.ifs:
            self._add(test, "True")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """The bound, or the opposite."""
        for index, operator in enumerate(node.ops):
            if type(operator) in _COMPARISONS:
                operators = [
                    *node.ops[:index],
                    _COMPARISONS[type(operator)](),
                    *node.ops[index + 1 :],
                ]
                self._change(node, ast.Compare(node.left, operators, node.comparators))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """`and` for `or`, and without one of the parts."""
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._change(node, ast.BoolOp(other, node.values))
        for index in range(len(node.values)):
            rest = [*node.values[:index], *node.values[index + 1 :]]
            self._change(node, rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Without `not`, without `-`."""
        if isinstance(node.op, ast.Not | ast.USub):
            self._change(node, node.operand)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Another operator, except between words."""
        has_words = any(
            isinstance(part, ast.JoinedStr)
            or (isinstance(part, ast.Constant) and isinstance(part.value, str))
            for part in ast.walk(node)
        )
        if type(node.op) in _OPERATORS and not has_words:
            self._change(node, ast.BinOp(node.left, _OPERATORS[type(node.op)](), node.right))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """The other truth, or one more."""
        if isinstance(node.value, bool):
            self._add(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self._add(node, repr(node.value + 1))

    def visit_Call(self, node: ast.Call) -> None:
        """The opposite function."""
        if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            self._add(node.func, _FUNCTIONS[node.func.id])
        self.generic_visit(node)


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
