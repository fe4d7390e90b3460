"""Tests that adapters of other kinds than LoRA are checked as LoRA adapters are: files, settings, numbers, memory,
digests and places."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from tenant_sdk.serving.adapters import AdapterStore, peft_modules, peft_settings
from tenant_sdk.serving.adapters.reader import CONFIG, WEIGHTS
from tests.support.saved_adapters import EXAMPLES, Bell, base_model, held, peft_logits, save_adapter, save_kind, stepped
from wire.errors import ConfigurationError, InvalidTensor

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")
IDS = torch.randint(3, 128, (5,), generator=torch.Generator().manual_seed(1))
V = "base_model.model.model.layers.0.self_attn.v_proj"


@pytest.fixture(scope="module")
def stock() -> Any:
    return base_model()


@pytest.fixture(scope="module")
def made(stock: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    for title in ("IA3", "LoHa", "VeRA", "VeRA without its projections", "OFT", "BOFT", "FourierFT", "AdaLoRA", "MiSS"):
        save_kind(stock, "llama", root / title.replace(" ", "-"), title, seed=1)
    return root


def opened(stock: Any, root: Path, bell: Bell | None = None, **options: Any) -> tuple[AdapterStore, Any]:
    model = copy.deepcopy(stock)
    return AdapterStore(model, root, on_ready=bell, **options), model


def refused(stock: Any, root: Path, name: str, **options: Any) -> str:
    """Returns the one line with which a store refuses an adapter, either at once or when the adapter is loaded."""
    bell = Bell()
    store, _ = opened(stock, root, bell, **options)
    try:
        loan = store.reserve(name)
    except ConfigurationError as exc:
        said = str(exc)
    else:
        bell.wait_for(loan)
        assert isinstance(loan.failure, ConfigurationError)
        said = str(loan.failure)
        assert store.status().device_adapters == 0
    store.close()
    assert "\n" not in said
    return said


def settings(path: Path, **changes: Any) -> None:
    (path / CONFIG).write_text(json.dumps(json.loads((path / CONFIG).read_text()) | changes))


def tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    saved = load_file(path / WEIGHTS)
    change(saved)
    save_file(saved, path / WEIGHTS)


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("title", "changes", "match"),
    [
        ("LoHa", {"something_new": 1}, "sets 'something_new', which is not served"),
        ("LoHa", {"modules_to_save": ["lm_head"]}, "sets 'modules_to_save'"),
        ("LoHa", {"r": "4"}, "has '4' for 'r'"),
        ("LoHa", {"r": True}, "has True for 'r'"),
        ("LoHa", {"r": 1 << 40}, "for 'r', which is not served"),
        ("LoHa", {"r": 1 << 19}, r"hada_w1_a' was expected with the shape \(32, 524288\), and has \(32, 4\)"),
        ("LoHa", {"r": 0}, "settings that PEFT refuses"),
        ("LoHa", {"alpha": float("nan")}, "has nan for 'alpha'"),
        ("LoHa", {"alpha": 1e30}, "for 'alpha'"),
        ("LoHa", {"rank_pattern": {"(a+)+(b+)": 4}}, "too intricate"),
        ("LoHa", {"rank_pattern": {"q_proj": None}}, "has None for 'rank_pattern'"),
        ("LoHa", {"rank_pattern": [4]}, "rank_pattern that is no table"),
        ("LoHa", {"init_weights": "pissa"}, "was started by 'pissa': not served"),
        ("LoHa", {"bias": "all"}, "trains biases"),
        ("IA3", {"feedforward_modules": "(a+)+(b+)"}, "feedforward_modules that are no list"),
        ("IA3", {"feedforward_modules": [7]}, "feedforward_modules that are no list"),
        ("IA3", {"feedforward_modules": {"down_proj": 1}}, "feedforward_modules that are no list"),
        ("MiSS", {"init_weights": "bat"}, "has 'bat' for 'init_weights'"),
        ("OFT", {"num_cayley_neumann_terms": 1 << 30}, "for 'num_cayley_neumann_terms'"),
        ("OFT", {"oft_block_size": 16}, "was expected with the shape"),
        ("VeRA", {"r": 1 << 20}, r"was expected with the shape \(1048576,\), and has \(8,\)"),
        ("VeRA", {"projection_prng_key": -1}, "for 'projection_prng_key'"),
        ("FourierFT", {"n_frequency": 1 << 20}, "settings that PEFT refuses"),
        ("FourierFT", {"n_frequency": 51}, r"expected with the shape \(51,\), and has \(50,\)"),
        ("AdaLoRA", {"init_r": 1 << 20}, "MB as modules: at most"),
        ("AdaLoRA", {"rank_pattern": {"x": 5}}, "for 'rank_pattern'"),
        ("AdaLoRA", {"rank_pattern": {"x.lora_E": [True]}}, "cannot be|PEFT refuses"),
        ("IA3", {"base_model_name_or_path": "gpt2"}, "was trained on 'gpt2'"),
    ],
)  # fmt: skip
def test_settings_are_refused(
    title: str, changes: dict[str, Any], match: str, stock: Any, made: Path, tmp_path: Path
) -> None:  # fmt: skip
    shutil.copytree(made / title, tmp_path / "one")
    settings(tmp_path / "one", **changes)
    with pytest.raises(ConfigurationError, match=match):
        raise ConfigurationError(refused(stock, tmp_path, "one"))


@pytest.mark.parametrize(
    "peft_type",
    [
        "HIRA", "FROD", "OSF", "PEANUT", "PSOFT", "SHIRA", "SUPERTUNING", "GLORA", "ADAMSS", "LILY", "UNILORA", "POLY",
        "XLORA", "PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "LN_TUNING", "ia3",
    ],
)  # fmt: skip
def test_kinds_that_cannot_be_served_are_named(peft_type: str, stock: Any, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "LoHa", tmp_path / "one")
    settings(tmp_path / "one", peft_type=peft_type)
    sentence = refused(stock, tmp_path, "one")
    assert sentence.startswith(f"the adapter one is of the kind '{peft_type}', which is not served")
    assert "\n" not in sentence


# ---- tensors ---------------------------------------------------------------------------------------------------------

LOHA = f"{V}.hada_w1_a"
BAD: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "NaN": (lambda saved: saved[LOHA].view(-1)[5:6].fill_(float("nan")), "holds NaN or infinite numbers"),
    "infinite": (lambda saved: saved[LOHA].view(-1)[5:6].fill_(float("-inf")), "holds NaN or infinite numbers"),
    "one that is missing": (lambda saved: saved.pop(LOHA), r"was expected with the shape \(16, 4\), and has None"),
    "one too many": (
        lambda saved: saved.update({f"{V}.hada_t1": torch.zeros(4)}),
        r"was expected with the shape None, and has \(4,\)",
    ),
    "another shape": (lambda saved: saved.update({LOHA: torch.zeros(4, 16)}), r"\(16, 4\), and has \(4, 16\)"),
    "another model": (
        lambda saved: saved.update({LOHA.replace("layers.0", "layers.9"): torch.zeros(4)}),
        "for another base: this model has no linear layer",
    ),
    "without the prefix": (
        lambda saved: saved.update({LOHA.removeprefix("base_model.model."): torch.zeros(4)}),
        "for another base: this model has no linear layer",
    ),
    "a layer itself": (lambda saved: saved.update({V: torch.zeros(4)}), "this model has no linear layer"),
    "a deep name": (
        lambda saved: saved.update({"base_model.model." + "a." * 5000: torch.zeros(4)}),
        "this model has no linear layer",
    ),
    "whole numbers": (lambda saved: saved.update({LOHA: torch.zeros(16, 4, dtype=torch.int32)}), "another form than 1"),
    "many dimensions": (lambda saved: saved.update({LOHA: torch.zeros(1, 1, 1, 16, 4)}), "another form than 1 to 4"),
    "no dimension": (lambda saved: saved.update({LOHA: torch.zeros(())}), "another form than 1 to 4"),
    "a base layer": (
        lambda saved: saved.update({f"{V}.base_layer.weight": torch.zeros(16, 32)}),
        "expected with the shape None",
    ),
    "nothing": (lambda saved: saved.clear(), "holds no tensors"),
    "no layer": (
        lambda saved: (saved.clear(), saved.update({"base_model.vera_A": torch.zeros(4)})),
        "holds no tensor of a layer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_tensors_are_refused(case: str, stock: Any, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "LoHa", tmp_path / "one")
    change, match = BAD[case]
    tensors(tmp_path / "one", change)
    with pytest.raises(ConfigurationError, match=match):
        raise ConfigurationError(refused(stock, tmp_path, "one"))


@pytest.mark.parametrize(
    ("title", "host_bytes", "match"),
    [
        ("LoHa", 4000, "the adapter LoHa takes 0.0 MB: the host tier has 0.0 MB"),
        (
            "VeRA without its projections",
            3_000,
            r"the adapter VeRA-without-its-projections \(VeRA\) takes 0.0 MB as modules: at most 0.0 MB fit",
        ),
        ("BOFT", 60_000, r"the adapter BOFT \(BOFT\) takes 0.2 MB as modules: at most 0.1 MB fit"),
    ],
)
def test_too_large_for_its_tier(title: str, host_bytes: int, match: str, stock: Any, made: Path) -> None:
    with pytest.raises(ConfigurationError, match=match):
        raise ConfigurationError(refused(stock, made, title.replace(" ", "-"), host_bytes=host_bytes))


# ---- modules that would harm others ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peft_type", "own", "match"),
    [
        ("LILY", {"r": 4, "num_B": 2}, "mixes rows or gives numbers that are not finite, in model.layers.0"),
        ("OSF", {"effective_rank": 4}, "needs the data of a base weight"),
    ],
)
def test_a_kind_that_is_listed_by_mistake_is_refused_when_it_is_loaded(
    peft_type: str, own: dict[str, Any], match: str, stock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT's layers of Lily take a mean over rows, and those of OSF read the base weights, so the store cannot keep
    either. It refuses them even if they are in its list of kinds."""
    monkeypatch.setitem(EXAMPLES, peft_type, (peft_type, own))
    save_kind(stock, "llama", tmp_path / "one", peft_type, seed=1)
    checks = dict.fromkeys(json.loads((tmp_path / "one" / CONFIG).read_text()), lambda value: True)
    listed = {name: checks[name] for name in own}
    training = tuple(checks.keys() - own.keys())
    monkeypatch.setitem(peft_settings.KINDS, peft_type, peft_settings.Kind(peft_type, listed, training=training))
    with pytest.raises(ConfigurationError, match=match):
        raise ConfigurationError(refused(stock, tmp_path, "one"))


def load(stock: Any, root: Path, *names: str) -> AdapterStore:
    bell = Bell()
    store, _ = opened(stock, root, bell, separate_calls=True)
    for name in names:
        loan = store.reserve(name)
        bell.wait_for(loan)
        assert loan.failure is None
    return store


def test_no_compiler_runs(stock: Any, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT tries to compile CUDA code for every layer of BOFT, whether or not there is a GPU."""
    compiled: list[Any] = []
    monkeypatch.setattr("torch.utils.cpp_extension.load", lambda *_, **options: compiled.append(options))
    load(stock, made, "BOFT").close()
    assert compiled == []
    save_kind(stock, "llama", tmp_path / "BOFT", "BOFT", seed=2)
    assert compiled, "PEFT alone tries it"


def test_an_adapter_that_takes_long_for_a_row_is_refused(
    stock: Any, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(peft_modules, "_TRIAL_S", -1.0)
    assert re.fullmatch("the adapter LoHa takes more than -1 s for one row", refused(stock, made, "LoHa"))


def test_shapes_are_asked_of_peft_once_for_settings(
    stock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    for name, seed in (("one", 1), ("two", 2), ("bad", 3)):
        save_kind(stock, "llama", tmp_path / name, "LoHa", seed=seed)
    save_kind(stock, "llama", tmp_path / "other", "IA3", seed=1)
    tensors(tmp_path / "bad", lambda saved: saved.update({f"{V}.hada_w1_a": torch.ones(2, 2)}))
    asked: list[str] = []
    ask = peft_modules._ask_peft
    monkeypatch.setattr(peft_modules, "_ask_peft", lambda name, *others: asked.append(name) or ask(name, *others))
    store = load(stock, tmp_path, "one", "two", "other")
    loan = store.reserve("bad")
    cast(Bell, store.on_ready).wait_for(loan)
    assert "is for another base or of other settings" in str(loan.failure)
    store.close()
    assert asked == ["one", "other"]


def test_numbers_that_overflow_are_refused_and_this_is_remembered(
    stock: Any, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    shutil.copytree(made / "LoHa", tmp_path / "one")
    tensors(tmp_path / "one", lambda saved: [each.fill_(1e30) for each in saved.values()])
    monkeypatch.setattr("tenant_sdk.serving.adapters.reader.RACY_NS", -1)  # the files are new, and stay as they are
    bell = Bell()
    store, _ = opened(stock, tmp_path, bell)
    loan = store.reserve("one")
    bell.wait_for(loan)
    assert "gives numbers that are not finite, in model.layers.0" in str(loan.failure)
    with pytest.raises(ConfigurationError) as again:
        store.reserve("one")
    assert str(again.value) == str(loan.failure)
    store.close()


def test_a_module_that_fails_when_it_is_tried_is_remembered(
    stock: Any, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def outputs(*_: Any) -> Any:
        raise InvalidTensor("a layer of an adapter does not call its base layer once")

    shutil.copytree(made / "LoHa", tmp_path / "one")
    monkeypatch.setattr(peft_modules, "outputs", outputs)
    monkeypatch.setattr("tenant_sdk.serving.adapters.reader.RACY_NS", -1)  # the files are new, and stay as they are
    bell = Bell()
    store, _ = opened(stock, tmp_path, bell)
    loan = store.reserve("one")
    bell.wait_for(loan)
    assert "cannot be computed in model.layers.0" in str(loan.failure)
    with pytest.raises(ConfigurationError, match="cannot be computed"):
        store.reserve("one")
    store.close()


# ---- tiers -----------------------------------------------------------------------------------------------------------


def test_numbers_keep_the_precision_of_the_file(stock: Any, made: Path, tmp_path: Path) -> None:
    """Numbers keep the file's dtype. IA3's factors, for example, are near 1, and would lose what was trained if they
    were rounded to the store's bfloat16."""
    shutil.copytree(made / "IA3", tmp_path / "fine")
    tensors(tmp_path / "fine", lambda saved: [each.sub_(1).mul_(0.01).add_(1) for each in saved.values()])
    shutil.copytree(tmp_path / "fine", tmp_path / "coarse")
    save_file({key: each.bfloat16() for key, each in load_file(tmp_path / "fine" / WEIGHTS).items()},
              tmp_path / "coarse" / WEIGHTS)  # fmt: skip
    bell = Bell()
    store, model = opened(stock, tmp_path, bell)
    for name in ("fine", "coarse"):
        (loan,) = held(store, bell, name)
        (got,) = stepped(store, model, [(loan.adapter_index, IDS)])
        assert (got - peft_logits(stock, tmp_path / name, IDS)).abs().max() < 2e-6
    status = store.status()
    sizes = [sum(each.nbytes for each in load_file(tmp_path / name / WEIGHTS).values()) for name in ("fine", "coarse")]
    assert (status.host_adapters, status.host_bytes) == (2, sum(sizes))
    store.close()


def test_a_place_keeps_nothing_of_the_adapter_before(stock: Any, tmp_path: Path) -> None:
    """The store has one place for adapters of other kinds than LoRA. Each adapter replaces an adapter of another kind,
    which changed other layers."""
    save_kind(stock, "llama", tmp_path / "a", "OFT", seed=1)
    save_kind(stock, "llama", tmp_path / "b", "LoHa", seed=2, target_modules=["k_proj"])
    save_kind(stock, "llama", tmp_path / "c", "IA3", seed=3, target_modules=["down_proj"])
    save_adapter(stock, tmp_path / "lora", seed=4)
    bell = Bell()
    store, model = opened(stock, tmp_path, bell, device_slots=1)
    (lora,) = held(store, bell, "lora")
    for name in ("a", "b", "c", "a", "c", "b"):
        (loan,) = held(store, bell, name)
        got = stepped(store, model, [(loan.adapter_index, IDS), (lora.adapter_index, IDS)])
        for adapter, logits in zip((name, "lora"), got, strict=True):
            assert (logits - peft_logits(stock, tmp_path / adapter, IDS)).abs().max() < 2e-6
        waiting = store.reserve("b" if name != "b" else "a")
        loan.release()
        bell.wait_for(waiting)  # for the place, which is free now
        assert waiting.failure is None
        waiting.release()
    assert store.status().device_adapters == 2
    store.close()


def test_an_adapter_that_changes_on_disk_is_a_new_one(stock: Any, tmp_path: Path) -> None:
    save_kind(stock, "llama", tmp_path / "root" / "one", "LoHa", seed=1)
    shutil.copytree(tmp_path / "root" / "one", tmp_path / "old")
    bell = Bell()
    store, model = opened(stock, tmp_path / "root", bell)
    (old,) = held(store, bell, "one")
    save_kind(stock, "llama", tmp_path / "root" / "one", "OFT", seed=2)
    (new,) = held(store, bell, "one")
    assert new.digest != old.digest
    got = stepped(store, model, [(old.adapter_index, IDS), (new.adapter_index, IDS)])
    for folder, logits in zip((tmp_path / "old", tmp_path / "root" / "one"), got, strict=True):
        assert (logits - peft_logits(stock, folder, IDS)).abs().max() < 2e-6
    store.close()
