"""Tests the real model, with native fp32 weights and float arithmetic without a mask, against local
transformers + PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from tenant_sdk import TenantClient
from tests.support.parity import RELATIVE, adapted, grads, losses_of_steps, relative


@pytest.mark.real_model
@pytest.mark.slow
def test_logits_gradients_steps_and_greedy_tokens(smollm2: Path) -> None:
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    stock = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32)
    stock.hf_quantizer = None
    theirs = adapted(stock.eval(), config)
    ids = torch.randint(100, 40_000, (1, 24), generator=torch.Generator().manual_seed(1))
    with TenantClient(f"inproc:{smollm2}", weights="native", mask="off", arithmetic="float") as client:
        ours = adapted(client.load_model(), config)
        with torch.no_grad():
            assert relative(ours(ids).logits, theirs(ids).logits) < RELATIVE
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
        assert torch.equal(ours.generate(input_ids=ids, **options), theirs.generate(input_ids=ids, **options))
        got, want = grads(ours, ids), grads(theirs, ids)
        assert len(want) == len(got) == 2 * 210
        for name, gradient in want.items():
            assert relative(got[name], gradient) < RELATIVE, name
        losses = [losses_of_steps(model, ids, 1e-3) for model in (ours, theirs)]
        assert losses[0] == pytest.approx(losses[1], rel=RELATIVE)
        assert losses[0][-1] < losses[0][0] - 0.1
