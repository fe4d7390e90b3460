"""Tests that speculation changes no answer with adapters of the head, PEFT's modules, kept prompts and rounded KV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tenant_sdk import Speculation, TenantClient
from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.engine import Engine
from tests.support.engines import TIMEOUT_S
from tests.support.saved_adapters import save_adapter, save_kind
from tests.support.tiny_models import make_model, open_client

pytestmark = [
    pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
NUM_DRAFTED = 3
PROMPT = "what did they say about the copper owl, and since when?"
"""A prompt of more than one block of kept prompts."""


def drafting(folder: Path, draft: str) -> Speculation:
    model = None if draft == "lookup" else AutoModelForCausalLM.from_pretrained(folder).eval()
    return Speculation(NUM_DRAFTED, draft=model)


def answers(
    client: TenantClient, root: Path, asked: list[tuple[str | None, str]], speculation: Speculation | None,
    **options: Any,
) -> tuple[list[str], list[int]]:  # fmt: skip
    """Submits all requests twice, and returns all answers, and the number of reused tokens of each request of the
    second turn."""

    def make_store(model: object, wake: object) -> AdapterStore:
        return AdapterStore(
            model, root, on_ready=wake, dtype=torch.float32, device_slots=3, separate_calls=True
        )  # fmt: skip

    with Engine(client, make_store, max_running=4, speculation=speculation, **options) as engine:
        texts: list[str] = []
        for _ in range(2):
            turn = [engine.submit(prompt, name, 12, eos_token_id=[]) for name, prompt in asked]
            texts += [answer.result(TIMEOUT_S) for answer in turn]
    return texts, [answer.num_reused_tokens for answer in turn]


@pytest.mark.parametrize(("kind", "step_tokens"), [("llama", 24), ("mistral", 64)])
def test_adapters_of_the_head_and_modules_with_kept_prompts(kind: str, step_tokens: int, tmp_path: Path) -> None:
    """Mistral has a sliding window. With more rows a step, the keys of a whole prompt are still there when its request
    ends, so that the prompt can be kept."""
    root, folder = tmp_path / "adapters", make_model(kind, tmp_path / kind)
    with open_client(folder) as client:
        model = client.load_model()
        save_adapter(model, root / "head", 1, r=8, target_modules=["lm_head"])
        save_adapter(model, root / "lora", 2)
        save_kind(model, "llama", root / "oft", "OFT", 3, target_modules=["q_proj", "down_proj"])
        save_kind(model, "llama", root / "vera", "VeRA", 4, target_modules=["q_proj", "v_proj"])
        asked = [(name, PROMPT) for name in (*sorted(each.name for each in root.iterdir()), None)]
        for kv_dtype, draft in (("fp32", "lookup"), ("fp8", "itself")):
            options: dict[str, Any] = {"kv_dtype": kv_dtype, "step_tokens": step_tokens}
            want, _ = answers(client, root, asked, None, **options)
            assert len(set(want)) > len(asked) / 2  # The control: adapters change their answers.
            speculation = drafting(folder, draft)
            got, reused = answers(client, root, asked, speculation, prefix_bytes=1 << 22, **options)
            assert got == want, (kv_dtype, draft)
            assert all(reused)
