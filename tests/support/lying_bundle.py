"""Makes a provider with a false client bundle."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from safetensors.torch import load, save

from attacks.programs.providers import HostileBundle
from provider.model.served_model import ServedModel


class Liar(HostileBundle):
    """Serves an honest provider's model with changed files or a changed manifest, and notes which files are fetched."""

    def __init__(self, served_model: ServedModel) -> None:
        super().__init__(served_model)
        self.fetched: list[str] = []

    def change_scales(self, name: str, alpha: torch.Tensor | None) -> None:
        """Replaces the scale of a layer, or removes it."""
        scales = load(self.files["scales.safetensors"])
        scales.pop(name)
        self.files["scales.safetensors"] = save(scales if alpha is None else {**scales, name: alpha})

    def read_file(self, file_name: str) -> Iterator[bytes]:
        """Yields a file with all changes made so far, and notes that it was fetched."""
        self.fetched.append(file_name)
        return super().read_file(file_name)
