"""State that several fine-tuning runs in threads of one process would share; each run is given its own.

accelerate keeps one state for the process: device and precision, which every new Trainer discards and makes again, and
whether the optimizer acts on this step, which differs from run to run. torch has one random generator.

Guarantees: a run sees its own state of accelerate and no other thread sees it; an adapter's initial values are drawn
from the run's seed alone. It does not guarantee equal dropout, nor equal sampling in `generate`: both draw from torch's
own generator, and their operations accept no other. For these a run needs a process of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.overrides import TorchFunctionMode

_State = dict[str, Any]
_own: ContextVar[dict[type, _State] | None] = ContextVar("veilbase_own_accelerate_state", default=None)

_DRAWS = frozenset({
    torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.random_, torch.Tensor.bernoulli_,
    torch.Tensor.exponential_, torch.Tensor.geometric_, torch.Tensor.log_normal_, torch.Tensor.cauchy_,
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like,
    torch.normal, torch.bernoulli, torch.multinomial,
    nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_,  # torch passes a mode the whole call of these
})  # fmt: skip
"""Random operations that take a generator; other operations (dropout) cannot draw from a run's own."""


@contextmanager
def own_accelerate_state() -> Iterator[None]:
    """Gives this thread a fresh state of accelerate inside the block; outside and in other threads the state is
    unchanged."""
    _install()
    before = _own.set({})
    try:
        yield
    finally:
        _own.reset(before)


class _StateOfRun:
    """`_shared_state` of one of accelerate's classes: inside a run the run's own, elsewhere that of the process."""

    def __init__(self, kind: type, everybodys: _State) -> None:
        self._kind, self._everybodys = kind, everybodys

    def __get__(self, instance: Any, owner: type) -> _State:
        own = _own.get()
        return self._everybodys if own is None else own.setdefault(self._kind, {})


@functools.cache
def _install() -> None:
    for kind in (PartialState, AcceleratorState, GradientState):
        everybodys = vars(kind)["_shared_state"]
        if isinstance(everybodys, dict):  # on a TPU accelerate itself has one state for each thread
            kind._shared_state = _StateOfRun(kind, everybodys)


class DrawnFrom(TorchFunctionMode):
    """A context in which a thread draws the numbers that it would draw alone after `torch.manual_seed(seed)`, whatever
    other threads draw."""

    def __init__(self, seed: int) -> None:
        """Args: seed: a number from 0 to 2^32 - 1."""
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
