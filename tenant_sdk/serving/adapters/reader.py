"""This module is the way from an adapter's files to its numbers: it finds and opens the two files, checks the settings
and the header of the weights, and reads the weights, each once and all through the same open files.

`AdapterFolder` is the disk tier of the adapter store, a folder in which each adapter has its own subfolder; its files
are not trusted. `opened_by_user` opens an adapter that the user of this process names, and follows links. Both return
an `OpenAdapter`, so that the store and `TenantClient.generate` refuse the same files for the same reasons. `generate`
takes more kinds of adapters than the store. `Known` remembers the digest of each adapter, or the reason why the adapter
cannot be used, so that unchanged files are not read again.

Guarantees:
- of an adapter, only `adapter_config.json` and `adapter_model.safetensors` are opened, and only if they are regular
  files. In an `AdapterFolder`, no name, no `..` and no symbolic link in the folder leads to a file outside it;
- before a weight is read, the header's size, the number of tensors, and all shapes, dtypes and byte ranges are within
  bounds, and agree with the file's size and with the model. Sizes are checked before memory for tensors is allocated;
- every tensor of the file belongs to a layer that the adapter's settings name, under the name that PEFT gives it, and
  each of these layers has its tensors; otherwise the file is refused, and the error names the first tensor or layer.
  So no adapter is applied in part. Each layer of a LoRA adapter has exactly one A and one B, of the rank in the
  settings;
- the bytes that are checked, hashed and used are the same, since all come from files that stay open while they are
  read. Reading takes no more memory than the largest tensor. A file that changes during the reading is refused, if its
  times or size show the change.

Not guaranteed: if a subfolder is swapped for another by a rename while its files are open, the old files are read on,
and those who had them opened get the old adapter. A hard link to a file outside the folder is opened, since a hard link
looks like any other file. Links in the path of the folder itself are followed, since the operator made them.

Source of the format: the safetensors specification (a length of 8 bytes, a JSON header, then the tensors without gaps).
"""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import itertools
import json
import math
import os
import re
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tenant_sdk.adapter_checks import (
    CONFIG,
    MAX_CONFIG_BYTES,
    NAME,
    WEIGHTS,
    check_config_bytes,
    header_bytes,
    json_object,
    what_is_missing,
)
from tenant_sdk.serving.adapters.peft_settings import (
    LoraSettings,
    ModuleSettings,
    NotServed,
    read_settings,
    served_settings,
)
from tenant_sdk.serving.adapters.targets import Base
from wire.errors import ConfigurationError, StorageError, VeilbaseError

# ---- what the weights' file holds ------------------------------------------------------------------------------------

MAX_TENSORS = 20_000
"""The most tensors of one adapter, enough for A and B of 10,000 layers."""
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""The dtypes in which PEFT saves adapters of the kinds that the store serves."""
EVERY_DTYPE = {
    **DTYPES, "F64": torch.float64, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""The dtypes in which PEFT saves adapters of any kind; some hold whole numbers."""
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_(A|B)\.weight")
_MAGNITUDE = re.compile(r"(.+)\.lora_(magnitude_vector)(?:\.weight)?")
"""Finds DoRA's magnitudes; PEFT writes their names without an ending."""
_ADAPTER_WIDE = re.compile(r"base_model\.[A-Za-z0-9_]{1,64}(\.[0-9]{1,6})?")
"""Finds the names of tensors that several layers of an adapter share, such as VeRA's projections and TinyLoRA's
vectors."""
MAX_DEPTH = 64
"""The most parts of a layer's name, such as `layers` and `0`."""
MAX_DIMENSIONS = 4
"""The most dimensions of a tensor."""
_OTHER_KINDS = {
    "_orig_mod.": "of a compiled model (save the model that was not compiled)",
    "lora_magnitude_vector": "DoRA (use_dora is not set)", "lora_embedding_": "LoRA of an embedding",
    "prompt_embeddings": "prompt learning",
    ".base_layer.": "a copy of a base layer (save with save_embedding_layers=False)",
}  # fmt: skip
"""Maps a part of a tensor's name that plain LoRA does not use to the words for such a tensor in an error message."""


@dataclass(frozen=True)
class StoredTensor:
    """Describes a tensor in the file. `begin` is the offset of its first byte from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int

    @property
    def num_bytes(self) -> int:
        """Returns the bytes that the tensor takes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class LoraLayer:
    """Describes one layer's part of an adapter.

    Attributes:
        module: the layer's name in the model.
        lora_a, lora_b: the tensors A, shape (rank, inputs), and B, shape (outputs, rank).
        scaling: the factor for B·A·x.
        magnitude: DoRA's magnitudes, shape (outputs,); None for LoRA.
    """

    module: str
    lora_a: StoredTensor
    lora_b: StoredTensor
    scaling: float
    magnitude: StoredTensor | None = None

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """Returns the descriptions of the layer's tensors."""
        factors = (self.lora_a, self.lora_b)
        return factors if self.magnitude is None else (*factors, self.magnitude)

    @property
    def rank(self) -> int:
        """Returns the rank of the adapter in this layer."""
        return self.lora_a.shape[0]


@dataclass(frozen=True)
class LoraFile:
    """Describes the contents of a LoRA adapter: its layers, in the order of their names."""

    layers: tuple[LoraLayer, ...]

    @property
    def rank(self) -> int:
        """Returns the largest rank of the adapter's layers."""
        return max(layer.rank for layer in self.layers)

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """Returns the descriptions of all tensors."""
        return tuple(each for layer in self.layers for each in layer.tensors)

    def packed_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes that the adapter takes in host memory if its factors have this dtype."""
        factors = sum(math.prod(each.shape) for layer in self.layers for each in (layer.lora_a, layer.lora_b))
        gains = sum(layer.magnitude.shape[0] for layer in self.layers if layer.magnitude is not None)
        return factors * dtype.itemsize + gains * torch.float32.itemsize


@dataclass(frozen=True)
class ModuleFile:
    """Describes the contents of an adapter that is kept as PEFT's modules.

    Attributes:
        settings: the adapter's settings.
        modules: the names of the layers that the adapter changes, in order.
        named: the tensors by the names that PEFT gives them.
    """

    settings: ModuleSettings
    modules: tuple[str, ...]
    named: Mapping[str, StoredTensor]

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """Returns the descriptions of all tensors."""
        return tuple(self.named.values())

    def packed_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes that the adapter takes in host memory, where its numbers keep the dtypes of the file;
        `dtype` is ignored."""
        return sum(each.num_bytes for each in self.tensors)


@dataclass(frozen=True)
class OtherFile:
    """Describes the contents of an adapter that the store does not serve, and that PEFT may load onto a whole model.

    Attributes:
        named: the tensors by the names that they have in the file, in its order.
        why: the error that says why the store does not serve the adapter.
    """

    named: Mapping[str, StoredTensor]
    why: NotServed

    @property
    def tensors(self) -> tuple[StoredTensor, ...]:
        """Returns the descriptions of all tensors."""
        return tuple(self.named.values())


def _parse_weights(
    name: str, header: bytes, file_bytes: int, settings: LoraSettings | ModuleSettings, base: Base
) -> LoraFile | ModuleFile:
    """Reads a header, and checks each of its tensors against the file's size, the settings and the model.

    Whether the shapes of another kind than LoRA fit the settings is checked later, since only PEFT knows these shapes.

    Raises:
        ConfigurationError: a check failed; the error states the reason in one line.
    """
    only_matrices = isinstance(settings, LoraSettings) and not settings.dora
    tensors = _tensors(name, header, file_bytes, 2 if only_matrices else MAX_DIMENSIONS)
    if isinstance(settings, ModuleSettings):
        modules = _modules(name, tensors, settings, base)
        _check_whole(name, modules, settings.targets)
        return ModuleFile(settings, modules, tensors)
    layers = _lora_layers(name, tensors, settings, base)
    _check_whole(name, [layer.module for layer in layers], settings.targets)
    return LoraFile(layers)


def _parse_any_weights(name: str, header: bytes, file_bytes: int, why: NotServed) -> OtherFile:
    """Reads the header of an adapter that the store does not serve, and checks its tensors against the file's size.

    Raises:
        ConfigurationError: a check failed; the error states the reason in one line.
    """
    return OtherFile(_tensors(name, header, file_bytes, MAX_DIMENSIONS, EVERY_DTYPE), why)


def _check_whole(name: str, found: Sequence[str], targets: frozenset[str]) -> None:
    """Refuses an adapter that lacks a layer which its settings name. PEFT would leave this layer as it is, and say so
    in a warning only."""
    missing = targets - frozenset(found)
    if missing:
        raise ConfigurationError(
            f"the adapter {name} has no tensors for {min(missing)!a}, which its target_modules name "
            f"({len(missing)} of {len(targets)} layers are missing): was it saved whole?"
        )


def _check_named(name: str, key: str, module: str, targets: frozenset[str]) -> None:
    """Refuses a tensor of a layer that the adapter's settings do not name; PEFT would silently leave the tensor out."""
    if module not in targets:
        raise ConfigurationError(
            f"the adapter {name} holds {ascii(key)[:100]}, a layer that its target_modules do not name: not used"
        )


def _modules(
    name: str, tensors: Mapping[str, StoredTensor], settings: ModuleSettings, base: Base
) -> tuple[str, ...]:  # fmt: skip
    """Returns the layers to which tensors belong, in the model's order."""
    found = set[str]()
    for key in tensors:
        if _ADAPTER_WIDE.fullmatch(key) is None:
            module = _module_of(name, key, base)
            _check_named(name, key, module, settings.targets)
            found.add(module)
    if not found:
        raise ConfigurationError(f"the adapter {name} holds no tensor of a layer")
    return tuple(module for module in base.shapes if module in found)


def _module_of(name: str, key: str, base: Base) -> str:
    parts = key.removeprefix(_PREFIX).split(".") if key.startswith(_PREFIX) else []
    for length in range(min(len(parts) - 1, MAX_DEPTH), 0, -1):
        module = ".".join(parts[:length])
        if module in base.shapes:
            return module
    raise ConfigurationError(
        f"the adapter {name} is for another base: this model has no linear layer {ascii(key)[:100]}"
    )


def _lora_layers(
    name: str, tensors: Mapping[str, StoredTensor], settings: LoraSettings, base: Base
) -> tuple[LoraLayer, ...]:  # fmt: skip
    factors: dict[str, dict[str, StoredTensor]] = {}
    for key, tensor in tensors.items():
        own_name = key.removeprefix(_PREFIX)
        found = _FACTOR.fullmatch(own_name) or (_MAGNITUDE.fullmatch(own_name) if settings.dora else None)
        if found is None or "_orig_mod" in key:
            refusal = NotServed if ".lora_embedding_" in key else ConfigurationError
            raise refusal(f"the adapter {name} holds {ascii(key)[:100]}, which is {_kind(key)}: not served")
        if (
            own_name == key and _PREFIX + key not in tensors
        ):  # PEFT leaves out what does not begin so, with no more than a warning.
            raise ConfigurationError(
                f"the adapter {name} holds {ascii(key)[:100]}, which PEFT does not use: names begin with {_PREFIX}"
            )
        if found[1] in base.shapes:
            _check_named(name, key, found[1], settings.targets)
        own = factors.setdefault(found[1], {})
        if found[2] in own:  # Two names mean the same tensor, and only one of them would be read.
            raise ConfigurationError(
                f"the adapter {name} holds {ascii(key)[:100]} twice, with and without {_PREFIX} or another ending"
            )
        own[found[2]] = tensor
    return tuple(_layer(name, module, factors[module], settings, base) for module in sorted(factors))


def _kind(key: str) -> str:
    return next((kind for part, kind in _OTHER_KINDS.items() if part in key), "no factor of a LoRA layer")


def _tensors(
    name: str, header: bytes, file_bytes: int, dimensions: int, dtypes: Mapping[str, torch.dtype] = DTYPES
) -> dict[str, StoredTensor]:  # fmt: skip
    try:
        entries = json.loads(header.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError):
        entries = None
    if not isinstance(entries, dict):
        raise ConfigurationError(f"the adapter {name} has an adapter_model.safetensors without a header") from None
    entries.pop("__metadata__", None)
    if len(entries) > MAX_TENSORS:
        raise ConfigurationError(f"the adapter {name} has {len(entries)} tensors: at most {MAX_TENSORS} are read")
    data = 8 + len(header)
    ends: list[tuple[int, int]] = []
    tensors = {key: _tensor(name, key, entry, data, ends, dimensions, dtypes) for key, entry in entries.items()}
    if not tensors:
        raise ConfigurationError(f"the adapter {name} holds no tensors")
    if [begin for begin, _ in sorted(ends)] + [file_bytes] != [data] + [end for _, end in sorted(ends)]:
        raise ConfigurationError(f"the adapter {name} has tensors that overlap, leave gaps or pass the file's end")
    return tensors


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name stands twice")
    return made


def _tensor(
    name: str, key: str, entry: Any, data: int, ends: list[tuple[int, int]], dimensions: int,
    dtypes: Mapping[str, torch.dtype],
) -> StoredTensor:  # fmt: skip
    """Checks one entry of the header, and adds the tensor's range of bytes in the file to `ends`.

    Args:
        dimensions: 2 if the tensor has to be a matrix, otherwise the most dimensions that it may have.
        dtypes: the dtypes that the tensor may have, by the names of the format.
    """
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (
        dtypes.get(str(fields.get("dtype"))),
        _sizes(fields, "shape"),
        _sizes(fields, "data_offsets"),
    )
    wanted = "a matrix" if dimensions == 2 else f"1 to {dimensions} dimensions"
    if (
        dtype is None
        or shape is None
        or offsets is None
        or len(offsets) != 2
        or 0 in shape
        or not (len(shape) == 2 or (dimensions > 2 and (dtypes is EVERY_DTYPE or shape) and len(shape) <= dimensions))
    ):
        raise ConfigurationError(
            f"the adapter {name} has {ascii(key)[:100]} in another form than {wanted} of {', '.join(dtypes)}"
        )
    begin, end = offsets
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ConfigurationError(f"the adapter {name} has {ascii(key)[:100]} with a size that is not its shape's")
    ends.append((data + begin, data + end))
    return StoredTensor(dtype, shape, data + begin)


def _sizes(fields: dict[str, Any], key: str) -> tuple[int, ...] | None:
    """Returns a field that is a short list of whole numbers below 2^40; None if the field is anything else."""
    value = fields.get(key)
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        return None
    return tuple(value) if all(type(n) is int and 0 <= n < 1 << 40 for n in value) else None


def _layer(
    name: str, module: str, factors: dict[str, StoredTensor], settings: LoraSettings, base: Base
) -> LoraLayer:  # fmt: skip
    expected = base.shapes.get(module)
    if expected is None:
        raise ConfigurationError(
            f"the adapter {name} is for another base: this model has no linear layer {ascii(module)[:100]}"
        )
    if not factors.keys() >= {"A", "B"}:
        raise ConfigurationError(f"the adapter {name} has only one of A and B for {ascii(module)[:100]}")
    magnitude = factors.get("magnitude_vector")
    if settings.dora and (magnitude is None or magnitude.shape != (expected[1],)):
        raise ConfigurationError(
            f"the adapter {name} (DoRA) needs {expected[1]} magnitudes for {ascii(module)[:100]}, and has "
            f"{'none' if magnitude is None else f'the shape {magnitude.shape}'}"
        )
    rank = settings.rank_of(module)
    shapes = (factors["A"].shape, factors["B"].shape)
    if shapes != ((rank, expected[0]), (expected[1], rank)):
        raise ConfigurationError(
            f"the adapter {name} is for another base: {ascii(module)[:100]} needs A and B of rank {rank} for "
            f"{expected[0]} inputs and {expected[1]} outputs, and they have the shapes {shapes[0]} and {shapes[1]}"
        )
    return LoraLayer(module, factors["A"], factors["B"], settings.scaling_of(module), magnitude)


# ---- opening ---------------------------------------------------------------------------------------------------------

RACY_NS = 100_000_000
"""The nanoseconds after a change in which a file's stamp is not relied on, 0.1 s. A second change could have the same
time as the first, since the times of file systems advance in ticks of 1 to 10 ms."""

Stamp = tuple[tuple[int, int, int, int, int], ...]
"""The stamp of an adapter: device, inode, size, mtime and ctime of both files, which change if a file changes."""


_LACKS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""The errors with which the operating system says that it has no more open files or memory."""


@contextlib.contextmanager
def _disk_errors(name: str) -> Iterator[None]:
    """Raises StorageError in place of an error of the operating system, which is no reason to remember that the adapter
    cannot be used."""
    try:
        yield
    except OSError as exc:
        raise StorageError(
            f"the files of the adapter {ascii(name)[1:-1][:200]} cannot be read: {exc.strerror}"
        ) from exc


def _stamp_of(*files: int) -> Stamp:
    stats = [os.fstat(file) for file in files]
    return tuple((one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in stats)


class OpenAdapter:
    """Is an adapter whose two files are open. It is checked once, by `check`, and its tensors are then read once.

    Whoever opens an adapter closes it; it is a context manager.

    Attributes:
        name: the adapter's name, for error messages.
        stamp: the stamp of the files when they were opened.
        settled_stamp: the same, if the files' last change is long enough ago that another change would show in the
            stamp (`RACY_NS`); otherwise None.
    """

    def __init__(self, name: str, config: int, weights: int) -> None:
        """Keeps the open files, whose contents are not read yet.

        Args:
            name: the adapter's name, for error messages.
            config, weights: the descriptors of the open files, which `close` closes.
        """
        self.name = name
        self._files = (config, weights)
        self._is_open, self._lock = True, threading.Lock()
        self.stamp = _stamp_of(config, weights)
        is_settled = all(time.time_ns() - max(each[3:]) > RACY_NS for each in self.stamp)
        self.settled_stamp = self.stamp if is_settled else None
        self._settings: dict[str, Any] | None = None
        self._header = b""
        self._contents: LoraFile | ModuleFile | OtherFile | None = None
        self._digest = hashlib.sha256()

    def close(self) -> None:
        """Closes the files; a second call does nothing."""
        with self._lock:  # a descriptor that is closed twice could be another file's by then
            files, self._is_open = (self._files if self._is_open else ()), False
        for file in files:
            os.close(file)

    def __enter__(self) -> OpenAdapter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def is_unchanged(self) -> bool:
        """Returns whether the files are surely as they were when they were opened."""
        return self.settled_stamp is not None and _stamp_of(*self._files) == self.stamp

    def check(self, base: Base, max_file_bytes: int) -> LoraFile | ModuleFile | OtherFile:
        """Reads and checks the settings and the header of the weights. A second call returns what the first found.

        Args:
            base: the model that the adapter has to fit.
            max_file_bytes: the largest weights file that is read.

        Returns:
            The adapter's layers; or only its tensors, if the store of adapters does not serve the adapter.

        Raises:
            ConfigurationError: a file is too large, or the adapter cannot be used.
            StorageError: the disk does not give the files' bytes.
        """
        if self._contents is None:
            found, num_bytes = self._read_start(base, max_file_bytes), self.stamp[1][2]
            try:
                settings = served_settings(self.name, found, base)
                self._contents = _parse_weights(self.name, self._header, num_bytes, settings, base)
            except NotServed as exc:
                self._contents = _parse_any_weights(self.name, self._header, num_bytes, exc.with_traceback(None))
            self._header = b""
        return self._contents

    def check_served(self, base: Base, max_file_bytes: int) -> LoraFile | ModuleFile:
        """Does what `check` does, for an adapter that the store of adapters has to serve.

        Raises:
            ConfigurationError: the adapter cannot be used, or the store does not serve its kind.
        """
        contents = self.check(base, max_file_bytes)
        if isinstance(contents, OtherFile):
            raise contents.why
        return contents

    def settings(self, base: Base, max_file_bytes: int) -> dict[str, Any]:
        """Returns a copy of the settings in the file, before `check` checks what each of them says.

        Args: see `check`.

        Raises:
            ConfigurationError: a file is too large, the settings are no JSON object, or they are for another model.
        """
        return copy.deepcopy(self._read_start(base, max_file_bytes))

    def tensors(self) -> Iterator[tuple[StoredTensor, torch.Tensor]]:
        """Reads the tensors in the order of the file, which has no gaps between them. Callers must first call `check`.

        Yields:
            The description of a tensor, and its numbers. The numbers are valid until the next tensor is read.

        Raises:
            ConfigurationError: the file became shorter.
            StorageError: the disk does not give the file's bytes.
        """
        stored = () if self._contents is None else self._contents.tensors
        memory = torch.empty(max(each.num_bytes for each in stored), dtype=torch.uint8)
        view = memory.numpy().data
        for each in sorted(stored, key=lambda one: one.begin):
            self._fill(view[: each.num_bytes], each.begin)
            self._digest.update(view[: each.num_bytes])
            yield each, memory[: each.num_bytes].view(each.dtype).view(each.shape)

    def digest(self) -> str:
        """Returns the SHA-256 of both files, in hex. Callers must first read all tensors.

        The hash is over one file after the other, `cat adapter_config.json adapter_model.safetensors | sha256sum`. Two
        adapters cannot have the same bytes split at another point, since the second part would not be a valid
        safetensors file.

        Raises:
            ConfigurationError: a file has changed since it was opened.
        """
        if _stamp_of(*self._files) != self.stamp:
            raise ConfigurationError(f"the adapter {self.name} is being written: try again when it is complete")
        return self._digest.hexdigest()

    def has_digest(self, digest: str) -> bool:
        """Returns whether the files have this digest. This reads both files whole, without checking them."""
        found = hashlib.sha256()
        with _disk_errors(self.name):
            for file in self._files:
                offset = 0
                while piece := os.pread(file, 1 << 20, offset):
                    found.update(piece)
                    offset += len(piece)
        return found.hexdigest() == digest and _stamp_of(*self._files) == self.stamp

    def _read_start(self, base: Base, max_file_bytes: int) -> dict[str, Any]:
        """Reads the settings and the header of the weights, if they are not read yet, and returns the settings."""
        if self._settings is not None:
            return self._settings
        (config, weights), num_bytes = self._files, self.stamp[1][2]
        if num_bytes > max_file_bytes:
            raise ConfigurationError(
                f"the adapter {self.name} has {num_bytes} bytes of weights: at most {max_file_bytes} fit"
            )
        content = _config_bytes(self.name, config)
        with _disk_errors(self.name):
            start = os.pread(weights, 8, 0)
            self._header = os.pread(weights, header_bytes(self.name, start, num_bytes), 8)
        self._digest = hashlib.sha256(content + start + self._header)
        self._settings = read_settings(self.name, content, base)
        return self._settings

    def _fill(self, view: memoryview, begin: int) -> None:
        done = 0
        while done < len(view):
            with _disk_errors(self.name):
                count = os.preadv(self._files[1], [view[done:]], begin + done)
            if count == 0:
                raise ConfigurationError(f"the adapter {self.name} became shorter while it was read")
            done += count


class AdapterFolder:
    """Finds and opens the adapters of a folder, each of which has its own subfolder."""

    def __init__(self, root: Path) -> None:
        """Checks the names in the folder, without opening its adapters.

        Raises:
            ConfigurationError: there is no such folder, or two of its adapters have names that differ only in case.
        """
        self._root = root
        _refuse_twins(self.names())

    def names(self, most: int | None = None) -> list[str]:
        """Returns the names of the adapters that are in the folder now, whether or not they can be used.

        Args:
            most: if there are more, only so many of them are looked for; None finds all.

        Raises:
            ConfigurationError: the folder cannot be read.
        """
        try:
            with os.scandir(self._root) as entries:
                found = (
                    each.name
                    for each in entries
                    if each.is_dir(follow_symlinks=False)
                    and NAME.fullmatch(each.name)
                    and not self.is_of_a_run(each.name)
                )
                return sorted(itertools.islice(found, most))
        except OSError as exc:
            raise ConfigurationError(f"the folder of adapters cannot be read: {exc.strerror}") from exc

    def is_of_a_run(self, name: str) -> bool:
        """Returns whether a subfolder holds checkpoints or reports of a fine-tuning run, and no adapter."""
        return name.endswith((".checkpoints", ".logs")) and not (self._root / name / CONFIG).exists()

    def open(self, name: str, subfolder: str | None = None) -> OpenAdapter:
        """Opens both files of an adapter, each relative to its parent folder and without following links. Callers must
        close the adapter.

        Args:
            name: the adapter's name, for error messages.
            subfolder: the adapter's subfolder; None means the subfolder called `name`.

        Raises:
            ConfigurationError: there is no such adapter, or it lacks one of the files.
            StorageError: the operating system cannot open the files now, such as for want of descriptors.
        """
        subfolder = name if subfolder is None else subfolder
        if not isinstance(subfolder, str) or NAME.fullmatch(subfolder) is None:
            raise ConfigurationError(
                f"{ascii(name)[:200]} cannot be an adapter's name: at most 128 letters, digits, '.', '_' and '-'"
            )
        with _disk_errors(name), contextlib.ExitStack() as stack:
            folder = self._subfolder(stack, subfolder)
            if folder is None:
                raise ConfigurationError(f"there is no adapter {name!a} in the folder of adapters")
            return _open_files(name, folder, os.O_NOFOLLOW)

    def settings(self, name: str) -> dict[str, Any] | None:
        """Returns the settings of one of `names`, unchecked; None if it has no file for them that `open` would open.

        Raises:
            ConfigurationError: the file is too large, or is no JSON object.
            StorageError: the file cannot be read.
        """
        with _disk_errors(name), contextlib.ExitStack() as stack:
            folder = self._subfolder(stack, name)
            config = None if folder is None else _opened(stack, CONFIG, os.O_NOFOLLOW | os.O_NONBLOCK, folder)
            return None if config is None else json_object(name, _config_bytes(name, config))

    def _subfolder(self, stack: contextlib.ExitStack, name: str) -> int | None:
        root = _opened(stack, self._root, os.O_DIRECTORY, None)
        return None if root is None else _opened(stack, name, os.O_DIRECTORY | os.O_NOFOLLOW, root)

    def has(self, name: str) -> bool:
        """Returns whether the folder has an adapter of this name now, usable or not; only this adapter is looked for,
        however many there are."""
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            return False
        try:
            is_folder = stat.S_ISDIR(os.stat(self._root / name, follow_symlinks=False).st_mode)
            return is_folder and not self.is_of_a_run(name)
        except OSError:
            return False


def opened_by_user(folder: Path) -> OpenAdapter:
    """Opens both files of an adapter that the user of this process names. Links are followed, since the hub's cache of
    downloads has links in place of files. Callers must close the adapter.

    Raises:
        ConfigurationError: there is no such folder, or it lacks one of the files.
        StorageError: the operating system cannot open the files now, such as for want of descriptors.
    """
    with _disk_errors(str(folder)), contextlib.ExitStack() as stack:
        fd = _opened(stack, folder, os.O_DIRECTORY, None)
        if fd is None:
            raise ConfigurationError(f"there is no adapter folder {folder}")
        return _open_files(str(folder), fd, 0)


def _opened(stack: contextlib.ExitStack, path: str | Path, flags: int, folder: int | None) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags, dir_fd=folder)
    except OSError as exc:
        if exc.errno in _LACKS:  # nothing is wrong with the adapter
            raise
        return None
    stack.callback(os.close, fd)
    wanted = stat.S_ISDIR if flags & os.O_DIRECTORY else stat.S_ISREG
    return fd if wanted(os.fstat(fd).st_mode) else None


def _config_bytes(name: str, config: int) -> bytes:
    with _disk_errors(name):
        content = os.pread(config, MAX_CONFIG_BYTES + 1, 0)
    check_config_bytes(name, content)
    return content


def _open_files(name: str, folder: int, flags: int) -> OpenAdapter:
    with contextlib.ExitStack() as stack:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        config, weights = (_opened(stack, file, flags | os.O_NONBLOCK, folder) for file in (CONFIG, WEIGHTS))
        if config is None or weights is None:
            raise ConfigurationError(what_is_missing(name, os.listdir(folder), config is None))
        opened = OpenAdapter(name, config, weights)
        stack.pop_all()  # from here on, `opened.close` closes the files
        return opened


def _refuse_twins(names: list[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            raise ConfigurationError(f"the adapters {other} and {name} have one name but for case: rename one of them")


# ---- what is remembered ----------------------------------------------------------------------------------------------

MOST_NAMES = 4096
"""The most adapters that are remembered. The files of any other adapter are read again."""


class Known:
    """Remembers adapters' digests and failures by name. Each entry is valid while the files have the same stamp
    (sizes and times)."""

    def __init__(self) -> None:
        """Makes an empty memory of digests and failures."""
        self._lock = threading.Lock()
        self._known: OrderedDict[str, tuple[Stamp, str | None, str]] = OrderedDict()

    def digest(self, name: str, stamp: Stamp | None) -> str | None:
        """Returns an adapter's digest if it is known for the present stamp of the files; otherwise returns None.

        Raises:
            ConfigurationError: the files were read before with this stamp, and cannot be used.
        """
        with self._lock:
            found = self._known.get(name)
            if found is None or stamp is None or found[0] != stamp:
                return None
            self._known.move_to_end(name)
        if found[1] is None:
            raise ConfigurationError(found[2])
        return found[1]

    def last_digest(self, name: str) -> str | None:
        """Returns the digest that an adapter had when its files were last read; None if it is not known."""
        with self._lock:
            found = self._known.get(name)
            return None if found is None else found[1]

    def keep_digest(self, name: str, stamp: Stamp | None, digest: str) -> None:
        """Remembers the digest of an adapter that can be used; None in place of a stamp remembers nothing."""
        self._remember(name, stamp, digest, "")

    def keep_failure(self, name: str, stamp: Stamp | None, failure: VeilbaseError) -> None:
        """Remembers why an adapter cannot be used. A failure that may be temporary is not remembered."""
        if isinstance(failure, ConfigurationError):
            self._remember(name, stamp, None, str(failure))

    def _remember(self, name: str, stamp: Stamp | None, digest: str | None, reason: str) -> None:
        if stamp is None:
            return
        with self._lock:
            self._known[name] = (stamp, digest, reason)
            self._known.move_to_end(name)
            if len(self._known) > MOST_NAMES:
                self._known.popitem(last=False)
