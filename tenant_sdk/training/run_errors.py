"""This module turns errors of libraries during a run into errors of one line that say what to do.

Guarantees: errors of saving and of reading keep no cause, since its frames hold texts, an adapter or gradients.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from wire.errors import ConfigurationError, VeilbaseError


@contextmanager
def adapter_errors() -> Iterator[None]:
    """Turns an error of PEFT about an adapter into a ConfigurationError of one line."""
    try:
        yield
    except VeilbaseError:
        raise
    except (ValueError, TypeError, StopIteration) as exc:  # the last if a module that it wants has no parameter here
        text = str(exc).split("\n")[0][:200] or type(exc).__name__
        raise ConfigurationError(f"PEFT cannot put this adapter on the model: {text}") from exc


@contextmanager
def saving_errors() -> Iterator[None]:
    """Turns an error of writing a file, such as a full disk, into a VeilbaseError of one line."""
    try:
        yield
    except VeilbaseError:
        raise
    except Exception as exc:
        reason = _full_disk(exc)
        if reason is None:
            raise
        # `from None`, here and below: frames of a training step hold texts, adapter and gradients.
        raise VeilbaseError(
            f"the adapter or a checkpoint could not be written ({reason}): make room and run the same command again; "
            "it goes on from the last complete checkpoint"
        ) from None


@contextmanager
def reading_errors(checkpoint: Path | None) -> Iterator[None]:
    """Turns an error about a damaged checkpoint into a ConfigurationError of one line. Without a checkpoint (None),
    errors stay as they are."""
    try:
        yield
    except (json.JSONDecodeError, pickle.UnpicklingError, EOFError, SafetensorError, RuntimeError) as exc:
        read_by_torch = not isinstance(exc, RuntimeError) or "PytorchStreamReader" in str(exc)
        if checkpoint is None or not read_by_torch or _full_disk(exc) is not None:
            raise
        raise ConfigurationError(f"{checkpoint} is damaged: pass resume=False (--no-resume) to start over") from None


def _full_disk(exc: BaseException) -> str | None:
    """Returns the reason why a file could not be written, or None if the failure was another one.

    The error's text is searched too, because safetensors and torch do not pass on the OSError.
    """
    if isinstance(exc, OSError):
        return exc.strerror or "write error"
    text = str(exc)
    writes = ("No space left", "Disk quota", "File too large", "PytorchStreamWriter", "unexpected pos", "os error")
    return "no space or no permission" if any(word in text for word in writes) else None
