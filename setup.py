"""Packages live under two roots (`dilocox/`, `kernels/`), `conf/` travels inside `dilocox`, and C++ is compiled.

The library of the CPU back end is plain C++ behind a C interface: one build serves every Python and every torch, so the
wheel is tagged py3-none. It is compiled once for each level of instructions and picks one when it is loaded.
"""

import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

DATA = {"dilocox.conf": ["**/*.yaml"], "dilocox_kernels.cpu.csrc": ["*"]}
SOURCES = Path("kernels/dilocox_kernels/cpu/csrc")
FLAGS = [
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-exceptions"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),  # IEEE arithmetic, one rounding an operation
]
LEVELS = {
    "x86_64": {
        "x86_64_v4": ["-march=x86-64-v4", "-mprefer-vector-width=512", "-mprfchw"],
        "x86_64_v3": ["-march=x86-64-v3", "-mprfchw"],
        "x86_64": ["-march=x86-64"],
    },
    "aarch64": {"aarch64": []},
}
"""Flags of the levels that csrc/library.cpp chooses from, by machine."""


class CompileLibrary(build_ext):
    """Compiles csrc/kernels.cpp once a level, and links one library, whose name knows nothing of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        return f"{fullname.replace('.', '/')}.so"

    def build_extension(self, ext: Extension) -> None:
        compiler, levels = find_compiler(), find_levels()
        objects = Path(self.build_temp)
        objects.mkdir(parents=True, exist_ok=True)
        jobs = [[SOURCES / "library.cpp", "-o", objects / "library.o"]]
        for level, flags in levels.items():
            table = f"-DKERNELS_OF_LEVEL=kernels_{level}"
            jobs.append([*flags, table, SOURCES / "kernels.cpp", "-o", objects / f"{level}.o"])
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda job: run(*compiler, *FLAGS, "-c", *job), jobs))
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        beside = target.with_name(f"{target.name}.{os.getpid()}")  # a process that has the old library open keeps it
        run(*compiler, "-shared", "-fopenmp", "-s", "-Wl,--as-needed", *(job[-1] for job in jobs), "-o", beside)
        beside.replace(target)


class AnyPython(bdist_wheel):
    """Tags the wheel for every Python 3 on this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def find_compiler() -> list[str]:
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(compiler[0]) is None:
        raise SystemExit(
            f"dilocox: the C++ compiler {compiler[0]!r}, which the CPU kernels are built with, was not found; "
            "install g++ 11 or newer (Debian, Ubuntu: apt-get install g++), or name one: CXX=PATH"
        )
    return compiler


def find_levels() -> dict[str, list[str]]:
    machine = platform.machine()
    if machine not in LEVELS:
        raise SystemExit(f"dilocox: the CPU kernels are written for {' and '.join(LEVELS)}, not for {machine}")
    return LEVELS[machine]


def run(*command: str | Path) -> None:
    done = subprocess.run([str(part) for part in command])
    if done.returncode:
        raise SystemExit(
            f"dilocox: compiling the CPU kernels failed, see above; they need g++ 11 or newer, and {command[0]!r} "
            "was used (name another: CXX=PATH)"
        )


setup(
    packages=[*find_packages(include=["dilocox", "dilocox.*"]), *find_packages("kernels"), *DATA],
    package_data=DATA,
    ext_modules=[
        Extension(
            "dilocox_kernels.cpu.libdilocox_kernels",
            sources=[str(path) for path in sorted(SOURCES.glob("*.cpp"))],
            depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
        )
    ],
    cmdclass={"build_ext": CompileLibrary, "bdist_wheel": AnyPython},
)
