"""Stops an engine in the middle of a step until the test lets it continue."""

from __future__ import annotations

import threading

import torch

TIMEOUT_S = 60.0
"""The seconds after which a test of an engine gives up."""


class Gate:
    """Acts as a logits hook that stops the engine in the middle of a step until the test opens the gate."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.reached.set()
        assert self.open.wait(TIMEOUT_S)
        return scores
