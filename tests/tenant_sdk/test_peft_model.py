"""Tests that an adapter's file is used whole or refused, with one verdict for `generate` and for the engine, that no
folder can harm the process that loads it, and that `generate` answers with the adapter that is in the folder now."""

from __future__ import annotations

import gc
import json
import os
import shutil
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from tenant_sdk import TenantClient
from tenant_sdk.peft_model import adapted_model, say_how_little
from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.adapters import targets as patterns
from tests.support.saved_adapters import Bell, Openings, save_adapter, stepped
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
        loan = store.reserve(folder.name)
        bell.wait_for(loan)
        if loan.failure is not None:
            raise loan.failure
        return stepped(store, remote, [(loan.adapter_index, IDS)])[0]
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
        renamed(lambda key: key.replace(".weight", ".default.weight")), "which is no factor"
    ),
    "a layer that the model lacks": (factors_of(Q.replace("layers.0", "layers.9")), "no linear layer 'model.layers.9"),
    "a layer that the settings do not name": (factors_of(K, 16), "k_proj.lora_A.weight', a layer that its tar"),
    "the head, which the settings do not name": (factors_of(f"{PREFIX}lm_head", 101), "lm_head.lora_A.weight'"),
    "a copy of a base layer": (with_more(f"{Q}.base_layer.weight", 32, 32), "a copy of a base layer"),
    "a copy of the head": (with_more(f"{PREFIX}lm_head.base_layer.weight", 101, 32), "a copy of a base layer"),
    "a base layer by its own name": (with_more(f"{Q}.weight", 32, 32), "no factor of a LoRA layer"),
    "a norm": (with_more(f"{PREFIX}model.norm.weight", 32), "another form than a matrix"),
    "an embedding": (with_more(f"{PREFIX}model.embed_tokens.weight", 101, 32), "no factor of a LoRA layer"),
    "magnitudes without use_dora": (with_more(f"{Q}.lora_magnitude_vector", 1, 32), "which is DoRA"),
    "biases without lora_bias": (with_more(f"{Q}.lora_B.bias", 1, 32), "no factor of a LoRA layer"),
    "experts' parameters": (with_more(f"{PREFIX}model.layers.0.mlp.experts.lora_A.weight", 8, 32), "no linear layer"),
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
        lambda path: tensors(path, lambda saved: saved.update({f"{Q}.lora_A.weight": torch.zeros(32, 8)})), "have the"
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


@pytest.mark.parametrize("case", [
    "names of a compiled model, inside", "names without the prefix", "a layer that the model lacks",
    "a layer that the settings do not name", "a copy of the head", "biases without lora_bias",
])  # fmt: skip
def test_stock_peft_over_load_model_refuses_what_it_would_leave_out(
    case: str, folder: Path, chat_client: TenantClient, chat_folder: Path
) -> None:
    REFUSED[case][0](folder)
    assert stock(chat_folder, folder) is not None, "stock PEFT on a plain model answers without the tensor"
    with pytest.raises(ConfigurationError, match="PEFT does not use: save the adapter") as caught:
        PeftModel.from_pretrained(chat_client.load_model(), str(folder))
    assert "\n" not in str(caught.value)


# ---- hostile folders -------------------------------------------------------------------------------------------------

ENDLESS = r"(?:[a-z_.0-9]+)+!"
DEEP: Any = json.loads("[" * 900 + "]" * 900)
MANY_NAMES = [f"n{number}" for number in range(60_000)]
HOSTILE: dict[str, dict[str, Any]] = {
    "an endless pattern of layers": {"target_modules": ENDLESS},
    "an endless pattern of layers to leave out": {"exclude_modules": ENDLESS},
    "an endless pattern of ranks": {"rank_pattern": {ENDLESS: 4}},
    "an endless pattern of alphas": {"alpha_pattern": {ENDLESS: 4}},
    "an endless pattern of numbered layers": {"layers_to_transform": [0], "layers_pattern": ENDLESS},
    "many names of numbered layers": {"layers_to_transform": [0], "layers_pattern": MANY_NAMES},
    "many names of numbered layers, and whole norms": {
        "layers_to_transform": [0], "layers_pattern": MANY_NAMES, "modules_to_save": ["norm"]
    },
    "an endless pattern of whole layers": {"modules_to_save": [ENDLESS]},
    "a pattern that takes much memory": {"target_modules": r"(?:(?:(?:a{9999}){9999}){9999}){9999}"},
    "a pattern that is none": {"target_modules": "("},
    "a pattern of many ways": {"target_modules": "(" + "|".join(["[a-z_.0-9]*"] * 2000) + ")*!"},
    "repeated layers": {"layer_replication": [[0, 1]] * 100_000},
    "a module to import": {"megatron_config": {"x": 1}, "megatron_core": "antigravity"},
    "a huge rank": {"r": 1 << 60},
    "a huge rank with whole norms": {"r": 1 << 19, "modules_to_save": ["norm"]},
    "a rank beyond all sizes with whole norms": {"r": 1 << 60, "modules_to_save": ["norm"]},
    "no rank": {"r": None},
    "a rank that is a text": {"r": "8"},
    "a rank that is a table": {"r": {}},
    "layers that are a number": {"target_modules": 7},
    "layers that are tables": {"target_modules": [{}, 1]},
    "layers that are deep": {"target_modules": DEEP},
    "layers to leave out that are a number": {"exclude_modules": 7},
    "numbers of layers that are texts": {"layers_to_transform": "x"},
    "no kind": {"peft_type": None},
    "a kind that is a list": {"peft_type": ["LORA"]},
    "a kind that PEFT lacks": {"peft_type": "NOPE"},
    "another kind": {"peft_type": "IA3"},
    "a kind of prompts": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 1 << 60, "r": None, "lora_alpha": None},
    "prompts that take all memory": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 1 << 20},
    "a model to fetch": {"peft_type": "SHADOW", "shadow_model": "acme/elsewhere"},
    "a task that PEFT lacks and whole norms": {"task_type": "NOPE", "bias": "nope"},
    "an alpha that is none": {"lora_alpha": "x"},
    "an alpha without end": {"lora_alpha": float("inf"), "modules_to_save": ["norm"]},
    "a setting that nobody knows": {"something_new": 1},
    "a setting of a long name": {"x" * 100_000: 1},
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_folder_is_refused_in_one_line_everywhere(
    case: str, folder: Path, chat_client: TenantClient, remote: Any
) -> None:
    settings(folder, **HOSTILE[case])
    began = time.process_time()
    for said in (generated(chat_client, folder), served(remote, folder)):
        assert isinstance(said, str)
        assert "\n" not in said
        assert len(said) < 500
    assert time.process_time() - began < 20


RAW: dict[str, Callable[[Path], object]] = {
    "no settings": lambda path: (path / CONFIG).unlink(),
    "no weights": lambda path: (path / WEIGHTS).unlink(),
    "settings that are a folder": lambda path: ((path / CONFIG).unlink(), (path / CONFIG).mkdir()),
    "settings that are no text": lambda path: (path / CONFIG).write_bytes(b"\xff\xfe{"),
    "settings that are deep": lambda path: (path / CONFIG).write_text("[" * 100_000),
    "settings that are a list": lambda path: (path / CONFIG).write_text("[]"),
    "settings that are long": lambda path: (path / CONFIG).write_text('{"a": "' + "x" * (1 << 20) + '"}'),
    "weights that are none": lambda path: (path / WEIGHTS).write_bytes(b"garbage!" * 4),
    "weights of a large header": lambda path: (path / WEIGHTS).write_bytes(b"\xff" * 7 + b"\x00{}"),
    "weights that are cut": lambda path: (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-5]),
    "weights without tensors": lambda path: save_file({}, path / WEIGHTS),
    "weights of whole numbers": lambda path: tensors(
        path, lambda saved: {key: each.to(torch.int32) for key, each in saved.items()}
    ),
    "weights that are a pipe": lambda path: ((path / WEIGHTS).unlink(), os.mkfifo(path / WEIGHTS)),
}


@pytest.mark.parametrize("case", RAW)
def test_files_that_are_none_are_refused_in_one_line_everywhere(
    case: str, folder: Path, chat_client: TenantClient, remote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.hf_hub_download", lambda *_, **__: pytest.fail("asked the hub"))
    RAW[case](folder)
    said = generated(chat_client, folder), served(remote, folder)
    assert isinstance(said[0], str)
    assert said[0] == said[1]
    assert "\n" not in said[0]


@pytest.mark.parametrize("adapter", ["nowhere", "a\0b", "x" * 5000, "", 7, b"x", ["x"]])
def test_what_is_no_folder_is_refused_in_one_line(adapter: Any, chat_client: TenantClient) -> None:
    for act in (
        lambda: chat_client.generate("who?", adapter, 2),
        lambda: chat_client.generate_many(["who?"], adapters=[adapter], max_new_tokens=2, progress=False),
    ):
        with pytest.raises(ConfigurationError, match=r"no adapter folder|the path of a folder") as caught:
            act()
        assert len(str(caught.value)) < 500


def test_a_pattern_is_ended_when_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MATCHING_S", 1)
    began = time.monotonic()
    with pytest.raises(ConfigurationError, match="the adapter one has a pattern in target_modules that is invalid or"):
        patterns.fully_matched("one", "target_modules", r"(?:[a-z.]+)+!!", ["model.layers.self.attn.q.proj.weight"])
    assert time.monotonic() - began < patterns.WAIT_S
    again = time.monotonic()
    with pytest.raises(ConfigurationError):  # it is remembered, so that many requests cost no more than one
        patterns.fully_matched("two", "target_modules", r"(?:[a-z.]+)+!!", ["model.layers.self.attn.q.proj.weight"])
    assert time.monotonic() - again < 0.5


# ---- the adapter that is in the folder now ---------------------------------------------------------------------------


def test_a_change_of_alpha_alone_counts_at_once(
    folder: Path, chat_client: TenantClient, chat_folder: Path
) -> None:  # fmt: skip
    before = generated(chat_client, folder)
    settings(folder, lora_alpha=64)
    after, want = generated(chat_client, folder), stock(chat_folder, folder)
    assert isinstance(before, torch.Tensor)
    assert isinstance(after, torch.Tensor)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("racy_ns", [-1, 1 << 62])
def test_another_adapter_with_the_same_times_counts_at_once(
    racy_ns: int, folder: Path, chat_client: TenantClient, chat_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second adapter has the sizes and the times of the first. Files of just now, whose times cannot be relied on,
    are told by their bytes."""
    monkeypatch.setattr("tenant_sdk.serving.adapters.reader.RACY_NS", racy_ns)
    other = shutil.copytree(folder, folder.with_name("other"))
    tensors(other, lambda saved: [each.neg_() for each in saved.values() if each.shape[1] == 8] and None)
    for each in (folder, other):
        for file in (CONFIG, WEIGHTS):
            os.utime(each / file, ns=(1_000_000_000, 1_000_000_000))
    before = generated(chat_client, folder)
    folder.rename(folder.with_name("old"))
    other.rename(folder)
    after, want = generated(chat_client, folder), stock(chat_folder, folder)
    assert isinstance(before, torch.Tensor)
    assert isinstance(after, torch.Tensor)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, want, atol=1e-5, rtol=1e-5)


def test_the_files_are_opened_and_parsed_once(
    folder: Path, chat_client: TenantClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    openings = Openings(monkeypatch)
    chat_client.generate("who?", folder, max_new_tokens=1)
    openings.assert_once()
    chat_client.generate("who?", folder, max_new_tokens=1)  # looks at the files' stamp, or at their bytes
    assert len(openings.parsed) == 2


def test_prompts_that_are_answered_together_open_their_adapter_once(
    folder: Path, chat_client: TenantClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    openings = Openings(monkeypatch)
    chat_client.generate_many(["who?"], folder, max_new_tokens=1)
    openings.assert_once()


def test_an_adapter_that_stays_is_loaded_once(folder: Path, chat_client: TenantClient) -> None:
    first = adapted_model(chat_client, folder)
    (folder / CONFIG).touch()
    shutil.copytree(folder, folder.with_name("copy"))
    assert adapted_model(chat_client, folder) is first
    assert adapted_model(chat_client, folder.with_name("copy")) is first


def test_a_model_is_freed_before_the_next_one_is_loaded(
    folder: Path, chat_client: TenantClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = weakref.ref(adapted_model(chat_client, folder))
    load = chat_client.load_model

    def load_model() -> Any:
        gc.collect()
        assert held() is None
        return load()

    monkeypatch.setattr(chat_client, "load_model", load_model)
    settings(folder, lora_alpha=1)
    assert adapted_model(chat_client, folder) is not None


# ---- adapters that do little -----------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Implements the layers of a mixture of experts whose experts are one parameter, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"gate": nn.Linear(4, 2), "experts": nn.ParameterDict({"up": torch.zeros(2, 4, 4)})})
        self.q_proj = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


@pytest.mark.parametrize(
    ("targets", "parameters", "is_said"),
    [("all-linear", None, True), (["q_proj", "gate"], None, True), (["q_proj"], None, False),
     (["q_proj", "gate"], ["experts.up"], False)],
)  # fmt: skip
def test_an_adapter_of_only_the_gate_of_a_mixture_is_said(targets: Any, parameters: Any, is_said: bool) -> None:
    config = LoraConfig(r=2, target_modules=targets, target_parameters=parameters)
    model = get_peft_model(Mixture(), config)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        say_how_little(model, 2, by_default=False)
    assert ["only the gate" in str(each.message) for each in said] == [True] * is_said


def test_an_adapter_of_experts_that_are_not_there_is_refused(
    folder: Path, chat_client: TenantClient, remote: Any
) -> None:  # fmt: skip
    """PEFT says in a warning only that it found no such parameter, and answers without it."""
    settings(folder, target_parameters=["mlp.experts.gate_up_proj"])
    tensors(folder, lambda saved: saved.update({
        f"{PREFIX}model.layers.0.mlp.experts.lora_A.weight": torch.ones(8, 32),
        f"{PREFIX}model.layers.0.mlp.experts.lora_B.weight": torch.ones(64, 8),
    }))  # fmt: skip
    said = generated(chat_client, folder), served(remote, folder)
    assert isinstance(said[0], str)
    assert said[0].startswith(
        "one is no adapter for this model: the adapter holds "
        "'base_model.model.model.layers.0.mlp.experts.lora_A.weight', which PEFT does not use"
    )
    assert said[1] == "the adapter one sets 'target_parameters', which is not served"


def test_kinds_that_only_generate_takes_are_used_whole_too(
    folder: Path, chat_client: TenantClient, chat_folder: Path
) -> None:
    """The norms are saved whole beside LoRA's factors, which the store does not serve."""
    norm = f"{PREFIX}model.norm.weight"
    settings(folder, modules_to_save=["model.norm"])
    tensors(folder, lambda saved: saved.update({norm: torch.linspace(0.5, 2, 32)}))
    got, want = generated(chat_client, folder), stock(chat_folder, folder)
    assert isinstance(got, torch.Tensor), got
    assert want is not None
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    for act in (
        lambda saved: saved.update({f"{PREFIX}_orig_mod.model.norm.weight": saved[norm].clone()}),
        lambda saved: saved.pop(norm),
        lambda saved: saved.pop(f"{Q}.lora_B.weight"),
        lambda saved: saved.update({f"{K}.lora_A.weight": torch.ones(8, 32)}),
        lambda saved: saved.update({f"{Q}.base_layer.weight": torch.ones(32, 32)}),
        lambda saved: saved.update({norm: torch.ones(31)}),
    ):
        bad = shutil.copytree(folder, folder.with_name("bad"))
        tensors(bad, lambda saved, act=act: (act(saved), None)[1])  # type: ignore[misc]
        said = generated(chat_client, bad)
        assert isinstance(said, str)
        assert "\n" not in said
        shutil.rmtree(bad)


def test_a_loaded_adapter_leaves_the_base_and_the_next_adapter_alone(
    folder: Path, chat_client: TenantClient, chat_folder: Path
) -> None:
    def base() -> torch.Tensor:
        with torch.no_grad():
            return adapted_model(chat_client, None)(IDS[None]).logits[0]  # type: ignore[no-any-return]

    other = shutil.copytree(folder, folder.with_name("other"))
    settings(other, lora_alpha=1)
    before = base()
    for each in (folder, other, folder):
        got, want = generated(chat_client, each), stock(chat_folder, each)
        assert isinstance(got, torch.Tensor)
        assert want is not None
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(got, before)
        assert torch.equal(base(), before)
