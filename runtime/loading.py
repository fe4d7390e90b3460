"""This module shields other threads from the process-wide settings that transformers and PEFT change while they build a
model.

Loading replaces methods of transformers' classes for a while. If two loads overlap, the wrong methods may be restored
for good. Loading also sets torch's default dtype. Log level, progress bars and warning filters belong to the whole
process as well.

Guarantees: inside `loading`, one thread of the process builds at a time, for a tenant or for a provider in the same
process. While a model is loaded in bfloat16, the default dtype of other threads stays as it is. Log level, progress
bars and warning filters are restored when the last thread leaves `quiet_transformers`. A thread that only computes
never waits for a lock of this module. Nothing is guaranteed if the user calls `from_pretrained` in another thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_lock = threading.RLock()
_quiet_lock = threading.Lock()
_num_quiet = 0
_undo_quiet = contextlib.ExitStack()

_FLOATS = frozenset({
    torch.empty, torch.empty_strided, torch.empty_permuted, torch.zeros, torch.ones, torch.rand, torch.randn,
    torch.eye, torch.linspace, torch.logspace, torch.bartlett_window, torch.blackman_window, torch.hamming_window,
    torch.hann_window, torch.kaiser_window,
})  # fmt: skip
"""torch functions that return the default dtype if the caller passes no dtype."""
_BY_VALUE = frozenset({
    torch.tensor, torch.as_tensor, torch.asarray, torch.scalar_tensor, torch.full, torch.arange, torch.range,
})  # fmt: skip
"""torch functions that return the default dtype if the caller passes Python floats and no dtype."""
_FILLS = frozenset({
    torch.nn.init.normal_, torch.nn.init.trunc_normal_, torch.nn.init.uniform_, torch.nn.init.kaiming_uniform_,
    torch.nn.init.zeros_, torch.nn.init.ones_, torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.zero_,
    torch.Tensor.fill_,
})  # fmt: skip
"""torch functions that write all numbers of their first argument, and return it."""


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Lets one thread at a time run the block, which builds or reads a model, an adapter or a tokenizer. The thread has
    a default dtype of its own, and transformers prints little.

    Inside the block a thread must not wait for a lock (such as a client's) whose holder may itself be waiting to enter
    `loading`, since both would then wait for ever.
    """
    with _lock, quiet_transformers(), _own_default_dtype():
        yield


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turns off transformers' progress bars, its log messages below the level of errors, and its warnings about
    `use_cache` and about coming changes, while the block runs.

    These settings belong to the process: the first thread that enters changes them, and the last thread that leaves
    restores them.
    """
    global _num_quiet, _undo_quiet
    with _quiet_lock:
        if _num_quiet == 0:
            _undo_quiet = _hush()
        _num_quiet += 1
    try:
        yield
    finally:
        with _quiet_lock:
            _num_quiet -= 1
            if _num_quiet == 0:
                _undo_quiet.close()


def _hush() -> contextlib.ExitStack:
    from transformers.utils import logging as transformers_logging

    undo = contextlib.ExitStack()
    undo.enter_context(warnings.catch_warnings())
    warnings.filterwarnings("ignore", message=".*use_cache=True.*")
    # PEFT still uses names that transformers is about to drop.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    undo.callback(transformers_logging.set_verbosity, transformers_logging.get_verbosity())
    transformers_logging.set_verbosity_error()
    if transformers_logging.is_progress_bar_enabled():
        undo.callback(transformers_logging.enable_progress_bar)
        transformers_logging.disable_progress_bar()
    return undo


class _OwnDefaultDtype(TorchFunctionMode):
    """Gives the calling thread a default dtype of its own, and leaves out the first values of tensors without memory.

    transformers makes the layers of a model on the meta device before it puts their weights there. To draw weights
    there writes nothing, and takes a third of the time in which the layers are made.

    torch has one default dtype for all threads, but it calls a function mode only in the thread that entered the mode.
    Results of arithmetic on integers alone, such as a quotient, still have the process's default dtype.
    """

    def __init__(self, everybodys: torch.dtype) -> None:
        super().__init__()
        self.everybodys = self.dtype = everybodys

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FILLS and (filled := args[0] if args else kwargs["tensor"]).is_meta:
            return filled
        if self.dtype is self.everybodys or kwargs.get("dtype") is not None or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        if func in _FLOATS or (func is torch.normal and not _has_tensor(args, kwargs)):
            return func(*args, **{**kwargs, "dtype": self.dtype})
        made = func(*args, **kwargs)
        if func in _BY_VALUE and made.dtype is self.everybodys and not _has_tensor(args, kwargs):
            return func(*args, **{**kwargs, "dtype": self.dtype})
        return made


def _has_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tells whether a tensor or a numpy array is among the arguments. If so, the dtype of this tensor or array
    takes precedence over any default dtype."""
    return any(hasattr(each, "dtype") for each in (*args, *kwargs.values()))


@contextlib.contextmanager
def _own_default_dtype() -> Iterator[None]:
    """Makes `torch.set_default_dtype` and `torch.get_default_dtype` in this thread act on the thread's own dtype.
    Callers must hold `_lock`."""
    loader, real_set, real_get = threading.get_ident(), torch.set_default_dtype, torch.get_default_dtype
    own = _OwnDefaultDtype(real_get())

    def set_default_dtype(dtype: torch.dtype, /) -> None:
        if threading.get_ident() == loader:
            own.dtype = dtype
        else:
            real_set(dtype)

    def get_default_dtype() -> torch.dtype:
        return own.dtype if threading.get_ident() == loader else real_get()

    torch.set_default_dtype, torch.get_default_dtype = set_default_dtype, get_default_dtype
    try:
        with own:
            yield
    finally:
        torch.set_default_dtype, torch.get_default_dtype = real_set, real_get


def _after_fork_in_child() -> None:
    global _lock, _quiet_lock
    _lock, _quiet_lock = threading.RLock(), threading.Lock()  # The threads that held the locks are not in this process.


os.register_at_fork(after_in_child=_after_fork_in_child)
