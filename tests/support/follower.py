"""Runs rank 1 for the tests. Each line of standard input describes a team (the two ranks of one test) to join. For each
line, the process prints how its part in that team ended."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from provider.config import ProviderSettings
from provider.parallel import start
from provider.parallel.sharding import ColumnSlices
from wire.errors import VeilbaseError


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
