"""Tests that an adapter's file is used whole or refused, with one verdict for `generate` and for the engine, that no
folder can harm the process that loads it, and that `generate` answers with the adapter that is in the folder now."""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tenant_sdk import TenantClient
from tenant_sdk.adapters import adapted_model
from tenant_sdk.serving.adapters import AdapterStore
from tests.support.saved_adapters import Bell, save_adapter, stepped
from wire.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
IDS = torch.randint(6, 90, (5,), generator=torch.Generator().manual_seed(1))
PREFIX = "base_model.model."
Q, K = (f"{PREFIX}model.layers.0.self_attn.{each}_proj" for each in "qk")
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def made(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provides an adapter of q_proj and v_proj of both layers."""
    model = AutoModelForCausalLM.from_pretrained(chat_folder)
    return save_adapter(model, tmp_path_factory.mktemp("made") / "good", seed=1, target_modules=["q_proj", "v_proj"])


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "root" / "one")


@pytest.fixture(scope="module")
def remote(chat_client: TenantClient) -> Any:
    """Provides a model for stores, of which each test leaves the layers as they were."""
    return chat_client.load_model()


def settings(path: Path, **changes: Any) -> None:
    (path / CONFIG).write_text(json.dumps(json.loads((path / CONFIG).read_text()) | changes))


def tensors(path: Path, change: Callable[[Tensors], object]) -> None:
    saved = load_file(path / WEIGHTS)
    changed = change(saved)
    save_file(changed if isinstance(changed, dict) else saved, path / WEIGHTS)


def renamed(rename: Callable[[str], str]) -> Callable[[Path], None]:
    return lambda path: tensors(path, lambda saved: {rename(key): each for key, each in saved.items()})


def with_more(key: str, *shape: int) -> Callable[[Path], None]:
    return lambda path: tensors(path, lambda saved: saved.update({key: torch.full(shape, 0.5)}))


def factors_of(module: str, outputs: int = 32) -> Callable[[Path], None]:
    own = {f"{module}.lora_A.weight": torch.full((8, 32), 0.5), f"{module}.lora_B.weight": torch.ones(outputs, 8)}
    return lambda path: tensors(path, lambda saved: saved.update(own))


def both(*acts: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda path: [act(path) for act in acts] and None  # type: ignore[func-returns-value]


def generated(client: TenantClient, folder: Path) -> torch.Tensor | str:
    """Returns the logits of the model with which `generate` answers, or the line with which it refuses."""
    try:
        with torch.no_grad():
            return adapted_model(client, folder)(IDS[None]).logits[0]  # type: ignore[no-any-return]
    except ConfigurationError as exc:
        return str(exc).replace(str(folder), folder.name)


def served(remote: Any, folder: Path) -> torch.Tensor | str:
    """Returns the logits of a store's step, or the line with which the store refuses."""
    bell = Bell()
    store = AdapterStore(remote, folder.parent, on_ready=bell, dtype=torch.float32)
    try:
        ticket = store.reserve(folder.name)
        bell.wait_for(ticket)
        if ticket.failure is not None:
            raise ticket.failure
        return stepped(store, remote, [(ticket.slot, IDS)])[0]
    except ConfigurationError as exc:
        return str(exc)
    finally:
        store.close()


def stock(chat_folder: Path, folder: Path) -> torch.Tensor | None:
    """Returns the logits of stock PEFT; None if it raises an error."""
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            model = AutoModelForCausalLM.from_pretrained(chat_folder)
            return PeftModel.from_pretrained(model, str(folder)).eval()(IDS[None]).logits[0]  # type: ignore[no-any-return]
    except Exception:  # noqa: BLE001 - whatever it is
        return None


# ---- odd files, beside stock PEFT ------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "names of a compiled model, outside": (renamed(lambda key: f"_orig_mod.{key}"), "'_orig_mod.*compiled model"),
    "names of a compiled model, inside": (
        renamed(lambda key: key.replace(PREFIX, f"{PREFIX}_orig_mod.")), "_orig_mod.*compiled model"
    ),
    "names of a compiled layer": (
        renamed(lambda key: key.replace(".self_attn.", "._orig_mod.self_attn.")), "_orig_mod.*compiled model"
    ),
    "names without the prefix": (renamed(lambda key: key.removeprefix(PREFIX)), "PEFT does not use: names begin with"),
    "one name without the prefix": (
        renamed(lambda key: key.removeprefix(PREFIX) if key.startswith(Q) else key), "PEFT does not use"
    ),
    "half of the prefix": (renamed(lambda key: key.replace(PREFIX, "base_model.")), "no linear layer 'layers.0"),
    "twice the prefix": (renamed(lambda key: PREFIX + key), "no linear layer"),
    "a factor with and without the prefix": (
        with_more(f"{Q}.lora_A.weight".removeprefix(PREFIX), 8, 32), "twice, with and without"
    ),
    "the name of the adapter in the names": (
        renamed(lambda key: key.replace(".weight", ".default.weight")), "default.weight', which is no factor"
    ),
    "a layer that the model lacks": (factors_of(Q.replace("layers.0", "layers.9")), "no linear layer 'model.layers.9"),
    "a layer that the settings do not name": (factors_of(K, 16), "k_proj.lora_A.weight', a layer that its target_mod"),
    "the head, which the settings do not name": (factors_of(f"{PREFIX}lm_head", 101), "lm_head.lora_A.weight', a layer"),
    "a copy of a base layer": (with_more(f"{Q}.base_layer.weight", 32, 32), "a copy of a base layer"),
    "a copy of the head": (with_more(f"{PREFIX}lm_head.base_layer.weight", 101, 32), "a copy of a base layer"),
    "a base layer by its own name": (with_more(f"{Q}.weight", 32, 32), "no factor of a LoRA layer"),
    "a norm": (with_more(f"{PREFIX}model.norm.weight", 32), "another form than a matrix"),
    "an embedding": (with_more(f"{PREFIX}model.embed_tokens.weight", 101, 32), "no factor of a LoRA layer"),
    "magnitudes without use_dora": (with_more(f"{Q}.lora_magnitude_vector", 1, 32), "which is DoRA"),
    "biases without lora_bias": (with_more(f"{Q}.lora_B.bias", 1, 32), "no factor of a LoRA layer"),
    "experts' parameters": (with_more(f"{PREFIX}model.layers.0.mlp.experts.lora_A.weight", 8, 32), "only one of A|no lin"),
    "only A": (lambda path: tensors(path, lambda saved: saved.pop(f"{Q}.lora_B.weight")), "only one of A and B"),
    "only B": (lambda path: tensors(path, lambda saved: saved.pop(f"{Q}.lora_A.weight")), "only one of A and B"),
    "half of the layers": (
        lambda path: tensors(path, lambda saved: {key: each for key, each in saved.items() if "layers.0" in key}),
        r"no tensors for 'model.layers.1.*\(2 of 4 layers are missing\)",
    ),
    "settings that name more layers": (
        lambda path: settings(path, target_modules=["q_proj", "v_proj", "o_proj"]), "no tensors for .*o_proj"
    ),
    "settings that name fewer layers": (lambda path: settings(path, target_modules=["q_proj"]), "v_proj.*do not name"),
    "settings that name no layer": (lambda path: settings(path, target_modules=["c_attn"]), "do not name"),
    "an empty list of layers": (lambda path: settings(path, target_modules=[]), "do not name"),
    "settings that leave layers out": (lambda path: settings(path, exclude_modules=["v_proj"]), "v_proj.*do not name"),
    "settings that leave layers out by a pattern": (
        lambda path: settings(path, exclude_modules=r".*\.1\..*"), "layers.1.*do not name"
    ),
    "settings of other layers": (lambda path: settings(path, layers_to_transform=[0]), "layers.1.*do not name"),
    "another rank": (lambda path: settings(path, r=4), "needs A and B of rank 4"),
    "another rank for one layer": (lambda path: settings(path, rank_pattern={"q_proj": 4}), "of rank 4"),
    "a transposed factor": (
        lambda path: tensors(path, lambda saved: saved.update({f"{Q}.lora_A.weight": torch.zeros(32, 8)})), "have the sh"
    ),
}  # fmt: skip
"""Files that no reader uses: what is done to a good adapter, and the words of the refusal."""

USED: dict[str, Callable[[Path], None]] = {
    "a good one": lambda path: None,
    "whole names": lambda path: settings(path, target_modules=[
        f"model.layers.{at}.self_attn.{each}_proj" for at in (0, 1) for each in "qv"
    ]),
    "a pattern": lambda path: settings(path, target_modules=r".*\.self_attn\.(q|v)_proj"),
    "a pattern that looks ahead": lambda path: settings(
        path, target_modules=r"^(?!.*(?:vision|lm_head)).*(?:self_attn|mlp).*?(?:q_proj|v_proj)$"
    ),
    "layers left out": lambda path: settings(
        path, target_modules=["q_proj", "v_proj", "k_proj"], exclude_modules=["k_proj"]
    ),
    "layers left out by a pattern": lambda path: settings(
        path, target_modules="all-linear", exclude_modules=r".*(?:k_proj|o_proj|mlp\..*)"
    ),
    "numbers of layers": lambda path: settings(path, layers_to_transform=[0, 1], layers_pattern="layers"),
    "one layer": both(
        lambda path: settings(path, layers_to_transform=1),
        lambda path: tensors(path, lambda saved: {key: each for key, each in saved.items() if "layers.1" in key}),
    ),
    "PEFT's default layers": lambda path: settings(path, target_modules=None),
    "alpha alone": lambda path: settings(path, lora_alpha=3),
    "half precision": lambda path: tensors(path, lambda saved: {key: each.half() for key, each in saved.items()}),
    "settings that are off": lambda path: settings(path, something_new=None, modules_to_save=None),
    "training's settings": lambda path: settings(path, lora_dropout=0.5, init_lora_weights="gaussian"),
}  # fmt: skip
"""Files that every reader uses as stock PEFT does."""


@pytest.mark.parametrize("case", REFUSED)
def test_a_file_that_is_not_used_whole_is_refused_everywhere(
    case: str, folder: Path, chat_client: TenantClient, remote: Any
) -> None:  # fmt: skip
    change, match = REFUSED[case]
    change(folder)
    said = generated(chat_client, folder), served(remote, folder)
    assert isinstance(said[0], str), "generate used it"
    assert said[0] == said[1]
    with pytest.raises(ConfigurationError, match=match):
        raise ConfigurationError(said[0])
    assert "\n" not in said[0]


@pytest.mark.parametrize("case", USED)
def test_a_file_that_is_used_whole_counts_as_in_stock_peft(
    case: str, folder: Path, chat_client: TenantClient, remote: Any, chat_folder: Path
) -> None:
    USED[case](folder)
    want = stock(chat_folder, folder)
    assert want is not None
    for got in (generated(chat_client, folder), served(remote, folder)):
        assert isinstance(got, torch.Tensor), got
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused_everywhere(
    value: float, folder: Path, chat_client: TenantClient, remote: Any
) -> None:
    tensors(folder, lambda saved: saved[f"{Q}.lora_A.weight"].view(-1)[3:4].fill_(value))
    for said in (generated(chat_client, folder), served(remote, folder)):
        assert isinstance(said, str)
        assert said.startswith("the adapter one holds NaN or infinite numbers")
