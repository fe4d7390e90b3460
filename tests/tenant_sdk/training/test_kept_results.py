"""Tests what is kept beside the provider's replies: results come back as they were, costly operations run once, and
what finds no room is computed again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tenant_sdk.model.remote_group import RemoteGroup
from tenant_sdk.model.run_state import NO_MODEL
from tenant_sdk.training.activation_checkpointing import KeptReplies, ReplyStore, bytes_per_row

ATTENTION, PRODUCT = "_scaled_dot_product_flash_attention_for_cpu", "mm"
TOKENS, WIDTH, RANK = 12, 32, 4
ROOM = TOKENS * (WIDTH + 4 + RANK) * 4
"""The bytes of attention's output and sums of four heads, and of one narrow product, for all tokens."""


class Counted(TorchDispatchMode):
    """Counts the operations inside its context by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


class Asked:
    """Stands in for an executor. A call makes a narrow product of its own, as masks and checks do, which must not be
    kept for the block."""

    def run(self, *_: Any) -> torch.Tensor:
        rows = torch.linspace(-1, 1, TOKENS * WIDTH).view(TOKENS, WIDTH)
        return rows + (rows @ torch.ones(WIDTH, 1))


GROUP = RemoteGroup(cast(Any, Asked()), cast(Any, SimpleNamespace(out_features=WIDTH)), [WIDTH], NO_MODEL)


def block(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """Computes attention over four heads and a layer with LoRA, in the shapes of transformers' code."""
    (base,) = GROUP.products(x, torch.float32)
    heads = x.view(1, TOKENS, 4, WIDTH // 4).transpose(1, 2)
    attended = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    flat = attended.transpose(1, 2).reshape(TOKENS, WIDTH)
    return (flat @ weights[0]) @ weights[1] * base


def gradients(folder: Path, extra_bytes: int | None, memory_bytes: int = 0) -> tuple[list[torch.Tensor], Counter[str]]:
    """Returns the gradients of two blocks, and the number of operations. With `extra_bytes` None, nothing is kept."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weights = [torch.randn(WIDTH, RANK, requires_grad=True), torch.randn(RANK, WIDTH, requires_grad=True)]
    store = ReplyStore(memory_bytes, folder)
    store.reserve(2 * TOKENS * WIDTH * 4, extra_bytes or 0)
    options = {} if extra_bytes is None else {"context_fn": KeptReplies(store, NO_MODEL).contexts}
    with Counted() as counted:
        y = checkpoint(block, x, weights, use_reentrant=False, **options)
        y = checkpoint(block, y, weights, use_reentrant=False, **options)
        y.square().sum().backward()
    store.close()
    return [x.grad, *(each.grad for each in weights)], counted.names


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20], ids=["disk", "memory"])
@pytest.mark.parametrize(("num_rooms", "num_again"), [(2, 0), (1, 1), (0, 2)])
def test_costly_operations_run_once_if_there_is_room(
    tmp_path: Path, num_rooms: int, num_again: int, memory_bytes: int
) -> None:
    want, plain = gradients(tmp_path, None)
    got, counted = gradients(tmp_path, num_rooms * ROOM, memory_bytes)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert plain[ATTENTION] == 4
    assert counted[ATTENTION] == 2 + num_again
    by_asking = 2  # two blocks ask twice; with a store they ask once
    assert plain[PRODUCT] - counted[PRODUCT] == by_asking + 2 - num_again


def test_layout_in_memory_comes_back(tmp_path: Path) -> None:
    """transformers transposes the output of attention. This copies nothing only if a kept output has the same layout in
    memory as the first one."""
    store, strides = ReplyStore(0, tmp_path), []
    store.reserve(0, ROOM)
    first, second = KeptReplies(store, NO_MODEL).contexts()
    x = torch.randn(1, TOKENS, 4, WIDTH // 4).transpose(1, 2)
    for context in (first, second):
        with context:
            found = functional.scaled_dot_product_attention(x, x, x)
        strides.append(found.stride())
    assert strides[0] == strides[1]
    assert not found.is_contiguous()
    store.close()


def test_bfloat16_trains_as_without_a_store(tmp_path: Path) -> None:
    """Autocast copies a weight in each run, and the copy may lie where the copy of another weight was before. So an
    address in memory does not tell which weight it is."""

    def trained(**options: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, RANK, bias=False) for _ in range(6)]

        def of_layers(x: torch.Tensor) -> torch.Tensor:
            for layer in layers:
                x = x + torch.tanh(layer(x)).repeat(1, WIDTH // RANK)
            return x

        x = torch.randn(TOKENS, WIDTH, requires_grad=True)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                y = checkpoint(
                    of_layers, checkpoint(of_layers, x, use_reentrant=False, **options), use_reentrant=False, **options
                )
            y.float().square().sum().backward()
        return [layer.weight.grad for layer in layers]

    store = ReplyStore(1 << 20, tmp_path)
    store.reserve(0, 1 << 20)
    got, want = trained(context_fn=KeptReplies(store, NO_MODEL).contexts), trained()
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    store.close()


def test_bytes_per_row_are_what_a_step_keeps(chat_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.parity import adapted
    from tests.support.training import QUICK, ROWS, lora

    kept: Counter[bool] = Counter()
    keep_extra = ReplyStore.keep_extra

    def note(self: ReplyStore, tensor: torch.Tensor) -> Any:
        found = keep_extra(self, tensor)
        kept[found is not None] += tensor.numel() * tensor.element_size()
        return found

    monkeypatch.setattr(ReplyStore, "keep_extra", note)
    options = {**QUICK, "max_steps": 1, "checkpointing": "replies", "memory_budget_mb": 0}
    result = chat_client.finetune(ROWS[:1], lora(), tmp_path / "out", **{**options, "batch_size": 1})
    expected = bytes_per_row(adapted(chat_client.load_model(), lora()).get_base_model())
    assert kept[False] == 0
    assert 0.9 * expected < kept[True] / result.tokens <= expected
