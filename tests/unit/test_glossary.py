"""The glossary explains the words that the code is made of.

Each word in the name of a module of the package, of an event or command, and of a class of core is
a term of docs/glossary.md (or a form of one), or in `PLAIN` below: a word that means here what it
means to any engineer of this field. A new word of ours belongs into the glossary, not into the
list.
"""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "taskd"
PAGE = ROOT / "docs" / "glossary.md"
# Parts whose names are promised to users (docs/compat.md) or are Python's own.
_ELSEWHERE = ("taskd/api/", "taskd/python/")
_PLAIN = """
    abort accounting activity address anew back base began binding bucket call callback
    canonical channel child choice chunk client clock closure codec collective command
    communication config connection content context copier copy copying core course ctypes
    data dcp detector diagram dismiss domain drop elastic encoder end ending error event examination
    exception exchange executor exit explorer fail failed fall file finish first flat folder give
    guarded hang heard held histories history hold hook host import inbox index interpreter
    invariant join kernel keep kept key kill kind know known last launcher layout leave leaving left
    libraries library link liveness load log loop loss lost machine main may memory message
    metadata name native network no object open order outbox outer owner pair part patch path
    pause payload periodic permission piece policy position proceed profile profiler profiling
    program progress protocol raise random rang ready receive recover reduced refuse
    register repeat replace replay report request return returned rollback rule run runtime
    save saver scaler schema script send server service set setting shell signal signature
    simulation slurm small source spawn spawner speaker start stop stopped store stream switch
    table target tell test text timed torchrun trace train transition translate transport
    uncaught unpickling upstream user value vitals wait warmth watch wire won world zeromq
"""
PLAIN = frozenset(_PLAIN.split())
_ENDINGS = ("", "s", "es", "d", "ed", "ped", "ing", "ning", "r", "er", "al", "ation")


def terms_of(page: str) -> set[str]:
    """Words of the first column, and those in code spans behind it."""
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ")][1:]
    codes = " ".join(span for row in rows for span in re.findall(r"`([^`]+)`", row[1]))
    return set(re.findall(r"[a-z]+", f"{' '.join(row[0] for row in rows)} {codes}".lower()))


def is_known(word: str, terms: frozenset[str] | set[str]) -> bool:
    """Whether a word is one of these, or a form of one: offers, mirrored, publishing, staging."""
    stems = {word.removesuffix(ending) for ending in _ENDINGS}
    stems |= {word.removesuffix(ending) + "e" for ending in ("ing", "ed", "ation")}
    return bool(stems & terms)


def words_of(name: str) -> list[str]:
    """`profile_calls` and `WorkerMayAdvance`, word by word."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)]


def modules() -> list[pathlib.Path]:
    found = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    found += [path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]
    return sorted(
        path for path in found if not path.relative_to(ROOT).as_posix().startswith(_ELSEWHERE)
        and path.name not in {"api", "python"}
    )  # fmt: skip


def names() -> dict[str, str]:
    """What is to be explained, and where it stands."""
    found = {path.stem: path.relative_to(ROOT).as_posix() for path in modules()}
    for path in sorted((PACKAGE / "core").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name] = f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
    return found


def test_every_word_that_names_something_is_a_plain_one_or_in_the_glossary() -> None:
    terms = terms_of(PAGE.read_text(encoding="utf-8"))
    unknown = {
        f"{word} ({name}, {where})"
        for name, where in names().items()
        for word in words_of(name)
        if not is_known(word, terms) and not is_known(word, PLAIN)
    }
    assert not unknown, "explain them in docs/glossary.md, or take another name"


def test_a_word_is_plain_or_a_term_and_not_both() -> None:
    firsts = {
        first.strip().lower()
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
        for first in line.split("|")[1].split(",")
    }
    assert not firsts & PLAIN


def test_what_is_looked_at() -> None:
    found = names()
    for name in ("torchrun", "WorkerMayAdvance", "ReplaceWorker", "RecoveryMachine"):
        assert name in found
    assert len(found) > 200


@pytest.mark.parametrize(("word", "is_one"), [
    ("mirror", True), ("mirrors", True), ("mirroring", True), ("publisher", True),
    ("staging", True),     ("orphan", False), ("boundary", False),
])  # fmt: skip
def test_forms_of_a_word_are_that_word(word: str, is_one: bool) -> None:
    assert is_known(word, {"mirror", "publish", "stage"}) is is_one
