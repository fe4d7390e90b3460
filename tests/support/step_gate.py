"""Holds an engine in the middle of a step until the test lets it go on."""

from __future__ import annotations

import threading

import torch

TIMEOUT_S = 60.0
"""The time after which a test of an engine gives up."""


class Gate:
    """A hook that holds the engine in the middle of a step until the test opens it."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.reached.set()
        assert self.open.wait(TIMEOUT_S)
        return scores
