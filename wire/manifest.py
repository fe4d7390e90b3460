"""This module defines what a provider says about itself before any tensor moves (wire/SPEC.md, section 2).

A parsed `Manifest` is bounded and self-consistent: shapes add up, norms lie in [1, 127·√dim], no number is NaN or
infinite, and names of layers and groups hold only ASCII letters, digits, spaces and a few punctuation marks. This
module does not guarantee that the provider tells the truth; verification does. Importing this module does not load
torch, so that a command can compare its options with a manifest at once.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import from_json

from wire.call import Direction
from wire.errors import MalformedFrame, VersionMismatch
from wire.limits import (
    INT8_MAX,
    ITEM_BYTES,
    MAX_BUNDLE_BYTES,
    MAX_BUNDLE_FILES,
    MAX_FEATURES,
    MAX_GROUPS,
    MAX_MANIFEST_BYTES,
    MAX_TEXT_FILE_BYTES,
    PROTOCOL_VERSION,
    Limits,
)

BUNDLE_FILE_NAMES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
        "vocab.json",
        "merges.txt",
        "scales.safetensors",
        "column_norms.safetensors",
    }
)
"""The only files that a bundle may hold. None of them is code or a pickle."""

NATIVE_NORMS = "native/"
"""The prefix of a layer's name in column_norms.safetensors that marks the norms of the checkpoint's own weight; norms
of the int8 weight have no prefix. No layer's name holds a slash."""
_MOST_ERRORS = 100
_Name = Field(min_length=1, max_length=512, pattern=r"^[A-Za-z0-9_.\-+, ]+$")
_Features = Field(ge=1, le=MAX_FEATURES)
_Norm = Field(ge=1, allow_inf_nan=False)
"""The Euclidean norm of a column or row of integers. `wire.ring.quantise.max_norms` returns at least 1, and the scales
of rows are chosen on that assumption."""
_Digest = Field(pattern=r"^[0-9a-f]{64}$")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Shape(_Strict):
    in_features: int = _Features
    out_features: int = _Features
    max_column_norm: float = _Norm
    max_row_norm: float = _Norm
    digest: str = _Digest

    def widths(self, direction: Direction) -> tuple[int, int]:
        """Returns (columns of a request, columns of its reply) for a direction."""
        forward = direction is Direction.FORWARD
        return (self.in_features, self.out_features) if forward else (self.out_features, self.in_features)

    @model_validator(mode="after")
    def _norms_are_possible(self) -> _Shape:
        # No int8 weight has a larger norm. This check cannot find a norm that is too small: with such a norm the tenant
        # would choose a scale with which results wrap, and wrapping leaks data through faults.
        column, row = INT8_MAX * math.sqrt(self.in_features), INT8_MAX * math.sqrt(self.out_features)
        if self.max_column_norm > column * (1 + 1e-9) or self.max_row_norm > row * (1 + 1e-9):
            raise ValueError("a norm no int8 weight of this shape can have")
        return self


class LayerInfo(_Shape):
    """Describes one base layer: y = x·W + b with W of shape (in_features, out_features), even if the model's module
    stores W transposed."""

    name: str = _Name
    kind: Literal["linear", "conv1d"]
    bias: bool


class GroupInfo(_Shape):
    """Describes a group, that is, layers that read the same input. Their weights are joined to one matrix, so that one
    product computes the outputs of all layers of the group. Every request names one group."""

    id: int = Field(ge=0, lt=MAX_GROUPS)
    name: str = _Name
    layers: Annotated[tuple[LayerInfo, ...], FailFast()] = Field(min_length=1, max_length=256)

    @property
    def weight_bytes(self) -> int:
        """Returns the bytes of W̃ and α, of which the digest is made."""
        return self.out_features * (self.in_features + ITEM_BYTES)

    @model_validator(mode="after")
    def _layers_add_up(self) -> GroupInfo:
        if any(layer.in_features != self.in_features for layer in self.layers):
            raise ValueError("layers of one group must have the same number of inputs")
        if sum(layer.out_features for layer in self.layers) != self.out_features:
            raise ValueError("a group's outputs must be the sum of its layers' outputs")
        return self


class BundleFile(_Strict):
    """Describes one file of the bundle, which holds everything of the model except the base layers' weights."""

    name: str
    size_bytes: int = Field(ge=0, le=MAX_BUNDLE_BYTES)
    sha256: str = _Digest

    @model_validator(mode="after")
    def _known_name(self) -> BundleFile:
        if not self.name.endswith(".safetensors") and self.size_bytes > MAX_TEXT_FILE_BYTES:
            raise ValueError("a text file too large to be read whole")
        if self.name not in BUNDLE_FILE_NAMES:
            raise ValueError("a file name that no bundle may hold")
        return self


class Manifest(_Strict):
    """Holds the model, layers, arithmetic, limits and bundle that one provider announces."""

    protocol: int
    model_id: str = Field(min_length=1, max_length=512, pattern=r"^[^\p{C}\p{Zl}\p{Zp}]+$")
    config: dict[str, Any]
    weights: Literal["int8", "native"]
    arithmetic: Annotated[tuple[Literal["ring", "float"], ...], FailFast()] = Field(min_length=1, max_length=2)
    groups: Annotated[tuple[GroupInfo, ...], FailFast()] = Field(min_length=1, max_length=MAX_GROUPS)
    bundle: Annotated[tuple[BundleFile, ...], FailFast()] = Field(min_length=1, max_length=MAX_BUNDLE_FILES)
    bundle_digest: str = _Digest
    limits: Limits
    recording: bool = False
    tensor_port: int | None = Field(default=None, ge=1, le=65_535)

    @model_validator(mode="after")
    def _groups_are_listed_once(self) -> Manifest:
        if [group.id for group in self.groups] != list(range(len(self.groups))):
            raise ValueError("group ids must count from 0")
        names = [layer.name for group in self.groups for layer in group.layers]
        if len(set(names)) != len(names) or len({file.name for file in self.bundle}) != len(self.bundle):
            raise ValueError("a layer or a file is listed twice")
        return self

    def to_bytes(self) -> bytes:
        """Returns the manifest as UTF-8 JSON."""
        return self.model_dump_json().encode()

    @property
    def digest(self) -> str:
        """Returns the SHA-256 of the manifest, in hex."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


def parse_manifest(data: bytes) -> Manifest:
    """Returns a peer's manifest after checking it.

    Raises:
        VersionMismatch: the manifest names another protocol version, or none.
        MalformedFrame: the manifest is too large, not JSON, or inconsistent, or a field is missing, unknown or out of
            range.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise MalformedFrame(f"expected a manifest of at most {MAX_MANIFEST_BYTES} bytes, got {len(data)}")
    try:
        content = from_json(data)
    except ValueError as exc:
        raise MalformedFrame("the provider's manifest is not JSON") from exc
    protocol = content.get("protocol") if isinstance(content, dict) else None
    if type(protocol) is not int:
        raise VersionMismatch("the provider's manifest names no protocol version")
    # The version is checked before the other fields: a later protocol may have others.
    if protocol != PROTOCOL_VERSION:
        raise VersionMismatch(f"this tenant speaks protocol {PROTOCOL_VERSION}, the provider another")
    try:
        manifest = Manifest.model_validate(content)
    except ValidationError as exc:
        raise MalformedFrame(f"the provider's manifest is not valid {_first_error(exc)}") from None  # quotes the peer
    if not _is_finite(manifest.config):
        raise MalformedFrame("the provider's manifest is not valid at config: finite_number")
    return manifest


def _is_finite(value: Any) -> bool:
    """Returns whether no number of a JSON value is NaN or infinite; `from_json` reads 1e400 as infinity."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _first_error(exc: ValidationError) -> str:
    if exc.error_count() > _MOST_ERRORS:  # A list of all errors would take a kilobyte for each error.
        return f"in {exc.error_count()} places"
    first = exc.errors(include_url=False, include_context=False, include_input=False)[0]
    # The name of a superfluous field is the peer's own text, which must not reach a terminal.
    known = first["loc"][:-1] if first["type"] == "extra_forbidden" else first["loc"]
    where = ".".join(str(part) for part in known[:4])
    return f"at {where or 'its top'}: {first['type']}"
