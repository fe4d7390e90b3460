"""This module bounds the tokens of a request, prompt and answer together, by the model's context and the engine's own
limit."""

from __future__ import annotations

from tenant_sdk.generate import DEFAULT_NEW_TOKENS, answer_length
from tenant_sdk.plain_values import positive
from wire.errors import ConfigurationError


class ContextLimit:
    """Holds the largest number of tokens that a request may have, prompt and answer together."""

    def __init__(self, max_context: int | None, model_context: int, bucket: int | None) -> None:
        """Checks the engine's limit.

        Args:
            max_context: the engine's limit, in tokens; None means the model's context.
            model_context: the tokens that the model's context holds.
            bucket: the number of tokens to which prompts are padded; None if they are not padded.

        Raises:
            ConfigurationError: the limit is larger than the model's context, or leaves no room for an answer.
        """
        self.num_tokens = model_context if max_context is None else positive("max_context", max_context)
        if self.num_tokens > model_context:
            raise ConfigurationError(f"max_context is {self.num_tokens}, the model's context holds {model_context}")
        if max_context is not None and self.num_tokens <= (bucket or 1):
            raise ConfigurationError(
                f"max_context is {self.num_tokens}: a prompt of {bucket or 1} tokens leaves no room for an answer"
            )
        self._is_own = self.num_tokens < model_context

    def answer_length(self, asked: int | None, num_prompt: int, default: int = DEFAULT_NEW_TOKENS) -> int:
        """Returns the length limit of an answer, in tokens.

        Args:
            asked: the limit that the user gave; None means `default`, or fewer if there is less room.
            num_prompt: the number of tokens of the prompt.
            default: a limit above 0.

        Raises:
            ConfigurationError: `asked` is not a whole number above 0, or there is no room for it, or for any answer.
        """
        if asked is not None:
            positive("max_new_tokens", asked)
        room = self.num_tokens - num_prompt
        if self._is_own and room < (asked or 1):
            advice = f"ask for at most {room}" if room > 0 else "the prompt is too long"
            raise ConfigurationError(
                f"the prompt has {num_prompt} tokens, and prompt and answer together may have {self.num_tokens} here "
                f"(max_context): {advice}"
            )
        answer_length(asked, num_prompt, 0, self.num_tokens)  # Raises an error if there is no room.
        return min(default, room) if asked is None else asked
