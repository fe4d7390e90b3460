"""Text from the base model or an adapter, with the KV cache on the tenant's side.

Guarantees: a length, an option or a prompt that cannot be is one line; what fails inside the model, the provider or the
user's own functions is passed on as it is.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TextStreamer

from tenant_sdk.adapters import adapted_model, positive, virtual_tokens
from tenant_sdk.dataset import RENDER_ERRORS
from tenant_sdk.text.rows import check_fits, pad_token, padded_prompt
from wire.errors import ConfigurationError

if TYPE_CHECKING:
    from tenant_sdk.client import TenantClient


DEFAULT_NEW_TOKENS = 128
"""Where none is asked for, or fewer, as the context leaves."""

_OWN_OPTIONS = (
    *("inputs", "input_ids", "inputs_embeds", "attention_mask", "streamer", "return_dict_in_generate"),
    "custom_generate",
)
"""Arguments of transformers' `generate` that are made here, or that give something other than text."""


class _Callback(TextStreamer):  # type: ignore[misc]
    """Hands finished words to a function."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)


def generate(
    client: TenantClient,
    prompt: str | Iterable[Mapping[str, str]],
    adapter: str | Path | None = None,
    max_new_tokens: int | None = None,
    on_text: Callable[[str], None] | None = None,
    **options: Any,
) -> str:
    """Answers a prompt; greedy unless `do_sample=True`.

    Args:
        client: connected or not.
        prompt: a user's message, or a list of messages; without a chat template the text is continued as it is.
        adapter: a PEFT adapter folder; None for the base model.
        max_new_tokens: length limit of the answer, which has to fit into the context with the prompt and an adapter's
            virtual tokens; None for DEFAULT_NEW_TOKENS, or fewer where the context leaves fewer.
        on_text: called with each piece of text as it is ready; not with beam search.
        options: passed to transformers' `generate`.

    Returns:
        The answer, special tokens removed.

    Raises:
        ConfigurationError: no such adapter, or it does not fit the model; a length or an option that cannot be.
    """
    _check_options(max_new_tokens, on_text, options)
    tokenizer = client.tokenizer
    model = adapted_model(client, adapter)
    num_virtual = virtual_tokens(getattr(model, "active_peft_config", None))
    inputs, attention_mask = _inputs(client, model, tokenizer, prompt, num_virtual)
    num_new = _answer_length(max_new_tokens, inputs.shape[1], num_virtual, client.context_length)
    settings = {"do_sample": False, "max_new_tokens": num_new, **options, "return_dict_in_generate": False}
    if on_text is not None:  # a checkpoint's generation config may ask for beams, which have no text before their end
        settings.setdefault("num_beams", 1)
    if not settings["do_sample"]:  # sampling defaults of a checkpoint's generation config would only warn
        settings = {"temperature": None, "top_p": None, "top_k": None, **settings}
    if model.generation_config.pad_token_id is None:
        settings.setdefault("pad_token_id", tokenizer.pad_token_id or tokenizer.eos_token_id)
    client.fetch_hints()
    streamer = _Callback(tokenizer, on_text) if on_text is not None else None
    with torch.no_grad(), _option_errors(options):
        output = model.generate(inputs, attention_mask=attention_mask, streamer=streamer, **settings)
    return str(tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True))


def _inputs(
    client: TenantClient, model: Any, tokenizer: Any, prompt: Any, num_virtual: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask of a prompt, shape (1, length); with a bucket, of exactly its length."""
    if client.bucket is None:
        inputs = encode_prompt(tokenizer, prompt)
        return inputs.to(model.device), torch.ones_like(inputs).to(model.device)
    if getattr(model, "_is_stateful", False):
        raise ConfigurationError("pad_rows is not possible here: this model's state would take the padding in")
    check_fits(client.bucket, client.context_length - num_virtual - 1, " beside an answer")
    ids, seen = padded_prompt(prompt_ids(tokenizer, prompt), client.bucket, pad_token(tokenizer))
    return torch.tensor([ids], device=model.device), torch.tensor([seen], device=model.device)


def _check_options(max_new_tokens: int | None, on_text: Any, options: Mapping[str, Any]) -> None:
    """What can be said of options before anything is loaded."""
    if max_new_tokens is not None:
        positive("max_new_tokens", max_new_tokens)
    for name in _OWN_OPTIONS:
        if name in options:
            raise ConfigurationError(f"generate does not take {name}: it reads the prompt and returns text")
    for name in ("num_beams", "num_return_sequences"):
        if name in options:
            positive(name, options[name])
    if on_text is not None and options.get("num_beams", 1) > 1:
        raise ConfigurationError("on_text needs num_beams=1: beam search has no text before its end")


def _answer_length(asked: int | None, num_prompt: int, num_virtual: int, context: int) -> int:
    """The length limit that fits; raises ConfigurationError where none does."""
    room = context - num_prompt - num_virtual
    beside = f" beside the adapter's {num_virtual} virtual ones" if num_virtual else ""
    if room < 1:
        raise ConfigurationError(f"the prompt has {num_prompt} tokens{beside}, the model's context holds {context}")
    if asked is not None and asked > room:
        raise ConfigurationError(
            f"the prompt has {num_prompt} tokens{beside} and max_new_tokens is {asked}, the model's context holds "
            f"{context}: ask for at most {room}"
        )
    return min(DEFAULT_NEW_TOKENS, room) if asked is None else asked


@contextmanager
def _option_errors(options: Mapping[str, Any]) -> Iterator[None]:
    """transformers' refusals as one line that names the option; its own text may quote token ids."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, ArithmeticError) as exc:
        if not _raised_by_generation(exc):
            raise
        named = [name for name in options if name in str(exc)] or list(options)
        if named:
            shown = ", ".join(map(ascii, named))[:200]
            text = f"transformers' generate does not take {shown} as given: see the options of its GenerationConfig"
        else:
            text = f"transformers cannot use the checkpoint's generation_config.json ({type(exc).__name__})"
        raise ConfigurationError(text) from None


def _raised_by_generation(exc: Exception) -> bool:
    """Whether transformers' generation code itself refused something, not a model or a function of the user's."""
    frames = [frame for frame, _ in traceback.walk_tb(exc.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")).startswith("transformers.generation.")


def encode_prompt(tokenizer: Any, prompt: str | Iterable[Mapping[str, str]]) -> torch.Tensor:
    """Token ids of a prompt, shape (1, length).

    Raises:
        ConfigurationError: an empty prompt, or one that the chat template does not take.
    """
    ids = prompt_ids(tokenizer, prompt)
    if not ids:
        raise ConfigurationError("the prompt is empty")
    return torch.tensor([ids])


def prompt_ids(tokenizer: Any, prompt: str | Iterable[Mapping[str, str]]) -> list[int]:
    """Token ids of a prompt, perhaps none."""
    if getattr(tokenizer, "chat_template", None):
        try:
            turns: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(dict, prompt)
            ids = tokenizer.apply_chat_template(list(turns), add_generation_prompt=True, return_dict=True)["input_ids"]
        except RENDER_ERRORS as exc:  # a template may raise nearly anything; its text would show the prompt
            raise ConfigurationError(
                f"the model's chat template does not take this prompt ({type(exc).__name__}): expected a text, or "
                "messages with role and content"
            ) from None
    elif isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
    else:
        raise ConfigurationError("this model has no chat template: expected a text, not messages")
    return list(ids)
