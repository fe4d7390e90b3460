"""Decides which layers a provider serves, and which of these layers share one call.

Layers are found by their type. One small forward pass, the trace, shows which layers get the same input; these become
one group. Layers that are not served go into the bundle.

Guarantees: a layer is not served if its weight is shared with another layer, or is read or changed outside the layer's
own call. A layer with its own forward method is served only if it computed x·W + b for rows of several magnitudes. If
operations of torch change the model's tensors during the pass, the tensors are restored.

Not guaranteed: changes through numpy are not restored, nor are attributes that the pass sets to another tensor. With
another input, with a cache or in training, the layers of a group may get different inputs, or a weight may be read
outside its layer's call. So the tenant compares the inputs again in every call, and the object that replaces a
weight at the tenant raises an error if it is read.
"""

from __future__ import annotations

import bisect
import copy
import fnmatch
import itertools
import logging
import re
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wire.errors import ConfigurationError

_LOGGER = logging.getLogger(__name__)
_TRACE_SHAPE = (2, 3)
_MAX_NAME = 512
_MAX_MEMBERS = 256
"""The first is the most characters of a group's name, and the second is the most layers of a group; see
wire/manifest.py."""
_TOLERANCE = 1e-5
"""The largest relative error that float32 sums in another order may have, about 100 units in the last place."""


def layer_kind(module: nn.Module) -> str | None:
    """Returns `linear` if a module is an nn.Linear (or of a subclass), and `conv1d` if it is a Conv1D. Returns None for
    all other modules, and if the module's weight cannot be served."""
    from transformers.pytorch_utils import Conv1D

    weight = module._parameters.get("weight")  # The weight of a parametrised layer is no parameter.
    if weight is None or weight.dim() != 2 or not weight.dtype.is_floating_point or not weight.numel():
        return None
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return None  # nn.MultiheadAttention reads the weight of this layer directly.
    if not _is_stock(module) and (set(module._parameters) - {"weight", "bias"} or module._buffers or module._modules):
        return None  # A tenant's stand-in has only a weight and a bias.
    if isinstance(module, nn.Linear):
        return "linear"
    return "conv1d" if isinstance(module, Conv1D) else None


def _is_stock(module: nn.Module) -> bool:
    """Returns whether a module's type alone shows that the module computes x·W + b; the trace checks other modules."""
    from transformers.pytorch_utils import Conv1D

    return type(module).forward in (nn.Linear.forward, Conv1D.forward)


def base_layers(model: nn.Module, patterns: str | None = None) -> dict[str, nn.Module]:
    """Returns the layers that may be served, by name, in module order; `trace_groups` decides which of them are served.

    Args:
        model: any Hugging Face model.
        patterns: comma-separated fnmatch patterns of full module names; a `!` in front excludes; None takes all.

    Raises:
        ConfigurationError: no layer matches.
    """
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    found = {
        name: module
        for name, module in model.named_modules()
        if layer_kind(module) and uses[id(module.weight)] == 1  # Tied heads and shared layers stay with the tenant.
    }
    chosen = {name: module for name, module in found.items() if _matches(name, patterns)}
    if not chosen:
        text = "no nn.Linear or Conv1D of its own" if patterns is None else f"no base layer that matches {patterns!r}"
        raise ConfigurationError(f"the model has {text}")
    return chosen


def _matches(name: str, patterns: str | None) -> bool:
    parts = [part.strip() for part in (patterns or "").split(",") if part.strip()]
    wanted = [part for part in parts if not part.startswith("!")] or ["*"]
    refused = [part[1:] for part in parts if part.startswith("!")]
    return any(fnmatch.fnmatchcase(name, part) for part in wanted) and not any(
        fnmatch.fnmatchcase(name, part) for part in refused
    )


def trace_groups(model: nn.Module, layers: dict[str, nn.Module]) -> list[tuple[str, ...]]:
    """Runs the trace and groups the layers that got the same input.

    Args:
        model: the model, with its weights.
        layers: the layers from `base_layers`.

    Returns:
        Groups of layer names, in order of execution; layers that never ran come last. Every served layer is in exactly
        one group. The layers of a group, at most `_MAX_MEMBERS`, got the same tensor object as input, at the same
        version. A layer that never ran, or ran more than once, is a group of its own. If the model's forward pass
        fails, every layer is a group of its own, and layers with their own forward method are not served.

    Raises:
        ConfigurationError: none of the layers can be served.
    """
    trace = _Trace(model, layers)
    groups: list[tuple[str, ...]]
    try:
        trace.run()
    except Exception as exc:  # noqa: BLE001 - a model may fail in any way; layers can be served without groups
        _LOGGER.warning("tracing the model failed (%s): no layers are fused", type(exc).__name__)
        groups = [(name,) for name, module in layers.items() if _is_stock(module) and name not in trace.refused]
    else:
        groups = _group(_to_serve(layers, trace), trace.calls)
    if not groups:
        raise ConfigurationError(
            "none of the chosen layers can be served: the model reads their weights itself or does not call them; "
            "choose another model or other --base-layers"
        )
    return groups


class _Trace(TorchDispatchMode):
    """Watches one forward pass: each layer's input, every use of a layer's weight, and every change of the model's
    tensors in place.

    Attributes:
        calls: by layer name, the input tensor of each call and the version of that tensor.
        refused: names of layers whose weight was changed, or used outside the layer's own call, or whose output was
            not x·W + b.
    """

    def __init__(self, model: nn.Module, layers: dict[str, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, list[tuple[torch.Tensor, int]]] = {}
        self.refused: set[str] = set()
        self._model, self._layers = model, layers
        self._names = {module.weight.data_ptr(): name for name, module in layers.items()}  # type: ignore[operator]
        tensors = itertools.chain(model.parameters(), model.buffers())
        self._state = {tensor.data_ptr(): tensor for tensor in tensors if tensor.numel()}
        self._places = sorted(self._state)
        self._before: dict[int, torch.Tensor] = {}  # Copies of tensors before the pass changed them.
        self._running: list[str] = []

    def run(self) -> None:
        """Runs the model once, and restores the tensors that the run changed."""
        handles = [handle for name, module in self._layers.items() for handle in self._hook(name, module)]
        try:
            with self:
                _dummy_forward(self._model)
        finally:
            for handle in handles:
                handle.remove()
            with torch.no_grad():
                for place, tensor in self._before.items():
                    self._state[place].copy_(tensor)

    def _hook(self, name: str, module: nn.Module) -> list[Any]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = args[0] if args else next(iter(kwargs.values()))
            # The tensor is kept alive, since another tensor could get its id otherwise.
            self.calls.setdefault(name, []).append((given, given._version))
            self._running.append(name)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if not _is_stock(module) and not _is_product(module, self.calls[name][-1][0], output):
                self.refused.add(name)
            self._running.remove(name)

        return [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave, always_call=True),  # type: ignore[arg-type]
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and records which of the model's tensors it reads or changes. Torch calls this for every
        operation on tensors; reading a shape or a dtype is not an operation."""
        for tensor in tree_leaves((args, kwargs)):
            place = self._place(tensor) if isinstance(tensor, torch.Tensor) else None
            if place is not None:
                self._touch(place, func._schema.is_mutable)
        return func(*args, **(kwargs or {}))

    def _place(self, tensor: torch.Tensor) -> int | None:
        """Returns the address of the parameter or buffer whose memory a tensor shares, or None if there is none."""
        if tensor.layout is not torch.strided or not tensor.numel():
            return None
        address = tensor.data_ptr()
        at = bisect.bisect_right(self._places, address) - 1
        place = self._places[at] if at >= 0 else 0
        return place if place and address < place + self._state[place].nbytes else None

    def _touch(self, place: int, is_changed: bool) -> None:
        name = self._names.get(place)
        if name is not None and (is_changed or name not in self._running):
            self.refused.add(name)
        if is_changed and place not in self._before:
            self._before[place] = self._state[place].detach().clone()


def _is_product(module: nn.Module, rows: torch.Tensor, output: Any) -> bool:
    """Returns whether a module's `output` for `rows` is x·W + b, and whether the same holds for a float32 copy of the
    module with random rows of three magnitudes, in training mode and in eval mode."""
    if not isinstance(rows, torch.Tensor) or not isinstance(output, torch.Tensor) or not _agrees(module, rows, output):
        return False
    probe = copy.deepcopy(module).float()
    drawn = torch.randn(4, rows.shape[-1], generator=torch.Generator().manual_seed(0))
    sizes = [(size * drawn, training) for size in (1e-3, 1.0, 64.0) for training in (False, True)]
    return all(_agrees(probe, given, probe.train(training).forward(given)) for given, training in sizes)


def _agrees(module: nn.Module, rows: torch.Tensor, output: torch.Tensor) -> bool:
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    weight = weight.t() if layer_kind(module) == "linear" else weight
    if rows.shape[-1] != weight.shape[0] or not output.is_floating_point():
        return False
    wanted = rows.float() @ weight.float()
    if module.bias is not None:
        wanted = wanted + module.bias.float()  # type: ignore[operator]
    bound = max(_TOLERANCE, 4 * torch.finfo(output.dtype).eps)
    return output.shape == wanted.shape and bool((output.float() - wanted).norm() <= bound * wanted.norm())


def _to_serve(layers: dict[str, nn.Module], trace: _Trace) -> list[str]:
    """Returns the names of the layers to serve.

    Layers that ran are served unless they were refused. A layer that did not run is served if its type alone shows what
    it computes, a twin of it ran, and no twin was refused; twins are layers whose names differ only in numbers. The
    rule for twins is for mixtures of experts, since the six tokens of the trace do not reach every expert. If no twin
    ran, the layer is not served, since this use of the model does not seem to call the layer.
    """
    refused = {_family(name) for name in trace.refused}
    served = {_family(name) for name in trace.calls} - refused
    return [
        name
        for name, module in layers.items()
        if (name not in trace.refused if name in trace.calls else _is_stock(module) and _family(name) in served)
    ]


def _family(name: str) -> str:
    """Returns a layer's name with every number replaced by `#`; layers that differ only in numbers get one name."""
    return re.sub(r"\d+", "#", name)


@torch.no_grad()
def _dummy_forward(model: Any) -> None:
    batch, length = _TRACE_SHAPE
    vocab = int(getattr(model.config.get_text_config(), "vocab_size", 0) or 2)
    token_ids = (torch.arange(batch * length) * 7919 % vocab).view(batch, length)
    try:
        model(input_ids=token_ids, use_cache=False)
    except (TypeError, ValueError):
        model(**model.dummy_inputs)


def _group(names: list[str], calls: dict[str, list[tuple[torch.Tensor, int]]]) -> list[tuple[str, ...]]:
    groups: dict[Any, list[str]] = {}
    served = set(names)
    for name in [*(name for name in calls if name in served), *(name for name in names if name not in calls)]:
        seen = calls.get(name, [])
        key = (id(seen[0][0]), seen[0][1]) if len(seen) == 1 else name
        groups.setdefault(key, []).append(name)
    return [
        tuple(names[at : at + _MAX_MEMBERS]) for names in groups.values() for at in range(0, len(names), _MAX_MEMBERS)
    ]


def group_name(names: tuple[str, ...]) -> str:
    """Returns the name of a group, such as `model.layers.0.self_attn.q_proj+k_proj+v_proj`: the common beginning of the
    layers' names, then the remainders of the names, joined by `+`. The name is cut off after `_MAX_NAME` characters."""
    parts = [name.split(".") for name in names]
    shared = 0
    while all(len(part) > shared + 1 and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    name = ".".join([*parts[0][:shared], "+".join(".".join(part[shared:]) for part in parts)])
    return name[:_MAX_NAME]
