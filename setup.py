"""Builds csrc/ into libtaskd.so and the Cython binding to it.

Nothing else: the rest is in pyproject.toml.

Both are optional: without a C compiler the build warns once and goes on, and taskd works without
them; without Cython or Python's headers only the binding is left out, and taskd reaches the library
through ctypes. TASKD_BUILD_NATIVE=off leaves them out on purpose, TASKD_BUILD_NATIVE=required makes
a failure fatal (for continuous integration).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
MODE = os.environ.get("TASKD_BUILD_NATIVE", "auto")

LIBRARY = "taskd.python.cython_api.libs.libtaskd"
BINDING = "taskd.native._binding"

# One wheel for every Python from 3.10; a Python without the global lock has no stable interface.
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")

# What a probe must be able to do: the headers of the C library, threads, a shared object.
PROBE = (
    "#include <pthread.h>\n#include <linux/futex.h>\nint taskd_probe(void) { return "
    "(int)pthread_self(); }\n"
)


def warn(missing: str) -> None:
    """Say once what is left out and what that costs; stop the build if the caller insists."""
    text = (
        f"taskd: {missing}. Deaths will be noticed through pidfd only: slower by 0.1 s and "
        "more "
        "per GB of a worker."
    )
    if MODE == "required":
        raise SystemExit(text)
    sys.stderr.write(f"warning: {text}\n")


def compiler_works() -> bool:
    """Whether the configured C compiler makes a shared object here."""
    command = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "probe.c")
        source.write_text(PROBE)
        try:
            done = subprocess.run(
                [
                    *command,
                    "-fPIC",
                    "-shared",
                    "-pthread",
                    str(source),
                    "-o",
                    str(source.with_suffix(".so")),
                ],
                capture_output=True,
                check=False,
            )
        except OSError:
            return False
    return done.returncode == 0


def library() -> Extension:
    """libtaskd.so: plain C, no Python in it.

    An Extension only because setuptools knows where to put those.
    """
    return Extension(
        LIBRARY,
        sources=[str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("csrc/**/*.c"))],
        depends=[str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("csrc/**/*.[hmd]*"))],
        extra_compile_args=[
            "-std=c11",
            "-Wall",
            "-Wextra",
            "-Werror=implicit",
            "-fvisibility=hidden",
            "-pthread",
            "-g1",
        ],
        extra_link_args=[
            "-pthread",
            "-ldl",  # a part of the C library that was a file of its own before glibc 2.34
            "-Wl,-z,defs",
            # Debian's Python links with its like, most others do not. Without it a program that has
            # a hooked function of its own is taken for the interposer, and its calls are not seen.
            "-Wl,-Bsymbolic",
            # The name by which the binding and a preloaded copy are one library, not two.
            "-Wl,-soname,libtaskd.so",
            "-Wl,--version-script=csrc/libtaskd.map",
        ],
        optional=MODE != "required",
    )


def binding() -> list[Extension]:
    """The Cython module, or nothing if it cannot be made here: taskd then uses ctypes."""
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return []
    try:
        from Cython.Build import cythonize  # noqa: PLC0415
    except ImportError:
        return []
    extension = Extension(
        BINDING,
        sources=["taskd/native/_binding.pyx"],
        include_dirs=["csrc/include"],
        libraries=["taskd"],
        define_macros=[("Py_LIMITED_API", "0x030A0000")] if LIMITED else [],
        py_limited_api=LIMITED,
        extra_link_args=["-Wl,-rpath,$ORIGIN/../python/cython_api/libs"],
    )
    made = cythonize([extension], quiet=True)
    for extension in made:
        extension.optional = MODE != "required"  # cythonize does not keep it
    return made


def extensions() -> list[Extension]:
    """What can be built on this machine, in the order in which it must be built."""
    if MODE == "off":
        return []
    if not sys.platform.startswith("linux") or not compiler_works():
        warn("no working C compiler, libtaskd.so is left out")
        return []
    return [library(), *binding()]


class BuildNative(build_ext):
    """build_ext that knows that one of the extensions is a library which the other links with."""

    def get_ext_filename(self, fullname: str) -> str:
        """The library keeps its promised name, without Python's suffix."""
        if fullname.endswith("libtaskd"):
            return str(Path(*fullname.split(".")).with_suffix(".so"))
        return super().get_ext_filename(fullname)

    def build_extensions(self) -> None:
        """One after the other, whatever --parallel says: the second needs the first."""
        for extension in self.extensions:
            self.build_extension(extension)

    def build_extension(self, ext: Extension) -> None:
        """Build one; a failure of an optional one is one warning, not a failed installation."""
        if ext.name == BINDING:
            built = Path(self.get_ext_fullpath(LIBRARY))
            if not built.exists():
                return  # it was left out, which has been said
            ext.library_dirs = [str(built.parent)]
        try:
            super().build_extension(ext)
        # Whatever the compiler's wrapper raises: the library is optional, the installation is not.
        except Exception as error:
            if not ext.optional:
                raise
            warn(f"{ext.name} could not be built ({error}), it is left out")


setup(
    license="Apache-2.0",
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if LIMITED else {},
)
