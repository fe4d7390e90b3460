"""This module describes the requests that the endpoint accepts, with a limit for each of their parts.

Guarantees: a request that passes has the types, roles and sizes below, and no field that the endpoint would ignore
although it changes the answer. A field that is null counts as absent, unless it must be there, and so does a field
that is unknown here and is null or empty: clients send such fields for what their users did not set. The error text
names the field and never quotes its value.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import from_json

from runtime.command_line import nearest
from tenant_sdk.endpoint.errors import HttpError, bad_request

MOST_MESSAGES, MOST_TOOLS, MOST_CHOICES, MOST_STOPS, MOST_BIASES = 1024, 128, 16, 16, 1024
"""The most messages, tools, choices, stop strings and biased tokens of a request."""
MOST_INPUTS = 256
"""The most texts of a request for embeddings."""
_MOST_PARTS = 256
_MOST_FAULTS = 1000
"""The most faults of a body that are described. A body with more of them is refused as a whole, since describing a
million faults would take seconds."""
_SHOWN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
"""The names of fields that an error shows: another one may be a text at the wrong place."""
_OF_OTHERS = frozenset((
    "audio", "cache_control", "function_call", "functions", "length_penalty", "load_inplace", "lora_int_id",
    "min_tokens", "moderation", "prediction", "prompt_cache_retention", "reasoning_content", "reasoning_effort",
    "tool_resources", "verbosity", "web_search_options",
))  # fmt: skip
"""Fields of OpenAI's and of vLLM's interfaces that this one lacks, and that are not misspelt ones of its own."""
TEXT, _LIST, _OBJECT, NUMBER, _TEXTS, _LISTS = "(text)", "(list)", "(object)", "(number)", "(texts)", "(lists)"
"""The kinds of values of a field that takes several. They are no names, so that they are told apart in error places."""
_KINDS = frozenset((TEXT, _LIST, _OBJECT, NUMBER, _TEXTS, _LISTS))
_Name = Annotated[str, Field(min_length=1, max_length=128)]
_ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
_Stop = Annotated[str, Field(min_length=1, max_length=256)]
_TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]
"""Token ids. Reading ends at the first one that is wrong."""


def _is_finite(value: dict[str, Any]) -> dict[str, Any]:
    """Refuses NaN and infinities, such as 1e999: pydantic reads them where any value may stand, and JSON has none."""
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise ValueError("a number is not finite") from None  # the original error shows it
    return value


_JsonObject = Annotated[dict[str, Any], AfterValidator(_is_finite)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
"""A client's own notes about a request. Source of the limits: OpenAI's documentation of the field `metadata`."""


def _kind_of(value: Any) -> str | None:
    return next((kind for type_, kind in _KIND_OF_TYPE.items() if isinstance(value, type_)), None)


_KIND_OF_TYPE: dict[type, str] = {str: TEXT, list: _LIST, dict: _OBJECT, int: NUMBER, float: NUMBER}


def _prompt_kind_of(value: Any) -> str | None:
    """Returns whether a prompt is a text, a list of texts, token ids or a list of token ids; the first entry
    decides."""
    if not isinstance(value, list) or not value:
        return _kind_of(value)
    if isinstance(value[0], list):
        return _LISTS
    return _TEXTS if isinstance(value[0], str) else _LIST


def one_of(expected: str, kind_of: Callable[[Any], str | None] = _kind_of) -> Discriminator:
    """Chooses by a value's own kind which type of a union it must have, so that the error is about that type. Without
    it, the first error is that the value has not the first type.

    Args:
        expected: the types, for the error about a value of another kind.
        kind_of: returns the tag of a value's kind; None for another kind.
    """
    return Discriminator(kind_of, custom_error_type="wrong_kind", custom_error_message=f"expected {expected}")


class Strict(BaseModel):
    """Holds an object of a request's body, with its fields and no other."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _without_absent(cls, given: Any) -> Any:
        """Leaves out the fields that count as absent."""
        if not isinstance(given, dict):
            return given
        required = _is_required(cls)
        return {name: value for name, value in given.items() if not _is_absent(value, required.get(name))}


@functools.cache
def _is_required(kind: type[BaseModel]) -> dict[str, bool]:
    """Returns the names of a model's fields in JSON, and whether each of them must be there."""
    return {field.alias or name: field.is_required() for name, field in kind.model_fields.items()}


def _is_absent(value: Any, is_required: bool | None) -> bool:
    """Returns whether a field counts as absent. Args: is_required: None if the field is unknown."""
    return value in (None, "", [], {}) if is_required is None else value is None and not is_required


class TextPart(Strict):
    """Holds one part of a message's content. Only text is accepted."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """Holds the name of a function that the model called, and the arguments as JSON."""

    name: _ToolName
    arguments: Annotated[str, AfterValidator(lambda text: text if text.strip() else "{}")] = "{}"
    """The arguments. An empty text is what some clients make of a call without arguments."""


class ToolCall(Strict):
    """Holds a call that the model made in an earlier turn."""

    id: _Name
    type: Literal["function"] = "function"
    function: CalledFunction


_Content = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], Field(max_length=_MOST_PARTS), Tag(_LIST)],
    one_of("a text or a list of text parts"),
]


class Message(Strict):
    """Holds one message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    name: _Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: _Name | None = None

    @field_validator("content")
    @classmethod
    def _as_one_text(cls, content: str | list[TextPart] | None) -> str | None:
        """Joins parts at once: kept as objects, the parts of one body could take a hundred megabytes."""
        return "".join(part.text for part in content) if isinstance(content, list) else content

    @property
    def text(self) -> str:
        """Returns the content as one text."""
        return str(self.content or "")


class FunctionTool(Strict):
    """Describes a function that the model may call."""

    name: _ToolName
    description: str | None = None
    parameters: _JsonObject | None = None
    strict: bool | None = None


class Tool(Strict):
    """Holds one entry of a request's `tools`."""

    type: Literal["function"]
    function: FunctionTool


class _NamedFunction(Strict):
    name: _ToolName


class NamedTool(Strict):
    """Holds the choice of one tool that the model must call."""

    type: Literal["function"]
    function: _NamedFunction


class SchemaFormat(Strict):
    """Holds the JSON schema that an answer must fit."""

    name: _ToolName
    description: str | None = None
    schema_: _JsonObject = Field(alias="schema", default_factory=dict)
    strict: bool | None = None


class ResponseFormat(Strict):
    """Says whether an answer is free text, any JSON object or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


_Stops = Annotated[
    Annotated[_Stop, Tag(TEXT)] | Annotated[list[_Stop], Field(max_length=MOST_STOPS), Tag(_LIST)],
    one_of("a text or a list of texts"),
]


class StreamOptions(Strict):
    """Holds the options of a streamed response."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class ClientNotes(Strict):
    """Holds the fields that have no effect on an answer. They are accepted because clients send them."""

    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    prompt_cache_key: str | None = Field(None, max_length=512)
    metadata: Metadata | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None


class _Request(ClientNotes):
    """Holds the fields that requests for chat and for plain completions share."""

    model: str = Field(min_length=1, max_length=512)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: _Stops | None = None
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=1 << 31)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_BIASES)] | None = (
        None
    )
    max_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    fixed_length: bool = False

    @property
    def length_field(self) -> str:
        """Returns the name of the field that limits the length of an answer."""
        return "max_tokens"

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Returns whether a streamed response ends with a chunk that holds the token counts (`usage`)."""
        return self.stream_options is not None and self.stream_options.include_usage


_ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)] | Annotated[NamedTool, Tag(_OBJECT)],
    one_of("none, auto, required or an object that names a tool"),
]


class ChatRequest(_Request):
    """Holds a request of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None

    @property
    def length_field(self) -> str:
        """Returns the name of the field that limits the length of an answer; `max_completion_tokens` comes first."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_top_logprobs(self) -> int | None:
        """Returns how many of the likeliest tokens the logprobs of a step have; None if no logprobs are asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def most_calls(self) -> int | None:
        """Returns the number of tool calls that an answer may have, or None for any number."""
        return 1 if self.parallel_tool_calls is False else None

    def without_contents(self) -> ChatRequest:
        """Returns the request without its messages, tools and schemas, which a request that waits would otherwise keep
        beside the prompt that was made of them, and which take many times the size of the body."""
        none = dict.fromkeys(("tools", "tool_choice", "response_format", "metadata"))
        return self.model_copy(update={"messages": [], **none})


_PROMPTS = "a text, token ids, or a list of either"


class CompletionRequest(_Request):
    """Holds a request of /v1/completions. The prompt is a text, token ids, or a list of either."""

    prompt: Annotated[
        Annotated[str, Tag(TEXT)]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True), Tag(_TEXTS)]
        | Annotated[_TokenIds, Tag(_LIST)]
        | Annotated[list[_TokenIds], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True), Tag(_LISTS)],
        one_of(_PROMPTS, _prompt_kind_of),
    ]
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    logprobs: int | None = Field(None, ge=0, le=5)

    @property
    def num_top_logprobs(self) -> int | None:
        """Returns how many of the likeliest tokens the logprobs of a step have; None if no logprobs are asked for."""
        return self.logprobs


class EmbeddingRequest(ClientNotes):
    """Holds a request of /v1/embeddings. The input is a text, token ids, or a list of either."""

    model: str = Field(min_length=1, max_length=512)
    input: Annotated[
        Annotated[str, Tag(TEXT)]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True), Tag(_TEXTS)]
        | Annotated[_TokenIds, Tag(_LIST)]
        | Annotated[list[_TokenIds], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True), Tag(_LISTS)],
        one_of(_PROMPTS, _prompt_kind_of),
    ]
    encoding_format: Literal["float", "base64"] = "float"


class LoadAdapter(ClientNotes):
    """Holds a request of /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=128)
    lora_path: str | None = Field(None, min_length=1, max_length=4096)


class UnloadAdapter(ClientNotes):
    """Holds a request of /v1/unload_lora_adapter. Its `lora_int_id` is accepted and ignored."""

    lora_name: str = Field(min_length=1, max_length=128)
    lora_int_id: int | None = None


R = TypeVar("R", bound=BaseModel)


def parsed(kind: type[R], body: bytes) -> R:
    """Returns a request's body as a checked object.

    Raises:
        HttpError: the body is not JSON, or a field is missing, unknown or outside its limits.
    """
    try:
        given = from_json(body)  # takes a fifth of the memory of `model_validate_json` for a body of empty objects
    except (ValueError, RecursionError):  # such as a number that is too long, and is not quoted
        raise bad_request("the body is not JSON in UTF-8 that can be read", code="invalid_json") from None
    try:
        return kind.model_validate(given)
    except ValidationError as exc:
        raise _refusal(exc, kind) from None


def _meant(kind: type[BaseModel], place: Sequence[int | str]) -> str | None:
    """Returns the field that a client most likely meant by the unknown one at the end of a location; None if none is
    near, or if the name is one of `_OF_OTHERS`."""
    *above, name = (part for part in place if isinstance(part, str) and part not in _KINDS)
    kinds = [kind]
    for step in above:
        fields = [field for each in kinds for at, field in each.model_fields.items() if (field.alias or at) == step]
        kinds = [found for field in fields for found in _models_in(field.annotation)]
    known = [known_name for each in kinds for known_name in _is_required(each)]
    return None if name in _OF_OTHERS else nearest(name, known)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Returns the models that a field's type mentions."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _models_in(part)]


def _is_shown(part: int | str) -> bool:
    """Returns whether a part of pydantic's error location is an index or the name of a field."""
    return isinstance(part, int) or _SHOWN_NAME.fullmatch(part) is not None


def _refusal(exc: ValidationError, kind: type[BaseModel]) -> HttpError:
    """Returns the error for the first thing that is wrong; its text names the field and leaves out the value."""
    if exc.error_count() > _MOST_FAULTS:
        return bad_request(f"more than {_MOST_FAULTS} fields or values of the body are wrong")
    faults = exc.errors(include_url=False, include_input=False)
    first = _misspelt(faults, kind) or faults[0]
    parts = [part for part in first["loc"] if part not in _KINDS]
    place = ".".join(map(str, itertools.takewhile(_is_shown, parts)))[:200]
    if first["type"] == "extra_forbidden":
        is_shown = _is_shown(first["loc"][-1])
        named = place if is_shown else f"a field of {place or 'the body'}, whose name is not shown,"
        meant = _meant(kind, first["loc"]) if is_shown else None
        advice = "leave it out" if meant is None else f"did you mean {meant}?"
        return bad_request(f"{named} is not supported here: {advice}", place or None, "unknown_field")
    return bad_request(f"{place or 'the body'}: {_reason(first)}"[:400], place or None)


def _misspelt(faults: Sequence[Any], kind: type[BaseModel]) -> Any:
    """Returns the fault of an unknown field that stands where the first fault misses one of a similar name; None if
    there is none, or if nothing is missing."""
    *above, name = faults[0]["loc"] or ("",)
    if faults[0]["type"] != "missing":
        return None
    beside = [each for each in faults if each["type"] == "extra_forbidden" and list(each["loc"][:-1]) == above]
    return next((each for each in beside if _is_shown(each["loc"][-1]) and _meant(kind, each["loc"]) == name), None)


def _reason(fault: Any) -> str:
    """Returns what is wrong, in words that need no knowledge of pydantic."""
    limits = fault.get("ctx", {})
    if fault["type"] == "missing":
        return "this field is required"
    if fault["type"] == "too_short":
        return f"expected at least {_entries(limits['min_length'])}, got {limits['actual_length']}"
    if fault["type"] == "too_long":
        return f"expected at most {_entries(limits['max_length'])}, got {limits['actual_length'] or 'more'}"
    return str(fault["msg"])


def _entries(number: int) -> str:
    return "1 entry" if number == 1 else f"{number} entries"
