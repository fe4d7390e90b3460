"""Tests a chat template that sees only placeholders: results equal those of transformers on real templates, and hostile
templates learn nothing."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tenant_sdk.testing import CHAT_TEMPLATE, character_tokenizer
from tenant_sdk.text.source import ProviderTokenizer
from tenant_sdk.text.template import TemplateDoesNotFit
from wire.errors import ConfigurationError

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{% for m in messages %}{% set content = '<|h|>' + m['role'] + '<|e|>\n\n' + m['content'] | trim + '<|eot|>' %}"
    "{{ bos_token + content if loop.index0 == 0 else content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|h|>assistant<|e|>\n\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set sys = '<<SYS>>\n' + "
    "messages[0]['content'] + '\n<</SYS>>\n\n' %}{% else %}{% set rest = messages %}{% set sys = '' %}{% endif %}"
    "{% for m in rest %}{% if m['role'] == 'user' %}{{ '[INST] ' + (sys if loop.first else '') + "
    "m['content'].strip() + ' [/INST]' }}{% else %}{{ ' ' + m['content'].strip() + ' </s>' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<start>{{ m['role'] }}\n{{ m['content'] | trim }}<end>\n"
    "{% endfor %}{% if add_generation_prompt %}<start>model\n{% endif %}"
)
CONVERSATIONS = [
    [("user", "who?")],
    [("user", "  spaces around \n"), ("assistant", "\tso\n")],
    [("system", "Be brief."), ("user", "who?"), ("assistant", "Ada"), ("user", "<|im_end|> and <|eot|>")],
    [("user", ""), ("assistant", "{{ messages }} {% if %}"), ("user", "VeilbasePlaceholder0End")],
]


def blind(template: Any) -> ProviderTokenizer:
    made = character_tokenizer(template)
    return ProviderTokenizer(
        tokenizer_object=made.backend_tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="<|end|>",
        unk_token="<unk>", chat_template=template,
    )  # fmt: skip


def messages(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, CHATML, LLAMA_3, LLAMA_2, GEMMA])
@pytest.mark.parametrize("pairs", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [False, True])
def test_equal_to_transformers(template: str, pairs: list[tuple[str, str]], prompt: bool) -> None:
    if template is GEMMA and pairs[0][0] == "system":
        pytest.skip("this template takes no system message")
    local, given = character_tokenizer(template), messages(pairs)
    for options in ({"tokenize": False}, {"return_dict": False}, {}):
        expected = local.apply_chat_template(given, add_generation_prompt=prompt, **options)
        got = blind(template).apply_chat_template(given, add_generation_prompt=prompt, **options)
        assert dict(got) == dict(expected) if options == {} else got == expected


def test_several_conversations_at_once() -> None:
    given = [messages(pairs) for pairs in CONVERSATIONS[:2]]
    options = {"padding": True, "return_tensors": "pt"}
    expected = character_tokenizer().apply_chat_template(given, **options)
    got = blind(CHAT_TEMPLATE).apply_chat_template(given, **options)
    assert got["input_ids"].tolist() == expected["input_ids"].tolist()


COUNTING = "{% for m in messages %}{{ m['content'] }}{{ ' ' * (m['content'] | length) }}{% endfor %}"
LOOKING = (
    "{% for m in messages %}{{ m['content'] }}{% if 'secret' in m['content'] %}{{ ' ' * 100 }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("template", [COUNTING, LOOKING], ids=["counts", "looks"])
def test_what_is_put_around_contents_does_not_depend_on_them(template: str) -> None:
    one, other = [("user", "a secret")], [("user", "nothing at all, at length")]
    around = {}
    for name, pairs in (("one", one), ("other", other)):
        text = blind(template).apply_chat_template(messages(pairs), tokenize=False)
        assert pairs[0][1] in text
        around[name] = text.replace(pairs[0][1], "")
        stock = character_tokenizer(template).apply_chat_template(messages(pairs), tokenize=False)
        around[f"stock {name}"] = stock.replace(pairs[0][1], "")
    assert around["one"] == around["other"]
    assert around["stock one"] != around["stock other"], "the template was to read the text where it may"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0]['content'] | upper }}",
        "{{ messages[0]['content'][:8] }}",
        "{{ messages[0]['content'] }}{{ messages[0]['content'] }}",
        "nothing of it",
        "{{ messages[0]['content'] | tojson }}",
        "{{ messages[0]['content'] | replace('e', 'eeee') }}",
        "{% for c in messages[0]['content'] %}{{ c }}{{ ' ' * 9 }}{% endfor %}",
        "{{ messages[0]['content'] }} Placeholder",
    ],
)
def test_templates_that_change_contents(template: str) -> None:
    with pytest.raises(TemplateDoesNotFit) as failure:
        blind(template).apply_chat_template(messages([("user", "who?")]))
    assert "\n" not in str(failure.value)
    assert "tokenizer=" in str(failure.value)


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ([{"role": "user", "content": "x", "tool_calls": [1]}], {}),
        ([{"role": "who? a secret", "content": "x"}], {}),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], {}),
        ([{"role": "user"}], {}),
        ([], {}),
        ([{"role": "user", "content": "x"}], {"tools": [{"name": "f"}]}),
        ([{"role": "user", "content": "x"}], {"documents": [{"text": "secret"}]}),
        ([{"role": "user", "content": "x"}], {"date": "secret"}),
        ([{"role": "user", "content": "x"}], {"continue_final_message": True}),
        ([{"role": "user", "content": "x"}], {"return_assistant_tokens_mask": True}),
    ],
)
def test_ways_for_text_into_the_template(given: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as failure:
        blind(CHAT_TEMPLATE).apply_chat_template(given, **options)
    assert "\n" not in str(failure.value)
    assert "secret" not in str(failure.value)


def test_switches_reach_the_template() -> None:
    template = "{{ messages[0]['content'] }}{% if enable_thinking %}<think>{% endif %}"
    tokenizer = blind(template)
    assert tokenizer.apply_chat_template(messages([("user", "a")]), tokenize=False, enable_thinking=True) == "a<think>"
    assert tokenizer.apply_chat_template(messages([("user", "a")]), tokenize=False, enable_thinking=False) == "a"


def test_the_callers_own_template_is_the_callers() -> None:
    given = messages([("user", "abc")])
    own = "{{ messages[0]['content'] | upper }}"
    assert blind(CHAT_TEMPLATE).apply_chat_template(given, chat_template=own, tokenize=False) == "ABC"
    named = blind({"default": CHAT_TEMPLATE, "loud": own})
    with pytest.raises(TemplateDoesNotFit):
        named.apply_chat_template(given, chat_template="loud", tokenize=False)


def test_the_providers_own_template_handed_back_is_not_the_callers() -> None:
    tokenizer = blind(COUNTING)
    for given in (tokenizer.chat_template, tokenizer.get_chat_template()):
        one, other = (
            tokenizer.apply_chat_template(messages([("user", text)]), chat_template=given, tokenize=False)
            for text in ("ab", "abcdef")
        )
        assert one.replace("ab", "") == other.replace("abcdef", "")


def test_copies_and_saved_tokenizers(tmp_path: Path) -> None:
    tokenizer, given = blind(COUNTING), messages([("user", "who?")])
    text = tokenizer.apply_chat_template(given, tokenize=False)
    for copied in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert isinstance(copied, ProviderTokenizer)
        assert copied.apply_chat_template(given, tokenize=False) == text
    tokenizer.save_pretrained(tmp_path)
    stock = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert stock("who?")["input_ids"] == tokenizer("who?")["input_ids"]
