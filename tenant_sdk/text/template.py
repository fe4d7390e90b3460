"""A provider's chat template is rendered without the text.

A template is a program, and the length of its output is visible as a number of rows: one that sees the messages can
count their letters. Here it never sees them. It is rendered once per pattern of roles, over placeholders, and the
messages' contents are put in the placeholders' places afterwards.

Guarantees: what the template is given depends on the roles and on nothing else of a conversation. The result differs
from rendering the text itself for a template that looks into contents (to cut a reasoning block, say), which has no
effect here; a template that strips white space around contents works, because the placeholders show it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tenant_sdk.text.components import REMEDY
from wire.errors import ConfigurationError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The roles of transformers' chat format; any other string could carry text into the template."""

_EDGE = "\u2003"
"""An em space: `strip` and `trim` remove it, and no template contains one."""
_MARK = "VeilbasePlaceholder'\"<&{}End"
"""The placeholder: its special characters show whether a template escapes contents, for JSON or HTML."""
_MARKED = re.compile(r"(\u2003?)VeilbasePlaceholder'\"<&(\d+)End(\u2003?)")
_PLAIN_TYPES = (bool, int, type(None))
_MAX_PATTERNS = 256

Rendered = tuple[str | tuple[int, bool, bool], ...]
"""The parts of a rendering: literal text, or (number of a message, whether its left and its right edge are
stripped)."""


class TemplateDoesNotFit(ConfigurationError):
    """The template cannot be rendered over placeholders."""

    def __init__(self) -> None:
        """Always uses the same text, because a template may raise any text of its own."""
        super().__init__(
            "the provider's chat template does not put message contents into their places unchanged, and is not shown "
            f"the text itself: {REMEDY}"
        )


def split(render: Callable[[list[dict[str, str]]], str], roles: Sequence[str]) -> Rendered:
    """Renders placeholders for a pattern of roles and finds where each content goes.

    Args:
        render: the template; takes messages and returns text.
        roles: the roles of the conversation's messages, in order.

    Raises:
        TemplateDoesNotFit: a placeholder is missing, changed or appears twice.
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
    """Puts contents into their places."""
    return "".join(part if isinstance(part, str) else _stripped(contents[part[0]], *part[1:]) for part in parts)


def _stripped(content: str, left: bool, right: bool) -> str:
    content = content.lstrip() if left else content
    return content.rstrip() if right else content


class BlindTemplates:
    """A mixin for a transformers tokenizer: `apply_chat_template` shows the template only placeholders.

    A template that the caller passes as `chat_template=` is the caller's own and is rendered as transformers does,
    unless it is the provider's template passed back. A tokenizer that transformers saves and loads again is
    transformers' own: its template sees text.
    """

    chat_template: Any

    def apply_chat_template(
        self, conversation: Any, tools: Any = None, documents: Any = None, chat_template: str | None = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Does what transformers' own method does, for messages that each have a known role and a text.

        Raises:
            ConfigurationError: messages have other keys or roles, or tools, documents, or options that carry text into
                the template were given.
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
        """Whether `template` is one of this tokenizer's, given by name or passed back as its text."""
        own = self.chat_template
        return template == own or (isinstance(own, dict) and (template in own or template in own.values()))

    def _render_blind(self, conversation: Any, template: str | None, variables: Mapping[str, Any]) -> str:
        messages = [_checked(message) for message in conversation]
        if not messages:
            raise ConfigurationError("the conversation is empty: expected at least one message")
        roles = tuple(role for role, _ in messages)
        return join(self._pattern(roles, template, dict(variables)), [text for _, text in messages])

    def _pattern(self, roles: tuple[str, ...], template: str | None, variables: dict[str, Any]) -> Rendered:
        """Returns the rendering of a pattern of roles; it is kept, so that a data set renders each pattern once."""
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
        """Tokenizes rendered texts as transformers does after rendering."""
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
    """Returns (the options for tokenizing, the variables that the template is given)."""
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
