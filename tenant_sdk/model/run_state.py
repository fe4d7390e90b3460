"""This module holds the state of a model's run: where the products of remote layers come from, and what the model does
after a value that is not finite.

Usually the provider computes every product. In a thread inside `RunStates.products_from`, forward products meet a
`ProductSource` first: it can give a product that it has, so that nobody is asked, or keep what the provider answers.
With the source `ZEROS` a model runs without any call.

Without `verify`, a lying provider may send replies that make a number overflow. Whether and when it overflows depends
on the tenant's data, so a run that stopped at the overflow would tell the provider about the data
(attacks/programs/overflow.py). After the first value that is not finite, the model therefore still makes all planned
calls: each call sends zeros under a fresh mask, and its result is replaced by zeros.

A `RunState` records this for one loaded model, and so for one run of `finetune`; each answer of `generate` has a state
of its own. A later run of the same client starts with a new one: a client that refused further work would show the
provider that a value was not finite.

Guarantees:
- a source belongs to one thread and ends with its context. Backward products of a model always come from the provider;
- the calls, their order and their numbers of rows do not depend on whether a value was finite. After a value that is
  not finite, the model sends no row of the tenant any more, masked or not, and one warning says so. There are two
  exceptions, in which such a value raises an error at once: with `verify` a provider that lies fails the check first,
  and an answer of `generate` without `fixed_length` shows its length in any case.

Not guaranteed: anything about time, or about the user's own code that reads the values, such as a callback that ends a
run early.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers import TrainerCallback

from tenant_sdk.model.padding import Padding
from tenant_sdk.warn import warn_and_go_on
from wire.errors import NotFinite


class ProductSource:
    """Stands between a thread's remote layers and the provider. This one changes nothing: the provider is asked."""

    sends_nothing = False
    """Whether every product is given, so that the thread must not ask the provider for any other either."""

    def see(self, rows: torch.Tensor) -> None:
        """Gets the rows of a forward product, shape (num_rows, in_features), before `given` is asked for it."""

    def given(self, shape: tuple[int, int]) -> torch.Tensor | None:
        """Returns a forward product in place of the provider's; None to ask the provider.

        Args:
            shape: the product's shape, (num_rows, out_features of the group).
        """

    def keep(self, product: torch.Tensor) -> None:
        """Takes a product that the provider was asked for."""


class _Zeros(ProductSource):
    sends_nothing = True

    def given(self, shape: tuple[int, int]) -> torch.Tensor:
        """Returns zeros, so that only a model's own code runs."""
        return torch.zeros(shape)


PROVIDER = ProductSource()
"""The source of products outside `RunStates.products_from`."""
ZEROS: ProductSource = _Zeros()
"""A source that gives zeros for every product, and asks nobody."""


WARNING = (
    "a value is NaN or infinite: this model sends zeros from now on and gives zeros, so that its calls show nothing of "
    "that, and whatever comes of the run is worthless: after a stock Trainer, tenant_sdk.check_run(model) says so. "
    "A learning rate too high can do it, and so can a provider that answers wrongly, which verify= (--verify) would "
    "tell"
)
FAILED = (
    "a value was NaN or infinite, so nothing came of this run: the learning rate is too high, the adapter overflows, "
    "or the provider answers wrongly, which verify= (--verify) would tell"
)


class NotFiniteWarning(UserWarning):
    """Warns that a model continues with zeros after a value that was not finite, so that the result of the run is
    worthless."""


@dataclass(eq=False)
class RunOutcome:
    """Records whether a run met a value that is not finite, for all threads of the run.

    Attributes:
        sends_zeros: whether a value was not finite, so that the run continues with zeros; True is never reset.
    """

    sends_zeros: bool = False


@dataclass(eq=False)
class RunState:
    """Says how the calls of a run go on; it is what a layer asks before it sends anything.

    Attributes:
        may_stop: whether a value that is not finite raises an error at once.
        outcome: whether there was such a value. What is kept for one run only is kept under this object.
        source: where forward products come from, in one thread.
    """

    may_stop: bool
    outcome: RunOutcome = field(default_factory=RunOutcome)
    source: ProductSource = PROVIDER

    @property
    def sends_zeros(self) -> bool:
        """Returns whether the run continues with zeros."""
        return self.outcome.sends_zeros

    def not_finite(self) -> None:
        """Records a value that is not finite: the run continues with zeros, unless it may stop.

        Raises:
            NotFinite: the run may stop at once (`may_stop`).
        """
        if self.may_stop:
            raise NotFinite("a gradient, weight or logit is NaN or infinite: the run ended there")
        if not self.sends_zeros:
            self.outcome.sends_zeros = True
            warn_and_go_on(WARNING, NotFiniteWarning)

    def check(self, tensors: Iterable[torch.Tensor]) -> None:
        """Calls `not_finite` if one of these tensors contains a value that is not finite."""
        if not self.sends_zeros and not are_finite(tensors):
            self.not_finite()

    def finite_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows to send in place of rows that are not all finite: zeros, which the run sends from now on.

        Args:
            rows: shape (num_rows, request columns).

        Raises:
            NotFinite: the run may stop at once (`may_stop`).
        """
        self.not_finite()
        return torch.zeros_like(rows)

    def product_of(self, rows: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """Returns the product that the model gets: zeros if the run continues with zeros, otherwise `product`."""
        return torch.zeros_like(product) if self.sends_zeros else product

    def finish(self) -> None:
        """Checks, at the end of a run, that the run's result can be used.

        Raises:
            NotFinite: a value of the run was not finite.
        """
        if self.sends_zeros:
            raise NotFinite(FAILED)


def _go_ahead() -> None:
    pass


_State = TypeVar("_State", bound=RunState)


class RunStates:
    """Holds the run states of one loaded model: its own, and those of threads that answer for themselves."""

    def __init__(self, may_stop: bool) -> None:
        """Makes the model's own run state, which all threads without one of their own share.

        Args:
            may_stop: whether a value that is not finite raises an error at once; `own` may turn this on, not off.
        """
        self.before_call: Callable[[], None] = _go_ahead
        """A function that is called before each call. It may wait, for example for more urgent work."""
        self.padding = Padding()
        self._stops = may_stop
        self._shared = RunState(may_stop)
        self._local = threading.local()

    @property
    def current(self) -> RunState:
        """Returns the run state of the calling thread. Threads without their own, such as autograd's, get that of the
        model."""
        return getattr(self._local, "state", self._shared)

    @contextlib.contextmanager
    def own(self, may_stop: bool) -> Iterator[RunState]:
        """Returns a context in which this thread's calls have a run state of their own, for an answer of `generate`.

        Backward calls would not belong to it, because other threads, those of autograd, make them.

        Args:
            may_stop: whether a value that is not finite raises an error at once; with `verify` such a value always
                does.
        """
        with self.within(RunState(may_stop or self._stops)) as state:
            yield state

    @contextlib.contextmanager
    def products_from(self, source: ProductSource) -> Iterator[None]:
        """Returns a context in which this thread's forward products come from `source`; the run stays the same."""
        state = copy.copy(self.current)
        state.source = source
        with self.within(state):
            yield

    @contextlib.contextmanager
    def within(self, state: _State) -> Iterator[_State]:
        """Returns a context in which this thread's calls belong to `state`."""
        before = getattr(self._local, "state", None)
        self._local.state = state
        try:
            yield state
        finally:
            if before is None:
                del self._local.state
            else:
                self._local.state = before


NO_MODEL = RunStates(may_stop=True)
"""The run states of calls that belong to no model. There a value that is not finite raises an error at once."""


def run_states(model: Any) -> RunStates:
    """Returns the run states of a model with remote layers, with or without adapters; returns NO_MODEL for any other
    model."""
    for module in model.modules():
        found = getattr(module, "run_states", None)
        if isinstance(found, RunStates):
            return found
    return NO_MODEL


def check_run(model: Any) -> None:
    """Checks a run of a stock tool on a model of `TenantClient.load_model`; call it before you use the run's result.

    Raises:
        NotFinite: a value in a call was not finite, or a value in a trainable parameter is not finite, so that the
            result is worthless.
    """
    state = run_states(model).current
    state.check(trainable(model))
    state.finish()


def trainable(model: Any) -> Iterator[torch.Tensor]:
    """Yields the trainable parameters of a model, detached from autograd."""
    return (parameter.detach() for parameter in model.parameters() if parameter.requires_grad)


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Returns whether no value is NaN or infinite. All tensors together cost only one copy from the device."""
    held = [tensor for tensor in tensors if tensor.numel()]
    if not held:
        return True
    return bool(torch.stack([torch.isfinite(tensor).all().to(held[0].device) for tensor in held]).all())


class KeepFinite(TrainerCallback):  # type: ignore[misc]
    """Checks the gradients of every optimizer step, and keeps values that are not finite out of the adapter.

    Without this check, a NaN in the last reply of a step would reach the weights, and a checkpoint, before a call
    detects it. Some PEFT methods invert a matrix, and would raise an error for weights that are not finite.
    """

    def __init__(self, run: RunState) -> None:
        """Makes a check for one run, whose state records whether a value was not finite."""
        self._run = run

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Checks that the gradients are finite, and replaces them by zeros in a run that continues with zeros."""
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        self._run.check(gradients)
        if self._run.sends_zeros:
            for gradient in gradients:
                gradient.zero_()
