"""This module computes the column norms that DoRA divides by, without the base weights.

DoRA scales column j of W + s·AᵀBᵀ to a trained magnitude, and so needs the column's norm. In

    ‖w_j + s·(BA)_j‖² = ‖w_j‖² + 2s·Σ_r B_jr·(A·W)_rj + s²·(B·A·Aᵀ·Bᵀ)_jj

w_j is column j of W, and (BA)_j is row j of B·A. The first term comes with the provider's bundle, and the tenant
computes the last one from A and B. For the middle one, the rows of A go through the masked call that gives A·W.

Guarantees: A·W is requested once in each course (the state of a run, or of an answer of `generate`), and again in it
when A was changed in place or an optimizer has made a step with it, whatever the numbers are; never when an activation
is computed again. No course uses what another one asked for: a course that continues with zeros has zeros as A·W, and a
request that only follows such a course would show the provider that a value was not finite. One call serves all layers
of a group, and calls for several groups are in flight at the same time. A norm is positive and finite whatever the
provider answers: the middle term is limited to the bound of the Cauchy-Schwarz inequality. The course records a product
that is not finite (tenant_sdk/model/planned_calls.py).
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from tenant_sdk.model import product_source
from tenant_sdk.model.base_products import group_of, group_products
from tenant_sdk.model.planned_calls import Course, PlannedCalls, are_finite
from tenant_sdk.model.remote_group import RemoteGroup

SMALLEST_SHARE = 1e-6
"""The smallest accepted norm of a column of W + s·AᵀBᵀ, as a share of the sum of the two terms' norms. In float32 a
smaller share cannot be told from rounding errors."""
_STEPS = "_veilbase_steps"
"""The attribute in which a parameter counts the optimizer steps that were made with it."""


def column_norms_of_sum(
    norms: torch.Tensor, cross: torch.Tensor, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Returns the norms of the columns of W + scaling·AᵀBᵀ.

    Args:
        norms: the norms of the columns of W, shape (out_features,).
        cross: A·W, shape (rank, out_features), with any values: NaN counts as zero, and the influence of the others is
            bounded.
        lora_a: A, shape (rank, in_features).
        lora_b: B, shape (out_features, rank).
        scaling: the factor s.

    Returns:
        float32, shape (out_features,), positive; finite if A and B are.
    """
    base, a, b = norms.to(torch.float64), lora_a.detach().to(torch.float64), lora_b.detach().to(torch.float64)
    own = ((b @ (a @ a.t())) * b).sum(dim=1).clamp_min(0).sqrt() * abs(scaling)  # ‖s·(BA)_j‖
    bound = base * own
    middle = (b * cross.t().to(torch.float64)).sum(dim=1) * scaling
    middle = torch.nan_to_num(middle, nan=0.0).clamp(-bound, bound)
    smallest = ((base + own) * SMALLEST_SHARE).clamp_min(torch.finfo(torch.float32).tiny)
    found = (base**2 + 2 * middle + own**2).clamp_min(0).sqrt().maximum(smallest)
    return found.clamp_max(torch.finfo(torch.float32).max).to(torch.float32)


@dataclass(eq=False)
class _Norm:
    """Holds the norms of one layer, shape (out_features,), and the state of B and the scaling that they are of."""

    source: weakref.ref[torch.Tensor]
    version: tuple[int, int]
    scaling: float
    norm: torch.Tensor

    def is_of(self, lora_b: torch.Tensor, scaling: float) -> bool:
        """Returns whether the norms are those of B as it is now, and of this scaling."""
        return self.source() is lora_b and self.version == _version(lora_b) and self.scaling == scaling


@dataclass(eq=False)
class _Product:
    """Holds A·W of one layer, shape (rank, out_features), the state that A had when A·W was requested, and the norms
    that were computed from A·W last."""

    source: weakref.ref[torch.Tensor]
    version: tuple[int, int]
    product: torch.Tensor
    norm: _Norm | None = None

    def is_of(self, lora_a: torch.Tensor) -> bool:
        """Returns whether the product is that of A as it is now."""
        return self.source() is lora_a and self.version == _version(lora_a)


class NormCache:
    """Keeps A·W and the column norms for one adapter of one DoRA layer, in each course until A, B or the scaling
    changes, and at most as long as the course exists."""

    def __init__(self) -> None:
        """Makes an empty cache."""
        self.asked: weakref.WeakKeyDictionary[Course, _Product] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> NormCache:
        """Returns an empty cache, since a copied layer has an A of its own."""
        return NormCache()

    def norm(self, layer: Any, adapter: str) -> torch.Tensor:
        """Returns the column norms of a layer's weight together with its adapter, float32, shape (out_features,).

        If this thread sends nothing (`product_source.sends_nothing`), A·W counts as zeros, and nothing is kept.

        Args:
            layer: a LoRA layer over a remote layer, with this cache in `norm_caches[adapter]`.
            adapter: the adapter's name.

        Raises:
            VeilbaseError: the provider gives no norms, or did not give A·W.
        """
        lora_a, lora_b, scaling = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, layer.scaling[adapter]
        with torch.inference_mode(False), torch.no_grad():  # the norms may be needed in a later training step
            base = layer.get_base_layer()
            if product_source.sends_nothing():
                cross = torch.zeros(lora_a.shape[0], lora_b.shape[0], device=lora_a.device)
                return column_norms_of_sum(base.column_norms(), cross, lora_a, lora_b, scaling)
            asked = _product_of(layer, adapter)
            if asked.norm is None or not asked.norm.is_of(lora_b, scaling):
                norm = column_norms_of_sum(base.column_norms(), asked.product, lora_a, lora_b, scaling)
                asked.norm = _Norm(weakref.ref(lora_b), _version(lora_b), scaling, norm)
            return asked.norm.norm


class _Readers:
    """Holds the DoRA layers of one model, and the lock under which their products A·W are requested."""

    def __init__(self) -> None:
        self.layers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.lock = threading.Lock()


_READERS: weakref.WeakKeyDictionary[PlannedCalls, _Readers] = weakref.WeakKeyDictionary()
"""Maps a loaded model, by its courses (run states), to its DoRA layers."""
_READERS_LOCK = threading.Lock()


def _readers(planned: PlannedCalls) -> _Readers:
    with _READERS_LOCK:
        return _READERS.setdefault(planned, _Readers())


def watch(layer: Any) -> None:
    """Registers a LoRA layer over a remote layer, so that A·W of all layers of the model is requested together."""
    _readers(group_of(layer.get_base_layer()).planned_calls).layers.add(layer)


def _product_of(layer: Any, adapter: str) -> _Product:
    """Returns A·W of a layer. If A·W must be requested, the missing and outdated products of the model's other layers
    are requested with it."""
    planned = group_of(layer.get_base_layer()).planned_calls
    readers, course = _readers(planned), planned.course
    with readers.lock:
        readers.layers.add(layer)  # a copied model's layers were never announced
        if _is_stale(layer, adapter, course):
            _ask([each for each in readers.layers if _is_stale(each, adapter, course)], adapter, course)
        asked: _Product = layer.norm_caches[adapter].asked[course]
        return asked


def _is_stale(layer: Any, adapter: str, course: Course) -> bool:
    cache: NormCache | None = layer.norm_caches.get(adapter)
    if cache is None or adapter not in layer.lora_A:
        return False
    asked = cache.asked.get(course)
    return asked is None or not asked.is_of(layer.lora_A[adapter].weight)


def _ask(layers: list[Any], adapter: str, course: Course) -> None:
    """Requests A·W of several layers of a model. Nothing is sent if the norms of a layer cannot be read."""
    by_group: dict[RemoteGroup, list[Any]] = {}
    for layer in sorted(layers, key=_place):
        layer.get_base_layer().column_norms()
        by_group.setdefault(group_of(layer.get_base_layer()), []).append(layer)
    factors = {layer: layer.lora_A[adapter].weight for layer in layers}
    versions = {layer: _version(lora_a) for layer, lora_a in factors.items()}
    products = group_products(
        [(group, torch.cat([factors[layer].to(torch.float32) for layer in own])) for group, own in by_group.items()]
    )
    if not are_finite(part for parts in products for part in parts):
        course.not_finite()
    for own, parts in zip(by_group.values(), products, strict=True):
        begin = 0
        for layer in own:
            rank = factors[layer].shape[0]
            rows = parts[layer.get_base_layer().index][begin : begin + rank].clone()
            begin += rank
            kept = _Product(weakref.ref(factors[layer]), versions[layer], rows)
            layer.norm_caches[adapter].asked[course] = kept


def _place(layer: Any) -> tuple[int, int]:
    """Returns the numbers of a layer's group, and of the layer in its group."""
    base = layer.get_base_layer()
    return group_of(base).spec.id, base.index


def _version(parameter: torch.Tensor) -> tuple[int, int]:
    """Returns a pair that differs after each optimizer step, and after each other change in place.

    Some optimizers write through `.data`, which torch's version number does not count. A step may also change nothing,
    and the provider must not see that. So steps are counted, too.
    """
    if not hasattr(parameter, _STEPS):
        setattr(parameter, _STEPS, 0)
    return parameter._version, int(getattr(parameter, _STEPS))


def _count_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if hasattr(parameter, _STEPS):
                setattr(parameter, _STEPS, getattr(parameter, _STEPS) + 1)


register_optimizer_step_post_hook(_count_step)
