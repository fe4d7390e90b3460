"""Noise from the operating system's CSPRNG. Never torch's or numpy's generators: they can be predicted or replayed."""

from __future__ import annotations

import math
import os
import secrets

import torch


def gaussian(rows: int, features: int) -> torch.Tensor:
    """Standard normal numbers by the Box-Muller transform of os.urandom.

    Returns:
        float32, shape (rows, features), CPU.

    Source: Box and Muller, 1958. Uniforms have 53 bits; u in (0, 1], so the logarithm is finite.
    """
    count = rows * features
    half = (count + 1) // 2
    words = torch.frombuffer(bytearray(os.urandom(16 * half)), dtype=torch.int64) if half else torch.empty(0)
    uniform = ((words.to(torch.int64) & ((1 << 53) - 1)) + 1).to(torch.float64) * 2.0**-53
    radius = torch.sqrt(-2.0 * torch.log(uniform[:half]))
    angle = 2.0 * math.pi * uniform[half:]
    pair = torch.cat((radius * torch.cos(angle), radius * torch.sin(angle)))
    return pair[:count].to(torch.float32).view(rows, features)


def other_index(count: int, last: int | None) -> int:
    """A uniform index below `count` that is not `last` (where there is a choice)."""
    if last is None or count < 2:
        return secrets.randbelow(count)
    drawn = secrets.randbelow(count - 1)
    return drawn + (drawn >= last)
