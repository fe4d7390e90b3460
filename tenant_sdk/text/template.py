"""This module renders a provider's chat template without showing the text to the template.

A chat template is a program, and the provider sees the length of its output as a number of rows. A template that reads
the messages could encode their contents in this length. So the template is rendered over placeholders, once for each
sequence of roles, and each placeholder is replaced by the content of its message afterwards.

Guarantees: the input of the template depends on the roles of a conversation, and on nothing else in it. The result
differs from a rendering of the text itself if the template inspects contents, for example to cut a reasoning block;
such code has no effect here. A template that strips white space around contents works, because the placeholders show
the stripping.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tenant_sdk.text.components import REMEDY
from wire.errors import ConfigurationError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The allowed roles, which are those of transformers' chat format; any other string could carry text into the
template."""

_EDGE = "\u2003"
"""An em space, which is put around each placeholder. If a template calls `strip` or `trim`, the space is gone, which
shows the stripping. A template whose own text contains an em space is refused."""
_MARK = "VeilbasePlaceholder'\"<&{}End"
"""The placeholder of a message's content. Its special characters show whether a template escapes contents for JSON or
HTML."""
_MARKED = re.compile(r"(\u2003?)VeilbasePlaceholder'\"<&(\d+)End(\u2003?)")
_PLAIN_TYPES = (bool, int, type(None))
_MAX_PATTERNS = 256

Rendered = tuple[str | tuple[int, bool, bool], ...]
"""The parts of a rendering, in order. Each part is literal text, or (number of a message, whether the left edge of its
content is stripped, whether the right edge is stripped)."""


class TemplateDoesNotFit(ConfigurationError):
    """Says that the rendering of a template does not contain every placeholder once and unchanged."""

    def __init__(self) -> None:
        """Sets a fixed message, which quotes nothing of the template's output."""
        super().__init__(
            "the provider's chat template does not put message contents into their places unchanged, and is not shown "
            f"the text itself: {REMEDY}"
        )


class TemplateRefuses(ConfigurationError):
    """Says that the chat template raised an error for a prompt."""


def split(render: Callable[[list[dict[str, str]]], str], roles: Sequence[str]) -> Rendered:
    """Renders placeholders for a sequence of roles, and finds the position of each message's content.

    Args:
        render: a function that renders the template: it takes messages and returns text.
        roles: the roles of the conversation's messages, in order.

    Raises:
        TemplateDoesNotFit: a placeholder is missing, changed or appears twice, or the template's own text contains a
            part of one.
    """
    messages = [{"role": role, "content": f"{_EDGE}{_MARK.format(number)}{_EDGE}"} for number, role in enumerate(roles)]
    text = render(messages)
    parts: list[str | tuple[int, bool, bool]] = []
    end = 0
    for match in _MARKED.finditer(text):
        parts.append(text[end : match.start()])
        parts.append((int(match[2]), not match[1], not match[3]))
        end = match.end()
    parts.append(text[end:])
    literal = "".join(part for part in parts if isinstance(part, str))
    found = sorted(part[0] for part in parts if not isinstance(part, str))
    if found != list(range(len(roles))) or "Placeholder" in literal or "2003" in literal.lower() or _EDGE in literal:
        raise TemplateDoesNotFit
    return tuple(parts)


def join(parts: Rendered, contents: Sequence[str]) -> str:
    """Returns the rendered text, with the messages' contents at their positions."""
    return "".join(part if isinstance(part, str) else stripped(contents[part[0]], *part[1:]) for part in parts)


def stripped(content: str, left: bool, right: bool) -> str:
    """Returns a content without white space at the edges that the template strips."""
    content = content.lstrip() if left else content
    return content.rstrip() if right else content


class BlindTemplates:
    """Overrides `apply_chat_template` of a transformers tokenizer, so that the template sees only placeholders.

    This class is a mixin. A template that the caller passes as `chat_template=` is trusted and rendered over the text,
    as transformers does, unless it is one of the provider's templates. If this tokenizer is saved and loaded again,
    transformers makes a plain tokenizer, whose template sees text.
    """

    chat_template: Any

    def apply_chat_template(
        self, conversation: Any, tools: Any = None, documents: Any = None, chat_template: str | None = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Renders and tokenizes conversations as transformers' own method does.

        Args:
            conversation: messages, each with a role of `ROLES` and a text as content, or a list of such conversations.
            tools, documents: must be empty, unless `chat_template` is the caller's own.
            chat_template: the caller's own template, or one of this tokenizer's by name; None for the default.
            options: options of transformers' method, and numbers and switches for the template.

        Raises:
            ConfigurationError: a message has other keys or another role, or an option could carry text into the
                template.
            TemplateDoesNotFit: the template changes contents.
        """
        if chat_template is not None and not self._is_the_providers(chat_template):
            transformers_own: Any = super()
            return transformers_own.apply_chat_template(
                conversation, tools=tools, documents=documents, chat_template=chat_template, **options
            )
        if tools or documents:
            raise ConfigurationError(f"tools and documents would be shown to the provider's chat template: {REMEDY}")
        several = bool(conversation) and not isinstance(conversation[0], Mapping)
        call, variables = _split_options(options)
        texts = [
            self._render_blind(each, chat_template, variables) for each in (conversation if several else [conversation])
        ]
        return self._finish(texts, several, call)

    def _is_the_providers(self, template: str) -> bool:
        """Returns whether `template` is the name or the text of one of this tokenizer's own templates."""
        own = self.chat_template
        return template == own or (isinstance(own, dict) and (template in own or template in own.values()))

    def _render_blind(self, conversation: Any, template: str | None, variables: Mapping[str, Any]) -> str:
        messages = [_checked(message) for message in conversation]
        if not messages:
            raise ConfigurationError("the conversation is empty: expected at least one message")
        roles = tuple(role for role, _ in messages)
        return join(self._pattern(roles, template, dict(variables)), [text for _, text in messages])

    def _pattern(self, roles: tuple[str, ...], template: str | None, variables: dict[str, Any]) -> Rendered:
        """Returns the rendering of a sequence of roles, from a cache if the sequence was rendered before."""
        transformers_own: Any = super()
        patterns: dict[Any, Rendered] = self.__dict__.setdefault("_rendered_patterns", {})
        key = (str(self.chat_template), roles, template, tuple(sorted(variables.items())))
        if key not in patterns:
            if len(patterns) >= _MAX_PATTERNS:
                patterns.clear()

            def render(messages: list[dict[str, str]]) -> str:
                return str(
                    transformers_own.apply_chat_template(messages, chat_template=template, tokenize=False, **variables)
                )

            patterns[key] = split(render, roles)
        return patterns[key]

    def _finish(self, texts: list[str], several: bool, call: dict[str, Any]) -> Any:
        """Tokenizes rendered texts, as transformers' own method does after rendering."""
        rendered: Any = texts if several else texts[0]
        if not call.pop("tokenize", True):
            return rendered
        return_dict, own = call.pop("return_dict", True), call.pop("tokenizer_kwargs", None) or {}
        tokenize: Any = self
        out = tokenize(rendered, add_special_tokens=False, **call, **own)
        return out if return_dict else out["input_ids"]


_OF_THE_CALL = ("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs")
_REFUSED = ("continue_final_message", "return_assistant_tokens_mask", "sanitize_control_tokens")


def _split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (options for tokenizing, variables for the template).

    Raises:
        ConfigurationError: an option is not possible here, or a variable is neither a number nor a switch.
    """
    for name in _REFUSED:
        if options.get(name):
            raise ConfigurationError(f"{name} is not possible with the provider's own chat template: {REMEDY}")
    call = {name: value for name, value in options.items() if name in _OF_THE_CALL}
    variables = {name: value for name, value in options.items() if name not in (*_OF_THE_CALL, *_REFUSED)}
    if not all(isinstance(value, _PLAIN_TYPES) for value in variables.values()):
        raise ConfigurationError(f"only numbers and switches may be given to the provider's chat template: {REMEDY}")
    return call, variables


def _checked(message: Any) -> tuple[str, str]:
    given = {key: value for key, value in dict(message).items() if value is not None}
    role, content = given.get("role"), given.get("content")
    if set(given) != {"role", "content"} or role not in ROLES or not isinstance(content, str):
        raise ConfigurationError(
            f"expected messages with a role ({', '.join(ROLES)}) and a content that is a text; more than that is not "
            f"shown to the provider's chat template: {REMEDY}"
        )
    return role, content
