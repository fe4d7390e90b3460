"""Builds and reads the client bundle: files that hold all of a model except the base layers' weights, and the scales
and column norms of these weights.

Guarantees: no file holds code or a pickle. Every file name is in `wire.manifest.BUNDLE_FILE_NAMES`. No file holds a
path of this machine. Once the bundle is built, its files disappear however the process ends, since each file is open
and already unlinked.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from wire.errors import ConfigurationError, UnknownLayer
from wire.limits import CHUNK_BYTES
from wire.manifest import BUNDLE_FILE_NAMES, BundleFile

_PRIVATE_KEYS = {
    *("name_or_path", "_name_or_path", "vocab_file", "merges_file", "tokenizer_file", "gguf_file"),  # Paths.
    *("is_local", "local_files_only"),  # These keys say how this machine found the files.
    "auto_map",  # This key names code to run.
}
"""Keys of config.json and tokenizer_config.json that are removed, since tenants must not see or use them."""


class Bundle:
    """Holds the bundle's files, which are open and already unlinked. Several threads may read them."""

    def __init__(self, folder: Path) -> None:
        """Opens all files in a folder, and removes the folder."""
        self._fds = {path.name: os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in sorted(folder.iterdir())}
        self.files = tuple(self._describe(name) for name in self._fds)
        shutil.rmtree(folder)
        self._finalizer = weakref.finalize(self, _close_all, list(self._fds.values()))

    @property
    def digest(self) -> str:
        """Returns the bundle's SHA-256 in hex, over one line per file (name, size, digest) in order of names."""
        lines = sorted(f"{file.name} {file.size_bytes} {file.sha256}\n" for file in self.files)
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def read(self, file_name: str) -> Iterator[bytes]:
        """Yields the contents of a file in chunks of at most CHUNK_BYTES.

        Raises:
            UnknownLayer: the bundle has no file of this name; a path is never looked up on disk.
        """
        if file_name not in self._fds:
            raise UnknownLayer("the bundle has no such file")
        return self._chunks(self._fds[file_name])

    @staticmethod
    def _chunks(fd: int) -> Iterator[bytes]:
        offset = 0
        while chunk := os.pread(fd, CHUNK_BYTES, offset):
            offset += len(chunk)
            yield chunk

    def _describe(self, name: str) -> BundleFile:
        sha, size = hashlib.sha256(), 0
        for chunk in self.read(name):
            sha.update(chunk)
            size += len(chunk)
        return BundleFile(name=name, size_bytes=size, sha256=sha.hexdigest())

    def close(self) -> None:
        """Closes the files, which frees the disk space."""
        self._fds = {}
        self._finalizer()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def build_bundle(
    model: Any,
    tokenizer: Any | None,
    scales: dict[str, torch.Tensor],
    norms: dict[str, torch.Tensor],
    parent: Path | None,
) -> tuple[Bundle, dict[str, Any]]:
    """Writes the bundle of a model from which the base layers' weights were removed.

    Args:
        model: a PreTrainedModel whose base layers have `weight` None.
        tokenizer: the model's tokenizer, or None.
        scales: by layer name, α, the quantiser's scale of each output feature; shape (out_features,), float32.
        norms: by layer name, the norms of the weight's columns, as wire/SPEC.md, section 2, defines them.
        parent: the folder in which a temporary folder is made; None for the system's folder of temporary files.

    Returns:
        The bundle, and the content of its config.json.

    Raises:
        ConfigurationError: the disk is full or cannot be written.
    """
    folder: Path | None = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="bundle-", dir=parent))
        config = _write_config(model, folder)
        save_file(_client_tensors(model), folder / "model.safetensors", {"format": "pt"})
        save_file(scales, folder / "scales.safetensors")
        save_file(norms, folder / "column_norms.safetensors")
        if tokenizer is not None:
            _write_tokenizer(tokenizer, folder)
        return Bundle(folder), config
    except (OSError, SafetensorError) as exc:
        why = getattr(exc, "strerror", None) or "the disk is full, or a limit on file sizes was met"
        place = parent or tempfile.gettempdir()
        raise ConfigurationError(f"cannot write the client bundle under {place}: {why}") from exc
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _client_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns all parameters and persistent buffers by name. A tensor with several tied names appears once, under the
    name that Hugging Face keeps."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    state = model.state_dict()
    kept: dict[str, torch.Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    # Tied names are sorted to the end, so that each tensor is stored under its kept name first.
    for name in sorted(state, key=lambda name: name in tied):
        tensor = state[name]
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return kept


def _write_config(model: Any, folder: Path) -> dict[str, Any]:
    model.config.save_pretrained(folder)
    config = _scrub(folder / "config.json")
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        try:
            model.generation_config.save_pretrained(folder)
        except ValueError:  # transformers refuses contradictory settings; the file is optional.
            (folder / "generation_config.json").unlink(missing_ok=True)
        else:
            _scrub(folder / "generation_config.json")
    return config


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    scratch = folder / "tokenizer"
    # Several chat templates with names go into tokenizer_config.json, since a bundle has no files in subfolders, where
    # transformers would put all but the default one.
    has_several = isinstance(getattr(tokenizer, "chat_template", None), dict)
    tokenizer.save_pretrained(scratch, **({"save_jinja_files": False} if has_several else {}))
    for path in sorted(scratch.iterdir()):
        if path.name in BUNDLE_FILE_NAMES and path.is_file():
            if path.name == "tokenizer_config.json":
                _scrub(path)
            path.rename(folder / path.name)
    shutil.rmtree(scratch)


def _scrub(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    content = {key: value for key, value in content.items() if key not in _PRIVATE_KEYS}
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
    return content
