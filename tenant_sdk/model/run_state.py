"""This module holds the state of a model's run: where the products of remote layers come from, and what the model does
after a value that is not finite.

Usually the provider computes every product. Inside the context `products_from`, the forward products of a thread come
from another source. A source can ask the provider and also store the product, return a stored product, or return zeros.
With the source `zeros` a model runs without any call.

Without `verify`, a lying provider may send replies that make a number overflow. Whether and when it overflows depends
on the tenant's data, so a run that stopped at the overflow would tell the provider about the data
(attacks/programs/overflow.py). After the first value that is not finite, the model therefore still makes all planned
calls: each call sends zeros under a fresh mask, and its result is replaced by zeros.

A `Course` records this for one loaded model, and so for one run of `finetune`; each answer of `generate` has a course
of its own. A later run of the same client starts with a new course: a client that refused further work would show the
provider that a value was not finite.

Guarantees:
- a source belongs to one thread and ends with its context. Backward products always come from the provider;
- the calls, their order and their numbers of rows do not depend on whether a value was finite. After a value that is
  not finite, the model sends no row of the tenant any more, masked or not, and one warning says so. There are two
  exceptions, in which such a value raises an error at once: with `verify` a provider that lies fails the check first,
  and an answer of `generate` without `fixed_length` shows its length in any case.

Not guaranteed: anything about time, or about the user's own code that reads the values, such as a callback that ends a
run early.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import TrainerCallback

from tenant_sdk.warn import warn_and_go_on
from wire.errors import NotFinite

ProductSource = Callable[[Callable[[], torch.Tensor], tuple[int, int]], torch.Tensor]
"""A function that takes (a function that asks the provider, the product's shape) and returns the product."""

_local = threading.local()


@contextlib.contextmanager
def products_from(source: ProductSource | None) -> Iterator[None]:
    """Makes this thread take forward products from `source` inside the context, or from the provider if it is None."""
    before = getattr(_local, "source", None)
    _local.source = source
    try:
        yield
    finally:
        _local.source = before


def product(ask: Callable[[], torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
    """Returns a forward product from this thread's source.

    Args:
        ask: a function that asks the provider for the product.
        shape: the product's shape, (num_rows, out_features of the group).
    """
    source: ProductSource | None = getattr(_local, "source", None)
    return ask() if source is None else source(ask, shape)


def sends_nothing() -> bool:
    """Returns whether this thread's forward products are zeros, so that it must not ask the provider for others."""
    return getattr(_local, "source", None) is zeros


def zeros(ask: Callable[[], torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
    """Returns zeros in place of a product, without asking the provider. With this source only a model's own code
    runs."""
    return torch.zeros(shape)


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
class Course:
    """Records whether a run met a value that is not finite.

    Attributes:
        may_stop: whether a value that is not finite raises an error at once.
        sends_zeros: whether a value was not finite, so that the run continues with zeros; True is never reset.
    """

    may_stop: bool
    sends_zeros: bool = False

    def not_finite(self) -> None:
        """Records a value that is not finite: the run continues with zeros, unless it may stop.

        Raises:
            NotFinite: the run may stop at once (`may_stop`).
        """
        if self.may_stop:
            raise NotFinite("a gradient, weight or logit is NaN or infinite: the run ended there")
        if not self.sends_zeros:
            self.sends_zeros = True
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


_OneCourse = TypeVar("_OneCourse", bound=Course)


class PlannedCalls:
    """Holds the courses (run states) of one loaded model, and decides to which course a call belongs."""

    def __init__(self, may_stop: bool) -> None:
        """Makes the model's own course (a run state), which all threads without a course of their own share.

        Args:
            may_stop: whether a value that is not finite raises an error at once; `own_course` may turn this on, not
                off.
        """
        self.before_call: Callable[[], None] = _go_ahead
        """A function that `RemoteExecutor.run` calls before each call. It may wait, for example for more urgent
        work."""
        self._stops = may_stop
        self._shared = Course(may_stop)
        self._local = threading.local()

    @property
    def course(self) -> Course:
        """Returns the course (run state) of the calling thread. Threads without their own course, such as autograd's,
        get that of the model."""
        return getattr(self._local, "course", self._shared)

    @contextlib.contextmanager
    def own_course(self, may_stop: bool) -> Iterator[Course]:
        """Returns a context in which this thread's calls have a course (a run state) of their own, for an answer of
        `generate`.

        Backward calls would not belong to this course, because other threads, those of autograd, make them.

        Args:
            may_stop: whether a value that is not finite raises an error at once; with `verify` such a value always
                does.
        """
        with self.on_course(Course(may_stop or self._stops)) as course:
            yield course

    @contextlib.contextmanager
    def on_course(self, course: _OneCourse) -> Iterator[_OneCourse]:
        """Returns a context in which this thread's calls belong to `course`, which is the state of a run."""
        before = getattr(self._local, "course", None)
        self._local.course = course
        try:
            yield course
        finally:
            if before is None:
                del self._local.course
            else:
                self._local.course = before


AT_ONCE = PlannedCalls(may_stop=True)
"""The courses (run states) of calls that belong to no model. There a value that is not finite raises an error at
once."""


def planned_calls(model: Any) -> PlannedCalls:
    """Returns the courses (run states) of a model with remote layers, with or without adapters; returns AT_ONCE for any
    other model."""
    for module in model.modules():
        found = getattr(module, "planned_calls", None)
        if isinstance(found, PlannedCalls):
            return found
    return AT_ONCE


def check_run(model: Any) -> None:
    """Checks a run of a stock tool on a model of `TenantClient.load_model`; call it before you use the run's result.

    Raises:
        NotFinite: a value in a call was not finite, or a value in a trainable parameter is not finite, so that the
            result is worthless.
    """
    course = planned_calls(model).course
    course.check(trainable(model))
    course.finish()


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

    def __init__(self, course: Course) -> None:
        """Makes a check for one run.

        Args:
            course: the run's state, which records whether a value was not finite.
        """
        self._course = course

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Checks that the gradients are finite, and replaces them by zeros in a run that continues with zeros."""
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        self._course.check(gradients)
        if self._course.sends_zeros:
            for gradient in gradients:
                gradient.zero_()


_Made = TypeVar("_Made")


def masked_on_course(mask: Callable[[torch.Tensor], _Made], rows: torch.Tensor, course: Course) -> _Made:
    """Returns the masked messages of a call's rows, or of the rows that the course (the run's state) sends in place of
    rows that are not finite.

    Args:
        mask: a function that masks rows; if it raises `NotFinite`, it has used no mask slot (one row of a mask).
        rows: the rows of one call, shape (num_rows, features).
        course: the course that the call belongs to.

    Raises:
        NotFinite: the rows are not all finite, and the course may stop.
    """
    if course.sends_zeros:
        return mask(torch.zeros_like(rows))
    try:
        return mask(rows)
    except NotFinite:
        if course.may_stop:
            raise
        rows = course.finite_rows(rows)
    return mask(rows)
