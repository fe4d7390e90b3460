"""Tests a loss that is computed in chunks of rows: its value and gradients are those of the model's own loss. Also
tests which rows a head at the provider gets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.nn import functional
from transformers import CohereConfig, GraniteConfig, MambaConfig, OPTConfig, Trainer, TrainingArguments

from tenant_sdk import TenantClient
from tenant_sdk.training import loss as loss_module
from tenant_sdk.training.loss import chunk_loss, chunked_cross_entropy
from tests.support.spies import before_requests
from tests.support.tiny_models import CONFIGS, SIZES, VOCAB, make_model, open_client, save_random
from wire.errors import ConfigurationError
from wire.frame import Direction

CLOSE = 2e-6
"""The largest relative distance of two results that add the same numbers in different order."""
OTHERS: dict[str, Any] = {
    "cohere": CohereConfig(**SIZES, initializer_range=0.2, logit_scale=0.3),
    "granite": GraniteConfig(**SIZES, initializer_range=0.2, logits_scaling=3.0),
    "opt": OPTConfig(
        vocab_size=VOCAB, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, dropout=0.0,
        word_embed_proj_dim=32, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
    "mamba": MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=0),
}  # fmt: skip
"""Configs of models that scale their logits, compute the head from a projection, or take no argument
`logits_to_keep`."""


@pytest.fixture(scope="module", params=[*CONFIGS, *OTHERS])
def kind_and_client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yields a kind of tiny model, and a client of such a model with float arithmetic."""
    kind: str = request.param
    folder = tmp_path_factory.mktemp(kind) / "model"
    if kind in CONFIGS:
        make_model(kind, folder)
    else:
        save_random(OTHERS[kind], folder)
    with open_client(folder) as client:
        yield kind, client


def labelled_batch(rows: int = 3, length: int = 12) -> dict[str, torch.Tensor]:
    """Returns a batch of rows that differ in length. Part of each row has labels, but the last row has none."""
    torch.manual_seed(5)
    ids = torch.randint(3, VOCAB, (rows, length))
    attention, labels = torch.ones_like(ids), ids.clone()
    for row in range(rows):
        attention[row, length - row :], labels[row, length - row :] = 0, -100
        labels[row, : 3 + row] = -100
    labels[-1] = -100
    return {"input_ids": ids, "attention_mask": attention, "labels": labels}


def adapted(client: TenantClient, kind: str, **changes: Any) -> Any:
    torch.manual_seed(3)
    targets: Any = ["in_proj", "x_proj"] if kind == "mamba" else "all-linear"
    options: dict[str, Any] = {"target_modules": targets, "fan_in_fan_out": kind == "gpt2", "r": 4, **changes}
    model = get_peft_model(client.load_model(), LoraConfig(**options, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    return model.train()


def loss_and_gradients(model: Any, **batch: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: tuple[float, dict[str, torch.Tensor]], want: tuple[float, dict[str, torch.Tensor]]) -> None:
    assert got[0] == pytest.approx(want[0], rel=CLOSE)
    assert got[1].keys() == want[1].keys()
    assert len(want[1]) >= 2
    # Where a gradient is a small difference of large terms, as in OPT's query projections, the terms' rounding shows.
    least = 1e-3 * max(float(gradient.norm()) for gradient in want[1].values())
    for name, gradient in want[1].items():
        assert float((got[1][name] - gradient).norm()) <= 5 * CLOSE * max(float(gradient.norm()), least), name


@pytest.mark.parametrize("chunk_rows", [1, 4, 1000])
def test_loss_and_gradients_are_the_models_own(
    kind_and_client: Any, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, client = kind_and_client
    for name in ("LOCAL_CHUNK_BYTES", "REMOTE_CHUNK_BYTES"):
        monkeypatch.setattr(loss_module, name, chunk_rows * 4 * VOCAB)
    model, batch = adapted(client, kind), labelled_batch()
    want = [loss_and_gradients(model, **batch), loss_and_gradients(model, **batch, num_items_in_batch=40)]
    assert chunk_loss(model), "this kind's loss can be computed in chunks"
    got = [loss_and_gradients(model, **batch), loss_and_gradients(model, **batch, num_items_in_batch=40)]
    for ours, theirs in zip(got, want, strict=True):
        if kind in ("opt", "mamba") and theirs is want[1]:
            continue  # their own loss ignores the number
        assert_same(ours, theirs)


def test_a_trained_head_and_tied_embeddings_get_their_gradients(tmp_path: Path) -> None:
    """The gradients equal those of the model's own loss. The cases are an adapter on the head, embeddings that are tied
    to the head and trained, and a few trained tokens of tied embeddings."""
    for kind, changes in (
        ("llama", {"target_modules": ["q_proj", "lm_head"]}),
        ("qwen2", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
        ("qwen2", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6, 7]}),
    ):
        folder = make_model(kind, tmp_path / f"{kind}{len(changes)}{len(str(changes))}")
        with open_client(folder) as client:
            model, batch = adapted(client, kind, **changes), labelled_batch()
            want = loss_and_gradients(model, **batch)
            assert chunk_loss(model)
            assert_same(loss_and_gradients(model, **batch), want)


def sent_to_the_head(client: TenantClient, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Direction, int]]:
    head = next(group.id for group in client.connect().groups if group.name.endswith("lm_head"))
    seen: list[tuple[Direction, int]] = []

    def spy(call: Any, payload: Any) -> None:
        if call.group == head:
            seen.append((call.direction, call.num_rows if hasattr(call, "num_rows") else payload.num_rows))

    before_requests(monkeypatch, spy)
    return seen


@pytest.mark.parametrize("every_position", [False, True])
def test_a_remote_head_gets_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_position: bool
) -> None:
    """If one chunk holds all rows, there is one call in each direction. With smaller chunks there are more calls but as
    many rows. With `every_position`, the calls do not depend on the labels."""
    with open_client(make_model("llama", tmp_path / "llama")) as client:
        model, batch = adapted(client, "llama"), labelled_batch()
        seen = sent_to_the_head(client, monkeypatch)
        assert chunk_loss(model, every_position=every_position)
        loss_and_gradients(model, **batch)
        num_rows = 3 * 12  # without `every_position`: positions 2 to 10 predict labels, and one of them is padding
        if not every_position:
            num_rows = int(batch["attention_mask"][:, 2:11].sum())
        assert seen == [(Direction.FORWARD, num_rows), (Direction.BACKWARD, num_rows)]
        seen.clear()
        monkeypatch.setattr(loss_module, "REMOTE_CHUNK_BYTES", 10 * 4 * VOCAB)
        loss_and_gradients(model, **batch)
        for direction in Direction:
            assert sum(rows for way, rows in seen if way is direction) == num_rows
        few = {**batch, "labels": torch.where(torch.arange(12) == 4, batch["labels"], -100)}
        calls = list(seen)
        seen.clear()
        loss_and_gradients(model, **few)
        assert (seen == calls) is every_position


def test_what_is_not_training_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_client(make_model("llama", tmp_path / "llama")) as client:
        model, batch = client.load_model(), labelled_batch()
        before = model(**batch)
        assert chunk_loss(model)
        trained = model(**batch)
        assert trained.logits.shape == (3, 0, VOCAB)
        assert trained.loss.item() == pytest.approx(before.loss.item(), rel=CLOSE)
        with torch.no_grad():
            assert torch.equal(model(**batch).logits, before.logits)
        batch.pop("labels")
        attended = batch["attention_mask"] == 1  # padding is not sent where labels are given
        assert torch.equal(model(**batch).logits[attended], before.logits[attended])


def test_finding_out_about_a_model_asks_the_provider_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_client(make_model("gemma2", tmp_path / "gemma2")) as client:
        model = client.load_model()
        state = torch.get_rng_state()
        before_requests(monkeypatch, lambda call, payload: pytest.fail("a request was made"))
        assert chunk_loss(model)
        assert torch.equal(torch.get_rng_state(), state)
        assert not any(module.training for module in model.modules())


def test_logits_that_are_something_else_keep_the_models_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_client(make_model("llama", tmp_path / "llama")) as client:
        model, batch = client.load_model(), labelled_batch()
        stock = model.forward

        def squared(*args: Any, **options: Any) -> Any:
            outputs = stock(*args, **options)
            outputs.logits = outputs.logits.pow(2)
            return outputs

        model.forward = squared
        assert not chunk_loss(model)
        assert model.forward is squared
        assert model(**batch).logits.shape == (3, 12, VOCAB)
        with pytest.raises(ConfigurationError, match="a causal model with a head"):
            chunk_loss(model.model.norm)


def test_stock_trainer(tmp_path: Path) -> None:
    rows = [{key: value[0] for key, value in labelled_batch(2, 8 + number).items()} for number in range(4)]
    losses = []
    with open_client(make_model("llama", tmp_path / "llama")) as client:
        for chunked in (False, True):
            model = adapted(client, "llama")
            if chunked:
                assert chunk_loss(model)
            arguments = TrainingArguments(
                output_dir=str(tmp_path / "out"), max_steps=4, per_device_train_batch_size=1, logging_steps=1,
                gradient_accumulation_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True, disable_tqdm=True,
                save_strategy="no", eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=1,
                remove_unused_columns=True, dataloader_pin_memory=False,
            )  # fmt: skip
            trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:1])
            trainer.train()
            history = [entry.get("loss", entry.get("eval_loss")) for entry in trainer.state.log_history]
            losses.append([loss for loss in history if loss is not None])
    assert len(losses[0]) == 6
    assert len(set(losses[0])) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_prompt_tuning(tmp_path: Path) -> None:
    with open_client(make_model("llama", tmp_path / "llama")) as client:
        torch.manual_seed(3)
        config = PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")
        model, batch = get_peft_model(client.load_model(), config), labelled_batch()
        loss = model(**batch).loss
        loss.backward()
        want = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        assert chunk_loss(model, every_position=True)
        ours = model(**batch).loss
        ours.backward()
        got = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert ours.item() == pytest.approx(loss.item(), rel=CLOSE)
        assert len(got) == len(want) == 1
        assert float((got[0] - want[0]).norm() / want[0].norm()) < 1e-5


def test_no_label_is_a_loss_of_zero_with_a_graph() -> None:
    weight, rows = torch.randn(7, 4), torch.randn(5, 4, requires_grad=True)
    loss = chunked_cross_entropy(lambda x: x @ weight.T, rows, torch.full((5,), -100), 0)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(rows.grad, torch.zeros(5, 4))
    empty = chunked_cross_entropy(lambda x: x @ weight.T, rows[:0], torch.empty(0, dtype=torch.int64), 0)
    empty.backward()


def test_no_gradient_is_taken_for_rows_that_need_none() -> None:
    weight, rows, targets = torch.randn(7, 4, requires_grad=True), torch.randn(5, 4), torch.arange(5)
    chunked_cross_entropy(lambda x: x @ weight.T, rows, targets, 5, chunk_bytes=60).backward()
    got, weight.grad = weight.grad, None
    functional.cross_entropy(rows @ weight.T, targets).backward()
    torch.testing.assert_close(got, weight.grad, rtol=1e-5, atol=1e-7)
    assert rows.grad is None
