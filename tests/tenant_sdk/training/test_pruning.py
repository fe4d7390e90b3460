"""Tests the pruning of autograd's graph: gradients are the same bit for bit, less memory is kept for the backward pass,
and other uses of the model are not changed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LNTuningConfig, LoraConfig, PrefixTuningConfig, get_peft_model
from torch.autograd.graph import saved_tensors_hooks
from transformers import OPTConfig

from tenant_sdk import TenantClient
from tenant_sdk.training import pruning
from tenant_sdk.training.pruning import apply_bits, bits_of, keep_bits, prune
from tests.support.tiny_models import CONFIGS, VOCAB, make_model, open_client, save_random

OPT = OPTConfig(
    vocab_size=VOCAB, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, dropout=0.0,
    word_embed_proj_dim=32, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


@pytest.fixture(scope="module", params=[*CONFIGS, "opt"])
def kind_and_client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yields a kind of tiny model, and a client of such a model with float arithmetic."""
    kind: str = request.param
    folder = tmp_path_factory.mktemp(kind) / "model"
    make_model(kind, folder) if kind in CONFIGS else save_random(OPT, folder)
    with open_client(folder) as client:
        yield kind, client


def lora(kind: str, **changes: Any) -> LoraConfig:
    options: dict[str, Any] = {"target_modules": "all-linear", "fan_in_fan_out": kind == "gpt2", "r": 4, **changes}
    return LoraConfig(**options, task_type="CAUSAL_LM")


def adapted(client: TenantClient, config: Any) -> Any:
    torch.manual_seed(3)
    model = get_peft_model(client.load_model(), config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.05)
    return model


def step(model: Any, seed: int = 1) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (2, 16), generator=torch.Generator().manual_seed(7))
    attention = torch.ones_like(ids)
    attention[1, 10:] = 0
    torch.manual_seed(seed)
    loss = model(input_ids=ids, attention_mask=attention, labels=ids).loss
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return {**found, "loss": loss.detach()}


def assert_same_bits(client: TenantClient, config: Callable[[], Any]) -> None:
    plain, pruned = adapted(client, config()), adapted(client, config())
    prune(pruned)
    for seed in (1, 2):
        want, got = step(plain, seed), step(pruned, seed)
        assert got.keys() == want.keys()
        assert len(want) >= 2
        for name, gradient in want.items():
            assert torch.equal(got[name], gradient), name
            assert bool(gradient.any()), name
        assert not torch.equal(want["loss"], torch.zeros(()))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradients_are_the_same_bit_for_bit(kind_and_client: Any, dropout: float) -> None:
    kind, client = kind_and_client
    assert_same_bits(client, lambda: lora(kind, lora_dropout=dropout))


OTHER_CONFIGS: dict[str, Callable[[], Any]] = {
    "norms that are trained": lambda: LNTuningConfig(task_type="CAUSAL_LM"),
    "norms saved whole": lambda: lora("llama", target_modules=["q_proj"], modules_to_save=["norm", "q_norm"]),
    "inputs that are rescaled": lambda: IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
    "a cache of prefixes": lambda: PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "one layer of one block": lambda: lora("llama", target_modules=["up_proj"], layers_to_transform=[1]),
}


@pytest.mark.parametrize("name", OTHER_CONFIGS)
def test_other_adapters(name: str, tmp_path: Path) -> None:
    with open_client(make_model("qwen3", tmp_path / "qwen3")) as client:
        assert_same_bits(client, OTHER_CONFIGS[name])


def test_bfloat16_activations_under_float32_adapters(tmp_path: Path) -> None:
    with open_client(make_model("llama", tmp_path / "llama"), dtype=torch.bfloat16) as client:
        assert_same_bits(client, lambda: lora("llama", lora_dropout=0.1))


def kept_bytes(model: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """Returns the number of bytes that one forward pass keeps for its backward pass. Each storage counts once, and the
    model's own tensors do not count."""
    storages: dict[int, tuple[int, torch.Tensor]] = {}
    own = {each.untyped_storage().data_ptr() for each in [*model.parameters(), *model.buffers()]}

    def count(packed: Any) -> None:
        kept = packed[0] if isinstance(packed, tuple) else packed
        for each in getattr(kept, "inputs", ()):
            count(each)
        if isinstance(kept, torch.Tensor) and kept.untyped_storage().data_ptr() not in own:
            storages[kept.untyped_storage().data_ptr()] = kept.untyped_storage().nbytes(), kept

    def hooks(pack: Any, unpack: Any) -> Any:
        def note(tensor: torch.Tensor) -> Any:
            packed = pack(tensor)
            count(packed)
            return packed

        return saved_tensors_hooks(note, unpack)

    ids = torch.randint(3, VOCAB, (2, 64), generator=torch.Generator().manual_seed(7))
    monkeypatch.setattr(pruning, "saved_tensors_hooks", hooks)
    with hooks(lambda tensor: tensor, lambda packed: packed):
        loss = model(input_ids=ids).logits.sum()
    assert loss.requires_grad
    return sum(size for size, _ in storages.values())


@pytest.mark.parametrize(
    ("kind", "options", "most"),
    [
        ("llama", {}, 0.7), ("llama", {"lora_dropout": 0.1}, 0.45), ("qwen3", {}, 0.8), ("gemma2", {}, 0.9),
        ("gpt2", {}, 0.7), ("opt", {}, 0.95),
    ],
)  # fmt: skip
def test_less_is_kept(
    kind: str, options: dict[str, Any], most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / kind
    make_model(kind, folder) if kind in CONFIGS else save_random(OPT, folder)
    with open_client(folder) as client:
        model = adapted(client, lora(kind, **options))
        plain = kept_bytes(model, monkeypatch)
        prune(model)
        part = kept_bytes(model, monkeypatch) / plain
    assert 0.2 < part < most


def test_nothing_is_held_after_a_step(tmp_path: Path) -> None:
    """After each step there are as many tensors as before it, so neither the forward nor the backward pass leaves any
    behind."""
    with open_client(make_model("llama", tmp_path / "llama")) as client:
        model = adapted(client, lora("llama", lora_dropout=0.1))
        prune(model)
        step(model)
        gc.collect()
        before = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
        for seed in (3, 4, 5):
            step(model, seed)
        gc.collect()
        assert sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()) == before


def test_a_change_in_place_is_an_error(tmp_path: Path) -> None:
    with open_client(make_model("llama", tmp_path / "llama")) as client:
        model = adapted(client, lora("llama"))
        prune(model)
        inputs: list[torch.Tensor] = []
        block = model.get_base_model().model.layers[1]
        block.post_attention_layernorm.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
        ids = torch.randint(3, VOCAB, (1, 8))
        loss = model(input_ids=ids, labels=ids).loss
        with torch.no_grad():
            inputs[0].add_(1)
        with pytest.raises(RuntimeError, match="changed in place"):
            loss.backward()


def test_sparse_tensors_are_kept_as_usual(tmp_path: Path) -> None:
    """A sparse tensor, which some adapters multiply by, has no address in memory by which it could be recognised."""
    with open_client(make_model("llama", tmp_path / "llama")) as client:
        model, eye = adapted(client, lora("llama")), torch.eye(8).to_sparse()
        model.get_base_model().model.norm.register_forward_hook(lambda *args: torch.sparse.mm(eye, args[2][0])[None])
        prune(model)
        ids = torch.randint(3, VOCAB, (1, 8))
        model(input_ids=ids, labels=ids).loss.backward()
        assert any(each.grad is not None and each.grad.norm() > 0 for each in model.parameters())


def test_without_gradients_nothing_changes(tmp_path: Path) -> None:
    with open_client(make_model("llama", tmp_path / "llama")) as client:
        model, ids = adapted(client, lora("llama")).eval(), torch.randint(3, VOCAB, (2, 8))
        with torch.no_grad():
            want = model(input_ids=ids).logits
            prune(model)
            assert torch.equal(model(input_ids=ids).logits, want)


def test_bits() -> None:
    for shape in ((0,), (1,), (8,), (3, 5, 7), (2, 64)):
        flags = torch.rand(shape) < 0.5
        bits = bits_of(flags)
        assert bits.dtype is torch.uint8
        assert bits.numel() == -(-flags.numel() // 8)
        x = torch.randn(shape)
        assert torch.equal(apply_bits(x, bits, None), x * flags)
        assert torch.equal(apply_bits(x, bits, 0.7), x * (flags.float() / 0.7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_drawn_as_torch_draws_them(dtype: torch.dtype) -> None:
    x = torch.randn(5, 77).to(dtype).requires_grad_()
    torch.manual_seed(4)
    want = torch.nn.functional.dropout(x, 0.3)
    torch.manual_seed(4)
    assert torch.equal(apply_bits(x, keep_bits(x, 0.3), 0.7), want)
