"""How libtaskd's hooks find the function that they stand in front of."""

from __future__ import annotations

import pytest

from taskd.native import library
from taskd.native._ctypes_binding import LIBRARY_PATH
from taskd.native.collectives import Collectives
from tests.native.stand_ins import (
    COMMON,
    build,
    build_stand_in,
    compile_c,
    record,
    run,
    shared,
    stand_in_source,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library.load() is None, reason="libtaskd is not built here"),
]


@pytest.mark.parametrize(
    ("family", "call", "answer"),
    [
        ("nccl", "ncclAllReduce(0, 0, 1, 0, 0, 0, 0)", 2),
        ("hccl", "HcclAllReduce(0, 0, 1, 0, 0, 0, 0)", 4),
    ],
)
def test_a_missing_original_fails_like_the_library_and_is_said_once(
    tmp_path, box, family, call, answer
):
    source = (
        COMMON
        + f"""
    int main(void) {{
        errno = 42;
        for (int i = 0; i < 3; i++) if ({call} != {answer} || errno != 42) return 1;
        return 0; }}"""
    )
    stand_in = build_stand_in(tmp_path, family)
    program = compile_c(source, tmp_path / "program", str(stand_in), "-Wl,-z,lazy")
    # an older version of the library
    build_stand_in(tmp_path, family, without=(call.split("(")[0],))
    done = run(program)
    assert done.stderr.count("\n") == 1
    assert call.split("(")[0] in done.stderr


def test_two_plugins_with_a_library_each_get_their_own(tmp_path, box):
    """As without us: the function of the library that the caller is linked with."""
    main = COMMON + (
        "int taskd_collectives_start(int) __attribute__((weak));\nint main(int n, "
        "char "
        "**w) { if (n > 1) taskd_collectives_start(atoi(w[1]));\n"
    )
    for letter in "ab":
        shared(
            stand_in_source("nccl").replace("return seen.result", f"return {ord(letter)}"),
            tmp_path / f"lib{letter}.so",
        )
        shared(
            f"int {letter}(void) {{ return ncclGroupEnd(); }}",
            tmp_path / f"plugin_{letter}.so",
            f"./lib{letter}.so",
            "-Wl,-rpath,$ORIGIN",
        )
        main += (
            f'    int (*{letter})(void) = dlsym(dlopen("./plugin_{letter}.so", RTLD_NOW | '
            f'RTLD_LOCAL), "{letter}");\n'
        )
    main += '    for (int i = 0; i < 2; i++) printf("%c%c\\n", a(), b());\n'
    # Looked up: the first gets an interposer, the second goes unrecorded, but each calls its own.
    for letter in "ab":
        main += (
            f'    int (*look_{letter})(void) = dlsym(dlopen("./lib{letter}.so", RTLD_NOW), '
            '"ncclGroupEnd");\n'
        )
    main += '    printf("%c%c\\n", look_a(), look_b()); return 0; }'
    program = compile_c(main, tmp_path / "program", "-ldl")
    assert run(program, preload="").stdout == "ab\n" * 3
    assert run(program).stdout == "ab\n" * 3
    assert run(program, str(box.fd), fds=(box.fd,)).stdout == "ab\n" * 3
    assert len(Collectives(box).calls()) == 5


def test_a_library_that_comes_later_is_found(tmp_path):
    stand_in = build_stand_in(tmp_path, "nccl")
    stub = shared("int ncclGroupEnd(void) { return 0; }", tmp_path / "libstub.so")
    source = (
        COMMON
        + """
    int main(void)
    {
        if (ncclGroupEnd() != 2) return 1;
        if (!dlopen("./libnccl.so.2", RTLD_NOW | RTLD_LOCAL)) return 2;
        return ncclGroupEnd() == 0 ? 0 : 3;
    }"""
    )
    program = compile_c(
        source, tmp_path / "program", "-Wl,--no-as-needed", str(stub), "-Wl,-z,lazy", "-ldl"
    )
    shared("", tmp_path / "libstub.so")
    assert stand_in.exists()
    run(program)


def test_a_library_that_is_closed_and_opened_again_still_works(tmp_path, box):
    body = """{
        for (int i = 0; i < 3; i++) { CALL(ncclGroupEnd)(); if (library) { dlclose(library); OPEN;
            } }
    }"""
    assert len(record(box, build(tmp_path, "nccl", "looked_up", body)).calls()) == 3


@pytest.mark.parametrize("first", [True, False])
def test_another_interposer_may_come_before_or_behind(tmp_path, box, first):
    """Each calls the next with RTLD_NEXT, and all are called once."""
    other = shared(
        COMMON
        + """
    int ncclGroupEnd(void) { static int calls; printf("other %d\\n", ++calls); fflush(stdout);
        return ((int (*)(void))dlsym(RTLD_NEXT, "ncclGroupEnd"))(); }
    """,
        tmp_path / "libother.so",
    )
    program = build(
        tmp_path, "nccl", "linked", 'check(CALL(ncclGroupEnd)() == 0 && seen->calls == 1, "once");'
    )
    order = [str(other), str(LIBRARY_PATH)]
    done = run(
        program, str(box.fd), fds=(box.fd,), preload=":".join(order if first else order[::-1])
    )
    assert done.stdout == "other 1\ndone\n"
    assert [call.name for call in Collectives(box).calls()] == ["ncclGroupEnd"]
