"""This module gives each fine-tuning run a state of its own, since several may run in threads of one process.

The library accelerate keeps one state for the process: device and precision, which every new Trainer resets, and
whether the optimizer acts on this step, which differs between runs. torch has one random generator for the process.

Guarantees: a run has its own state of accelerate, which no other thread sees. An adapter's initial values depend only
on the run's seed. Not guaranteed: reproducible dropout, and reproducible sampling in `generate`. Both use torch's
global generator, since their operations take no generator as an argument. For these a run needs a process of its own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.overrides import TorchFunctionMode

from wire.errors import ConfigurationError

_State = dict[str, Any]
_own: ContextVar[dict[type, _State] | None] = ContextVar("veilbase_own_accelerate_state", default=None)

_DRAWS = frozenset({
    torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.random_, torch.Tensor.bernoulli_,
    torch.Tensor.exponential_, torch.Tensor.geometric_, torch.Tensor.log_normal_, torch.Tensor.cauchy_,
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like,
    torch.normal, torch.bernoulli, torch.multinomial,
    nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_,  # a mode sees a call of these as one call
})  # fmt: skip
"""The random operations that take a generator as an argument; other operations, such as dropout, always use torch's own
generator."""


def check_alone() -> None:
    """Checks that this process is not one of several that torchrun started: accelerate would let them train together.

    Raises:
        ConfigurationError: it is one of several.
    """
    if os.environ.get("LOCAL_RANK", "-1") != "-1" and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigurationError(
            "finetune trains in one process, and this is one of several (WORLD_SIZE): start it without torchrun, or "
            "use stock PEFT and Trainer over load_model()"
        )


@contextmanager
def own_accelerate_state() -> Iterator[None]:
    """Gives this thread a new state of accelerate inside the context; the state of other threads does not change."""
    _install()
    before = _own.set({})
    try:
        yield
    finally:
        _own.reset(before)


class _StateOfRun:
    """Replaces `_shared_state` of a class of accelerate: gives a run its own state, and gives code outside a run the
    process's state."""

    def __init__(self, kind: type, everybodys: _State) -> None:
        self._kind, self._everybodys = kind, everybodys

    def __get__(self, instance: Any, owner: type) -> _State:
        own = _own.get()
        return self._everybodys if own is None else own.setdefault(self._kind, {})


@functools.cache
def _install() -> None:
    for kind in (PartialState, AcceleratorState, GradientState):
        everybodys = vars(kind)["_shared_state"]
        if isinstance(everybodys, dict):  # on a TPU accelerate already has one state for each thread
            kind._shared_state = _StateOfRun(kind, everybodys)


class DrawnFrom(TorchFunctionMode):
    """Makes a thread's random numbers depend on a seed alone, not on what other threads draw.

    Inside this context the thread draws the same numbers as a process with one thread after `torch.manual_seed(seed)`.
    """

    def __init__(self, seed: int) -> None:
        """Keeps the seed, a number from 0 to 2^32 - 1."""
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS and kwargs.get("generator") is None:
            kwargs = {**kwargs, "generator": self._generator(args, kwargs)}
        return func(*args, **kwargs)

    def _generator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
        tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        first = next(tensors, None)
        device = torch.device(kwargs.get("device") or (torch.get_default_device() if first is None else first.device))
        if device.type == "meta":
            return None
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return self._generators[device]
