"""Tests finetune(): it learns, reports correctly what it did, and gives the same results as transformers' own Trainer
with PEFT."""

from __future__ import annotations

import json
import math
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    LNTuningConfig,
    LoraConfig,
    OSFConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import AutoModelForCausalLM, TrainingArguments

from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient
from tenant_sdk.kinds.started_lora import StartedLoraModel
from tenant_sdk.peft_model import FewLayersWarning
from tenant_sdk.training.token_rows import Collator
from tenant_sdk.training.trainers import CompletionTrainer, mean_loss
from tests.support.providers import serving
from tests.support.spies import before_requests
from tests.support.tiny_models import make_chat_model
from tests.support.training import QUICK, ROWS, TOLERANCE, logged, lora, stock_trainer, tokenized
from wire.errors import ConfigurationError, DatasetError
from wire.frame import Direction

TEXTS = [{"text": "abc def"}, {"text": "a longer line of text"}, {"text": "owl"}, {"text": "Port Hale"}]


def stock_losses(folder: Path, config: Any, scratch: Path, data: Any = ROWS, **changes: Any) -> tuple[list[float], Any]:
    """Returns the losses of transformers' own Trainer on a local model with the same settings, and the model."""
    local = AutoModelForCausalLM.from_pretrained(folder)
    trainer = stock_trainer(local, config, scratch, tokenized(data), **changes)
    return logged(trainer), trainer.model


def logits(model: Any) -> torch.Tensor:
    batch = Collator(0)(tokenized())
    with torch.no_grad():
        found = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return torch.as_tensor(found)[batch["attention_mask"] == 1]  # nothing is sent of padding


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert float((got - want).norm() / want.norm()) < TOLERANCE


@pytest.fixture
def trained_model(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list to which the model of each training run is added, in the state at the end of the run."""
    from tenant_sdk.training import finetune

    models: list[Any] = []
    save = finetune.save_adapter

    def keep(model: Any, output_dir: Path) -> None:
        models.append(model.eval())
        save(model, output_dir)

    monkeypatch.setattr(finetune, "save_adapter", keep)
    return models


def test_it_learns_and_reports(chat_client: Any, chat_folder: Path, tmp_path: Path, trained_model: list[Any]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    result = chat_client.finetune(data, lora(), tmp_path / "out", **QUICK | {"max_steps": 12})
    assert len(result.losses) == 12
    assert result.losses[-1] < result.losses[0] - 0.15
    # 12 steps of 4 rows are 6 passes over 8 rows
    assert result.tokens == 6 * sum(len(row["attention_mask"]) for row in tokenized())
    assert min(result.bytes_up, result.bytes_down) > 12 * 1000
    assert result.seconds > 0
    assert result.resumed_from_step == 0
    assert result.adapter_dir == tmp_path / "out"
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(("out", ".out"))) == ["out"]
    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(chat_folder), result.adapter_dir).eval()
    assert_close(logits(stock), logits(trained_model[0]))
    bare = logits(AutoModelForCausalLM.from_pretrained(chat_folder).eval())
    assert float((logits(stock) - bare).norm() / bare.norm()) > 1e-2


def test_over_mtls(chat_served_model: ServedModel, chat_client: Any, tmp_path: Path) -> None:
    """The results are the same as in process, and the bytes are those that really crossed."""
    want = chat_client.finetune(ROWS, lora(), tmp_path / "inproc", **QUICK)
    state = StateDir(tmp_path / "state")
    with serving(chat_served_model, state=state) as server:
        url = f"grpcs://127.0.0.1:{server.port}"
        enroll(state, "acme", tmp_path / "acme", url)
        with TenantClient(url, identity=tmp_path / "acme", mask="off", arithmetic="float") as client:
            got = client.finetune(ROWS, lora(), tmp_path / "out", **QUICK)
    assert got.losses == pytest.approx(want.losses, rel=1e-6)
    assert got.tokens == want.tokens
    assert got.bytes_up > want.bytes_up, "headers are counted too"
    assert got.bytes_down > want.bytes_down


def test_int8_ring_learns_too(chat_folder: Path, tmp_path: Path) -> None:
    with TenantClient(f"inproc:{chat_folder}") as client:
        result = client.finetune(ROWS, lora(), tmp_path / "out", **QUICK | {"max_steps": 12})
    assert result.losses[-1] < result.losses[0] - 0.15


def test_seed(chat_client: Any, tmp_path: Path) -> None:
    runs = [
        chat_client.finetune(ROWS, lora(), tmp_path / str(index), seed=seed, **QUICK).losses
        for index, seed in enumerate((7, 7, 8))
    ]
    assert runs[0] == runs[1]
    assert runs[0] != pytest.approx(runs[2], rel=1e-3)


CONFIGS = {
    "lora": lora,
    "prompt-tuning": lambda: PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("config", list(CONFIGS))
def test_same_losses_as_stock_trainer(
    chat_client: Any, chat_folder: Path, tmp_path: Path, config: str, accumulation: int
) -> None:
    """Batches of 3 leave an uneven rest, and rows differ in length, so that a mean of means would show."""
    make = CONFIGS[config]
    changes = {"batch_size": 3, "gradient_accumulation_steps": accumulation, "max_steps": 5}
    want, _ = stock_losses(chat_folder, make(), tmp_path / "stock", **changes)
    got = chat_client.finetune(ROWS, make(), tmp_path / "out", **QUICK | changes)
    assert got.losses == pytest.approx(want, rel=TOLERANCE)
    assert len(set(want)) == 5


RATES = {
    "linear": (1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4),
    "cosine": (1 / 3, 2 / 3, 1, *(0.5 + 0.5 * math.cos(math.pi * part) for part in (1 / 4, 2 / 4, 3 / 4))),
    "constant_with_warmup": (1 / 3, 2 / 3, 1, 1, 1, 1),
    "inverse_sqrt": (1 / 3, 2 / 3, 1, *(math.sqrt(3 / (3 + steps)) for steps in (1, 2, 3))),
}
"""The learning rates of six steps with a warm-up of three, as parts of the peak."""


@pytest.mark.parametrize("scheduler", list(RATES))
def test_a_warm_up_trains_from_its_first_step(
    chat_client: Any, chat_folder: Path, tmp_path: Path, scheduler: str
) -> None:
    """A batch is the whole data set, so a step that trained nothing would show as an equal loss."""
    options = {**QUICK, "batch_size": len(ROWS), "warmup_steps": 3, "lr_scheduler_type": scheduler}
    got = chat_client.finetune(ROWS, lora(), tmp_path / "out", **options).losses
    want, _ = stock_losses(chat_folder, lora(), tmp_path / "stock", batch_size=len(ROWS), rates=RATES[scheduler])
    assert got == pytest.approx(want, rel=TOLERANCE)
    assert got[1] < got[0] * (1 - 10 * TOLERANCE)


def test_one_step_of_warm_up_is_none(chat_client: Any, tmp_path: Path) -> None:
    none, one, long = (
        chat_client.finetune(ROWS, lora(), tmp_path / str(steps), **{**QUICK, "warmup_steps": steps}).losses
        for steps in (0, 1, 9)
    )
    assert one == none
    assert long[1:] != none[1:], "a warm-up longer than the run had no effect"


@pytest.mark.parametrize("kind", ["gpt2", "gemma"])
def test_same_losses_and_adapter_on_other_models(kind: str, tmp_path: Path, trained_model: list[Any]) -> None:
    folder = make_chat_model(tmp_path / kind, kind)
    config = lora(fan_in_fan_out=kind == "gpt2")
    want, model = stock_losses(folder, config, tmp_path / "stock", TEXTS)
    with TenantClient(f"inproc:{folder}", weights="native", mask="off", arithmetic="float") as client:
        result = client.finetune(TEXTS, lora(fan_in_fan_out=kind == "gpt2"), tmp_path / "out", **QUICK)
    assert result.losses == pytest.approx(want, rel=TOLERANCE)
    assert_close(logits(trained_model[0]), logits(model.eval()))


@pytest.mark.parametrize("data", [ROWS, TEXTS], ids=["messages", "text"])
@pytest.mark.parametrize("config", list(CONFIGS))
def test_loss_is_the_models_own(chat_client: Any, tmp_path: Path, config: str, data: Any) -> None:
    torch.manual_seed(1)
    model = get_peft_model(chat_client.load_model(), CONFIGS[config]())
    batch = Collator(0)(tokenized(data)[:4])
    trainer = CompletionTrainer(model=model, args=TrainingArguments(str(tmp_path), use_cpu=True, report_to=[]))
    want = model(**batch).loss
    got, outputs = trainer.compute_loss(model, dict(batch), return_outputs=True)
    assert got.item() == pytest.approx(want.item(), rel=1e-6)
    if config == "lora":
        halved = trainer.compute_loss(model, dict(batch), num_items_in_batch=2 * (batch["labels"][:, 1:] != -100).sum())
        assert halved.item() == pytest.approx(want.item() / 2, rel=1e-6)
    if config == "lora" and data is ROWS:
        assert outputs.logits.shape[1] < batch["input_ids"].shape[1] - 1, "logits of unlabelled positions were made"


def test_mean_loss(chat_client: Any) -> None:
    model = chat_client.load_model()
    want = model(**Collator(0)(tokenized())).loss
    assert mean_loss(model, tokenized(), 0, batch_size=3) == pytest.approx(want.item(), rel=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_backward_call_below_the_lowest_adapter(
    chat_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    config = {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1], "r": 4}
    plain = chat_client.finetune(ROWS, LoraConfig(**config, task_type="CAUSAL_LM"), tmp_path / "plain", **QUICK)
    num_forward, backward = 0, set()

    def spy(call: Any, rows: Any) -> None:
        nonlocal num_forward
        if call.direction is Direction.BACKWARD:
            backward.add(call.group)
        else:
            num_forward += 1

    before_requests(monkeypatch, spy)
    result = chat_client.finetune(
        ROWS, LoraConfig(**config, task_type="CAUSAL_LM"), tmp_path / "out",
        gradient_checkpointing=checkpointing, **QUICK,
    )  # fmt: skip
    assert result.losses == pytest.approx(plain.losses, rel=1e-6)
    names = {group.id: group.name for group in chat_client.connect().groups}
    groups_of_upper = {group for group, name in names.items() if "layers.1." in name}
    # q's own input needs no gradient: nothing trains below it, so its group is never asked either
    query = {group for group in groups_of_upper if "q_proj" in names[group]}
    assert backward == {group for group, name in names.items() if "lm_head" in name} | groups_of_upper - query
    assert (num_forward > 6 * len(names)) is checkpointing


def test_progress_bar(chat_client: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    quiet = chat_client.finetune(ROWS, lora(), tmp_path / "quiet", **QUICK)
    assert capfd.readouterr() == ("", "")
    shown = chat_client.finetune(ROWS, lora(), tmp_path / "shown", **QUICK | {"progress": True})
    out, err = capfd.readouterr()
    assert out == ""
    assert "fine-tuning" in err
    assert f"{QUICK['max_steps']}/{QUICK['max_steps']}" in err
    assert f"{shown.losses[-1]:.4f}" in err
    assert shown.losses == quiet.losses


def test_settings_of_peft_as_a_dict_are_refused(chat_client: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"must be a config of PEFT's, such as LoraConfig, got dict$"):
        chat_client.finetune(ROWS, {"r": 4}, tmp_path / "out", **QUICK)


def test_one_of_several_processes_is_refused(chat_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="start it without torchrun"):
        chat_client.finetune(ROWS, lora(), tmp_path / "out", **QUICK)


def test_a_row_above_max_length_is_named(chat_client: Any, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(ROWS[0]) + "\n\n" + json.dumps({"text": "x" * 40}) + "\n")
    with pytest.raises(DatasetError, match=r"data\.jsonl, line 3: expected at most 32 tokens, 41 came") as failure:
        chat_client.finetune(data, lora(), tmp_path / "out", max_length=32, **QUICK)
    assert "xxx" not in str(failure.value)
    data.write_text(json.dumps({"text": "x" * 200}))
    with pytest.raises(DatasetError, match="at most 128 tokens"):  # the limit of the model's context
        chat_client.finetune(data, lora(), tmp_path / "out", max_length=4096, **QUICK)
    assert not (tmp_path / ".out.checkpoints").exists()


@pytest.mark.parametrize(
    "bad",
    [
        {"max_steps": 0}, {"batch_size": 0}, {"save_steps": 0}, {"num_epochs": 0, "max_steps": None},
        {"gradient_accumulation_steps": 0}, {"learning_rate": float("nan")}, {"learning_rate": -1.0},
        {"learning_rate": 0.0}, {"learning_rate": 0},
        {"lr_scheduler_type": "nonsense"}, {"warmup_steps": -1}, {"max_length": 0}, {"max_length": -3}, {"seed": -1},
        {"max_grad_norm": -1.0}, {"weight_decay": float("inf")},
    ],
    ids=str,
)  # fmt: skip
def test_bad_settings(chat_client: Any, tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as failure:
        chat_client.finetune(ROWS, lora(), tmp_path / "out", **QUICK | bad)
    assert "\n" not in str(failure.value)
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_that_does_not_fit_the_model(chat_client: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="target_modules of peft_config names 'nowhere', but no module"):
        chat_client.finetune(ROWS, lora(target_modules=["nowhere"]), tmp_path / "out", **QUICK)
    excluded = lora(target_modules=["q_proj"], exclude_modules=["q_proj"])
    with pytest.raises(ConfigurationError, match="PEFT cannot put this adapter on the model: No modules were targeted"):
        chat_client.finetune(ROWS, excluded, tmp_path / "out", **QUICK)
    with pytest.raises(ConfigurationError, match="stays with the provider"):
        chat_client.finetune(ROWS, OSFConfig(target_modules=["q_proj"]), tmp_path / "out", resume=False, **QUICK)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (lambda: lora(target_modules=["q_proj"], modules_to_save=["lm_head"]), "lm_head"),
        (lambda: lora(target_modules=["q_proj"], modules_to_save=["o_proj"]), "model.layers.0.self_attn.o_proj"),
        (lambda: lora(target_modules=["q_proj"], modules_to_save=["mlp"]), "model.layers.0.mlp"),
        (lambda: LNTuningConfig(target_modules=["norm", "lm_head"], task_type="CAUSAL_LM"), "lm_head"),
    ],
)
def test_a_base_layer_is_not_trained_whole(chat_client: Any, tmp_path: Path, config: Any, name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"cannot be trained whole: take {re.escape(name)} out of") as failure:
        chat_client.finetune(ROWS, config(), tmp_path / "out", **QUICK)
    assert "\n" not in str(failure.value)
    assert not (tmp_path / "out").exists()


def test_modules_of_the_tenant_are_trained_whole(
    chat_client: Any, chat_folder: Path, tmp_path: Path, trained_model: list[Any]
) -> None:
    config = lora(target_modules=["q_proj"], modules_to_save=["norm", "embed_tokens"])
    result = chat_client.finetune(ROWS, config, tmp_path / "out", **QUICK)
    bare = AutoModelForCausalLM.from_pretrained(chat_folder)
    want = {name: value.clone() for name, value in bare.state_dict().items()}
    stock = PeftModel.from_pretrained(bare, result.adapter_dir).eval()
    assert_close(logits(stock), logits(trained_model[0]))
    for module, name in ((stock.base_model.model.model.norm, "norm"), (stock.get_input_embeddings(), "embed_tokens")):
        assert not torch.equal(module.modules_to_save["default"].weight, want[f"model.{name}.weight"]), name


def test_default_targets_that_are_few_layers_are_said(
    chat_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(StartedLoraModel.target_module_mapping, "llama", ["layers.0.self_attn.q_proj"])
    with pytest.warns(FewLayersWarning, match="default targets for this model are 1 of its 15 linear layers"):
        chat_client.finetune(ROWS, lora(target_modules=None), tmp_path / "out", **QUICK | {"max_steps": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error", FewLayersWarning)
        named = lora(target_modules=["layers.0.self_attn.q_proj"])  # as the user says
        chat_client.finetune(ROWS, named, tmp_path / "named", **QUICK | {"max_steps": 1})


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig])
def test_virtual_tokens_count_in_the_context(config: Any, tmp_path: Path) -> None:
    """An adapter's 4 virtual tokens take up positions of GPT-2's context of 128. So a training row has at most 124
    tokens with its end, and a longer one is refused."""
    folder, out = make_chat_model(tmp_path / "gpt2", "gpt2"), tmp_path / "out"
    data = tmp_path / "data.jsonl"
    options = {**QUICK, "max_steps": 1}
    with TenantClient(f"inproc:{folder}", weights="native", mask="off", arithmetic="float") as client:
        data.write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "x" * 123}))
        client.finetune(data, config(num_virtual_tokens=4, task_type="CAUSAL_LM"), out, **options)
        data.write_text(json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "x" * 124}))
        with pytest.raises(
            DatasetError, match=r"line 2: .* 124 tokens beside the adapter's 4 virtual ones, 125 came: "
        ):
            client.finetune(data, config(num_virtual_tokens=4, task_type="CAUSAL_LM"), tmp_path / "long", **options)
        prompt = "a" * 101  # and 3 tokens of the template
        assert len(client.generate(prompt, out, 20)) <= 20
        with pytest.raises(ConfigurationError, match=r"104 tokens .* 4 virtual ones .* is 21; .* 128: .* at most 20$"):
            client.generate(prompt, out, 21)
        assert client.generate(prompt, None, 21) is not None


@pytest.mark.parametrize("count", [None, 0, -1, "3", 128])
def test_virtual_tokens_that_cannot_be(chat_client: Any, tmp_path: Path, count: Any) -> None:
    config = PromptTuningConfig(num_virtual_tokens=count, task_type="CAUSAL_LM")
    with pytest.raises(ConfigurationError, match="num_virtual_tokens must") as failure:
        chat_client.finetune(ROWS, config, tmp_path / "out", **QUICK)
    assert "\n" not in str(failure.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"inference_mode": True}, "inference_mode of peft_config makes an adapter that is not trained"),
        ({"lora_alpha": 0}, "lora_alpha of peft_config must be positive, got 0"),
        ({"r": -3}, "r of peft_config must be positive, got -3"),
        ({"lora_dropout": 1.0}, "lora_dropout of peft_config must be from 0 to below 1, got 1.0"),
    ],
    ids=str,
)
def test_an_adapter_that_would_learn_nothing(chat_client: Any, tmp_path: Path, changes: Any, text: str) -> None:
    before = chat_client.traffic.calls
    with pytest.raises(ConfigurationError, match=text):
        chat_client.finetune(ROWS, lora(**changes), tmp_path / "out", **QUICK)
    assert (chat_client.traffic.calls, list(tmp_path.iterdir())) == (before, [])


def test_an_adapter_that_is_there_stays_unless_it_may_be_replaced(chat_client: Any, tmp_path: Path) -> None:
    options = {**QUICK, "max_steps": 1}
    chat_client.finetune(ROWS, lora(), tmp_path / "out", **options)
    weights = tmp_path / "out" / "adapter_model.safetensors"
    before, calls = weights.read_bytes(), chat_client.traffic.calls
    with pytest.raises(ConfigurationError, match="holds an adapter already"):
        chat_client.finetune(ROWS, lora(), tmp_path / "out", seed=1, **options)
    assert (weights.read_bytes(), chat_client.traffic.calls) == (before, calls)
    chat_client.finetune(ROWS, lora(), tmp_path / "out", seed=1, overwrite=True, **options)
    assert weights.read_bytes() != before


def test_an_output_folder_that_cannot_be_written(chat_client: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be written"):
        chat_client.finetune(ROWS, lora(), tmp_path / "file" / "out", **QUICK)
