"""This module decides which numbers an endpoint may release, and says so.

Under a mask that leaves an error in results, a logit is x·W + e·W. Whoever gets logits and knows W solves for x + e.
The provider, who holds the masked row x + e + A·s, then has A·s, and with it the secret s and everything that it ever
masked.
Guarantees: under such a mask no number that was computed with the model leaves, unless the operator asked for it, and
then only rounded to the operator's step. The masks `pad` and `shares` leave no error, and `off` hides nothing anyhow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tenant_sdk.endpoint.errors import HttpError
from wire.errors import ConfigurationError

_LEAVE_NO_ERROR = frozenset({"pad", "shares", "off"})
_LEAST_STEP, _MOST_STEP = 0.25, 16.0
"""The steps that may be chosen. With the default parameters, the error moves logprobs of SmolLM2-135M by 0.0014
(standard deviation), which a step of 0.25 covers 180 times: a value tells log2(1 + 12·(0.0014/0.25)²)/2 bits about its
row's error, so twenty for each of a block's 512 rows tell 3 bits. Parameters with a larger error take a larger step."""


@dataclass(frozen=True)
class Released:
    """Holds what may be released.

    Attributes:
        mask: the name of the mask in force.
        step: the step of rounding that the operator chose; None if nothing was chosen.
    """

    mask: str
    step: float | None

    def __post_init__(self) -> None:
        """Checks the step.

        Raises:
            ConfigurationError: the step is outside 0.25 to 16.
        """
        if self.step is not None and not _LEAST_STEP <= self.step <= _MOST_STEP:
            raise ConfigurationError(f"--release-values is a step from {_LEAST_STEP:g} to {_MOST_STEP:g}")

    @property
    def is_exact(self) -> bool:
        """Returns whether numbers may be released as they are."""
        return self.mask in _LEAVE_NO_ERROR

    def check(self, param: str) -> None:
        """Refuses a request for numbers that may not be released.

        Raises:
            HttpError: they may not.
        """
        if not self.is_exact and self.step is None:
            raise HttpError(
                403,
                f"{param} would show the error of the mask {self.mask} to whoever knows the inputs, and then its "
                "secret: start with --release-values, which rounds them, or with the mask pad or shares",
                "values_not_released",
                param,
            )

    def rounded(self, value: float) -> float:
        """Returns a number as it may leave: unchanged, or rounded to the step."""
        if self.is_exact or self.step is None:
            return value
        return round(value / self.step) * self.step if math.isfinite(value) else value

    def explain(self) -> str:
        """Returns the line that says what is released."""
        if self.is_exact:
            return "logprobs, as they are: this mask leaves no error in them"
        if self.step is None:
            return "texts only: logprobs are refused, since they would show the mask's error"
        return (
            f"texts, and logprobs rounded to {self.step:g} (--release-values): each one tells whoever knows the inputs "
            "a little about the mask's error, so release few of them and to nobody who works with the provider"
        )
