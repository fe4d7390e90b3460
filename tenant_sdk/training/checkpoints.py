"""Checkpoints of one run; and adapters, which are written as a whole or not at all.

A checkpoint counts only once its marker is there, so one that a full disk or a crash cut short is never resumed from.
It counts only for the run that wrote it, which is identified by a fingerprint of data, adapter, settings and base
weights. A run that met a value that is not finite still writes its checkpoints, so that a save takes its time as usual,
and marks them as spoilt: no checkpoint of that run is resumed from, not even an earlier one, because the step at which
a run begins again can be seen. New folders have mode 0700 and their files 0600, whatever the umask; a new adapter takes
over the mode of the one that it replaces. Files of a checkpoint get their mode when it is complete; until then only its
folder's mode keeps other users out.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from noise.disk.private_files import FILE_MODE, make_private, make_private_folder, take_over_rights, write_private
from wire.errors import ConfigurationError

_MARKER = "complete"
_SPOILT = "not-finite"
"""Name of the file that marks a checkpoint, or the folder of a run, that went on with zeros after a value that was not
finite."""


def fingerprint(
    rows: list[dict[str, list[int]]], peft_config: dict[str, Any], settings: Any, digests: list[str]
) -> str:
    """Returns SHA-256 of everything that makes two runs the same run."""
    parts = (rows, _plain(peft_config), asdict(settings), digests)
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Turns sets into sorted lists: their order differs from one process to the next."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset | list | tuple):
        items = [_plain(item) for item in value]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    return value


class Checkpoints:
    """The folder of one run's checkpoints."""

    def __init__(self, folder: Path) -> None:
        """Args: folder: is made when it is needed, and removed by `discard`."""
        self.folder = folder

    def open(self, run: str, resume: bool | None) -> Path | None:
        """Prepares the folder for a run.

        Args:
            run: the run's fingerprint.
            resume: None takes a checkpoint of the same run if there is one; True requires one; False starts anew.

        Returns:
            The checkpoint to go on from, or None.

        Raises:
            ConfigurationError: a checkpoint is required and there is none, it belongs to another run, or a value of the
                run was not finite.
        """
        if resume is False:
            self.discard()
        if next(self.folder.glob(f"**/{_SPOILT}"), None) is not None:
            raise ConfigurationError(
                f"{self.folder} holds checkpoints of a run that met a NaN or infinite value: none of them is resumed "
                "from; pass resume=False (--no-resume) to start over"
            )
        latest, owner = self._latest(), self._owner()
        if latest is not None and owner != run:
            raise ConfigurationError(
                f"{self.folder} holds checkpoints of a run with other data or settings: "
                "pass resume=False (--no-resume) to start over, or choose another output_dir (--output)"
            )
        if latest is None and resume:
            raise ConfigurationError(f"there is no complete checkpoint in {self.folder} to resume from")
        try:
            make_private_folder(self.folder)
            write_private(self.folder / "run.json", json.dumps({"fingerprint": run}))
        except OSError as exc:
            raise ConfigurationError(f"{self.folder} cannot be written: {exc.strerror}") from exc
        return latest

    def _owner(self) -> str | None:
        try:
            return str(json.loads((self.folder / "run.json").read_text(encoding="utf-8"))["fingerprint"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _latest(self) -> Path | None:
        found = [path.parent for path in self.folder.glob(f"checkpoint-*/{_MARKER}")]
        return max(found, key=lambda path: int(path.name.rpartition("-")[2]), default=None)

    def discard(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def spoil(self) -> None:
        """Marks all checkpoints as spoilt: the run ended without an adapter, because a value was not finite."""
        (self.folder / _SPOILT).touch(FILE_MODE)

    def callback(self, is_sound: Callable[[], bool] = lambda: True) -> TrainerCallback:
        """Marks each checkpoint after Trainer has written it.

        Args:
            is_sound: whether what was written is worth resuming from; if not, it is marked as spoilt.
        """
        return _Mark(self.folder, is_sound)


class _Mark(TrainerCallback):  # type: ignore[misc]
    def __init__(self, folder: Path, is_sound: Callable[[], bool]) -> None:
        self._folder, self._is_sound = folder, is_sound

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        checkpoint = self._folder / f"checkpoint-{state.global_step}"
        for path in checkpoint.iterdir():
            path.chmod(FILE_MODE)
            with path.open("rb") as written:
                os.fsync(written.fileno())
        (checkpoint / (_MARKER if self._is_sound() else _SPOILT)).touch(FILE_MODE)


def check_replaceable(output_dir: Path) -> None:
    """Refuses, before any work, an output folder that holds anything but an adapter: it would be replaced as a whole.

    Raises:
        ConfigurationError: the path is a file, or a folder with other things in it.
    """
    if output_dir.is_dir():
        names = {path.name for path in output_dir.iterdir()}
        if not names or ("adapter_config.json" in names and not any((output_dir / name).is_dir() for name in names)):
            return
    elif not output_dir.exists():
        return
    raise ConfigurationError(f"{output_dir} holds something other than an adapter: name a folder of its own")


def save_adapter(model: Any, output_dir: Path) -> None:
    """Writes PEFT's files beside the target, then moves them to it; an older adapter there is replaced.

    A new folder takes over the mode of the folder that it replaces, and each file the mode of the older file of its
    name.

    Args:
        model: a PeftModel.
        output_dir: the folder that becomes the adapter's.

    Raises:
        OSError: the disk is full or permission is missing.
    """
    make_private_folder(output_dir.parent)
    with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=f".{output_dir.name}-") as scratch:
        fresh, old = Path(scratch) / "new", Path(scratch) / "old"
        model.save_pretrained(fresh, save_embedding_layers=False)
        make_private(fresh)  # until here the scratch folder, of mode 0700, kept other users out
        replaced = output_dir.exists()
        if replaced:
            take_over_rights(output_dir, fresh)
            output_dir.rename(old)
        try:
            fresh.rename(output_dir)
        except BaseException:
            if replaced:
                old.rename(output_dir)
            raise
