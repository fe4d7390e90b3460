"""Packs what a bare GPU machine lacks, so that `benchmarks.accelerator` and the GPU tests run there without a network.

`python -m benchmarks.carry FOLDER [--python 3.12] [--has FILE]` downloads the wheels of this project's dependencies, in
the versions that are installed here, for the machine's Python, and adds the compiled C kernels of this checkout. torch,
Triton and numpy are the machine's own. FILE is the output of `pip list --format=freeze` on the machine; what it lists
in a version that fits is left out. On the machine, from the root of a checkout beside FOLDER:

    bash FOLDER/run.sh              # the benchmark
    bash FOLDER/run.sh tests        # the tests that are marked gpu
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
MACHINES_OWN = frozenset({"torch", "triton", "numpy"})
"""The packages that a GPU machine has, built for its GPU."""
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "trustme")
PLATFORMS = (*(f"manylinux_2_{number}" for number in range(39, 4, -1)), "manylinux2014", "manylinux1")
"""The kinds of wheels that are accepted. pip takes the number literally, so each one is named."""
RUN = """#!/bin/bash
# Installs the wheels beside this file into a folder of its own, and runs the benchmark, or with `tests` the GPU tests.
# Results go to the folder $OUT, or to ./accelerator.
set -e
here=$(cd "$(dirname "$0")" && pwd)
site=$(mktemp -d)
out=${OUT:-$PWD/accelerator}
mkdir -p "$out"
trap 'rm -rf "$site"' EXIT
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$here"/wheels/*.whl
cp -r "$here"/compiled/. .
export PYTHONPATH="$site:$PWD" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
echo "installed after $SECONDS s"
if [ "$1" = tests ]; then
    shift
    timeout "${LIMIT_S:-120}" python3 -m pytest -q -n 4 -m gpu -p no:cacheprovider --junitxml="$out/tests.xml" "$@" \\
        tests/wire/ring tests/provider/device tests/noise tests/tenant_sdk/test_cuda.py tests/wire/gpu_window \\
        tests/wire/test_ring_scale.py tests/rpc/test_gpu_window.py tests/tenant_sdk/serving/test_engine_device.py
else
    python3 -m benchmarks.accelerator --out "$out" "$@"
fi
"""


def needed(has: Mapping[str, str], roots: Collection[str] = ("veilbase", *TEST_TOOLS)) -> dict[str, str]:
    """Returns the packages to carry, by name, with the versions that are installed here: everything that the roots
    need, directly or not, and that the machine lacks.

    Args:
        has: the packages that the machine has, by name, with their versions.
        roots: the names of the distributions whose needs are collected. The first one itself, this project, is not
            carried, since its checkout travels.
    """
    found: dict[str, str] = {}
    waiting = [Requirement(name) for name in roots]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in found or name in MACHINES_OWN or (wanted.marker is not None and not wanted.marker.evaluate()):
            continue
        if name in has and wanted.specifier.contains(has[name], prereleases=True):
            continue
        found[name] = metadata.version(name)
        waiting += [Requirement(one) for one in metadata.requires(name) or () if "extra ==" not in one]
    found.pop("veilbase", None)
    return found


def read_freeze(text: str) -> dict[str, str]:
    """Returns the versions in the output of `pip list --format=freeze`, by package name; other lines are ignored."""
    pairs = (line.split("==") for line in text.splitlines() if line.count("==") == 1)
    return {canonicalize_name(name): version.strip() for name, version in pairs}


def download(folder: Path, packages: Mapping[str, str], python: str) -> None:
    """Downloads the packages' wheels for Linux on x86-64 into `folder`. Raises CalledProcessError if pip fails, for
    example because there is no such wheel."""
    platforms = [word for one in PLATFORMS for word in ("--platform", f"{one}_x86_64")]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
         "--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms, "--dest", folder,
         *(f"{name}=={version}" for name, version in sorted(packages.items()))],
        check=True,
    )  # fmt: skip


def pack(folder: Path, python: str, has: Mapping[str, str]) -> int:
    """Fills `folder` with wheels, compiled kernels and run.sh; returns the total size of its files in bytes."""
    download(folder / "wheels", needed(has), python)
    for library in ROOT.glob("*/**/_kernels*.so"):
        to = folder / "compiled" / library.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(library, to)
    (folder / "compiled").mkdir(exist_ok=True)
    (folder / "run.sh").write_text(RUN)
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def main() -> None:
    """Packs the folder, and prints its size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.carry")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the machine's Python")
    parser.add_argument("--has", type=Path, help="`pip list --format=freeze` of the machine")
    given = parser.parse_args()
    has = read_freeze(given.has.read_text()) if given.has else {}
    size = pack(given.folder, given.python, has)
    print(f"{given.folder}: {size / 1e6:.0f} MB; there: bash {given.folder}/run.sh")


if __name__ == "__main__":
    main()
