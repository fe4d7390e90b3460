"""This module saves memory in training (graph pruning): some tensors are not kept, but computed again when needed.

Autograd keeps every tensor that an operation's gradient needs. After `prune`, a model does not keep the following of
them, which are cheap to compute again:

- outputs of norms and activations, and everything inside an activation but its input;
- the product of an activation and another layer's output, such as SiLU(gate) × up, which the next adapter reads;
- copies of an input in an adapter's own dtype;
- an adapter's dropped-out input, and the input of ReLU. In place of these, one bit for each element is kept: whether
  dropout or ReLU let the element through. Their gradients need no more than these bits.

Guarantees: gradients are the same bit for bit, because the same operations run again on the same values. Modules with
trainable parameters are left alone. Anything that is not recognised is kept as usual. Only passes with gradients
change. Not guaranteed: a second backward pass of the same graph after its tensors were changed in place.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.activations import ACT2CLS

from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear

_WEIGHTS = (1, 2, 4, 8, 16, 32, 64, 128)


def bits_of(flags: torch.Tensor) -> torch.Tensor:
    """Returns a tensor's flags, eight in a byte.

    Args:
        flags: bool, any shape and device.

    Returns:
        uint8, shape (⌈number of flags / 8⌉,); missing flags at the end are False.
    """
    flat = flags.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    result = padded[:, 0].to(torch.uint8)
    for place in range(1, 8):
        result |= padded[:, place].to(torch.uint8) << place
    return result


def apply_bits(x: torch.Tensor, bits: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Returns x times a mask: elements whose bit is not set become zero.

    Args:
        x: any float dtype, shape and device.
        bits: the result of `bits_of` for a tensor of x's shape.
        scale: the number by which the elements that remain are divided. The mask is divided by it in x's dtype, as in
            torch's dropout. None stands for 1.
    """
    weights = torch.tensor(_WEIGHTS, dtype=torch.uint8, device=x.device)
    flags = (bits[:, None] & weights).ne(0).view(-1)[: x.numel()].view(x.shape)
    mask = flags.to(x.dtype)
    return x * (mask if scale is None else mask.div_(scale))


def keep_bits(x: torch.Tensor, p: float) -> torch.Tensor:
    """Draws at random which elements dropout keeps; the result is the one that torch's dropout would draw on a CPU.

    Args:
        x: the tensor that is dropped out.
        p: the probability with which an element is dropped.

    Returns:
        The bits of the elements that are kept, as `bits_of` gives them.

    Source: ATen's `_dropout_impl`, which draws `empty_like(input).bernoulli_(1 - p)`.
    """
    return bits_of(torch.empty_like(x).bernoulli_(1 - p) != 0)


_NORMS = ("RMSNorm", "LayerNorm")
"""The endings of the class names of norms that treat each row by itself."""
_RECENT = 4
"""How many of the latest layer outputs are held. A product of two of them is then recognised even after the model's own
code has dropped them."""

_Run = Callable[..., torch.Tensor]


def prune(model: Any) -> None:
    """Changes a model so that its forward passes keep less memory for the backward pass, with the same gradients.

    Args:
        model: a model of `TenantClient.load_model`, with or without PEFT adapters.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    pruning = _Pruning()
    for module in base.modules():
        pruning.watch(module)
    base.forward = pruning.around(base.forward)


class _Recipe:
    """Describes how a tensor is computed again: by an operation, without gradients, from inputs that were packed by
    `_Pruning`."""

    def __init__(self, run: _Run, inputs: list[Any]) -> None:
        self.run, self.inputs = run, inputs


class _Pruning:
    """Records how one forward pass computed its tensors. Where autograd would keep a tensor that can be computed again,
    it packs the tensor: it gives autograd a `_Recipe` in place of the tensor."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], int, _Run, tuple[torch.Tensor, ...]]] = {}
        """Maps a tensor's address to the tensor, its version, and the operation and inputs that it was computed by."""
        self._recipes: dict[int, _Recipe] = {}
        self._by_node: dict[tuple[Any, int], weakref.ref[torch.Tensor]] = {}
        self._recent: deque[torch.Tensor] = deque(maxlen=_RECENT)
        self._last: tuple[_Recipe, torch.Tensor] | None = None

    def around(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a forward method that runs `stock`, the model's own, and packs the tensors that autograd keeps."""

        @functools.wraps(stock)
        def forward(*args: Any, **options: Any) -> Any:
            if not torch.is_grad_enabled():
                return stock(*args, **options)
            self._last = None
            try:
                with saved_tensors_hooks(self._pack, self._unpack):
                    return stock(*args, **options)
            finally:
                self._made.clear()
                self._recipes.clear()
                self._by_node.clear()
                self._recent.clear()

        return forward

    # What is recognised

    def watch(self, module: nn.Module) -> None:
        """Registers hooks on a module or replaces its forward method, if its output or input can be computed again."""
        if isinstance(module, BaseTunerLayer):
            module.register_forward_pre_hook(self._sees_input)
            module.register_forward_hook(self._sees_output)
            for adapters in (getattr(module, name, None) for name in ("lora_dropout", "lora_A")):
                for adapter in adapters.values() if isinstance(adapters, nn.ModuleDict) else ():
                    self._watch_adapter(adapter)
        elif isinstance(module, RemoteLinear | RemoteConv1D):
            module.register_forward_hook(self._sees_output)
        elif _is_frozen_leaf(module) and type(module).__name__.endswith(_NORMS):
            module.forward = self._norm(module.forward)
        elif _is_frozen_leaf(module) and isinstance(module, _ACTIVATIONS):
            module.forward = self._activation(module.forward, isinstance(module, nn.ReLU))

    def _watch_adapter(self, adapter: nn.Module) -> None:
        if type(adapter) is nn.Dropout and 0 < adapter.p < 1:
            adapter.forward = self._dropout(adapter, adapter.forward)  # type: ignore[method-assign]
        elif isinstance(adapter, nn.Linear):
            adapter.register_forward_pre_hook(self._sees_copy)

    def _norm(self, stock: _Run) -> _Run:
        """Returns a forward method that runs `stock`, a norm's own, and notes how its output was computed. The norm's
        graph stays as it is, since another graph would add gradients in another order."""

        def forward(x: torch.Tensor) -> torch.Tensor:
            return self._note(stock(x), stock, x) if _is_plain(x) else stock(x)

        return functools.wraps(stock)(forward)

    def _activation(self, stock: _Run, is_relu: bool) -> _Run:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if not _is_plain(x):
                return stock(x)
            if is_relu:
                return _Relu.apply(x)  # type: ignore[no-any-return, no-untyped-call]
            output: torch.Tensor = _Again.apply(x, stock)  # type: ignore[no-untyped-call]
            self._recent.append(output)
            return self._note(output, stock, x)

        return functools.wraps(stock)(forward)

    def _dropout(self, module: nn.Dropout, stock: _Run) -> _Run:
        def forward(x: torch.Tensor) -> torch.Tensor:
            if not (module.training and _is_plain(x) and x.is_cpu):
                return stock(x)
            kept = keep_bits(x, module.p)
            again = functools.partial(apply_bits, bits=kept, scale=1 - module.p)
            return self._note(_Masked.apply(x, kept, 1 - module.p), again, x)  # type: ignore[no-untyped-call]

        return functools.wraps(stock)(forward)

    def _sees_output(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._note_node(output)
        self._recent.append(output)

    def _sees_input(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        """Recognises a layer's input that is the product of two known tensors."""
        if not args or getattr(args[0], "grad_fn", None) is None:
            return
        self._note_node(args[0])
        if args[0].grad_fn.name() == "MulBackward0":  # type: ignore[union-attr]
            factors = self._tensors_of(args[0].grad_fn)
            if len(factors) == 2 and all(_is_alike(each, args[0]) for each in factors):
                self._note(args[0], torch.mul, *factors)

    def _sees_copy(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        """Recognises an adapter's input that is a copy in another dtype."""
        if args and args[0].grad_fn is not None and args[0].grad_fn.name() == "ToCopyBackward0":
            source = self._tensors_of(args[0].grad_fn)
            if len(source) == 1 and source[0].shape == args[0].shape:
                self._note(args[0], functools.partial(torch.Tensor.to, dtype=args[0].dtype), *source)

    def _tensors_of(self, node: Any) -> list[torch.Tensor]:
        """Returns the tensors from which a node of the autograd graph computed its output, as far as they are known."""
        found = [self._by_node.get(each) for each in node.next_functions]
        return [tensor for each in found if each is not None and (tensor := each()) is not None]

    def _note_node(self, output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            self._by_node[output.grad_fn, output.output_nr] = weakref.ref(output)

    def _note(self, output: torch.Tensor, run: _Run, *inputs: torch.Tensor) -> torch.Tensor:
        """Remembers that `run` computed `output` from `inputs`, for as long as the output exists. Returns the
        output."""
        self._note_node(output)
        address = output.data_ptr()
        if not output.is_contiguous() or any(each.data_ptr() == address for each in inputs):
            return output

        def forget(gone: weakref.ref[torch.Tensor]) -> None:
            if self._made.get(address, (None,))[0] is gone:
                del self._made[address]
                self._recipes.pop(address, None)

        self._recipes.pop(address, None)
        self._made[address] = (
            weakref.ref(output, forget), output._version, run, tuple(each.detach() for each in inputs)
        )  # fmt: skip
        return output

    # What autograd keeps

    def _pack(self, tensor: torch.Tensor) -> Any:
        recipe = self._recipe(tensor)
        return (tensor, tensor._version) if recipe is None else (recipe, tensor.shape)

    def _recipe(self, tensor: torch.Tensor) -> _Recipe | None:
        if tensor.layout is not torch.strided:  # sparse tensors, which some adapters have, have no address
            return None
        address = tensor.data_ptr()
        made = self._made.get(address)
        if made is None:
            return None
        output, version, run, inputs = made[0](), *made[1:]
        if output is None:
            return None
        is_same = output.numel() == tensor.numel() and output.dtype == tensor.dtype and tensor.is_contiguous()
        if not is_same or version != output._version or output.device != tensor.device:
            return None
        if address not in self._recipes:
            self._recipes[address] = _Recipe(run, [self._pack(each) for each in inputs])
        return self._recipes[address]

    def _unpack(self, packed: tuple[Any, Any]) -> torch.Tensor:
        kept, form = packed
        if isinstance(kept, _Recipe):
            return self._computed(kept).view(form)
        if kept._version != form:
            raise RuntimeError("a tensor that the backward pass needs was changed in place")
        return kept  # type: ignore[no-any-return]

    def _computed(self, recipe: _Recipe) -> torch.Tensor:
        if self._last is not None and self._last[0] is recipe:  # q, k and v read the same input one after the other
            return self._last[1]
        with torch.no_grad():
            result = recipe.run(*(self._unpack(each) for each in recipe.inputs))
        self._last = recipe, result
        return result


def _is_frozen_leaf(module: nn.Module) -> bool:
    """Returns whether a module has no submodules and no trainable parameters, and does not change its input in
    place."""
    has_parts = next(module.children(), None) is not None or getattr(module, "inplace", False)
    return not has_parts and not any(each.requires_grad for each in module.parameters())


def _classes() -> tuple[type, ...]:
    found = (entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values())
    return tuple({each for each in found if isinstance(each, type)})


_ACTIVATIONS = _classes()
"""The classes of transformers' activation functions."""


def _is_plain(x: torch.Tensor) -> bool:
    """Returns whether a gradient of `x` is recorded, outside autocast, whose casts would not be repeated."""
    return torch.is_grad_enabled() and x.requires_grad and not torch.is_autocast_enabled(x.device.type)


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


class _Again(torch.autograd.Function):
    """Runs an operation and keeps only its input; the backward pass runs the operation again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, run: _Run) -> torch.Tensor:
        """Returns run(x)."""
        ctx.save_for_backward(x)
        ctx.run = run
        return run(x)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Returns the gradient of x."""
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(ctx.run(x), x, grad)[0], None


class _Relu(torch.autograd.Function):
    """Computes ReLU, and keeps one bit for each element for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns max(x, 0)."""
        output = torch.relu(x)
        ctx.save_for_backward(bits_of(output > 0))
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Returns the gradient where x was positive, and zero elsewhere."""
        return apply_bits(grad, ctx.saved_tensors[0], None)


class _Masked(torch.autograd.Function):
    """Applies dropout whose kept elements are given as bits, and keeps only these bits for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bits: torch.Tensor, scale: float) -> torch.Tensor:
        """Returns x with dropped elements set to zero, and the others divided by `scale`."""
        ctx.save_for_backward(bits)
        ctx.scale = scale
        return apply_bits(x, bits, scale)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Returns the gradient of x."""
        return apply_bits(grad, ctx.saved_tensors[0], ctx.scale), None, None
