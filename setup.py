"""Build with the planner's search compiled by numba, so that the first plan need not compile it.

On another machine, or with another version of numba, the first plan compiles it. Other settings are in pyproject.toml.
"""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

COMMAND = [sys.executable, "-m", "hydragraph.planner.first_compilation"]


class Binary(Distribution):
    """Distribution whose wheels are for one kind of machine."""

    def has_ext_modules(self) -> bool:
        return True


class Compile(build_py):
    """Copy the package, and fill its folder of compiled code."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)  # else modules of an earlier build would be installed
        super().run()
        built = Path.cwd() if self.editable_mode else Path(self.build_lib).resolve()
        folder = built / "hydragraph" / "kernels" / "compiled"
        shutil.rmtree(folder, ignore_errors=True)
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
        parts = (["stages", "devices"], ["lengths"])
        compilers = [subprocess.Popen([*COMMAND, *each], cwd=built, env=environment) for each in parts]
        codes = [compiler.wait() for compiler in compilers]
        if any(codes):
            self.warn("the planner's search could not be compiled: the first plan will compile it")
        if self.editable_mode:  # pip compiles installed copies only
            compileall.compile_dir(built / "hydragraph", quiet=1)


setup(cmdclass={"build_py": Compile}, distclass=Binary)
