"""This module pins a provider's model name, tokenizer, chat template and config, and its weights if the tenant fetches
some: it keeps the digests that these have at first use.

A provider that is not verified could change these parts before each session, and learn more about the tenant's
texts from the row counts of each session. So they are pinned when a tenant first uses a model. A changed part is
refused until the tenant accepts the change by the part's name.

Guarantees: digests are of canonical values, without the number of the transformers release that wrote a config. The
file of pins is replaced as a whole, with mode 0600. A file that is damaged or cannot be written raises an error, and
never counts as an empty set of pins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from noise.disk.private_files import make_private_folder
from runtime.files import locked_folder
from wire.errors import ConfigurationError, ProviderChanged

if TYPE_CHECKING:
    from wire.manifest import Manifest

PARTS = {
    "model": "model's name",
    "tokenizer": "tokenizer",
    "template": "chat template",
    "config": "config",
    "weights": "weights",
}
"""The words for each pinned part in error texts, by the part's name in `accept_changes`."""
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt"),
)
_CONFIGS = ("config.json", "tokenizer_config.json")
_VOLATILE = frozenset({"transformers_version"})
_TEMPLATE_KEY = "chat_template"
"""The key in tokenizer_config.json under which older releases of transformers store the chat template."""


def canonical_digests(folder: Path, manifest: Manifest) -> dict[str, str]:
    """Returns the SHA-256 digest, in hex, of the canonical value of each part of the bundle, by its name in `PARTS`.

    Args:
        folder: the bundle's folder.
        manifest: the same provider's manifest, which gives the model's name and a second copy of the config.
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
    """Returns a file's JSON value, or its text if the file is not JSON, or None if there is no file. In configs the
    number of the transformers release is left out."""
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return _stable(value) if path.name in _CONFIGS else value


def _stable(value: Any) -> Any:
    """Returns a JSON value without the keys of `_VOLATILE`, since these keys change with each release of
    transformers."""
    if isinstance(value, dict):
        return {key: _stable(item) for key, item in value.items() if key not in _VOLATILE}
    return [_stable(item) for item in value] if isinstance(value, list) else value


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class Pins:
    """Reads and writes the pins (digests from first use) in one folder, under a lock, so that several processes may do
    so at once."""

    def __init__(self, folder: Path) -> None:
        """Uses `pins.json` in `folder`, which is the identity's folder, or the cache if there is no identity."""
        self._folder = folder
        self._path = folder / "pins.json"

    def check(self, provider: str, current: Mapping[str, str], accepted: Sequence[str] = ()) -> list[str]:
        """Compares a provider's parts with their pins, and pins parts that are new or whose change is accepted.

        Args:
            provider: the key of the pins: certificate authority and tenant, with the URL or the model's name.
            current: the digests of the parts that this session uses, by part.
            accepted: the parts whose change the tenant accepts.

        Returns:
            The parts whose change was accepted.

        Raises:
            ProviderChanged: a part differs from its pin, and the tenant does not accept the change.
            ConfigurationError: the pins are damaged or cannot be written.
        """
        with self._errors():
            make_private_folder(self._folder)
            with locked_folder(self._folder):
                return self._checked(provider, current, accepted)

    def _checked(self, provider: str, current: Mapping[str, str], accepted: Sequence[str]) -> list[str]:
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
    """Returns the names of parts as a list in a sentence, such as "tokenizer, chat template and config"."""
    names = [PARTS[part] for part in parts]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _refusal(parts: Sequence[str]) -> str:
    flags = " ".join(f"--accept-change {part}" for part in parts)
    remedy = "verify= (--verify)"
    if not {"model", "config", "weights"} & set(parts):  # a named tokenizer replaces the other parts
        remedy = f"tokenizer= (--tokenizer) or {remedy}"
    return (
        f"the provider's {spoken(parts)} changed since first use, and nothing was sent: ask its operator whether that "
        f"was meant, then pass accept_changes={list(parts)} ({flags}), or name what you trust with {remedy}; see "
        "docs/operations.md, When a pin is refused"
    )
