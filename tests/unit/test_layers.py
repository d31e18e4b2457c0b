"""The dependency rule: who may import what, read from the source by `ast`; who may look at a clock.

And the limits of size.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "taskd"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 500
MAX_FUNCTION_LINES = 60

SHELLS = ("taskd.manager", "taskd.agent", "taskd.worker", "taskd.torchrun", "taskd.msrun",
          "taskd.mindspore")  # fmt: skip
VENEER = ("taskd.api", "taskd.python")
# For each part: what of ours it must not import.
FORBIDDEN = {
    "taskd.errors": ("taskd",),
    "taskd.clock": ("taskd",),
    "taskd.core": (*SHELLS, *VENEER, "taskd.wire", "taskd.transport", "taskd.checkpoint",
    "taskd.native", "taskd.testing",
                   "taskd.config", "taskd.clock", "taskd.log"),
    "taskd.wire": (*SHELLS, *VENEER, "taskd.transport", "taskd.checkpoint", "taskd.native",
    "taskd.testing"),
    "taskd.transport": (*SHELLS, *VENEER, "taskd.core", "taskd.wire", "taskd.checkpoint",
    "taskd.native", "taskd.testing"),
    "taskd.checkpoint": (*SHELLS, *VENEER, "taskd.wire", "taskd.transport", "taskd.testing"),
    "taskd.native": (*SHELLS, *VENEER, "taskd.core", "taskd.wire", "taskd.transport",
    "taskd.checkpoint", "taskd.testing"),
    "taskd.manager": ("taskd.agent", "taskd.worker", "taskd.torchrun", "taskd.msrun",
    "taskd.mindspore", *VENEER, "taskd.testing"),
    "taskd.agent": ("taskd.manager", "taskd.torchrun", "taskd.msrun", "taskd.mindspore", *VENEER,
    "taskd.testing"),
    "taskd.worker": ("taskd.manager", "taskd.agent", "taskd.torchrun", "taskd.msrun",
    "taskd.mindspore", *VENEER, "taskd.testing"),
    "taskd.torchrun": ("taskd.manager", "taskd.msrun", "taskd.mindspore", *VENEER,
    "taskd.testing"),
    # Of torchrun's room the rules alone where the manager is, which know nothing of torch.
    "taskd.msrun": ("taskd.manager", "taskd.worker", "taskd.mindspore", *VENEER, "taskd.testing"),
    "taskd.mindspore": ("taskd.manager", "taskd.agent", "taskd.torchrun", "taskd.msrun", *VENEER,
    "taskd.testing"),
    "taskd.testing": (*SHELLS, *VENEER, "taskd.config", "taskd.log"),
    # It looks at the job of a user from outside, like a stranger.
    "taskd.chaos": (*SHELLS, *VENEER, "taskd.core", "taskd.wire", "taskd.transport",
    "taskd.checkpoint", "taskd.testing"),
    # It knows no job: of the agent it has only what Linux says of processes.
    "taskd.rerun": ("taskd.manager", "taskd.worker", "taskd.torchrun", *VENEER, "taskd.core",
    "taskd.wire", "taskd.transport", "taskd.checkpoint", "taskd.native", "taskd.testing"),
    "taskd.replay": (*SHELLS, *VENEER, "taskd.wire", "taskd.transport", "taskd.native",
    "taskd.testing"),
}  # fmt: skip
# The forkserver's child becomes a worker: it imports the runtime, lazily, in its last function.
EXCEPTIONS = {("taskd.agent", "taskd.worker"): {"taskd/agent/spawning/program.py"}}

IMPURE = {
    "time", "datetime", "os", "random", "secrets", "socket", "select", "selectors", "threading",
    "multiprocessing", "queue",
    "logging", "asyncio", "uuid", "subprocess", "signal", "pathlib", "io", "tempfile", "sys",
}  # fmt: skip
# taskd.run is torchrun itself, with the patch: it hands over to torch.distributed.run.
TORCH_ALLOWED = (
    "taskd/torchrun/", "taskd/checkpoint/", "taskd/worker/", "taskd/agent/spawning/libraries.py",
    "taskd/agent/spawning/program.py", "taskd/run.py",
)  # fmt: skip
# The command of a user, and signals to its job; the command of a user, again and again.
PROCESSES_ALLOWED = (
    "taskd/agent/", "taskd/torchrun/", "taskd/chaos/command.py", "taskd/rerun.py",
)  # fmt: skip
PROCESS_CALLS = {"fork", "forkpty", "kill", "killpg", "posix_spawn", "posix_spawnp", "system"}
# Ends itself, when its agent is gone: not a process that it started.
OWN_END = {"taskd/native/death_alarm.py"}

CLOCKS = {
    "time",
    "time_ns",
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "process_time",
    "process_time_ns",
    "thread_time",
    "thread_time_ns",
    "clock_gettime",
    "clock_gettime_ns",
}
DATE_CLOCKS = {"now", "utcnow", "today"}
# Who looks at a clock itself, and why it is not handed one. "/" at the end: a whole package.
CLOCK_ALLOWED = {
    "taskd/clock.py": "it is the clock",
    "taskd/worker/": "a training process measures itself, in several threads, with nobody above it "
    "who has a clock; no fake time can drive torch",
    "taskd/mindspore/": "as taskd/worker/",
    "taskd/native/black_box.py": "the stamps are those that libtaskd and the agent compare with "
    "theirs: CLOCK_MONOTONIC in ns, for some µs per step",
    "taskd/native/last_words.py": "waits for another process, in real time",
    "taskd/transport/monitor.py": "the wait of a real socket",
    "taskd/transport/zeromq.py": "the wait of a real socket",
    "taskd/checkpoint/finish.py": "the date of a checkpoint, for people",
    "taskd/checkpoint/saver.py": "waits for another process, in real time",
    "taskd/checkpoint/stream.py": "measures the disk, for a log line",
    "taskd/testing/explorer.py": "says what it has cost; nothing that it judges depends on that",
    "taskd/testing/histories.py": "says what it has cost, and may be given a limit; no history "
    "depends on that",
    "taskd/testing/large.py": "says what it has cost; nothing that it judges depends on that",
}
# Groups of modules that import each other, directly or not. No group may be added, and one that has
# changed or gone is changed or removed here, until nothing is left.
CIRCLES_AT_RUN_TIME: list[set[str]] = []
# ... counting what is imported under TYPE_CHECKING, too.
CIRCLES: list[set[str]] = []


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def short(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache  # asked for again by nearly each test
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def typing_only(tree: ast.Module) -> set[int]:
    """Lines under `if TYPE_CHECKING:`, which are never imported at run time."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in {
            "TYPE_CHECKING",
            "typing.TYPE_CHECKING",
        }:
            for child in node.body:
                lines.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    return lines


def imports_of(path: Path, *, at_run_time: bool = False) -> Iterator[str]:
    """Full names of all that the file imports anywhere, `from a import b` as both a and a.b."""
    tree = tree_of(path)
    skipped = typing_only(tree) if at_run_time else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and node.lineno not in skipped:
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.lineno not in skipped:
            assert node.level == 0, f"{short(path)}:{node.lineno}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def test_there_is_something_to_look_at() -> None:
    assert len(MODULES) > 20


@pytest.mark.parametrize("part", sorted(FORBIDDEN))
def test_parts_import_only_what_lies_below(part: str) -> None:
    wrong = []
    for path in MODULES:
        if not is_within(name_of(path), part):
            continue
        for imported in imports_of(path):
            for forbidden in FORBIDDEN[part]:
                allowed = short(path) in EXCEPTIONS.get((part, forbidden), set())
                if is_within(imported, forbidden) and not is_within(imported, part) and not allowed:
                    wrong.append(f"{short(path)} imports {imported}")
    assert not wrong


@pytest.mark.parametrize("part", ["taskd.core", "taskd.wire"])
def test_core_and_wire_know_no_clock_no_chance_and_no_outside(part: str) -> None:
    wrong = [
        f"{short(path)} imports {imported}"
        for path in MODULES
        if is_within(name_of(path), part)
        for imported in imports_of(path)
        if imported.split(".")[0] in IMPURE
    ]
    assert not wrong


def test_core_imports_nothing_but_the_standard_library_and_our_errors() -> None:
    allowed = sys.stdlib_module_names
    wrong = [
        f"{short(path)} imports {imported}"
        for path in MODULES
        if is_within(name_of(path), "taskd.core")
        for imported in imports_of(path)
        if imported.split(".")[0] not in allowed
        and not is_within(imported, "taskd.core")
        and not is_within(imported, "taskd.errors")
    ]
    assert not wrong


def test_three_modules_import_zmq() -> None:
    found = {
        short(path) for path in MODULES for name in imports_of(path) if name.split(".")[0] == "zmq"
    }
    assert found == {f"taskd/transport/{name}.py" for name in ("curve", "monitor", "zeromq")}


def test_torch_stays_where_it_belongs() -> None:
    found = {
        short(path)
        for path in MODULES
        for name in imports_of(path, at_run_time=True)
        if name.split(".")[0] == "torch"
    }
    assert not {path for path in found if not path.startswith(TORCH_ALLOWED)}


def test_only_the_agent_makes_and_ends_processes() -> None:
    wrong = []
    for path in MODULES:
        if short(path).startswith(PROCESSES_ALLOWED):
            continue
        if any(name.split(".")[0] == "subprocess" for name in imports_of(path)):
            wrong.append(f"{short(path)} imports subprocess")
        for node in ast.walk(tree_of(path)):
            is_call = (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "os"
            )
            if is_call and node.attr in PROCESS_CALLS and short(path) not in OWN_END:
                wrong.append(f"{short(path)}:{node.lineno} uses os.{node.attr}")
    assert not wrong


def clocks_read(tree: ast.Module) -> list[tuple[int, str]]:
    """Line and name of every look at a clock, however it was imported."""
    modules = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in {"time", "datetime"}
    }
    classes = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "datetime"
        for alias in node.names
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [
                (node.lineno, alias.name)
                for alias in node.names
                if alias.name in CLOCKS or alias.name == "*"
            ]
        if not isinstance(node, ast.Attribute):
            continue
        owner = ast.unparse(node.value)
        is_date = owner in classes or (
            owner.rpartition(".")[0] in modules and modules[owner.rpartition(".")[0]] == "datetime"
        )
        if (modules.get(owner) == "time" and node.attr in CLOCKS) or (
            is_date and node.attr in DATE_CLOCKS
        ):
            found.append((node.lineno, f"{owner}.{node.attr}"))
    return found


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("import time\ntime.monotonic()", 1),
        ("import time as t\nt.time()", 1),
        ("from time import monotonic", 1),
        ("from time import *", 1),
        ("import time\nread = time.perf_counter_ns", 1),
        ("from datetime import datetime\ndatetime.now()", 1),
        ("import datetime\ndatetime.datetime.utcnow()", 1),
        ("import datetime as d\nd.date.today()", 1),
        ("import time\ntime.sleep(1)", 0),
        ("clock.now()", 0),
        ("from datetime import datetime\ndatetime.fromisoformat(x)", 0),
    ],
)
def test_a_look_at_a_clock_is_seen_however_it_was_imported(code: str, count: int) -> None:
    assert len(clocks_read(ast.parse(code))) == count


def test_time_is_read_by_the_clock_alone() -> None:
    """Whoever decides is handed the time. Each exception has its reason, and is one."""
    looks = {short(path): clocks_read(tree_of(path)) for path in MODULES}
    used = set()
    wrong = []
    for path, found in looks.items():
        allowed = next(
            (
                entry
                for entry in CLOCK_ALLOWED
                if path == entry or (entry.endswith("/") and path.startswith(entry))
            ),
            None,
        )
        if found and allowed is not None:
            used.add(allowed)
        elif found:
            wrong += [f"{path}:{line} reads {name}" for line, name in found]
    assert not wrong
    assert used == set(CLOCK_ALLOWED), "entries that nobody needs any more"


def test_what_the_tables_name_exists() -> None:
    names = {name_of(path) for path in MODULES}
    parts = {
        *FORBIDDEN,
        *(part for forbidden in FORBIDDEN.values() for part in forbidden),
        *SHELLS,
        *VENEER,
        *(part for pair in EXCEPTIONS for part in pair),
    }
    assert not {part for part in parts if part not in names}
    files = {
        *(file for files in EXCEPTIONS.values() for file in files),
        *TORCH_ALLOWED,
        *PROCESSES_ALLOWED,
        *OWN_END,
        *CLOCK_ALLOWED,
    }
    assert not {file for file in files if not (ROOT / file).exists()}
    for (_, forbidden), excepted in EXCEPTIONS.items():
        assert not {
            file
            for file in excepted
            if not any(is_within(name, forbidden) for name in imports_of(ROOT / file))
        }
    assert not {
        file
        for file in OWN_END
        if not any(
            isinstance(node, ast.Attribute) and node.attr in PROCESS_CALLS
            for node in ast.walk(tree_of(ROOT / file))
        )
    }


Imports = dict[str, set[str]]


def imports_among_us(*, at_run_time: bool) -> Imports:
    """Of each module of the package, the modules of the package that it imports."""
    names = {name_of(path) for path in MODULES}
    return {
        name_of(path): {name for name in imports_of(path, at_run_time=at_run_time) if name in names}
        - {name_of(path)}
        for path in MODULES
    }


def circles(imported: Imports) -> list[set[str]]:
    """Groups of modules that import each other, directly or not, sorted."""

    def reached(start: str) -> frozenset[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            new = imported[todo.pop()] - seen
            seen |= new
            todo += new
        return frozenset(seen)

    reach = {name: reached(name) for name in imported}
    groups = {
        frozenset(other for other in reach[name] if name in reach[other]) for name in imported
    }
    return [set(group) for group in sorted(groups, key=sorted) if group]


def test_a_circle_is_seen_whatever_its_length() -> None:
    a_line: Imports = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert circles(a_line) == []
    assert circles(a_line | {"c": {"b"}}) == [{"b", "c"}]
    assert circles(a_line | {"c": {"a"}, "d": {"e"}, "e": {"d"}}) == [{"a", "b", "c"}, {"d", "e"}]


@pytest.mark.parametrize(
    ("at_run_time", "known"),
    [(True, CIRCLES_AT_RUN_TIME), (False, CIRCLES)],
    ids=["run time", "types"],
)
def test_modules_import_each_other_only_where_it_is_known(at_run_time, known) -> None:
    found = circles(imports_among_us(at_run_time=at_run_time))
    new = [sorted(group) for group in found if group not in known]
    gone = [sorted(group) for group in known if group not in found]
    assert not new, f"modules import each other: {new}"
    assert not gone, f"no such circle any more: take it from the list, or shorten it: {gone}"


def room_of(name: str, package: str) -> str | None:
    """The folder or the file of `package` that the module lies in, None outside of it."""
    if name == package or not is_within(name, package):
        return None
    return name.removeprefix(package + ".").partition(".")[0]


@pytest.mark.parametrize(
    "package", ["taskd", "taskd.core", "taskd.agent", "taskd.manager", "taskd.worker"]
)
def test_rooms_of_a_package_do_not_import_each_other_in_a_circle(package: str) -> None:
    rooms: Imports = {}
    for name, imported in imports_among_us(at_run_time=False).items():
        room = room_of(name, package)
        if room is not None:
            seen = {other for each in imported if (other := room_of(each, package)) is not None}
            rooms.setdefault(room, set()).update(seen - {room})
    assert len(rooms) > 3
    assert circles(rooms) == []


def long_functions(tree: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions of more lines than are allowed, from `def` to the end, docstring included."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def test_the_docstring_counts_for_the_length_of_a_function() -> None:
    lines = [
        "def function():",
        '    """First.',
        *["    More."] * (MAX_FUNCTION_LINES - 3),
        '    """',
    ]
    assert long_functions(ast.parse("\n".join(lines))) == []
    assert len(long_functions(ast.parse("\n".join([*lines, "    return 1"])))) == 1


def test_no_function_is_too_long() -> None:
    wrong = [
        f"{short(path)}:{node.lineno} {node.name}"
        for path in MODULES
        for node in long_functions(tree_of(path))
    ]
    assert not wrong


def test_no_module_is_too_long() -> None:
    lengths = {short(path): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_LINES}


def test_every_module_says_what_it_is() -> None:
    empty = [
        short(path)
        for path in MODULES
        if path.stat().st_size and not ast.get_docstring(tree_of(path))
    ]
    assert not empty


@pytest.mark.parametrize(
    "module", ["taskd", "taskd.core", "taskd.core.job.machine", "taskd.core.node", "taskd.replay"]
)
def test_importing_it_loads_neither_torch_nor_zmq(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'zmq'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "[]"
