"""This module compares a provider's manifest and bundle, part by part, with the trusted checkpoint.

Guarantees: tensors are compared bit by bit, the files of `_JSON_FILES` as typed JSON values, and all other files byte
by byte. In the JSON files only the number of the transformers release that wrote them may differ. An error names the
part that differs, with a name from the trusted checkpoint, and never shows a value. Tenant and provider both write
these files with transformers, so their releases of transformers must write the same files.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from tenant_sdk.trust.bundle import without_unsafe
from wire.errors import MalformedFrame, VerificationFailed, os_cause
from wire.manifest import BUNDLE_FILE_NAMES, NATIVE_NORMS, GroupInfo, LayerInfo, Manifest
from wire.prepared import LayerKind, PreparedLayer
from wire.ring.quantise import digest, norm_bounds, norms_of_columns

_TENSOR_FILES = frozenset({"model.safetensors", "scales.safetensors", "column_norms.safetensors"})
_JSON_FILES = frozenset({"config.json", "generation_config.json", "tokenizer_config.json"})
"""The files that are compared as JSON values, because tenant_sdk/trust/bundle.py rewrites them without unsafe keys."""
_PARTS = {
    "config.json": "the model's config",
    "generation_config.json": "the generation settings",
    "chat_template.jinja": "the chat template",
}
_PRIVATE_KEYS = frozenset(
    {
        *("name_or_path", "_name_or_path", "vocab_file", "merges_file", "tokenizer_file", "gguf_file"),
        *("is_local", "local_files_only", "auto_map"),
    }
)
"""The config keys that an honest provider removes (provider/model/bundle.py). The same keys are removed from the
trusted config, so that a bundle with such a key differs."""
_HARMLESS_KEYS = frozenset({"transformers_version"})

ReadLayer = Callable[[str, LayerKind], PreparedLayer]


def differs(part: str) -> VerificationFailed:
    """Returns the error for a part of a provider's offer that differs from the trusted checkpoint. `part` may contain
    names from the trusted checkpoint, but no values."""
    return VerificationFailed(f"the provider does not serve the trusted checkpoint: {part} differs")


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors have the same dtype, shape and bits; NaN and the sign of zero are compared as bits
    too."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def write_files(model: Any, tokenizer: Any | None, folder: Path) -> None:
    """Writes the trusted model's config, generation settings and tokenizer files, in the form that
    provider/model/bundle.py gives them."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    for name in ("quantization_config", "auto_map"):
        if hasattr(config, name):
            delattr(config, name)
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        try:
            model.generation_config.save_pretrained(folder)
        except ValueError:  # the settings contradict each other, so the provider leaves them out, too
            (folder / "generation_config.json").unlink(missing_ok=True)
    if tokenizer is not None:
        scratch = folder / "tokenizer"
        has_several = isinstance(getattr(tokenizer, "chat_template", None), dict)
        tokenizer.save_pretrained(scratch, **({"save_jinja_files": False} if has_several else {}))
        for path in scratch.iterdir():
            if path.name in BUNDLE_FILE_NAMES and path.is_file():
                path.rename(folder / path.name)
        shutil.rmtree(scratch)


def check_files(expected: Path, bundle: Path, manifest: Manifest) -> None:
    """Compares every file of the bundle that holds no tensors, and the manifest's copy of the config.

    Args:
        expected: the folder that `write_files` filled.
        bundle: the bundle's folder.
        manifest: the manifest of the same provider.

    Raises:
        VerificationFailed: a file differs, is missing, or is not in the trusted checkpoint.
    """
    names = {path.name for folder in (expected, bundle) for path in folder.iterdir()} - _TENSOR_FILES
    for name in sorted(names):  # sorted, so that config.json is compared before the files that depend on it
        part = _PARTS.get(name, "the tokenizer")
        if not ((expected / name).is_file() and (bundle / name).is_file()):
            raise differs(part)
        if name in _JSON_FILES:
            _check_json(_read_json(expected / name, part), _read_json(bundle / name, part), part)
        elif (expected / name).read_bytes() != (bundle / name).read_bytes():
            raise differs(part)
    part = "the manifest's config"
    ours = _read_json(bundle / "config.json", part)
    _check_json(_without_infinities(ours), _without_infinities(dict(manifest.config)), part)


def check_manifest_config(bundle: Path, manifest: Manifest) -> None:
    """Compares the manifest's copy of the config with the bundle's config.json.

    Raises:
        MalformedFrame: the configs differ in more than the transformers release that wrote them.
    """
    try:
        ours = _read_json(bundle / "config.json", "config")
        _check_json(_without_infinities(ours), _without_infinities(dict(manifest.config)), "config")
    except (VerificationFailed, OSError) as exc:  # VerificationFailed may name a key of the provider's config
        raise MalformedFrame("the config in the provider's manifest is not the one in its bundle") from os_cause(exc)


def _read_json(path: Path, part: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise differs(part) from None  # the cause quotes the file, which may come from the provider
    if not isinstance(content, dict):
        raise differs(part)
    return content


def _check_json(expected: dict[str, Any], offered: dict[str, Any], part: str) -> None:
    expected = {key: value for key, value in expected.items() if key not in _PRIVATE_KEYS | _HARMLESS_KEYS}
    offered = {key: value for key, value in offered.items() if key not in _HARMLESS_KEYS}
    ours, theirs = _canonical(expected), _canonical(offered)
    for key in sorted(ours):
        if ours[key] != theirs.get(key):
            raise differs(f"{part} ({key})")
    if theirs.keys() != ours.keys():  # a key that only the provider has is not named: the name is the provider's text
        raise differs(f"{part} (a key that the checkpoint does not have)")


def _canonical(content: dict[str, Any]) -> dict[str, str]:
    """Returns the JSON text of each value, by key, without keys that could make transformers load code. A comparison of
    these texts, unlike ==, tells 1 from 1.0 and True, and finds NaN equal to NaN."""
    return {key: json.dumps(value, sort_keys=True) for key, value in without_unsafe(content).items()}


def _without_infinities(value: Any) -> Any:
    """Returns a JSON value with null in place of NaN and infinities, which the manifest's strict JSON cannot
    contain."""
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_infinities(item) for item in value]
    return None if isinstance(value, float) and value - value != 0 else value


@dataclass(frozen=True)
class StateNames:
    """Lists the tensors of a trusted model without their contents.

    Attributes:
        names: the state-dict names, in order.
        places: a number for each name; names of one tied tensor have the same number.
        tied: the names that a tied tensor has besides the one that Hugging Face keeps.
    """

    names: tuple[str, ...]
    places: tuple[int, ...]
    tied: frozenset[str]

    @classmethod
    def of(cls, model: Any) -> StateNames:
        """Lists the tensors of a model, with or without storage."""
        state = model.state_dict(keep_vars=True)
        numbers: dict[int, int] = {}
        places = tuple(numbers.setdefault(id(tensor), len(numbers)) for tensor in state.values())
        return cls(tuple(state), places, frozenset(getattr(model, "all_tied_weights_keys", None) or ()))

    def bundled(self, served: Collection[str]) -> list[str]:
        """Returns the names of the tensors that an honest provider's bundle contains: for a tied tensor, the one name
        that provider/model/bundle.py keeps.

        Args:
            served: the names of the served layers, whose weights are not in the bundle.
        """
        weights = {f"{name}.weight" for name in served}
        kept: dict[int, str] = {}
        for name, place in sorted(zip(self.names, self.places, strict=True), key=lambda each: each[0] in self.tied):
            if name not in weights:
                kept.setdefault(place, name)
        return list(kept.values())


def tensor_digest(tensor: torch.Tensor) -> str:
    """Returns the SHA-256, in hex, of a tensor's dtype, shape and bits. Two tensors have the same digest if and only if
    `same_bits` is true for them."""
    sha = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}\n".encode())
    if tensor.numel():
        sha.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def check_tensors(bundle: Path, state: StateNames, digest_of: Callable[[str], str], manifest: Manifest) -> None:
    """Compares every tensor of the bundle: embeddings, norms, biases, buffers, and layers that are not served.

    Args:
        bundle: the bundle's folder.
        state: the names of the trusted model's tensors.
        digest_of: a function that takes a state-dict name and returns the `tensor_digest` of the trusted model's tensor
            of this name.
        manifest: the manifest, which lists the served layers, whose weights are not in the bundle.

    Raises:
        VerificationFailed: a tensor differs, is missing, or is not in the trusted model.
    """
    expected = state.bundled({layer.name for group in manifest.groups for layer in group.layers})
    try:
        with safe_open(bundle / "model.safetensors", framework="pt") as opened:
            offered = set(opened.keys())
            for name in expected:
                if name not in offered or digest_of(name) != tensor_digest(opened.get_tensor(name)):
                    raise differs(f"the tensor {name}")
    except (SafetensorError, OSError) as exc:
        raise differs("the bundle's model.safetensors") from os_cause(exc)
    if offered - set(expected):
        raise differs("the bundle's list of tensors")


def check_scale_names(bundle: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Returns the bundle's α, the scales of the int8 weights, by layer name; `check_group` checks the values.

    Raises:
        VerificationFailed: the scales cannot be read, or are not those of exactly the manifest's layers.
    """
    try:
        scales: dict[str, torch.Tensor] = load_file(bundle / "scales.safetensors")
    except (SafetensorError, OSError) as exc:
        raise differs("the bundle's scales.safetensors") from os_cause(exc)
    if scales.keys() != {layer.name for group in manifest.groups for layer in group.layers}:
        raise differs("the bundle's list of scales")
    return scales


def check_norm_names(bundle: Path, manifest: Manifest) -> dict[str, torch.Tensor]:
    """Returns the bundle's column norms of the int8 weights, by layer name; `check_group` checks the values. Returns an
    empty dict if the bundle has none, as wire/SPEC.md allows.

    Norms of native weights are not compared: only float arithmetic uses them, which cannot be verified.

    Raises:
        VerificationFailed: the norms cannot be read, or are not those of exactly the manifest's layers.
    """
    if not (bundle / "column_norms.safetensors").exists():
        return {}
    try:
        norms: dict[str, torch.Tensor] = load_file(bundle / "column_norms.safetensors")
    except (SafetensorError, OSError) as exc:
        raise differs("the bundle's column_norms.safetensors") from os_cause(exc)
    layers = {layer.name for group in manifest.groups for layer in group.layers}
    native = {NATIVE_NORMS + name for name in layers} if manifest.weights == "native" else set()
    if norms.keys() != layers | native:
        raise differs("the bundle's list of column norms")
    return norms


def check_group(
    group: GroupInfo,
    layer: ReadLayer,
    state: StateNames,
    scales: dict[str, torch.Tensor],
    norms: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Compares the trusted int8 weights of one group with the manifest and the bundle.

    Args:
        group: the group as the manifest describes it.
        layer: a function that returns a layer's trusted int8 weight for the layer's name and kind.
        state: the names of the trusted model's tensors, which show which layers have a bias.
        scales: the bundle's scales of the int8 weights, by layer name.
        norms: what `check_norm_names` returned.

    Returns:
        W̃, the int8 weight of the group, shape (in_features, out_features); the layers' columns are concatenated.

    Raises:
        VerificationFailed: the digest, scales, norms, shape or bias of a layer or of the group differs.
    """
    parts = []
    for info in group.layers:
        part = layer(info.name, info.kind)
        _check_numbers(info, part, info.name)
        if info.bias != (f"{info.name}.bias" in state.names):
            raise differs(f"the bias of {info.name}")
        if not same_bits(part.alpha, scales[info.name]):
            raise differs(f"the scales of {info.name}")
        if norms and not same_bits(norms_of_columns(part.column_squares, part.alpha), norms[info.name]):
            raise differs(f"the column norms of {info.name}")
        parts.append(part)
    joined = join(parts)
    _check_numbers(group, joined, " and ".join(info.name for info in group.layers[:3]))
    return joined.weight


def join(parts: list[PreparedLayer]) -> PreparedLayer:
    """Returns the weight of a group, whose layers' columns are concatenated. All layers have the same number of
    inputs, since the manifest says so and each layer agrees with the manifest."""
    if len(parts) == 1:
        return parts[0]
    weight, alpha = torch.cat([part.weight for part in parts], dim=1), torch.cat([part.alpha for part in parts])
    rows = torch.stack([part.row_squares for part in parts]).sum(dim=0)
    columns = torch.cat([part.column_squares for part in parts])
    return PreparedLayer(parts[0].kind, weight, alpha, digest(weight, alpha), rows, columns)


def _check_numbers(info: GroupInfo | LayerInfo, part: PreparedLayer, name: str) -> None:
    if tuple(part.weight.shape) != (info.in_features, info.out_features) or part.digest != info.digest:
        raise differs(f"the weight of {name}")
    if norm_bounds(part.column_squares, part.row_squares) != (info.max_column_norm, info.max_row_norm):
        raise differs(f"the norm bounds of {name}")
