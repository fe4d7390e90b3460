"""Builds the compiled kernels of wire/ring, noise/polynomial and tenant_sdk/serving/attention; everything else is in
pyproject.toml.

The compiler is Zig's clang, from its own wheel, so that a machine needs neither a compiler nor Python's headers, and
every machine gets the same code: gcc 12 spills the sums of the inner loop and takes 1.6 times as long. A build
that fails ends the installation. On another processor or system nothing is built, and the package works without
compiled kernels, only slower (see wire/ring/kernels.py).
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FLAGS = ["-O3", "-s", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
TARGET = ["-target", "x86_64-linux-gnu.2.17", "-mcpu=x86_64"]
"""The target is any x86-64 processor. A function that needs AVX2 or more is marked so in the source, and is called only
on a processor that has it."""


class BuildKernels(build_ext):
    """Builds each extension as a plain shared library, which is loaded with ctypes. So the build needs no Python.h, and
    the same file works with every version of Python."""

    def get_ext_filename(self, fullname: str) -> str:
        """Returns the library's path, such as wire/ring/_kernels.so, without Python's version in the name."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extensions(self) -> None:
        """Compiles all libraries. The compiler's caches are in a temporary folder, which is deleted at the end. All
        libraries share it, because with an empty cache the compiler first builds its own parts, which takes longer than
        a library."""
        with tempfile.TemporaryDirectory() as self.scratch:
            super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """Compiles the library, and puts it at its path.

        Raises:
            CalledProcessError: the compiler failed; its messages are on stderr.
        """
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        built = Path(self.scratch) / f"{ext.name}.so"
        caches = {"ZIG_GLOBAL_CACHE_DIR": self.scratch, "ZIG_LOCAL_CACHE_DIR": self.scratch}
        command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, *TARGET, *ext.sources, "-o", str(built)]
        subprocess.run(command, check=True, env=os.environ | caches)
        # another name first: a process that has the old library open must keep it whole
        staged = target.with_suffix(".new")
        staged.write_bytes(built.read_bytes())
        staged.chmod(0o755)
        staged.replace(target)


LIBRARIES = {
    "wire.ring._kernels": [
        "wire/ring/kernels.c",
        "wire/ring/kernels_few.c",
        "wire/ring/kernels_few_vnni.c",
        "wire/ring/kernels_vnni.c",
        "wire/ring/kernels_rows.c",
    ],
    "noise.polynomial._kernels": [  # the provider has no use for it
        "noise/polynomial/kernels.c",
        "noise/polynomial/kernels_avx512.c",
    ],
    "tenant_sdk.serving.attention._kernels": ["tenant_sdk/serving/attention/kernels.c"],
}
HAS_KERNELS = sys.platform == "linux" and platform.machine() == "x86_64"
setup(
    ext_modules=[Extension(name, sources) for name, sources in LIBRARIES.items()] if HAS_KERNELS else [],
    cmdclass={"build_ext": BuildKernels},
)
