"""What a provider's bundle was at first use: tokenizer, chat template and config, by digest.

A provider that is not verified may change them from one session to the next, and so ask one question after the other.
Here they are pinned when a tenant first uses a model, and a change is refused until the tenant accepts it by name.

Guarantees: digests are of canonical values, without the release that wrote them; the file is replaced whole, with mode
0600; a file that is damaged or cannot be written is an error and never an empty set of pins.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from noise.disk.private_files import make_private_folder
from wire.errors import ConfigurationError, ProviderChanged
from wire.manifest import Manifest

PARTS = {
    "model": "model's name",
    "tokenizer": "tokenizer",
    "template": "chat template",
    "config": "config",
}
"""Name with which a change is accepted: what it is called in a sentence."""
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt"),
)
_CONFIGS = ("config.json", "tokenizer_config.json")
_VOLATILE = frozenset({"transformers_version"})
_TEMPLATE_KEY = "chat_template"
"""In tokenizer_config.json, where older releases keep the template."""


def canonical_digests(folder: Path, manifest: Manifest) -> dict[str, str]:
    """SHA-256 of the canonical value of each part of a bundle.

    Args:
        folder: the bundle.
        manifest: of the same provider; its name of the model, and its copy of the config with the bundle's.
    """
    tokenizer = {name: _value(folder / name) for name in _TOKENIZER_FILES}
    template = folder / "chat_template.jinja"
    settings = tokenizer["tokenizer_config.json"]
    inner = settings.pop(_TEMPLATE_KEY, None) if isinstance(settings, dict) else None
    text = template.read_text(encoding="utf-8", errors="replace") if template.is_file() else None
    return {
        "model": _digest(manifest.model_id),
        "tokenizer": _digest(tokenizer),
        "template": _digest([text, inner]),
        "config": _digest([_value(folder / "config.json"), _stable(dict(manifest.config))]),
    }


def _value(path: Path) -> Any:
    """A file's JSON value, or its text where it is none; of a config, without the release that wrote it."""
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return _stable(value) if path.name in _CONFIGS else value


def _stable(value: Any) -> Any:
    """The same JSON value without what changes with each release of transformers."""
    if isinstance(value, dict):
        return {key: _stable(item) for key, item in value.items() if key not in _VOLATILE}
    return [_stable(item) for item in value] if isinstance(value, list) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class Pins:
    """The pins of one folder; several processes may use it."""

    def __init__(self, folder: Path) -> None:
        """Args: folder: the identity's, else the cache; `pins.json` lies in it."""
        self._folder = folder
        self._path = folder / "pins.json"

    def check(self, provider: str, current: Mapping[str, str], accepted: Sequence[str] = ()) -> list[str]:
        """Compares a provider's parts with their pins, and pins what is new or accepted.

        Args:
            provider: a key that names authority, tenant and model.
            current: digest by part, of the parts that this session uses.
            accepted: parts whose change the tenant accepts.

        Returns:
            The parts whose change was accepted.

        Raises:
            ProviderChanged: a part differs from its pin.
            ConfigurationError: the pins are damaged or cannot be written.
        """
        with self._errors(), self._locked():
            pins = self._read()
            known = pins.get(provider, {})
            changed = [part for part in current if part in known and known[part] != current[part]]
            refused = [part for part in changed if part not in accepted]
            if refused:
                raise ProviderChanged(_refusal(refused))
            if changed or any(part not in known for part in current):
                self._write({**pins, provider: {**known, **current}})
            return changed

    def _read(self) -> dict[str, dict[str, str]]:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError):
            content = None
        entries = content.values() if isinstance(content, dict) else [None]
        if not all(isinstance(entry, dict) and all(map(_is_digest, entry.values())) for entry in entries):
            raise ConfigurationError(
                f"{self._path} is damaged: restore it, or remove it to accept what the provider offers now"
            )
        return dict(content)

    def _write(self, pins: Mapping[str, Mapping[str, str]]) -> None:
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=".pins-")  # mode 0600
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as out:
                json.dump(pins, out, indent=1, sort_keys=True)
                out.flush()
                os.fsync(out.fileno())
            os.replace(name, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        make_private_folder(self._folder)
        held = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)  # let go when the descriptor is closed
            yield
        finally:
            os.close(held)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise ConfigurationError(
                f"{self._path}, which holds what the provider's bundle was at first use, cannot be written: "
                f"{exc.strerror or 'error'}; make it writable, or name a checkpoint that you trust (verify=, --verify)"
            ) from exc


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == hashlib.sha256().digest_size * 2


def spoken(parts: Sequence[str]) -> str:
    """Parts as a list in a sentence."""
    names = [PARTS[part] for part in parts]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _refusal(parts: Sequence[str]) -> str:
    flags = " ".join(f"--accept-change {part}" for part in parts)
    remedy = "verify= (--verify)"
    if not {"model", "config"} & set(parts):  # a named tokenizer takes the place of the others
        remedy = f"tokenizer= (--tokenizer) or {remedy}"
    return (
        f"the provider's {spoken(parts)} changed since first use, and nothing was sent: ask its operator whether that "
        f"was meant, then pass accept_changes={list(parts)} ({flags}), or name what you trust with {remedy}; see "
        "docs/operations.md, When a pin is refused"
    )
