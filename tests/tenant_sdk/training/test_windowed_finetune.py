"""Tests fine-tuning through a provider in windows (pieces of a batch's tokens): gradients and losses are those without
windows, and the calls depend on shapes alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig
from transformers import JambaConfig, MixtralConfig
from typer.testing import CliRunner

from attacks.programs.overflow import Fault
from tenant_sdk import TenantClient, cli
from tenant_sdk.model.run_state import NotFiniteWarning
from tenant_sdk.testing import character_tokenizer
from tenant_sdk.training.windows import Windows
from tests.support.false_providers import HONEST, Opened
from tests.support.lattice import TOY_OPTIONS
from tests.support.parity import adapted, relative
from tests.support.spies import before_requests
from tests.support.tiny_models import (
    NUM_TOKENS,
    SIZES,
    VOCAB,
    WINDOWED_CONFIGS,
    gradients_of,
    padded_batch,
    save_random,
    whole_gradients,
)
from tests.support.training import QUICK, ROWS, lora
from wire.errors import ConfigurationError, NotFinite
from wire.frame import Direction

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
SHORT = {**QUICK, "max_steps": 3}
TEXTS = [{"text": text} for text in ("abc def", "a longer line of text, and longer still", "owl", "Port Hale")]
Sent = list[tuple[str, Direction, int]]


@pytest.fixture(scope="module", params=WINDOWED_CONFIGS)
def kind_and_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Provides a kind of model, and the folder of a random model of this kind."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    save_random(WINDOWED_CONFIGS[request.param], folder)
    character_tokenizer().save_pretrained(folder)
    return request.param, folder


def client_of(folder: Path, **options: Any) -> TenantClient:
    cache = folder.with_name("cache")
    return TenantClient(f"inproc:{folder}", progress=False, cache=cache, **{"mask": "off", **options})


def adapter(kind: str) -> Any:
    return lora(fan_in_fan_out=kind == "gpt2")


def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def test_gradients_in_float(kind_and_folder: tuple[str, Path]) -> None:
    kind, folder = kind_and_folder
    with client_of(folder, weights="native", arithmetic="float") as client:
        model = adapted(client.load_model(), adapter(kind)).train()
        loss, want = whole_gradients(model, padded_batch())
        model.zero_grad()
        assert float(Windows(model, 8).backward(padded_batch())) == pytest.approx(loss, rel=1e-6)
        got = gradients_of(model)
        assert got.keys() == want.keys()
        for name, gradient in want.items():
            assert relative(got[name], gradient) < 1e-5, name


def test_gradients_in_ring(kind_and_folder: tuple[str, Path]) -> None:
    """With windows, a number may be rounded to the other neighbour. The gradients differ by no more than those of a
    whole batch do if the embeddings change by 1e-7, which also changes some roundings."""
    kind, folder = kind_and_folder
    with client_of(folder) as client:
        model = adapted(client.load_model(), adapter(kind)).train()
        want, moved = flat(whole_gradients(model, padded_batch())[1]), []
        weight = model.get_input_embeddings().weight
        kept = weight.detach().clone()
        for seed in range(2):
            by = 1e-7 * torch.randn(kept.shape, generator=torch.Generator().manual_seed(seed))
            weight.data.copy_(kept + by)
            moved.append(relative(flat(whole_gradients(model, padded_batch())[1]), want))
        weight.data.copy_(kept)
        model.zero_grad()
        Windows(model, 8).backward(padded_batch())
        assert relative(flat(gradients_of(model)), want) < max(moved)


def test_gradients_under_lattice(chat_folder: Path) -> None:
    """The mask's error is fresh in each pass, so even two passes over the whole batch differ. The gradients of windows
    differ from these by at most twice as much."""
    options = {**TOY_OPTIONS, "hints": "stream", "background": False}
    with client_of(chat_folder, mask="lattice", mask_options=options) as client:
        model = adapted(client.load_model(), lora()).train()
        want, again, other = (flat(whole_gradients(model, padded_batch())[1]) for _ in range(3))
        model.zero_grad()
        Windows(model, 16).backward(padded_batch())
        apart = max(relative(again, want), relative(other, want), relative(again, other))
        assert relative(flat(gradients_of(model)), want) < 2 * apart


@pytest.mark.parametrize(
    ("data", "changes"),
    [(ROWS, {}), (TEXTS, {"batch_size": 3, "gradient_accumulation_steps": 2})],
    ids=["plain", "accumulated"],
)
def test_a_run_has_the_losses_of_one_without_windows(
    chat_client: Any, tmp_path: Path, data: Any, changes: dict[str, Any]
) -> None:
    whole = chat_client.finetune(data, lora(), tmp_path / "whole", **SHORT | changes)
    result = chat_client.finetune(data, lora(), tmp_path / "out", window_tokens=24, **SHORT | changes)
    assert result.losses == pytest.approx(whole.losses, rel=1e-4)
    assert result.tokens == whole.tokens
    assert len(set(whole.losses)) == 3
    assert result.bytes_up > whole.bytes_up


@pytest.mark.parametrize("budget_mb", [0, 100], ids=["disk", "memory"])
def test_replies_that_are_kept_make_the_calls_of_whole_batches(
    chat_client: Any, tmp_path: Path, sent: Sent, budget_mb: int
) -> None:
    whole = chat_client.finetune(ROWS, lora(), tmp_path / "whole", **SHORT)
    want = rows_by_group(sent)
    sent.clear()
    result = chat_client.finetune(
        ROWS, lora(), tmp_path / "out", window_tokens=24, checkpointing="replies", memory_budget_mb=budget_mb, **SHORT
    )
    assert result.losses == pytest.approx(whole.losses, rel=1e-4)
    assert max(num_rows for _, _, num_rows in sent) == 24
    assert rows_by_group(sent) == want


def test_recomputed_blocks(chat_client: Any, tmp_path: Path) -> None:
    whole = chat_client.finetune(ROWS, lora(), tmp_path / "whole", **SHORT)
    result = chat_client.finetune(ROWS, lora(), tmp_path / "out", window_tokens=24, checkpointing="recompute", **SHORT)
    assert result.losses == pytest.approx(whole.losses, rel=1e-4)


PREFIX = PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")


@pytest.mark.parametrize("mode", ["replies", "recompute"])
@pytest.mark.parametrize("window_tokens", [None, 24])
def test_prefix_tuning_with_checkpointing(
    chat_client: Any, tmp_path: Path, sent: Sent, mode: str, window_tokens: int | None
) -> None:
    """A checkpointed block of transformers drops its cache, and with it the prefix; here the prefix stays."""
    whole = chat_client.finetune(ROWS, PREFIX, tmp_path / "whole", checkpointing=None, **SHORT)
    want = rows_by_group(sent)
    sent.clear()
    result = chat_client.finetune(
        ROWS, PREFIX, tmp_path / "out", checkpointing=mode, window_tokens=window_tokens, **SHORT
    )
    assert result.losses == pytest.approx(whole.losses, rel=1e-4)
    assert len(set(whole.losses)) == 3
    got = rows_by_group(sent)
    for name, direction in want:
        if "lm_head" not in name and mode == "replies":
            assert got[name, direction] == want[name, direction]
    assert mode == "replies" or sum(got.values()) > 1.2 * sum(want.values())


def test_a_budget_of_memory_needs_replies(chat_client: Any, tmp_path: Path, sent: Sent) -> None:
    with pytest.raises(ConfigurationError, match="checkpointing='replies'") as failure:
        chat_client.finetune(ROWS, lora(), tmp_path / "out", window_tokens=24, memory_budget_mb=100, **SHORT)
    assert "\n" not in str(failure.value)
    assert sent == []


def test_a_run_over_a_context_of_one_window_sends_what_a_whole_one_sends(chat_client: Any, tmp_path: Path) -> None:
    whole = chat_client.finetune(ROWS, lora(), tmp_path / "whole", **SHORT)
    result = chat_client.finetune(ROWS, lora(), tmp_path / "out", window_tokens=4 * 128, **SHORT)
    assert result.losses == pytest.approx(whole.losses, rel=1e-6)
    assert (result.bytes_up, result.bytes_down) == (whole.bytes_up, whole.bytes_down)


@pytest.fixture
def sent(chat_client: Any, monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Returns a list to which each request to the provider is added: (layer group, direction, number of rows)."""
    requests: Sent = []
    names = {group.id: group.name for group in chat_client.connect().groups}
    before_requests(monkeypatch, lambda call, rows: requests.append((names[call.group], call.direction, rows.num_rows)))
    return requests


@pytest.fixture
def model(chat_client: Any) -> Any:
    """Provides the chat model with an adapter on every layer; its head is at the provider."""
    return adapted(chat_client.load_model(), lora()).train()


def test_traffic_is_counted(model: Any, sent: Sent) -> None:
    """Each window except the last makes the forward calls twice. The output head gets as many rows as without
    windows."""
    whole_gradients(model, padded_batch())
    whole = rows_by_group(sent)
    sent.clear()
    Windows(model, 16).backward(padded_batch())
    assert max(rows for _, _, rows in sent) == 16
    got = rows_by_group(sent)
    assert got.keys() == whole.keys()
    attended = padded_batch()["attention_mask"]
    for name, direction in whole:
        again = int(attended[:, :16].sum()) if direction is FORWARD and "lm_head" not in name else 0
        assert got[name, direction] == whole[name, direction] + again, name
    assert whole["model.layers.0.mlp.down_proj", FORWARD] == int(attended.sum()) < 2 * NUM_TOKENS


def rows_by_group(sent: Sent) -> Counter[tuple[str, Direction]]:
    counted: Counter[tuple[str, Direction]] = Counter()
    for name, direction, num_rows in sent:
        counted[name, direction] += num_rows
    return counted


def labelled_at(positions: list[int]) -> dict[str, torch.Tensor]:
    """Returns a batch of one row that has labels at these positions only."""
    ids = torch.randint(3, VOCAB, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(sum(positions)))
    labels = torch.full_like(ids, -100)
    labels[:, positions] = ids[:, positions]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@pytest.mark.parametrize("every_position", [False, True])
def test_requests_do_not_show_where_labels_are(model: Any, sent: Sent, every_position: bool) -> None:
    """The requests are the same wherever the labels are in the row, so a window without labels makes the same calls as
    one with labels."""
    places = [[1, 2, 3], [10, 11, 12], [20, 21, 22], [2, 11, 22]]
    if every_position:
        places += [[], [5], list(range(NUM_TOKENS))]
    windows, seen = Windows(model, 5), []
    for positions in places:
        sent.clear()
        windows.backward(labelled_at(positions), every_position=every_position)
        seen.append(list(sent))
    assert all(each == seen[0] for each in seen)
    num_backward = Counter(name for name, direction, _ in seen[0] if direction is BACKWARD and "lm_head" not in name)
    assert set(num_backward.values()) == {5}, "each layer is called backward for each of five windows"


def test_padded_rows_hide_lengths(chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[tuple[int, Direction, int]] = []
    before_requests(monkeypatch, lambda call, rows: requests.append((call.group, call.direction, rows.num_rows)))
    seen = []
    with client_of(chat_folder, pad_rows=32) as client:
        for number, text in enumerate(("a", "a much longer row of text")):
            requests.clear()
            client.finetune(
                [{"text": text}], lora(), tmp_path / str(number), window_tokens=12, **QUICK | {"max_steps": 1}
            )
            seen.append(list(requests))
    assert seen[0] == seen[1]
    assert {rows for _, _, rows in seen[0]} == {12, 8}


def test_a_value_that_is_not_finite_changes_no_call(opened: Opened, tmp_path: Path) -> None:
    options = {**QUICK, "max_steps": 2, "window_tokens": 24}
    client, provider = opened(HONEST)
    client.finetune(ROWS, lora(r=2), tmp_path / "honest", **options)
    expected = provider.seen
    client, provider = opened(Fault(BACKWARD, math.nan, len(expected) // 8))
    with pytest.warns(NotFiniteWarning), pytest.raises(NotFinite, match="nothing came of this run"):
        client.finetune(ROWS, lora(r=2), tmp_path / "out", **options)
    assert provider.seen == expected
    assert not (tmp_path / "out").exists()


def test_the_commands_option(chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[int] = []
    before_requests(monkeypatch, lambda call, rows: requests.append(rows.num_rows))
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "a row of text"}))
    command = ["finetune", str(tmp_path / "data.jsonl"), "--output", str(tmp_path / "out"), "--mask", "off"]
    command += ["--url", f"inproc:{chat_folder}", "--batch-size", "1", "--max-steps", "1", "--overwrite"]
    command += ["--window-tokens"]
    for window_tokens, code in (("4", 0), ("129", 1)):
        result = CliRunner().invoke(cli.app, [*command, window_tokens])
        assert bool(result.exit_code) is bool(code), result.output
    assert set(requests) == {4, 2, 1}, "14 tokens with their end, 13 labels at the provider's head"
    assert "expected 1 to 128, got 129" in str(result.exception)


@pytest.mark.parametrize("window_tokens", [0, -1, 3, 4 * 128 + 1])
def test_windows_that_cannot_be(chat_client: Any, tmp_path: Path, window_tokens: int, sent: Sent) -> None:
    """A window must have at least one token of each of the batch's 4 rows, and at most 128 of each, which is the
    model's context. Any other size is refused before anything is sent."""
    with pytest.raises(ConfigurationError, match="window_tokens") as failure:
        chat_client.finetune(ROWS, lora(), tmp_path / "out", window_tokens=window_tokens, **QUICK)
    assert "\n" not in str(failure.value)
    assert list(tmp_path.iterdir()) == []
    assert sent == []


def test_a_model_with_another_loss_trains_on_it(tmp_path: Path) -> None:
    config = MixtralConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=100.0
    )
    save_random(config, tmp_path / "mixtral")
    character_tokenizer().save_pretrained(tmp_path / "mixtral")
    options = {**QUICK, "max_steps": 1}
    with client_of(tmp_path / "mixtral") as client:
        adapter = lora(target_modules=["q_proj"])
        assert client.finetune(ROWS, adapter, tmp_path / "out", **options).losses[0] > 100
        with pytest.raises(ConfigurationError, match="its loss is more than the cross entropy of tokens"):
            client.finetune(ROWS, adapter, tmp_path / "windows", window_tokens=16, **options)


def test_a_model_that_cannot_be_cut_is_refused_before_rows_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = JambaConfig(
        **SIZES, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, num_experts=2,
        num_experts_per_tok=2,
    )  # fmt: skip
    save_random(config, tmp_path / "jamba")
    character_tokenizer().save_pretrained(tmp_path / "jamba")
    requests: list[int] = []
    before_requests(monkeypatch, lambda call, rows: requests.append(call.group))
    with (
        client_of(tmp_path / "jamba", weights="native", arithmetic="float") as client,
        pytest.raises(ConfigurationError, match=r"^window_tokens is not possible with jamba: its layers keep other"),
    ):
        client.finetune(ROWS, lora(target_modules=["q_proj"]), tmp_path / "out", window_tokens=32, **QUICK)
    assert requests == []
    assert not (tmp_path / "out").exists()
