"""Tests the import contracts between folders: a planted import breaks each contract, and no folder of attacks is
forgotten. Also tests that examples and docs need only what packages export."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import grimp
import pytest

from tests.support.doc_blocks import blocks, pages
from tests.support.repository import ROOT

PACKAGES = ("runtime", "wire", "noise", "tenant_sdk", "provider", "attacks")
HOLD_NO_TRUTH = {"seen", "adversaries"}
"""The folders of attacks that an adversary may import."""

PLANTED = [
    ("runtime imports no sibling", "runtime/threads.py", "from wire.errors import VeilbaseError"),
    ("wire imports runtime only", "wire/ring/coding.py", "from noise.params import PARAMETERS"),
    ("wire imports runtime only", "wire/transport/retry.py", "from provider.config import ProviderSettings"),
    ("noise imports wire and runtime only", "noise/ledger/ledger.py", "from tenant_sdk.identity import Identity"),
    ("noise imports wire and runtime only", "noise/masks/pad.py", "from provider.model.weights import serve_model"),
    (
        "the provider can see neither masks nor the tenant's code",
        "provider/engine/products.py",
        "from noise.scheme import GroupSpec",
    ),
    (
        "the provider can see neither masks nor the tenant's code",
        "provider/net/session.py",
        "from tenant_sdk.trust.bundle import Bundle",
    ),
    (
        "nothing that runs in production knows the attacks",
        "tenant_sdk/session.py",
        "from attacks.seen.view import View",
    ),
    (
        "the scheduler decides, and knows nothing of what computes, carries or counts",
        "provider/schedule/scheduler.py",
        "from provider.engine.products import multiply",
    ),
    ("ring arithmetic knows nothing of transports", "wire/ring/product.py", "from wire.transport import inproc"),
    (
        "gRPC is known to the modules that speak it, and to no other",
        "wire/transport/multiplexer.py",
        "from grpc import RpcError",
    ),
    (
        "gRPC is known to the modules that speak it, and to no other",
        "wire/transport/ipc/connection.py",
        "from grpc import RpcError",
    ),
    (
        "gRPC is known to the modules that speak it, and to no other",
        "provider/net/carrier.py",
        "from grpc import RpcError",
    ),
    (
        "an adversary sees a view, the public model and public parameters: no tenant, no provider, no mask, no truth",
        "attacks/adversaries/float_masks.py",
        "from noise.sampling import error",
    ),
    (
        "an adversary sees a view, the public model and public parameters: no tenant, no provider, no mask, no truth",
        "attacks/seen/view.py",
        "from noise.params import PARAMETERS",
    ),
    (
        "an adversary sees a view, the public model and public parameters: no tenant, no provider, no mask, no truth",
        "attacks/adversaries/float_masks.py",
        "from attacks.extract_lora import main",
    ),
    (
        "what only the judge may know is read by the judge and the report alone",
        "attacks/controls/float_masks.py",
        "from attacks.truth.secrets import Truth",
    ),
    (
        "what only the judge may know is read by the judge and the report alone",
        "attacks/game.py",
        "from attacks.truth.secrets import Truth",
    ),
    (
        "a tenant is driven by the victim, by programs that lie to one or weaken it, and by controls with adapters",
        "attacks/truth/judge.py",
        "from tenant_sdk import TenantClient",
    ),
    (
        "the provider's code is used to load its checkpoint, to lie to a tenant, and by controls with real layers",
        "attacks/report/table.py",
        "from provider.model.load import load",
    ),
    (
        "the provider's code is used to load its checkpoint, to lie to a tenant, and by controls with real layers",
        "attacks/victim/models.py",
        "from provider.net import server",
    ),
    (
        "masks are made, or watched, by the victim, programs and controls; adversaries know parameters only",
        "attacks/report/evaluate.py",
        "from noise.sampling import error",
    ),
    (
        "masks are made, or watched, by the victim, programs and controls; adversaries know parameters only",
        "attacks/adversaries/float_masks.py",
        "from noise.scheme import GroupSpec",
    ),
    (
        "what the client calls does not know the client: it takes tenant_sdk.session_protocol",
        "tenant_sdk/training/finetune.py",
        "from tenant_sdk.client import TenantClient",
    ),
    (
        "the tenant reaches the provider's code only through embedded.py",
        "tenant_sdk/client.py",
        "from provider.embedded import serve_in_process",
    ),
]
"""Triples of a contract's name, a file, and a line that the contract forbids in this file."""


def contracts() -> list[dict[str, Any]]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return found


def imported_by(file: Path) -> list[str]:
    """Returns the modules that a file imports, including imports inside functions."""
    names = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return names


def test_every_contract_has_a_planted_import() -> None:
    assert {contract["name"] for contract in contracts()} == {name for name, _, _ in PLANTED}


def test_contracts_name_folders() -> None:
    """Contracts name single modules only if the wall is that module: the parameters, the file with `inproc:` providers,
    the modules that speak gRPC, and the modules beside the folders of tenant_sdk that its client calls."""
    named = [
        name
        for contract in contracts()
        for key in ("source_modules", "forbidden_modules", "protected_modules", "allowed_importers")
        for name in contract.get(key, [])
    ]
    for contract in contracts():
        for line in contract.get("ignore_imports", []):
            named += [end.replace(".**", "").replace(".*", "") for end in line.split(" -> ")]
    files = {name for name in named if not (ROOT / name.replace(".", "/")).is_dir()}
    called_by_the_client = {f"tenant_sdk.{name}" for name in ("generate", "peft_model", "session", "session_protocol")}
    speak_grpc = {
        "wire.transport.grpc_channel", "wire.transport.grpc_connection", "provider.net.server", "provider.net.service",
        "provider.cluster.connection", "provider.operations.monitor", "grpc", "grpc_health",
    }  # fmt: skip
    assert files == speak_grpc | called_by_the_client | {
        "noise.params", "tenant_sdk.embedded", "tenant_sdk.client", "tenant_sdk.cli",
    }  # fmt: skip


def test_the_contract_of_adversaries_names_every_other_folder() -> None:
    (contract,) = [one for one in contracts() if "attacks.adversaries" in one.get("source_modules", [])]
    named = {name.removeprefix("attacks.") for name in contract["forbidden_modules"] if name.startswith("attacks.")}
    there = {folder.parent.name for folder in (ROOT / "attacks").glob("*/__init__.py")}
    assert named == there - HOLD_NO_TRUTH
    assert {"noise", "tenant_sdk", "provider"} <= set(contract["forbidden_modules"])
    assert not contract.get("allow_indirect_imports")


def test_adversaries_cannot_import_a_program_beside_the_folders() -> None:
    """Programs such as `python -m attacks.game` are forbidden by the modules that they import."""
    graph = grimp.build_graph("attacks", cache_dir=None)
    modules = {file.stem for file in (ROOT / "attacks").glob("*.py")} - {"__init__"}
    assert modules
    for module in modules:
        reached = {name.split(".")[1] for name in graph.find_upstream_modules(f"attacks.{module}") if "." in name}
        assert reached - HOLD_NO_TRUTH, f"the contract would let an adversary import attacks.{module}"


def test_adversaries_import_wire_and_parameters_only() -> None:
    """The contract's rule for adversaries is checked again by reading their files, including imports inside
    functions."""
    files = list((ROOT / "attacks" / "adversaries").glob("*.py"))
    assert files
    for file in files:
        for name in imported_by(file):
            top, _, rest = name.partition(".")
            assert top not in ("tenant_sdk", "provider", "tests", "benchmarks"), file.name
            assert top != "noise" or rest == "params", file.name
            assert top != "attacks" or rest.partition(".")[0] in HOLD_NO_TRUTH, file.name


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copied")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    # The width is set, since import-linter cuts the lines of its report at the terminal's width.
    options: dict[str, Any] = {"cwd": folder, "env": {"PYTHONPATH": str(folder), "COLUMNS": "1000"}}
    return subprocess.run(command, text=True, capture_output=True, timeout=300, check=False, **options)


@pytest.mark.slow
def test_the_copy_keeps_every_contract(copied: Path) -> None:
    done = lint(copied)
    assert done.returncode == 0, done.stdout
    assert f"Contracts: {len(contracts())} kept, 0 broken." in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("name", "module", "line"), PLANTED)
def test_a_breach_is_seen(name: str, module: str, line: str, copied: Path) -> None:
    file = copied / module
    before = file.read_text()
    try:
        file.write_text(f"{before}\n{line}\n")
        done = lint(copied)
    finally:
        file.write_text(before)
    assert done.returncode == 1
    broken = [report.split(" BROKEN")[0] for report in done.stdout.splitlines() if " BROKEN" in report]
    assert name in broken, done.stdout
    planted = line.split()
    imported = {planted[1], f"{planted[1]}.{planted[3]}"}
    importer = module.removesuffix(".py").replace("/", ".")
    assert any(f"{importer} -> {one}" in done.stdout for one in imported), done.stdout


# ---- examples and docs -----------------------------------------------------------------------------------------------

FACES = {*PACKAGES, "tenant_sdk.testing"}
"""The modules whose exported names (`__all__`) users may import."""
INDENTED = re.compile(r"(?:^    .*\n|^\n)+", re.MULTILINE)


def exported(module: str) -> set[str]:
    return set(getattr(importlib.import_module(module), "__all__", ()))


def reached_inside(code: str) -> list[str]:
    """Returns the names of these packages that a program imports or uses although no face exports them."""
    found: list[str] = []
    nodes = list(ast.walk(ast.parse(code)))
    bound = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [
                alias.name for alias in node.names if alias.name.split(".")[0] in PACKAGES and alias.name not in FACES
            ]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [name for name in names if not is_exported(name)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound & FACES:
            found += [] if is_exported(name := f"{node.value.id}.{node.attr}") else [name]
    return found


def is_exported(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return name in FACES or (module in FACES and last in exported(module))


def programs() -> list[tuple[str, str]]:
    """Returns what users copy, by its place: the examples, and the Python of README and docs, also where it is only
    indented."""
    found = [(path.name, path.read_text()) for path in sorted((ROOT / "examples").glob("*.py"))]
    for page in pages():
        found += [(f"{page.name}:{line}", code) for line, code in blocks(page)]
        for match in INDENTED.finditer(page.read_text()):
            code = textwrap.dedent(match[0])
            if re.search(rf"^\s*(?:from|import) (?:{'|'.join(PACKAGES)})\b", code, re.MULTILINE):
                found.append((page.name, code))
    return found


def test_examples_and_docs_import_only_what_packages_export() -> None:
    all_programs = programs()
    assert {"demo.py", "serving.md"} <= {name for name, _ in all_programs}
    inside = {name: found for name, code in all_programs if (found := reached_inside(code))}
    assert inside == {}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import tenant_sdk, wire\ntenant_sdk.tune(), wire.encode", []),
        ("from tenant_sdk.testing import ScriptedProvider\nfrom tenant_sdk import testing", []),
        ("from tenant_sdk.training.dataset import load_rows", ["tenant_sdk.training.dataset.load_rows"]),
        ("from tenant_sdk import client", ["tenant_sdk.client"]),
        ("def f():\n    import wire.errors", ["wire.errors"]),
        ("provider = 3\nprovider.real", []),
        ("import tenant_sdk\ntenant_sdk.session.open_session", ["tenant_sdk.session"]),
        ("from tenant_sdk.testing import embedded", ["tenant_sdk.testing.embedded"]),
    ],
)
def test_a_reach_inside_is_found(code: str, found: list[str]) -> None:
    assert reached_inside(code) == found
