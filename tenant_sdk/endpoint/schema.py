"""This module describes the requests that the endpoint accepts, with a limit for each of their parts.

Guarantees: a request that passes has the types, roles and sizes below, and no field that the endpoint would ignore
although it changes the answer. The error text names the field and never quotes its value.
"""

from __future__ import annotations

import itertools
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from tenant_sdk.endpoint.errors import HttpError, bad_request

MOST_MESSAGES, MOST_TOOLS, MOST_CHOICES, MOST_STOPS, MOST_BIASES = 1024, 128, 16, 16, 1024
"""The most messages, tools, choices, stop strings and biased tokens of a request."""
MOST_INPUTS = 256
"""The most texts of a request for embeddings."""
_MOST_PARTS = 256
_MOST_FAULTS = 1000
"""The most faults of a body that are described. A body with more of them is refused as a whole, since describing a
million faults would take seconds."""
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


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class TextPart(_Strict):
    """Holds one part of a message's content. Only text is accepted."""

    type: Literal["text"]
    text: str


class CalledFunction(_Strict):
    """Holds the name of a function that the model called, and the arguments as JSON."""

    name: _ToolName
    arguments: str = "{}"


class ToolCall(_Strict):
    """Holds a call that the model made in an earlier turn."""

    id: _Name
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(_Strict):
    """Holds one message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=_MOST_PARTS)] | None = None
    name: _Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS)] | None = None
    tool_call_id: _Name | None = None
    refusal: None = None
    annotations: Annotated[list[_JsonObject], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    """The last four fields are empty in answers. Clients send them back with an answer in the next request."""

    @property
    def text(self) -> str:
        """Returns the content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionTool(_Strict):
    """Describes a function that the model may call."""

    name: _ToolName
    description: str | None = None
    parameters: _JsonObject | None = None
    strict: bool | None = None


class Tool(_Strict):
    """Holds one entry of a request's `tools`."""

    type: Literal["function"]
    function: FunctionTool


class _NamedFunction(_Strict):
    name: _ToolName


class NamedTool(_Strict):
    """Holds the choice of one tool that the model must call."""

    type: Literal["function"]
    function: _NamedFunction


class SchemaFormat(_Strict):
    """Holds the JSON schema that an answer must fit."""

    name: _ToolName
    description: str | None = None
    schema_: _JsonObject = Field(alias="schema", default_factory=dict)
    strict: bool | None = None


class ResponseFormat(_Strict):
    """Says whether an answer is free text, any JSON object or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None


class StreamOptions(_Strict):
    """Holds the options of a streamed response."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class _Request(_Strict):
    """Holds the fields that requests for chat and for plain completions share.

    The fields from `user` on have no effect on the answer. They are accepted because clients send them.
    """

    model: str = Field(min_length=1, max_length=512)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MOST_STOPS)] | None = None
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
    user: str | None = Field(None, max_length=512)
    safety_identifier: str | None = Field(None, max_length=512)
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None

    @property
    def stops(self) -> list[str]:
        """Returns the stop strings as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Returns whether a streamed response ends with a chunk that holds the token counts (`usage`)."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(_Request):
    """Holds a request of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None


class CompletionRequest(_Request):
    """Holds a request of /v1/completions. The prompt is a text, token ids, or a list of either."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)]
        | _TokenIds
        | Annotated[list[_TokenIds], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)]
    )
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None
    logprobs: int | None = Field(None, ge=0, le=5)


class EmbeddingRequest(_Strict):
    """Holds a request of /v1/embeddings. The input is a text, token ids, or a list of either."""

    model: str = Field(min_length=1, max_length=512)
    input: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)]
        | _TokenIds
        | Annotated[list[_TokenIds], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: None = None
    user: str | None = Field(None, max_length=512)


class LoadAdapter(_Strict):
    """Holds a request of /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1, max_length=128)
    lora_path: str | None = Field(None, min_length=1, max_length=4096)


class UnloadAdapter(_Strict):
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
        return kind.model_validate_json(body)
    except ValidationError as exc:
        raise _refusal(exc) from None
    except (ValueError, RecursionError):  # such as a number that is too long to be read
        raise bad_request("the body is not JSON that can be read", code="invalid_json") from None


def _is_name(part: int | str) -> bool:
    """Returns whether a part of pydantic's error location is a field's name or an index, and not the name of a type."""
    return isinstance(part, int) or (part.isidentifier() and part not in ("str", "int"))


def _refusal(exc: ValidationError) -> HttpError:
    """Returns the error for the first thing that is wrong; its text names the field and leaves out the value."""
    if exc.error_count() > _MOST_FAULTS:
        return bad_request(f"more than {_MOST_FAULTS} fields or values of the body are wrong")
    first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return bad_request("the body is not JSON in UTF-8", code="invalid_json")
    names = [str(each) for each in itertools.takewhile(_is_name, first["loc"])]
    place = ascii(".".join(names))[1:-1][:200]
    if first["type"] == "extra_forbidden":
        return bad_request(f"{place} is not a field of this request here", place, "unknown_field")
    return bad_request(f"{place or 'the body'}: {first['msg']}"[:400], place or None)
