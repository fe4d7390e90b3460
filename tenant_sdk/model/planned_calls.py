"""Decides what a loaded model does when a value is not finite: it stops, or it goes on with zeros to the planned end.

Without `verify` a provider may answer so that a number overflows, and where that happens depends on the tenant's data:
a run that stopped there would tell the provider about them (`attacks.programs.overflow`). After the first value that is
not finite, the model therefore still makes the calls that it was going to make: each carries zeros under a fresh mask,
and its result is taken as zeros.

Guarantees: the calls, their order and their numbers of rows do not depend on whether a value was finite; after one was
not, that model sends nothing of the tenant's any more, masked or not; one warning says so. With `verify` none of this
is needed: a provider that lies fails the check first, and a value that is not finite is an error at once. Does not
guarantee anything about time, nor about code of the user's own that looks at the values, such as a callback that ends a
run early.

The state belongs to one loaded model, and so to one run of `finetune`; an answer of `generate` has its own. A later run
of the same client starts with a fresh state: a client that refused further work would show by its silence what the run
has hidden.
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
    """A model goes on with zeros after a value that was not finite; the run that it belongs to is lost."""


@dataclass(eq=False)
class Course:
    """The state of one run.

    Attributes:
        may_stop: whether a value that is not finite is an error at once.
        sends_zeros: whether a value was not finite. Once True, it stays True.
    """

    may_stop: bool
    sends_zeros: bool = False

    def not_finite(self) -> None:
        """Records a value that is not finite: the run goes on with zeros.

        Raises:
            NotFinite: this run may stop at once.
        """
        if self.may_stop:
            raise NotFinite("a gradient, weight or logit is NaN or infinite: the run ended there")
        if not self.sends_zeros:
            self.sends_zeros = True
            warn_and_go_on(WARNING, NotFiniteWarning)

    def check(self, tensors: Iterable[torch.Tensor]) -> None:
        """Calls `not_finite` when one of these tensors holds a value that is not finite."""
        if not self.sends_zeros and not are_finite(tensors):
            self.not_finite()

    def finite_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns what is sent in place of rows that are not all finite: as many rows of zeros, from now on.

        Args:
            rows: shape (num_rows, request columns).

        Raises:
            NotFinite: this run may stop at once.
        """
        self.not_finite()
        return torch.zeros_like(rows)

    def product_of(self, rows: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """Returns what the model is given as the product of these rows: zeros once a value was not finite."""
        return torch.zeros_like(product) if self.sends_zeros else product

    def finish(self) -> None:
        """Ends the run.

        Raises:
            NotFinite: a value was not finite.
        """
        if self.sends_zeros:
            raise NotFinite(FAILED)


_OneCourse = TypeVar("_OneCourse", bound=Course)


class PlannedCalls:
    """The courses of one loaded model; it decides to which of them a call belongs."""

    def __init__(self, may_stop: bool) -> None:
        """Args: may_stop: what applies to runs that do not choose for themselves."""
        self._stops = may_stop
        self._shared = Course(may_stop)
        self._local = threading.local()

    @property
    def course(self) -> Course:
        """Returns the calling thread's own course if it has one; autograd's threads and all others share the
        model's."""
        return getattr(self._local, "course", self._shared)

    @contextlib.contextmanager
    def own_course(self, may_stop: bool) -> Iterator[Course]:
        """Gives the calls that this thread makes inside a course of their own, as for an answer, which has no backward
        calls.

        Args:
            may_stop: whether a value that is not finite is an error at once; with `verify` it is in any case.
        """
        with self.on_course(Course(may_stop or self._stops)) as course:
            yield course

    @contextlib.contextmanager
    def on_course(self, course: _OneCourse) -> Iterator[_OneCourse]:
        """Gives the calls that this thread makes inside this course."""
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
"""Applies to calls that belong to no model: a value that is not finite is an error at once."""


def planned_calls(model: Any) -> PlannedCalls:
    """Returns those of a model of `TenantClient.load_model`, adapted or not; AT_ONCE for one without remote layers."""
    for module in model.modules():
        found = getattr(module, "planned_calls", None)
        if isinstance(found, PlannedCalls):
            return found
    return AT_ONCE


def check_run(model: Any) -> None:
    """Ends a run of a stock tool over `TenantClient.load_model`: call it before you use the run's result.

    Raises:
        NotFinite: a value in a call was not finite, or one in a trainable parameter is not: the training result is
            worthless.
    """
    course = planned_calls(model).course
    course.check(trainable(model))
    course.finish()


def trainable(model: Any) -> Iterator[torch.Tensor]:
    """Yields the parameters that a run changes."""
    return (parameter.detach() for parameter in model.parameters() if parameter.requires_grad)


def are_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no value is NaN or infinite; the device is read once for all tensors."""
    held = [tensor for tensor in tensors if tensor.numel()]
    if not held:
        return True
    return bool(torch.stack([torch.isfinite(tensor).all().to(held[0].device) for tensor in held]).all())


class KeepFinite(TrainerCallback):  # type: ignore[misc]
    """Checks the gradients of every optimizer step, and keeps values that are not finite out of the adapter.

    Without it, a NaN that came with the very last reply of a step would be in the weights, and in a checkpoint, before
    any call shows it; and weights that are not finite make some PEFT methods raise where they invert a matrix.
    """

    def __init__(self, course: Course) -> None:
        """Args: course: the course of the run."""
        self._course = course

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Replaces the gradients by zeros in a run that goes on with zeros."""
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        self._course.check(gradients)
        if self._course.sends_zeros:
            for gradient in gradients:
                gradient.zero_()


_Made = TypeVar("_Made")


def masked_on_course(mask: Callable[[torch.Tensor], _Made], rows: torch.Tensor, course: Course) -> _Made:
    """Returns what `mask` makes of the rows or, where they are not finite, of what the course sends in their place.

    Args:
        mask: makes masked messages of rows; where it raises `NotFinite` it has used no mask.
        rows: the rows of one call.
        course: the course that the call belongs to.
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
