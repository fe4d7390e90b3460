"""What training, generation and adapters need of a tenant's session; `TenantClient` is one.

The functions take these protocols, so that none of their modules knows the client, which calls them.
"""

from __future__ import annotations

from typing import Any, Protocol

from transformers import PreTrainedModel

from tenant_sdk.text.source import TenantText
from wire.manifest import Manifest
from wire.transport.connection import Traffic


class ModelSource(Protocol):
    """A session that builds models over the provider's base layers."""

    loaded: tuple[Any, Any] | None
    """The adapter and the model that were used last, which `adapted_model` keeps here."""

    def load_model(self) -> PreTrainedModel:
        """Builds a fresh transformers model, frozen, in eval mode."""


class TextSession(ModelSource, Protocol):
    """A session that also knows how text becomes rows, as training and generation need."""

    @property
    def text(self) -> TenantText:
        """How text becomes tokens in this session."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of `text`."""

    @property
    def bucket(self) -> int | None:
        """Tokens to which prompts and training rows are padded; None where they are not."""

    @property
    def context_length(self) -> int:
        """Most tokens that the model's positions can count."""

    def fetch_hints(self, backward: bool = False) -> None:
        """Fetches what the mask needs once per layer, with `backward` also for gradients."""


class TrainingSession(TextSession, Protocol):
    """A session whose provider and traffic are known too, as a fine-tuning run needs."""

    @property
    def traffic(self) -> Traffic:
        """Bytes and calls so far."""

    def connect(self) -> Manifest:
        """Connects where there is no connection yet, and returns what the provider announced."""
