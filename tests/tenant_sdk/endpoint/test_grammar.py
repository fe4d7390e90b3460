"""Tests grammars: which texts they allow, that a schema is its own document, and that schemas which would abort or hang
the server cost one request, within limits. Each limit has a schema that reaches it."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tenant_sdk import TenantClient
from tenant_sdk.endpoint.errors import HttpError
from tenant_sdk.endpoint.grammar import Grammar, GrammarHook, Grammars
from tenant_sdk.endpoint.grammar_process import WorkerLimits
from tenant_sdk.endpoint.schema import ChatRequest
from tenant_sdk.endpoint.server import Endpoint
from tenant_sdk.endpoint.service import Threads
from tenant_sdk.endpoint.settings import EndpointLimits
from tenant_sdk.endpoint.tools import active_tools, forced_tools
from tenant_sdk.testing import character_tokenizer
from tests.support.endpoints import WHO, chat, endpoint_of, raw
from tests.support.engines import Gate
from tests.support.waiting import comes, end, until
from wire.errors import ConfigurationError, VeilbaseError

TOKENIZER = character_tokenizer()
END = 2
MANY = EndpointLimits(schema_patterns=10_000, schema_intersections=10_000)
"""Limits under which the counts refuse nothing, so that a worker gets the schema."""
SURE = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
ENDS_EARLY = {"type": "string", "minLength": 50_000, "pattern": "^(a|b|ab)*$"}
"""Compiles; after the second token llguidance gives up."""
DEAR_TO_STEP = {"anyOf": [{"type": "string", "pattern": f"^.*a.{{{number}}}$"} for number in range(300, 360)]}
"""Compiles in 3 ms; a token takes about a millisecond with the 101 tokens here, and SURE's takes 0.05."""


def intersected(count: int) -> dict[str, Any]:
    return {"allOf": [{"type": "string", "pattern": f"^.*a.{{{number}}}$"} for number in range(count)]}


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(TOKENIZER, [END], EndpointLimits())
    yield made
    made.close()


def limited(limits: EndpointLimits = MANY, **each: Any) -> Grammars:
    return Grammars(TOKENIZER, [END], limits, WorkerLimits(**each))


def read(hook: GrammarHook, text: str, is_told: bool = True) -> str:
    """Plays an answer token by token, and returns how far the hook allowed it: the text, and "." if it may end."""
    ids = [7]
    for place, letter in enumerate(text):
        token = TOKENIZER.convert_tokens_to_ids(letter)
        allowed = hook(torch.tensor([ids]), torch.zeros(1, len(TOKENIZER)))[0]
        if allowed[token] != 0:
            return text[:place]
        ids.append(token)
        if is_told:
            hook.chosen(token)
    allowed = hook(torch.tensor([ids]), torch.zeros(1, len(TOKENIZER)))[0]
    return text + ("." if allowed[END] == 0 else "")


def failure_of(hook: GrammarHook, text: str) -> str | None:
    try:
        read(hook, text)
    except ConfigurationError as exc:
        return str(exc)
    return None


def refusal(make: Callable[[], Grammar]) -> tuple[int, str, str]:
    with pytest.raises(HttpError) as refused:
        make()
    assert refused.value.param == "p" or refused.value.status == 429
    assert "\n" not in refused.value.text
    return refused.value.status, refused.value.code, refused.value.text


def children(parent: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, above = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(above) == parent and state != "Z":
            found.append(int(stat.parent.name))
    return found


def spawner_of(grammars: Grammars) -> int:
    spawner = grammars.spawner
    assert spawner is not None
    return spawner.process.pid


# ---- what is allowed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_told", [False, True])
def test_a_text_is_held_to_a_schema(grammars: Grammars, is_told: bool) -> None:
    grammar = grammars.of_schema(SURE, "p")
    first, second = grammar.hook(), grammar.hook()
    assert read(first, '{"sure":true}', is_told) == '{"sure":true}.'
    assert read(second, '{"sure":1}', is_told) == '{"sure":'
    assert read(grammars.of_schema(None, "p").hook(), '{"a":[null]}', is_told) == '{"a":[null]}.'
    with pytest.raises(HttpError):
        grammars.of_schema({"type": "no"}, "p")


def test_after_its_end_everything_is_allowed(grammars: Grammars) -> None:
    hook = grammars.of_schema({"const": 1}, "p").hook(raises=False)
    assert read(hook, "1") == "1."
    ids, logits = [7, TOKENIZER.convert_tokens_to_ids("1"), END], torch.zeros(1, len(TOKENIZER))
    hook.chosen(END)
    for _ in range(3):
        assert torch.equal(hook(torch.tensor([ids]), logits), logits)
        ids.append(9)
        hook.chosen(9)
    hook.check()


def bytes_tokenizer() -> Any:
    """Returns a tokenizer that llguidance reads: bytes, and some words in one token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["tr", "ue", "true", '"s', "ur"]
    vocab = {piece: number for number, piece in enumerate(["<pad>", "<s>", "<|end|>", *letters, *words])}
    merges = [("t", "r"), ("u", "e"), ("tr", "ue"), ('"', "s"), ("u", "r")]
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in ("<pad>", "<s>", "<|end|>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<|end|>")


def test_the_masks_are_those_of_the_library_itself() -> None:
    tokenizer, grammars = bytes_tokenizer(), Grammars(bytes_tokenizer(), [END], EndpointLimits())
    try:
        hook = grammars.of_schema(SURE, "p").hook()
        text = LLMatcher.grammar_from_json_schema(json.dumps(SURE), overrides={"whitespace_flexible": False})
        matcher = LLMatcher(from_tokenizer(tokenizer, eos_token=[END]), text)
        ids: list[int] = []
        for token in tokenizer('{"sure":true}')["input_ids"]:
            allowed = hook(torch.tensor([[5, *ids]]), torch.zeros(1, len(tokenizer)))[0]
            bits = matcher.compute_bitmask()
            assert [float(allowed[k]) == 0 for k in range(len(tokenizer))] == [
                bool(bits[k // 8] >> (k % 8) & 1) for k in range(len(tokenizer))
            ]
            assert matcher.consume_token(token)
            ids.append(token)
            hook.chosen(token)
    finally:
        grammars.close()


# ---- a schema is its own document ----------------------------------------------------------------------------------

A = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


def object_of(**properties: Any) -> dict[str, Any]:
    required = [name for name, schema in properties.items() if schema != {"$ref": "#"}]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


OWN_DOCUMENT = [
    ({"$defs": {"A": A}, **object_of(x={"$ref": "#/$defs/A"})}, '{"x":{"a":true}}'),
    ({"definitions": {"A": A}, **object_of(x={"$ref": "#/definitions/A"})}, '{"x":{"a":true}}'),
    ({"$defs": {"A": A}, "$ref": "#/$defs/A"}, '{"a":true}'),
    (object_of(v={"type": "integer"}, next={"$ref": "#"}), '{"v":1,"next":{"v":2,"next":{"v":3}}}'),
    (object_of(x={"type": "integer"}, y={"$ref": "#/properties/x"}), '{"x":1,"y":2}'),
    ({"$defs": {"A": {"$anchor": "here", **A}}, **object_of(x={"$ref": "#here"})}, '{"x":{"a":true}}'),
    (
        {"$id": "https://example.com/s.json", "$defs": {"A": A}, **object_of(x={"$ref": "s.json#/$defs/A"})},
        '{"x":{"a":true}}',
    ),
]


@pytest.mark.parametrize(("schema", "value"), OWN_DOCUMENT, ids=lambda each: str(each)[:50])
def test_references_in_a_tool_are_to_its_own_schema(grammars: Grammars, schema: dict[str, Any], value: str) -> None:
    assert read(grammars.of_schema(schema, "p").hook(), value) == f"{value}."
    other = object_of(v={"$ref": "#/$defs/A"})
    other["$defs"] = {"A": {"type": "null"}}
    for tools in ([("f", schema)], [("g", other), ("f", schema), ("f2", SURE)]):
        grammar = grammars.of_call(tools, "p")
        call = f'{{"name":"f","arguments":{value}}}'
        assert read(grammar.hook(), call) == f"{call}."
    call = '{"name":"g","arguments":{"v":null}}'
    assert read(grammar.hook(), call) == f"{call}."
    assert read(grammar.hook(), '{"name":"f2","arguments":{"v') == '{"name":"f2","arguments":{"'


@pytest.mark.parametrize(
    "schema",
    [
        {**SURE, "type": ["object", "null"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {**SURE, "type": ["object", "null"]}}},
        {"anyOf": [SURE, {"type": "null"}, {"type": "integer"}]},
        {"oneOf": [SURE, {"type": "null"}]},
        {"allOf": [{**SURE, "type": ["object", "null"]}]},
    ],
    ids=lambda schema: next(iter(schema)),
)
def test_the_arguments_of_a_forced_tool_are_an_object_also_where_its_schema_allows_null(
    grammars: Grammars, schema: dict[str, Any]
) -> None:
    forced = asked([{"parameters": schema}])
    assert forced is not None
    grammar = grammars.of_call(forced, "p")
    assert read(grammar.hook(), '{"name":"f0","arguments":null}') == '{"name":"f0","arguments":'
    call = '{"name":"f0","arguments":{"sure":true}}'
    assert read(grammar.hook(), call) == f"{call}."


def test_a_forced_tool_that_refers_to_itself_through_a_definition(grammars: Grammars) -> None:
    inner = {"type": "object", "properties": {"n": {"$ref": "#"}}, "additionalProperties": False}
    forced = asked([{"parameters": {"$ref": "#/$defs/A", "$defs": {"A": inner}}}])
    assert forced is not None
    call = '{"name":"f0","arguments":{"n":{"n":{}}}}'
    assert read(grammars.of_call(forced, "p").hook(), call) == f"{call}."


def test_a_recursive_tool_does_not_take_the_call_itself(grammars: Grammars) -> None:
    schema = object_of(v={"type": "integer"}, next={"$ref": "#"})
    beginning = '{"name":"f","arguments":{"v":1,"next":{"'
    assert read(grammars.of_call([("f", schema)], "p").hook(), f'{beginning}name":"f"') == beginning


def asked(tools: Sequence[dict[str, Any]], choice: Any = "required") -> list[tuple[str, dict[str, Any]]] | None:
    listed = [{"type": "function", "function": {"name": f"f{number}", **tool}} for number, tool in enumerate(tools)]
    request = ChatRequest.model_validate({"model": "m", "messages": WHO, "tools": listed, "tool_choice": choice})
    return forced_tools(request, active_tools(request))


@pytest.mark.parametrize(
    "tool", [{}, {"parameters": None}, {"parameters": {}}, {"parameters": {"type": "object", "properties": {}}}]
)
def test_a_forced_tool_without_parameters_gets_no_arguments(grammars: Grammars, tool: dict[str, Any]) -> None:
    forced = asked([tool])
    assert forced is not None
    grammar = grammars.of_call(forced, "p")
    assert read(grammar.hook(), '{"name":"f0","arguments":{}}') == '{"name":"f0","arguments":{}}.'
    assert read(grammar.hook(), '{"name":"f0","arguments":{"x') == '{"name":"f0","arguments":{'


@pytest.mark.parametrize("schema", [{"type": "object"}, {"properties": {"x": {"type": "integer"}}}])
def test_a_tool_that_leaves_it_open_gets_an_object(grammars: Grammars, schema: dict[str, Any]) -> None:
    forced = asked([{"parameters": schema}])
    assert forced is not None
    grammar = grammars.of_call(forced, "p")
    call = '{"name":"f0","arguments":{"x":1}}'
    assert read(grammar.hook(), call) == f"{call}."
    assert read(grammar.hook(), '{"name":"f0","arguments":1') == '{"name":"f0","arguments":'


def test_which_tools_are_forced() -> None:
    tools = [{"parameters": SURE}, {"parameters": A}]
    assert asked(tools, "auto") is asked(tools, "none") is asked(tools, None) is None
    assert asked(tools) == [("f0", SURE), ("f1", A)]
    assert asked(tools, {"type": "function", "function": {"name": "f1"}}) == [("f1", A)]


# ---- limits --------------------------------------------------------------------------------------------------------

PATTERNS = {"type": "object", "properties": {f"p{n}": {"type": "string", "pattern": "a"} for n in range(129)}}
NAMED = {"type": "object", "properties": {"default": intersected(40), "enum": {"type": "null"}}}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (intersected(300), "at most 128 patterns"),
        (intersected(40), "at most 32 intersections"),
        (PATTERNS, "at most 128 patterns"),
        ({"patternProperties": {f"^{n}": {} for n in range(129)}}, "at most 128 patterns"),
        (NAMED, "at most 32 intersections"),
        ({"$defs": {"A": intersected(40)}}, "at most 32 intersections"),
        ({"type": "string", "description": "x" * 70_000}, "at most 65536 bytes"),
    ],
    ids=lambda each: str(each)[:40],
)
def test_a_schema_beyond_a_count_is_refused_with_the_count(
    grammars: Grammars, schema: dict[str, Any], words: str
) -> None:
    for make in (lambda: grammars.of_schema(schema, "p"), lambda: grammars.of_call([("f", schema)], "p")):
        status, code, text = refusal(make)
        assert (status, code) == (400, "schema_too_large")
        assert words in text


HIDDEN = intersected(40)


@pytest.mark.parametrize(
    "schema",
    [
        *({key: HIDDEN, "$ref": f"#/{key}"} for key in ("default", "const", "example")),
        *({key: [1, HIDDEN], "$ref": f"#/{key}/1"} for key in ("examples", "enum")),
        {"default": HIDDEN, "$ref": "#/%64efault"},
        {"default": HIDDEN, "$ref": "#%2Fdefault"},
        {"$id": "https://x.y/s", "default": HIDDEN, "$ref": "s#/default"},
        {"a~b": {"default": HIDDEN}, "$ref": "#/a~0b/default"},
        {"a/properties": {"default": HIDDEN}, "$ref": "#/a%2Fproperties/default"},
        {"properties": {"x": {"default": HIDDEN}, "y": {"$ref": "#/properties/x/default"}}},
        {"properties": {"properties": {"default": HIDDEN}}, "$ref": "#/properties/properties/default"},
        {"$defs": {"B": {"$ref": "#/$defs/A/examples/0"}, "A": {"examples": [HIDDEN]}}, "$ref": "#/$defs/B"},
        {"$defs": HIDDEN, "$ref": "#/$defs"},
        {"type": "object", "patternProperties": {"^a": {"$ref": "#/definitions"}}, "definitions": HIDDEN},
    ],
    ids=lambda each: str(each)[:60],
)
def test_a_reference_into_data_does_not_pass_the_counts(grammars: Grammars, schema: dict[str, Any]) -> None:
    for make in (lambda: grammars.of_schema(schema, "p"), lambda: grammars.of_call([("f", schema)], "p")):
        status, code, text = refusal(make)
        assert (status, code) == (400, "bad_reference")
        assert "$ref" in text
        assert "$defs" in text


def test_references_to_properties_with_names_of_keywords_are_as_before(grammars: Grammars) -> None:
    schema = object_of(default={"type": "integer"}, y={"$ref": "#/properties/default"})
    assert read(grammars.of_schema(schema, "p").hook(), '{"default":1,"y":2}') == '{"default":1,"y":2}.'
    hidden = {"$defs": {"default": HIDDEN}, **object_of(x={"$ref": "#/$defs/default"})}
    assert refusal(lambda: grammars.of_schema(hidden, "p"))[1] == "schema_too_large"


def test_data_is_not_counted(grammars: Grammars) -> None:
    data = [{"pattern": "a", "allOf": [1, 2, 3], "n": number} for number in range(200)]
    schema = {"enum": data, "default": data, "examples": data}
    assert read(grammars.of_schema(schema, "p").hook(), '{"pattern":"a","allOf') == '{"pattern":"a","allOf'


@pytest.mark.parametrize(
    ("each", "words"),
    [
        ({"compile_s": 0.05}, "0.05 s of processor time"),
        ({"compile_s": 60.0, "wall_s": 0.2}, "0.2 s"),
        ({"compile_s": 60.0, "wall_s": 60.0, "memory_bytes": 32 << 20}, "32 MiB of memory"),
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [24, 300])
def test_a_schema_that_is_dear_to_compile(count: int, each: dict[str, Any], words: str) -> None:
    grammars = limited(**each)
    try:
        status, code, text = refusal(lambda: grammars.of_schema(intersected(count), "p"))
        assert (status, code) == (400, "schema_too_complex")
        assert words in text
        assert grammars.num_held == 0
        assert read(grammars.of_schema(SURE, "p").hook(), '{"sure":true}') == '{"sure":true}.'
    finally:
        grammars.close()


@pytest.mark.parametrize("raises", [True, False])
def test_a_schema_that_is_cheap_to_compile_and_dear_to_step(raises: bool) -> None:
    grammars = limited(burst_s=0.02, token_s=0.0)
    try:
        other = grammars.of_schema(SURE, "p").hook()
        hook = grammars.of_schema(DEAR_TO_STEP, "p").hook(raises)
        if raises:
            with pytest.raises(ConfigurationError, match=r"0\.02 s of processor time"):
                read(hook, '"' + 400 * "a")
        else:
            read(hook, '"' + 400 * "a")
        with pytest.raises(ConfigurationError, match=r"0\.02 s of processor time"):
            hook.check()
        assert read(other, '{"sure":true}') == '{"sure":true}.'
    finally:
        grammars.close()


def test_the_librarys_own_limits_end_an_answer(grammars: Grammars) -> None:
    hook = grammars.of_schema(ENDS_EARLY, "p").hook()
    with pytest.raises(ConfigurationError, match="too complex in the middle"):
        read(hook, '"aba"')


def test_the_memory_of_all_schemas_together_is_bounded() -> None:
    grammars = limited(EndpointLimits(schemas_bytes=24 << 20))
    try:
        small = grammars.of_schema(SURE, "p").hook()
        large = [grammars.of_schema({"type": "integer", "multipleOf": 9973}, "p").hook() for _ in range(5)]
        failures = [failure_of(hook, "9973") for hook in large]
        num_failed = sum(each is not None for each in failures)
        assert all(each is None or "24 MiB for all schemas" in each for each in failures)
        assert num_failed >= 2
        assert grammars.num_held == 6 - num_failed
        assert read(small, '{"sure":true}') == '{"sure":true}.'
    finally:
        grammars.close()


def test_so_many_schemas_are_held_and_no_more() -> None:
    grammars = limited(EndpointLimits(schemas_held=2))
    try:
        held = [grammars.of_schema(SURE, "p"), grammars.of_schema(SURE, "p")]
        status, code, text = refusal(lambda: grammars.of_schema(SURE, "p"))
        assert (status, code) == (429, "too_many_schemas")
        assert "2 requests with a schema" in text
        held[0].close()
        held[0] = grammars.of_schema(SURE, "p")
        assert grammars.num_held == 2
        spawner = spawner_of(grammars)
        del held[1]  # as when a client goes away
        gc.collect()
        until(lambda: len(children(spawner)) == 1, "the dropped worker to be killed")
    finally:
        grammars.close()


# ---- processes that end --------------------------------------------------------------------------------------------


def test_a_killed_worker_fails_its_own_answers_only(grammars: Grammars) -> None:
    before = set(children(spawner_of_running(grammars)))
    one = grammars.of_schema(SURE, "p")
    (worker,) = set(children(spawner_of(grammars))) - before
    other = grammars.of_schema(SURE, "p").hook()
    hook = one.hook()
    assert read(hook, '{"su') == '{"su'
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(VeilbaseError, match="send the request again"):
        hook(torch.tensor([[7, 8, 9, 10, 11, TOKENIZER.convert_tokens_to_ids("r")]]), torch.zeros(1, len(TOKENIZER)))
    assert read(other, '{"sure":true}') == '{"sure":true}.'
    assert read(grammars.of_schema(SURE, "p").hook(), '{"sure":true}') == '{"sure":true}.'


def spawner_of_running(grammars: Grammars) -> int:
    grammars.of_schema(SURE, "p").close()
    return spawner_of(grammars)


def test_a_killed_spawner_is_replaced() -> None:
    grammars = limited()
    try:
        held = grammars.of_schema(SURE, "p").hook()
        first = spawner_of(grammars)
        os.kill(first, signal.SIGKILL)
        assert read(grammars.of_schema(SURE, "p").hook(), '{"sure":true}') == '{"sure":true}.'
        assert spawner_of(grammars) != first
        assert read(held, '{"sure":true}') == '{"sure":true}.'
    finally:
        grammars.close()


def test_a_worker_that_stops_costs_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tenant_sdk.endpoint.grammar.LATE_S", 0.1)
    grammars = limited(wall_s=0.1)
    try:
        hook = grammars.of_schema(SURE, "p").hook()
        assert read(hook, "{") == "{"
        (worker,) = children(spawner_of(grammars))
        os.kill(worker, signal.SIGSTOP)
        with pytest.raises(ConfigurationError, match=r"more than 0\.1 s"):
            read(hook, '{"s')
        until(lambda: not children(spawner_of(grammars)), "the stopped worker to be killed")
    finally:
        grammars.close()


def test_closing_ends_all_processes() -> None:
    grammars = limited()
    held = [grammars.of_schema(SURE, "p").hook(), grammars.of_schema(None, "p").hook()]
    spawner = spawner_of(grammars)
    workers = children(spawner)
    assert len(workers) == 2
    grammars.close()
    until(lambda: not any(Path(f"/proc/{each}").exists() for each in (spawner, *workers)), "their end")
    with pytest.raises(VeilbaseError):
        read(held[0], "{")
    with pytest.raises(ConfigurationError, match="closed"):
        grammars.of_schema(SURE, "p")


def test_the_process_is_light_and_may_fork() -> None:
    code = (
        "import sys, tenant_sdk.endpoint.grammar_process, llguidance, os;"
        "assert not {'torch', 'grpc', 'transformers', 'numpy'} & set(sys.modules), sorted(sys.modules);"
        "assert len(os.listdir('/proc/self/task')) == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_tokenizer_that_fails_is_an_error_of_one_line() -> None:
    class Bad:
        all_special_ids: tuple[int, ...] = ()

        def __len__(self) -> int:
            return 3

    with pytest.raises(ConfigurationError, match="not possible with this tokenizer"):
        Grammars(Bad(), [END], EndpointLimits()).of_schema(SURE, "p")
    with pytest.raises(ConfigurationError, match="no stop token"):
        Grammars(TOKENIZER, [], EndpointLimits()).of_schema(SURE, "p")


# ---- the server ----------------------------------------------------------------------------------------------------


def shape(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def health(endpoint: Endpoint) -> tuple[int, dict[str, Any]]:
    with raw(endpoint) as http:
        answer = http.get("/health")
        return answer.status_code, answer.json()


def test_hostile_schemas_cost_their_own_requests(endpoint: Endpoint) -> None:
    """Six of them held all threads of the server for minutes, and one aborted it."""
    seen: list[tuple[int, str]] = []

    def post(schema: Any) -> None:
        with raw(endpoint) as http:
            answer = http.post("/v1/chat/completions", json=chat(response_format=shape(schema)))
            seen.append((answer.status_code, answer.json()["error"]["code"]))

    hostile = [intersected(300), *[intersected(24)] * 3]
    threads = [threading.Thread(target=post, args=(schema,)) for schema in hostile]
    for thread in threads:
        thread.start()
    with raw(endpoint) as http:
        assert http.post("/v1/chat/completions", json=chat()).status_code == 200
    assert health(endpoint) == (200, {"status": "ok"})
    end(threads)
    assert sorted(seen) == [(400, "schema_too_complex")] * 3 + [(400, "schema_too_large")]
    with raw(endpoint) as http:
        answer = http.post("/v1/chat/completions", json=chat(response_format=shape(SURE), max_tokens=30))
        assert json.loads(answer.json()["choices"][0]["message"]["content"]).keys() == {"sure"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_process_that_is_killed_in_an_answer(endpoint: Endpoint, stream: bool) -> None:
    with raw(endpoint) as http:
        http.post("/v1/chat/completions", json=chat(response_format=shape(SURE)))
        spawner = spawner_of(endpoint.service.grammars)
        until(lambda: not children(spawner), "the end of the worker")
        gate, failed = Gate(), []

        def post() -> None:
            with raw(endpoint) as other:
                failed.append(other.post("/v1/chat/completions", json=chat(response_format=shape(SURE), stream=stream)))

        held = endpoint.engine.submit("b", max_new_tokens=2, logits_processor=[gate])
        comes(gate.reached, "a step")
        asking = threading.Thread(target=post)
        asking.start()
        until(lambda: endpoint.engine.status().num_waiting + endpoint.engine.status().num_running > 1, "the request")
        for worker in children(spawner):
            os.kill(worker, signal.SIGKILL)
        gate.open.set()
        held.result(60)
        end(asking)
        (answer,) = failed
        assert (answer.status_code == 500) or (stream and answer.status_code == 200)
        error = json.loads(answer.text.removesuffix("\n\n").rpartition("data: ")[2])["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert "send the request again" in error["message"]
        assert http.post("/v1/chat/completions", json=chat(response_format=shape(SURE))).status_code == 200
    assert health(endpoint) == (200, {"status": "ok"})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_forced_call_with_definitions(endpoint: Endpoint, choice: Any) -> None:
    schema = {"$defs": {"A": A}, **object_of(x={"$ref": "#/$defs/A"})}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with raw(endpoint) as http:
        answer = http.post("/v1/chat/completions", json=chat(tools=tools, tool_choice=choice, max_tokens=60)).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) in ({"x": {"a": True}}, {"x": {"a": False}})


def test_a_tool_takes_an_object(endpoint: Endpoint) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]
    with raw(endpoint) as http:
        answer = http.post("/v1/chat/completions", json=chat(tools=tools))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools.0.function.parameters")


def test_health_tells_of_stuck_work(client: TenantClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with endpoint_of(client, limits=EndpointLimits(stuck_s=0.0, stalled_s=0.0)) as endpoint:
        assert health(endpoint) == (200, {"status": "ok"})
        opened, service, posting = threading.Event(), endpoint.service, []
        for holder, name in ((service.grammars, "of_schema"), (service.prompts, "of")):
            original = getattr(holder, name)

            def waiting(*arguments: Any, call: Any = original) -> Any:
                opened.wait(60)
                return call(*arguments)

            monkeypatch.setattr(holder, name, waiting)
        gate = Gate()
        held = endpoint.engine.submit("b", max_new_tokens=2, logits_processor=[gate])
        comes(gate.reached, "a step")
        until(lambda: health(endpoint) == (503, {"status": "stuck", "stuck": ["engine"]}), "the engine to be seen")
        with raw(endpoint) as http:
            posting = [threading.Thread(target=lambda: http.post("/v1/chat/completions", json=chat()))]
            posting[0].start()
            until(lambda: health(endpoint)[1].get("stuck") == ["requests", "engine"], "the request to be seen")
            assert "veilbase_endpoint_is_stuck 1.0" in http.get("/metrics").text
            opened.set()
            gate.open.set()
            end(posting)
        held.result(60)
        until(lambda: health(endpoint) == (200, {"status": "ok"}), "the work to be done")


def test_compiling_has_threads_of_its_own(client: TenantClient, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = EndpointLimits(stuck_s=0.0, schemas_waiting=6)
    with endpoint_of(client, limits=limits) as endpoint, raw(endpoint) as http:
        opened, original = threading.Event(), endpoint.service.grammars.of_schema

        def waiting(*arguments: Any) -> Any:
            opened.wait(60)
            return original(*arguments)

        monkeypatch.setattr(endpoint.service.grammars, "of_schema", waiting)
        body = chat(response_format=shape(SURE))
        posting = [threading.Thread(target=lambda: http.post("/v1/chat/completions", json=body)) for _ in range(8)]
        for thread in posting:
            thread.start()
        until(lambda: endpoint.service.grammar_threads.num_given == 8, "all to wait")
        until(lambda: health(endpoint) == (503, {"status": "stuck", "stuck": ["schemas"]}), "them to be seen")
        full = http.post("/v1/chat/completions", json=body)
        assert (full.status_code, full.json()["error"]["code"]) == (429, "too_many_schemas")
        assert http.post("/v1/chat/completions", json=chat()).status_code == 200
        opened.set()
        end(posting)


def test_threads_are_stuck_after_their_time() -> None:
    now, opened = [0.0], threading.Event()
    threads = Threads("schemas", 10.0, 1, 1, clock=lambda: now[0])
    first, second = threads.submit(opened.wait, 60), threads.submit(int)
    with pytest.raises(HttpError):
        threads.submit(int)
    for time_s, is_stuck in ((9.0, False), (11.0, True)):
        now[0] = time_s
        assert threads.is_stuck == is_stuck
    opened.set()
    assert (first.result(60), second.result(60)) == (True, 0)
    until(lambda: threads.num_given == 0, "the end of both")
    assert not threads.is_stuck
    threads.shutdown()
