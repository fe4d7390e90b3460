"""Provides a test double for code that uses `TenantClient`: a provider in this process whose replies a test scripts.

    from tenant_sdk.testing import Corrupt, ScriptedProvider

    def forge_the_third(call):
        return Corrupt() if call.number == 2 else None

    with ScriptedProvider(forge_the_third) as provider, provider.client() as client:
        with pytest.raises(VerificationFailed):
            client.generate("who?")
    assert len(provider.calls) == 3

Guarantees: the network is not used, unless `model` is an id of a hub. Products are really computed, by the provider
that `inproc:` URLs use, so what the script leaves alone is what a provider with this model answers; masks, checks and
the ledger are the client's own. A handler and the records of calls get shapes and names, and never rows, masks or
seeds. Everything that the double writes is in a temporary folder, which `close` removes.

It does not guarantee what needs two ends: frames, TLS, quotas, the retries of a connection, or that a provider which
went away has to be found again; there is no privacy boundary, as everything is in one process.
"""

from __future__ import annotations

import copy
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from runtime.loading import loading
from tenant_sdk import embedded
from tenant_sdk.client import TenantClient
from wire.errors import (
    ConfigurationError,
    DeadlineExceeded,
    MalformedFrame,
    Unavailable,
    VeilbaseError,
    WireCode,
    code_of,
    error_from_code,
)
from wire.frame import DTYPES, Call, Direction, FrameType, held_bytes, payload_bytes
from wire.limits import deadline_s
from wire.manifest import Manifest
from wire.payload import Payload
from wire.transport.connection import Pending
from wire.transport.inproc import Handler, InprocConnection

__all__ = [
    "CHAT_TEMPLATE",
    "SPECIAL_TOKENS",
    "Corrupt",
    "Delay",
    "Drop",
    "Fail",
    "ProviderCall",
    "ScriptedProvider",
    "character_tokenizer",
    "save_tiny_model",
]

# ---- a tiny model ----------------------------------------------------------------------------------------------------

SPECIAL_TOKENS = ("<pad>", "<s>", "<|end|>", "<unk>", "<|user|>", "<|assistant|>")
"""The tokens of a `character_tokenizer` that stand for no character. The id of a token is its position here."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The chat template of a tiny model: a role token before each message, and an end token after it."""


def character_tokenizer(template: str | dict[str, str] | None = CHAT_TEMPLATE) -> Any:
    """Returns a transformers tokenizer for which each printable ASCII character, and each line feed, is one token.

    Args:
        template: a chat template, or several by name; None for a tokenizer without one.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [*SPECIAL_TOKENS, "\n", *map(chr, range(32, 127))]
    backend = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))  # noqa: S106
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL_TOKENS])
    named = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=False))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, **named)
    made.chat_template = template
    return made


def save_tiny_model(folder: str | Path, seed: int = 0, **config: Any) -> Path:
    """Saves a Llama with random weights, and a `character_tokenizer`, which takes a fraction of a second.

    Two layers of width 32, four heads and a context of 1,024 tokens make 20,000 weights. Their spread of 0.2 keeps the
    logits so far apart that a mask's error seldom changes a token. The caller's random state is left as it is.

    Args:
        folder: where the model is saved, as a Hugging Face folder.
        seed: of the weights; the same seed and config give the same model.
        config: fields of transformers' `LlamaConfig`, such as `num_hidden_layers=1`.

    Returns:
        The folder.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.2,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]), loading():
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**{**sizes, **config})).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return Path(folder)


# ---- what a handler gets and returns ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProviderCall:
    """Describes one request to the provider, by what the provider needs to know to compute it. It holds no numbers of
    the request.

    Attributes:
        number: the number of calls before this one, of all clients and threads, since the provider was opened or since
            `forget_calls`.
        group: the number of the layer group, which is a set of layers that read the same input.
        layers: the names of these layers, such as ("model.layers.0.self_attn.q_proj", ...).
        direction: `forward` for rows times the weight, `backward` for gradients times the transposed weight.
        purpose: `product` for rows of the model, `effect` for a product without the bias, `hint` for rows that the
            provider expands from a seed, which a mask asks for ahead of use.
        num_rows: the number of rows.
        cols: the number of columns of the request.
        reply_cols: the number of columns of the reply.
        dtype: of the numbers of request and reply: torch.int32 in ring arithmetic, else torch.float32.
    """

    number: int
    group: int
    layers: tuple[str, ...]
    direction: Literal["forward", "backward"]
    purpose: Literal["product", "effect", "hint"]
    num_rows: int
    cols: int
    reply_cols: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Delay:
    """Makes the honest reply arrive so many seconds after the call was sent; calls that are under way together wait
    together. If the seconds are beyond the deadline of the call (`wire.limits.deadline_s`: 30 s and a second for each
    megabyte), the client has DeadlineExceeded at once, and no test waits for it."""

    seconds: float

    def __post_init__(self) -> None:
        """Raises ConfigurationError if the seconds are negative."""
        if not self.seconds >= 0:
            raise ConfigurationError(f"expected a delay of 0 seconds or more, got {self.seconds}")


@dataclass(frozen=True)
class Corrupt:
    """Changes the reply. Without `change`, the first number is larger by one (mod 2^32 in the ring), which is the least
    that a provider can lie.

    Attributes:
        change: gets a copy of the honest reply, shape (num_rows, reply_cols), dtype as in the record, on the CPU; it
            may write to it, and returns the reply that the client gets. Of another shape or dtype, the client has
            MalformedFrame, as from a connection.
    """

    change: Callable[[torch.Tensor], torch.Tensor] | None = None


_CAN_BE_SAID = tuple(type(error_from_code(code, 1)) for code in WireCode)


@dataclass(frozen=True)
class Fail:
    """Makes the client get an error in place of the reply, and nothing is computed.

    A connection over the network sends again by itself what was refused with a time to come back
    (QuotaExceeded, Unavailable with `retry_s`). The double has no such connection: the error is what comes after that.

    Attributes:
        error: a class of `tenant_sdk` that a provider can answer with, such as `Unavailable`, which gets the text that
            a client shows for it; or an error of such a class. Another one is refused with ConfigurationError, since no
            provider could cause it in this place.
    """

    error: VeilbaseError | type[VeilbaseError]

    def __post_init__(self) -> None:
        """Checks the class of the error."""
        kind = self.error if isinstance(self.error, type) else type(self.error)
        if kind not in _CAN_BE_SAID:
            known = ", ".join(each.__name__ for each in _CAN_BE_SAID)
            raise ConfigurationError(
                f"expected an error that a provider can answer with ({known}), got {kind.__name__}"
            )

    def made(self, number: int) -> VeilbaseError:
        """Returns a new error for the call of this number."""
        if isinstance(self.error, type):
            return error_from_code(code_of(self.error("")), number)
        return copy.copy(self.error)


@dataclass(frozen=True)
class Drop:
    """Loses the call: no reply comes, and the client has DeadlineExceeded. It has it at once, and no test waits for the
    deadline."""


Action = Delay | Corrupt | Fail | Drop
"""What a handler may return; None stands for the honest reply."""
CallHandler = Callable[[ProviderCall], Action | None]
"""A function that says what becomes of a call."""

# ---- the provider ----------------------------------------------------------------------------------------------------


class ScriptedProvider:
    """Serves a model in this process, and lets a handler decide what becomes of each call. Use it as a context manager.

    It is safe under threads. Several clients may use one provider, by `client` or by its `url`; for mask="shares", open
    two providers, which serve the same tiny model.

    Attributes:
        handler: asked about each call before it is computed; it can be replaced at any time, and None answers honestly.
            It runs in the thread that sends the call, several at a time if there are several such threads, and may wait
            there for an event of the test. What it raises is raised where the client sends the call.
        model: the folder, file or name of the model that is served, for `verify=` and for local results.
        url: the URL for `TenantClient`, valid in this process until `close`.
    """

    __slots__ = (
        "_calls", "_clients", "_home", "_is_closed", "_lock", "_served", "_temporary", "handler", "model", "url",
    )  # fmt: skip
    """All attributes: one that is misspelt is an AttributeError, and not a script that does nothing."""

    def __init__(self, handler: CallHandler | None = None, *, model: str | Path | None = None, seed: int = 0) -> None:
        """Makes the model, and answers at `url` from now on.

        Args:
            handler: see the class.
            model: a folder, GGUF file, hub id or built-in name to serve; None for `save_tiny_model`.
            seed: the seed of the tiny model's weights; only without `model`.
        """
        self.handler = handler
        self._temporary = tempfile.TemporaryDirectory(prefix="veilbase-testing-", ignore_cleanup_errors=True)
        self._home = Path(self._temporary.name)
        self.model = save_tiny_model(self._home / "tiny", seed) if model is None else model
        self._lock = threading.Lock()
        self._served: dict[str, Handler] = {}
        self._calls: list[ProviderCall] = []
        self._clients: list[TenantClient] = []
        self._is_closed = False
        self.url = embedded.answer_by(self._connect)

    def client(self, *, verify: bool | str | Path = True, **options: Any) -> TenantClient:
        """Returns a client of this provider, which `close` closes if it is still open.

        Args:
            verify: True checks every reply against the model that this provider serves; False checks none (and warns as
                `TenantClient` does); or a checkpoint, as for `TenantClient`.
            options: the other options of `TenantClient`, such as `mask` or `weights`. By default `progress` is off, and
                the cache is in this provider's temporary folder.

        Raises:
            ConfigurationError: an option is impossible.
        """
        trusted = self.model if verify is True else None if verify is False else verify
        made = TenantClient(self.url, verify=trusted, **{"progress": False, "cache": self._home / "cache", **options})
        self._clients.append(made)
        return made

    @property
    def calls(self) -> list[ProviderCall]:
        """Returns the records of all calls so far, in the order in which they were sent, also of those that failed."""
        with self._lock:
            return list(self._calls)

    def forget_calls(self) -> None:
        """Drops the records of all calls so far, and counts anew from 0."""
        with self._lock:
            self._calls.clear()

    def close(self) -> None:
        """Closes the clients that `client` made, and removes the temporary folder. Later calls of other clients fail
        with Unavailable."""
        if self._is_closed:
            return
        self._is_closed = True
        embedded.answer_no_more(self.url)
        for each in self._clients:
            each.close()
        self._temporary.cleanup()

    def __enter__(self) -> ScriptedProvider:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _connect(self, weights: str) -> InprocConnection:
        with self._lock:
            if weights not in self._served:
                self._served[weights] = embedded.served_model(str(self.model), weights)
            return _Connection(self._served[weights], self)

    def _decide(self, call: Call, payload: Payload, reply_cols: int, manifest: Manifest) -> tuple[int, Action | None]:
        """Records a call and asks the handler; returns the call's number and what becomes of it."""
        if self._is_closed:
            raise Unavailable("the ScriptedProvider was closed: make calls inside its context")
        layers = tuple(layer.name for layer in manifest.groups[call.group].layers)
        with self._lock:
            record = ProviderCall(
                len(self._calls), call.group, layers,
                "forward" if call.direction is Direction.FORWARD else "backward",
                call.purpose.name.lower(),  # type: ignore[arg-type]
                payload.num_rows, payload.cols, reply_cols, DTYPES[call.arithmetic],
            )  # fmt: skip
            self._calls.append(record)
        handler = self.handler  # another thread may replace it meanwhile
        action = None if handler is None else handler(record)
        if action is not None and not isinstance(action, Delay | Corrupt | Fail | Drop):
            raise TypeError(f"expected a handler's None, Delay, Corrupt, Fail or Drop, got {type(action).__name__}")
        return record.number, action


class _Connection(InprocConnection):
    """Asks the script of a provider before each call. Errors and delays come where the reply is read, as with a
    connection over the network."""

    def __init__(self, handler: Handler, provider: ScriptedProvider) -> None:
        super().__init__(handler)
        self._provider = provider

    def submit(self, call: Call, payload: Payload, reply_cols: int) -> Pending:
        """Computes what the script leaves; see `Connection.submit`."""
        payload.check(call)
        number, action = self._provider._decide(call, payload, reply_cols, self.manifest())
        deadline = deadline_s(held_bytes(call, payload.num_rows, payload.cols, reply_cols))
        if isinstance(action, Fail):
            return self._without_reply(call, payload, action.made(number))
        if isinstance(action, Drop) or (isinstance(action, Delay) and action.seconds >= deadline):
            # the text of wire/transport/multiplexer.py
            return self._without_reply(
                call, payload, DeadlineExceeded(f"no complete answer to request {number} within its deadline")
            )
        sent_at = time.monotonic()
        pending = super().submit(call, payload, reply_cols)
        if isinstance(action, Delay):
            return _Late(pending, sent_at + action.seconds)
        return pending if action is None else _changed(pending.result(), action)

    def _without_reply(self, call: Call, payload: Payload, error: VeilbaseError) -> Pending:
        self.traffic.add(payload_bytes(FrameType.REQUEST, call, payload.num_rows, payload.cols), 0, 1)
        return _Failed(error)


@dataclass(frozen=True)
class _Failed:
    error: VeilbaseError

    def result(self) -> torch.Tensor:
        raise self.error from None


@dataclass(frozen=True)
class _Here:
    reply: torch.Tensor

    def result(self) -> torch.Tensor:
        return self.reply


@dataclass(frozen=True)
class _Late:
    pending: Pending
    due: float

    def result(self) -> torch.Tensor:
        time.sleep(max(0.0, self.due - time.monotonic()))
        return self.pending.result()


def _changed(honest: torch.Tensor, action: Corrupt) -> Pending:
    reply = honest.clone()
    if action.change is not None:
        reply = action.change(reply)
    elif reply.numel():
        reply.view(-1)[0] += 1
    if not isinstance(reply, torch.Tensor) or reply.shape != honest.shape or reply.dtype != honest.dtype:
        return _Failed(MalformedFrame(f"expected a reply of shape {tuple(honest.shape)} and {honest.dtype}"))
    return _Here(reply)
