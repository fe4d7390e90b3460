"""Measures how much quality the lattice mask costs, by comparing masked SmolLM2-135M with the same int8 model unmasked.

This benchmark compares loss and KL divergence over 2,048 tokens of real text (pages of this repository), and LoRA
gradients of one batch, layer by layer. The targets, which it does not check, are: loss within 2e-4, KL at most 2e-5,
cosine of gradients at least 0.99999, relative difference of gradient norms at most 5e-4.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

TOKENS, CONTEXT = 2048, 512
TEXT = ("README.md", "docs/architecture.md", "docs/threat-model.md", "docs/protocol.md", "docs/masks.md")


def token_rows(tokenizer: Any) -> Any:
    """Returns the token ids of the first TOKENS tokens of the text, int64, shape (TOKENS / CONTEXT, CONTEXT). Raises
    SystemExit if the text is shorter."""
    import torch

    root = Path(__file__).resolve().parents[1]
    text = "\n".join((root / name).read_text(encoding="utf-8") for name in TEXT if (root / name).exists())
    ids = tokenizer(text)["input_ids"]
    if len(ids) < TOKENS:
        raise SystemExit(f"expected {TOKENS} tokens of text, found {len(ids)}")
    return torch.tensor(ids[:TOKENS]).view(-1, CONTEXT)


def measure(mask: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Returns log-probabilities (`logp`), targets, and gradients (`grads`) of a fixed LoRA adapter, under one mask."""
    import torch
    from peft import LoraConfig, get_peft_model

    from tenant_sdk import TenantClient

    with TenantClient(
        "inproc:smollm2-135m", mask=mask, arithmetic="ring", mask_options=options, cache=folder
    ) as client:
        model, ids = client.load_model(), token_rows(client.tokenizer)
        client.fetch_hints(backward=True)
        with torch.no_grad():
            logits = torch.cat([model(row[None]).logits[:, :-1].float() for row in ids])
        found = {"logp": torch.log_softmax(logits, -1), "targets": ids[:, 1:]}
        torch.manual_seed(0)
        peft_model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:  # at PEFT's initial value, zero, only one factor would have a gradient
                torch.nn.init.normal_(parameter, std=0.02)
        batch = ids[:1, :256]
        peft_model(input_ids=batch, labels=batch).loss.backward()
        found["grads"] = {n: p.grad.double() for n, p in peft_model.named_parameters() if p.grad is not None}
    return found


def compare(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Returns the figures of `other`, the masked model, against `one`, the unmasked model, by name."""
    import torch

    targets = one["targets"].unsqueeze(-1)
    losses = [-float(each["logp"].gather(-1, targets).double().mean()) for each in (one, other)]
    kl = float((one["logp"].double().exp() * (one["logp"].double() - other["logp"].double())).sum(-1).mean())
    cosines = [
        float(torch.nn.functional.cosine_similarity(grad.flatten(), other["grads"][name].flatten(), dim=0))
        for name, grad in one["grads"].items()
    ]
    norms = [torch.cat([g.flatten() for g in each["grads"].values()]).norm() for each in (one, other)]
    return {
        "loss, unmasked": losses[0],
        "loss, lattice": losses[1],
        "difference of loss": losses[1] - losses[0],
        "KL": kl,
        "smallest cosine of a gradient": min(cosines),
        "norm of all gradients, relative difference": float((norms[1] - norms[0]) / norms[0]),
    }


def run(options: dict[str, Any]) -> dict[str, float]:
    """Measures both models, one after the other, and returns the figures of `compare`."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unmasked = measure("off", Path(folder), {})
        return compare(unmasked, measure("lattice", Path(folder), options))


def main() -> None:
    """Runs the benchmark and prints its results as a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", default="default")
    parser.add_argument("--hint-bits", type=int, default=24)
    given, _ = parser.parse_known_args()
    print(f"| SmolLM2-135M int8, {TOKENS} tokens, {given.parameters}, {given.hint_bits}-bit hints | |\n|---|---|")
    for name, value in run({"parameters": given.parameters, "hint_bits": given.hint_bits}).items():
        print(f"| {name} | {value:.7g} |")


if __name__ == "__main__":
    main()
