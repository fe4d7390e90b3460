"""This module describes, as protocols, what training, generation and adapters need of a tenant's session.

`TenantClient` fulfils all these protocols. Training, generation and adapters take a protocol as their argument, so that
they need not import the client, which calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from transformers import PreTrainedModel

from tenant_sdk.text.source import TenantText
from wire.manifest import Manifest
from wire.transport.connection import Traffic

CheckOffer = Callable[[Manifest, Callable[[str], bytes]], object]
"""A function that compares something with what a provider offers: with its manifest, and with the beginning of a file
of its bundle, which its second argument returns."""


class ModelSource(Protocol):
    """Describes a session that builds models over the provider's base layers."""

    loaded: tuple[Any, Any] | None
    """The adapter's key and the model of the last call of `adapted_model`, or None. That function reuses the model for
    the same adapter."""

    def load_model(self) -> PreTrainedModel:
        """Returns a new transformers model, in eval mode and with frozen parameters."""


class TextSession(ModelSource, Protocol):
    """Describes a session that also turns text into token rows, as training and generation need."""

    @property
    def text(self) -> TenantText:
        """Returns the tokenizer, its origin and the stop tokens of this session."""

    @property
    def tokenizer(self) -> Any:
        """Returns the session's transformers tokenizer, which is the one in `text`."""

    @property
    def bucket(self) -> int | None:
        """Returns the number of tokens to which prompts and training rows are padded; None if they are not padded."""

    @property
    def context_length(self) -> int:
        """Returns the model's context length, which is the largest number of tokens in one sequence."""

    def fetch_hints(self, backward: bool = False) -> None:
        """Fetches or computes the lattice mask's hints (products of weights and a public matrix); with `backward` also
        hints for gradients."""


class TrainingSession(TextSession, Protocol):
    """Describes a session that also gives its manifest and its traffic, as a fine-tuning run needs."""

    @property
    def traffic(self) -> Traffic:
        """Returns the numbers of calls, bytes sent and bytes received in this session so far."""

    @property
    def can_be_steered(self) -> bool:
        """Returns whether a provider that lies could learn hidden data from what the tenant does with its replies."""

    @property
    def keep(self) -> tuple[str, ...]:
        """Returns what names the layers that the tenant computes itself."""

    def connect(self, check: CheckOffer | None = None) -> Manifest:
        """Connects if there is no connection yet, and returns the provider's manifest. `check` is called as soon as
        that is known; an error that it raises ends the call."""

    def reconnect(self) -> None:
        """Opens connections that are broken; raises TransportError if a provider cannot be reached."""
