"""This module reads the norms of base weights' columns from a provider's bundle, for adapters that need them (DoRA).

Guarantees: nothing is read before an adapter needs norms. Norms that are returned are finite, not negative, and for
int8 weights no larger than the manifest allows. With `verify` they were compared with the trusted checkpoint before
(tenant_sdk/trust/compare.py). Not guaranteed: without `verify`, that they are the norms of the weights.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

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
