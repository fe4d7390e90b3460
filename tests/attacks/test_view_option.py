"""Tests `--view` on recordings that operators make: whole, cut off, of some layers, empty, and of another model. An
adapter and a recording that do not belong together give an error of one line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from attacks import extract_lora
from attacks.seen.public_model import describe
from attacks.seen.view import Exchange, write_recording
from attacks.truth.secrets import adapted_copy
from attacks.victim import models
from provider.model.load import load, resolve
from provider.model.served_model import ServedModel
from provider.model.weights import serve_model
from provider.operations.recording import Recorder
from tenant_sdk import TenantClient
from tests.support.providers import serving
from wire.errors import ConfigurationError

# ---- recordings -----------------------------------------------------------------------------------------------------

PROMPTS = [list(range(20 + 7 * number, 26 + 7 * number)) for number in range(4)]
Record = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(models.make("tiny-llama", tmp_path / "model"))


@pytest.fixture
def record(model: Path, tmp_path: Path, no_controls: None) -> Record:
    def run(
        name: str = "seen", prompts: list[list[int]] = PROMPTS, limit: int = 1 << 30, layers: str = "", **options: Any
    ) -> Path:
        options = options or {"mask": "off", "arithmetic": "float"}
        served = serve_model(load(resolve(str(model))), recording=True)
        served_model = ServedModel(served, Recorder(tmp_path / name, served.manifest, limit, layers))
        with serving(served_model) as server:
            url = f"grpc://127.0.0.1:{server.port}"
            with TenantClient(url, cache=tmp_path / "cache", **options) as client, torch.no_grad():
                tenant = client.load_model()
                for prompt in prompts:
                    tenant(torch.tensor([prompt]))
        served_model.close()
        return tmp_path / name

    return run


def attack(view: Path, model: Path, *options: str) -> int:
    out = view.parent / "out"
    names = "layer-0 lookup,traffic-shape,closed-form"
    return extract_lora.main(
        ["--view", str(view), "--model", str(model), "--adversaries", names, "--out", str(out), *options]
    )


def findings(view: Path, adversary: str) -> dict[str, tuple[str, float | None]]:
    results = json.loads((view.parent / "out" / "report.json").read_text())["results"]
    return {one["module"]: (one["metric"], one["value"]) for one in results if one["adversary"] == adversary}


def test_a_whole_recording_is_read(record: Record, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    view = record()
    assert attack(view, model) == 0
    assert "messages" in capsys.readouterr().out
    (file,) = (view.parent / "out" / "stolen").rglob("prompts.json")
    tokenizer = load(resolve(str(model))).tokenizer
    assert [one["text"] for one in json.loads(file.read_text())] == [tokenizer.decode(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("precision", ["balanced", "exact"])
def test_who_leaves_rounded_rows_out_is_said(
    record: Record, model: Path, capsys: pytest.CaptureFixture[str], precision: str
) -> None:
    view = record(mask="lattice", mask_options={"precision": precision, "background": False})
    assert attack(view, model, "--masks", "lattice") == 0
    said = "local: rows were rounded to 24 bits; no-error, tiny-error and shared-error"
    assert (said in capsys.readouterr().out) == (precision == "balanced")


def test_an_adapter_lets_it_be_judged(record: Record, model: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(tmp_path / "adapter")
    view = record()
    assert attack(view, model, "--adapter", str(tmp_path / "adapter")) == 0


def test_one_that_was_cut_off_says_so(record: Record, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    view = record(limit=40_000)
    assert attack(view, model) == 0
    said = re.search(r"local: tensors of the first (\d+) of (\d+) messages, since", capsys.readouterr().out)
    assert said
    assert 0 < int(said[1]) < int(said[2])
    results = json.loads((view.parent / "out" / "report.json").read_text())["results"]
    told = {one["module"]: one.get("said") for one in results if one["adversary"] == "traffic-shape"}
    assert told["prompt tokens"] == "6,6,6,6", "metadata is whole"


def test_one_without_any_tensor_of_a_tenant_is_looked_at_for_metadata(record: Record, model: Path) -> None:
    view = record()
    lines = [json.loads(line) for line in (view / "index.jsonl").read_text().splitlines()]
    for line in lines[1:]:
        line |= {"tenant": "other", "file": None, "truncated": True}
    (view / "index.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert attack(view, model) == 0
    results = json.loads((view.parent / "out" / "report.json").read_text())["results"]
    assert {one["adversary"] for one in results if one["tenant"] == "other"} == {"traffic-shape"}


def test_whose_and_what_is_said(record: Record, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    view = record()
    assert attack(view, model, "--tenant", "nobody") == 2
    assert "no tenant 'nobody'" in capsys.readouterr().err
    assert attack(view, model, "--masks", "off,lattice") == 2
    assert "--masks is one of" in capsys.readouterr().err
    assert attack(view, model, "--tenant", "local", "--masks", "off") == 0
    results = json.loads((view.parent / "out" / "report.json").read_text())["results"]
    assert {(one["mask"], one["tenant"]) for one in results} == {("off", "local")}


@pytest.mark.parametrize(("masks", "alarms"), [((), 1), (("--masks", "lattice"), 1), (("--masks", "off"), 0)])
def test_a_mask_that_nobody_names_may_be_a_private_one(
    tmp_path: Path, no_controls: None, masks: tuple[str, ...], alarms: int
) -> None:
    """Mask rows are used twice in a recording whose mask is not named. This counts, since the mask may be a private
    one."""
    model = models.make("tiny-llama", tmp_path / "model")
    manifest = serve_model(load(resolve(str(model)))).manifest
    widths = [group.in_features for group in manifest.groups]
    mask = torch.randint(-(2**31), 2**31, (6, widths[0]), dtype=torch.int32)
    rows = [torch.randint(-9, 10, mask.shape, dtype=torch.int32) for _ in range(2)]
    reply = torch.zeros(6, manifest.groups[0].out_features, dtype=torch.int32)
    write_recording(tmp_path / "seen", manifest, [Exchange(0, mask + row, reply) for row in rows], tenant="acme")
    names = ["--adversaries", "slot-reuse", "--out", str(tmp_path / "out")]
    assert extract_lora.main(["--view", str(tmp_path / "seen"), "--model", str(model), *names, *masks]) == alarms


def test_some_layers(record: Record, model: Path) -> None:
    view = record(layers="*layers.1.*")
    assert attack(view, model) == 0
    assert "tokens" not in findings(view, "layer-0 lookup")


def test_an_empty_one_is_one_line(record: Record, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert attack(record(prompts=[]), model) == 2
    *stages, error = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert all(line.startswith("reads the recording") for line in stages)


def test_one_of_another_model_is_one_line(record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = Path(models.make("tiny-gpt2", tmp_path / "other"))
    assert attack(record(), other) == 2
    assert "another model" in capsys.readouterr().err


# ---- adapters and recordings of another model -----------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    path = models.make("tiny-llama", tmp_path / "model")
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(path), config).save_pretrained(tmp_path / "adapter")
    return Path(path), tmp_path / "adapter"


def damaged(adapter: Path, how: str) -> None:
    tensors, weights = adapter / "adapter_model.safetensors", load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    if how == "no tensors":
        tensors.unlink()
    elif how == "half a file":
        tensors.write_bytes(tensors.read_bytes()[:100])
    elif how == "half its layers":
        save_file(dict(list(weights.items())[: len(weights) // 2]), tensors)
    elif how == "other shapes":
        save_file({name: torch.zeros(3, 3) for name in weights}, tensors)
    elif how == "other modules":
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["c_attn"]}))
    else:
        (adapter / "adapter_config.json").write_text("{")


@pytest.mark.parametrize(
    "how", ["no tensors", "half a file", "half its layers", "other shapes", "other modules", "no config"]
)
def test_an_adapter_that_does_not_fit(folders: tuple[Path, Path], how: str) -> None:
    model, adapter = folders
    adapted_copy(AutoModelForCausalLM.from_pretrained(model), adapter)
    damaged(adapter, how)
    with pytest.raises(ConfigurationError, match="does not fit") as caught:
        adapted_copy(AutoModelForCausalLM.from_pretrained(model), adapter)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("weights", ["int8", "native"])
def test_a_recording_of_a_model_with_other_weights(folders: tuple[Path, Path], weights: str) -> None:
    served = serve_model(load(resolve(str(folders[0]))), weights)  # type: ignore[arg-type]
    model = AutoModelForCausalLM.from_pretrained(folders[0])
    describe(model, served.manifest)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1.0
    with pytest.raises(ConfigurationError, match="up_proj has other weights"):
        describe(model, served.manifest)
