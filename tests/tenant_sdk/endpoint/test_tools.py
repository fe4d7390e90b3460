"""Tests that tool calls are recognised in every format that models write, and are kept out of the streamed text. All
other output is text."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tenant_sdk import TenantClient
from tenant_sdk.endpoint.logprobs import StreamedLogprobs
from tenant_sdk.endpoint.prompts import Prompts
from tenant_sdk.endpoint.schema import ChatRequest, Message, Tool
from tenant_sdk.endpoint.tools import Call, HeldText, read_calls
from tenant_sdk.serving.requests import Answer
from tenant_sdk.testing import CHAT_TEMPLATE, character_tokenizer
from tenant_sdk.text.ready import ReadyText
from tests.support.tiny_models import make_chat_model

NAMES = frozenset({"f", "g"})
F, G = Call("f", '{"a": 1}'), Call("g", "{}")
ONE = '{"name": "f", "arguments": {"a": 1}}'
READ = [
    (f"<tool_call>\n{ONE}\n</tool_call>", "", [F]),
    (f'say <tool_call>{ONE}</tool_call>\n<tool_call>{{"name": "g"}}</tool_call>', "say", [F, G]),
    (f"<tool_call>{ONE}", "", [F]),
    (f"[TOOL_CALLS] [{ONE}]", "", [F]),
    (f"well [TOOL_CALLS]{ONE}", "well", [F]),
    (ONE, "", [F]),
    (f' [{ONE}, {{"name": "g", "parameters": {{}}}}]', "", [F, G]),
    ('{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [F]),
    (
        '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>"}}</tool_call>',
        "",
        [Call("f", '{"a": "}</tool_call>"}')],
    ),
    ('{"name": "f", "arguments": {"a": "<tool_call>"}}', "", [Call("f", '{"a": "<tool_call>"}')]),
]
TEXTS = [
    "", "no call", '{"name": "h", "arguments": {}}', '{"name": "f", "arguments": 5}', '{"a": 1}', "[1, 2]", "{", "[]",
    '<tool_call>{"name": "h"}</tool_call>', "<tool_call>nothing</tool_call>", f"[{ONE}, 5]", "[" * 5000,
    '{"name": ["f"]}', "<tool_call>", f"<tool_call>{ONE}x", f"<tool_call>{ONE}</tool_call><tool_call>{{", " \n ",
]  # fmt: skip


@pytest.mark.parametrize(("text", "rest", "calls"), READ)
def test_calls_are_read(text: str, rest: str, calls: list[Call]) -> None:
    assert read_calls(text, NAMES) == (rest, calls)


@pytest.mark.parametrize(("text", "rest", "calls"), READ)
def test_without_parallel_calls_the_first_one_counts(text: str, rest: str, calls: list[Call]) -> None:
    assert read_calls(text, NAMES, 1) == (rest, calls[:1])
    held = HeldText(NAMES, 1)
    held.put(text)
    assert held.end()[1] == calls[:1]
    asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "who?"}]}
    most = [
        ChatRequest.model_validate({**asked, "parallel_tool_calls": each}).most_calls for each in (False, True, None)
    ]
    assert most == [1, None, None]


@pytest.mark.parametrize("text", TEXTS)
def test_whatever_else_is_text(text: str) -> None:
    assert read_calls(text, NAMES) == (text, [])


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("text", [*(text for text, _, _ in READ), *TEXTS, "a < b <tool", "x [TOOL"])
def test_a_stream_gives_the_same_as_the_whole(text: str, size: int) -> None:
    held = HeldText(NAMES)
    given = "".join(held.put(text[at : at + size]) for at in range(0, len(text), size))
    assert "<tool_call>" not in given
    rest, calls = held.end()
    want_rest, want_calls = read_calls(text, NAMES)
    assert calls == want_calls
    assert (given + rest).strip() == want_rest.strip()
    if not want_calls:
        assert given + rest == text


@pytest.mark.parametrize(
    "part",
    ["<tool_call>{", "<tool_call>{}", "<tool_call> ", " ", "}", "<tool_cal", "[TOOL_CALLS]", f"<tool_call>{ONE}"],
)
def test_reading_takes_linear_time(part: str) -> None:
    """A quadratic reading of a million characters would take longer than a test may."""
    text = part * (1_000_000 // len(part))
    assert read_calls(text, NAMES) == (text, [])
    held = HeldText(NAMES)
    given = "".join(held.put(text[at : at + 4]) for at in range(0, len(text), 4))
    assert given + held.end()[0] == text


def test_text_is_handed_out_before_the_end() -> None:
    held = HeldText(NAMES)
    assert held.put("well, a <") == "well, a "
    assert held.put("b") == "<b"
    assert held.put(" <tool_call>{") == " "
    assert held.put("never") == ""
    assert HeldText(frozenset()).put("<tool_call>") == "<tool_call>"


def test_logprobs_of_a_stream_wait_for_text_that_is_held_back() -> None:
    """Tokens whose text is held back, since it may begin a call, come with the chunk that has the text or the call."""
    tokens = ["well", ", a <", "tool_call>", ONE, "</tool_call>", "<|end|>"]
    answer = Answer(1, lambda: None)
    answer.token_ids = list(range(len(tokens)))
    answer.token_ends = list(itertools.accumulate(map(len, tokens[:-1])))
    held = HeldText(NAMES)
    made = StreamedLogprobs(lambda token_ids, start: {"content": list(token_ids[start:])})
    fields = [made.of(text, answer) for token in tokens[:-1] if (text := held.put(token))]
    assert fields == [{"content": [0]}, None]
    assert held.end()[1] == [F]
    assert made.of("".join(tokens[:-1]), answer) == {"content": [1, 2, 3, 4]}
    assert made.of_the_rest(answer) == {"content": [5]}
    assert made.of_the_rest(answer) is None


TOOL = Tool.model_validate({"type": "function", "function": {"name": "f", "description": "finds"}})
TURNS = [
    Message(role="user", content="who?"),
    Message.model_validate(
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}]}
    ),
    Message(role="tool", content="me", tool_call_id="c"),
]
NATIVE = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.a }}){% endfor %}{% endfor %}"  # noqa: E501


def test_a_trusted_template_that_knows_tools_gets_them() -> None:
    prompt = Prompts(character_tokenizer(NATIVE), is_trusted=True).of(TURNS, [TOOL])
    assert prompt == ReadyText("[f]<user>who?<assistant>(f 1)<tool>me", with_special_tokens=False)


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("verify", [True, False])
def test_a_session_has_all_named_templates_of_its_model(verify: bool, tmp_path: Path) -> None:
    named = {"default": CHAT_TEMPLATE, "tool_use": NATIVE, "rag": PLAIN}
    folder = make_chat_model(tmp_path / "named", template=named)
    trusted: dict[str, Any] = {"verify": str(folder)} if verify else {}
    with TenantClient(f"inproc:{folder}", mask="off", cache=tmp_path / "cache", progress=False, **trusted) as client:
        assert client.text.tokenizer.chat_template == named


@pytest.mark.parametrize("default", [PLAIN, f"plain {NATIVE}", f"[tools] {PLAIN}"])
def test_of_named_templates_that_for_tools_gets_them(default: str) -> None:
    made = Prompts(character_tokenizer({"default": default, "tool_use": f"use {NATIVE}"}), is_trusted=True)
    assert made.of(TURNS, [TOOL]) == ReadyText("use [f]<user>who?<assistant>(f 1)<tool>me", with_special_tokens=False)
    assert made.of(TURNS[:1], []) == [{"role": "user", "content": "who?"}]


def test_calls_without_tools_go_to_the_default_template_or_into_the_text() -> None:
    knows = Prompts(character_tokenizer({"default": NATIVE, "tool_use": "no"}), is_trusted=True).of(TURNS, [])
    assert knows == ReadyText("<user>who?<assistant>(f 1)<tool>me", with_special_tokens=False)
    plain = Prompts(character_tokenizer({"default": PLAIN, "tool_use": NATIVE}), is_trusted=True).of(TURNS, [])
    assert isinstance(plain, list)
    assert plain[1]["content"] == '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    "template", [{"default": PLAIN}, {"default": PLAIN, "tool_use": PLAIN}, {"default": PLAIN, "rag": NATIVE}]
)
def test_named_templates_of_which_none_takes_tools(template: dict[str, str]) -> None:
    prompt = Prompts(character_tokenizer(template), is_trusted=True).of(TURNS[:1], [TOOL])
    assert isinstance(prompt, list)
    assert prompt[0]["role"] == "system"


def test_an_untrusted_provider_s_template_for_tools_sees_nothing() -> None:
    made = Prompts(character_tokenizer({"default": PLAIN, "tool_use": NATIVE}), is_trusted=False)
    assert isinstance(made.of(TURNS, [TOOL]), list)


@pytest.mark.parametrize(("template", "is_trusted"), [(NATIVE, False), ("{{ messages }}", True)])
def test_all_others_get_them_as_text(template: str, is_trusted: bool) -> None:
    prompt = Prompts(character_tokenizer(template), is_trusted=is_trusted).of(TURNS, [TOOL])
    assert isinstance(prompt, list)
    assert [turn["role"] for turn in prompt] == ["system", "user", "assistant", "tool"]
    assert '{"name": "f", "description": "finds"}' in prompt[0]["content"]
    assert prompt[2]["content"] == '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert all(set(turn) == {"role", "content"} for turn in prompt)
