"""Tests that OpenAI's own client works unchanged: chat, completions, streams, choices, schemas, tools, adapters and
errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
import torch

from tenant_sdk import TenantClient
from tenant_sdk.endpoint.server import Endpoint
from tenant_sdk.testing import save_tiny_model
from tests.support.endpoints import WHO, endpoint_of, official
from tests.support.tiny_models import open_client

SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}, "size": {"enum": ["s", "m"]}},
    "required": ["sure", "size"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {**SCHEMA, "properties": SCHEMA["properties"]}},
}
CLOCK: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "maxProperties": 0}}}


@pytest.fixture(scope="module")
def ai(endpoint: Endpoint) -> openai.OpenAI:
    return official(endpoint)


def ask(ai: openai.OpenAI, **options: Any) -> Any:
    given = {"model": "llama", "messages": WHO, "max_tokens": 8, "temperature": 0, **options}
    return ai.chat.completions.create(**given)


def test_models_are_the_base_and_the_adapters(ai: openai.OpenAI) -> None:
    found = {model.id: model.model_dump()["parent"] for model in ai.models.list()}
    assert found == {"llama": None, "sales": "llama", "support": "llama"}
    assert ai.models.retrieve("sales").id == "sales"
    with pytest.raises(openai.NotFoundError):
        ai.models.retrieve("nobody")


def test_a_models_name_may_hold_a_slash(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint.service.names, "base", "org/llama")
    with official(endpoint) as ai:
        assert ai.models.retrieve("org/llama").id == "org/llama"


def test_an_answer_can_be_sent_back_as_it_came(ai: openai.OpenAI) -> None:
    said = ask(ai).choices[0].message
    empty = {"refusal": None, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    for again in (said, {**said.model_dump(), **empty}):
        assert ask(ai, messages=[*WHO, again, *WHO]).choices[0].finish_reason == "length"


def test_a_chat_is_what_generate_says(ai: openai.OpenAI, client: TenantClient) -> None:
    answer = ask(ai)
    assert answer.choices[0].message.content == client.generate("who?", max_new_tokens=8)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.completion_tokens, answer.usage.total_tokens - answer.usage.prompt_tokens) == (8, 8)
    assert answer.usage.prompt_tokens == len(
        client.tokenizer.apply_chat_template(WHO, return_dict=True, add_generation_prompt=True)["input_ids"]
    )


def test_model_names_the_adapter(ai: openai.OpenAI, client: TenantClient, adapters: Path) -> None:
    for name in ("support", "sales"):
        (want,) = client.generate_many(["who?"], adapters / name, max_new_tokens=8, progress=False)
        assert ask(ai, model=name).choices[0].message.content == want


def test_a_stream_is_the_same_text_in_pieces_and_ends_with_the_usage(ai: openai.OpenAI) -> None:
    whole = ask(ai)
    chunks = list(ask(ai, stream=True, stream_options={"include_usage": True}))
    assert "".join(each.choices[0].delta.content or "" for each in chunks[:-1]) == whole.choices[0].message.content
    assert len(chunks) > 4
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [each.choices[0].finish_reason for each in chunks[-3:-1]] == [None, "length"]
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert all(each.usage is None for each in chunks[:-1])
    assert len({each.id for each in chunks}) == 1


def test_choices_differ_and_a_seed_repeats_them(ai: openai.OpenAI) -> None:
    options = {"n": 3, "seed": 7, "temperature": 1.5, "stream": False}
    first, again = ask(ai, **options), ask(ai, **options)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    for chunk in ask(ai, **{**options, "stream": True}):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_a_stop_string_ends_the_text(ai: openai.OpenAI) -> None:
    text = ask(ai).choices[0].message.content
    for stop in (text[3], [text[3], "never"]):
        ended = ask(ai, stop=stop).choices[0]
        assert (ended.message.content, ended.finish_reason) == (text[: text.index(text[3])], "stop")


def test_a_stop_string_may_be_a_special_token(ai: openai.OpenAI, client: TenantClient) -> None:
    token_id = client.tokenizer.convert_tokens_to_ids("<|user|>")  # which does not end answers by itself
    for stop in ("<|user|>", ["never", "<|user|><|user|>"]):
        ended = ask(ai, stop=stop, logit_bias={str(token_id): 100}).choices[0]
        assert (ended.message.content, ended.finish_reason) == ("", "stop")
    assert ask(ai, stop="<|user|>x", logit_bias={str(token_id): 100}).choices[0].finish_reason == "length"


def test_a_completion_continues_a_text_as_it_is(ai: openai.OpenAI, client: TenantClient) -> None:
    ids = client.tokenizer("who?")["input_ids"]
    model = client.load_model()
    with torch.no_grad():
        made = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)
    want = client.tokenizer.decode(made[0, len(ids) :], skip_special_tokens=True)
    for prompt in ("who?", ids):
        answer = ai.completions.create(model="llama", prompt=prompt, max_tokens=8, temperature=0)
        assert answer.choices[0].text == want
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(ids)
    several = ai.completions.create(model="llama", prompt=["who?", "b"], n=2, max_tokens=4, seed=1)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    chunks = ai.completions.create(model="llama", prompt="who?", max_tokens=8, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == want


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_held_to_a_schema(ai: openai.OpenAI, stream: bool) -> None:
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        answer = ask(ai, response_format=shape, max_tokens=60, temperature=1, seed=seed, stream=stream)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        else:
            text = answer.choices[0].message.content
            assert answer.choices[0].finish_reason == "stop"
        value = json.loads(text)
        assert isinstance(value["sure"], bool)
        assert value["size"] in ("s", "m")
        assert set(value) == {"sure", "size"}


def test_any_json_object(ai: openai.OpenAI) -> None:
    bias = {"97": -100}  # never the letter that would make endless keys; a bias reaches the model's logits
    answer = ask(ai, response_format={"type": "json_object"}, max_tokens=100, temperature=1, seed=3, logit_bias=bias)
    assert answer.choices[0].message.content.startswith("{")


def test_a_pydantic_class_as_in_openais_documentation(ai: openai.OpenAI) -> None:
    class Size(pydantic.BaseModel):
        sure: bool

    parsed = ai.chat.completions.parse(
        model="llama", messages=[{"role": "user", "content": "who?"}], response_format=Size, max_tokens=60
    )
    assert parsed.choices[0].message.parsed is not None
    assert parsed.choices[0].message.parsed.sure in (True, False)


def test_a_tool_that_has_to_be_called(ai: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    answer = ask(ai, tools=[CLOCK, WEATHER], tool_choice=named, max_tokens=90, temperature=1, seed=1)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"sure", "size"}
    turn: list[Any] = [
        *WHO,
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "mild"},
    ]
    chunks = list(ask(ai, messages=turn, tools=[CLOCK], tool_choice="required", max_tokens=60, seed=1, stream=True))
    calls = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or []]
    assert [(each.index, each.function.name, json.loads(each.function.arguments)) for each in calls] == [
        (0, "clock", {})
    ]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_penalties_and_biases_change_the_tokens(ai: openai.OpenAI, client: TenantClient) -> None:
    letter = client.tokenizer.convert_tokens_to_ids("q")
    assert ask(ai, logit_bias={str(letter): 100}).choices[0].message.content == "q" * 8
    text = ask(ai, logit_bias={str(letter): 20}, frequency_penalty=2, presence_penalty=2, max_tokens=20)
    assert 1 < text.choices[0].message.content.count("q") < 20


def test_logprobs_of_a_session_without_a_mask(ai: openai.OpenAI) -> None:
    answer = ask(ai, logprobs=True, top_logprobs=3)
    steps = answer.choices[0].logprobs.content
    assert "".join(step.token for step in steps if not step.token.startswith("<")) == answer.choices[0].message.content
    for step in steps:
        assert step.top_logprobs[0].token == step.token  # greedy
        assert step.top_logprobs[0].logprob == step.logprob < 0
        assert step.logprob >= step.top_logprobs[1].logprob >= step.top_logprobs[2].logprob
    plain = ai.completions.create(model="llama", prompt="who?", max_tokens=3, temperature=0, logprobs=2)
    assert plain.choices[0].logprobs is not None
    assert [len(each) for each in plain.choices[0].logprobs.top_logprobs or []] == [2, 2, 2]


def shown(token: str) -> str:
    return "" if token.startswith("<") and len(token) > 1 else token


@pytest.mark.parametrize("options", [{}, {"stop": ["zzz"]}, {"seed": 3, "temperature": 0.9, "n": 3}])
def test_streamed_logprobs_come_with_the_chunk_of_their_tokens(ai: openai.OpenAI, options: dict[str, Any]) -> None:
    """Each chunk has the logprobs of exactly the tokens whose text it has, and all chunks together those of an answer
    that is not streamed."""
    whole = ask(ai, logprobs=True, top_logprobs=2, max_tokens=20, **options)
    got: dict[int, list[Any]] = {choice.index: [] for choice in whole.choices}
    num_with_text = 0
    for chunk in ask(ai, logprobs=True, top_logprobs=2, max_tokens=20, stream=True, **options):
        (choice,) = chunk.choices
        steps = choice.logprobs.content if choice.logprobs is not None else []
        got[choice.index] += steps
        assert "".join(shown(step.token) for step in steps) == (choice.delta.content or "")
        num_with_text += bool(choice.delta.content)
    assert num_with_text > 2 * len(got)
    for choice in whole.choices:
        steps, want = got[choice.index], choice.logprobs.content
        assert [step.token for step in steps] == [step.token for step in want]
        assert [step.logprob for step in steps] == pytest.approx([step.logprob for step in want], abs=1e-4)


def test_streamed_logprobs_of_plain_completions(ai: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "llama", "prompt": ["who?", "b"], "max_tokens": 12, "temperature": 0}
    whole = ai.completions.create(**options, logprobs=2)
    got: dict[int, dict[str, list[Any]]] = {choice.index: {} for choice in whole.choices}
    for chunk in ai.completions.create(**options, logprobs=2, stream=True):
        (choice,) = chunk.choices
        assert "".join(map(shown, choice.logprobs.tokens if choice.logprobs else ())) == choice.text
        for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
            got[choice.index].setdefault(name, []).extend(values)
    for choice in whole.choices:
        assert choice.logprobs is not None
        fields = got[choice.index]
        assert (fields["tokens"], fields["text_offset"]) == (choice.logprobs.tokens, choice.logprobs.text_offset)
        assert fields["token_logprobs"] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-4)
        assert list(map(list, fields["top_logprobs"])) == list(map(list, choice.logprobs.top_logprobs or ()))


def test_without_max_tokens_an_answer_may_fill_the_context(tmp_path: Path) -> None:
    short = save_tiny_model(tmp_path / "llama", max_position_embeddings=192)
    with open_client(short) as client, endpoint_of(client) as endpoint, official(endpoint) as ai:
        forbidden = {str(token_id): -100 for token_id in client.text.stop_ids}
        answer = ask(ai, max_tokens=None, logit_bias=forbidden)
        assert answer.usage.completion_tokens == client.context_length - answer.usage.prompt_tokens > 128
    assert answer.choices[0].finish_reason == "length"


def test_the_operator_s_limit_holds_without_max_tokens_only(client: TenantClient) -> None:
    with endpoint_of(client, default_max_tokens=5) as endpoint:
        assert "answers without a limit" in endpoint.explain()
        for asked, want in ((None, 5), (9, 9)):
            forbidden = {str(token_id): -100 for token_id in client.text.stop_ids}
            answer = ask(official(endpoint), max_tokens=asked, logit_bias=forbidden)
            assert answer.usage.completion_tokens == want


def test_errors_are_the_clients_own_classes(ai: openai.OpenAI, endpoint: Endpoint) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(ai, model="nobody")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError):
        ask(ai, max_tokens=100_000)
    with pytest.raises(openai.AuthenticationError):
        ask(openai.OpenAI(base_url=endpoint.url, api_key="wrong", max_retries=0))


async def _several(endpoint: Endpoint) -> list[str]:
    async with openai.AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as ai:
        asked = [
            ai.chat.completions.create(
                model="llama", messages=[{"role": "user", "content": "who?"}], max_tokens=8, temperature=0
            )
            for _ in range(12)
        ]
        return [answer.choices[0].message.content or "" for answer in await asyncio.gather(*asked)]


def test_many_at_once(endpoint: Endpoint, client: TenantClient) -> None:
    assert asyncio.run(_several(endpoint)) == [client.generate("who?", max_new_tokens=8)] * 12
