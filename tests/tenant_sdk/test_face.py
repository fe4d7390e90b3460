"""Tests the names that `tenant_sdk` exports, and that importing it is fast and changes nothing."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import tomllib
import warnings
from dataclasses import fields
from typing import Any

import pytest

import tenant_sdk
from tenant_sdk import tuning
from tenant_sdk.options import names_keywords
from tenant_sdk.training.recipe import RunRecipe
from tenant_sdk.training.settings import FinetuneKeywords, FinetuneOptions, finetune_options
from tests.support.repository import ROOT
from wire.errors import VeilbaseError
from wire.transport.event_engine import VARIABLE as EVENT_ENGINE

PACKAGES = ("runtime", "wire", "noise", "tenant_sdk", "provider", "attacks")
NO_ERRORS = {
    *("TenantClient", "Engine", "Speculation", "FinetuneResult", "tune", "check_run", "chunk_loss", "for_remote_base"),
    *(
        "AdapterStore",
        "Bill",
        "EndpointLimits",
        "EndpointSettings",
        "adapted_model",
        "load_rows",
        "mean_loss",
        "tokenize",
    ),
    *("printable", "FinetuneOptions", "EngineOptions", "RequestOptions", "StoreOptions", "Trust"),
}
NAMES = {
    *NO_ERRORS,
    # errors, as wire/errors.py draws them
    "VeilbaseError",
    *("RequestError", "InvalidTensor", "NotFinite", "UnknownLayer", "LimitExceeded"),
    *("AccessError", "Unauthenticated", "NotPermitted", "QuotaExceeded"),
    *("TransportError", "DeadlineExceeded", "Unavailable", "ForkedConnection"),
    *("ProtocolError", "VersionMismatch", "MalformedFrame", "ProviderChanged", "WrongPeer", "RemoteFault"),
    *("MaskError", "MaskReused", "MaskOverflow", "SlotsExhausted", "SeedExhausted", "WeakParameters"),
    "VerificationFailed",
    *("ConfigurationError", "RemoteWeightError", "TokenizerFailed", "TemplateDoesNotFit", "TemplateRefuses"),
    *("DatasetError", "StorageError", "PromptsFailed", "NotServed", "WrongOption"),
    # warnings
    *("NotVerifiedWarning", "NotPrivateWarning", "NotTunedWarning", "AcceptedChangeWarning", "CutWarning"),
    *("UnusableRowWarning", "NotFiniteWarning", "ProviderAwayWarning", "FewLayersWarning", "UsageNotKeptWarning"),
}
"""If an exported name is removed or changes its meaning, users' programs break, so it must be in the change log."""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key not in (tuning.SPIN_COUNT, EVENT_ENGINE)}
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, timeout=100
    )


def test_the_names_that_are_exported() -> None:
    assert set(tenant_sdk.__all__) == NAMES
    assert len(tenant_sdk.__all__) == len(NAMES)
    assert set(dir(tenant_sdk)) >= NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_name_can_be_imported_and_is_what_it_says(name: str) -> None:
    found = getattr(tenant_sdk, name)
    assert found.__name__ == name
    if name.endswith("Warning"):
        assert issubclass(found, UserWarning)
    elif name not in NO_ERRORS:
        assert issubclass(found, VeilbaseError)


def test_type_checkers_know_every_name_that_is_imported_late() -> None:
    """A name that only `__getattr__` finds would be Any to a type checker."""
    tree = ast.parse((ROOT / "tenant_sdk" / "__init__.py").read_text())
    (known,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in known.body if isinstance(node, ast.ImportFrom)]
    (late,) = [node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)]
    assert {alias.name: node.module for node in imports for alias in node.names} == ast.literal_eval(late)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Tenant'"):
        tenant_sdk.Tenant  # noqa: B018 - raises


def test_every_error_and_warning_of_the_tenants_code_is_exported() -> None:
    bases: dict[str, set[str]] = {}
    for file in (
        path for folder in ("runtime", "wire", "noise", "tenant_sdk") for path in (ROOT / folder).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    met = {"VeilbaseError", "Warning", "UserWarning"}
    while more := {name for name, above in bases.items() if above & met} - met:
        met |= more
    public = {name for name in met if not name.startswith("_")}
    assert public - {"Warning", "UserWarning"} == NAMES - NO_ERRORS


def test_importing_loads_nothing_heavy_and_sets_no_variable() -> None:
    code = """
import os, sys
before = dict(os.environ)
import tenant_sdk
tenant_sdk.tune, tenant_sdk.Unavailable, tenant_sdk.FinetuneResult, tenant_sdk.printable
assert dict(os.environ) == before
assert not {'torch', 'transformers', 'peft', 'grpc', 'numpy'} & set(sys.modules)
import tenant_sdk.endpoint.schema, tenant_sdk.endpoint.uploads  # which read requests, and need no model
assert not {'torch', 'transformers', 'peft', 'grpc', 'numpy'} & set(sys.modules)
"""
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_imported_later_sets_no_variable_either() -> None:
    """The three are imported one after the other in one process, since each loads torch."""
    code = f"""
import os
for imported in ("from provider import serve", "from provider import embedded", "from tenant_sdk import TenantClient"):
    exec(imported)
    assert not {{{tuning.SPIN_COUNT!r}, {EVENT_ENGINE!r}}} & set(os.environ), imported
"""
    done = run(code)
    assert done.returncode == 0, done.stderr


VALUES = f"print(os.environ.get({tuning.SPIN_COUNT!r}), os.environ.get({EVENT_ENGINE!r}))"
OLDER_WAY = "-event_engine_client,-event_engine_listener,-event_engine_callback_cq"


def test_tune_sets_what_the_environment_does_not_say() -> None:
    code = f"import os, sys, tenant_sdk; tenant_sdk.tune(); {VALUES}; print('torch' in sys.modules)"
    done = run(code)
    assert (done.stdout.split(), done.stderr) == (["10000", OLDER_WAY, "False"], "")
    done = run(code, **{tuning.SPIN_COUNT: "7", EVENT_ENGINE: "mine"})
    assert (done.stdout.split(), done.stderr) == (["7", "mine", "False"], "")


def test_the_command_tunes_before_torch_is_loaded() -> None:
    code = f"""
import os, sys
from tenant_sdk import cli
sys.argv = ["tenant", "explain", "--identity", "nowhere"]
try:
    cli.main()
finally:
    {VALUES}
    assert not {{'torch', 'grpc'}} & set(sys.modules)
"""
    done = run(code)
    assert done.stdout.split() == ["10000", OLDER_WAY]
    assert done.stderr.startswith("tenant: nowhere is not an identity")


def test_tune_that_comes_too_late_says_so_once_and_leaves_the_variable() -> None:
    done = run(f"import os, torch, tenant_sdk; tenant_sdk.tune(); tenant_sdk.tune(); {VALUES}")
    assert done.stdout.split() == ["None", OLDER_WAY]
    assert done.stderr.count("NotTunedWarning: expected tenant_sdk.tune() before torch and grpc are imported") == 1
    assert f"got neither that nor {tuning.SPIN_COUNT} in the environment" in done.stderr


@pytest.fixture
def untuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tuning.SPIN_COUNT, raising=False)
    monkeypatch.delenv(EVENT_ENGINE, raising=False)
    monkeypatch.setattr(tuning, "_has_said", False)


def test_a_client_says_once_that_the_process_is_not_tuned(untuned: None) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            tenant_sdk.TenantClient("grpc://127.0.0.1:1", mask="off")
    (warning,) = said
    assert warning.category is tenant_sdk.NotTunedWarning
    assert warning.filename == __file__
    assert f"{tuning.SPIN_COUNT} and {EVENT_ENGINE}" in str(warning.message)


@pytest.mark.parametrize("url", ["inproc:x", "grpc://127.0.0.1:1"])
def test_a_client_is_quiet_where_it_does_not_matter(url: str, untuned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not url.startswith("inproc:"):
        monkeypatch.setenv(tuning.SPIN_COUNT, "0")
        monkeypatch.setenv(EVENT_ENGINE, "")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tenant_sdk.TenantClient(url, mask="off")


@pytest.mark.parametrize(
    "method",
    [
        tenant_sdk.TenantClient.finetune, tenant_sdk.TenantClient.generate, tenant_sdk.TenantClient.generate_many,
        tenant_sdk.TenantClient.serve, tenant_sdk.Engine.submit, tenant_sdk.TenantClient.plan,
        tenant_sdk.TenantClient.plan_tokens,
    ],
)  # fmt: skip
def test_options_are_named_typed_and_described(method: Any) -> None:
    parameters = list(inspect.signature(method).parameters.values())[1:]
    text = inspect.getdoc(method) or ""
    for one in parameters:
        assert one.annotation is not inspect.Parameter.empty
        assert re.search(rf"^    {one.name}: \w", text, re.MULTILINE), one.name
    is_open = [one.name for one in parameters if one.kind is inspect.Parameter.VAR_KEYWORD]
    assert is_open == (["options"] if method.__name__ == "generate" else [])


def test_options_of_finetune_are_those_of_the_dataclass() -> None:
    """Type checkers, `inspect` and recipes know the same options, with the same types and defaults."""
    options = {one.name: one for one in fields(FinetuneOptions)}
    assert {name: one.type for name, one in options.items()} == {
        name: one.__forward_arg__ for name, one in FinetuneKeywords.__annotations__.items()
    }
    shown = inspect.signature(tenant_sdk.TenantClient.finetune).parameters
    assert list(shown) == ["self", "data", "peft_config", "output_dir", "plan", *options]
    assert all(shown[name].default == one.default for name, one in options.items())
    assert RunRecipe().options() == FinetuneOptions()
    FinetuneOptions().check()


def test_rows_to_evaluate_on_are_not_in_the_options_repr() -> None:
    assert "confidential" not in repr(FinetuneOptions(eval_data=[{"text": "confidential"}]))


def test_a_misspelt_option_of_finetune_gets_the_nearest_name() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'learning_rat': did you mean learning_rate"):
        finetune_options({"learning_rat": 1e-3})


def test_a_misspelt_keyword_of_the_client_gets_the_nearest_name() -> None:
    misspelt: Any = {"verfy": "x"}
    with pytest.raises(TypeError, match=r"^TenantClient\(\) got an .* 'verfy': did you mean verify\?$"):
        tenant_sdk.TenantClient("grpcs://127.0.0.1:1", identity="acme", **misspelt)
    assert "verify" in inspect.signature(tenant_sdk.TenantClient).parameters


def test_a_method_that_takes_any_name_knows_no_wrong_one() -> None:
    with pytest.raises(TypeError, match="takes keyword arguments of any name"):
        names_keywords(tenant_sdk.TenantClient.generate)


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_may_read_the_packages(package: str) -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert (ROOT / package / "py.typed").is_file()
    assert "py.typed" in data[package]
