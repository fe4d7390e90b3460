"""Tests that DoRA over a provider's layers gives the same results as stock PEFT's DoRA on the dequantised model:
logits, gradients, training steps, tokens and saved files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel

from tenant_sdk import TenantClient, for_remote_base
from tests.support.mask_site import MODEL_NOISE
from tests.support.parity import RELATIVE, adapted, batch, dequantised, grads, local, lora, losses_of_steps, relative
from tests.support.tiny_models import make_tiny

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")
STREAMED = {"hints": "stream", "background": False, "precision": "exact"}
MASKS: dict[str, tuple[dict[str, Any], float]] = {
    "float": ({"mask": "off", "arithmetic": "float"}, RELATIVE),
    "ring": ({"mask": "off", "arithmetic": "ring"}, RELATIVE),
    "lattice": ({"mask": "lattice", "mask_options": STREAMED}, 3 * MODEL_NOISE),
}
"""A client's options for each arithmetic, and the largest relative distance to local results. Under `lattice` a
gradient goes through twice as many groups as a result, and each norm needs one product more."""


@pytest.fixture(scope="module", params=["llama", "gpt2", "gemma"])
def kind_and_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    make_tiny(request.param, folder)
    return request.param, folder


@pytest.fixture(scope="module", params=MASKS)
def case(request: pytest.FixtureRequest, kind_and_folder: tuple[str, Path]) -> Iterator[Any]:
    """Provides (kind, folder, client, largest relative distance)."""
    kind, folder = kind_and_folder
    options, distance = MASKS[request.param]
    with TenantClient(f"inproc:{folder}", cache=folder.with_name("cache"), progress=False, **options) as client:
        yield kind, folder, client, distance


def dora(kind: str, **changes: Any) -> LoraConfig:
    config = lora(kind)
    for name, value in {"use_dora": True, **changes}.items():
        setattr(config, name, value)
    return config


def pair_of(case: Any, **changes: Any) -> tuple[Any, Any]:
    """Returns the remote and the local model, each with the same adapter whose B and magnitudes are not those of the
    start."""
    kind, folder, client, _ = case
    config = dora(kind, **changes)
    ours, theirs = adapted(client.load_model(), for_remote_base(config)), adapted(dequantised(folder), config)
    for model in (ours, theirs):
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "magnitude" in name:
                    parameter.mul_(torch.rand(parameter.shape, generator=generator) + 0.5)
    return ours, theirs


def test_logits_and_gradients(case: Any) -> None:
    ours, theirs = pair_of(case)
    ids, distance = batch(), case[-1]
    with torch.no_grad():
        assert relative(ours(ids).logits, theirs(ids).logits) < distance
    got, want = grads(ours, ids), grads(theirs, ids)
    assert got.keys() == want.keys()
    assert sum("magnitude" in name for name in want) >= 8
    for name, gradient in want.items():
        assert relative(got[name], gradient) < distance, name


def test_dropout(kind_and_folder: tuple[str, Path]) -> None:
    """The dropped-out input is multiplied by the base weight, too, so each layer makes a second call."""
    kind, folder = kind_and_folder
    with TenantClient(f"inproc:{folder}", cache=folder.with_name("cache"), mask="off", arithmetic="float") as client:
        models = pair_of((kind, folder, client, 0), lora_dropout=0.3)
        found = []
        for model in models:
            torch.manual_seed(7)
            found.append(grads(model.train(), batch()))
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[1].items():
        assert relative(found[0][name], gradient) < RELATIVE, name


def test_five_optimizer_steps(case: Any) -> None:
    ours, theirs = pair_of(case)
    histories = [losses_of_steps(model, batch(), 1e-2) for model in (ours, theirs)]
    assert histories[0] == pytest.approx(histories[1], rel=case[-1])
    assert histories[0][-1] != pytest.approx(histories[0][0], rel=1e-2), "nothing was trained"


def test_greedy_tokens(case: Any) -> None:
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ours, theirs = (model.generate(input_ids=batch(7, (1, 5)), **options) for model in pair_of(case))
    assert ours.shape[1] == 17
    assert torch.equal(ours, theirs)


def test_saved_adapter_in_stock_peft_and_here(case: Any, tmp_path: Path) -> None:
    _, folder, client, distance = case
    ours, _ = pair_of(case)
    losses_of_steps(ours, batch(), 1e-2, num_steps=2)
    ours.save_pretrained(tmp_path / "adapter")
    stock = PeftModel.from_pretrained(dequantised(folder), tmp_path / "adapter").eval()
    config = for_remote_base(LoraConfig.from_pretrained(tmp_path / "adapter"))
    again = PeftModel.from_pretrained(client.load_model(), tmp_path / "adapter", config=config).eval()
    with torch.no_grad():
        want = ours.eval()(batch()).logits
        assert relative(stock(batch()).logits, want) < distance
        assert relative(again(batch()).logits, want) < distance
        assert relative(dequantised(folder)(batch()).logits, want) > 1e-2, "the adapter changes nothing"


def test_norms_at_the_start_are_those_of_the_sum(case: Any) -> None:
    """With `init_lora_weights=False`, B is not zero at first, and the magnitudes are the norms of W + s·BA."""
    kind, folder, client, distance = case
    config = dora(kind, init_lora_weights=False)
    ours, theirs = (
        adapted(model, for_remote_base(config)) for model in (client.load_model(), dequantised(folder))
    )  # fmt: skip
    want = {name: value for name, value in theirs.named_parameters() if "magnitude" in name}
    got = dict(ours.named_parameters())
    assert len(want) >= 8
    assert all(relative(got[name], value) < distance for name, value in want.items())


def test_native_weights_have_their_own_norms(kind_and_folder: tuple[str, Path]) -> None:
    kind, folder = kind_and_folder
    with TenantClient(
        f"inproc:{folder}", cache=folder.with_name("cache"), weights="native", mask="off", arithmetic="float"
    ) as client:
        ours = adapted(client.load_model(), for_remote_base(dora(kind)))
    theirs = adapted(local(folder), dora(kind))
    got = dict(ours.named_parameters())
    for name, value in theirs.named_parameters():
        if "magnitude" in name:
            assert relative(got[name], value) < 1e-6, name


def test_several_adapters_and_none(kind_and_folder: tuple[str, Path]) -> None:
    """Two DoRA adapters on one model do not share norms, and without an adapter the model is the base."""
    kind, folder = kind_and_folder
    with TenantClient(f"inproc:{folder}", cache=folder.with_name("cache"), mask="off", arithmetic="float") as client:
        models = []
        for base in (client.load_model(), dequantised(folder)):
            model = adapted(base, for_remote_base(dora(kind)))
            torch.manual_seed(11)
            targets = ["c_attn"] if kind == "gpt2" else ["k_proj", "down_proj"]
            second = dora(kind, init_lora_weights=False, r=2, target_modules=targets)
            model.add_adapter("second", for_remote_base(second))
            models.append(model)
        with torch.no_grad():
            for name in ("default", "second", "default"):
                for model in models:
                    model.set_adapter(name)
                ours, theirs = (model(batch()).logits for model in models)
                assert relative(ours, theirs) < RELATIVE, name
            with models[0].disable_adapter():
                assert relative(models[0](batch()).logits, dequantised(folder)(batch()).logits) < RELATIVE
