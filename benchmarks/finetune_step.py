"""A fine-tuning step of 2 × 256 tokens: through a provider over mTLS loopback against local transformers + PEFT.

Provider and tenant share the machine. int8 `ring` without a mask sends the same 32-bit rows as a masked run.
"""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from benchmarks.common import interleaved, local_model, provider, ratios
from tenant_sdk import TenantClient

SHAPE = (2, 256)


def step_of(model: Any) -> Callable[[], float]:
    """One LoRA step: forward, backward, AdamW."""
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft_model = get_peft_model(model, config)
    optimizer = torch.optim.AdamW([p for p in peft_model.parameters() if p.requires_grad], lr=1e-4)
    ids = torch.randint(100, 40_000, SHAPE, generator=torch.Generator().manual_seed(0))

    def step() -> float:
        loss = peft_model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def run(repeats: int = 7, only: str | None = None) -> dict[str, Any]:
    """Medians in seconds and ratios to the local fp32 step."""
    with ExitStack() as stack:
        steps: dict[str, Callable[[], Any]] = {"local fp32": step_of(local_model())}
        wanted = {"native float, off": ("native", "float"), "int8 ring, off": ("int8", "ring")}
        for name, (weights, arithmetic) in wanted.items():
            if only is not None and only not in name:
                continue
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            url, _ = stack.enter_context(provider(folder, "--weights", weights))
            client = TenantClient(url, identity=folder / "bench", mask="off", arithmetic=arithmetic, cache=folder)
            stack.enter_context(client)
            steps[name] = step_of(client.load_model())
        seconds = interleaved(steps, repeats)
    return {"seconds": {k: statistics.median(v) for k, v in seconds.items()}, "ratios": ratios(seconds, "local fp32")}


def main() -> None:
    """Prints a table."""
    result = run()
    tokens = SHAPE[0] * SHAPE[1]
    print("| fine-tuning step 2×256 | s | tokens/s | × local fp32 |\n|---|---|---|---|")
    for name, value in result["seconds"].items():
        print(f"| {name} | {value:.2f} | {tokens / value:.0f} | {result['ratios'][name]:.2f} |")


if __name__ == "__main__":
    main()
