"""Tests training in windows (pieces of a batch's tokens) on local models: gradients equal those of the whole batch, and
models or batches that cannot be divided are refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    CPTConfig,
    IA3Config,
    LilyConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)  # fmt: skip
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, JambaConfig, LlamaConfig, MixtralConfig

from tenant_sdk.training.windows import Windows, _Kept
from tests.support.parity import adapted, relative
from tests.support.tiny_models import (
    CONFIGS,
    GPT2_SIZES,
    NUM_TOKENS,
    SIZES,
    WINDOWED_CONFIGS,
    gradients_of,
    padded_batch,
    whole_gradients,
)
from wire.errors import ConfigurationError

TOLERANCE = 1e-5
ALL_KINDS = {**CONFIGS, **WINDOWED_CONFIGS}


def lora(kind: str = "llama", **changes: Any) -> LoraConfig:
    options = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "fan_in_fan_out": kind == "gpt2"}
    return LoraConfig(**{**options, "task_type": "CAUSAL_LM", **changes})


def make(kind: str, config: Any = None) -> Any:
    torch.manual_seed(0)
    return adapted(AutoModelForCausalLM.from_config(ALL_KINDS[kind]), config or lora(kind)).train()


def assert_equal(model: Any, window_tokens: int, inputs: dict[str, torch.Tensor]) -> None:
    loss, want = whole_gradients(model, inputs)
    model.zero_grad()
    assert float(Windows(model, window_tokens).backward(inputs)) == pytest.approx(loss, rel=1e-6)
    got = gradients_of(model)
    assert got.keys() == want.keys()
    assert len(want) >= 2
    for name, gradient in want.items():
        assert gradient.norm() > 0, name
        assert relative(got[name], gradient) < TOLERANCE, name


@pytest.mark.parametrize(
    ("kind", "window_tokens"),
    [(kind, tokens) for kind in ALL_KINDS for tokens in ((2, 8, 14) if kind in WINDOWED_CONFIGS else (8,))],
)
def test_gradients_equal_the_whole_batchs(kind: str, window_tokens: int) -> None:
    """Rows are padded, and the first windows have no labels. The smallest window has one token of each row."""
    assert_equal(make(kind), window_tokens, padded_batch())


@pytest.mark.parametrize("kind", WINDOWED_CONFIGS)
def test_a_window_larger_than_the_batch_is_the_whole_batch(kind: str) -> None:
    assert_equal(make(kind), 1000, padded_batch())


@pytest.mark.parametrize("kind", WINDOWED_CONFIGS)
def test_activation_checkpointing(kind: str) -> None:
    """With checkpointing, a transformer block is computed again in the backward pass. It must then use the same keys
    and values as before, so that the gradients are right."""
    model, inputs = make(kind), padded_batch()
    _, want = whole_gradients(model, inputs)
    model.zero_grad()
    model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
    num_passes = 0

    def count(*_: Any) -> None:
        nonlocal num_passes
        num_passes += 1

    first = next(module for name, module in model.named_modules() if ".0." in name and name.endswith("lora_A.default"))
    first.register_forward_hook(count)
    Windows(model, 16).backward(inputs)
    assert num_passes == 2 + 3 + 3, "two windows before the last, three with gradients, and these once more"
    got = gradients_of(model)
    for name, gradient in want.items():
        assert relative(got[name], gradient) < TOLERANCE, name


@pytest.mark.parametrize(
    "config",
    [
        lora(target_modules=["q_proj", "down_proj"], layers_to_transform=[1]),
        lora(target_modules=["k_proj"], layers_to_transform=[0]),
        lora(target_modules=["q_proj"], modules_to_save=["embed_tokens", "norm"]),
        lora(target_modules=["v_proj", "lm_head"]),
        IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ],
    ids=["upper layer", "keys of the first layer", "embedding and norm", "head", "IA3"],
)
def test_other_adapters(config: Any) -> None:
    assert_equal(make("llama", config), 8, padded_batch())


def test_an_adapter_of_the_head_alone() -> None:
    model, inputs = make("llama", lora(target_modules=["lm_head"])), padded_batch()
    loss, want = whole_gradients(model, inputs)
    model.zero_grad()
    assert float(Windows(model, 8).backward(inputs)) == pytest.approx(loss, rel=1e-6)
    got = gradients_of(model)
    assert len(want) == len(got) == 2
    assert all(relative(got[name], gradient) < TOLERANCE for name, gradient in want.items())


def test_a_mixture_of_experts_and_a_capped_head() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    assert_equal(adapted(AutoModelForCausalLM.from_config(config), lora()).train(), 8, padded_batch())
    assert ALL_KINDS["gemma2"].final_logit_softcapping, "test_gradients_equal_the_whole_batchs has it"


@pytest.mark.parametrize("count", [None, 40])
def test_loss_is_over_all_labels_or_a_given_number(count: int | None) -> None:
    model, inputs = make("llama"), padded_batch()
    loss, want = whole_gradients(model, inputs)
    num_labels = int((inputs["labels"][:, 1:] != -100).sum())
    factor = 0.5 * (1 if count is None else num_labels / count)
    model.zero_grad()
    got = Windows(model, 8).backward(inputs, count, share=0.5)
    assert float(got) == pytest.approx(factor * loss, rel=1e-6)
    for name, gradient in gradients_of(model).items():
        assert relative(gradient, factor * want[name]) < TOLERANCE, name


def test_a_batch_without_a_label() -> None:
    model, inputs = make("llama"), padded_batch()
    inputs["labels"].fill_(-100)
    assert float(Windows(model, 8).backward(inputs)) == 0
    assert all(float(gradient.norm()) == 0 for gradient in gradients_of(model).values())


def test_gradients_from_many_windows_are_added_in_float32() -> None:
    kept = _Kept(num_tokens=2)
    kept.extended(torch.ones(1, 1, 1, 4, dtype=torch.bfloat16, requires_grad=True), 0, 0, is_again=False)
    own = kept.own
    for _ in range(300):
        kept.add_gradient(torch.ones(1, 1, 1, 4, dtype=torch.bfloat16), 0, 1)
    found = kept.taken(0, 1)
    assert found is not None
    assert found[0] is own
    assert found[1].dtype is torch.bfloat16
    assert found[1].unique().tolist() == [300], "bfloat16 adds nothing to 256"


def test_bfloat16() -> None:

    def flat(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([gradients[name].float().flatten() for name in sorted(gradients)])

    inputs = padded_batch()
    exact = flat(whole_gradients(make("llama"), inputs)[1])
    model = make("llama").to(torch.bfloat16)
    whole = flat(whole_gradients(model, inputs)[1])
    model.zero_grad()
    Windows(model, 2).backward(inputs)
    found = relative(flat(gradients_of(model)), exact)
    assert 1e-3 < found < 1.5 * relative(whole, exact)


def test_logits_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenant_sdk.training.windows._LOGITS_AT_ONCE", 3 * SIZES["vocab_size"])
    assert_equal(make("gemma2"), 8, padded_batch())


def one_graph(model: Any, inputs: dict[str, torch.Tensor], length: int, seeds: list[int]) -> None:
    """Computes what windows must equal, in a slow and obvious way: it keeps the graphs of all windows, uses
    transformers' own cache, and adds the gradients to the parameters."""
    cache, logits = DynamicCache(config=model.config), []
    for number, seed in enumerate(seeds):
        stop = min((number + 1) * length, NUM_TOKENS)
        torch.manual_seed(seed)
        ids, mask = inputs["input_ids"][:, number * length : stop], inputs["attention_mask"][:, :stop]
        logits.append(model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits)
    predicted, targets = torch.cat(logits, dim=1)[:, :-1], inputs["labels"][:, 1:]
    functional.cross_entropy(predicted.flatten(0, 1), targets.flatten()).backward()


@pytest.mark.parametrize("kind", WINDOWED_CONFIGS)
def test_dropout_is_the_same_in_both_passes_of_a_window(kind: str) -> None:
    """Each window seeds its dropout with a number of its own. The gradients are compared with those of one graph over
    all windows with the same seeds."""
    config = ALL_KINDS[kind].__class__.from_dict(ALL_KINDS[kind].to_dict())
    for name in ("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.2)
    torch.manual_seed(0)
    model = adapted(AutoModelForCausalLM.from_config(config), lora(kind, lora_dropout=0.3)).train()
    inputs, windows = padded_batch(), Windows(model, 16)
    torch.manual_seed(7)
    seeds = [int(seed) for seed in torch.randint(1 << 62, (3,))]
    after_seeds = torch.get_rng_state()
    torch.manual_seed(7)
    windows.backward(inputs)
    assert torch.equal(torch.get_rng_state(), after_seeds), "a window's numbers are its own"
    got = gradients_of(model)
    model.zero_grad()
    one_graph(model, inputs, 8, seeds)
    want = gradients_of(model)
    model.zero_grad()
    one_graph(model, inputs, 8, [seed + 1 for seed in seeds])
    for name, gradient in want.items():
        assert relative(got[name], gradient) < TOLERANCE, name
    assert relative(gradients_of(model)[name], want[name]) > 0.1, "dropout does much"


def test_contexts_of_a_windows_two_passes() -> None:
    windows, seen = Windows(make("llama"), 16), []
    numbers = iter(range(3))

    @contextmanager
    def noted(number: int, which: str) -> Iterator[None]:
        assert torch.is_grad_enabled() is (which == "second")
        seen.append((number, which))
        yield
        seen.append("end")

    def contexts() -> Any:
        number = next(numbers)
        return noted(number, "first"), noted(number, "second")

    windows.contexts = contexts
    windows.backward(padded_batch())
    assert seen == [(0, "first"), "end", (1, "first"), "end", (1, "second"), "end", (0, "second"), "end"]


def test_no_copies_of_earlier_keys_are_kept() -> None:
    """For the last window, autograd keeps one attention mask for all layers, and no copies of keys and values repeated
    for each head."""
    model, inputs = make("llama"), padded_batch()
    windows, kept = Windows(model, 2), set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.add((tuple(tensor.shape), tensor.data_ptr()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        windows.backward(inputs)
    repeated = [shape for shape, _ in kept if len(shape) == 4 and shape[1] == 4 and shape[2] > 1]
    assert repeated == []
    last_masks = [address for shape, address in kept if shape == (2, 1, 1, NUM_TOKENS)]
    assert len(last_masks) == 1


STATEFUL = JambaConfig(
    **SIZES, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, num_experts=2,
    num_experts_per_tok=2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (STATEFUL, "jamba: its layers keep other than keys and values"),
        (
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            "llama: its rotary embedding depends on the longest row",
        ),
        (LlamaConfig(**SIZES, num_kv_shared_layers=1), "llama: its layers share keys and values"),
        (
            LlamaConfig(**SIZES, layer_types=["chunked_attention", "full_attention"], attention_chunk_size=4),
            "llama: its attention is cut into chunks already",
        ),
        (
            MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True),
            "mixtral: its loss is more than the cross entropy of tokens",
        ),
    ],
    ids=["state", "rotary embedding", "shared keys", "chunks", "loss of the router"],
)
def test_attention_that_cannot_be_cut(config: Any, reason: str) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_config(config), lora(target_modules=["q_proj"]))
    with pytest.raises(ConfigurationError, match=f"^window_tokens is not possible with {reason}$"):
        Windows(model, 8)


SOFT = {"num_virtual_tokens": 4, "task_type": "CAUSAL_LM"}
SOFT_PROMPTS = {
    "prompt": PromptTuningConfig(**SOFT),
    "P": PromptEncoderConfig(encoder_hidden_size=16, **SOFT),
    "prefix": PrefixTuningConfig(**SOFT),
    "prefix by an encoder": PrefixTuningConfig(prefix_projection=True, encoder_hidden_size=16, **SOFT),
    "longer than a window": PromptTuningConfig(**{**SOFT, "num_virtual_tokens": 9}),
    "prefix longer than a sliding window": PrefixTuningConfig(**{**SOFT, "num_virtual_tokens": 9}),
}


def model_loss(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Returns the loss of PEFT's own forward method, and its gradients."""
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return float(loss.detach()), gradients_of(model)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_adalora_with_its_regulariser(share: float) -> None:
    """AdaLoRA's forward method adds to the loss; windows add it once for a batch."""
    config = AdaLoraConfig(
        init_r=4, target_r=2, total_step=10, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model, inputs = make("llama", config), padded_batch()
    loss, want = model_loss(model, inputs)
    without, _ = whole_gradients(model, inputs)
    assert loss > without + 0.1
    model.zero_grad()
    got = Windows(model, 8).backward(inputs, share=share)
    assert float(got) == pytest.approx(share * loss, rel=1e-5)
    assert not got.requires_grad
    for name, gradient in gradients_of(model).items():
        assert relative(gradient, share * want[name]) < TOLERANCE, name


def soft_prompt(name: str) -> Any:
    return copy.deepcopy(SOFT_PROMPTS[name])  # PEFT writes the model's sizes into a config


@pytest.mark.parametrize(
    ("kind", "prompt"),
    # PEFT cannot put embeddings before the projection that this OPT has
    [
        (kind, name)
        for kind in [*WINDOWED_CONFIGS, "gemma2"]
        for name in SOFT_PROMPTS
        if kind != "opt" or "prefix" in name
    ],
)
def test_soft_prompts(kind: str, prompt: str) -> None:
    model, inputs = make(kind, soft_prompt(prompt)), padded_batch()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    loss, want = model_loss(model, inputs)
    for window_tokens in (8, 1000):
        model.zero_grad()
        assert float(Windows(model, window_tokens).backward(inputs)) == pytest.approx(loss, rel=1e-5)
        got = gradients_of(model)
        assert got.keys() == want.keys()
        for name, gradient in want.items():
            assert gradient.norm() > 0, name
            assert relative(got[name], gradient) < TOLERANCE, name


@pytest.mark.parametrize("prompt", ["prompt", "prefix"])
def test_soft_prompts_with_activation_checkpointing(prompt: str) -> None:
    model, inputs = make("llama", soft_prompt(prompt)), padded_batch()
    _, want = model_loss(model, inputs)
    model.zero_grad()
    model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
    for window_tokens in (8, 1000):
        model.zero_grad()
        Windows(model, window_tokens).backward(inputs)
        assert all(relative(got, want[name]) < TOLERANCE for name, got in gradients_of(model).items())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (CPTConfig(cpt_token_ids=[3, 4], cpt_tokens_type_mask=[1, 2], task_type="CAUSAL_LM"), "with CPT"),
        (lora(alora_invocation_tokens=[5]), "with alora_invocation_tokens"),
        (LilyConfig(r=4, num_B=2, target_modules=["q_proj"], task_type="CAUSAL_LM"), "with LILY"),
    ],
    ids=["CPT", "aLoRA", "Lily"],
)
def test_adapters_that_cannot_be_cut(config: Any, said: str) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_config(WINDOWED_CONFIGS["llama"]), config)
    with pytest.raises(ConfigurationError, match=f"^window_tokens is not possible {said}"):
        Windows(model, 8)


def test_a_layer_that_does_not_use_its_cache_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = get_peft_model(AutoModelForCausalLM.from_config(GPT2Config(**GPT2_SIZES)), lora("gpt2"))
    windows = Windows(model, 8)
    attention = model.get_base_model().transformer.h[1].attn
    forward = attention.forward
    monkeypatch.setattr(attention, "forward", lambda x, past_key_values=None, **others: forward(x, **others))
    with pytest.raises(ConfigurationError, match="not every layer of this model uses its cache"):
        windows.backward(padded_batch())
