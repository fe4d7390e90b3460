"""One layer group's weights. It imports no model code, so that a process that only computes starts fast."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

import torch

from wire.manifest import GroupInfo
from wire.ring import kernels


@dataclass(frozen=True, eq=False)
class ServedGroup:
    """One group's weights.

    Attributes:
        info: the group's entry in the manifest.
        quantised: W̃, int8, shape (in_features, out_features), contiguous; members side by side.
        alpha: float32, shape (out_features,).
        bias: float32, shape (out_features,), zeros where a member has none; None where no member has one.
        native: W in the checkpoint's dtype, same shape as W̃; None unless `native` weights are served.
    """

    info: GroupInfo
    quantised: torch.Tensor
    alpha: torch.Tensor
    bias: torch.Tensor | None
    native: torch.Tensor | None

    @functools.cached_property
    def for_one_row(self) -> kernels.OneRow | None:
        """Returns W̃ for ring products of one row; None where there are no compiled kernels, or they do not suit it."""
        is_suited = kernels.available() and kernels.suits(self.quantised) and self.quantised.numel() > 0
        return kernels.OneRow(self.quantised) if is_suited else None

    def fingerprint(self) -> str:
        """Returns the SHA-256 in hex of everything that its products depend on; the manifest's digest is of W̃ and α
        alone."""
        sha = hashlib.sha256(self.info.digest.encode())
        for tensor in (self.bias, self.native):
            if tensor is not None:
                sha.update(f" {tensor.dtype} {tuple(tensor.shape)} ".encode())
                sha.update(tensor.contiguous().view(torch.uint8).numpy().data)
        return sha.hexdigest()
