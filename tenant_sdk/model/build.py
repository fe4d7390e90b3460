"""This module builds a transformers model whose base layers are at the provider, and whose decode steps use one core.

The library transformers makes the model from the bundle's config and loads the bundle's tensors. A quantizer,
registered with transformers, replaces the base layers by remote layers before the tensors are loaded. No model code is
changed, and transformers fills buffers such as those of RoPE.

In a decode step (one new token for each sequence) the tenant's layers run on one core, since the operations of one
token are too small for several cores. Between two of these layers the tenant waits for a remote layer, and meanwhile
the other threads of torch's pool fall asleep. A small operation that uses several threads waits until the system has
woken these threads, for 50 to 300 µs on a virtual machine. If the provider runs on the same machine, the woken threads
also compete for the core on which the provider polls for requests. Together this took a tenth of the time of a SmolLM2
token (docs/benchmarks_history.md, "Decode"). The head, which is not in the decoder, uses all cores.

Guarantees: a step's numbers are the same up to the order of sums. The calling thread may use all cores again after
every step, also after a step that failed. If Ctrl-C interrupted a step, the thread may use all cores again when the
next step starts. Training, long prompts, long contexts and other devices are not affected. Masks that have to be made
in the middle of a step, and products of a provider in this process, use all cores.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from noise.scheme import GroupSpec
from runtime.loading import loading
from runtime.threads import return_cores, spare_cores
from tenant_sdk.model.dora import ColumnNorms
from tenant_sdk.model.remote_group import RemoteGroup
from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear
from tenant_sdk.model.run_state import are_finite, run_states
from tenant_sdk.model.send import RemoteExecutor
from tenant_sdk.text.source import TenantText
from tenant_sdk.trust.config_rules import read_config
from wire.errors import ConfigurationError, MalformedFrame, VeilbaseError, os_cause
from wire.frame import Arithmetic
from wire.manifest import GroupInfo, LayerInfo, Manifest

MOST_TOKENS = 16
"""The largest number of tokens in a decode step, over all sequences of the batch; a longer call uses all cores."""
MOST_CACHED = 1 << 18
"""The largest number of values in one layer's cached keys for which attention runs on one core, counted as if each key
had the model's hidden size: 1 MiB in float32, which one core reads in about 0.1 ms. With more keys, several cores are
faster."""


def watch(decoder: nn.Module) -> None:
    """Adds hooks to a decoder, which is a model without its head, so that every decode step of the decoder uses one
    core."""
    decoder.register_forward_pre_hook(_begin, with_kwargs=True)
    decoder.register_forward_hook(_end, always_call=True)


def _begin(decoder: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    return_cores()  # a step that was interrupted did not call its end hook
    if _is_small(decoder, args, options):
        spare_cores()


def _end(decoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    return_cores()


def _is_small(decoder: nn.Module, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Returns whether this is a decode step with a short context on the CPU. Returns False if gradients are recorded,
    if torch is compiling the model, or if the arguments do not show the step's size."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    tokens = args[0] if args else options.get("input_ids")
    if tokens is None:
        tokens = options.get("inputs_embeds")
    if not isinstance(tokens, torch.Tensor) or not tokens.is_cpu or tokens.dim() < 2:
        return False
    batch, length = tokens.shape[:2]
    cached: Any = options.get("past_key_values")
    if not hasattr(cached, "get_seq_length") or batch * length > MOST_TOKENS:
        return False
    try:
        width, seen = int(decoder.config.hidden_size), int(cached.get_seq_length())  # type: ignore[union-attr, arg-type]
    except Exception:  # noqa: BLE001 - the config or the cache is of another kind
        return False
    return batch * (seen + length) * width <= MOST_CACHED


_METHOD = "veilbase-remote"


@register_quantization_config(_METHOD)
class _RemoteConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Passes the base layers of the provider's manifest to `from_pretrained`, as a quantization config; never saved."""

    def __init__(self, layers: dict[str, LayerInfo] | None = None, **_: Any) -> None:
        """Keeps the base layers, by module name."""
        self.quant_method = _METHOD
        self.layers = layers or {}

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict with the quantizer's name only, without the layers."""
        return {"quant_method": _METHOD}


@register_quantizer(_METHOD)
class _RemoteQuantizer(HfQuantizer):  # type: ignore[misc]
    """Replaces base layers by remote layers before weights are loaded."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        for name, layer in self.quantization_config.layers.items():
            _swap(model, name, layer)
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        """Returns False, since remote layers have no weights to save."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Returns True: adapters can be trained over remote layers."""
        return True


def _swap(model: nn.Module, name: str, layer: LayerInfo) -> None:
    parent_name, _, child = name.rpartition(".")
    try:
        parent = model.get_submodule(parent_name)
        local: Any = parent.get_submodule(child)
    except AttributeError as exc:
        raise MalformedFrame(f"the manifest names a layer that this architecture does not have: {name}") from exc
    is_conv = isinstance(local, Conv1D)
    if not is_conv and not isinstance(local, nn.Linear):
        raise MalformedFrame(f"the manifest names a layer that is neither Linear nor Conv1D: {name}")
    shape = tuple(local.weight.shape) if is_conv else tuple(local.weight.shape)[::-1]
    announced = ("conv1d" if is_conv else "linear", shape, local.bias is not None)
    if announced != (layer.kind, (layer.in_features, layer.out_features), layer.bias):
        raise MalformedFrame(f"the manifest's {name} does not have the shape that its own config gives")
    make = RemoteConv1D if is_conv else RemoteLinear
    with torch.device(local.weight.device):
        remote = make(layer.in_features, layer.out_features, layer.bias, local.weight.dtype)
    setattr(parent, child, remote)


def load_remote_model(
    folder: Path, manifest: Manifest, executor: RemoteExecutor, dtype: torch.dtype, device: torch.device,
    *, verified: bool = False, sends_padding: bool = False,
) -> PreTrainedModel:  # fmt: skip
    """Returns a model whose base layers call the provider.

    Args:
        folder: the bundle's folder.
        manifest: the manifest of the provider that gave the bundle.
        executor: the executor that sends the model's calls to the provider.
        dtype: the dtype of the tenant's own tensors and of activations.
        device: the tenant's device.
        verified: whether the bundle was compared with a trusted checkpoint; if not, only entries that the config's
            class declares are used.
        sends_padding: whether rows of padding are sent too, which hides how long texts are.

    Returns:
        A model in eval mode with frozen parameters.

    Raises:
        MalformedFrame: manifest, config and bundle do not fit together, or a number of the bundle is NaN or infinite.
        ConfigurationError: the installed transformers cannot build the model.
    """
    from tenant_sdk.kinds.register import register  # here, since it takes PEFT, which a client alone does not need

    layers = {layer.name: layer for group in manifest.groups for layer in group.layers}
    with loading():
        register()
        try:
            config = (
                AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
                if verified
                else read_config(folder)
            )
            model, info = AutoModelForCausalLM.from_pretrained(
                folder, config=config, quantization_config=_RemoteConfig(layers), dtype=dtype, local_files_only=True,
                trust_remote_code=False, use_safetensors=True, output_loading_info=True,
            )  # fmt: skip
        except VeilbaseError:
            raise
        except SafetensorError:  # `from None` here and below: the cause may quote the provider's text
            raise MalformedFrame("the bundle's model.safetensors cannot be read") from None
        except Exception as exc:  # noqa: BLE001 - a peer's config may make transformers raise anything
            raise ConfigurationError(
                f"this transformers cannot build the provider's {config_kind(manifest)} model ({type(exc).__name__})"
            ) from None
    missing = sorted(set(info["missing_keys"])) + sorted(str(entry[0]) for entry in info["mismatched_keys"])
    if missing:
        raise MalformedFrame(f"the bundle lacks {len(missing)} tensors of the model, such as {missing[0]}")
    model.hf_quantizer.remove_quantization_config(model)
    _check_finite(model, dtype)
    _forget_quantized(model)
    model.name_or_path = model.config.name_or_path = manifest.model_id
    model.to(device)
    alphas = load_alphas(folder, manifest)
    norms = ColumnNorms(folder, manifest, alphas, executor.scheme.arithmetic is Arithmetic.FLOAT)
    _attach(model, manifest, executor, alphas, norms, device)
    watch(model.base_model)
    if not sends_padding:
        run_states(model).padding.leave_out(model)
    return model.requires_grad_(False).eval()


def _check_finite(model: nn.Module, dtype: torch.dtype) -> None:
    """Refuses a model with a number that is NaN or infinite. With such a number for one token, a provider would choose
    which texts give values that are not finite.

    Raises:
        MalformedFrame: there is such a number, in the type in which the tenant keeps the tensor.
    """
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not tensor.is_meta and not are_finite((tensor,)):
            kind = str(dtype).removeprefix("torch.")
            raise MalformedFrame(f"the bundle's {name} holds a number that is NaN or infinite as {kind}")


def _forget_quantized(model: nn.Module) -> None:
    """Removes the mark of a quantizer from the config: some models compute differently if their config has this
    mark."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.config.__dict__.pop("_is_quantized", None)


def config_kind(manifest: Manifest) -> str:
    """Returns the model type that the manifest names, shortened and with unusual characters replaced, for error
    texts."""
    return re.sub(r"[^A-Za-z0-9_.-]", "?", str(manifest.config.get("model_type", "unknown"))[:64])


def context_length(folder: Path) -> int:
    """Returns the model's context length, in tokens, or 2^20 if the config names none.

    Args:
        folder: the bundle's folder, whose config.json gives the number.

    Raises:
        MalformedFrame: the number in the config cannot be a context length.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    lengths = []
    for key in ("max_position_embeddings", "n_positions"):
        length = config.get(key)
        if length is None:
            continue
        if type(length) is not int or not 1 <= length <= 1 << 31:  # a bool is an int in Python, but no length
            raise MalformedFrame(f"the provider's config was expected to have a whole number from 1 to 2^31 as {key}")
        lengths.append(length)
    return min(lengths, default=1 << 20)


def load_alphas(folder: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Returns α, the scales of the int8 weights, by layer name: float32, shape (out_features,).

    Raises:
        MalformedFrame: the scales of a layer are missing, do not have this shape, or are not positive numbers.
    """
    try:
        alphas: dict[str, torch.Tensor] = load_file(folder / "scales.safetensors")
    except (SafetensorError, OSError) as exc:
        raise MalformedFrame("the bundle's scales.safetensors is missing or cannot be read") from os_cause(exc)
    for group in manifest.groups:
        for layer in group.layers:
            alpha = alphas.get(layer.name)
            if alpha is None or alpha.shape != (layer.out_features,) or alpha.dtype != torch.float32:
                raise MalformedFrame(f"the bundle's scales of {layer.name} do not fit the manifest")
            if not bool((torch.isfinite(alpha) & (alpha > 0)).all()):
                raise MalformedFrame(f"the bundle's scales of {layer.name} are not positive numbers")
    return alphas


def group_spec(group: GroupInfo, alphas: dict[str, torch.Tensor], device: torch.device) -> GroupSpec:
    """Returns the facts about a layer group that a mask needs. α, the scales of the int8 weight, is at first on
    `device` and is copied to the rows' device when needed (`GroupSpec.alpha_on`)."""
    alpha = torch.cat([alphas[layer.name] for layer in group.layers]).to(device)
    return GroupSpec(
        group.id, group.in_features, group.out_features, group.max_column_norm, group.max_row_norm, alpha, group.digest
    )


def _attach(
    model: nn.Module,
    manifest: Manifest,
    executor: RemoteExecutor,
    alphas: dict[str, torch.Tensor],
    norms: ColumnNorms,
    device: torch.device,
) -> None:
    states = executor.run_states()
    for info in manifest.groups:
        spec = group_spec(info, alphas, device)
        group = RemoteGroup(executor, spec, [layer.out_features for layer in info.layers], states)
        for index, layer in enumerate(info.layers):
            module = model.get_submodule(layer.name)
            if not isinstance(module, RemoteLinear | RemoteConv1D):
                raise MalformedFrame(f"{layer.name} was not swapped for a remote layer")
            module.attach(group, index, device, functools.partial(norms.of, layer.name))


def generation_settings(text: TenantText | None, config: Any) -> GenerationConfig:
    """Returns a trusted source's generation settings; without such a source, the settings name special tokens only.

    Args:
        text: the session's tokenizer and settings; None if the bundle has no tokenizer, and then the special tokens are
            those of the config.
        config: the model's config.
    """
    if text is None:
        ends = getattr(config, "eos_token_id", None)
        return GenerationConfig(eos_token_id=ends, pad_token_id=getattr(config, "pad_token_id", None))
    if text.settings is not None:
        return copy.deepcopy(text.settings)  # `generate` may write into a model's settings
    return GenerationConfig(
        eos_token_id=list(text.stop_ids) or None,
        bos_token_id=text.tokenizer.bos_token_id,
        pad_token_id=text.tokenizer.pad_token_id,
    )
