"""Functions that are replaced by name, and what a process finds of them before it is forked."""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import distributed_c10d as c10d

from taskd.worker.process import groups as groups_module
from taskd.worker.process import replaced as replaced_module
from taskd.worker.process.groups import Groups
from taskd.worker.process.replaced import Replaced, look_ahead

if TYPE_CHECKING:
    from collections.abc import Callable


def first() -> str:
    return "first"


def second() -> str:
    return "second"


def wrapper() -> str:
    return "wrapper"


@pytest.fixture(autouse=True)
def _nothing_is_known_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaced_module, "_ahead", None)


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a module of this name, with these names in it, as an import does."""

    def make(name: str, **names: Any) -> Any:
        module = types.ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The modules whose names were all looked at."""
    seen: list[Any] = []
    original = replaced_module.namespace

    def namespace(module: Any) -> dict[str, Any]:
        seen.append(module)
        return original(module)

    monkeypatch.setattr(replaced_module, "namespace", namespace)
    return seen


def test_what_was_found_ahead_and_what_was_imported_since_is_all_that_is_touched(
    imported: Callable[..., Any], looked_at: list[Any]
) -> None:
    before = imported("imported_before", taken=first, again=first, other=second, number=1)
    look_ahead([first, second])
    assert before in looked_at
    looked_at.clear()
    since = [imported(f"imported_since_{n}", taken=first) for n in range(2)]
    replaced = Replaced()
    replaced.put({first: wrapper})
    assert sorted(module.__name__ for module in looked_at) == [m.__name__ for m in since]
    assert before.taken is before.again is wrapper
    assert (before.other, before.number) == (second, 1)
    assert all(module.taken is wrapper for module in since)
    replaced.put_back()
    assert before.taken is before.again is since[0].taken is since[1].taken is first


def test_the_second_time_all_is_looked_at_for_a_script_may_have_changed_it(
    imported: Callable[..., Any],
) -> None:
    module = imported("changed_by_the_script", taken=second)
    look_ahead([first])
    Replaced().put({first: wrapper})
    module.taken = first
    replaced = Replaced()
    replaced.put({first: wrapper})
    assert module.taken is wrapper
    replaced.put_back()


def test_a_function_that_nobody_looked_for_is_looked_for_everywhere(
    imported: Callable[..., Any],
) -> None:
    module = imported("has_another", taken=second)
    look_ahead([first])
    replaced = Replaced()
    replaced.put({second: wrapper})
    assert module.taken is wrapper
    replaced.put_back()


def test_an_import_that_was_taken_out_since_hides_nothing(
    imported: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    imported("newest_then")
    look_ahead([first])
    monkeypatch.delitem(sys.modules, "newest_then")
    module = imported("imported_later", taken=first)
    replaced = Replaced()
    replaced.put({first: wrapper})
    assert module.taken is wrapper
    replaced.put_back()


def test_all_functions_that_are_wrapped_were_looked_for(
    imported: Callable[..., Any], looked_at: list[Any]
) -> None:
    """One that is missing in the list would cost each worker the look through everything."""
    original = c10d.init_process_group
    before = imported("took_it_over", begin=original)
    groups_module.prepare_forks()
    assert before in looked_at
    looked_at.clear()
    groups = Groups(1, 0)
    groups.install(lambda call: call())
    try:
        assert before not in looked_at
        assert before.begin is c10d.init_process_group
        assert before.begin.__wrapped__ is original
    finally:
        groups.uninstall()
    assert before.begin is c10d.init_process_group is original


def test_without_torch_there_is_nothing_to_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in groups_module._WRAPPED:
        monkeypatch.delitem(sys.modules, name)
    groups_module.prepare_forks()
    assert replaced_module._ahead is not None
    assert replaced_module._ahead.places == []
