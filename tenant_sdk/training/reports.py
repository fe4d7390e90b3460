"""This module writes a run's losses and metrics for TensorBoard, to files on this machine.

Guarantees: nothing is sent anywhere. Reporters that send losses to a service over a network are refused: what a run
logs follows from the tenant's data. The library `tensorboard` is optional (the extra `tensorboard`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.integrations import TensorBoardCallback

from noise.disk.private_files import make_private_folder
from wire.errors import ConfigurationError

TENSORBOARD = "tensorboard"


def check_report_to(report_to: str | None) -> None:
    """Checks the option `report_to` before anything is sent.

    Raises:
        ConfigurationError: the value is neither None nor `tensorboard`, or tensorboard is not installed.
    """
    if report_to is None:
        return
    if report_to != TENSORBOARD:
        raise ConfigurationError(
            f"report_to must be {TENSORBOARD!r} or None, got {report_to!r}: others send losses over a network"
        )
    _writer_class()


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigurationError("report_to='tensorboard' needs it: pip install 'veilbase[tensorboard]'") from None
    return SummaryWriter


@contextmanager
def reports(trainer: Any, report_to: str | None, folder: Path) -> Iterator[None]:
    """Makes a trainer write its losses and metrics to TensorBoard's files inside the context.

    Args:
        trainer: a Trainer.
        report_to: `tensorboard`, or None for no report.
        folder: the folder of the files, which is made with mode 0700 if it is not there.
    """
    if report_to is None:
        yield
        return
    make_private_folder(folder)
    writer = _writer_class()(log_dir=str(folder))
    trainer.add_callback(TensorBoardCallback(tb_writer=writer))
    try:
        yield
    finally:
        writer.close()  # Trainer does not tell its callbacks that a run failed
