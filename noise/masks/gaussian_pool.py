"""This module implements a published scheme, which masks rows with one of K Gaussian vectors for each layer group and
direction. The provider itself computes each vector's effect (the product of vector and weight), so the scheme is NOT
private.

The scheme is from Symbiosis (Multi-Adapter Inference and Fine-Tuning), section on privacy. The tenant adds noise n to a
layer's input, the provider returns (x + n)W + b, and the tenant subtracts n_effect = nW. The provider has computed
n_effect once for each vector, without the bias. If K is above 1, each call uses another vector than the call before.
The pool of vectors is drawn afresh from time to time.

The scheme is implemented in full for comparison. It hides nothing from a provider that keeps a log, since the provider
saw every n. This module differs from the paper in one point: it scales the noise of a call by the root mean square of
the call's rows, which is a secret number. (The effect is scaled by the same number, since effects are linear.) The
reason is that gradients are many orders of magnitude smaller than activations. In float32, noise of a fixed size would
leave no precision for them.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from noise.masks.off import READABLE, check_finite
from noise.sampling import gaussian, other_index
from noise.scheme import EffectPath, GroupSpec, Masked, Message
from wire.errors import ConfigurationError
from wire.frame import Arithmetic, Call, Direction, Purpose
from wire.payload import RowsPayload

HIDES_NOTHING = (
    "mask='gaussian-pool' is not private: the provider computes the effect of every noise vector, so it has seen them "
    "all and can take them off. It is the published scheme, kept for comparison. lattice (the default), pad and shares "
    "hide rows"
)


_LARGEST = torch.finfo(torch.float32).max


class NotPrivateWarning(UserWarning):
    """Warns that the chosen mask hides nothing from a provider that keeps a log."""


@dataclass
class _Pool:
    noise: torch.Tensor
    effect: torch.Tensor
    last: int | None = None
    uses: int = 0


class GaussianPool:
    """Masks rows with K vectors per group and direction, in float arithmetic. It is not private; see the module's
    docstring."""

    name = "gaussian-pool"
    precision = "exact"
    arithmetic = Arithmetic.FLOAT

    def __init__(self, pool_size: int = 8, sigma: float = 1.0, renew_every: int = 1000) -> None:
        """Makes the scheme and warns that it is not private.

        Args:
            pool_size: K, the number of vectors per group and direction.
            sigma: the standard deviation of the noise in units of the rows' root mean square.
            renew_every: the number of calls of one group and direction after which their pool is drawn afresh.

        Raises:
            ConfigurationError: `pool_size` or `renew_every` is below 1, or `sigma` is not above 0.
        """
        if pool_size < 1 or renew_every < 1 or not sigma > 0:
            raise ConfigurationError("gaussian-pool needs pool_size >= 1, renew_every >= 1 and sigma > 0")
        warnings.warn(f"{READABLE}: {HIDES_NOTHING}", NotPrivateWarning, stacklevel=3)
        self.pool_size, self._sigma, self.renew_every = pool_size, sigma, renew_every
        self._pools: dict[tuple[int, Direction], _Pool] = {}
        self._lock = threading.Lock()
        self._effect_path: EffectPath | None = None

    def bind(self, effect_path: EffectPath) -> None:
        self._effect_path = effect_path

    def mask(self, group: GroupSpec, direction: Direction, rows: torch.Tensor) -> Masked:
        """Adds one pooled vector, scaled to the size of the rows, to every row of the call; see `MaskScheme.mask`."""
        check_finite(rows)
        noise, effect = self._pick(group, direction, rows.device)
        strength = self._sigma * _root_mean_square(rows)
        # The sum of two finite numbers may be infinite. An error here, after a vector was used, would show: the next
        # vectors would be drawn earlier.
        noisy = (rows + strength * noise).clamp_(-_LARGEST, _LARGEST)
        call = Call(group.id, direction, Arithmetic.FLOAT)

        def unmask(replies: Sequence[torch.Tensor]) -> torch.Tensor:
            return replies[0] - strength * effect

        return Masked((Message(call, RowsPayload(noisy)),), unmask)

    def _pick(self, group: GroupSpec, direction: Direction, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        key = (group.id, direction)
        with self._lock:
            pool = self._pools.get(key)
            if pool is None or pool.uses >= self.renew_every:
                pool = self._pools[key] = self._draw(group, direction, device)
            pool.last = other_index(self.pool_size, pool.last)
            pool.uses += 1
            # The model may have moved to another device since the pool was drawn.
            return pool.noise[pool.last].to(device), pool.effect[pool.last].to(device)

    def _draw(self, group: GroupSpec, direction: Direction, device: torch.device) -> _Pool:
        if self._effect_path is None:
            raise ConfigurationError("the mask was used before its client had a connection")
        request_cols, reply_cols = group.widths(direction)
        noise = gaussian(self.pool_size, request_cols)
        call = Call(group.id, direction, Arithmetic.FLOAT, Purpose.EFFECT)
        effect = self._effect_path(call, RowsPayload(noise), reply_cols).result()
        return _Pool(noise.to(device), effect.to(device))

    def describe(self) -> Mapping[str, str]:
        return {
            "scheme": f"gaussian-pool (K={self.pool_size}, sigma={self._sigma}, renewed every {self.renew_every})",
            "assumption": "none holds: the provider has seen every noise vector",
        }

    def close(self) -> None:
        with self._lock:
            self._pools.clear()


def _root_mean_square(rows: torch.Tensor) -> float:
    """Returns √(mean of squares), without overflow or underflow; 1.0 if all rows are zero or there are none."""
    if rows.numel() == 0:
        return 1.0
    norm = float(torch.linalg.vector_norm(rows, dtype=torch.float64))
    return norm / rows.numel() ** 0.5 if norm > 0 else 1.0
