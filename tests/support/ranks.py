"""Two real processes on loopback: this one is rank 0, the other runs `follower`. The store is this process's, as it is
torchrun's when that starts the ranks, so no port has to be chosen beforehand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from provider.config import ProviderSettings
from provider.model.load import load, resolve
from provider.model.weights import PreparedModel, serve_model
from provider.parallel import start
from provider.parallel.dispatch import Dispatcher
from provider.parallel.environment import rank_here
from tests.support.repository import ROOT

TIMEOUT_S = 30.0
"""Seconds that a rank waits for the other one; a test of a lost rank waits as long."""
ANSWER_S = 60.0
"""Seconds until the process of rank 1 has ended."""


@dataclass
class Team:
    """Rank 0's side of two ranks.

    Attributes:
        served_model: makes products by both.
        whole: all weights, to compare with.
    """

    served_model: start.ParallelModel
    whole: PreparedModel

    @property
    def dispatcher(self) -> Dispatcher:
        """What tells rank 1 of a product."""
        return self.served_model._dispatcher


class Follower:
    """Runs rank 1, one process for one team after the other."""

    def __init__(self, log: Path) -> None:
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.follower"],
                cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
            )  # fmt: skip

    def _environment(self, rank: int) -> dict[str, str]:
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }

    def join(
        self, monkeypatch: pytest.MonkeyPatch, parallel: Any, model: Path, weights: Any = "int8",
        timeout_s: float = TIMEOUT_S, broken_group: int | None = None, other_model: Path | None = None,
    ) -> Team:  # fmt: skip
        """Has both ranks meet and take their shares; `other_model` is what rank 1 has by mistake."""
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        settings = {"parallel": parallel, "weights": weights, "parallel_timeout_s": timeout_s}
        team = {
            "environment": self._environment(1),
            "settings": settings | {"model": str(other_model or model)},
            "broken_group": broken_group,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(team) + "\n")
        self.process.stdin.flush()
        for name, value in self._environment(0).items():
            monkeypatch.setenv(name, value)
        assert rank_here(parallel) == 0
        ranks = start.meet(timeout_s)
        whole = serve_model(load(resolve(str(model))), weights)
        served_model = start.lead(ProviderSettings(**settings, model=str(model)), ranks, whole)
        return Team(served_model, whole)

    def answer(self) -> str:
        """Returns how the last team ended for rank 1."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.communicate(timeout=ANSWER_S)
