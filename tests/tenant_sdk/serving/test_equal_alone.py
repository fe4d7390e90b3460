"""Tests that the engine's tokens are those of `generate` alone, whatever else it answers at the same time: for all
models, masks and KV types, and with several adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tenant_sdk import TenantClient
from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.engine import Engine
from tests.support.engines import alone, mean_kl, together
from tests.support.saved_adapters import save_adapter, save_kind
from tests.support.tiny_models import KINDS, PROMPTS, make_model, open_client

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")
NEW_TOKENS = 12
COMPARED = 0.95
"""The least share of positions whose margin must be large enough for a comparison."""
MARGIN = 4.0
"""A position is compared if its top two logits differ by more than this many times the measured error."""
OTHER_MASKS: dict[str, dict[str, Any]] = {
    "ring": {"mask": "off", "arithmetic": "ring"}, "pad": {"mask": "pad", "verify": True}, "shares": {"mask": "shares"},
    "gaussian-pool": {"mask": "gaussian-pool"},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("serving")
    return {kind: make_model(kind, parent / kind) for kind in KINDS}


def assert_same_tokens(reference: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> float:
    """Compares all positions whose margin exceeds four times the error, and returns the error."""
    want, have = torch.cat(list(reference)), torch.cat(list(got))
    error = float((want - have).abs().max())
    top = want.topk(2).values
    compared = (top[:, 0] - top[:, 1]) > MARGIN * error
    assert compared.float().mean() >= COMPARED, f"error {error}"
    assert torch.equal(have.argmax(dim=-1)[compared], want.argmax(dim=-1)[compared])
    return error


def compare(client: TenantClient, prompts: Sequence[str] = PROMPTS, **options: Any) -> float:
    reference = [alone(client, prompt, NEW_TOKENS) for prompt in prompts]
    with Engine(client, step_tokens=16, max_running=4, **options) as engine:
        got = together(engine, prompts, reference)
    return assert_same_tokens(reference, got)


@pytest.mark.parametrize("mask", ["off", "lattice"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_generate(folders: dict[str, Path], kind: str, mask: str) -> None:
    with open_client(folders[kind], mask) as client:
        error = compare(client)
    assert error < (1e-5 if mask == "off" else 1e-3)


@pytest.mark.parametrize("mask", ["off", "lattice"])
def test_tokens_with_several_adapters_are_those_of_generate(
    folders: dict[str, Path], tmp_path: Path, mask: str
) -> None:
    """Requests of LoRA adapters of two ranks, of an adapter that is kept as PEFT's modules, and of the base model share
    steps."""
    with open_client(folders["llama"], mask) as client:
        model = client.load_model()
        save_adapter(model, tmp_path / "small", seed=1, r=8)
        save_adapter(model, tmp_path / "large", seed=2, r=16, target_modules=["q_proj", "down_proj"])
        save_kind(model, "llama", tmp_path / "ia3", "IA3", seed=3)
        names = ("small", "large", None, "ia3", "large", "small")
        reference = [
            alone(client, prompt, NEW_TOKENS, name and tmp_path / name)
            for prompt, name in zip(PROMPTS, names, strict=True)
        ]
        with Engine(
            client, lambda model, wake: AdapterStore(model, tmp_path, on_ready=wake, dtype=torch.float32),
            step_tokens=16, max_running=4,
        ) as engine:  # fmt: skip
            got = together(engine, PROMPTS, reference, names)
        error = assert_same_tokens(reference, got)
        # The control: each adapter changes the answer, so a request without its adapter would show.
        with Engine(client, step_tokens=16, max_running=4) as engine:
            plain = together(engine, PROMPTS, reference)
    assert error < (1e-4 if mask == "off" else 1e-3)
    for name, with_adapter, without in zip(names, reference, plain, strict=True):
        assert name is None or (with_adapter - without).abs().max() > 100 * error


@pytest.mark.parametrize("mask", OTHER_MASKS)
def test_every_mask(folders: dict[str, Path], tmp_path: Path, mask: str) -> None:
    options = dict(OTHER_MASKS[mask])
    if options.pop("verify", False):
        options["verify"] = folders["llama"]
    url = f"inproc:{folders['llama']}"
    if mask == "shares":
        options["mask_options"] = {"precision": "exact"}  # so that results can be compared closely
        with TenantClient([url, url], cache=tmp_path / "cache", progress=False, **options) as client:
            compare(client, PROMPTS[:3])
        return
    with open_client(folders["llama"], **options) as client:
        compare(client, PROMPTS[:3])


@pytest.mark.parametrize(("kv_dtype", "bar"), [("bf16", 1e-4), ("fp8", 5e-3)])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_other_types_of_kv_stay_close(folders: dict[str, Path], kind: str, kv_dtype: str, bar: float) -> None:
    with open_client(folders[kind]) as client:
        reference = [alone(client, prompt, NEW_TOKENS) for prompt in PROMPTS]
        with Engine(client, step_tokens=16, max_running=4, kv_dtype=kv_dtype) as engine:
            got = together(engine, PROMPTS, reference)
    kl = mean_kl(reference, got)
    assert 0.0 < kl < bar


def test_a_wrong_neighbour_would_show(folders: dict[str, Path]) -> None:
    """This is the control: the answers to other prompts do not count as equal."""
    with open_client(folders["llama"]) as client:
        reference = [alone(client, prompt, NEW_TOKENS) for prompt in PROMPTS]
        with Engine(client, step_tokens=16, max_running=4) as engine:
            got = together(engine, PROMPTS, reference)
    with pytest.raises(AssertionError):
        assert_same_tokens(reference, [*got[1:], got[0]])
