"""`TenantClient`: the one object a user of a provider needs.

Guarantees: base weights never reach this process, adapters, data and optimizer state never leave it; what does leave
is what the mask makes of activations and gradients (see `explain`). Every failure is raised as one error of
wire/errors.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from noise.options import check_options
from noise.registry import DEFAULT_MASK, MASKS
from tenant_sdk import embedded
from tenant_sdk.explain import explain
from tenant_sdk.model.build import context_length, generation_settings, load_remote_model
from tenant_sdk.prepare import prefetch_hints, prepare_masks
from tenant_sdk.progress import counting
from tenant_sdk.session import Plan, Session, open_bundle, open_session, open_text
from tenant_sdk.text.rows import bucket_tokens, check_fits
from tenant_sdk.text.source import TenantText, check_fits_embedding, has_tokenizer
from tenant_sdk.trust.pins import PARTS
from wire.errors import ConfigurationError, VeilbaseError
from wire.frame import Direction
from wire.manifest import Manifest
from wire.transport.connection import Traffic
from wire.transport.identity import load_identity

if TYPE_CHECKING:
    from peft import PeftConfig

    from tenant_sdk.training.finetune import FinetuneResult


class TenantClient:
    """A tenant's connection to a provider, as a context manager.

    Example:
        with TenantClient("grpcs://host:8443", identity="acme/") as client:
            result = client.finetune("data.jsonl", output_dir="adapters/support", max_steps=50)
            print(client.generate("Who founded us?", adapter=result.adapter_dir))
    """

    def __init__(
        self,
        url: str | Sequence[str],
        identity: str | Path | Sequence[str | Path] | None = None,
        mask: str = DEFAULT_MASK,
        verify: str | Path | None = None,
        *,
        arithmetic: str | None = None,
        mask_options: Mapping[str, Any] | None = None,
        kappa: int = 40,
        weights: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        cache: str | Path | None = None,
        progress: bool = True,
        tokenizer: str | Path | None = None,
        pad_rows: bool | int = False,
        accept_changes: Sequence[str] = (),
    ) -> None:
        """Prepares a client; the network is first used by `connect` or by whatever needs it.

        Args:
            url: grpcs://host:port, grpc://127.0.0.1:port without TLS, or inproc:MODEL for a provider in this process;
                for mask="shares" a list of two.
            identity: folder made by `provider enroll`, needed for grpcs; a list where `url` is one.
            mask: lattice, pad, shares, gaussian-pool or off (see docs/masks.md).
            verify: the checkpoint you trust (folder, GGUF file, hub id or smollm2-135m): every reply and the whole
                bundle are checked against it. None warns once and says what then holds.
            arithmetic: `ring` or `float`; by default what suits the mask and the provider's weights.
            mask_options: keyword arguments of the mask, such as {"parameters": "conservative"}.
            kappa: with verify, a forged reply passes with probability at most 2^-kappa; 40 to 64.
            weights: `int8` or `native`, for inproc only; a networked provider chooses for itself.
            dtype: the dtype of activations and of the tenant's own tensors.
            device: where attention, norms and adapters run.
            cache: folder for bundles and hints; $VEILBASE_CACHE or ~/.cache/veilbase by default.
            progress: bars on stderr while a checkpoint is read or hints are fetched.
            tokenizer: a tokenizer that you trust (folder, GGUF file, hub id or smollm2-135m), which has to map tokens
                as the provider's does. Without it, and without `verify`, the provider's own decides how text becomes
                rows, whose number it sees.
            pad_rows: pads every prompt and training row to one number of tokens: True for 512, or the number.
            accept_changes: parts of an unverified provider's offer that may differ from first use: "model" (its
                name), "tokenizer", "template", "config".

        Raises:
            ConfigurationError: a URL, identity or option is impossible.
        """
        plan = _plan(url, identity, mask, verify, arithmetic, mask_options, kappa, weights, cache)
        self._plan = _with_text(plan, tokenizer, pad_rows, accept_changes)
        self.url = self._plan.urls[0]
        self._dtype, self._progress = dtype, progress
        try:
            self._device = torch.device(device)
        except RuntimeError as exc:
            raise ConfigurationError(f"expected a device such as cpu or cuda:0, got {device!r}") from exc
        self._lock = threading.RLock()
        self._session: Session | None = None
        self._folder: Path | None = None
        self._text: TenantText | None = None
        self._closed = False
        self.loaded: tuple[Any, Any] | None = None
        """The adapter and model that `generate` used last."""

    def connect(self) -> Manifest:
        """Connects, compares the provider with the trusted checkpoint, returns the manifest; cheap when repeated."""
        session = self._open()
        with session.executor.in_session():  # as all methods but `explain` and `close` do
            return session.manifest

    def _open(self) -> Session:
        with self._lock:
            if self._closed:
                raise ConfigurationError("this client was closed")
            if self._session is None:
                with counting("checking the provider", self._progress and self._plan.verify is not None) as report:
                    self._session = open_session(self._plan, report)
            return self._session

    @property
    def traffic(self) -> Traffic:
        """The bytes and calls that went to all providers so far."""
        total = Traffic()
        for connection in self._session.connections if self._session is not None else ():
            seen = connection.traffic.snapshot()
            total.add(seen.bytes_up, seen.bytes_down, seen.calls)
        return total

    def _bundle(self) -> Path:
        session = self._open()
        with self._lock, session.executor.in_session():
            if self._folder is None:
                self._folder = open_bundle(self._plan, session)
            return self._folder

    @property
    def text(self) -> TenantText:
        """How text becomes tokens in this session: the tokenizer, the party that chose it, and the tokens that end an
        answer."""
        session, folder = self._open(), self._bundle()
        with self._lock:
            if self._text is None:
                self._text = open_text(self._plan, session, folder)
            return self._text

    @property
    def bucket(self) -> int | None:
        """The number of tokens to which prompts and training rows are padded; None where they are not."""
        return self._plan.bucket

    @property
    def context_length(self) -> int:
        """The most tokens that the model has positions for."""
        return context_length(self._bundle())

    @property
    def tokenizer(self) -> Any:
        """The base model's tokenizer; of an unverified provider, one whose chat template does not see text."""
        return self.text.tokenizer

    def load_model(self) -> PreTrainedModel:
        """Returns a fresh transformers model over the provider's base layers, frozen, in eval mode.

        It works in stock PEFT, Trainer, TRL and `generate`; each call builds a new one, so adapters do not mix.
        """
        session = self._open()
        with session.executor.in_session():
            folder = self._bundle()
            verified = session.verifier is not None
            model = load_remote_model(
                folder, session.manifest, session.executor, self._dtype, self._device, verified=verified
            )
            if not verified or self._plan.tokenizer is not None:
                text = self.text if self._plan.tokenizer is not None or has_tokenizer(folder) else None
                if text is not None:
                    check_fits_embedding(text.tokenizer, model.get_input_embeddings().weight.shape[0])
                model.generation_config = generation_settings(text, model.config)
            return model

    def finetune(
        self,
        data: Any,
        peft_config: PeftConfig | None = None,
        output_dir: str | Path = "adapters/adapter",
        **options: Any,
    ) -> FinetuneResult:
        """Trains an adapter; see `tenant_sdk.training.finetune.finetune` for all arguments, errors and the result."""
        from tenant_sdk.training.finetune import finetune

        return finetune(self, data, peft_config, output_dir, **options)

    def generate(
        self,
        prompt: str | Iterable[Mapping[str, str]],
        adapter: str | Path | None = None,
        max_new_tokens: int | None = None,
        on_text: Callable[[str], None] | None = None,
        *,
        fixed_length: bool = False,
        **options: Any,
    ) -> str:
        """Answers a prompt; see `tenant_sdk.generate.generate`."""
        from tenant_sdk.generate import generate

        return generate(self, prompt, adapter, max_new_tokens, on_text, fixed_length=fixed_length, **options)

    def fetch_hints(self, backward: bool = False) -> None:
        """Fetches what the lattice mask needs once per layer, with a progress bar; no work for other masks.

        Args:
            backward: whether to fetch it for gradients, too, which fine-tuning needs.
        """
        directions = (Direction.FORWARD, Direction.BACKWARD) if backward else (Direction.FORWARD,)
        session = self._open()
        with session.executor.in_session():
            prefetch_hints(session.scheme, session.manifest, self._bundle(), directions, self._progress)

    def prepare(self, num_tokens: int, backward: bool = False) -> None:
        """Makes masks ahead of use, as far as the pool's budget goes, so that the next tokens find them ready."""
        directions = (Direction.FORWARD, Direction.BACKWARD) if backward else (Direction.FORWARD,)
        session = self._open()
        with session.executor.in_session():
            prepare_masks(session.scheme, session.manifest, self._bundle(), directions, num_tokens)

    def explain(self) -> str:
        """Prints, and returns, the privacy in force: scheme, assumption, parameters, what stays visible, costs.

        After a failed check it still answers, and says that the session is over.
        """
        session = self._open()
        text = explain(session, self._plan, self._problem(session))
        print(text)
        return text

    def _problem(self, session: Session) -> str | None:
        """Returns what an unverified session will be refused for when it is used, as far as its bundle shows."""
        if session.verifier is not None:
            return None
        try:
            if self._plan.tokenizer is not None or has_tokenizer(self._bundle()):
                self.text  # noqa: B018 - raises where the tokenizer cannot be used
            if self._plan.bucket is not None:
                check_fits(self._plan.bucket, self.context_length, "")
        except VeilbaseError as exc:
            return str(exc)
        return None

    def close(self) -> None:
        """Drops secrets and ends the connections."""
        with self._lock:
            self._closed = True
            if self._session is not None:
                self._session.close()

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


def _plan(
    url: str | Sequence[str], identity: str | Path | Sequence[str | Path] | None, mask: str, verify: str | Path | None,
    arithmetic: str | None, mask_options: Mapping[str, Any] | None, kappa: int, weights: str | None,
    cache: str | Path | None,
) -> Plan:  # fmt: skip
    """Checks the settings as far as is possible without a network."""
    urls = (url,) if isinstance(url, str) else tuple(url or ())
    if not urls or not all(isinstance(each, str) for each in urls):
        raise ConfigurationError(f"expected a provider's URL, or two for mask='shares', got {url!r}")
    given = identity if isinstance(identity, list | tuple) else [identity] * len(urls)
    if len(given) != len(urls):
        raise ConfigurationError(f"expected one identity for each of {len(urls)} URLs, got {len(given)}")
    if mask not in MASKS:
        raise ConfigurationError(f"mask is one of {', '.join(MASKS)}, got {mask!r}")
    options = check_options(mask, {} if mask_options is None else mask_options)
    folders = tuple(None if each is None else Path(str(each)) for each in given)
    for each, folder in zip(urls, folders, strict=True):
        inproc = each.startswith(embedded.SCHEME)
        if inproc and folder is not None:
            raise ConfigurationError("an inproc: provider takes no identity")
        if not inproc and weights is not None:
            raise ConfigurationError("weights is for inproc: only: a networked provider chooses for itself")
        if folder is not None:
            load_identity(folder)
    return Plan(
        urls, folders, mask, arithmetic, options, None if verify is None else str(verify), kappa,
        weights, Path(cache) if cache is not None else None,
    )  # fmt: skip


def _with_text(plan: Plan, tokenizer: str | Path | None, pad_rows: bool | int, accepted: Sequence[str]) -> Plan:
    """Returns the plan with the tenant's settings for text, checked as far as is possible without a network."""
    if not isinstance(accepted, str | list | tuple | set | frozenset):
        raise ConfigurationError(f"accept_changes takes a list of {', '.join(PARTS)}, got {type(accepted).__name__}")
    given = (accepted,) if isinstance(accepted, str) else tuple(accepted)
    for part in given:
        if part not in PARTS:
            raise ConfigurationError(
                f"accept_changes (--accept-change, once for each) takes {', '.join(PARTS)}, got {ascii(part)[:40]}"
            )
    named = None if tokenizer is None else str(tokenizer)
    return replace(plan, tokenizer=named, bucket=bucket_tokens(pad_rows), accepted_changes=given)
