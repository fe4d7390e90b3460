"""This module makes PEFT's DoRA work over layers whose weights are at the provider.

DoRA scales column j of W + s·AᵀBᵀ to a trained magnitude, and so needs the column's norm. PEFT's own DoRA layers read
the whole base weight W in each forward pass. The layers of this module compute the same from the layer's output and
from norms. In

    ‖w_j + s·(BA)_j‖² = ‖w_j‖² + 2s·Σ_r B_jr·(A·W)_rj + s²·(B·A·Aᵀ·Bᵀ)_jj

w_j is column j of W, and (BA)_j is row j of B·A. The first term comes with the provider's bundle (`ColumnNorms`), and
the tenant computes the last one from A and B. For the middle one, the rows of A go through the masked call that gives
A·W.

Guarantees:
- outputs, gradients and saved files are those of PEFT's DoRA, up to rounding. As in PEFT, the norm is no part of the
  gradient;
- a forward pass makes the calls that LoRA makes, and two kinds of further calls: those for the norms if A is new or has
  changed, and with dropout a second call for each layer, since DoRA multiplies the dropped-out input by the base
  weight, too;
- A·W is requested once in each run, and in each answer of `generate`, and again in it when A was
  changed in place or an optimizer has made a step with it, whatever the numbers are; never when an activation is
  computed again. One call serves all layers of a group, and calls for several groups are in flight at the same time;
- no run uses what another one asked for: a run that continues with zeros has zeros as A·W, and a request that
  only follows such a run would show the provider that a value was not finite;
- a norm of W + s·AᵀBᵀ is positive and finite whatever the provider answers: the middle term is limited to the bound of
  the Cauchy-Schwarz inequality. The run state records a product that is not finite (tenant_sdk/model/run_state.py);
- the bundle's norms are not read before an adapter needs them. Those that are returned are finite, not negative, and
  for int8 weights no larger than the manifest allows. With `verify` they were compared with the trusted checkpoint
  before (tenant_sdk/trust/compare.py).

Not guaranteed: without `verify`, that the bundle's norms are those of the weights; and merging, which needs the weight.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import LoraConfig, PeftConfig
from peft.tuners.lora import Linear
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.variants import DoraLinearVariant
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tenant_sdk.model.base_products import RemoteLayer, group_of, group_products
from tenant_sdk.model.remote_group import RemoteGroup
from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear
from tenant_sdk.model.run_state import RunOutcome, RunState, RunStates, are_finite
from wire.errors import ConfigurationError, MalformedFrame, os_cause
from wire.manifest import NATIVE_NORMS, LayerInfo, Manifest

_FILE = "column_norms.safetensors"
_ROUNDING = 1e-6
"""The relative error that the rounding of a norm to float32 may have."""


class ColumnNorms:
    """Gives the column norms of one provider's weights."""

    def __init__(
        self, folder: Path, manifest: Manifest, alphas: Mapping[str, torch.Tensor], is_float: bool
    ) -> None:  # fmt: skip
        """Keeps the place of the norms; nothing is read yet.

        Args:
            folder: the bundle's folder.
            manifest: the manifest of the same provider.
            alphas: α, the scales of the int8 weights, by layer name.
            is_float: whether calls are in float arithmetic, which uses native weights if the provider has them.
        """
        self._folder, self._alphas = folder, alphas
        self._layers = {layer.name: layer for group in manifest.groups for layer in group.layers}
        self._prefix = NATIVE_NORMS if is_float and manifest.weights == "native" else ""
        self._lock = threading.Lock()
        self._read: dict[str, torch.Tensor] | None = None

    def of(self, layer: str) -> torch.Tensor:
        """Returns the norms of the columns of a layer's weight, float32, shape (out_features,), on the CPU.

        Raises:
            ConfigurationError: the provider's bundle has no norms.
            MalformedFrame: the bundle's norms cannot be read, or cannot be the norms of this layer.
        """
        with self._lock:
            if self._read is None:
                self._read = self._load()
        norms, info = self._read.get(self._prefix + layer), self._layers[layer]
        if norms is None or norms.shape != (info.out_features,) or norms.dtype != torch.float32:
            raise MalformedFrame(f"the bundle's column norms of {layer} do not fit the manifest")
        if not bool((torch.isfinite(norms) & (norms >= 0) & (norms <= self._largest(info))).all()):
            raise MalformedFrame(f"the bundle's column norms of {layer} are no norms that this layer can have")
        return norms

    def _load(self) -> dict[str, torch.Tensor]:
        if not (self._folder / _FILE).exists():
            raise ConfigurationError(
                "DoRA needs the norms of the base weights' columns, which this provider does not give: ask its "
                "operator to update it, or use LoRA"
            )
        try:
            read: dict[str, torch.Tensor] = load_file(self._folder / _FILE)
        except (SafetensorError, OSError) as exc:
            raise MalformedFrame(f"the bundle's {_FILE} cannot be read") from os_cause(exc)
        return read

    def _largest(self, info: LayerInfo) -> torch.Tensor:
        """Returns the largest norms that a layer's columns can have. For an int8 weight the manifest's bound and the
        scales give them; for a native weight any float32 is allowed."""
        if self._prefix:
            return torch.tensor(torch.finfo(torch.float32).max)
        return self._alphas[info.name] * (info.max_column_norm * (1 + _ROUNDING))

    def __deepcopy__(self, memo: dict[int, Any]) -> ColumnNorms:
        """Returns this same object, since a copied model uses the same weights."""
        return self


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
    """Keeps A·W and the column norms for one adapter of one DoRA layer, in each run until A, B or the scaling
    changes, and at most as long as the run's state exists."""

    def __init__(self) -> None:
        """Makes an empty cache."""
        self.asked: weakref.WeakKeyDictionary[RunOutcome, _Product] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> NormCache:
        """Returns an empty cache, since a copied layer has an A of its own."""
        return NormCache()

    def norm(self, layer: Any, adapter: str) -> torch.Tensor:
        """Returns the column norms of a layer's weight together with its adapter, float32, shape (out_features,).

        If this thread sends nothing (`ProductSource.sends_nothing`), A·W counts as zeros, and nothing is kept.

        Args:
            layer: a LoRA layer over a remote layer, with this cache in `norm_caches[adapter]`.
            adapter: the adapter's name.

        Raises:
            VeilbaseError: the provider gives no norms, or did not give A·W.
        """
        lora_a, lora_b, scaling = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, layer.scaling[adapter]
        with torch.inference_mode(False), torch.no_grad():  # the norms may be needed in a later training step
            base = layer.get_base_layer()
            if group_of(base).run_states.current.source.sends_nothing:
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


_READERS: weakref.WeakKeyDictionary[RunStates, _Readers] = weakref.WeakKeyDictionary()
"""Maps a loaded model, by its run states, to its DoRA layers."""
_READERS_LOCK = threading.Lock()


def _readers(states: RunStates) -> _Readers:
    with _READERS_LOCK:
        return _READERS.setdefault(states, _Readers())


def watch(layer: Any) -> None:
    """Registers a LoRA layer over a remote layer, so that A·W of all layers of the model is requested together."""
    _readers(group_of(layer.get_base_layer()).run_states).layers.add(layer)


def _product_of(layer: Any, adapter: str) -> _Product:
    """Returns A·W of a layer. If A·W must be requested, the missing and outdated products of the model's other layers
    are requested with it."""
    states = group_of(layer.get_base_layer()).run_states
    readers, run = _readers(states), states.current
    with readers.lock:
        readers.layers.add(layer)  # a copied model's layers were never announced
        if _is_stale(layer, adapter, run):
            _ask([each for each in readers.layers if _is_stale(each, adapter, run)], adapter, run)
        asked: _Product = layer.norm_caches[adapter].asked[run.outcome]
        return asked


def _is_stale(layer: Any, adapter: str, run: RunState) -> bool:
    cache: NormCache | None = layer.norm_caches.get(adapter)
    if cache is None or adapter not in layer.lora_A:
        return False
    asked = cache.asked.get(run.outcome)
    return asked is None or not asked.is_of(layer.lora_A[adapter].weight)


def _ask(layers: list[Any], adapter: str, run: RunState) -> None:
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
        run.not_finite()
    for own, parts in zip(by_group.values(), products, strict=True):
        begin = 0
        for layer in own:
            rank = factors[layer].shape[0]
            rows = parts[layer.get_base_layer().index][begin : begin + rank].clone()
            begin += rank
            kept = _Product(weakref.ref(factors[layer]), versions[layer], rows)
            layer.norm_caches[adapter].asked[run.outcome] = kept


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


_B_IS_ZERO = (True, "gaussian")
"""The values of `init_lora_weights` with which B is zero at first, so that W + s·BA has the norms of W."""

_Config = TypeVar("_Config", bound=PeftConfig)


def for_remote_base(config: _Config) -> _Config:
    """Returns a config with which stock PEFT can put an adapter on a model of `TenantClient.load_model`.

    Only a LoRA config with `use_dora` needs this function: the result is a copy that names the layers of this module.
    Any other config is returned unchanged. Saved adapters have the files that stock PEFT writes. The methods `finetune`
    and `generate` of `TenantClient` call this function themselves.

    Args:
        config: the config of any PEFT method.
    """
    if not isinstance(config, LoraConfig) or not config.use_dora:
        return config
    made = copy.deepcopy(config)
    made._register_custom_module({RemoteLinear: RemoteLora, RemoteConv1D: RemoteLora})
    return made


class RemoteDora(DoraLinearVariant):  # type: ignore[misc]
    """Computes DoRA in a LoRA layer over a remote layer; PEFT calls these methods."""

    @staticmethod
    def init(module: Any, adapter_name: str, config: Any = None, **_: Any) -> None:
        """Adds the magnitudes of an adapter to a layer; at first they are the norms of W + s·BA."""
        if not module.lora_magnitude_vector:
            module.adapter_layer_names = (*module.adapter_layer_names, "lora_magnitude_vector")
        lora_a: torch.Tensor = module.lora_A[adapter_name].weight
        magnitude = DoraLinearLayer(fan_in_fan_out=module.fan_in_fan_out)
        module.norm_caches[adapter_name] = NormCache()
        watch(module)
        if lora_a.is_meta:
            norm = torch.empty(module.out_features, device="meta")
        elif config is not None and config.init_lora_weights in _B_IS_ZERO:
            norm = module.get_base_layer().column_norms()
        else:
            norm = module.norm_caches[adapter_name].norm(module, adapter_name)
        # float32 also in a model of bfloat16, whose rounding would be as large as what training changes at first
        magnitude.weight = nn.Parameter(norm.to(torch.float32, copy=True), requires_grad=True)
        module.lora_magnitude_vector[adapter_name] = magnitude

    @staticmethod
    def forward(module: Any, active_adapter: str, x: torch.Tensor, result: torch.Tensor, **_: Any) -> torch.Tensor:
        """Returns the layer's output with the adapter.

        Args:
            module: the LoRA layer.
            active_adapter: the adapter's name.
            x: the layer's input, shape (..., in_features).
            result: the base layer's output for this input, shape (..., out_features).
        """
        dropout, scaling = module.lora_dropout[active_adapter], module.scaling[active_adapter]
        lora_a, lora_b = module.lora_A[active_adapter], module.lora_B[active_adapter]
        norm = module.norm_caches[active_adapter].norm(module, active_adapter)
        gain = module.lora_magnitude_vector[active_adapter].weight / norm  # (out_features,)
        base: RemoteLayer = module.get_base_layer()
        if module.training and not isinstance(dropout, nn.Identity):
            x = dropout(x)
            output: torch.Tensor = result + (gain - 1) * base.without_bias(x) + gain * (lora_b(lora_a(x)) * scaling)
            return output
        plain = result if base.bias is None else result - base.bias
        output = gain * (plain + lora_b(lora_a(x)) * scaling)
        return output if base.bias is None else output + base.bias


class RemoteLora(Linear):  # type: ignore[misc]
    """Replaces PEFT's LoRA layer over a remote layer, for configs of `for_remote_base`."""

    def __init__(self, target: Any, adapter_name: str, config: LoraConfig, **options: Any) -> None:
        """Takes the arguments of PEFT's own LoRA layer, and sets `config.fan_in_fan_out` to suit the base layer."""
        base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
        self.norm_caches: dict[str, NormCache] = {}
        config.fan_in_fan_out = isinstance(base, RemoteConv1D)  # as PEFT does for the layers that it knows
        super().__init__(target, adapter_name, config=config, is_target_conv_1d_layer=config.fan_in_fan_out, **options)

    @property
    def lora_variants(self) -> dict[tuple[str, ...], Any]:
        """Returns PEFT's table of LoRA's variants, with DoRA for remote layers."""
        return {**super().lora_variants, ("use_dora",): RemoteDora}

    def delete_adapter(self, adapter_name: str) -> None:
        """Removes an adapter and its cached norms from the layer."""
        super().delete_adapter(adapter_name)
        self.norm_caches.pop(adapter_name, None)


def features_of_dora(model: nn.Module) -> tuple[int, int]:
    """Returns what DoRA adds to a training step for each of its rows, over LoRA.

    Returns:
        (the number of values that autograd keeps, the number of values that the provider answers in second calls).
    """
    kept = answered = 0
    layers: list[Any] = [module for module in model.modules() if isinstance(module, RemoteLora)]
    for layer in layers:
        for name in layer.norm_caches:
            kept += layer.out_features
            if not isinstance(layer.lora_dropout[name], nn.Identity):
                answered += group_of(layer.get_base_layer()).spec.out_features
    return kept, answered
