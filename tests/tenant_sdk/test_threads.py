"""Tests several clients in one process: results equal those of a client alone, and no client waits for another one to
load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import set_seed

from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from provider.model.served_model import ServedModel
from provider.net.server import Server
from runtime.loading import loading
from tenant_sdk import TenantClient
from tenant_sdk.model import build
from tenant_sdk.model.remote_linear import RemoteLinear
from tenant_sdk.training import finetune
from tests.support.lattice import TOY_OPTIONS
from tests.support.providers import make_served_model
from tests.support.threads import at_once, switching_every
from tests.support.tiny_models import make_chat_model
from tests.support.training import QUICK, ROWS, lora

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")

TIMEOUT_S = 100.0
DTYPES = (torch.float32, torch.bfloat16, torch.float32, torch.float16)
EXACT: dict[str, Any] = {"mask": "off", "arithmetic": "ring"}
"""Options with which products are computed with integers, so that other requests in the same batch change no bit."""


@pytest.fixture
def many_switches() -> Iterator[None]:
    """Makes threads switch fifty times as often, so that races in short stretches of code show."""
    with switching_every(1e-4):
        yield


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides a GPT-2 model, whose head is its embedding. A model could lose this tie if two models were loaded at
    once."""
    return make_chat_model(tmp_path_factory.mktemp("tied") / "tiny", "gpt2")


@pytest.fixture(scope="module")
def tied_served_model(tied_folder: Path) -> ServedModel:
    return make_served_model(tied_folder, "int8")


@pytest.fixture
def provider(tied_served_model: ServedModel, tmp_path: Path) -> Iterator[tuple[Server, StateDir]]:
    state = StateDir(tmp_path / "state")
    server = Server("127.0.0.1", 0, state)
    server.start(tied_served_model)
    yield server, state
    server.stop()


def identity_of(provider: tuple[Server, StateDir], name: str, folder: Path) -> Path:
    server, state = provider
    enroll(state, name, folder / name, f"grpcs://127.0.0.1:{server.port}")
    return folder / name


def trained(url: str, out: Path, options: dict[str, Any], **settings: Any) -> list[float]:
    """Returns the losses of one client's fine-tuning."""
    with TenantClient(url, progress=False, cache=out.with_name("cache"), **options) as client:
        losses: list[float] = client.finetune(ROWS, lora(), out, **{**QUICK, "max_steps": 4, **settings}).losses
    assert (out / "adapter_model.safetensors").is_file()
    return losses


def alone_and_at_once(run: Callable[[int, Path], list[float]], tmp_path: Path, count: int = 4) -> None:
    alone = [run(number, tmp_path / f"alone{number}") for number in range(count)]
    together = at_once(
        [lambda number=number: run(number, tmp_path / f"together{number}") for number in range(count)], TIMEOUT_S
    )
    assert together == alone


def test_four_identities_of_different_dtypes(
    provider: tuple[Server, StateDir], tmp_path: Path, many_switches: None
) -> None:
    folders = [identity_of(provider, f"tenant{number}", tmp_path) for number in range(4)]

    def run(number: int, out: Path) -> list[float]:
        options = {"identity": folders[number], "dtype": DTYPES[number], **EXACT}
        return trained(f"grpcs://127.0.0.1:{provider[0].port}", out, options, seed=number)

    alone_and_at_once(run, tmp_path)


def test_four_clients_of_one_identity(provider: tuple[Server, StateDir], tmp_path: Path, many_switches: None) -> None:
    folder = identity_of(provider, "acme", tmp_path)

    def run(number: int, out: Path) -> list[float]:
        options = {"identity": folder, "dtype": DTYPES[number], **EXACT}
        return trained(f"grpcs://127.0.0.1:{provider[0].port}", out, options, seed=number)

    alone_and_at_once(run, tmp_path)


def test_four_clients_of_one_identity_behind_the_lattice_mask(
    provider: tuple[Server, StateDir], tmp_path: Path, many_switches: None
) -> None:
    """The clients share the ledger and the folder of hints. Only the mask's error makes their losses differ."""
    folder, url = identity_of(provider, "acme", tmp_path), f"grpcs://127.0.0.1:{provider[0].port}"
    lattice = {"identity": folder, "mask": "lattice", "mask_options": TOY_OPTIONS}
    plain = trained(url, tmp_path / "plain", {"identity": folder, **EXACT})
    masked = at_once([lambda name=name: trained(url, tmp_path / name, lattice) for name in "abcd"], TIMEOUT_S)
    for losses in masked:
        assert losses == pytest.approx(plain, abs=5e-3)


def test_providers_and_trusted_checkpoints_are_loaded_beside_tenants(
    tied_folder: Path, tmp_path: Path, many_switches: None
) -> None:
    def run(number: int, out: Path) -> list[float]:
        options = {"dtype": DTYPES[number], "verify": tied_folder if number % 2 else None, **EXACT}
        return trained(f"inproc:{tied_folder}", out, options, seed=number)

    alone_and_at_once(run, tmp_path)


def test_steps_of_one_run_are_not_left_out_because_another_accumulates(
    chat_folder: Path, tmp_path: Path, many_switches: None
) -> None:
    """Runs with and without gradient accumulation, at the same time, have the losses that they have alone. accelerate
    keeps one flag per process that says whether an optimizer step is due."""

    def run(number: int, out: Path) -> list[float]:
        options = {"mask": "off", "arithmetic": "float", "weights": "native"}
        return trained(f"inproc:{chat_folder}", out, options, seed=number, gradient_accumulation_steps=1 + number % 2)

    alone_and_at_once(run, tmp_path)


def test_adapter_and_order_of_rows_come_from_the_run_s_seed_alone(
    chat_client: TenantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread sets the process's random generators just before the adapter and just before the order of rows are
    drawn. The losses stay the same."""
    options = {**QUICK, "seed": 3, "batch_size": 2}
    expected = chat_client.finetune(ROWS, lora(), tmp_path / "alone", **options).losses
    make_peft = finetune.get_peft_model

    def peft_model(*args: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(set_seed, 99).result(TIMEOUT_S)
        return make_peft(*args)

    class Disturbed(finetune.CompletionTrainer):
        def __init__(self, **args: Any) -> None:
            super().__init__(**args)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(set_seed, 98).result(TIMEOUT_S)

    monkeypatch.setattr(finetune, "get_peft_model", peft_model)
    monkeypatch.setattr(finetune, "CompletionTrainer", Disturbed)
    assert chat_client.finetune(ROWS, lora(), tmp_path / "disturbed", **options).losses == expected


def test_dropout_too_is_the_same_in_runs_one_after_the_other(chat_client: TenantClient, tmp_path: Path) -> None:
    """With several threads this does not hold, since dropout draws from the process's generator."""
    first = chat_client.finetune(ROWS, lora(lora_dropout=0.3), tmp_path / "first", **QUICK).losses
    torch.rand(7)
    assert chat_client.finetune(ROWS, lora(lora_dropout=0.3), tmp_path / "second", **QUICK).losses == first


def test_generation_does_not_wait_while_another_client_loads(chat_client: TenantClient) -> None:
    expected = chat_client.generate("who?", max_new_tokens=4)
    with loading(), ThreadPoolExecutor(1) as pool:
        assert pool.submit(chat_client.generate, "who?", max_new_tokens=4).result(TIMEOUT_S) == expected


def test_a_client_in_bfloat16_changes_the_default_dtype_of_no_other_thread(
    chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks are made in other threads, and numbers of sixteen bits would be wrong there."""
    seen: set[torch.dtype] = set()

    class Watched(RemoteLinear):
        def __init__(self, *args: Any) -> None:
            with ThreadPoolExecutor(1) as pool:
                seen.add(pool.submit(lambda: torch.zeros(1).dtype).result(TIMEOUT_S))
            super().__init__(*args)

    monkeypatch.setattr(build, "RemoteLinear", Watched)
    options = {"mask": "off", "weights": "native", "dtype": torch.bfloat16, "cache": tmp_path, "progress": False}
    with TenantClient(f"inproc:{chat_folder}", **options) as client:
        loaded = client.load_model()
    assert seen == {torch.float32}
    assert loaded.get_input_embeddings().weight.dtype is torch.bfloat16
