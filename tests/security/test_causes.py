"""Tests errors and their causes: which errors show a cause, that no traceback shows a secret, and that nothing is kept
alive.

Each failure gets a secret text and a tensor. They are put where a real failure has them: into the file that cannot be
parsed, into a library's message, and into local variables of the frames below. Guarantees: neither is in the formatted
traceback, causes and contexts included, and the tensor is freed once the error has been handled. Not guaranteed:
anything about a debugger or a tool that prints local variables.
"""

from __future__ import annotations

import ast
import json
import struct
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import noise
import provider
import tenant_sdk
import wire
from noise.hints.file import disk_errors
from noise.ledger.ledger import Ledger
from provider.config import load_settings
from provider.engine import products
from provider.identity import registry
from provider.identity.authority import StateDir, issue_server_certificate
from provider.model.load import load, resolve
from provider.model.served_model import ServedModel
from provider.net.ports import TensorPort
from provider.operations.monitor import read_metrics
from provider.operations.usage import read_usage
from provider.parallel.ranks import RankLost, together
from tenant_sdk import TenantClient
from tenant_sdk.identity import issuer_of, read_endpoint
from tenant_sdk.peft_model import adapted_model
from tenant_sdk.text.source import surviving
from tenant_sdk.training.checkpoints import Checkpoints
from tenant_sdk.training.dataset import load_rows
from tenant_sdk.training.token_rows import tokenize
from tenant_sdk.trust.checkpoint import TrustedCheckpoint
from tenant_sdk.trust.compare import check_files, check_scale_names
from wire.errors import VeilbaseError, os_cause
from wire.frame import Arithmetic, Call, Direction, parse
from wire.manifest import parse_manifest
from wire.transport.grpc_channel import open_channel
from wire.transport.identity import TlsIdentity, load_identity

SECRET = "Odile Marchetti"
NUMBER = 44171987
CALL = Call(0, Direction.FORWARD, Arithmetic.RING)
ANY: Any = None
"""Stands for arguments that are not used before the failure."""

Failure = Callable[[Path, torch.Tensor], object]


# ---- the tenant: data, text, rows and secrets show no cause ---------------------------------------------------------


def a_row_that_is_no_json(folder: Path, rows: torch.Tensor) -> None:
    (folder / "data.jsonl").write_text(f'{{"text": "{SECRET}", {rows.tolist()}}}\n')
    load_rows(folder / "data.jsonl")


def a_row_that_is_not_utf8(folder: Path, rows: torch.Tensor) -> None:
    (folder / "data.jsonl").write_bytes(SECRET.encode() + b"\xff\n")
    load_rows(folder / "data.jsonl")


def a_data_set_that_is_not_there(folder: Path, rows: torch.Tensor) -> None:
    load_rows(folder / "data.jsonl")


class _Quoting:
    """Implements a tokenizer whose template and methods all fail with the text in their message."""

    chat_template = "{{ messages }}"
    eos_token_id = 2

    def apply_chat_template(self, messages: Any, **_: Any) -> Any:
        raise ValueError(f"cannot render {messages}")


def a_template_that_quotes_the_messages(folder: Path, rows: torch.Tensor) -> None:
    turns = [{"role": "user", "content": SECRET}, {"role": "assistant", "content": SECRET}]
    tokenize(load_rows([{"messages": turns}]), cast(Any, _Quoting()), 100)


def a_tokenizer_that_quotes_the_text(folder: Path, rows: torch.Tensor) -> None:
    with surviving("the prompt"):
        raise RuntimeError(f"cannot encode {SECRET} {rows}")


def a_private_key_that_is_none(folder: Path, rows: torch.Tensor) -> None:
    enrolled = _enrol(folder)
    (enrolled / "key.pem").write_text(f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----\n")
    load_identity(enrolled)


def an_adapter_that_peft_cannot_read(folder: Path, rows: torch.Tensor) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": SECRET}))
    adapted_model(cast(Any, SimpleNamespace(loaded=None, load_model=lambda: nn.Linear(2, 2))), folder)


def a_bundle_file_that_quotes(folder: Path, rows: torch.Tensor) -> None:
    for name in ("expected", "offered"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(f"{{{SECRET}")
    check_files(folder / "expected", folder / "offered", ANY)


def scales_that_are_none(folder: Path, rows: torch.Tensor) -> None:
    (folder / "scales.safetensors").write_text(SECRET * 10)
    check_scale_names(folder, ANY)


def a_ledger_that_is_damaged(folder: Path, rows: torch.Tensor) -> None:
    (folder / "ledger").write_text(f"{SECRET}\n")
    (folder / "ledger").chmod(0o600)
    Ledger.open(folder / "ledger", "acme")


def a_disk_that_takes_no_hints(folder: Path, rows: torch.Tensor) -> None:
    with disk_errors(folder / "hints", rows.nbytes):
        raise OSError(28, "No space left on device", f"{SECRET} {rows}")


def a_frame_with_an_unknown_number(folder: Path, rows: torch.Tensor) -> None:
    parse(struct.pack("<4B", 1, 77, 77, 77) + rows.numpy().tobytes() * 40)


# ---- the tenant: files, options and the operating system show theirs ------------------------------------------------


def no_identity(folder: Path, rows: torch.Tensor) -> None:
    load_identity(folder / "acme")


def a_certificate_that_is_none(folder: Path, rows: torch.Tensor) -> None:
    issuer_of(TlsIdentity(SECRET.encode(), SECRET.encode(), SECRET.encode()))


def no_endpoint(folder: Path, rows: torch.Tensor) -> None:
    read_endpoint(folder)


def a_device_that_is_none(folder: Path, rows: torch.Tensor) -> None:
    TenantClient("inproc:smollm2-135m", device="abacus")


def a_url_that_is_none(folder: Path, rows: torch.Tensor) -> None:
    open_channel("grpcs://[", None)


def a_folder_of_checkpoints_that_is_a_file(folder: Path, rows: torch.Tensor) -> None:
    (folder / "file").write_text(SECRET)
    Checkpoints(folder / "file" / "checkpoints").open("run", None)


def a_trusted_checkpoint_that_is_damaged(folder: Path, rows: torch.Tensor) -> None:
    (folder / "config.json").write_text(f"{{{SECRET}")
    (folder / "model.safetensors").write_bytes(b"")
    TrustedCheckpoint.open(folder).layer("lm_head", "linear")


def scales_that_are_missing(folder: Path, rows: torch.Tensor) -> None:
    check_scale_names(folder, ANY)


def a_manifest_that_is_no_json(folder: Path, rows: torch.Tensor) -> None:
    parse_manifest(f'{{"{SECRET}'.encode())


# ---- the provider: rows, peers and files that name tenants show no cause --------------------------------------------


def a_product_that_fails(folder: Path, rows: torch.Tensor) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError(f"no kernel for {rows} {SECRET}")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(products, "compute", failing)
        ServedModel(ANY).compute(CALL, rows)


def a_rank_that_is_gone(folder: Path, rows: torch.Tensor) -> None:
    with together():
        raise RuntimeError(f"connection closed by {SECRET}: {rows}")


def a_manifest_that_quotes(folder: Path, rows: torch.Tensor) -> None:
    parse_manifest(json.dumps({"protocol": wire.manifest.PROTOCOL_VERSION, "groups": SECRET}).encode())


def usage_that_names_tenants(folder: Path, rows: torch.Tensor) -> None:
    (folder / "usage.json").write_text(json.dumps({"tenants": {SECRET: 1}}))
    read_usage(folder / "usage.json")


def settings_that_are_no_yaml(folder: Path, rows: torch.Tensor) -> None:
    (folder / "provider.yaml").write_text(f"host: [{SECRET}\n")
    load_settings({}, folder / "provider.yaml")


def a_setting_that_cannot_be(folder: Path, rows: torch.Tensor) -> None:
    (folder / "provider.yaml").write_text(f"port: {SECRET}\n")
    load_settings({}, folder / "provider.yaml")


# ---- the provider: its own files, ports and options show theirs -----------------------------------------------------


def a_registry_that_names_tenants(folder: Path, rows: torch.Tensor) -> None:
    state = StateDir(folder / "state")
    state.tenants_path.write_text(json.dumps([{"name": SECRET}]))
    registry.tenants(state)


def an_output_folder_that_is_a_file(folder: Path, rows: torch.Tensor) -> None:
    (folder / "file").write_text(SECRET)
    registry.enroll(StateDir(folder / "state"), "acme", folder / "file" / "acme", "grpcs://127.0.0.1:1")


def a_host_that_cannot_be(folder: Path, rows: torch.Tensor) -> None:
    issue_server_certificate(StateDir(folder / "state"), "no host")


def a_model_that_cannot_be_loaded(folder: Path, rows: torch.Tensor) -> None:
    (folder / "config.json").write_text(f"{{{SECRET}")
    load(resolve(str(folder)))


def usage_that_is_a_folder(folder: Path, rows: torch.Tensor) -> None:
    read_usage(folder)


def no_provider_in_a_folder(folder: Path, rows: torch.Tensor) -> None:
    read_metrics(folder)


def an_address_of_another_machine(folder: Path, rows: torch.Tensor) -> None:
    TensorPort("192.0.2.1", 0)


SILENT: list[Failure] = [
    a_row_that_is_no_json, a_row_that_is_not_utf8, a_data_set_that_is_not_there, a_template_that_quotes_the_messages,
    a_tokenizer_that_quotes_the_text, a_private_key_that_is_none, an_adapter_that_peft_cannot_read,
    a_bundle_file_that_quotes, scales_that_are_none, a_ledger_that_is_damaged, a_disk_that_takes_no_hints,
    a_frame_with_an_unknown_number, a_product_that_fails, a_rank_that_is_gone,
    a_manifest_that_quotes, usage_that_names_tenants, settings_that_are_no_yaml, a_setting_that_cannot_be,
    a_trusted_checkpoint_that_is_damaged, a_model_that_cannot_be_loaded,
]  # fmt: skip
TELLING: list[tuple[Failure, type[Exception]]] = [
    (no_identity, FileNotFoundError), (a_certificate_that_is_none, ValueError), (no_endpoint, FileNotFoundError),
    (a_device_that_is_none, RuntimeError), (a_url_that_is_none, ValueError),
    (a_folder_of_checkpoints_that_is_a_file, FileExistsError),
    (scales_that_are_missing, FileNotFoundError), (a_manifest_that_is_no_json, ValueError),
    (a_registry_that_names_tenants, ValueError), (an_output_folder_that_is_a_file, NotADirectoryError),
    (a_host_that_cannot_be, ValueError),
    (usage_that_is_a_folder, IsADirectoryError), (no_provider_in_a_folder, FileNotFoundError),
    (an_address_of_another_machine, OSError),
]  # fmt: skip


def _enrol(folder: Path) -> Path:
    registry.enroll(StateDir(folder / "state"), "acme", folder / "acme", "grpcs://127.0.0.1:1")
    return folder / "acme"


def handle(failure: Failure, folder: Path) -> tuple[str, type[BaseException] | None, weakref.ref[torch.Tensor]]:
    """Runs a failure and handles its error. Returns the formatted traceback, the type of the cause, and a weak
    reference to the tensor, which the frames of the traceback hold until then."""
    rows = torch.full((1, 4), NUMBER, dtype=torch.int32)
    try:  # not `pytest.raises`, whose result would keep the traceback, and so the tensor, in a cycle
        failure(folder, rows)
    except (VeilbaseError, RankLost) as exc:
        cause = None if exc.__cause__ is None else type(exc.__cause__)
        return "".join(traceback.format_exception(exc)), cause, weakref.ref(rows)
    pytest.fail("nothing was raised")


def check_clean(shown: str, rows: weakref.ref[torch.Tensor]) -> None:
    assert SECRET not in shown
    assert str(NUMBER) not in shown
    assert rows() is None  # at once: no cycle of error, traceback and frame waits for the garbage collector


@pytest.mark.parametrize("failure", SILENT, ids=lambda failure: failure.__name__)
def test_a_cause_that_could_tell_is_left_out(failure: Failure, tmp_path: Path) -> None:
    shown, cause, rows = handle(failure, tmp_path)
    assert cause is None
    assert "direct cause" not in shown
    check_clean(shown, rows)


@pytest.mark.parametrize(("failure", "kind"), TELLING, ids=lambda part: part.__name__)
def test_a_cause_that_helps_is_shown(failure: Failure, kind: type[Exception], tmp_path: Path) -> None:
    shown, cause, rows = handle(failure, tmp_path)
    assert cause is not None
    assert issubclass(cause, kind)
    assert "direct cause" in shown
    check_clean(shown, rows)


def test_of_a_mixed_except_the_operating_systems_error_alone_is_shown() -> None:
    error = FileNotFoundError(2, "No such file or directory", "x")
    assert os_cause(error) is error
    assert os_cause(ValueError(SECRET)) is None


# ---- where no cause may ever be kept --------------------------------------------------------------------------------

ROW_PATHS = (
    "noise", "tenant_sdk/text", "tenant_sdk/training/dataset.py", "tenant_sdk/model/remote_group.py",
    "tenant_sdk/model/remote_linear.py", "tenant_sdk/model/run_state.py", "tenant_sdk/model/send.py", "wire/ring",
    "wire/frame.py", "wire/transport", "provider/net", "provider/engine", "provider/model/served_model.py",
)  # fmt: skip
BEFORE_ANY_ROW = {
    ("wire/transport/address.py", "read_address"),
    ("wire/transport/identity.py", "load_identity"),
    ("wire/transport/identity.py", "_check_files"),
    ("wire/transport/ipc/folder.py", "folder_of"),
    ("wire/transport/ipc/folder.py", "check_socket"),
    ("wire/transport/ipc/folder.py", "_look_at"),
    ("provider/net/ports.py", "__init__"),
    ("provider/net/ports.py", "_take_lock"),
    ("provider/net/ports.py", "__init__"),
}
"""The functions in these files that handle a URL, an identity's files, a folder or a port, and no rows."""


def _kept_causes(file: Path) -> Iterator[tuple[str, int]]:
    """Yields the function and the line of every `raise ... from` whose cause is not None."""
    for function in ast.walk(ast.parse(file.read_text())):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            raises = (node for node in ast.walk(function) if isinstance(node, ast.Raise) and node.cause is not None)
            for one in raises:
                if not (isinstance(one.cause, ast.Constant) and one.cause.value is None):
                    yield function.name, one.lineno


def test_no_cause_is_kept_on_the_way_of_a_row() -> None:
    root = Path(next(iter(wire.__path__))).parent
    assert all(Path(next(iter(package.__path__))).parent == root for package in (noise, provider, tenant_sdk))
    allowed = set()
    for place in ROW_PATHS:
        files = [root / place] if place.endswith(".py") else sorted((root / place).rglob("*.py"))
        assert files, place
        for file in files:
            name = file.relative_to(root).as_posix()
            for function, line in _kept_causes(file):
                assert (name, function) in BEFORE_ANY_ROW, f"{name}:{line} keeps a cause"
                allowed.add((name, function))
    assert allowed == BEFORE_ANY_ROW
