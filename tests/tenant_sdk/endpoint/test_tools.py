"""Tests that tool calls are recognised in every format that models write, and are kept out of the streamed text. All
other output is text."""

from __future__ import annotations

import pytest

from tenant_sdk.endpoint.prompts import Prompts
from tenant_sdk.endpoint.schema import Message, Tool
from tenant_sdk.endpoint.tools import Call, HeldText, read_calls
from tenant_sdk.text.ready import ReadyText
from tests.support.chat_model import character_tokenizer

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


@pytest.mark.parametrize(("template", "is_trusted"), [(NATIVE, False), ("{{ messages }}", True)])
def test_all_others_get_them_as_text(template: str, is_trusted: bool) -> None:
    prompt = Prompts(character_tokenizer(template), is_trusted=is_trusted).of(TURNS, [TOOL])
    assert isinstance(prompt, list)
    assert [turn["role"] for turn in prompt] == ["system", "user", "assistant", "tool"]
    assert '{"name": "f", "description": "finds"}' in prompt[0]["content"]
    assert prompt[2]["content"] == '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    assert all(set(turn) == {"role", "content"} for turn in prompt)
