"""Import-linter's contracts name modules one by one: none of attacks may be forgotten, and a breach must be seen."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import attacks

ROOT = Path(attacks.__file__).parent.parent
HOLD_NO_TRUTH = {"adversary", "passes", "public_model", "view", "adversaries"}


def contracts() -> list[dict[str, Any]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return found


def test_the_contract_of_adversaries_names_every_other_module() -> None:
    (contract,) = [one for one in contracts() if one.get("source_modules") == ["attacks.adversaries"]]
    named = {name.removeprefix("attacks.") for name in contract["forbidden_modules"] if name.startswith("attacks.")}
    there = {file.stem for file in (ROOT / "attacks").glob("*.py")} | {
        folder.parent.name for folder in (ROOT / "attacks").glob("*/__init__.py")
    }
    assert named == there - HOLD_NO_TRUTH - {"__init__"}
    assert {"noise", "tenant_sdk", "provider"} <= set(contract["forbidden_modules"])


def test_adversaries_import_wire_and_parameters_only() -> None:
    """The same, read from the files themselves, lazy imports too."""
    for file in (ROOT / "attacks" / "adversaries").glob("*.py"):
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
        ("attacks/adversaries/averaging.py", "from attacks.truth import Truth"),
        ("attacks/adversaries/averaging.py", "from noise.params import PARAMETERS"),
        ("attacks/report/table.py", "from provider.core import ProviderCore"),
        ("attacks/victim/checkpoint.py", "from provider.core import ProviderCore"),
        ("attacks/truth/judge.py", "from tenant_sdk import TenantClient"),
        ("attacks/seen/view.py", "from noise.sampling import error"),
        ("attacks/report/plots.py", "from attacks.truth import Truth"),
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
