"""Text from the base model or an adapter, with the KV cache on the tenant's side."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from safetensors import SafetensorError
from transformers import TextStreamer

from tenant_sdk.dataset import RENDER_ERRORS
from tenant_sdk.model import context_length, ignore_renamings
from wire.errors import ConfigurationError

if TYPE_CHECKING:
    from tenant_sdk.client import TenantClient


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
    max_new_tokens: int = 128,
    on_text: Callable[[str], None] | None = None,
    **options: Any,
) -> str:
    """Answers a prompt; greedy unless `do_sample=True`.

    Args:
        client: connected or not.
        prompt: a user's message, or a list of messages; without a chat template the text is continued as it is.
        adapter: a PEFT adapter folder; None for the base model.
        max_new_tokens: length limit of the answer.
        on_text: called with each piece of text as it is ready.
        options: passed to transformers' `generate`.

    Returns:
        The answer, special tokens removed.

    Raises:
        ConfigurationError: no such adapter, or it does not fit the model.
    """
    tokenizer = client.tokenizer
    model = adapted_model(client, adapter)
    inputs = encode_prompt(tokenizer, prompt).to(model.device)
    context = context_length(client.connect())
    if inputs.shape[1] >= context:
        raise ConfigurationError(f"the prompt has {inputs.shape[1]} tokens, the model's context holds {context}")
    settings = {"do_sample": False, "max_new_tokens": max_new_tokens, **options}
    if not settings["do_sample"]:  # sampling defaults of the provider's generation config would only warn
        settings = {"temperature": None, "top_p": None, "top_k": None, **settings}
    if model.generation_config.pad_token_id is None:
        settings.setdefault("pad_token_id", tokenizer.pad_token_id or tokenizer.eos_token_id)
    client.fetch_hints()
    streamer = _Callback(tokenizer, on_text) if on_text is not None else None
    with torch.no_grad():
        output = model.generate(inputs, attention_mask=torch.ones_like(inputs), streamer=streamer, **settings)
    return str(tokenizer.decode(output[0, inputs.shape[1] :], skip_special_tokens=True))


def encode_prompt(tokenizer: Any, prompt: str | Iterable[Mapping[str, str]]) -> torch.Tensor:
    """Token ids of a prompt, shape (1, length)."""
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
    if not ids:
        raise ConfigurationError("the prompt is empty")
    return torch.tensor([ids])


def adapted_model(client: TenantClient, adapter: str | Path | None) -> Any:
    """The client's model with an adapter on it, kept until another adapter is asked for."""
    key = _adapter_key(adapter)
    if client.loaded is None or client.loaded[0] != key:
        client.loaded = None
        model: Any = client.load_model()
        if adapter is not None:
            try:
                with warnings.catch_warnings():
                    ignore_renamings()
                    model = PeftModel.from_pretrained(model, str(adapter)).eval()
            except (ValueError, OSError, KeyError, RuntimeError, TypeError, SafetensorError) as exc:
                raise ConfigurationError(f"{adapter} is no adapter for this model ({type(exc).__name__})") from None
        client.loaded = (key, model)
    return client.loaded[1]


def _adapter_key(adapter: str | Path | None) -> tuple[str, int] | None:
    if adapter is None:
        return None
    weights = Path(adapter) / "adapter_model.safetensors"
    if not weights.is_file():
        raise ConfigurationError(f"{adapter} holds no adapter_model.safetensors: is it an adapter folder?")
    return str(Path(adapter).resolve()), weights.stat().st_mtime_ns
