"""Import-linter's contracts name folders of attacks: none of them may be forgotten, and a breach must be seen."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import grimp
import pytest

import attacks

ROOT = Path(attacks.__file__).parent.parent
HOLD_NO_TRUTH = {"seen", "adversaries"}
"""The folders of attacks that an adversary may import."""


def contracts() -> list[dict[str, Any]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return found


def test_the_contract_of_adversaries_names_every_other_folder() -> None:
    """A module beside the folders is one of `python -m`: the contract forbids it through what it imports."""
    (contract,) = [one for one in contracts() if one.get("source_modules") == ["attacks.adversaries"]]
    named = {name.removeprefix("attacks.") for name in contract["forbidden_modules"] if name.startswith("attacks.")}
    folders = {file.parent.name for file in (ROOT / "attacks").rglob("*.py")} - {"attacks"}
    assert named == folders - HOLD_NO_TRUTH
    assert all((ROOT / "attacks" / folder / "__init__.py").is_file() for folder in folders)
    assert {"noise", "tenant_sdk", "provider"} <= set(contract["forbidden_modules"])
    assert not contract.get("allow_indirect_imports")
    graph = grimp.build_graph("attacks", cache_dir=None)
    modules = {file.stem for file in (ROOT / "attacks").glob("*.py")} - {"__init__"}
    assert modules
    for module in modules:
        reached = {name.split(".")[1] for name in graph.find_upstream_modules(f"attacks.{module}") if "." in name}
        assert reached & named, f"the contract would let an adversary import attacks.{module}"


def test_adversaries_import_wire_and_parameters_only() -> None:
    """The same, read from the files themselves, lazy imports too."""
    files = list((ROOT / "attacks" / "adversaries").rglob("*.py"))
    assert files
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                top, _, rest = name.partition(".")
                assert top not in ("tenant_sdk", "provider", "tests", "benchmarks"), file.name
                assert top != "noise" or rest == "params", file.name
                assert top != "attacks" or rest.partition(".")[0] in HOLD_NO_TRUTH, file.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("attacks/adversaries/averaging.py", "from attacks.truth.secrets import Truth"),
        ("attacks/adversaries/averaging.py", "from attacks.game import main"),
        ("attacks/adversaries/averaging.py", "from noise.params import PARAMETERS"),
        ("attacks/report/table.py", "from provider.model.served_model import ProviderCore"),
        ("attacks/victim/checkpoint.py", "from provider.model.served_model import ProviderCore"),
        ("attacks/truth/judge.py", "from tenant_sdk import TenantClient"),
        ("attacks/seen/view.py", "from noise.sampling import error"),
        ("attacks/report/plots.py", "from attacks.truth.secrets import Truth"),
    ],
)
def test_a_breach_is_seen(module: str, line: str, tmp_path: Path) -> None:
    for name in ("wire", "noise", "tenant_sdk", "provider", "attacks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a") as file:
        file.write(f"\n{line}\n")
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    options: dict[str, Any] = {"cwd": tmp_path, "env": {"PYTHONPATH": str(tmp_path)}, "capture_output": True}
    done = subprocess.run(command, text=True, timeout=300, check=False, **options)
    assert done.returncode == 1
    assert f"{module.removesuffix('.py').replace('/', '.')} -> {line.split()[1]}" in done.stdout, done.stdout
