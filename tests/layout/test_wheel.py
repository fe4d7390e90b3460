"""Tests what a user installs: the wheel has every module and file of the packages, both compiled kernels and both
commands."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from noise.polynomial import kernels as polynomial_kernels
from tests.support.repository import ROOT
from wire.ring import kernels as ring_kernels

PACKAGES = ("runtime", "wire", "noise", "tenant_sdk", "provider", "attacks")
BESIDE = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
NOT_PACKED = shutil.ignore_patterns("__pycache__", "*.so")

COMPILER = '''
"""Stands in for Zig's wheel where it is not installed: hands over what the setup made of the same sources."""
import pathlib, shutil, sys

source = next(argument for argument in sys.argv if argument.endswith(".c"))
shutil.copy(pathlib.Path({root!r}, source).with_name("_kernels.so"), sys.argv[sys.argv.index("-o") + 1])
'''
"""The source of a stand-in for `python -m ziglang`, which setup.py calls. A test may not download a compiler. The rest
of the build is the real one."""

IMPORT_ALL = """
import importlib, json, pkgutil
from noise.polynomial import kernels as polynomial
from wire.ring import kernels as ring

files = {}
for package in %r:
    top = importlib.import_module(package)
    names = [one.name for one in pkgutil.walk_packages(top.__path__, package + ".")]
    for name in [package, *(name for name in names if not name.endswith("._kernels"))]:  # libraries, not modules
        files[name] = importlib.import_module(name).__file__
print(json.dumps({"files": files, "kernels": [ring.available(), polynomial.available()]}))
"""


def run(*command: str | Path, cwd: Path, path: Path) -> str:
    """Returns what a command prints. Python gets `path` as the only folder besides those of the environment."""
    environment = os.environ | {"PYTHONPATH": str(path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def files_of(folder: Path) -> set[str]:
    """Returns the files of the packages in a folder, except compiled ones and the pages for readers of the source."""
    return {
        str(file.relative_to(folder))
        for package in PACKAGES
        for file in (folder / package).glob("**/*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".so" and file.name != "README.md"
    }


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides the folder into which a wheel was installed. The wheel was built from a copy of the tree, without a
    network."""
    folder = tmp_path_factory.mktemp("wheel")
    source, compiler, target = folder / "source", folder / "compiler", folder / "installed"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=NOT_PACKED)
    for name in BESIDE:
        shutil.copy(ROOT / name, source)
    compiler.mkdir()
    if importlib.util.find_spec("ziglang") is None:
        (compiler / "ziglang").mkdir()
        (compiler / "ziglang" / "__main__.py").write_text(COMPILER.format(root=str(ROOT)))
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")
    offline = ("--no-deps", "--no-index")
    run(*pip, "wheel", *offline, "--no-build-isolation", "-w", folder, source, cwd=folder, path=compiler)
    (wheel,) = folder.glob("*.whl")
    run(*pip, "install", *offline, "--target", target, wheel, cwd=folder, path=compiler)
    return target


@pytest.mark.slow
def test_a_wheel_holds_every_file(installed: Path) -> None:
    assert files_of(installed) == files_of(ROOT)


@pytest.mark.slow
def test_every_module_is_imported_from_it_and_both_kernels_load(installed: Path, tmp_path: Path) -> None:
    found = json.loads(
        run(sys.executable, "-c", IMPORT_ALL % (PACKAGES,), cwd=tmp_path, path=installed).splitlines()[-1]
    )
    assert {str(Path(file).relative_to(installed)) for file in found["files"].values()} == {
        name for name in files_of(ROOT) if name.endswith(".py")
    }
    assert found["kernels"] == [ring_kernels.available(), polynomial_kernels.available()]


@pytest.mark.slow
@pytest.mark.parametrize(("command", "shown"), [("provider", "serve"), ("tenant", "finetune")])
def test_both_commands_run(installed: Path, tmp_path: Path, command: str, shown: str) -> None:
    assert shown in run(installed / "bin" / command, "--help", cwd=tmp_path, path=installed)
