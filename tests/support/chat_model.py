"""Makes tiny chat models of several kinds, with the tokenizer of tenant_sdk/testing.py."""

from __future__ import annotations

from pathlib import Path

from tenant_sdk.testing import CHAT_TEMPLATE, character_tokenizer
from tests.support.tiny_models import make_tiny


def make_chat_model(
    folder: Path, kind: str = "llama", template: str | dict[str, str] | None = CHAT_TEMPLATE, seed: int = 0
) -> Path:
    """Saves a random model with its tokenizer to `folder`, and returns `folder`."""
    make_tiny(kind, folder, seed)
    character_tokenizer(template).save_pretrained(folder)
    return folder
