"""This module chooses how a training run saves memory for activations (activation checkpointing), and turns it on.

There are three modes. With None nothing is computed twice: the forward pass keeps everything that the backward pass
needs. With `replies` the backward pass computes each transformer block again, from stored replies of the provider
(tenant_sdk/training/kept_replies.py). With `recompute` it computes each block again and asks the provider again, which
adds about half to the traffic. `auto` chooses the first of these three that fits.

Guarantees: the choice depends on the model's shapes, the longest batch, free memory and free disk, and on nothing that
a row says. It is made once, before a run sends rows.

`giving_pages_back` makes a step's savings show in the process's resident memory, where glibc's malloc would keep the
pages of freed tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from tenant_sdk.kinds.features import features_of_kinds
from tenant_sdk.model.dora import features_of_dora
from tenant_sdk.model.remote_linear import RemoteConv1D, RemoteLinear
from tenant_sdk.training.kept_replies import KeptReplies
from tenant_sdk.training.kept_results import bytes_per_row
from tenant_sdk.training.reply_store import ReplyStore
from wire.errors import ConfigurationError, StorageError

MODES = ("auto", "replies", "recompute")
"""The values of the option `checkpointing` besides None."""

_KEPT = 1.2
"""The estimate of what a step without checkpointing keeps for each token, as a multiple of all base layers' inputs and
outputs: autograd's saved tensors of SmolLM2 with LoRA on all layers are 1.0 times those."""
_KEPT_WITH_DROPOUT = 1.8
"""The same estimate if an adapter has dropout, which keeps a copy of its input."""
_SHARE_OF_MEMORY = 0.5
"""The part of the free memory that a run may use if the tenant names no budget."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of the parameters of `mallopt`, from glibc's malloc.h."""
_IN_STEPS = {_M_TRIM_THRESHOLD: 64 << 20, _M_MMAP_THRESHOLD: 1 << 20}
"""malloc's thresholds, in bytes, while `giving_pages_back` is in force. From 1 MiB a block is mapped by itself, so its
pages return to the system when it is freed. With 64 KiB a step of 1,024 tokens took a quarter less memory (170 MB in
place of 231), but half as much time again, for page faults. The heap keeps 64 MiB, as provider/serve.py has it."""
_BETWEEN_STEPS = {_M_TRIM_THRESHOLD: 64 << 20, _M_MMAP_THRESHOLD: 32 << 20}
"""The thresholds afterwards: those that malloc's own rule reaches once a block of 32 MiB has been freed (mallopt(3),
DEFAULT_MMAP_THRESHOLD_MAX on 64 bits, and twice that). The rule itself ends with the first call of `mallopt`."""
_SET_BY_USER = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_pages_lock = threading.Lock()
_num_giving_back = 0


def resolve(checkpointing: str | None, gradient_checkpointing: bool, memory_budget_mb: float | None) -> str | None:
    """Returns the mode that a run's options name: one of MODES, or None.

    Raises:
        ConfigurationError: an option has an impossible value, or two options contradict each other.
    """
    if checkpointing is not None and checkpointing not in MODES:
        raise ConfigurationError(f"checkpointing must be {', '.join(MODES)} or None, got {checkpointing!r}")
    if gradient_checkpointing:
        if checkpointing not in ("auto", "recompute"):
            raise ConfigurationError(
                f"gradient_checkpointing=True means checkpointing='recompute', got checkpointing={checkpointing!r} too"
            )
        checkpointing = "recompute"
    if memory_budget_mb is None:
        return checkpointing
    is_number = isinstance(memory_budget_mb, int | float) and not isinstance(memory_budget_mb, bool)
    if not is_number or not 0 <= memory_budget_mb < float("inf"):
        raise ConfigurationError(f"memory_budget_mb must be a finite number from 0, got {memory_budget_mb!r}")
    if checkpointing not in ("auto", "replies"):
        raise ConfigurationError(
            f"memory_budget_mb needs checkpointing='auto' or 'replies', got checkpointing={checkpointing!r}"
        )
    return checkpointing


@dataclass(frozen=True)
class Estimate:
    """Holds estimates of a step's memory for its longest batch, in bytes.

    Attributes:
        plain: what a step without checkpointing keeps until its backward pass.
        working: what a step with checkpointing keeps, apart from replies: the inputs of all transformer blocks, and
            the autograd graph of one block.
        replies: the provider's replies for all blocks.
        results: what is kept beside the replies (tenant_sdk/training/kept_results.py).
    """

    plain: int
    working: int
    replies: int
    results: int

    @property
    def stored(self) -> int:
        """Returns the bytes that `replies` stores for the batch."""
        return self.replies + self.results


def estimate(base: Any, num_rows: int, has_dropout: bool) -> Estimate:
    """Returns an estimate of the memory that a training step takes for a batch.

    Args:
        base: the model, whose layers may have adapters.
        num_rows: the batch's rows times their length, in tokens.
        has_dropout: whether an adapter has dropout.
    """
    layers = list(_remote(base.base_model))
    item_bytes = base.dtype.itemsize
    outputs = sum(shape[1] for shape in layers) * item_bytes
    both = sum(sum(shape) for shape in layers) * item_bytes
    config = base.config.get_text_config()
    num_blocks = max(1, int(getattr(config, "num_hidden_layers", 1)))
    kept = both * (_KEPT_WITH_DROPOUT if has_dropout else _KEPT)
    inputs = int(getattr(config, "hidden_size", 0)) * num_blocks * item_bytes
    for kept_by_kind, second_outputs in (features_of_dora(base), features_of_kinds(base)):
        kept, outputs = kept + kept_by_kind * item_bytes, outputs + second_outputs * item_bytes
    return Estimate(
        int(num_rows * kept), int(num_rows * (inputs + kept / num_blocks)), num_rows * outputs,
        num_rows * bytes_per_row(base),
    )  # fmt: skip


def _remote(model: Any) -> Iterable[tuple[int, int]]:
    """Yields (in_features, out_features) of each remote layer, also of layers that share one input."""
    for module in model.modules():
        if isinstance(module, RemoteLinear):
            yield module.in_features, module.out_features
        elif isinstance(module, RemoteConv1D):
            yield module.nx, module.nf


def has_dropout(model: Any) -> bool:
    """Returns whether a module of the model drops values out in training."""
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


class Checkpointing:
    """Holds the mode of one run, and the store of the provider's replies if the mode is `replies`."""

    def __init__(self, mode: str | None, store: ReplyStore | None, stored_per_row: tuple[int, int] = (0, 0)) -> None:
        """Keeps what `choose` found; `stored_per_row` is the size of all replies for one token, and the size of what is
        kept beside them, in bytes."""
        self.mode, self.store = mode, store
        self._stored_per_row = stored_per_row

    def before_step(self, num_rows: int) -> None:
        """Reserves room in the store for the replies of the next forward pass.

        Args:
            num_rows: the batch's rows times their length, in tokens.

        Raises:
            StorageError: the disk has no room.
        """
        if self.store is not None:
            self.store.reserve(*(num_rows * each for each in self._stored_per_row))

    def turn_on(self, base: Any) -> None:
        """Turns checkpointing on in a model without adapters, or in the base model of a model with adapters.

        This does what Trainer's `gradient_checkpointing` does, except that the embeddings' output gets no gradient.
        With such a gradient, the layers below the lowest adapter would send backward calls to the provider too.
        Checkpointing that is not re-entrant, which is used here, does not need such a gradient.

        Raises:
            ConfigurationError: the architecture has no activation checkpointing.
        """
        if self.mode is None:
            return
        options: dict[str, Any] = {"use_reentrant": False}
        if self.store is not None:
            options["context_fn"] = KeptReplies(self.store).contexts
        try:
            base.activation_checkpointing_enable(options)
        except ValueError as exc:
            raise ConfigurationError(
                f"{type(base).__name__} does not support gradient_checkpointing: use checkpointing=None"
            ) from exc
        base.disable_input_require_grads()

    def close(self) -> None:
        """Removes the store's file and drops its key."""
        if self.store is not None:
            self.store.close()


@contextlib.contextmanager
def giving_pages_back() -> Iterator[None]:
    """Makes malloc return a large block's pages to the system when the block is freed, until the context ends.

    By default glibc keeps them, so that the resident memory of a step with checkpointing came close to that of a step
    without. The thresholds count for the whole process: other threads' large blocks cost page faults meanwhile.
    Contexts may overlap; the last one that ends puts the thresholds back. The context changes nothing with another
    libc, and nothing if the environment sets malloc's thresholds (MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ or
    GLIBC_TUNABLES). Used as a decorator, it holds for each call of a function.
    """
    global _num_giving_back
    with _pages_lock:
        _num_giving_back += 1
        if _num_giving_back == 1:
            _set_thresholds(_IN_STEPS)
    try:
        yield
    finally:
        with _pages_lock:
            _num_giving_back -= 1
            if _num_giving_back == 0:
                _set_thresholds(_BETWEEN_STEPS)


def _set_thresholds(values: dict[int, int]) -> None:
    mallopt = _mallopt()
    if mallopt is None or any(name in os.environ for name in _SET_BY_USER):
        return
    if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", ""):
        return
    for parameter, value in values.items():
        mallopt(parameter, value)


def _mallopt() -> Any:
    """Returns glibc's function `mallopt`; None with a libc that has none."""
    return getattr(ctypes.CDLL(None), "mallopt", None)


def choose(
    mode: str | None, base: Any, num_rows: int, has_dropout: bool, memory_budget_mb: float | None, folder: Path
) -> Checkpointing:
    """Returns the checkpointing of a run.

    Args:
        mode: the result of `resolve`; `auto` chooses the cheapest that fits.
        base: the model without adapters.
        num_rows: the longest batch's rows times their length, in tokens.
        has_dropout: whether an adapter has dropout.
        memory_budget_mb: the memory that a step's activations may take, in MB. With None it is half of the free memory
            for `auto`; `replies`, which is asked for by name to save memory, then puts all replies on disk if they fit.
        folder: a folder on the disk that takes the replies that are not held in memory.

    Raises:
        StorageError: the mode is `replies`, and the disk has no room for them.
    """
    need = estimate(base, num_rows, has_dropout)
    budget = int(memory_budget_mb * 1e6) if memory_budget_mb is not None else int(free_memory() * _SHARE_OF_MEMORY)
    in_memory = max(0, budget - need.working)
    if mode == "replies" and memory_budget_mb is None and need.stored <= _free_disk(folder):
        in_memory = 0
    if mode == "auto":
        mode = None if need.plain <= budget or not base.supports_gradient_checkpointing else "replies"
        if mode == "replies" and need.stored - in_memory > _free_disk(folder):
            mode = "recompute"
    if mode != "replies":
        return Checkpointing(mode, None)
    if need.stored - in_memory > _free_disk(folder):
        raise StorageError(
            f"expected {(need.stored - in_memory) / 1e6:.0f} MB of free disk for replies at {folder}, got "
            f"{_free_disk(folder) / 1e6:.0f}: make room, or choose checkpointing='recompute' (--checkpointing)"
        )
    per_row = need.replies // max(1, num_rows), need.results // max(1, num_rows)
    return Checkpointing(mode, ReplyStore(in_memory, folder), per_row)


def free_memory() -> int:
    """Returns the bytes of memory that the machine and this process's control group leave free."""
    with open("/proc/meminfo", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii").strip()
        return min(free, int(limit) - int(used)) if limit != "max" else free
    except (OSError, ValueError):
        return free


def _free_disk(folder: Path) -> int:
    """Returns the free bytes of the disk on which a folder is or will be."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    try:
        return shutil.disk_usage(there).free if os.access(there, os.W_OK) else 0
    except OSError:
        return 0
