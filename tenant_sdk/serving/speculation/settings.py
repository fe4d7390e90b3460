"""This module holds the settings of speculative decoding, and makes the drafter that they describe."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from runtime.loading import loading
from tenant_sdk.model.run_state import NO_MODEL, run_states
from tenant_sdk.plain_values import positive
from tenant_sdk.serving.speculation.draft import DraftModel
from tenant_sdk.serving.speculation.drafter import Drafter, PromptLookup
from wire.errors import ConfigurationError


@dataclass(frozen=True, eq=False)
class Speculation:
    """Holds the settings of an engine's speculation.

    Attributes:
        num_drafted: the most tokens that are drafted for a request before a pass. Every pass has this many
            additional rows for every answer, whether tokens are drafted or not, so that the rows of a pass do not show
            what was drafted.
        draft: a transformers model at the tenant that drafts, with the same tokenizer as the remote model. None drafts
            by prompt lookup (drafter.py).
        draft_tokenizer: the tokenizer of `draft`; None reads the tokenizer from the place from which `draft` was
            loaded.
    """

    num_drafted: int = 7
    draft: PreTrainedModel | None = field(default=None, repr=False)
    draft_tokenizer: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        """Raises ConfigurationError if a setting is impossible."""
        positive("num_drafted", self.num_drafted)
        if self.draft is None:
            return
        if not isinstance(self.draft, PreTrainedModel):
            raise ConfigurationError(
                f"draft is a transformers model, got {type(self.draft).__name__}: merge an adapter into its model"
            )
        if run_states(self.draft) is not NO_MODEL:
            raise ConfigurationError(
                "draft is a model at the tenant: a remote one would make calls whose number shows the text"
            )


def num_drafted_of(speculation: Speculation | None) -> int:
    """Returns how many rows for drafted tokens each answer has in every step; 0 without speculation.

    Raises:
        ConfigurationError: `speculation` is something else than a `Speculation`.
    """
    if speculation is None:
        return 0
    if not isinstance(speculation, Speculation):
        raise ConfigurationError(f"speculation is a Speculation or None, got {type(speculation).__name__}")
    return speculation.num_drafted


def make_drafter(
    speculation: Speculation | None, tokenizer: Any, model: Any, kv_dtype: str, step_tokens: int
) -> Drafter | None:
    """Returns the drafter of an engine; None without speculation.

    Args:
        speculation: the engine's settings.
        tokenizer: the session's tokenizer.
        model: the remote model.
        kv_dtype: the type in which keys and values are kept.
        step_tokens: the most rows of a step.

    Raises:
        ConfigurationError: the draft has another tokenizer than the session, or cannot be used by an engine.
    """
    if speculation is None:
        return None
    draft = speculation.draft
    if draft is None:
        return PromptLookup()
    own: Any = _tokenizer_of(draft) if speculation.draft_tokenizer is None else speculation.draft_tokenizer
    if not hasattr(own, "get_vocab"):
        raise ConfigurationError(f"draft_tokenizer is a transformers tokenizer, got {type(own).__name__}")
    if own.get_vocab() != tokenizer.get_vocab():
        raise ConfigurationError(
            "the draft has another tokenizer than the remote model: its vocabulary maps tokens to other numbers"
        )
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    try:
        return DraftModel(draft, speculation.num_drafted, kv_dtype, step_tokens, vocab_size, model.device)
    except ConfigurationError as exc:
        raise ConfigurationError(f"this draft cannot be used: {exc}") from None
    except Exception as exc:
        raise ConfigurationError(f"this draft cannot be used: it fails on one token ({type(exc).__name__})") from exc


def _tokenizer_of(draft: PreTrainedModel) -> Any:
    """Returns the tokenizer that is stored, on this machine, where a model was loaded from.

    Raises:
        ConfigurationError: there is no tokenizer.
    """
    failure = "the draft's tokenizer is not where the draft was loaded from: pass it as draft_tokenizer"
    if not draft.name_or_path:
        raise ConfigurationError(failure)
    try:
        with loading():
            return AutoTokenizer.from_pretrained(draft.name_or_path, local_files_only=True, trust_remote_code=False)
    except Exception as exc:  # the tokenizers library raises bare Exception
        raise ConfigurationError(failure) from exc
