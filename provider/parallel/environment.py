"""Reads the environment variables that torchrun sets.

This module does not import torch, since the import takes seconds and a mistake is to be reported at once.
"""

from __future__ import annotations

import os

from wire.errors import ConfigurationError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def rank_here(parallel: str) -> int:
    """Returns this process's rank (its number among torchrun's processes); 0 if `parallel` is `none`.

    Args:
        parallel: the value of `--parallel`.

    Raises:
        ConfigurationError: `parallel` is not `none`, but torchrun did not start this process; or `parallel` is `none`,
            but torchrun started several processes.
    """
    if parallel == "none":
        if os.environ.get("TORCHELASTIC_RUN_ID") and os.environ.get("WORLD_SIZE", "1") != "1":
            raise ConfigurationError("torchrun has started several processes: add --parallel tensor, or do without it")
        return 0
    if not all(os.environ.get(name) for name in _VARIABLES) or not os.environ["RANK"].isdecimal():
        raise ConfigurationError(
            f"--parallel {parallel} is several processes: start it with "
            f"torchrun --nproc-per-node 2 --master-port 29500 -m provider serve --parallel {parallel}"
        )
    return int(os.environ["RANK"])
