"""`TenantClient`: the one object a user of a provider needs.

Guarantees: base weights never reach this process, adapters, data and optimizer state never leave it; what does leave
is what the mask makes of activations and gradients (see `describe_privacy`). One error of wire/errors.py for whatever
goes wrong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from noise.registry import make_scheme
from noise.scheme import MaskScheme
from tenant_sdk import embedded
from tenant_sdk.bundle import fetch_bundle
from tenant_sdk.identity import load_identity
from tenant_sdk.model import load_remote_model, load_tokenizer
from tenant_sdk.remote_group import RemoteExecutor
from wire.errors import ConfigurationError
from wire.manifest import Manifest
from wire.transport.base import Connection, Traffic
from wire.transport.grpc_client import GrpcConnection

if TYPE_CHECKING:
    from peft import PeftConfig

    from tenant_sdk.finetune import FinetuneResult

DEFAULT_MASK = "off"


class TenantClient:
    """A tenant's connection to a provider, as a context manager.

    Example:
        with TenantClient("grpcs://host:8443", identity="acme/") as client:
            result = client.finetune("data.jsonl", output_dir="adapters/support", max_steps=50)
            print(client.generate("Who founded us?", adapter=result.adapter_dir))
    """

    def __init__(
        self,
        url: str,
        identity: str | Path | None = None,
        mask: str = DEFAULT_MASK,
        *,
        arithmetic: str | None = None,
        mask_options: Mapping[str, Any] | None = None,
        weights: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        cache: str | Path | None = None,
    ) -> None:
        """Prepares a client; the network is first used by `connect` or by whatever needs it.

        Args:
            url: grpcs://host:port, grpc://127.0.0.1:port without TLS, or inproc:MODEL for a provider in this process.
            identity: folder made by `provider enroll`; needed for grpcs.
            mask: `off` or `gaussian-pool` (see docs/architecture.md).
            arithmetic: `ring` or `float`; by default what suits the mask and the provider's weights.
            mask_options: keyword arguments of the mask, such as {"pool_size": 8}.
            weights: `int8` or `native`, for inproc only; a networked provider chooses for itself.
            dtype: of activations and of the tenant's own tensors.
            device: where attention, norms and adapters run.
            cache: folder for client bundles; $VEILBASE_CACHE or ~/.cache/veilbase by default.

        Raises:
            ConfigurationError: a URL, identity or option that cannot be.
        """
        if url.startswith(embedded.SCHEME) and identity is not None:
            raise ConfigurationError("an inproc: provider takes no identity")
        if not url.startswith(embedded.SCHEME) and weights is not None:
            raise ConfigurationError("weights is for inproc: only: a networked provider chooses for itself")
        self.url = url
        self._identity = load_identity(identity) if identity is not None else None
        self._mask, self._arithmetic, self._mask_options = mask, arithmetic, dict(mask_options or {})
        self._weights, self._dtype = weights, dtype
        try:
            self._device = torch.device(device)
        except RuntimeError:
            raise ConfigurationError(f"expected a device such as cpu or cuda:0, got {device!r}") from None
        self._cache = Path(cache) if cache is not None else None
        self._lock = threading.RLock()
        self._connection: Connection | None = None
        self._scheme: MaskScheme | None = None
        self._executor: RemoteExecutor | None = None
        self._folder: Path | None = None
        self._tokenizer: Any = None
        self._closed = False
        self.loaded: tuple[Any, Any] | None = None
        """The adapter and model that `generate` used last."""

    def connect(self) -> Manifest:
        """Connects, chooses the mask and returns the provider's manifest; later calls cost nothing."""
        with self._lock:
            if self._closed:
                raise ConfigurationError("this client was closed")
            if self._connection is None:
                if self.url.startswith(embedded.SCHEME):
                    self._connection = embedded.connect_inproc(self.url, self._weights)
                else:
                    self._connection = GrpcConnection(self.url, self._identity)
            manifest = self._connection.manifest()
            if self._executor is None:
                self._scheme = make_scheme(
                    self._mask, self._arithmetic, manifest.weights, manifest.arithmetic, self._mask_options
                )
                self._executor = RemoteExecutor([self._connection], self._scheme, manifest.limits)
            return manifest

    @property
    def traffic(self) -> Traffic:
        """Bytes and calls so far."""
        return self._connection.traffic.snapshot() if self._connection is not None else Traffic()

    def _bundle(self) -> Path:
        with self._lock:
            manifest = self.connect()
            if self._folder is None and self._connection is not None:
                self._folder = fetch_bundle(self._connection, manifest, self._cache)
            if self._folder is None:
                raise ConfigurationError("this client was closed")
            return self._folder

    @property
    def tokenizer(self) -> Any:
        """The base model's tokenizer."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(self._bundle())
            return self._tokenizer

    def load_model(self) -> PreTrainedModel:
        """A fresh transformers model over the provider's base layers, frozen, in eval mode.

        It works in stock PEFT, Trainer, TRL and `generate`; each call builds a new one, so adapters do not mix.
        """
        folder, manifest = self._bundle(), self.connect()
        if self._executor is None:
            raise ConfigurationError("this client was closed")
        return load_remote_model(folder, manifest, self._executor, self._dtype, self._device)

    def finetune(
        self,
        data: Any,
        peft_config: PeftConfig | None = None,
        output_dir: str | Path = "adapters/adapter",
        **options: Any,
    ) -> FinetuneResult:
        """Trains an adapter; see `tenant_sdk.finetune.finetune` for all arguments, errors and the result."""
        from tenant_sdk.finetune import finetune

        return finetune(self, data, peft_config, output_dir, **options)

    def generate(
        self,
        prompt: str | Iterable[Mapping[str, str]],
        adapter: str | Path | None = None,
        max_new_tokens: int = 128,
        on_text: Callable[[str], None] | None = None,
        **options: Any,
    ) -> str:
        """Answers a prompt; see `tenant_sdk.generate.generate`."""
        from tenant_sdk.generate import generate

        return generate(self, prompt, adapter, max_new_tokens, on_text, **options)

    def describe_privacy(self) -> Mapping[str, str]:
        """The mask in force, as the scheme describes itself."""
        self.connect()
        return dict(self._scheme.describe()) if self._scheme is not None else {}

    def close(self) -> None:
        """Drops secrets and ends the connection."""
        with self._lock:
            self._closed = True
            if self._scheme is not None:
                self._scheme.close()
            if self._connection is not None:
                self._connection.close()

    def __enter__(self) -> TenantClient:
        """Connects, so that a wrong URL or identity is an error at once."""
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Closes the client."""
        self.close()
