"""Tests that padding is not sent, and that nothing else changes: losses, gradients and tokens are the same to the last
bit, for every way to train or generate over a remote base."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import Lfm2Config, Trainer, TrainingArguments

from tenant_sdk.client import TenantClient
from tenant_sdk.model.padding import Padding
from tenant_sdk.model.run_state import run_states
from tenant_sdk.testing import ScriptedProvider
from tests.support.tiny_models import WINDOWED_CONFIGS, make_model, save_random

LENGTHS = (3, 11, 7)
LONGEST, TOKENS = max(LENGTHS), sum(LENGTHS)
PAD = 2
"""The padding token, which is the end marker: the embedding of token 0 would be zero."""
LORA: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
RING: dict[str, Any] = {"verify": False, "mask": "off", "progress": False}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def padded(side: str = "right") -> dict[str, torch.Tensor]:
    """Returns a batch of rows of `LENGTHS` tokens, with labels on all tokens but the padding."""
    mask = torch.zeros(len(LENGTHS), LONGEST, dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        mask[row, slice(length) if side == "right" else slice(LONGEST - length, None)] = 1
    ids = torch.randint(6, 90, mask.shape, generator=torch.Generator().manual_seed(1)).masked_fill(mask == 0, PAD)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {kind: make_model(kind, tmp_path_factory.mktemp(kind)) for kind in ("llama", "gpt2", "gemma3")}
    made["opt"] = tmp_path_factory.mktemp("opt")
    save_random(WINDOWED_CONFIGS["opt"], made["opt"])
    return made


@pytest.fixture
def provider(folders: dict[str, Path]) -> Iterator[Callable[[str], ScriptedProvider]]:
    opened: list[ScriptedProvider] = []

    def open_one(kind: str = "llama") -> ScriptedProvider:
        opened.append(ScriptedProvider(model=folders[kind]))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def sent(provider: ScriptedProvider) -> set[tuple[str, int]]:
    """Returns the directions and numbers of rows of all calls so far, and forgets them."""
    found = {(call.direction, call.num_rows) for call in provider.calls}
    provider.forget_calls()
    return found


def with_padding(client: TenantClient, patch: pytest.MonkeyPatch) -> Any:
    """Returns a model that sends padding too."""
    with patch.context() as inner:
        inner.setattr(Padding, "leave_out", lambda self, model: None)
        return client.load_model()


def gradients(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def equal(first: Any, second: Any) -> bool:
    (loss, grads), (other_loss, other_grads) = first, second
    same = all(torch.equal(grads[name], other_grads[name]) for name in grads)
    return torch.equal(loss, other_loss) and grads.keys() == other_grads.keys() and same and len(grads) > 0


def seeded(config: Any, model: Any) -> Any:
    torch.manual_seed(0)
    made = get_peft_model(model, config)
    with torch.no_grad():
        for name, each in made.named_parameters():
            if "lora_B" in name:
                each.normal_(std=0.1)
    return made.train()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma3", "opt"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_no_row_of_padding_is_sent_and_loss_and_gradients_are_the_same(
    kind: str, side: str, provider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = provider(kind)
    client, batch = opened.client(**RING), padded(side)
    if side == "left":  # what the last padding before a row predicts would count
        first = LONGEST - torch.tensor(LENGTHS)
        batch["labels"][torch.arange(len(LENGTHS)), first] = -100
    config = LoraConfig(**{**LORA, "fan_in_fan_out": kind == "gpt2"})
    found = gradients(seeded(config, client.load_model()), batch)
    assert {num_rows for _, num_rows in sent(opened)} == {TOKENS}
    whole = gradients(seeded(config, with_padding(client, monkeypatch)), batch)
    assert {num_rows for _, num_rows in sent(opened)} == {len(LENGTHS) * LONGEST}
    assert equal(found, whole)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda batch: batch["labels"].copy_(batch["input_ids"]),  # labels on padding, as in many a script
        lambda batch: batch["labels"].__setitem__((0, LENGTHS[0]), 7),
        lambda batch: batch.pop("attention_mask"),
        lambda batch: batch["attention_mask"].fill_(1),
    ],
)
def test_padding_that_counts_is_sent(spoil: Callable[..., Any], provider: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = provider()
    client, batch = opened.client(**RING), padded()
    spoil(batch)
    found = gradients(seeded(LoraConfig(**LORA), client.load_model()), batch)
    assert {num_rows for _, num_rows in sent(opened)} == {len(LENGTHS) * LONGEST}
    assert equal(found, gradients(seeded(LoraConfig(**LORA), with_padding(client, monkeypatch)), batch))


@pytest.mark.parametrize(
    "kept", [4, torch.tensor([1, 5, 9]), torch.arange(LONGEST - 1, -1, -1), torch.tensor([3] * LONGEST)]
)
def test_a_head_that_is_asked_for_some_positions_gets_no_padding(kept: Any, provider: Any) -> None:
    opened = provider()
    batch = padded()
    model = opened.client(**RING).load_model()
    with run_states(model).padding.labels_known():
        found = model(batch["input_ids"], batch["attention_mask"], logits_to_keep=kept).logits
    mask = batch["attention_mask"][:, -kept:] if isinstance(kept, int) else batch["attention_mask"][:, kept]
    if isinstance(kept, int) or len(kept) < LONGEST:
        assert {num_rows for _, num_rows in sent(opened)} == {TOKENS, int(mask.sum())}
    whole = model(batch["input_ids"], batch["attention_mask"]).logits
    assert {num_rows for _, num_rows in sent(opened)} >= {len(LENGTHS) * LONGEST}
    whole = whole[:, -kept:] if isinstance(kept, int) else whole[:, kept]
    assert torch.equal(found[mask == 1], whole[mask == 1])


def test_a_label_that_padding_on_the_left_predicts_counts(provider: Any) -> None:
    opened = provider()
    model = opened.client(**RING).load_model()
    batch = padded("left")
    model(**batch)
    assert {num_rows for _, num_rows in sent(opened)} == {len(LENGTHS) * LONGEST}
    model(batch["input_ids"], batch["attention_mask"], None, None, None, batch["labels"])
    assert {num_rows for _, num_rows in sent(opened)} == {len(LENGTHS) * LONGEST}


@pytest.mark.parametrize("options", [{}, {"use_reentrant": False}])
def test_a_stock_checkpointed_model_has_the_same_gradients(
    options: dict[str, Any], provider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, batch = provider().client(**RING), padded()
    made = []
    for base in (client.load_model(), with_padding(client, monkeypatch)):
        base.gradient_checkpointing_enable(options or None)
        base.enable_input_require_grads()
        made.append(gradients(seeded(LoraConfig(**LORA), base), batch))
    assert equal(*made)


@pytest.mark.parametrize("config", [
    PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
])  # fmt: skip
def test_virtual_tokens_are_sent_and_padding_is_not(
    config: Any, provider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = provider()
    client, batch = opened.client(**RING), padded()
    found = gradients(seeded(config, client.load_model()), batch)
    extra = 4 * len(LENGTHS) if isinstance(config, PromptTuningConfig) else 0
    assert {num_rows for _, num_rows in sent(opened)} == {TOKENS + extra}
    assert equal(found, gradients(seeded(config, with_padding(client, monkeypatch)), batch))


def test_generate_over_a_batch_sends_no_padding_and_gives_the_same_tokens(
    provider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = provider()
    client, batch = opened.client(**RING), padded("left")
    del batch["labels"]
    found = client.load_model().generate(**batch, max_new_tokens=4, do_sample=False, pad_token_id=PAD)
    assert sent(opened) == {("forward", TOKENS), ("forward", len(LENGTHS))}
    whole = with_padding(client, monkeypatch).generate(**batch, max_new_tokens=4, do_sample=False, pad_token_id=PAD)
    assert torch.equal(found, whole)


def test_a_layer_that_is_called_by_itself_sends_all_rows(provider: Any) -> None:
    opened = provider()
    model = opened.client(**RING).load_model()
    batch = padded()
    model(**batch)
    opened.forget_calls()
    layer = model.model.layers[0].mlp.down_proj
    rows = torch.randn(len(LENGTHS), LONGEST, layer.in_features)
    assert bool((layer(rows).abs().sum(-1) > 0).all())
    assert sent(opened) == {("forward", len(LENGTHS) * LONGEST)}


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_nothing_of_a_pass_that_ended_early_stays(failure: type[BaseException], provider: Any) -> None:
    model = provider().client(**RING).load_model()

    def fail(*_: Any) -> None:
        raise failure

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(failure):
        model(**padded())
    handle.remove()
    assert run_states(model).padding.passes == []


def outside(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns a loss over all labels that is computed outside the model, and its gradients."""
    inputs = {key: each for key, each in batch.items() if key != "labels"}
    logits = model(**inputs).logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), label_smoothing=0.1)
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("labels_padding", [False, True])
def test_a_loss_outside_the_model_is_the_same(
    side: str, labels_padding: bool, provider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, batch = provider().client(**RING), padded(side)
    if labels_padding:
        batch["labels"] = batch["input_ids"]
    found = outside(seeded(LoraConfig(**LORA), client.load_model()), batch)
    assert equal(found, outside(seeded(LoraConfig(**LORA), with_padding(client, monkeypatch)), batch))


def test_labels_that_are_shifted_already_count(provider: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client, batch = provider().client(**RING), padded("left")
    batch["shift_labels"] = batch["labels"].roll(-1, 1)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    found = gradients(seeded(LoraConfig(**LORA), client.load_model()), batch)
    assert equal(found, gradients(seeded(LoraConfig(**LORA), with_padding(client, monkeypatch)), batch))


def test_a_model_with_convolutions_sends_all_rows(tmp_path: Path) -> None:
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = Lfm2Config(
        **sizes, num_key_value_heads=2, num_hidden_layers=2, layer_types=["conv", "full_attention"], pad_token_id=0
    )
    save_random(config, tmp_path)
    with ScriptedProvider(model=tmp_path) as opened:
        opened.client(**{**RING, "tokenizer": None}).load_model()(**padded("left"))
        assert {num_rows for _, num_rows in sent(opened)} == {len(LENGTHS) * LONGEST}


def test_a_copied_model_has_a_forward_of_its_own(provider: Any) -> None:
    opened = provider()
    model = opened.client(**RING).load_model()
    twin = copy.deepcopy(model)
    assert twin.forward.__self__ is twin
    twin(**padded())
    assert {num_rows for _, num_rows in sent(opened)} == {TOKENS}


def test_rows_that_are_padded_to_hide_lengths_are_sent(provider: Any) -> None:
    opened = provider()
    model = opened.client(**{**RING, "pad_rows": 16}).load_model()
    model(**padded())
    assert {num_rows for _, num_rows in sent(opened)} == {len(LENGTHS) * LONGEST}


def test_row_counts_follow_from_lengths_alone(provider: Any) -> None:
    opened = provider()
    model = seeded(LoraConfig(**LORA), opened.client(**RING).load_model())
    seen = []
    for seed in range(2):
        batch = padded()
        other = torch.randint(6, 90, batch["input_ids"].shape, generator=torch.Generator().manual_seed(seed))
        batch["input_ids"] = other.masked_fill(batch["attention_mask"] == 0, PAD)
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        gradients(model, batch)
        seen.append([(call.group, call.direction, call.num_rows) for call in opened.calls])
        opened.forget_calls()
    assert seen[0]
    assert seen[0] == seen[1]


def test_a_stock_trainer_sends_no_padding(provider: Any, tmp_path: Path) -> None:
    opened = provider()
    model = seeded(LoraConfig(**LORA), opened.client(**RING).load_model())
    batch = padded()
    rows = [{key: each[row] for key, each in batch.items()} for row in range(len(LENGTHS))]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=3, max_steps=1, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=rows).train()
    assert sent(opened) == {("forward", TOKENS), ("backward", TOKENS)}


@pytest.mark.parametrize("checkpointing", [None, "recompute", "replies"])
def test_finetune_sends_each_token_as_often_as_it_must(
    checkpointing: str | None, provider: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = provider()
    texts = [{"text": "a" * length} for length in LENGTHS]
    losses, counts = [], []
    for name in ("without", "with"):
        client = opened.client(**RING)
        if name == "with":
            monkeypatch.setattr(Padding, "leave_out", lambda self, model: None)
        result = client.finetune(
            texts, output_dir=tmp_path / name, batch_size=3, max_steps=2, checkpointing=checkpointing, progress=False
        )
        losses.append(result.losses)
        counts.append(sorted((call.group, call.direction, call.num_rows) for call in opened.calls))
        opened.forget_calls()
    assert losses[0] == losses[1]
    assert [each[:2] for each in counts[0]] == [each[:2] for each in counts[1]]
    ends = len(LENGTHS)  # an end marker for each text; the head does not get the last position, which predicts nothing
    assert {num_rows for *_, num_rows in counts[0]} == {TOKENS + ends, TOKENS + ends - 1}
    assert {num_rows for *_, num_rows in counts[1]} == {ends * (LONGEST + 1), TOKENS + ends - 1}
