"""Tests layers that the tenant keeps: results and gradients are those of a session that asks for all layers, and of
kept layers nothing is sent, masked, fetched or checked."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, PhiConfig, PreTrainedModel
from typer.testing import CliRunner

from noise.verify import Verifier
from tenant_sdk import Engine, TenantClient, cli, for_remote_base
from tenant_sdk.keep import Kept, block_of, choose_kept, read_keep
from tenant_sdk.model import kept
from tenant_sdk.plan_file import Saving
from tenant_sdk.testing import ScriptedProvider, character_tokenizer, save_tiny_model
from tenant_sdk.trust.checkpoint import TrustedCheckpoint
from tests.support.endpoints import WHO, endpoint_of, official
from tests.support.engines import alone, mean_kl, together
from tests.support.lattice import TOY_OPTIONS
from tests.support.parity import dequantised, relative
from tests.support.tiny_models import GPT2_SIZES, SIZES, VOCAB, save_random
from tests.support.training import QUICK, ROWS, lora
from wire.errors import ConfigurationError, NotFinite
from wire.manifest import Manifest

IDS = torch.arange(3, 27).view(2, 12) % VOCAB
ATTENTION_LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj"}
EXACT: dict[str, Any] = {**TOY_OPTIONS, "hints": "local"}
SHORT = {**QUICK, "max_steps": 3}


@pytest.fixture(scope="module")
def provider() -> Iterator[ScriptedProvider]:
    """Provides a Llama of two blocks with a head of its own: nine layer groups, of which four are attention's."""
    with ScriptedProvider() as made:
        yield made


@pytest.fixture(scope="module")
def phi(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedProvider]:
    """Provides a model whose attention and MLP read the same input, so that q, k, v and fc1 share a call."""
    folder = tmp_path_factory.mktemp("phi") / "model"
    save_random(PhiConfig(**SIZES, resid_pdrop=0.0), folder)
    character_tokenizer().save_pretrained(folder)
    with ScriptedProvider(model=folder) as made:
        yield made


def manifest_of(provider: ScriptedProvider) -> Manifest:
    with provider.client(mask="off") as client:
        return client.connect()


def layers_asked(provider: ScriptedProvider) -> Counter[str]:
    """Returns how often each layer was a part of a call, by the last part of its name."""
    return Counter(layer.rpartition(".")[2] for call in provider.calls for layer in call.layers)


def logits_of(client: TenantClient) -> torch.Tensor:
    model: Any = client.load_model()
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=IDS).logits
    return logits


def gradients_of(client: TenantClient, config: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Returns a loss and the gradients of an adapter whose numbers are not zero."""
    torch.manual_seed(0)
    model = get_peft_model(client.load_model(), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


# ---- which layers ----------------------------------------------------------------------------------------------------


def test_a_text_and_a_list_say_the_same() -> None:
    assert read_keep(None, False) == read_keep([], False) == ()
    assert read_keep("attention, lower:2,attention", True) == read_keep(["attention", "lower:2"], True)
    assert read_keep(("a.*", "b"), True) == ("a.*", "b")


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("lower:0", "got 'lower:0'"),
        ("lower:", "got 'lower:'"),
        ("lower:-1", "got 'lower:-1'"),
        ("lower:x", "got 'lower:x'"),
        ("attention,,lower:1", "got ''"),
        ("lowr:1", "got 'lowr:1'"),
        ("model/layers", "got 'model/layers'"),
        ("", "got ''"),
        (True, "a value of type bool"),
        ([1], "a value of type list"),
        (7, "a value of type int"),
    ],
)
def test_a_wrong_setting_is_refused_without_the_network(keep: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TenantClient("grpcs://nowhere:1", keep=keep)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("attention", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}),
        ("o_proj", {"self_attn.o_proj"}),
        ("*.mlp.*", {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}),
        ("self_attn.[!x]_proj", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}),
        ("self_attn.?_proj", {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}),
        ("down_proj,o_proj", {"self_attn.o_proj", "mlp.down_proj"}),
    ],
)
def test_whole_groups_of_every_block(provider: ScriptedProvider, keep: str, expected: set[str]) -> None:
    manifest = manifest_of(provider)
    kept = choose_kept(read_keep(keep, True), manifest)
    names = {layer.name for group in manifest.groups if group.id in kept.groups for layer in group.layers}
    assert names == {f"model.layers.{block}.{name}" for block in (0, 1) for name in expected}
    assert {group.id for group in kept.asked(manifest).groups} == set(range(9)) - kept.groups
    assert kept.shared == ()


def test_lower_blocks(provider: ScriptedProvider) -> None:
    manifest = manifest_of(provider)
    kept = choose_kept(("lower:1",), manifest)
    assert {block_of(manifest.groups[group].layers[0].name) for group in kept.groups} == {0}
    assert len(kept.groups) == 4
    both = choose_kept(("lower:2",), manifest)
    assert set(range(9)) - both.groups == {8}  # the head
    assert choose_kept((), manifest) == Kept()
    assert Kept().asked(manifest) is manifest


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ("q_proj", "names model.layers.0.self_attn.q_proj without what shares its call, k_proj, v_proj"),
        ("q_poj", "the nearest is q_proj"),
        ("atention", "the nearest is attention"),
        ("layers.7.*", "no layer of this model"),
        ("lower:3", "this model has 2 blocks"),
        ("*", "nothing would be left to the provider"),
        ("lower:2,lm_head", "nothing would be left to the provider"),
    ],
)
def test_names_that_the_model_does_not_have(provider: ScriptedProvider, keep: str, expected: str) -> None:
    provider.forget_calls()
    with pytest.raises(ConfigurationError) as caught, provider.client(mask_options=EXACT, keep=keep):
        pass
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert provider.calls == []


def test_layers_that_share_a_call_with_others(phi: ScriptedProvider) -> None:
    manifest = manifest_of(phi)
    kept = choose_kept(("attention",), manifest)
    names = {layer.name for group in manifest.groups if group.id in kept.groups for layer in group.layers}
    assert names == {f"model.layers.{block}.self_attn.dense" for block in (0, 1)}
    assert set(kept.shared) == {f"model.layers.{block}.self_attn.{name}_proj" for block in (0, 1) for name in "qkv"}
    client = phi.client(mask="off", keep="attention")
    with pytest.warns(UserWarning, match=r"leaves to the provider: model.layers.0.self_attn.q_proj and 5 more"), client:
        assert "not kept: model.layers.0.self_attn.q_proj and 5 more, which share a call" in client.explain()
    with phi.client(mask="off", keep="attention,fc1") as client:
        assert len(choose_kept(client.keep, manifest).groups) == 4
    only_shared = manifest.model_copy(update={"groups": manifest.groups[:1]})
    rest = manifest.groups[-1]
    with pytest.raises(ConfigurationError, match="names no call of this model"):
        choose_kept(("attention",), only_shared.model_copy(update={"groups": (manifest.groups[0], rest)}))
    with pytest.raises(ConfigurationError, match="no layers inside an attention module"):
        choose_kept(("attention",), manifest.model_copy(update={"groups": (rest,)}))


# ---- results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", ["attention", "lower:1", "*.mlp.*", "lm_head"])
def test_logits_are_the_same_to_the_last_bit(provider: ScriptedProvider, keep: str) -> None:
    """Without a mask a kept layer computes what the provider would."""
    with provider.client(mask="off") as client:
        expected = logits_of(client)
    with provider.client(mask="off", keep=keep) as client:
        assert torch.equal(logits_of(client), expected)
    assert relative(expected, dequantised(Path(provider.model))(input_ids=IDS).logits) < 1e-4


@pytest.mark.parametrize(
    "config",
    [lora(), lora(use_dora=True), IA3Config(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj", "down_proj"],
                                            feedforward_modules=["down_proj"])],
    ids=["lora", "dora", "ia3"],
)  # fmt: skip
@pytest.mark.parametrize("keep", ["attention", "lower:1"])
def test_losses_and_gradients_are_the_same(provider: ScriptedProvider, keep: str, config: Any) -> None:
    with provider.client(mask="off") as client:
        loss, expected = gradients_of(client, for_remote_base(config))
    with provider.client(mask="off", keep=keep) as client:
        found_loss, found = gradients_of(client, for_remote_base(config))
    assert torch.equal(found_loss, loss)
    assert found.keys() == expected.keys() != set()
    for name, each in expected.items():
        assert torch.equal(found[name], each), name


@pytest.mark.parametrize("mask", ["lattice", "pad"])
def test_under_a_mask(provider: ScriptedProvider, mask: str) -> None:
    options = EXACT if mask == "lattice" else {"precision": "exact"}
    with provider.client(mask="off") as client:
        expected, (loss, gradients) = logits_of(client), gradients_of(client, lora())
    with provider.client(mask=mask, mask_options=options, keep="attention") as client:
        assert relative(expected, logits_of(client)) < 1e-3
        found_loss, found = gradients_of(client, lora())
    assert float((found_loss - loss).abs()) < 1e-3
    assert all(relative(each, found[name]) < 1e-2 for name, each in gradients.items())


def test_a_model_with_conv1d_and_biases(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    save_random(GPT2Config(**GPT2_SIZES, initializer_range=0.2), folder)
    character_tokenizer().save_pretrained(folder)
    with ScriptedProvider(model=folder) as provider:
        with provider.client(mask="off") as client:
            expected = logits_of(client)
        provider.forget_calls()
        with provider.client(mask="off", keep="attention") as client:
            assert torch.equal(logits_of(client), expected)
        assert set(layers_asked(provider)) == {"c_fc", "c_proj"}
        assert not any("attn" in layer for call in provider.calls for layer in call.layers)


def test_a_value_that_is_not_finite_ends_the_call(provider: ScriptedProvider) -> None:
    with provider.client(mask="off", keep="attention") as client:
        model: Any = client.load_model()
        with pytest.raises(NotFinite):
            model.model.layers[0].self_attn.q_proj(torch.full((1, 32), torch.nan))


# ---- the checkpoint's own weights ------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def half(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedProvider]:
    """Provides a model whose checkpoint is in bf16: with linear layers, or with Conv1D and biases."""
    folder = tmp_path_factory.mktemp("half") / "model"
    if request.param == "llama":
        save_tiny_model(folder)
    else:
        save_random(GPT2Config(**GPT2_SIZES, initializer_range=0.2), folder)
        character_tokenizer().save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    with ScriptedProvider(model=folder) as made:
        yield made


def test_bf16_layers_are_those_of_the_checkpoint(half: ScriptedProvider) -> None:
    """Products and gradients differ from the checkpoint's own by the order of sums; those of int8 by its rounding."""
    own: Any = AutoModelForCausalLM.from_pretrained(half.model, dtype=torch.float32)
    name = next(name for name, _ in own.named_modules() if name.endswith(("q_proj", "c_attn")))
    torch.manual_seed(0)
    rows = torch.randn(2, 3, 32)
    found = {}
    for dtype in ("int8", "bf16"):
        with half.client(mask="off", keep="attention", keep_dtype=dtype) as client:
            layer = client.load_model().get_submodule(name)
            one, other = (rows.clone().requires_grad_() for _ in range(2))
            expected, product = own.get_submodule(name)(one), layer(other)
            expected.square().sum().backward()
            product.square().sum().backward()
            assert one.grad is not None
            assert other.grad is not None
            found[dtype] = relative(expected, product), relative(one.grad, other.grad)
            one_row = layer(rows[:1, :1])
            assert relative(own.get_submodule(name)(rows[:1, :1]), one_row) < (1e-6 if dtype == "bf16" else 0.05)
            said = client.explain()
            assert f"of {dtype} weights in memory" in said
    assert max(found["bf16"]) < 1e-5
    assert min(found["int8"]) > 1e-3


def test_bf16_layers_take_twice_the_memory_and_are_trained(half: ScriptedProvider, tmp_path: Path) -> None:
    losses, sizes = [], []
    for dtype in ("int8", "bf16"):
        with half.client(mask="off", keep="attention", keep_dtype=dtype) as client:
            losses.append(client.finetune(ROWS, lora(), tmp_path / dtype, **SHORT).losses)
            sizes.append(re.findall(r"by ([\d.]+) kB of", client.explain())[0])
    assert float(sizes[1]) == pytest.approx(2 * float(sizes[0]), abs=0.2)
    assert losses[0] == pytest.approx(losses[1], abs=0.05)
    assert losses[0] != losses[1]


def test_a_checkpoint_that_was_changed_after_the_comparison_is_refused(
    half: ScriptedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison reads the prepared store, and the weights in bf16 are read from the checkpoint after it."""
    options: dict[str, Any] = {"mask": "off", "keep": "attention", "keep_dtype": "bf16"}
    with half.client(**options) as client:
        client.connect()
    layer = TrustedCheckpoint.layer

    def changed(checkpoint: TrustedCheckpoint, name: str, kind: Any) -> torch.Tensor:
        return layer(checkpoint, name, kind) + 1

    monkeypatch.setattr(TrustedCheckpoint, "layer", changed)
    half.forget_calls()
    with pytest.raises(ConfigurationError, match="was changed while in use"), half.client(**options):
        pass
    assert half.calls == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"keep": "attention", "keep_dtype": "bf61", "verify": "smollm2-135m"}, "did you mean bf16?"),
        ({"keep": "attention", "keep_dtype": 7, "verify": "smollm2-135m"}, "int8, bf16"),
        ({"keep_dtype": "bf16", "verify": "smollm2-135m"}, "has no effect without keep="),
        ({"keep": "attention", "keep_dtype": "bf16"}, "name it with verify= (--verify)"),
    ],
)
def test_a_wrong_type_of_kept_weights_is_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        TenantClient("grpcs://nowhere:1", **options)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- weights that the provider gives ---------------------------------------------------------------------------------


def test_without_verify_weights_are_fetched(provider: ScriptedProvider, tmp_path: Path) -> None:
    """Fine-tuning, also in windows, an engine with its adapter, and an endpoint give what they give without `keep`."""
    expected: list[Any] = []
    for keep in (None, "attention"):
        provider.forget_calls()
        with provider.client(mask="off", verify=False, keep=keep, cache=tmp_path / "cache") as client:
            folder = tmp_path / str(keep)
            results = [
                client.finetune(ROWS, lora(), folder / name, **SHORT, **options).losses
                for name, options in (("a", {}), ("b", {"window_tokens": 40}))
            ]
            with Engine(client, folder) as engine:
                results += one_by_one(
                    engine, ("who?", "b"), torch.eye(VOCAB)[torch.tensor([[5, 6], [8, 9]])], ("a", None)
                )
            with endpoint_of(client) as endpoint:
                (model, *_) = [each.id for each in official(endpoint).models.list()]
                asked: Any = WHO
                done = official(endpoint).chat.completions.create(
                    model=model, messages=asked, max_tokens=6, temperature=0
                )
                results.append(done.choices[0].message.content)
        assert bool(ATTENTION_LAYERS & set(layers_asked(provider))) == (keep is None)
        expected.append(results)
    for one, other in zip(*expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    assert len(list((tmp_path / "cache" / "weights").iterdir())) == 4


def test_float_arithmetic_does_not_go_with_kept_layers(provider: ScriptedProvider) -> None:
    provider.forget_calls()
    for options in ({"mask": "gaussian-pool"}, {"mask": "off", "arithmetic": "float"}):
        with (
            pytest.raises(ConfigurationError, match=r"keep= \(--keep\) needs ring arithmetic"),
            provider.client(verify=False, keep="attention", **options),
        ):
            pass
    assert provider.calls == []


# ---- what is sent ----------------------------------------------------------------------------------------------------


def test_of_kept_layers_nothing_is_sent_masked_fetched_or_checked(
    provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Hints are fetched, so that each shows as a call."""
    kept = choose_kept(("attention",), manifest_of(provider)).groups
    checked: list[int] = []
    add = Verifier.add_group

    def noted(verifier: Verifier, group: int, weight: torch.Tensor) -> None:
        checked.append(group)
        add(verifier, group, weight)

    monkeypatch.setattr(Verifier, "add_group", noted)
    options = {**TOY_OPTIONS, "hints": "fetched"}
    provider.forget_calls()
    with provider.client(mask_options=options, cache=tmp_path / "cache", keep="attention") as client:
        client.fetch_hints(backward=True)
        client.prepare(4, backward=True)
        model: PreTrainedModel = get_peft_model(client.load_model(), lora())  # type: ignore[assignment]
        model(input_ids=IDS, labels=IDS).loss.backward()
    assert set(checked) == set(range(9)) - kept
    assert {call.purpose for call in provider.calls} == {"hint", "product"}
    assert {call.group for call in provider.calls} == set(range(9)) - kept


def test_the_calls_do_not_depend_on_values(provider: ScriptedProvider) -> None:
    seen = []
    with provider.client(mask="off", keep="attention") as client:
        model = client.load_model()
        for ids in (IDS, IDS.flip(1), torch.full_like(IDS, 9)):
            provider.forget_calls()
            with torch.no_grad():
                model(input_ids=ids)
            seen.append([(call.group, call.direction, call.num_rows) for call in provider.calls])
    assert seen[0] == seen[1] == seen[2] != []


def test_half_the_calls_of_the_blocks(provider: ScriptedProvider) -> None:
    counts = []
    for keep in (None, "attention"):
        with provider.client(mask="off", keep=keep) as client:
            before = client.traffic
            client.generate("who?", max_new_tokens=5, fixed_length=True)
            after = client.traffic
            counts.append((after.calls - before.calls, after.bytes_up - before.bytes_up))
    passes = counts[0][0] // 9
    assert counts[0][0] == passes * 9
    assert counts[1][0] == passes * 5  # gate and up, down of two blocks; the head
    assert counts[1][1] < counts[0][1]


# ---- what inherits it ------------------------------------------------------------------------------------------------


def run_of(client: TenantClient, output: Path, **options: Any) -> tuple[Any, int]:
    before = client.traffic.calls
    result = client.finetune(ROWS, lora(), output, **{**SHORT, **options})
    return result, client.traffic.calls - before


@pytest.mark.parametrize(
    "options",
    [{}, {"window_tokens": 40}, {"checkpointing": "replies"}, {"checkpointing": "recompute"}],
    ids=["plain", "windows", "replies", "recompute"],
)
def test_fine_tuning(provider: ScriptedProvider, tmp_path: Path, options: dict[str, Any]) -> None:
    """Losses are equal, the plan is what the run takes, and the adapter is one for all layers."""
    with provider.client(mask="off") as client:
        whole, whole_calls = run_of(client, tmp_path / "whole", **options)
    provider.forget_calls()
    with provider.client(mask="off", keep="attention") as client:
        bill = client.plan(ROWS, lora(), **{**SHORT, **options})
        result, calls = run_of(client, tmp_path / "kept", **options)
        answer = client.generate("who?", tmp_path / "kept", max_new_tokens=6)
    assert result.losses == whole.losses
    assert (bill.bytes_up, bill.bytes_down, bill.round_trips) == (result.bytes_up, result.bytes_down, calls)
    assert bill.is_exact
    assert bill.keep == "attention"
    assert calls < 0.65 * whole_calls
    assert result.bytes_up + result.bytes_down < 0.8 * (whole.bytes_up + whole.bytes_down)
    assert not ATTENTION_LAYERS & set(layers_asked(provider))
    adapter = PeftModel.from_pretrained(dequantised(Path(provider.model)), str(tmp_path / "kept"))
    trained = {name for name, each in adapter.named_parameters() if "lora_B" in name and bool(each.any())}
    assert {name.split(".lora_B")[0].rpartition(".")[2] for name in trained} >= ATTENTION_LAYERS
    with provider.client(mask="off") as client:
        assert client.generate("who?", tmp_path / "kept", max_new_tokens=6) == answer
        assert client.generate("who?", tmp_path / "whole", max_new_tokens=6) == answer


def test_the_plan_of_a_masked_run_and_of_answers(provider: ScriptedProvider, tmp_path: Path) -> None:
    for hints in ("local", "stream"):
        options = {**TOY_OPTIONS, "hints": hints}
        with provider.client(mask_options=options, cache=tmp_path / hints, keep="lower:1") as client:
            bill = client.plan(ROWS, lora(), **SHORT)
            result, calls = run_of(client, tmp_path / f"{hints}-adapter")
            assert (bill.bytes_up, bill.bytes_down) == (result.bytes_up, result.bytes_down)
            assert bill.round_trips == calls
    with provider.client(mask="off", keep="attention") as client:
        chat = client.tokenizer.apply_chat_template(WHO, add_generation_prompt=True, return_dict=True)["input_ids"]
        bill = client.plan_tokens(len(chat), 6)
        before = client.traffic
        client.generate("who?", max_new_tokens=6, fixed_length=True)
        assert bill.bytes_up == client.traffic.bytes_up - before.bytes_up
        assert bill.round_trips == client.traffic.calls - before.calls
        assert "kept here  attention" in str(bill)


def test_what_keeping_attention_would_save(provider: ScriptedProvider, tmp_path: Path) -> None:
    with provider.client(mask_options=EXACT, cache=tmp_path / "c") as client:
        client.fetch_hints(backward=True)
        bill = client.plan(ROWS, lora(), **SHORT)
    with provider.client(mask_options=EXACT, cache=tmp_path / "c", keep="attention") as client:
        kept = client.plan(ROWS, lora(), **SHORT)
    (saving,) = [each for each in bill.savings if "keep attention" in each.setting]
    held = 2 * (32 * 64 + 32 * 32)  # q, k, v and o of two blocks
    expected = f"attention computed here (--keep attention; {held / 1e3:.1f} kB of memory)"
    assert saving == Saving(expected, bill.num_bytes - kept.num_bytes)
    assert not [each for each in kept.savings if "--keep " in each.setting]
    with provider.client(mask="off", verify=False) as client:
        assert any("needs --verify" in each.setting for each in client.plan_tokens(3, 4, probe_s=0.0).savings)


def test_a_plan_holds_for_the_same_layers_only(provider: ScriptedProvider, tmp_path: Path) -> None:
    with provider.client(mask="off", keep="attention") as client:
        bill = client.plan(ROWS, lora(), **SHORT)
        provider.forget_calls()
        for other in (replace(bill, keep=""), replace(bill, keep="lower:1")):
            with pytest.raises(ConfigurationError, match=r"keep \(--keep\) is attention, the plan"):
                client.finetune(ROWS, lora(), tmp_path / "a", plan=other, **SHORT)
        assert provider.calls == []


def one_by_one(engine: Engine, prompts: Any, answers: Any, names: Any) -> list[torch.Tensor]:
    """Returns the logits of `together` for each prompt in steps of its own."""
    return [
        together(engine, [prompt], [answer], [name])[0]
        for prompt, answer, name in zip(prompts, answers, names, strict=True)
    ]


def test_an_engine_and_its_adapters(provider: ScriptedProvider, tmp_path: Path) -> None:
    prompts, names = ("who?", "where is it?", "b"), ("a", None, "a")
    with provider.client(mask="off") as client:
        client.finetune(ROWS, lora(), tmp_path / "adapters" / "a", **SHORT)
        folder = tmp_path / "adapters"
        of = [folder / name if name else None for name in names]
        answers = [alone(client, each, 5, adapter) for each, adapter in zip(prompts, of, strict=True)]
        with Engine(client, folder) as engine:
            expected = one_by_one(engine, prompts, answers, names)
    provider.forget_calls()
    with provider.client(mask="off", keep="attention") as client, Engine(client, folder) as engine:
        found = one_by_one(engine, prompts, answers, names)
        shared = together(engine, prompts, answers, names)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert mean_kl(expected, shared) < 1e-4  # which requests share a step is a matter of time
    assert set(layers_asked(provider)) == {"gate_proj", "up_proj", "down_proj", "lm_head"}


def test_an_endpoint(provider: ScriptedProvider) -> None:
    with provider.client(mask="off") as client:
        expected = client.generate("who?", max_new_tokens=6)
    provider.forget_calls()
    with provider.client(mask="off", keep="attention") as client, endpoint_of(client) as endpoint:
        (model, *_) = [each.id for each in official(endpoint).models.list()]
        asked: Any = WHO
        done = official(endpoint).chat.completions.create(model=model, messages=asked, max_tokens=6, temperature=0)
    assert done.choices[0].message.content == expected
    assert provider.calls
    assert not ATTENTION_LAYERS & set(layers_asked(provider))


# ---- what is said ----------------------------------------------------------------------------------------------------


def test_what_explain_says(provider: ScriptedProvider) -> None:
    with provider.client(mask_options=EXACT) as client:
        plain = client.explain()
    with provider.client(mask_options=EXACT, keep="attention") as client:
        lines = dict(line.split("  ", 1) for line in client.explain().splitlines())
    assert "kept here" not in plain
    said = lines["kept here"]
    assert "4 of 9 layer groups (attention) are computed here" in said
    assert "by 6.1 kB of int8 weights in memory" in said
    assert "which they are shows" in said
    before = next(line for line in plain.splitlines() if line.startswith("bytes per token"))
    assert lines["bytes per token"] not in before  # fewer


def test_the_commands(provider: ScriptedProvider, tmp_path: Path) -> None:
    data, recipe = tmp_path / "data.jsonl", tmp_path / "recipe.yaml"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    recipe.write_text("max_steps: 2\nrank: 2\nkeep: attention\n")
    common = ["--url", f"inproc:{provider.model}", "--verify", str(provider.model), "--mask", "off"]
    plan = ["plan", str(data), "--config", str(recipe), *common, "--json"]
    done = CliRunner().invoke(cli.app, plan, catch_exceptions=False)
    assert json.loads(done.stdout)["keep"] == "attention"
    done = CliRunner().invoke(
        cli.app, ["explain", *common, "--keep", "o_proj", "--keep", "lower:1"], catch_exceptions=False
    )
    assert "5 of 9 layer groups (o_proj, lower:1)" in done.stdout
    done = CliRunner().invoke(
        cli.app, ["generate", "who?", *common, "--keep", "attention", "--max-new-tokens", "2"], catch_exceptions=False
    )
    assert done.exit_code == 0
    failed = CliRunner().invoke(cli.app, ["explain", *common, "--keep", "q_poj"])
    assert "the nearest is q_proj" in str(failed.exception)
    assert "\n" not in str(failed.exception)


def test_the_time_of_kept_products_does_not_depend_on_plain_rows(
    provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider sees when the next call comes, so products of kept layers take as long for rows that are zero."""
    asked: list[bool] = []
    multiply = kept.product

    def spy(rows: torch.Tensor, weight: torch.Tensor, are_secret: bool = False) -> torch.Tensor:
        asked.append(are_secret)
        return multiply(rows, weight, are_secret)

    monkeypatch.setattr(kept, "product", spy)
    with provider.client(mask="off", keep="attention") as client:
        logits_of(client)
    assert len(asked) == 4
    assert all(asked)
