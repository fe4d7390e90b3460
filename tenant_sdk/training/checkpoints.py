"""This module keeps the checkpoints of a training run, and writes adapters completely or not at all.

Guarantees: a checkpoint is used only if its marker file exists, which is written last: an incomplete checkpoint, after
a full disk or a crash, is never resumed from. A checkpoint is used only for the run that wrote it. A fingerprint of
data, adapter, settings and base weights identifies the run. A run that met a value that is not finite still writes
checkpoints, so that saving takes the usual time, and marks them as spoilt. No checkpoint of such a run is resumed from,
not even an earlier one, because the provider would see the step from which the run continues. Only the same call of
`finetune`, after a wait for the provider, goes on from a spoilt checkpoint, with zeros.

New folders have mode 0700 and their files mode 0600, whatever the umask. A new adapter gets the mode of the adapter
that it replaces. The files of a checkpoint get their mode when the checkpoint is complete; before that, only the mode
of the folder keeps other users out.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noise.disk.private_files import FILE_MODE, make_private, make_private_folder, take_over_rights, write_private
from runtime.files import nearest_there, why_not_writable
from tenant_sdk.training.run_identity import RunIdentity
from wire.errors import ConfigurationError

if TYPE_CHECKING:
    from transformers import TrainerCallback

_MARKER = "complete"
_SPOILT = "not-finite"
"""The name of the file that marks a checkpoint, or the folder of all checkpoints, of a run that continued with zeros
after a value that was not finite."""


_LONGEST_NAME_BYTES = 255
"""The most bytes of a file's name on Linux's file systems."""
_LONGEST_PATH_BYTES = 3800
"""The most bytes of a path, below Linux's 4096, so that there is room for the names of files in the folder."""


def checkpoints_folder(output_dir: Path) -> Path:
    """Returns the folder of a run's checkpoints. It is hidden, since the folder around it may be one of adapters."""
    return output_dir.with_name(f".{output_dir.name}.checkpoints")


def logs_folder(output_dir: Path) -> Path:
    """Returns the folder of a run's reports, unless the user names another one."""
    return output_dir.with_name(f".{output_dir.name}.logs")


def step_of(checkpoint: Path | None) -> int:
    """Returns the number of optimizer steps before a checkpoint was written; 0 for None, the beginning of a run."""
    return 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])


class Checkpoints:
    """Opens, marks and removes the checkpoints of one run, which are in one folder."""

    def __init__(self, folder: Path) -> None:
        """Uses the checkpoints in `folder`, which `open` makes and `discard` removes."""
        self.folder = folder

    def open(self, run: str, resume: bool | None, identity: RunIdentity | None = None) -> Path | None:
        """Makes the folder if needed, and finds the checkpoint to resume from.

        Args:
            run: the run's fingerprint.
            resume: None uses a checkpoint of the same run if there is one; True requires one; False removes all
                checkpoints.
            identity: what identifies the run, for an error about another one.

        Returns:
            The folder of the checkpoint to resume from, or None for a run that starts at the beginning.

        Raises:
            ConfigurationError: there is no checkpoint and one is required, the checkpoints belong to another run, a
                value of the run was not finite, or the folder cannot be written.
        """
        identity = identity or RunIdentity()
        if resume is False:
            self.discard()
        self.check(resume, identity)
        latest, owner = self._latest(), self._owner().get("fingerprint")
        if latest is not None and owner != run:
            raise self._of_another_run("other data or settings")
        content = {"fingerprint": run, **identity.to_dict()}
        try:
            make_private_folder(self.folder)
            write_private(self.folder / "run.json", json.dumps(content))
        except OSError as exc:
            raise ConfigurationError(f"{self.folder} cannot be written: {exc.strerror}") from exc
        return latest

    def check(self, resume: bool | None, identity: RunIdentity) -> None:
        """Checks that a run could go on from what is in the folder, as far as it is known what identifies the run. It
        changes nothing.

        Raises:
            ConfigurationError: as `open` does; the text names what is another.
        """
        if resume is False:
            return
        if next(self.folder.glob(f"**/{_SPOILT}"), None) is not None:
            raise ConfigurationError(
                f"{self.folder} holds checkpoints of a run that met a NaN or infinite value: none of them is resumed "
                "from; pass resume=False (--no-resume) to start over"
            )
        if self._latest() is not None:
            if differences := RunIdentity.read(self._owner()).differences(identity, "theirs"):
                raise self._of_another_run(f"other data or settings ({differences})")
        elif resume:
            raise ConfigurationError(f"there is no complete checkpoint in {self.folder} to resume from")

    def _of_another_run(self, what: str) -> ConfigurationError:
        return ConfigurationError(
            f"{self.folder} holds checkpoints of a run with {what}: pass resume=False (--no-resume) to start over, or "
            "choose another output_dir (--output)"
        )

    def newest(self) -> tuple[Path | None, bool]:
        """Returns the newest checkpoint, which may be spoilt, and whether it is; (None, False) if there is none.

        This is only for the call of `finetune` that wrote these checkpoints, which must go on from the same step
        whatever its values were.
        """
        found = [(path.parent, mark == _SPOILT) for mark in (_MARKER, _SPOILT) for path in self._marked(mark)]
        return max(found, key=lambda each: step_of(each[0]), default=(None, False))

    def _marked(self, mark: str) -> Iterator[Path]:
        return self.folder.glob(f"checkpoint-*/{mark}")

    def _owner(self) -> dict[str, Any]:
        """Returns what run.json says of the run that wrote the checkpoints; nothing if it cannot be read."""
        try:
            found = json.loads((self.folder / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            found = None
        return found if isinstance(found, dict) else {}

    def _latest(self) -> Path | None:
        return max((path.parent for path in self._marked(_MARKER)), key=step_of, default=None)

    def discard(self) -> None:
        """Removes the folder with all checkpoints."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def spoil(self) -> None:
        """Marks all checkpoints as spoilt, because a value of the run was not finite."""
        (self.folder / _SPOILT).touch(FILE_MODE)

    def callback(self, is_sound: Callable[[], bool] = lambda: True) -> TrainerCallback:
        """Returns a callback that marks each checkpoint as complete or spoilt after Trainer has written it.

        Args:
            is_sound: a function that returns False if a value of the run was not finite; the mark is then "spoilt".
        """
        from transformers import TrainerCallback

        class Mark(_Mark, TrainerCallback):  # type: ignore[misc]
            """Is `_Mark` as Trainer takes it."""

        return Mark(self.folder, is_sound)


class _Mark:
    """Is the part of the callback that does not need transformers, so that this module is imported at once."""

    def __init__(self, folder: Path, is_sound: Callable[[], bool]) -> None:
        self._folder, self._is_sound = folder, is_sound

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        checkpoint = self._folder / f"checkpoint-{state.global_step}"
        for path in checkpoint.iterdir():
            path.chmod(FILE_MODE)
            with path.open("rb") as written:
                os.fsync(written.fileno())
        (checkpoint / (_MARKER if self._is_sound() else _SPOILT)).touch(FILE_MODE)


class SavesAdapter:
    """Is a mixin of transformers' Trainer, whose checkpoints then hold the adapter and no tokenizer."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Saves the adapter without embeddings; otherwise PEFT would ask a hub whether the base vocabulary was
        changed."""
        trainer: Any = self
        folder = Path(output_dir or trainer.args.output_dir)
        make_private_folder(folder)  # before Trainer writes there: its files reveal facts about the data
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder, save_embedding_layers=False)


def check_output(output_dir: Path, overwrite: bool) -> None:
    """Checks that a run can write its adapter at its end, before anything else is done.

    Args:
        output_dir: the adapter's folder.
        overwrite: whether an adapter that is there may be replaced.

    Raises:
        ConfigurationError: the path cannot be a new folder, or holds an adapter that may not be replaced, or something
            else.
    """
    name = output_dir.name
    most = _LONGEST_NAME_BYTES - len(os.fsencode(checkpoints_folder(Path("x")).name)) + 1
    if name in ("", ".."):
        raise ConfigurationError(
            f"{_shown(output_dir)} is no name of a new folder: choose another output_dir (--output)"
        )
    num_bytes = len(name.encode(errors="surrogateescape"))
    if num_bytes > most:
        raise ConfigurationError(
            f"expected a name of at most {most} bytes for the adapter's folder (--output), {num_bytes} came"
        )
    check_writable(output_dir, may_be_file=True)
    if output_dir.is_dir():  # which is replaced as a whole
        check_writable(output_dir.absolute().parent)
    check_replaceable(output_dir)
    if (output_dir / "adapter_config.json").exists() and not overwrite:
        raise ConfigurationError(
            f"{_shown(output_dir)} holds an adapter already: choose another output_dir (--output), or replace it with "
            "overwrite=True (--overwrite)"
        )


def check_writable(folder: Path, may_be_file: bool = False) -> None:
    """Checks that a folder can be made, or written if it is there.

    Args:
        folder: the folder.
        may_be_file: whether a file of this name is not looked at here.

    Raises:
        ConfigurationError: a part of the path is a link to nothing, no folder, too long or not the user's to write.
    """
    shown, reason = _shown(folder), ""
    # os.path answers False about a path that the system refuses
    if "\0" in str(folder):
        reason = "it is no path"
    elif any(len(os.fsencode(part)) > _LONGEST_NAME_BYTES for part in folder.parts):
        reason = f"a name in it has more than {_LONGEST_NAME_BYTES} bytes"
    elif len(os.fsencode(folder.absolute())) > _LONGEST_PATH_BYTES:
        shown, reason = f"{shown[:40]}...", f"it has more than {_LONGEST_PATH_BYTES} bytes"
    else:
        there = nearest_there(folder)
        if there.is_symlink() and not os.path.exists(there):
            reason = f"{_shown(there)} is a link to nothing"
        elif not there.is_dir() and not (there == folder and may_be_file):
            reason = f"{_shown(there)} is no folder"
        elif there.is_dir():
            reason = why_not_writable(there)
    if reason:
        raise ConfigurationError(f"{shown} cannot be written: {reason}")


def check_writable_file(file: Path, what: str) -> None:
    """Checks that a file can be written in a folder that is there, or replaced.

    Args:
        file: the file's path.
        what: what it is to hold, with the option that names it.

    Raises:
        ConfigurationError: there is no such folder, it is not the user's to write, or the path is no file's.
    """
    folder = file.absolute().parent
    if not folder.is_dir():
        raise ConfigurationError(f"there is no folder {_shown(folder)} for {what}")
    if file.is_dir():
        raise ConfigurationError(f"{_shown(file)} is a folder: name a file for {what}")
    is_long = len(os.fsencode(file.name)) > _LONGEST_NAME_BYTES
    if reason := "its name is too long" if is_long else why_not_writable(folder):
        raise ConfigurationError(f"{what} cannot be written to {_shown(file)[:300]}: {reason}")


def _shown(path: Path) -> str:
    text = str(path)
    return text if text.isprintable() else ascii(text)


def check_replaceable(output_dir: Path) -> None:
    """Refuses an output folder that holds anything but an adapter, since `save_adapter` replaces the whole folder.

    Raises:
        ConfigurationError: the path is a file, or a folder that holds something other than an adapter.
    """
    if output_dir.is_dir():
        names = {path.name for path in output_dir.iterdir()}
        if not names or ("adapter_config.json" in names and not any((output_dir / name).is_dir() for name in names)):
            return
    elif not output_dir.exists():
        return
    raise ConfigurationError(f"{output_dir} holds something other than an adapter: name a folder of its own")


def save_adapter(model: Any, output_dir: Path) -> None:
    """Writes an adapter into a scratch folder beside `output_dir`, then renames the scratch folder to `output_dir`.

    An older adapter in `output_dir` is replaced. The new folder gets the mode of the old folder, and each new file gets
    the mode of the old file with the same name.

    Args:
        model: a PeftModel.
        output_dir: the adapter's folder.

    Raises:
        OSError: the disk is full or permission is missing.
    """
    make_private_folder(output_dir.parent)
    with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=f".{output_dir.name}-") as scratch:
        fresh, old = Path(scratch) / "new", Path(scratch) / "old"
        model.save_pretrained(fresh, save_embedding_layers=False)
        make_private(fresh)  # before this, the mode 0700 of the scratch folder keeps other users out
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
