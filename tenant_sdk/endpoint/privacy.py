"""This module decides which numbers, such as logprobs, an endpoint may release to its clients, and explains it.

Some masks leave an error e in results: a logit is then x·W + e·W, for a row x and the weight W. A client that gets
logits and knows W can solve for x + e. The provider holds the masked row x + e + A·s, with the public matrix A. If it
learns x + e, it has A·s, and with it the secret s and every row that s has masked. What rounding takes from a masked
row
before it is sent is part of e here: it is larger, and as harmful to show.

Guarantees: under such a mask no number that the model computed leaves the endpoint, unless the operator asked for it,
and then only rounded to the operator's step. The masks `pad` and `shares` leave at most the rounding of rows whose pad
or share is used once, so that it tells nothing of other rows. `off` hides nothing anyway.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from noise.params import NOMINAL_SIGMA
from tenant_sdk.endpoint.errors import HttpError
from tenant_sdk.endpoint.settings import check_release_step, error_scale, steps_text

_LEAVE_NO_ERROR = frozenset({"pad", "shares", "off"})
_VECTOR_STEPS = 4
"""How many times coarser the numbers of an embedding are rounded than logprobs. A row has hundreds of them, whose error
is 0.0010 on SmolLM2-135M: rounded to 1, the 576 numbers of each of a block's 512 rows tell 2.6 bits by the same
formula."""
_MOST_LOSS = 9999.0
"""The loss that stands for infinity and NaN, which JSON cannot express."""
_LOSS_STEP = 0.05
"""The step to which losses of training steps are rounded under a mask that leaves an error. Whoever has chosen the data
knows the inputs. If each of 512 steps under one secret has a single label, their losses tell 3.5 bits by the same
formula, and fewer with more labels."""


@dataclass(frozen=True)
class Released:
    """Holds the rules for the release of numbers.

    Attributes:
        mask: the name of the mask in force.
        step: the step of rounding that the operator chose; None if nothing was chosen.
        sigma: the standard deviation of the lattice mask's error, with that of rounding, in units of encoded rows.
    """

    mask: str
    step: float | None
    sigma: float = NOMINAL_SIGMA

    def __post_init__(self) -> None:
        """Checks the step.

        Raises:
            ConfigurationError: the step is too small or too large for the mask's parameters.
        """
        if self.step is not None:
            check_release_step(self.step, self.sigma)

    @property
    def _loss_step(self) -> float:
        return _LOSS_STEP * error_scale(self.sigma)

    @property
    def is_exact(self) -> bool:
        """Returns whether numbers may be released as they are."""
        return self.mask in _LEAVE_NO_ERROR

    def check(self, param: str) -> None:
        """Refuses a request for numbers that may not be released.

        Raises:
            HttpError: the numbers may not be released.
        """
        if not self.is_exact and self.step is None:
            raise HttpError(
                403,
                f"{param} would show the error of the mask {self.mask} to whoever knows the inputs, and then its "
                "secret: start with --release-values STEP, which rounds them, with a STEP from "
                f"{steps_text(self.sigma)}, or with the mask pad or shares",
                "values_not_released",
                param,
            )

    def rounded(self, value: float) -> float:
        """Returns a number as it may be released: unchanged if `is_exact`, otherwise rounded to the step. Callers must
        have called `check`, which refuses the request if there is no step."""
        if self.is_exact or self.step is None:
            return value
        return round(value / self.step) * self.step if math.isfinite(value) else value

    def rounded_logprobs(self, values: torch.Tensor) -> torch.Tensor:
        """Returns logprobs in the form in which they may be released; see `rounded`. The likeliest tokens are chosen
        and ordered by these, since the order of unrounded ones would tell which side of a tie the error made larger."""
        return values if self.is_exact or self.step is None else (values / self.step).round() * self.step

    def rounded_vector(self, values: torch.Tensor) -> torch.Tensor:
        """Returns a request's vector in the form in which it may be released: unchanged, or rounded to `_VECTOR_STEPS`
        times the step."""
        if self.is_exact or self.step is None:
            return values
        step = _VECTOR_STEPS * self.step
        return (values / step).round() * step

    def rounded_loss(self, loss: float) -> float:
        """Returns the loss of a training step in the form in which it may be released. A loss is a mean of logprobs, or
        one logprob if the data has a single label."""
        if not math.isfinite(loss):
            return _MOST_LOSS
        if self.is_exact:
            return loss
        return round(round(loss / self._loss_step) * self._loss_step, 4)

    def explain(self) -> str:
        """Returns a line that tells the user which numbers are released."""
        if self.is_exact:
            return "logprobs and embeddings, as they are: this mask leaves no error in them"
        if self.step is None:
            return (
                f"texts, and losses of jobs rounded to {self._loss_step:g}; logprobs and embeddings are refused, since "
                "they would show the mask's error"
            )
        return (
            f"texts, losses of jobs rounded to {self._loss_step:g}, logprobs rounded to {self.step:g} and embeddings "
            f"rounded to {_VECTOR_STEPS * self.step:g} (--release-values): each one tells whoever knows the inputs a "
            "little about the mask's error, so release few of them and to nobody who works with the provider"
        )
