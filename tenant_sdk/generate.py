"""This module generates text from the base model or an adapter. The KV cache stays with the tenant.

Guarantees: an impossible length, option or prompt is refused with a one-line error. An error inside the model, the
provider or the user's own functions is passed on unchanged.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList, TextStreamer

from tenant_sdk.fixed_length import (
    FiniteLogits,
    cut_at_stop,
    fixed_settings,
    no_guessing,
    refuse_early_ends,
    refuse_guessing,
)
from tenant_sdk.model.run_state import RunState, run_states
from tenant_sdk.peft_model import adapted_model, virtual_tokens
from tenant_sdk.plain_values import WrongOption, positive, true_or_false
from tenant_sdk.session_protocol import TextSession
from tenant_sdk.text.ready import ReadyText, ReadyTokens, ready_ids
from tenant_sdk.text.rows import CutWarning, check_fits, pad_token, padded_prompt
from tenant_sdk.text.source import SafeDecoding, TokenizerFailed, surviving
from tenant_sdk.text.template import TemplateDoesNotFit, TemplateRefuses
from tenant_sdk.training.token_rows import RENDER_ERRORS
from tenant_sdk.warn import warn_and_go_on
from wire.errors import ConfigurationError

DEFAULT_NEW_TOKENS = 128
"""The default length limit of an answer, in tokens; the limit is lower if the context has room for fewer tokens."""

_PROBE = [{"role": "user", "content": "a"}]
"""The conversation that a chat template has to fit, if it fits any."""
_OWN_OPTIONS = (
    *("inputs", "input_ids", "inputs_embeds", "attention_mask", "streamer", "return_dict_in_generate"),
    "custom_generate",
)
"""Arguments of transformers' `generate` that a user may not pass: this module sets them itself, or they make `generate`
return something other than tokens."""


class _Callback(TextStreamer):  # type: ignore[misc]
    """Passes finished words to the user's function until the first stop token, or until a value is NaN or infinite."""

    def __init__(
        self, tokenizer: Any, on_text: Callable[[str], None], stop_ids: Collection[int], run: RunState
    ) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._on_text, self._stop_ids, self._run = on_text, stop_ids, run
        self._is_over = False

    def put(self, value: torch.Tensor) -> None:
        if self._is_over or self._run.sends_zeros:
            return
        is_prompt = self.next_tokens_are_prompt
        super().put(value)
        if not is_prompt and int(value.reshape(-1)[-1]) in self._stop_ids:
            self.end()

    def end(self) -> None:
        if not self._is_over and not self._run.sends_zeros:
            super().end()
        self._is_over = True

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)


def generate(
    session: TextSession,
    prompt: str | Iterable[Mapping[str, str]],
    adapter: str | Path | None = None,
    max_new_tokens: int | None = None,
    on_text: Callable[[str], None] | None = None,
    *,
    fixed_length: bool = False,
    **options: Any,
) -> str:
    """Answers a prompt; `TenantClient.generate` describes arguments and errors.

    Args:
        session: the tenant's session, which this function connects if the session is not connected yet.
        prompt, adapter, max_new_tokens, on_text, fixed_length, options: the arguments of `TenantClient.generate`.

    Returns:
        The text of the answer without special tokens.
    """
    _check_options(max_new_tokens, on_text, options)
    if true_or_false("fixed_length", fixed_length):
        refuse_early_ends(options)
    tokenizer = session.tokenizer
    model = adapted_model(session, adapter)
    num_virtual = virtual_tokens(getattr(model, "active_peft_config", None))
    inputs, attention_mask = _inputs(session, model, tokenizer, prompt, num_virtual)
    num_new = answer_length(max_new_tokens, inputs.shape[1], num_virtual, session.context_length)
    settings = {"do_sample": False, "max_new_tokens": num_new, **no_guessing(), **options}
    settings["return_dict_in_generate"] = False
    stop_ids = (
        stop_ids_given(settings.get("eos_token_id", model.generation_config.eos_token_id)) if fixed_length else ()
    )
    if fixed_length:
        settings |= fixed_settings()
    if on_text is not None:  # a checkpoint's generation config may set beam search, which gives no text before its end
        settings.setdefault("num_beams", 1)
    if not settings["do_sample"]:  # a checkpoint's sampling defaults would only cause warnings
        settings = {"temperature": None, "top_p": None, "top_k": None, **settings}
    if model.generation_config.pad_token_id is None:
        settings.setdefault("pad_token_id", tokenizer.pad_token_id or tokenizer.eos_token_id)
    session.fetch_hints()
    decoding = SafeDecoding(tokenizer)
    with torch.no_grad(), run_states(model).own(may_stop=not fixed_length) as run, _option_errors(options):
        finite = FiniteLogits(run, bounds=fixed_length)
        settings["logits_processor"] = LogitsProcessorList([finite, *_processors(options)])
        streamer = _Callback(decoding, on_text, stop_ids, run) if on_text is not None else None
        output = model.generate(inputs, attention_mask=attention_mask, streamer=streamer, **settings)
    run.finish()
    text = decoding.decode(cut_at_stop(output[0, inputs.shape[1] :].tolist(), stop_ids), skip_special_tokens=True)
    decoding.check()
    return text


def _processors(options: Mapping[str, Any]) -> Iterable[Any]:
    """Returns the logits processors that the user passed."""
    given = options.get("logits_processor") or ()
    if not isinstance(given, Iterable):
        raise ConfigurationError(f"logits_processor is a list of logits processors, got {type(given).__name__}")
    return given


def stop_ids_given(given: Any) -> tuple[int, ...]:
    """Returns the stop token ids of `eos_token_id`, which transformers takes as None, one number or several. Raises
    ConfigurationError for anything else."""
    if given is None:
        return ()
    try:
        return tuple(map(int, torch.as_tensor(given).reshape(-1).tolist()))
    except (TypeError, ValueError, RuntimeError) as exc:
        raise ConfigurationError(
            f"eos_token_id is the number of a token or a list of them, got {type(given).__name__}"
        ) from exc


def _inputs(
    session: TextSession, model: Any, tokenizer: Any, prompt: Any, num_virtual: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids and attention mask of a prompt, each of shape (1, length). If the session pads prompts, the
    length is the session's bucket."""
    ids, seen = prompt_tokens(session, model, tokenizer, prompt, num_virtual)
    return torch.tensor([ids], device=model.device), torch.tensor([seen], device=model.device)


def prompt_tokens(
    session: TextSession, model: Any, tokenizer: Any, prompt: Any, num_virtual: int = 0
) -> tuple[list[int], list[int]]:
    """Returns (token ids, attention mask) of a prompt, which is padded to the bucket if the session pads prompts.

    Args:
        session: the session, which says whether prompts are padded.
        model: the model that reads the prompt.
        tokenizer: the session's tokenizer, or an equal one.
        prompt: a text or messages.
        num_virtual: the number of tokens that an adapter puts before the prompt.

    Raises:
        ConfigurationError: the prompt is empty or cannot be used, or the model's context cannot hold the bucket, the
            number of tokens to which prompts are padded. With a bucket and an unverified provider's tokenizer, an empty
            prompt takes the place of one that the tokenizer or the template fails on.
    """
    if session.bucket is None:
        ids = encode_prompt(tokenizer, prompt)[0].tolist()
        return ids, [1] * len(ids)
    if getattr(model, "_is_stateful", False):
        raise ConfigurationError("pad_rows is not possible here: this model's state would take the padding in")
    check_fits(session.bucket, session.context_length - num_virtual - 1, " beside an answer")
    return padded_prompt(_ids_whatever_comes(session, prompt), session.bucket, pad_token(tokenizer))


def _ids_whatever_comes(session: TextSession, prompt: Any) -> list[int]:
    """Returns the token ids of a prompt. If an unverified provider's tokenizer or chat template fails on the prompt,
    issues a warning and returns no ids.

    An unverified provider may choose the texts on which its tokenizer fails, and the numbers of turns that its template
    does not take. A refusal would show this provider that the prompt is one of these.

    Raises:
        TemplateDoesNotFit: an unverified provider's template does not even fit a single message, so that every prompt
            is refused.
        ConfigurationError: the prompt cannot be used, and the provider did not decide that.
    """
    if session.text.origin != "provider":
        return prompt_ids(session.tokenizer, prompt)
    if session.tokenizer.chat_template and not isinstance(prompt, ReadyText | ReadyTokens):
        with suppress(*RENDER_ERRORS):  # of the template; such a prompt is empty, whatever it says
            session.tokenizer.apply_chat_template(_PROBE, add_generation_prompt=True, tokenize=False)
    try:
        return prompt_ids(session.tokenizer, prompt)
    except (TokenizerFailed, TemplateRefuses, TemplateDoesNotFit) as exc:
        warn_and_go_on(f"the prompt could not be used, and an empty one is sent: {exc}", CutWarning)
        return []


def _check_options(max_new_tokens: int | None, on_text: Any, options: Mapping[str, Any]) -> None:
    """Raises ConfigurationError for options that can be refused before anything is loaded."""
    if max_new_tokens is not None:
        positive("max_new_tokens", max_new_tokens)
    for name in _OWN_OPTIONS:
        if name in options:
            raise ConfigurationError(f"generate does not take {name}: it reads the prompt and returns text")
    refuse_guessing(options)
    for name in ("num_beams", "num_return_sequences"):
        if name in options:
            positive(name, options[name])
    if on_text is not None and options.get("num_beams", 1) > 1:
        raise ConfigurationError("on_text needs num_beams=1: beam search has no text before its end")


def answer_length(asked: int | None, num_prompt: int, num_virtual: int, context: int) -> int:
    """Returns the length limit of an answer, in tokens.

    Args:
        asked: the limit that the user gave, or None.
        num_prompt, num_virtual, context: tokens of the prompt, of the adapter, and of the model's whole context.

    Raises:
        ConfigurationError: the context has no room for the limit that the user gave, or for any answer.
    """
    room = context - num_prompt - num_virtual
    beside = f" beside the adapter's {num_virtual} virtual ones" if num_virtual else ""
    if room < 1:
        text = (
            f"the prompt has {num_prompt} tokens{beside}; prompt and answer together may have {context}: shorten the "
            f"prompt by at least {1 - room}"
        )
        raise WrongOption(text, "prompt")
    if asked is not None and asked > room:
        raise WrongOption(
            f"the prompt has {num_prompt} tokens{beside} and max_new_tokens is {asked}; together they may have "
            f"{context}: ask for at most {room}",
            "max_new_tokens",
        )
    return min(DEFAULT_NEW_TOKENS, room) if asked is None else asked


@contextmanager
def _option_errors(options: Mapping[str, Any]) -> Iterator[None]:
    """Turns transformers' refusals, whose text may quote token ids, into a one-line ConfigurationError that names the
    option, or the checkpoint's generation settings if the user passed no options."""
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
        raise ConfigurationError(text) from None  # the cause may show values of the prompt


def _raised_by_generation(exc: Exception) -> bool:
    """Returns True if an error was raised in transformers' generation code, and False if a model or the user's own
    function raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(exc.__traceback__)]
    return str(frames[-1].f_globals.get("__name__", "")).startswith("transformers.generation.")


def encode_prompt(tokenizer: Any, prompt: Any) -> torch.Tensor:
    """Returns the token ids of a prompt, shape (1, length).

    Raises:
        WrongOption: the prompt is empty.
        ConfigurationError: the chat template does not take it.
    """
    ids = prompt_ids(tokenizer, prompt)
    if not ids:
        raise WrongOption("the prompt is empty", "prompt")
    return torch.tensor([ids])


def prompt_ids(
    tokenizer: Any, prompt: str | ReadyText | ReadyTokens | Iterable[Mapping[str, str]]
) -> list[int]:  # fmt: skip
    """Returns the token ids of a prompt, which may be an empty list.

    A `ReadyText` is continued as it is, and `ReadyTokens` are taken as they are. To any other prompt, the chat template
    is applied if there is one.

    Raises:
        TokenizerFailed: the tokenizer fails on this prompt.
        TemplateRefuses: the chat template does not take this prompt.
        ConfigurationError: messages were given for a model without a template.
    """
    if isinstance(prompt, ReadyText | ReadyTokens):
        return ready_ids(tokenizer, prompt)
    if getattr(tokenizer, "chat_template", None):
        try:
            turns: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(dict, prompt)
            with surviving("the prompt", *RENDER_ERRORS):
                rendered = tokenizer.apply_chat_template(list(turns), add_generation_prompt=True, return_dict=True)
            ids = rendered["input_ids"]
        except RENDER_ERRORS as exc:  # a template may raise nearly anything, with the prompt in the error text
            raise TemplateRefuses(
                f"the model's chat template does not take this prompt ({type(exc).__name__}): expected a text, or "
                "messages with role and content"
            ) from None
    elif isinstance(prompt, str):
        with surviving("the prompt"):
            ids = tokenizer(prompt)["input_ids"]
    else:
        raise ConfigurationError("this model has no chat template: expected a text, not messages")
    return list(ids)
