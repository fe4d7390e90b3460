"""This module holds `TenantClient`, the one object that a user of a provider needs.

Guarantees: base weights of a networked provider reach this process only if `keep` fetches them. Adapters, data and
optimizer state never leave this process. Activations and gradients leave this process only in the form that the chosen
mask gives them (see `explain`). Every failure is raised as one error of wire/errors.py.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import torch
from transformers import PreTrainedModel

from noise.options import DEFAULT_MASK
from noise.scheme import rounding_sigma
from runtime.command_line import to_stderr, told_if_slow
from tenant_sdk import embedded
from tenant_sdk.endpoint.settings import OPTION_KINDS, EndpointKeywords, EndpointSettings
from tenant_sdk.explain import ONLY_IN_USE, bit_range, explain, not_in_use, problem_of_text, show
from tenant_sdk.keep import KEEP_DTYPES, spoken_keep
from tenant_sdk.model.build import context_length, generation_settings, load_remote_model
from tenant_sdk.model.send import RemoteExecutor
from tenant_sdk.options import names_keywords, takes_options
from tenant_sdk.plan import Trust, is_on_this_host, make_plan
from tenant_sdk.prepare import prefetch_hints, prepare_masks
from tenant_sdk.progress import stages
from tenant_sdk.serving.settings import NOT_OF_MANY, EngineOptions, ManyKeywords, RequestOptions, StoreOptions
from tenant_sdk.session import Session, beginning_of, open_bundle, open_session, open_text
from tenant_sdk.session_protocol import CheckOffer
from tenant_sdk.text.source import TenantText, check_fits_embedding, has_tokenizer
from tenant_sdk.training.settings import (
    FinetuneKeywords,
    FinetuneOptions,
    FinetuneResult,
    finetune_options,
)
from tenant_sdk.tuning import warn_if_not_tuned
from wire.errors import ConfigurationError
from wire.frame import Direction
from wire.manifest import Manifest
from wire.transport.connection import Traffic

if TYPE_CHECKING:
    from peft import PeftConfig

    from tenant_sdk.bill import Planner
    from tenant_sdk.endpoint.server import Endpoint
    from tenant_sdk.plan_file import Bill
    from tenant_sdk.training.finetune import Prepared

_Planned = TypeVar("_Planned")
_ANY_ADAPTER = Path("adapters/adapter")
"""The output folder of a run that has not named one."""


class TenantClient:
    """Connects a tenant to a provider. The class is a context manager.

    Example:
        with TenantClient("grpcs://host:8443", identity="acme/") as client:
            result = client.finetune("data.jsonl", output_dir="adapters/support", max_steps=50)
            print(client.generate("Who founded us?", adapter=result.adapter_dir))
    """

    @names_keywords
    def __init__(
        self,
        url: str | Sequence[str] | None = None,
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
        peer_uid: int | None = None,
        trust_same_gpu: bool = False,
        trust: Trust | None = None,
        keep: str | Sequence[str] | None = None,
        keep_dtype: str = KEEP_DTYPES[0],
    ) -> None:
        """Makes a client. The network is first used by `connect`, or by the first method that needs it.

        Args:
            url: grpcs://host:port (without a port 8443), ipc:DIR for a provider on this host, grpc://127.0.0.1:port
                without TLS, or inproc:MODEL or inproc:MODEL?shards=N for a provider in this process; for mask="shares"
                a list of two. With None, the URL that `provider enroll` wrote into each identity's folder.
            identity: folder made by `provider enroll`, needed for grpcs and ipc; a list for several providers.
            mask: lattice, pad, shares, gaussian-pool or off (see docs/masks.md).
            verify: a checkpoint that you trust (folder, GGUF file, hub id or smollm2-135m). Every reply and the whole
                bundle (the provider's config, tokenizer and small tensors) are checked against this checkpoint. With
                None, one warning says what is guaranteed without it.
            arithmetic: `ring` or `float`; by default the one that suits the mask and the provider's weights.
            mask_options: keyword arguments of the mask, such as {"parameters": "conservative"}.
            kappa: with verify, a forged reply passes with probability at most 2^-kappa; 40 to 64.
            weights: `int8` or `native`, for an inproc: provider only; a networked provider's operator chooses.
            dtype: the dtype of activations and of the tenant's own tensors.
            device: the device on which attention, norms and adapters run.
            cache: folder for providers' bundles and for the lattice mask's hints; $VEILBASE_CACHE or ~/.cache/veilbase
                by default.
            progress: whether stderr shows how far it is while a checkpoint is read, hints are fetched or computed, or
                a run is planned: bars in a terminal, and a line every few seconds elsewhere.
            tokenizer: a tokenizer that you trust (folder, GGUF file, hub id or smollm2-135m), which has to map tokens
                as the provider's tokenizer does. Without `tokenizer` and `verify`, the provider's tokenizer decides how
                text becomes rows, and the provider sees the number of rows.
            pad_rows: the number of tokens to which every prompt and training row is padded; True stands for 512, and
                False for no padding.
            accept_changes: parts of an unverified provider's offer that may differ from first use: any of "model"
                (the model's name), "tokenizer", "template", "config" and "weights" (of layers that are kept).
            peer_uid: for an ipc: URL, the user id under which the provider must run; None stands for the owner of DIR.
            trust_same_gpu: makes masks on a CUDA `device` also if the provider is on this host and may use the same
                GPU; without it they are then made on the CPU (docs/threat-model.md, "On one GPU"). With an ipc: URL,
                masked rows of large calls then lie in memory of the GPU that the provider shares, if it offers any.
            trust: verify, kappa, tokenizer, pad_rows and accept_changes as one object, in place of these five. One
                of them that is given beside it has to have the same value; one that has its default counts as not
                given, and the object's value holds.
            keep: base layers that are computed here in place of being sent: "attention", "lower:8" for the eight lowest
                blocks, or names of layers with * and ?, as a list or separated by commas (docs/keep.md). Their weights
                are those of the checkpoint that `verify` names, or else fetched from a provider that gives them away.
                With None, all layers of the provider are asked for.
            keep_dtype: how kept weights are held: "int8", as the provider has them, or "bf16", as the checkpoint has
                them, which takes twice the memory and needs `verify`.

        Raises:
            ConfigurationError: a URL, identity or option is impossible.
        """
        chosen = Trust(
            verify=verify, kappa=kappa, tokenizer=tokenizer, pad_rows=pad_rows, accept_changes=accept_changes
        )  # fmt: skip
        if trust is not None:
            if not isinstance(trust, Trust):
                raise ConfigurationError(f"trust is a tenant_sdk.Trust, got {type(trust).__name__}")
            chosen = trust.beside(chosen)
        self._plan = make_plan(
            url=url,
            identity=identity,
            mask=mask,
            verify=chosen.verify,
            arithmetic=arithmetic,
            mask_options=mask_options,
            kappa=chosen.kappa,
            weights=weights,
            cache=cache,
            tokenizer=chosen.tokenizer,
            pad_rows=chosen.pad_rows,
            accept_changes=chosen.accept_changes,
            peer_uid=peer_uid,
            device=device,
            trust_same_gpu=trust_same_gpu,
            keep=keep,
            keep_dtype=keep_dtype,
        )
        if not all(each.startswith(embedded.SCHEME) for each in self._plan.urls):
            warn_if_not_tuned(stacklevel=4)
        self.url = self._plan.urls[0]
        self._dtype, self._progress = dtype, progress
        self._device = self._plan.device
        self._lock = threading.RLock()
        self._session: Session | None = None
        self._folder: Path | None = None
        self._text: TenantText | None = None
        self._closed = False
        self._loaded: tuple[Any, Any] | None = None
        self._not_in_use = set(ONLY_IN_USE)
        self._num_others = 0
        """The models that were made for something else than `generate`, such as fine-tuning, an engine or stock PEFT:
        these may use adapters of any kind."""

    def connect(self, check: CheckOffer | None = None) -> Manifest:
        """Connects, compares the provider with the trusted checkpoint if there is one, and returns the manifest.

        A second call returns the same manifest without using the network.

        Args:
            check: called with the manifest, and with a function that returns the beginning of a file of the provider's
                bundle, before the comparison, which may take long. An error that it raises ends the call.
        """
        session = self._open(check)
        with session.executor.in_session():  # all methods except `explain` and `close` do this
            return session.manifest

    def reconnect(self) -> None:
        """Opens broken connections again, as the next request would do by itself; does nothing if all are open.

        Raises:
            TransportError: a provider cannot be reached.
            ConfigurationError: the provider serves other weights than when the session began, or the client was closed.
            AccessError: the provider refuses this tenant.
        """
        session = self._open()
        with session.executor.in_session():
            for connection in session.connections:
                connection.reconnect()

    def _open(self, check: CheckOffer | None = None) -> Session:
        with self._lock:
            if self._closed:
                raise ConfigurationError("this client was closed")
            if self._session is None:
                with stages(self._progress) as report:
                    self._session = open_session(self._plan, report, self._say, check)
            elif check is not None:
                check(self._session.manifest, partial(beginning_of, self._plan, self._session))
            return self._session

    @property
    def _say(self) -> Callable[[str], object] | None:
        """Returns what tells a user about a step that takes seconds; None without `progress`."""
        return to_stderr if self._progress else None

    @property
    def traffic(self) -> Traffic:
        """Returns the numbers of calls, bytes sent and bytes received so far, over all providers."""
        total = Traffic()
        for connection in self._session.connections if self._session is not None else ():
            seen = connection.traffic.snapshot()
            total.add(seen.bytes_up, seen.bytes_down, seen.calls)
        return total

    def _bundle(self) -> Path:
        session = self._open()
        with self._lock, session.executor.in_session():
            if self._folder is None:
                with stages(self._progress) as report:
                    self._folder = open_bundle(self._plan, session, report)
            return self._folder

    @property
    def text(self) -> TenantText:
        """Returns the session's tokenizer, the party that chose the tokenizer, and the tokens that end an answer."""
        session, folder = self._open(), self._bundle()
        with self._lock:
            if self._text is None:
                self._text = open_text(self._plan, session, folder)
            return self._text

    @property
    def mask(self) -> str:
        """Returns the name of the mask in force."""
        return self._plan.mask

    @property
    def keep(self) -> tuple[str, ...]:
        """Returns what names the layers that are computed here; empty if all are asked for."""
        return self._plan.keep

    @property
    def error_sigma(self) -> float:
        """Returns the standard deviation of the error that the lattice mask leaves in a row, with that of rounding, in
        units of encoded rows; 0 for other masks."""
        session = self._open()
        sigma = float(getattr(getattr(session.scheme, "parameters", None), "sigma", 0.0))
        if sigma == 0.0:
            return 0.0
        return math.hypot(sigma, rounding_sigma(bit_range(session.scheme, session.asked)[0]))

    @property
    def is_verified(self) -> bool:
        """Returns whether every reply is checked against a trusted checkpoint."""
        return self._plan.verify is not None

    @property
    def can_be_steered(self) -> bool:
        """Returns whether a provider that lies could learn hidden data from what the tenant does with its replies."""
        return self._plan.can_be_steered

    @property
    def bucket(self) -> int | None:
        """Returns the number of tokens to which prompts and training rows are padded; None if they are not padded."""
        return self._plan.bucket

    @property
    def context_length(self) -> int:
        """Returns the model's context length, which is the largest number of tokens in one sequence."""
        return context_length(self._bundle())

    @property
    def tokenizer(self) -> Any:
        """Returns the session's tokenizer. If it comes from an unverified provider, its chat template never sees the
        contents of messages."""
        return self.text.tokenizer

    @property
    def loaded(self) -> tuple[Any, Any] | None:
        """Returns the adapter's key and the model that `generate` used last, or None; see `adapted_model`."""
        return self._loaded

    @loaded.setter
    def loaded(self, made: tuple[Any, Any] | None) -> None:
        if made is not None and (self._loaded is None or self._loaded[1] is not made[1]):
            with self._lock:
                self._num_others -= 1
                self._not_in_use &= not_in_use(getattr(made[1], "peft_config", {}).values())
        self._loaded = made

    def load_model(self) -> PreTrainedModel:
        """Returns a new transformers model over the provider's base layers, in eval mode and with frozen parameters.

        The model works in stock PEFT, Trainer, TRL and `generate`. Each call builds a new model, so that adapters on
        one model do not affect another.
        """
        with self._lock:
            self._num_others += 1
        return self.model_over(self._open().executor)

    def model_over(self, executor: RemoteExecutor) -> PreTrainedModel:
        """Returns a model as `load_model` does, whose calls go to an executor, such as one that sends nothing."""
        session = self._open()
        with session.executor.in_session():
            folder = self._bundle()
            verified = session.verifier is not None
            with told_if_slow("making the model", self._say):
                model = load_remote_model(
                    folder,
                    session.manifest,
                    executor,
                    self._dtype,
                    self._device,
                    verified=verified,
                    sends_padding=self._plan.bucket is not None,
                )
            if not verified or self._plan.tokenizer is not None:
                text = self.text if self._plan.tokenizer is not None or has_tokenizer(folder) else None
                if text is not None:
                    check_fits_embedding(text.tokenizer, model.get_input_embeddings().weight.shape[0])
                model.generation_config = generation_settings(text, model.config)
            return model

    @takes_options(FinetuneOptions)
    def finetune(
        self,
        data: Any,
        peft_config: PeftConfig | None = None,
        output_dir: str | Path = "adapters/adapter",
        *,
        plan: Bill | str | Path | None = None,
        **options: Unpack[FinetuneKeywords],
    ) -> FinetuneResult:
        """Trains an adapter over the provider's base model (docs/finetune.md).

        Args:
            data: a JSONL, JSON, CSV or parquet file, a folder written by datasets' `save_to_disk`, a table of datasets,
                pandas, polars or pyarrow, or an iterable of dicts, with `messages`, `prompt` and `completion`, or
                `text`; or all with `prompt`, `chosen` and `rejected`, which are trained on by TRL's DPOTrainer.
            peft_config: the config of a PEFT method that docs/peft.md lists for `finetune`; LoRA on all linear layers
                by default. The object is not changed.
            output_dir: the adapter's folder, such as `adapters/support`; checkpoints are kept in
                `adapters/.support.checkpoints` until the run ends.
            plan: what `plan` returned, or a file with it. The run is refused if the provider, the data, the adapter or
                the options have changed since.
            **options: those of `FinetuneOptions`.

        Returns:
            The adapter's folder, and the losses, evaluations, tokens, bytes and seconds of the run.

        Raises:
            DatasetError: a row cannot be used; the text names its line.
            ConfigurationError: a setting is impossible, a library that it needs is not installed, or there is a
                checkpoint of another run.
            NotFinite: a value was NaN or infinite, and there is no adapter. With `verify` the error is raised at once,
                without `verify` at the planned end of the run.
            TransportError, ProtocolError, AccessError: a request failed, and a provider that went away was not back in
                time; the same call again resumes the run.
            StorageError: the disk has no room for replies, or returned other bytes than were written.
            VeilbaseError: the adapter or a checkpoint could not be written.
        """
        from tenant_sdk.training.finetune import finetune

        chosen = finetune_options(options)
        planned = self._load_plan(plan)
        if planned is not None:
            self._check_early(planned, chosen)
        estimates: list[Bill] = []

        def before_run(prepared: Prepared) -> None:
            if planned is not None:
                self._planned(lambda planner: planner.check(planned, prepared))
            if chosen.progress:
                estimate = planned or self._planned(lambda planner: planner.briefly(prepared, Path(output_dir)))
                to_stderr(estimate if isinstance(estimate, str) else estimate.line())
                estimates.extend([estimate] if not isinstance(estimate, str) else [])

        result = finetune(self, data, peft_config, output_dir, chosen, before_run=before_run)
        for each in estimates:
            to_stderr(each.compared(result))
        return result

    def _check_early(self, planned: Bill, options: FinetuneOptions) -> None:
        """Compares a plan with what is known of a run before the provider and the data are looked at."""
        from tenant_sdk.training.run_identity import RunIdentity

        known = RunIdentity.of_options(options, self.bucket)
        planned.check_known(known, mask=self.mask, keep=spoken_keep(self.keep))

    @staticmethod
    def _load_plan(plan: Bill | str | Path | None) -> Bill | None:
        if plan is None:
            return None
        from tenant_sdk.plan_file import Bill

        return plan if isinstance(plan, Bill) else Bill.load(plan)

    @takes_options(FinetuneOptions)
    def plan(self, data: Any, peft_config: PeftConfig | None = None, **options: Unpack[FinetuneKeywords]) -> Bill:
        """Returns what `finetune` with these arguments will cost: bytes, time and memory, by `print` as a table
        (docs/finetune.md, "What a run costs, before it runs").

        Nothing of the data is sent. The provider gets random rows for at most ten seconds, which are timed.

        Args:
            data: as for `finetune`.
            peft_config: as for `finetune`.
            **options: those of `FinetuneOptions`.

        Raises:
            VeilbaseError: as for `finetune`.
        """
        from tenant_sdk.training.finetune import prepare

        prepared = prepare(self, data, peft_config, finetune_options(options))
        return self._planned(lambda planner: planner.run(prepared, _ANY_ADAPTER), prepared.options.progress)

    @names_keywords
    def plan_tokens(
        self, prompt_tokens: int, new_tokens: int, requests: int = 1, *, probe_s: float = 10.0
    ) -> Bill:  # fmt: skip
        """Returns what answers of the base model will cost, made one after the other: bytes, round trips and time.

        Args:
            prompt_tokens: the tokens of each prompt.
            new_tokens: the tokens of each answer.
            requests: the number of answers.
            probe_s: the most seconds for which the provider gets random rows, which are timed.
        """
        return self._planned(lambda planner: planner.tokens(prompt_tokens, new_tokens, requests, probe_s=probe_s))

    def _planned(self, plan: Callable[[Planner], _Planned], progress: bool = True) -> _Planned:
        from tenant_sdk.bill import Planner

        session, folder = self._open(), self._bundle()
        with session.executor.in_session(), stages(self._progress and progress) as report:
            return plan(Planner(self, session, folder, is_on_this_host(self._plan.urls), report))

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
        """Answers a prompt, with greedy decoding unless `do_sample=True`.

        Args:
            prompt: a user's message, or a list of messages with role and content. A model without a chat template takes
                only a text and continues it.
            adapter: a PEFT adapter folder; None for the base model.
            max_new_tokens: the most tokens of the answer, which has to fit into the context together with the prompt
                and the adapter's virtual tokens; None for 128, or for fewer if the context has less room.
            on_text: a function that is called with each piece of text as soon as the piece is ready; not possible with
                beam search.
            fixed_length: whether the provider always gets the calls of an answer of `max_new_tokens` tokens, whatever
                the tokens are; the text still ends at the first stop token. Not possible with beam search or with
                options that end an answer early.
            options: arguments of transformers' `generate`, such as do_sample, temperature, top_p or num_beams.

        Returns:
            The text of the answer without special tokens.

        Raises:
            ConfigurationError: the adapter does not exist or does not fit the model, or a length or an option is
                impossible.
            NotFinite: a value was NaN or infinite. The error is raised at once. With `fixed_length` and without
                `verify` it is raised at the end of the answer.
        """
        from tenant_sdk.generate import generate

        return generate(self, prompt, adapter, max_new_tokens, on_text, fixed_length=fixed_length, **options)

    @takes_options(EngineOptions, RequestOptions, StoreOptions, without=NOT_OF_MANY)
    def generate_many(
        self,
        prompts: Sequence[str | Iterable[Mapping[str, str]]],
        adapters: str | Path | Sequence[str | Path | None] | None = None,
        max_new_tokens: int | None = None,
        progress: bool = True,
        **options: Unpack[ManyKeywords],
    ) -> list[str]:
        """Answers many prompts at once, with an `Engine` that exists for this call only (docs/serving.md).

        Nothing of a prompt is sent before all prompts are accepted. Options of a request apply to every prompt.

        Args:
            prompts: the prompts, each a text or messages as for `generate`.
            adapters: an adapter folder for all prompts, or a list with a folder or None for each prompt; None stands
                for the base model. All adapter folders of one call must be subfolders of one folder.
            max_new_tokens: the most tokens of each answer; None for 128, or for fewer if the context has less room.
            progress: whether a progress bar is shown on stderr.
            **options: those of `EngineOptions`, `RequestOptions` and `StoreOptions`.

        Returns:
            The answers, in the order of the prompts.

        Raises:
            ConfigurationError: a prompt, an adapter, a length or an option is impossible. Nothing of any prompt was
                sent. The message names the prompt's index, as in "prompts[3]: ...".
            PromptsFailed: some prompts failed later, each for a reason of its own, such as an adapter that holds NaN.
                The other prompts were answered, and the error holds their answers.
            VeilbaseError: the provider, the mask or the tenant's disk failed, so that no answers are returned.
        """
        from tenant_sdk.serving.many import generate_many

        return generate_many(self, prompts, adapters, max_new_tokens, progress, **options)

    @takes_options(*OPTION_KINDS)
    def serve(
        self,
        adapters: str | Path | None = None,
        *,
        settings: EndpointSettings | None = None,
        on_ready: Callable[[str], None] | None = None,
        **options: Unpack[EndpointKeywords],
    ) -> Endpoint:
        """Returns an HTTP endpoint with OpenAI's interface, for inference and fine-tuning (docs/endpoint.md).

        Args:
            adapters: the folder of adapters; None serves only the base model, and the adapters of a catalogue.
            settings: where to listen and what to release; by default loopback, with a new key.
            on_ready: called with the base URL when the endpoint accepts requests.
            **options: those of `EndpointOptions`, `EngineOptions` and `StoreOptions`.

        Raises:
            ConfigurationError: see `Endpoint`.
        """
        from tenant_sdk.endpoint.server import Endpoint

        return Endpoint(self, adapters, settings, on_ready=on_ready, **options)

    @names_keywords
    def fetch_hints(self, backward: bool = False) -> None:
        """Fetches or computes the lattice mask's hints (products of weights and a public matrix), with a progress bar;
        other masks have no hints. docs/masks.md, "Where hints come from", says which of the two, and why.

        Args:
            backward: whether hints for gradients, which fine-tuning needs, are included.
        """
        directions = (Direction.FORWARD, Direction.BACKWARD) if backward else (Direction.FORWARD,)
        session = self._open()
        with session.executor.in_session():
            prefetch_hints(session.scheme, session.asked, self._bundle(), directions, self._progress)

    @names_keywords
    def prepare(self, num_tokens: int, backward: bool = False) -> None:
        """Makes masks ahead of use, so that the next calls need not wait for them.

        Args:
            num_tokens: the number of tokens to make masks for; fewer are made if the pool of masks has less room.
            backward: whether masks for gradients, which fine-tuning needs, are made too.
        """
        directions = (Direction.FORWARD, Direction.BACKWARD) if backward else (Direction.FORWARD,)
        session = self._open()
        with session.executor.in_session():
            prepare_masks(session.scheme, session.asked, self._bundle(), directions, num_tokens, self._progress)

    @names_keywords
    def explain(self, everything: bool = False) -> str:
        """Prints, and returns as text, the privacy in force: scheme, assumption, parameters, what stays visible, costs.

        This method also works after a reply failed its check, and then says that the session has ended. In a terminal,
        what is printed is wrapped to its width; the text that is returned has one line for each subject.

        Args:
            everything: whether lines about DoRA, about other kinds of adapters and about fine-tuning are there although
                this session has not used them; a line names those that are left out. They are always there once a
                model was made for more than `generate`: by `finetune`, `load_model` or an engine.
        """
        session = self._open()
        problem = None if session.verifier is not None else problem_of_text(self, self._plan, self._bundle)
        left_out = set() if everything or self._num_others else self._not_in_use
        text = explain(session, self._plan, problem, left_out)
        show(text)
        return text

    def close(self) -> None:
        """Drops secrets and closes the connections. After this, the client cannot be used again."""
        with self._lock:
            self._closed = True
            if self._session is not None:
                self._session.close()

    def __enter__(self) -> TenantClient:
        """Connects and returns the client, so that a wrong URL or identity raises an error at once."""
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
