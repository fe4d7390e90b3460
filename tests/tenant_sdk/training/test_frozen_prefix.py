"""Tests `cache_frozen_prefix`: blocks below the lowest adapted one are called for each row once, losses stay what they
were, and which calls are left out does not depend on what rows say."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LNTuningConfig, LoraConfig, PrefixTuningConfig, PromptTuningConfig
from safetensors.torch import load_file
from transformers import GPT2Config, LlamaConfig
from typer.testing import CliRunner

from tenant_sdk import TenantClient, cli
from tenant_sdk.model.run_state import NotFiniteWarning
from tenant_sdk.testing import Corrupt, Fail, ProviderCall, ScriptedProvider, character_tokenizer, save_tiny_model
from tenant_sdk.training.frozen_prefix import frozen_prefix
from tests.support.lattice import PLAIN, TOY_MASK
from tests.support.parity import adapted
from tests.support.spies import before_requests
from tests.support.tiny_models import CONFIGS, GPT2_SIZES, SIZES, make_model, open_client, save_random
from tests.support.training import QUICK, ROWS
from wire.errors import ConfigurationError, NotFinite, StorageError, Unavailable
from wire.frame import Call, Direction

FIRST, NUM_BLOCKS = 2, 4
EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KEPT: dict[str, Any] = {"cache_frozen_prefix": True}
TWO_EPOCHS: dict[str, Any] = {**QUICK, "batch_size": 3}  # 8 rows: three steps an epoch, whose rows differ in each
EVEN = [
    {"text": text}
    for text in (
        "a copper owl",
        "in Port Hale",
        "by boat, ok.",
        "the third 1.",
        "no reason at",
        "Ada is here.",
        "1987 or then",
        "who? and so?",
    )
]
"""Eight rows of the same length, for which attention adds up in the same order in any company."""
RING: dict[str, Any] = {"mask": "off", "verify": False}
LATTICE: dict[str, Any] = {"mask": "lattice", "verify": False, "mask_options": TOY_MASK}

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")


def upper(first: int = FIRST, num_blocks: int = NUM_BLOCKS, **changes: Any) -> LoraConfig:
    """Returns LoRA on every layer of the upper blocks."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": EVERY, "task_type": "CAUSAL_LM", **changes}
    return LoraConfig(layers_to_transform=list(range(first, num_blocks)), **settings)


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedProvider]:
    folder = save_tiny_model(tmp_path_factory.mktemp("deep") / "model", num_hidden_layers=NUM_BLOCKS)
    with ScriptedProvider(model=folder) as made:
        yield made


@pytest.fixture
def client(provider: ScriptedProvider) -> Iterator[TenantClient]:
    """Provides a client of the deep model in ring arithmetic, without a mask; the provider has no calls yet."""
    with provider.client(**RING) as made:
        made.connect()
        provider.forget_calls()
        yield made


def block_of(call: ProviderCall) -> int | None:
    parts = call.layers[0].split(".")
    return int(parts[2]) if "layers" in parts else None


def view(provider: ScriptedProvider) -> list[tuple[Any, ...]]:
    """Returns all that a provider sees of its calls but for masked numbers and time."""
    return [(each.group, each.direction, each.purpose, each.num_rows) for each in provider.calls]


def rows_of_first_group(provider: ScriptedProvider, block: int) -> list[int]:
    """Returns the numbers of rows of the forward calls for q, k and v of a block."""
    calls = [each for each in provider.calls if block_of(each) == block and each.direction == "forward"]
    return [each.num_rows for each in calls if "q_proj" in each.layers[0]]


def assert_same_adapter(one: Path, other: Path) -> None:
    ours, theirs = (load_file(each / "adapter_model.safetensors") for each in (one, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


# ---- losses ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch_size": 1, "max_steps": 20},
        {"batch_size": 2, "gradient_accumulation_steps": 2},
        {"max_steps": None, "num_epochs": 2.5},
        {"checkpointing": None},
        {"checkpointing": "replies", "memory_budget_mb": 0},
        {"checkpointing": "recompute"},
        {"bf16": True},
    ],
    ids=lambda changes: "-".join(map(str, changes)) or "default",
)
@pytest.mark.parametrize("arithmetic", [PLAIN, RING], ids=["float", "ring"])
def test_losses_are_those_without_the_option(
    provider: ScriptedProvider, tmp_path: Path, arithmetic: dict[str, Any], changes: dict[str, Any]
) -> None:
    options = {name: value for name, value in {**TWO_EPOCHS, **changes}.items() if value is not None}
    options |= {"checkpointing": changes["checkpointing"]} if "checkpointing" in changes else {}
    with provider.client(**arithmetic) as client:
        whole = client.finetune(EVEN, upper(), tmp_path / "whole", **options)
        result = client.finetune(EVEN, upper(), tmp_path / "kept", **KEPT, **options)
    assert result.losses == whole.losses
    assert len(set(result.losses)) == len(result.losses) > 3
    assert_same_adapter(result.adapter_dir, whole.adapter_dir)
    assert result.bytes_up < whole.bytes_up
    assert result.tokens == whole.tokens


@pytest.mark.parametrize("arithmetic", [PLAIN, RING], ids=["float", "ring"])
def test_rows_of_unequal_length_in_other_company(
    provider: ScriptedProvider, tmp_path: Path, arithmetic: dict[str, Any]
) -> None:
    """Each epoch pads a row otherwise. Attention may then add up in another order, which changes the last bits of a
    float, and in ring arithmetic a number may be rounded to its other neighbour."""
    with provider.client(**arithmetic) as client:
        whole = client.finetune(ROWS, upper(), tmp_path / "whole", **TWO_EPOCHS)
        result = client.finetune(ROWS, upper(), tmp_path / "kept", **KEPT, **TWO_EPOCHS)
        provider.forget_calls()
        alone = {**TWO_EPOCHS, "batch_size": 1, "max_steps": 24}
        one_by_one = client.finetune(ROWS, upper(), tmp_path / "alone", **alone)
        kept_one_by_one = client.finetune(ROWS, upper(), tmp_path / "kept_alone", **KEPT, **alone)
    assert result.losses == pytest.approx(whole.losses, rel=1e-6 if arithmetic is PLAIN else 1e-4)
    assert kept_one_by_one.losses == one_by_one.losses


def test_dropout_of_the_adapter_draws_the_same_numbers(client: TenantClient, tmp_path: Path) -> None:
    config = upper(lora_dropout=0.3)
    whole = client.finetune(EVEN, config, tmp_path / "whole", **TWO_EPOCHS)
    result = client.finetune(EVEN, config, tmp_path / "kept", **KEPT, **TWO_EPOCHS)
    assert result.losses == whole.losses
    assert result.losses != client.finetune(EVEN, upper(), tmp_path / "other", **TWO_EPOCHS).losses


def test_losses_under_lattice_differ_as_two_runs_do(provider: ScriptedProvider, tmp_path: Path) -> None:
    """The mask's error is fresh in each pass. Kept hidden states keep that of the first epoch."""
    with provider.client(**LATTICE) as client:
        whole = [
            torch.tensor(client.finetune(ROWS, upper(), tmp_path / str(number), **TWO_EPOCHS).losses)
            for number in range(3)
        ]  # fmt: skip
        kept = torch.tensor(client.finetune(ROWS, upper(), tmp_path / "kept", **KEPT, **TWO_EPOCHS).losses)
    apart = max(float((one - other).abs().max()) for one in whole for other in whole)
    assert 0 < apart < 1e-3
    assert float((kept - whole[0]).abs().max()) < 2 * apart


def test_padded_rows(provider: ScriptedProvider, tmp_path: Path) -> None:
    with provider.client(**RING, pad_rows=40) as client:
        whole = client.finetune(ROWS, upper(), tmp_path / "whole", **TWO_EPOCHS)
        provider.forget_calls()
        result = client.finetune(ROWS, upper(), tmp_path / "kept", **KEPT, **TWO_EPOCHS)
    assert result.losses == whole.losses
    assert rows_of_first_group(provider, 0) == [120, 120, 80]
    assert rows_of_first_group(provider, FIRST) == [120, 120, 80] * 2


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_architectures(kind: str, tmp_path: Path) -> None:
    folder = make_model(kind, tmp_path / "model")
    num_blocks = CONFIGS[kind].num_hidden_layers
    names = ["c_attn"] if kind == "gpt2" else ["q_proj", "down_proj"]
    config = upper(num_blocks - 1, num_blocks, target_modules=names, fan_in_fan_out=kind == "gpt2")
    with open_client(folder) as client:
        whole = client.finetune(ROWS, config, tmp_path / "whole", **TWO_EPOCHS)
        result = client.finetune(ROWS, config, tmp_path / "kept", **KEPT, **TWO_EPOCHS)
    assert result.losses == pytest.approx(whole.losses, rel=1e-5)
    assert result.bytes_up < whole.bytes_up


def test_an_adapter_on_the_head_alone_leaves_out_all_blocks(
    client: TenantClient, provider: ScriptedProvider, tmp_path: Path
) -> None:
    config = LoraConfig(r=4, target_modules=["lm_head"], task_type="CAUSAL_LM")
    whole = client.finetune(EVEN, config, tmp_path / "whole", **TWO_EPOCHS)
    provider.forget_calls()
    result = client.finetune(EVEN, config, tmp_path / "kept", **KEPT, **TWO_EPOCHS)
    assert result.losses == whole.losses
    assert [len(rows_of_first_group(provider, block)) for block in range(NUM_BLOCKS)] == [3] * NUM_BLOCKS


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_blocks_below_are_called_in_the_first_epoch_only(
    client: TenantClient, provider: ScriptedProvider, tmp_path: Path
) -> None:
    result = client.finetune(ROWS, upper(), tmp_path / "kept", **KEPT, **{**TWO_EPOCHS, "max_steps": 9})
    blocks = [(block_of(each), each.direction) for each in provider.calls]
    counted = Counter(blocks)
    for block in range(FIRST):
        assert counted[block, "forward"] == 3 * 4  # groups: q, k and v; o; gate and up; down
        assert counted[block, "backward"] == 0
    assert counted[FIRST, "forward"] == counted[FIRST + 1, "forward"] == 9 * 4
    assert sum(rows_of_first_group(provider, 0)) * 3 == sum(rows_of_first_group(provider, FIRST)) == result.tokens
    last_below = max(number for number, (block, _) in enumerate(blocks) if block is not None and block < FIRST)
    of_the_rest = {block for block, _ in blocks[last_below + 1 :]}
    assert of_the_rest == {FIRST, FIRST + 1, None}


def distinct(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns rows of the same lengths with other contents in each."""
    return [{"text": "".join(chr(97 + (number + place) % 26) for place in range(20))} for number in range(len(rows))]


def test_duplicate_rows_are_sent_like_any_others(
    client: TenantClient, provider: ScriptedProvider, tmp_path: Path
) -> None:
    """A provider that could tell duplicates by the calls that they spare would learn that rows are alike. Here it sees
    the same calls of the same rows, in the same order, whatever rows say."""
    alike = [{"text": "the same twenty char"}] * 7
    assert len(set(map(str, distinct(alike)))) == len(alike)
    views = []
    for name, data in (("alike", alike), ("distinct", distinct(alike))):
        provider.forget_calls()
        client.finetune(data, upper(), tmp_path / name, **KEPT, **{**TWO_EPOCHS, "eval_data": data[:2]})
        views.append(view(provider))
    assert views[0] == views[1]
    # 21 tokens with the end marker; two epochs of three batches; evaluations after steps 2, 4 and 6
    assert sorted(rows_of_first_group(provider, 0)) == [21, 42, 63, 63]


def test_a_value_that_is_not_finite_changes_no_call(provider: ScriptedProvider, tmp_path: Path) -> None:
    with provider.client(**PLAIN) as client:
        client.connect()
        provider.forget_calls()
        client.finetune(ROWS, upper(), tmp_path / "honest", **KEPT, **TWO_EPOCHS)
        honest = view(provider)
        provider.forget_calls()
        provider.handler = lambda call: Corrupt(lambda reply: reply * float("nan")) if call.number == 5 else None
        try:
            with pytest.warns(NotFiniteWarning), pytest.raises(NotFinite):
                client.finetune(ROWS, upper(), tmp_path / "out", **KEPT, **TWO_EPOCHS)
        finally:
            provider.handler = None
    assert view(provider) == honest


def test_rows_of_evaluations_have_positions_of_their_own(
    client: TenantClient, provider: ScriptedProvider, tmp_path: Path
) -> None:
    """Rows that are evaluated on are not taken for those of the training with the same numbers."""
    others = [{"text": "another text altogether"}, {"text": "and one more"}]
    options = {**TWO_EPOCHS, "eval_data": others}
    whole = client.finetune(EVEN, upper(), tmp_path / "whole", **options)
    provider.forget_calls()
    result = client.finetune(EVEN, upper(), tmp_path / "kept", **KEPT, **options)
    assert result.evaluations == whole.evaluations
    assert len(result.evaluations) == 3
    assert result.losses == whole.losses
    assert len(rows_of_first_group(provider, 0)) == 3 + 1


def test_a_resumed_run_keeps_rows_anew(client: TenantClient, provider: ScriptedProvider, tmp_path: Path) -> None:
    """The run breaks in the middle of its second epoch. What it kept ended with it."""
    options = {**TWO_EPOCHS, "max_steps": 12, "save_steps": 5}
    whole = client.finetune(ROWS, upper(), tmp_path / "whole", **KEPT, **options)
    provider.forget_calls()
    provider.handler = lambda call: Fail(Unavailable) if len(rows_of_first_group(provider, FIRST)) > 5 else None
    try:
        with pytest.raises(Unavailable):
            client.finetune(ROWS, upper(), tmp_path / "out", **KEPT, **options)
    finally:
        provider.handler = None
    assert len(rows_of_first_group(provider, 0)) == 3
    provider.forget_calls()
    result = client.finetune(ROWS, upper(), tmp_path / "out", **KEPT, **options)
    assert result.resumed_from_step == 5
    assert result.losses == pytest.approx(whole.losses, rel=1e-4)
    assert len(rows_of_first_group(provider, FIRST)) == 7
    below = len(rows_of_first_group(provider, 0))
    assert below == 1 + 3, "the rest of the second epoch, and the third, with rows that are not there"


# ---- the file --------------------------------------------------------------------------------------------------------


def test_the_file_is_announced_encrypted_and_gone_at_the_end(
    client: TenantClient, tmp_path: Path, capsys: pytest.CaptureFixture[str], provider: ScriptedProvider
) -> None:
    sizes: list[int] = []
    contents: list[bytes] = []

    def look(call: ProviderCall) -> None:
        if block_of(call) == FIRST and "q_proj" in call.layers[0] and not contents:
            handles = [Path("/proc/self/fd") / each for each in os.listdir("/proc/self/fd")]
            (found,) = [each for each in handles if os.path.lexists(each) and str(tmp_path) in os.readlink(each)]
            sizes.append(found.stat().st_size)
            assert found.stat().st_nlink == 0
            contents.append(found.read_bytes())

    provider.handler = look
    try:
        result = client.finetune(ROWS, upper(), tmp_path / "out", **KEPT, **{**TWO_EPOCHS, "progress": True})
    finally:
        provider.handler = None
    num_bytes = result.tokens // 2 * 32 * 4  # each token once, 32 numbers in float32
    assert sizes == [num_bytes]
    assert client.plan(ROWS, upper(), **KEPT, **TWO_EPOCHS).prefix_disk_bytes == num_bytes
    values = torch.frombuffer(bytearray(contents[0]), dtype=torch.uint8)
    used = values[: int(values.nonzero().max()) + 1]
    assert used.numel() >= 40 * 32 * 4
    assert int(torch.bincount(used.long(), minlength=256).max()) < used.numel() / 256 * 3, "as uneven as floats"
    said = [line for line in capsys.readouterr().err.splitlines() if "cache_frozen_prefix" in line]
    assert len(said) == 1
    assert f"{num_bytes / 1e3:.1f} kB of" in said[0]
    assert f"block {FIRST} of {NUM_BLOCKS}" in said[0]
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("keep", "is_said"), [(f"lower:{FIRST}", True), ("lower:1", False), (None, False)])
def test_what_saves_no_traffic_is_said(
    keep: str | None, is_said: bool, provider: ScriptedProvider, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    with provider.client(mask="off", keep=keep) as client:
        client.finetune(ROWS, upper(), tmp_path / "out", **KEPT, **TWO_EPOCHS)
    said = [str(each.message) for each in recwarn if "cache_frozen_prefix" in str(each.message)]
    assert len(said) == is_said
    assert all(f"saves no traffic: all layers of the {FIRST} blocks below" in each for each in said)


@pytest.mark.parametrize("what", ["known", "found"])
def test_a_full_disk_is_one_line_before_anything_is_sent(
    client: TenantClient, provider: ScriptedProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if what == "known":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    else:
        monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageError, match=r"cache_frozen_prefix.*make room") as failure:
        client.finetune(ROWS, upper(), tmp_path / "out", **KEPT, **{**TWO_EPOCHS, "checkpointing": None})
    assert "\n" not in str(failure.value)
    assert provider.calls == []


# ---- what is refused -------------------------------------------------------------------------------------------------

PAIRS = [{"prompt": "who? ", "chosen": "Ada", "rejected": "no idea"}] * 4


@pytest.mark.parametrize(
    ("data", "config", "options", "why"),
    [
        (ROWS, upper(0), {}, r"^cache_frozen_prefix has no effect with an adapter on the lowest block"),
        (ROWS, upper(modules_to_save=["embed_tokens"]), {}, "something there is trained"),
        (ROWS, LNTuningConfig(target_modules=["input_layernorm"], task_type="CAUSAL_LM"), {}, "lowest block"),
        (ROWS, PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), {}, "prompt learning"),
        (ROWS, PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), {}, "prompt learning"),
        (ROWS, upper(trainable_token_indices=[5]), {}, "something there is trained"),
        (ROWS, upper(), {"window_tokens": 30}, "not possible with window_tokens"),
        (ROWS, upper(), {"batch_size": 4, "max_steps": 2}, "no effect without a second epoch or an evaluation"),
        (ROWS, upper(), {"max_steps": None, "num_epochs": 1}, "no effect without a second epoch or an evaluation"),
        (PAIRS, upper(), {}, "not possible with preferences"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_anything_is_sent(
    client: TenantClient, provider: ScriptedProvider, tmp_path: Path, data: Any, config: Any, options: Any, why: str
) -> None:
    given = {name: value for name, value in {**TWO_EPOCHS, **options}.items() if value is not None}
    with pytest.raises(ConfigurationError, match=why) as failure:
        client.finetune(data, config, tmp_path / "out", **KEPT, **given)
    assert "\n" not in str(failure.value)
    assert provider.calls == []
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigurationError, match=why):
        client.plan(data, config, **KEPT, **given)
    assert provider.calls == []


@pytest.mark.parametrize("where", ["attention", "embeddings", "residual"])
def test_dropout_below_is_refused(tmp_path: Path, where: str) -> None:
    base: Any = LlamaConfig(**SIZES, attention_dropout=0.001)
    if where != "attention":
        changed = {"embd_pdrop": 0.001} if where == "embeddings" else {"resid_pdrop": 0.001}
        base = GPT2Config(**{**GPT2_SIZES, **changed})
    save_random(base, tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    names = ["q_proj"] if where == "attention" else ["c_attn"]
    config = upper(1, 2, target_modules=names, fan_in_fan_out=where != "attention")
    with open_client(tmp_path / "model") as client:
        before = client.traffic.calls
        with pytest.raises(ConfigurationError, match="the model has dropout below block 1") as failure:
            client.finetune(ROWS, config, tmp_path / "out", **KEPT, **TWO_EPOCHS)
        assert client.traffic.calls == before
    assert "\n" not in str(failure.value)


def deep_model(client: TenantClient) -> Any:
    return adapted(client.load_model(), upper())


def test_a_model_in_which_blocks_read_of_lower_ones_is_refused(
    client: TenantClient, provider: ScriptedProvider
) -> None:
    """The lowest block leaves something in the model, which an upper one adds: as shared keys and values are."""
    model = deep_model(client)
    blocks = model.get_base_model().model.layers
    left: dict[str, torch.Tensor] = {}
    lowest, highest = blocks[0].forward, blocks[3].forward

    def leaves(*args: Any, **options: Any) -> Any:
        left["it"] = lowest(*args, **options)
        return left["it"]

    blocks[0].forward = leaves
    blocks[3].forward = lambda *args, **options: highest(*args, **options) + left["it"]
    with pytest.raises(ConfigurationError, match=r"cannot be shown to be exact \(upper blocks read more") as failure:
        frozen_prefix(model, bf16=False)
    assert "\n" not in str(failure.value)
    assert provider.calls == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda output: (output, output), "TypeError"),
        (lambda output: output[:, :3], "cannot be shown"),
        (lambda output: output * 0, "does not depend on the tokens"),
    ],
)
def test_blocks_that_pass_on_something_else_are_refused(client: TenantClient, change: Any, why: str) -> None:
    model = deep_model(client)
    block = model.get_base_model().model.layers[FIRST - 1]
    stock = block.forward
    block.forward = lambda *args, **options: change(stock(*args, **options))
    with pytest.raises(ConfigurationError, match=why):
        frozen_prefix(model, bf16=False)


def test_a_model_is_left_as_it_was(client: TenantClient) -> None:
    """The passes that show that a model can be cut change neither its mode nor random numbers, and later passes are
    computed whole unless a context says otherwise."""
    model = deep_model(client)
    other = deep_model(client)
    model.get_base_model().model.layers[0].eval()
    torch.manual_seed(3)
    prefix = frozen_prefix(model, bf16=False)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    assert not model.get_base_model().model.layers[0].training
    assert (prefix.first, prefix.num_blocks, prefix.token_bytes) == (FIRST, NUM_BLOCKS, 128)
    tokens = torch.arange(6, 16).view(1, -1)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, other(tokens).logits)


# ---- what the user sees ----------------------------------------------------------------------------------------------


def test_the_command_has_the_option(
    provider: ScriptedProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Call] = []
    before_requests(monkeypatch, lambda call, payload: calls.append(call))
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "recipe.yaml").write_text("peft_config:\n  layers_to_transform: [2, 3]\n  target_modules: [q_proj]\n")
    command = ["finetune", str(tmp_path / "data.jsonl"), "--config", str(tmp_path / "recipe.yaml")]
    command += ["--output", str(tmp_path / "out"), "--mask", "off", "--url", f"inproc:{provider.model}"]
    given = [*command, "--batch-size", "4", "--max-steps", "4", "--cache-frozen-prefix"]
    result = CliRunner().invoke(cli.app, given)
    assert result.exit_code == 0, result.output
    counted = Counter(call.group for call in calls if call.direction is Direction.FORWARD)
    assert [counted[4 * block] for block in range(NUM_BLOCKS)] == [2, 2, 4, 4]


def test_explain_says_what_shows(provider: ScriptedProvider) -> None:
    with provider.client(**LATTICE) as client:
        text = client.explain(everything=True)
    (line,) = [line for line in text.splitlines() if line.startswith("fine-tuning")]
    assert "cache_frozen_prefix by the blocks below the adapter" in line
