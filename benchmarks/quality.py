"""Measures how much quality the lattice mask costs, by comparing masked SmolLM2-135M with the same int8 model unmasked.

This benchmark compares loss and KL divergence over 2,048 tokens of real text (pages of this repository), and LoRA
gradients of one batch, layer by layer, for each precision (how many bits cross), as the mean of `--draws` runs with
masks of their own. The targets, which it does not check, are, for `exact`: loss within 2e-4, KL at most 2e-5, cosine of
gradients at least 0.99999, relative difference of gradient norms at most 5e-4; for `balanced`: loss within 5e-4, KL at
most 3e-5, cosine of the whole gradient at least 0.9999 and of each layer's 0.999, norm within 2e-3.

`python -m benchmarks.quality seeds` measures how much the mask changes the final loss of fine-tuning, compared with the
effect of another seed. It trains SmolLM2-135M int8 with LoRA of rank 16 on all linear layers, on this repository's own
example data. For each seed there is one run with `lattice` and one with `off`, both in ring arithmetic, which differ
only in the mask. The seed decides the adapter's initial values and the order of the rows. The final loss is the mean of
the last five steps. The mask is harmless if it changes the final loss by less than another seed does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from noise.options import PRECISIONS

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


def _compare(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """Returns the figures of `other`, the masked model, against `one`, the unmasked model, by name."""
    import torch

    targets = one["targets"].unsqueeze(-1)
    losses = [-float(each["logp"].gather(-1, targets).double().mean()) for each in (one, other)]
    kl = float((one["logp"].double().exp() * (one["logp"].double() - other["logp"].double())).sum(-1).mean())
    cosines = [
        float(torch.nn.functional.cosine_similarity(grad.flatten(), other["grads"][name].flatten(), dim=0))
        for name, grad in one["grads"].items()
    ]
    wholes = [torch.cat([each["grads"][name].flatten() for name in one["grads"]]) for each in (one, other)]
    norms = [whole.norm() for whole in wholes]
    return {
        "loss, unmasked": losses[0],
        "loss, lattice": losses[1],
        "difference of loss": losses[1] - losses[0],
        "KL": kl,
        "smallest cosine of a layer's gradient": min(cosines),
        "cosine of the whole gradient": float(torch.nn.functional.cosine_similarity(*wholes, dim=0)),
        "norm of all gradients, relative difference": float((norms[1] - norms[0]) / norms[0]),
    }


def run(options: dict[str, Any], precisions: Sequence[str], draws: int) -> dict[str, dict[str, float]]:
    """Measures the unmasked model once, and the masked one `draws` times for each precision, one after the other.

    Returns:
        By precision, the mean of each figure of `_compare`.
    """
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        unmasked = measure("off", Path(folder), {})
        found = {}
        for precision in precisions:
            given = options | {"precision": precision}
            each = [_compare(unmasked, measure("lattice", Path(folder), given)) for _ in range(draws)]
            found[precision] = {name: statistics.fmean(one[name] for one in each) for name in each[0]}
        return found


def main() -> None:
    """Runs the benchmark and prints its results as a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", default="default")
    parser.add_argument("--hint-bits", type=int, default=24)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--draws", type=int, default=3, help="runs for each precision")
    given, _ = parser.parse_known_args()
    found = run({"parameters": given.parameters, "hint_bits": given.hint_bits}, given.precisions, given.draws)
    title = (
        f"SmolLM2-135M int8, {TOKENS} tokens, {given.parameters}, {given.hint_bits}-bit hints, mean of {given.draws}"
    )
    print(f"| {title} | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
    for name in next(iter(found.values())):
        print(f"| {name} | {' | '.join(f'{each[name]:.7g}' for each in found.values())} |")


DATA = Path(__file__).resolve().parents[1] / "examples" / "data" / "harborlight.jsonl"
SEEDS = (0, 1, 2)
STEPS, BATCH_SIZE, LAST = 50, 4, 5
MASKS = ("off", "lattice")


def losses(mask: str, seed: int, steps: int, batch_size: int, folder: Path) -> list[float]:
    """Returns the loss of each step of one run; `folder` is a cache that keeps the hints for all runs."""
    from tenant_sdk import TenantClient

    with (
        tempfile.TemporaryDirectory() as adapter,
        TenantClient("inproc:smollm2-135m", mask=mask, arithmetic="ring", cache=folder) as client,
    ):
        result = client.finetune(
            DATA, output_dir=Path(adapter) / "adapter", max_steps=steps, batch_size=batch_size, seed=seed,
            save_steps=steps + 1, progress=False,
        )  # fmt: skip
    return result.losses


def _run_seeds(
    seeds: tuple[int, ...] = SEEDS, steps: int = STEPS, batch_size: int = BATCH_SIZE
) -> dict[str, list[list[float]]]:
    """Returns the losses by mask, then by seed, then by step; the masks take turns."""
    found: dict[str, list[list[float]]] = {mask: [] for mask in MASKS}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            for mask in MASKS:
                found[mask].append(losses(mask, seed, steps, batch_size, Path(folder)))
    return found


def _report_seeds(seeds: tuple[int, ...], found: dict[str, list[list[float]]]) -> None:
    """Prints the table, and compares the change by the mask with the change by the seed."""
    final = {mask: [statistics.mean(each[-LAST:]) for each in runs] for mask, runs in found.items()}
    change = [masked - bare for masked, bare in zip(final["lattice"], final["off"], strict=True)]
    furthest = [
        max(abs(a - b) for a, b in zip(masked, bare, strict=True))
        for masked, bare in zip(found["lattice"], found["off"], strict=True)
    ]
    print("| seed | off, first step | off, final | lattice, final | lattice − off | largest difference of a step |")
    print("|" + "---|" * 6)
    for index, seed in enumerate(seeds):
        print(f"| {seed} | {found['off'][index][0]:.4f} | {final['off'][index]:.4f} | {final['lattice'][index]:.4f} "
              f"| {change[index]:+.1e} | {furthest[index]:.1e} |")  # fmt: skip
    print(f"\nfinal: mean of the last {LAST} steps; largest |lattice − off|: {max(map(abs, change)):.1e}")
    if len(seeds) > 1:
        print(f"seeds of `off`: range {max(final['off']) - min(final['off']):.1e}, "
              f"standard deviation {statistics.stdev(final['off']):.1e}")  # fmt: skip


def compare_seeds(arguments: Sequence[str] = ()) -> None:
    """Measures how much the lattice mask changes the final loss of fine-tuning, compared with another seed.

    Prints the losses as a table.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality seeds")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    given = parser.parse_args(arguments)
    seeds = tuple(given.seeds)
    found = _run_seeds(seeds, given.steps, given.batch_size)
    print(f"{given.steps} steps of {given.batch_size} rows of {DATA.name}\n")
    _report_seeds(seeds, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["seeds"]:
        compare_seeds(sys.argv[2:])
    else:
        main()
