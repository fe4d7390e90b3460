"""Holds the weights of one group: layers that get the same input and share one call.

This module imports no code of models, so that a process that only computes starts fast.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import torch

from wire.manifest import GroupInfo
from wire.ring import kernels


@dataclass(frozen=True, eq=False)
class ServedGroup:
    """Holds the weights of one group of layers; the columns of the layers' weights are concatenated into one matrix.

    Attributes:
        info: the group's entry in the manifest.
        quantised: W̃, the quantised weight; shape (in_features, out_features), int8, contiguous.
        alpha: α, the scale of each column of W̃; shape (out_features,), float32.
        bias: shape (out_features,), float32, with zeros for a layer without bias; None if no layer has a bias.
        native: W, the original weight; shape of W̃; dtype of the checkpoint, or float32 if the layers' dtypes differ;
            None unless native weights are served.
    """

    info: GroupInfo
    quantised: torch.Tensor
    alpha: torch.Tensor
    bias: torch.Tensor | None
    native: torch.Tensor | None

    @property
    def weight_bytes(self) -> int:
        """Returns the size of the group's tensors in memory, in bytes."""
        held = (self.quantised, self.alpha, self.bias, self.native)
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)

    @functools.cached_property
    def for_one_row(self) -> kernels.OneRow | None:
        """Returns W̃ prepared for ring products of one row; None if no compiled kernel can compute these."""
        is_suited = kernels.available() and kernels.suits(self.quantised) and self.quantised.numel() > 0
        return kernels.OneRow(self.quantised) if is_suited else None

    def fingerprint(self) -> str:
        """Returns the SHA-256 in hex of all tensors on which products depend. The manifest's digest covers only W̃ and
        α."""
        sha = hashlib.sha256(self.info.digest.encode())
        for tensor in (self.bias, self.native):
            if tensor is not None:
                sha.update(f" {tensor.dtype} {tuple(tensor.shape)} ".encode())
                sha.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return sha.hexdigest()
