"""Computes what the victim knows and adversaries do not get: the victim's adapter, tokens and activations.

The judge computes these on its own copy of the model, in float64, from the adapter and the token ids that the victim
wrote to files. The base weights are those that the provider uses in its products.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attacks.adversaries.gradients import NO_LABEL
from attacks.seen.public_model import PublicModel
from wire.errors import ConfigurationError
from wire.manifest import Manifest


@dataclass(frozen=True)
class Batch:
    """Holds one training step: int64 tensors, each of shape (batch, num_tokens), padded on the right.

    Attributes:
        labels: the labels of the tokens at the same positions; NO_LABEL if there is none.
        attn_mask: 0 for padding.
    """

    token_ids: torch.Tensor
    labels: torch.Tensor
    attn_mask: torch.Tensor

    @property
    def targets(self) -> torch.Tensor:
        """Returns the label that each position is trained to predict, which is that of the next position; shape (batch,
        num_tokens)."""
        return torch.nn.functional.pad(self.labels, (0, 1), value=NO_LABEL)[:, 1:]

    @property
    def has_logits(self) -> torch.Tensor:
        """Returns the positions for which the SDK computes logits, which are those at which some sequence has a target;
        bool, shape (batch, num_tokens)."""
        return (self.targets != NO_LABEL).any(dim=0).expand(self.targets.shape)


def read_batches(file: Path) -> list[Batch]:
    """Reads the training steps that a victim wrote to a file, in order."""
    steps = json.loads(file.read_text())
    return [Batch(*(torch.tensor(step[name]) for name in ("input_ids", "labels", "attention_mask"))) for step in steps]


class Truth:
    """Holds the secrets of one victim, by which claims about the victim are judged."""

    def __init__(self, model: Any, public: PublicModel, manifest: Manifest, adapter: Path) -> None:
        """Reads a victim's adapter and puts it into a copy of the model.

        Args:
            model: the checkpoint, transformers' causal language model; it is changed in place.
            public: the same model as adversaries see it.
            manifest: the recording's manifest.
            adapter: a PEFT folder.

        Raises:
            ConfigurationError: the adapter does not fit the model.
        """
        self.manifest, self.public = manifest, public
        self.base = model.to(torch.float64).eval()
        _set_weights(self.base, public)
        self.adapted = _adapt(self.base, adapter)

    @functools.cached_property
    def deltas(self) -> Mapping[str, torch.Tensor]:
        """Returns ΔW of every base layer by name, float64, shape (in_features, out_features); zero if not adapted."""
        before = {name: layer.weight for name, layer in self.public.layers().items()}
        after = _weights(_merged(self.adapted), self.public)
        return {name: after[name] - weight for name, weight in before.items()}

    def rows(self, token_ids: Sequence[int]) -> Mapping[int, torch.Tensor]:
        """Returns the input of each group (layers that read the same input) in the victim's adapted model, by group id;
        float64, shape (num_tokens, in_features)."""
        return self._rows(self.adapted, input_ids=torch.tensor([list(token_ids)]))

    def fresh_rows(self, batch: Batch) -> Mapping[int, torch.Tensor]:
        """Returns the inputs of groups in the first training step of a fresh adapter, by group id; float64, shape
        (batch·num_tokens, in_features). The batch's sequences follow one another.

        The base model computes them, because a fresh adapter changes nothing: PEFT starts LoRA's B at zero, IA3 at one,
        OFT and BOFT at the identity.
        """
        return self._rows(self.base, input_ids=batch.token_ids, attention_mask=batch.attn_mask)

    def _rows(self, model: Any, **inputs: torch.Tensor) -> Mapping[int, torch.Tensor]:
        firsts = {group.layers[0].name: group.id for group in self.manifest.groups}
        seen: dict[int, torch.Tensor] = {}
        hooks = []
        for name, module in _inner(model).named_modules():
            if name in firsts:
                hooks.append(module.register_forward_pre_hook(functools.partial(_keep, seen, firsts[name])))
        try:
            with torch.no_grad():
                model(**inputs, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()
        return seen


def _keep(seen: dict[int, torch.Tensor], group: int, module: Any, given: tuple[torch.Tensor, ...]) -> None:
    seen[group] = given[0].detach().reshape(-1, given[0].shape[-1])


def _inner(adapted: Any) -> Any:
    """Returns the transformers model inside a PEFT model."""
    return adapted.base_model.model if hasattr(adapted, "peft_config") else adapted


def adapted_copy(base: Any, adapter: Path) -> Any:
    """Returns a copy of the model with an adapter, float64, in eval mode.

    Raises:
        ConfigurationError: the adapter does not fit the model.
    """
    import copy

    return _adapt(copy.deepcopy(base), adapter, copied=True)


def _adapt(base: Any, adapter: Path, copied: bool = False) -> Any:
    import copy
    import warnings

    from peft import PeftModel
    from safetensors import SafetensorError

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")  # else PEFT uses a fresh one
            adapted = PeftModel.from_pretrained(base if copied else copy.deepcopy(base), str(adapter))
    except (ValueError, RuntimeError, OSError, KeyError, TypeError, SafetensorError, UserWarning) as exc:
        said = (str(exc).splitlines() or [type(exc).__name__])[0][:200]
        raise ConfigurationError(f"the adapter does not fit the model: {said}") from None  # PEFT's frames hold tensors
    return adapted.to(torch.float64).eval()


def _merged(adapted: Any) -> Any:
    import copy

    return copy.deepcopy(adapted).merge_and_unload()


def _weights(model: Any, public: PublicModel) -> dict[str, torch.Tensor]:
    """Returns the weights of the blocks' layers, shape (in_features, out_features); members of a fused layer are
    separate."""
    modules = dict(model.named_modules())
    found = {}
    for name, layer in public.layers().items():
        module = modules[name.partition("[")[0]]
        weight = module.weight.detach().to(torch.float64)
        weight = weight.t() if isinstance(module, torch.nn.Linear) else weight
        start, width = (0, layer.weight.shape[1])
        if "[" in name:
            start = "qkv".index(name[-2]) * width
        found[name] = weight[:, start : start + width]
    return found


def _set_weights(model: Any, public: PublicModel) -> None:
    """Sets the weights to those that the provider uses in its products."""
    for name, weight in _weights(model, public).items():
        weight.copy_(public.layers()[name].weight)
