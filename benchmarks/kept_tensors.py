"""Shows what autograd keeps for the backward pass of a fine-tuning step, by the part of the model that keeps it.

The model is SmolLM2-135M with LoRA of rank 16 on all linear layers in float32, with a provider in this process. One
forward pass runs with the unchanged code of transformers and PEFT. Another runs with the loss in chunks and the pruned
model (tenant_sdk/training/pruning.py), which keeps fewer tensors. If several parts of the model keep the same tensor,
it counts once, for the first of these parts. Parameters do not count.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import Any

_PARTS = (
    (r"lora_(A|dropout)|_proj$", r"(q|k|v)_proj", "inputs and outputs of adapters on q, k, v"),
    (r"lora_(A|dropout)|_proj$", r"o_proj", "inputs and outputs of the adapter on o"),
    (r"lora_(A|dropout)|_proj$", r"(gate|up)_proj", "inputs and outputs of adapters on gate, up"),
    (r"lora_(A|dropout)|_proj$", r"down_proj", "inputs and outputs of the adapter on down"),
    (r"lora_B", r"", "the adapters' rows of rank 16"),
    (r"act_fn", r"", "SiLU"),
    (r"mlp$", r"", "SiLU(gate) × up"),
    (r"self_attn$", r"", "attention: q, k, v, its output, RoPE"),
    (r"norm$", r"", "norms"),
    (r"", r"", "loss and the rest"),
)
"""The parts of the model, each as (pattern of the last part of a module's name, pattern of the whole name, label). A
module belongs to the first part for which both patterns match."""


class Kept:
    """Counts the bytes of the distinct tensors that autograd keeps, by part of the model.

    A tensor counts for the module that is running when autograd saves the tensor.
    """

    def __init__(self, model: Any) -> None:
        """Adds hooks to all modules of a model, which record the module that is running."""
        self.num_bytes: dict[str, int] = defaultdict(int)
        self._running = [""]
        self._seen = {each.untyped_storage().data_ptr() for each in model.parameters() if each.device.type != "meta"}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._running.append(name))
            module.register_forward_hook(self._ends, always_call=True)

    def _ends(self, *_: Any) -> None:
        self._running.pop()

    def hooks(self, pack: Callable[[Any], Any] | None = None, unpack: Callable[[Any], Any] | None = None) -> Any:
        """Returns saved-tensor hooks that count the tensors that autograd keeps.

        Args:
            pack: returns what is kept in place of a tensor that autograd saves; None keeps the tensor itself.
            unpack: returns the tensor again from what `pack` returned; None if nothing has to be done.
        """
        from torch.autograd.graph import saved_tensors_hooks

        def note(tensor: Any) -> Any:
            packed = tensor if pack is None else pack(tensor)
            self._count(packed)
            return packed

        return saved_tensors_hooks(note, unpack or (lambda packed: packed))

    def _count(self, packed: Any) -> None:
        if isinstance(packed, tuple):
            packed = packed[0]
        for each in getattr(packed, "inputs", ()):
            self._count(each)
        if not hasattr(packed, "untyped_storage"):
            return
        storage = packed.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.num_bytes[label_of(self._running[-1])] += storage.nbytes()


def label_of(name: str) -> str:
    """Returns the label of the part to which a module belongs."""
    whole = name.removesuffix(".default")
    last = whole.rpartition(".")[2]
    return next(label for inner, outer, label in _PARTS if re.search(inner, last) and re.search(outer, whole))


def measure(model: Any, ids: Any, pruned: bool) -> dict[str, int]:
    """Returns the bytes that one forward pass keeps, by part; an empty dict if the loss needs no gradient.

    Args:
        model: a PEFT model.
        ids: the token ids of one row, which are also its labels.
        pruned: whether the model is first changed so that it is pruned and computes its loss in chunks.
    """
    from tenant_sdk.training import pruning
    from tenant_sdk.training.loss import chunk_loss

    before = pruning.saved_tensors_hooks
    if pruned:
        pruning.prune(model)
        chunk_loss(model)
    kept = Kept(model)
    try:
        if pruned:
            pruning.saved_tensors_hooks = kept.hooks  # type: ignore[assignment, misc]
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        else:
            with kept.hooks():
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    finally:
        pruning.saved_tensors_hooks = before  # type: ignore[misc]
    return {label: kept.num_bytes.get(label, 0) for *_, label in _PARTS} if loss.requires_grad else {}


def main() -> None:
    """Measures both passes and prints the bytes per token of each part as a table."""
    import torch
    from peft import LoraConfig, get_peft_model

    from tenant_sdk import TenantClient

    parser = argparse.ArgumentParser(prog="python -m benchmarks.kept_tensors")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dropout", type=float, default=0.0)
    given = parser.parse_args([] if sys.argv[0].endswith("__main__.py") else None)
    ids = torch.randint(100, 40_000, (1, given.tokens), generator=torch.Generator().manual_seed(0))
    found = []
    with TenantClient("inproc:smollm2-135m", mask="off", progress=False) as client:
        for pruned in (False, True):
            config = LoraConfig(
                r=16, lora_alpha=32, target_modules="all-linear", lora_dropout=given.dropout, task_type="CAUSAL_LM"
            )
            found.append(measure(get_peft_model(client.load_model(), config).train(), ids, pruned))
    print("| kept for the backward pass, kB a token | transformers and PEFT | pruned |\n|---|---|---|")
    for label in found[0]:
        print(f"| {label} | {' | '.join(f'{one[label] / given.tokens / 1e3:.0f}' for one in found)} |")
    print(f"| together | {' | '.join(f'{sum(one.values()) / given.tokens / 1e3:.0f}' for one in found)} |")


if __name__ == "__main__":
    main()
