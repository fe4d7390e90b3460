"""Provides a reply that is already there, for tests of code that waits for replies."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Answered:
    """Stands in for a pending request whose reply has already arrived."""

    reply: torch.Tensor

    def result(self) -> torch.Tensor:
        """Returns the reply, as a pending request does after its reply has arrived."""
        return self.reply
