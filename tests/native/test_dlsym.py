"""dlsym with libtaskd preloaded: hooked names are ours, every other look-up is the real one."""

from __future__ import annotations

import platform
import subprocess

import pytest

from taskd.native import library
from taskd.native._ctypes_binding import LIBRARY_PATH
from taskd.native.collectives import Collectives
from tests.native.stand_ins import (
    COMMON,
    build,
    compile_c,
    run,
    shared,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(library.load() is None, reason="libtaskd is not built here"),
]


DLSYM = (
    COMMON
    + """
/* Which of several definitions RTLD_NEXT and RTLD_DEFAULT mean depends on who asks. */
int who(void) { return %(me)d; }
int ask_next_%(me)d(void) { int (*next)(void) = dlsym(RTLD_NEXT, "who"); return next ? next() : -1;
    }
int ask_default_%(me)d(void) { int (*found)(void) = dlsym(RTLD_DEFAULT, "who");
    return found ? found() : -1; }
"""
)
DLSYM_MAIN = (
    COMMON
    + """
int ask_next_1(void); int ask_default_1(void); int ask_next_2(void); int ask_default_2(void);
int main(void)
{
    void *local = dlopen("./lib3.so", RTLD_NOW | RTLD_LOCAL);
    int (*next)(void) = dlsym(local, "ask_next_3"), (*found)(void) = dlsym(local, "ask_default_3");
    printf("%d %d %d %d %d %d\\n", ask_next_1(), ask_default_1(), ask_next_2(), ask_default_2(),
        next(), found());
    printf("%d", dlsym(local, "nothing") == NULL); puts(dlerror());
    printf("%d", dlsym(RTLD_DEFAULT, "nothing") == NULL); puts(dlerror());
    printf("%d", dlsym(RTLD_NEXT, "ncclNothing") == NULL); puts(dlerror());
    printf("%d\\n", dlsym(local, "who") == dlsym(dlopen("./lib3.so", RTLD_NOW), "who"));
    printf("%d\\n", dlsym(NULL, "who") != NULL && dlerror() == NULL);
    printf("%d\\n", dlsym(RTLD_DEFAULT, "ncclAllReduce") == NULL && dlsym(RTLD_NEXT,
        "ncclAllReduce") == NULL);
    printf("%d\\n", dlsym(dlopen(NULL, RTLD_NOW), "ncclAllReduce") == NULL && strstr(dlerror(),
        "ncclAllReduce") != NULL);
}
"""
)


def test_every_other_look_up_is_the_real_one(tmp_path):
    libraries = [shared(DLSYM % {"me": me}, tmp_path / f"lib{me}.so") for me in (1, 2, 3)]
    program = compile_c(
        DLSYM_MAIN,
        tmp_path / "program",
        str(libraries[0]),
        str(libraries[1]),
        "-Wl,-rpath,$ORIGIN",
        "-ldl",
    )
    without = run(program, preload="").stdout
    assert without.startswith("2 1 -1 1 -1 1\n"), without
    assert without.endswith("1\n" * 4), without
    assert run(program).stdout == without


def test_a_preloaded_wrapper_finds_the_next_one(tmp_path):
    """What allocators and tracers do.

    Dlsym(RTLD_NEXT) in a constructor, and in a function of the C library's name.
    """
    wrapper = shared(
        COMMON
        + """
    static pid_t (*real)(void);
    __attribute__((constructor)) static void find(void) { real = dlsym(RTLD_NEXT, "getppid"); }
    pid_t getppid(void) { return real() == ((pid_t (*)(void))dlsym(RTLD_NEXT,
        "getppid"))() ? 4242 : 0; }
    """,
        tmp_path / "libwrapper.so",
    )
    program = compile_c(
        COMMON + 'int main(void) { printf("%d\\n", getppid()); }', tmp_path / "program"
    )
    for order in ([str(wrapper), str(LIBRARY_PATH)], [str(LIBRARY_PATH), str(wrapper)]):
        assert run(program, preload=":".join(order)).stdout == "4242\n"


@pytest.mark.parametrize("first", [True, False])
def test_another_dlsym_is_asked_too(tmp_path, box, first):
    """Tools that hand out their own functions, as those that share a GPU do.

    In front of us, or behind.
    """
    other = shared(
        COMMON
        + """
    static int answer = 4242;
    void *dlsym(void *handle, const char *name)
    {
        static void *(*real)(void *, const char *);
        if (real == NULL) real = dlvsym(RTLD_DEFAULT, "dlsym",
            sizeof(long) && X86 ? "GLIBC_2.2.5" : "GLIBC_2.17");
        return strcmp(name, "answer_of_the_tool") == 0 ? &answer : real(handle, name);
    }
    """.replace("X86", str(int(platform.machine() == "x86_64"))),
        tmp_path / "libother.so",
    )
    body = """{
        int *answer = dlsym(RTLD_DEFAULT, "answer_of_the_tool");
        check(answer != NULL && *answer == 4242, "asked");
        check(CALL(ncclGroupEnd)() == 0, "called");
    }"""
    order = [str(other), str(LIBRARY_PATH)]
    program = build(tmp_path, "nccl", "looked_up", body)
    run(program, str(box.fd), fds=(box.fd,), preload=":".join(order if first else order[::-1]))
    if not first:  # one in front of us answers for itself
        assert [call.name for call in Collectives(box).calls()] == ["ncclGroupEnd"]


def test_no_error_is_left_behind_by_a_look_up_that_found_something(tmp_path):
    """Programs ask dlerror() whether it did.

    Here the function is the program's own, which no dlopen() finds by its name.
    """
    source = (
        COMMON
        + """
    int ncclGroupEnd(void) { return 4242; }
    int main(void)
    {
        dlerror();
        int (*found)(void) = dlsym(dlopen(NULL, RTLD_NOW), "ncclGroupEnd");
        const char *error = dlerror();
        if (error != NULL) puts(error);
        return found != NULL && error == NULL && found() == 4242 ? 0 : 1;
    }"""
    )
    program = compile_c(source, tmp_path / "program", "-rdynamic", "-ldl")
    run(program, preload="")
    done = subprocess.run(
        ["program"],
        executable=program,
        env={"LD_PRELOAD": str(LIBRARY_PATH)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_exceptions_pass_through_a_look_up_in_a_constructor_under_a_debugger_or_not(tmp_path):
    """The stack can be unwound inside our dlsym: a constructor of an allocator may ask there."""
    source = (
        COMMON
        + """
    #include <execinfo.h>
    static int depth;
    int main(void) { void *frames[8]; void *found = dlsym(RTLD_DEFAULT, "backtrace");
        return found && backtrace(frames, 8) > 1 ? 0 : 1; }
    """
    )
    run(compile_c(source, tmp_path / "program", "-ldl"))
