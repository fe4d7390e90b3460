"""This module compares PEFT's modules of two adapters for a layer, and copies them, for module_batch.py.

Guarantees: modules count as alike only if they run the same code with equal settings, so that they differ in their
registered tensors alone. Nothing here changes the numbers of a module.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

_TRIAL_SCALE = 0.5
"""The standard deviation of the numbers of a trial."""
_STUB = "base_layer"
"""The name under which PEFT's modules hold their base layers, which are stubs here."""


def shapes(module: nn.Module) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    """Returns the names, shapes and dtypes of a module's tensors."""
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in named_tensors(module))


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters and buffers of a module, each with its name."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def without_numbers(module: nn.Module) -> nn.Module:
    """Returns a copy of a module whose tensors are on the meta device, and so take no memory."""
    made = {}
    for _, tensor in named_tensors(module):
        empty = torch.empty_like(tensor, device="meta")
        made[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, made)


def with_random_numbers(module: nn.Module, seed: int) -> nn.Module:
    """Returns a copy of a module in which random numbers replace those that training changes. The other tensors are
    those of the module."""
    generator, made = torch.Generator().manual_seed(seed), dict[int, torch.Tensor]()
    for _, tensor in named_tensors(module):
        made[id(tensor)] = tensor
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            numbers = _TRIAL_SCALE * torch.randn(tensor.shape, generator=generator)
            made[id(tensor)] = nn.Parameter(numbers.to(tensor), requires_grad=False)
    return copy.deepcopy(module, made)


def are_alike(module: nn.Module, other: nn.Module) -> bool:
    """Returns whether two modules run the same code with the same settings, so that they differ in their registered
    tensors only. What belongs to the stubs is not compared."""
    own, others = _own_modules(module), _own_modules(other)
    return len(own) == len(others) and all(
        type(one) is type(two) and _settings(one) == _settings(two) for one, two in zip(own, others, strict=True)
    )


def _own_modules(module: nn.Module) -> list[nn.Module]:
    return [each for path, each in module.named_modules() if path.split(".")[0] != _STUB]


def _settings(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module that are neither its tensors nor its modules. If an attribute holds a tensor
    that is not registered, an object that is equal to no other takes its place."""
    found = {key: value for key, value in vars(module).items() if key not in ("_parameters", "_buffers", "_modules")}
    return {key: object() if _holds_tensor(value) else value for key, value in found.items()}


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return any(map(_holds_tensor, value)) if isinstance(value, list | tuple) else isinstance(value, torch.Tensor)


def share(module: nn.Module, others: Sequence[nn.Module]) -> None:
    """Replaces tensors of a module that training does not change by those of other modules, where they are equal. These
    are buffers, and what belongs to the base layer's stub."""
    for path, owner in module.named_modules():
        is_stub = path.split(".")[0] == _STUB
        for held in (owner._buffers, owner._parameters) if is_stub else (owner._buffers,):
            for leaf, tensor in held.items():
                if tensor is None:
                    continue
                theirs = [getattr(other.get_submodule(path), leaf) for other in others]
                candidates = {id(each): each for each in theirs}
                if id(tensor) not in candidates:
                    held[leaf] = next((each for each in candidates.values() if torch.equal(tensor, each)), tensor)
