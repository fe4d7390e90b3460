"""Runs two real ranks on loopback: this process is rank 0, and another process runs this file as rank 1. This process
also holds the store through which the ranks meet, as torchrun does, so that no port has to be chosen beforehand.

In the process of rank 1, each line of standard input describes a team (the two ranks of one test) to join. For each
line, it prints how its part in that team ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from provider.config import ProviderSettings
from provider.model.load import load, resolve
from provider.model.weights import PreparedModel, serve_model
from provider.parallel import start
from provider.parallel.dispatch import Dispatcher
from provider.parallel.environment import rank_here
from provider.parallel.sharding import ColumnSlices
from tests.support.repository import ROOT
from wire.errors import VeilbaseError

TIMEOUT_S = 30.0
"""The seconds that a rank waits for the other one. A test of a lost rank takes this long."""
ANSWER_S = 60.0
"""The most seconds until the process of rank 1 has ended."""


@dataclass
class Team:
    """Holds rank 0's side of a pair of ranks.

    Attributes:
        served_model: computes each product with both ranks.
        whole: all weights, for comparison.
    """

    served_model: start.ParallelModel
    whole: PreparedModel

    @property
    def dispatcher(self) -> Dispatcher:
        """Returns the object that sends commands to rank 1."""
        return self.served_model._dispatcher


class Follower:
    """Runs rank 1 in one process, which joins one team (pair of ranks) after the other."""

    def __init__(self, log: Path) -> None:
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.ranks"],
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
        """Connects both ranks and gives each its share of the weights. `other_model` is a different model, which rank 1
        loads by mistake."""
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
        """Returns the text with which rank 1 says how the last team ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        """Ends the process of rank 1."""
        self.process.kill()
        self.process.communicate(timeout=ANSWER_S)


def join(team: dict[str, Any]) -> str:
    """Computes for rank 0 until the team ends, and returns a text that says how it ended."""
    os.environ.update(team["environment"])
    share = ColumnSlices.share

    def broken(self: ColumnSlices, call: Any, rows: Any) -> torch.Tensor:
        if call.group == team["broken_group"]:
            raise MemoryError
        return share(self, call, rows)

    ColumnSlices.share = broken  # type: ignore[method-assign]
    try:
        start.help_out(ProviderSettings(**team["settings"]))
    except VeilbaseError as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        ColumnSlices.share = share  # type: ignore[method-assign]
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return "stopped"


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(join(json.loads(line)), flush=True)
