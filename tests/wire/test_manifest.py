"""Tests which manifests are refused, with which error, and that no text of a peer is in a message."""

from __future__ import annotations

import copy
import json
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.manifests import DIGEST, Q_PROJ, layer, shape, valid
from wire.errors import MalformedFrame, VersionMismatch
from wire.limits import MAX_BUNDLE_BYTES, MAX_BUNDLE_FILES, MAX_FEATURES, MAX_GROUPS, MAX_MANIFEST_BYTES
from wire.manifest import BUNDLE_FILE_NAMES, Manifest, parse_manifest


def put(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Returns a function that changes one value of a manifest. The path consists of keys and indices, separated by
    dots."""

    def change(content: dict[str, Any]) -> None:
        place: Any = content
        *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in parents:
            place = place[part]
        place[last] = value

    return change


def changed(*changes: Callable[[dict[str, Any]], None]) -> bytes:
    content = copy.deepcopy(valid())
    for change in changes:
        change(content)
    return json.dumps(content).encode()


def test_round_trip() -> None:
    manifest = parse_manifest(changed())
    assert manifest == parse_manifest(manifest.to_bytes())
    assert manifest == Manifest.model_validate(valid())
    assert [info.name for group in manifest.groups for info in group.layers][-1] == "lm_head"
    assert manifest.config["nested"] == {"a": [1, None, 0.5]}


def test_defaults() -> None:
    manifest = parse_manifest(changed(lambda c: c.pop("recording"), put("limits", {})))
    assert not manifest.recording
    assert manifest.limits.max_rows == 65_536


def test_a_manifest_cannot_be_changed() -> None:
    manifest = parse_manifest(changed())
    with pytest.raises(ValueError, match="frozen"):
        manifest.protocol = 2  # type: ignore[misc]


NAN, INF = math.nan, math.inf
REFUSED = {
    "column norm zero": put("groups.0.max_column_norm", 0),
    "column norm negative": put("groups.0.max_column_norm", -1.0),
    "column norm that no integers have": put("groups.0.max_column_norm", 0.999),
    "column norm of a larger layer": put("groups.0.max_column_norm", 127 * math.sqrt(8) * 1.000001),
    "column norm NaN": put("groups.0.max_column_norm", NAN),
    "column norm infinite": put("groups.0.max_column_norm", INF),
    "config with NaN": put("config.rms_norm_eps", NAN),
    "config with an infinity deep in it": put("config.nested", {"a": [1, {"b": -INF}]}),
    "row norm zero": put("groups.0.max_row_norm", 0.0),
    "row norm of a larger layer": put("groups.0.max_row_norm", 127 * math.sqrt(12) * 1.000001),
    "layer's column norm": put("groups.0.layers.1.max_column_norm", 127 * 3.0),
    "layer's row norm": put("groups.0.layers.1.max_row_norm", 127 * 2.1),
    "norm missing": lambda c: c["groups"][0].pop("max_row_norm"),
    "no features": put("groups.1.in_features", 0),
    "too many features": put("groups.1.out_features", MAX_FEATURES + 1),
    "half a feature": put("groups.1.out_features", 99.5),
    "outputs that do not add up": put("groups.0.out_features", 11),
    "inputs that differ": put("groups.0.layers.0", layer("x", 7, 8)),
    "no layers": put("groups.1.layers", []),
    "257 layers": put("groups.1.layers", [layer(f"l{i}", 8, 1) for i in range(257)]),
    "duplicate layer in one group": put("groups.0.layers", [layer("same", 8, 6), layer("same", 8, 6)]),
    "duplicate layer in two groups": put("groups.1.layers.0.name", Q_PROJ),
    "unknown kind": put("groups.1.layers.0.kind", "conv2d"),
    "empty layer name": put("groups.1.layers.0.name", ""),
    "long layer name": put("groups.1.layers.0.name", "x" * 513),
    "path in a name": put("groups.1.layers.0.name", "../../etc/passwd"),
    "newline in a name": put("groups.1.layers.0.name", "lm_head\n"),
    "ids from one": put("groups.0.id", 1),
    "ids swapped": lambda c: c["groups"].reverse(),
    "negative id": put("groups.0.id", -1),
    "no groups": put("groups", []),
    "digest too short": put("groups.0.digest", DIGEST[1:]),
    "digest in capitals": put("groups.0.digest", DIGEST.upper()),
    "digest with a newline": put("bundle_digest", DIGEST + "\n"),
    "unknown file name": put("bundle.0.name", "modeling_llama.py"),
    "pickle": put("bundle.0.name", "pytorch_model.bin"),
    "file with a path": put("bundle.0.name", "../config.json"),
    "duplicate file": put("bundle.1.name", "config.json"),
    "no files": put("bundle", []),
    "many files": put("bundle", [valid()["bundle"][0]] * (MAX_BUNDLE_FILES + 1)),
    "negative file size": put("bundle.0.size_bytes", -1),
    "file too large": put("bundle.0.size_bytes", MAX_BUNDLE_BYTES + 1),
    "unknown weights": put("weights", "int4"),
    "unknown arithmetic": put("arithmetic", ["ring", "complex"]),
    "no arithmetic": put("arithmetic", []),
    "three arithmetics": put("arithmetic", ["ring", "float", "ring"]),
    "empty model id": put("model_id", ""),
    "long model id": put("model_id", "m" * 513),
    "model id with an escape": put("model_id", "m\x1b[2J"),
    "model id with a line break": put("model_id", "m\u2028n"),
    "config is no object": put("config", []),
    "limit of zero": put("limits.max_rows", 0),
    "limit too large": put("limits.max_tensor_bytes", 2**32 + 1),
    "limits of another kind": put("limits.max_streams", 3),
    "extra field": put("signature", "x"),
    "extra field in a group": put("groups.0.hidden", 1),
    "extra field in a layer": put("groups.0.layers.0.hidden", 1),
    "extra field in a file": put("bundle.0.url", "http://x"),
    "groups are an object": put("groups", {"0": 1}),
    "group is null": put("groups.0", None),
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED.keys())
def test_refused(change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(MalformedFrame, match="manifest is not valid"):
        parse_manifest(changed(change))


@pytest.mark.parametrize("name", sorted(valid().keys() - {"recording", "protocol"}))
def test_fields_are_needed(name: str) -> None:
    with pytest.raises(MalformedFrame, match=f"at {name}: missing"):
        parse_manifest(changed(lambda content: content.pop(name)))


def test_norms_at_their_bound_are_accepted() -> None:
    for value in (1.0, 127 * math.sqrt(8)):
        assert parse_manifest(changed(put("groups.0.max_column_norm", value))).groups[0].max_column_norm == value


@pytest.mark.parametrize("name", sorted(BUNDLE_FILE_NAMES))
def test_known_files(name: str) -> None:
    assert parse_manifest(changed(put("bundle", [{"name": name, "size_bytes": 0, "sha256": DIGEST}]))).bundle


@pytest.mark.parametrize("protocol", [0, 1, 3, -1, 10**30, None, "2", 2.0, True, [2]])
def test_another_protocol(protocol: Any) -> None:
    with pytest.raises(VersionMismatch):
        parse_manifest(changed(put("protocol", protocol)))


def test_another_protocol_is_told_apart_whatever_else_it_has() -> None:
    with pytest.raises(VersionMismatch, match="speaks protocol 2"):
        parse_manifest(changed(put("protocol", 3), put("signature", "x"), lambda content: content.pop("groups")))


@pytest.mark.parametrize("data", [b"[]", b"1", b'"x"', b"null", b"{}"])
def test_no_protocol(data: bytes) -> None:
    with pytest.raises(VersionMismatch, match="names no protocol version"):
        parse_manifest(data)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff\xfe", b'{"protocol": 2,}', b"\x00" * 100, b"[" * 100_000, b'{"protocol": 2} trailing']
)
def test_not_json(data: bytes) -> None:
    with pytest.raises(MalformedFrame, match="not JSON"):
        parse_manifest(data)


def test_oversize_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wire.manifest.from_json", lambda data: pytest.fail("was read"))
    with pytest.raises(MalformedFrame, match=f"at most {MAX_MANIFEST_BYTES} bytes"):
        parse_manifest(bytes(MAX_MANIFEST_BYTES + 1))


def test_the_peers_text_is_not_in_the_message() -> None:
    for change in (
        put("\x1b[2J\nTRUST ME", 1),
        put("groups.0.\x1b[2J\nTRUST ME", 1),
        put("weights", "\x1b[2J\nTRUST ME"),
        put("groups.0.digest", "\x1b[2J\nTRUST ME"),
        put("protocol", "\x1b[2J\nTRUST ME"),
    ):
        with pytest.raises((MalformedFrame, VersionMismatch)) as caught:
            parse_manifest(changed(change))
        assert str(caught.value).isprintable()
        assert "TRUST" not in str(caught.value)


@pytest.mark.parametrize("name", ["groups", "arithmetic", "bundle"])
def test_a_long_list_of_nothing_does_not_grow(name: str) -> None:
    # One error for each of these entries took 1.6 KB: 64 MiB of them would have taken 50 GB.
    data = b'{"protocol":2,"%b":[' % name.encode() + b"0," * 200_000 + b"0]}"
    check_memory(data)


def test_many_unknown_fields_do_not_grow() -> None:
    fields = ",".join(f'"{index:x}":0' for index in range(50_000))
    check_memory(b'{"protocol":2,' + fields.encode() + b"}")


def check_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFrame):
            parse_manifest(data)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 40 * len(data)


def test_as_many_groups_as_allowed_fit() -> None:
    entry = json.dumps({"id": MAX_GROUPS, "name": "g", "layers": [layer(Q_PROJ, 8, 8)], **shape(8, 8)})
    assert len(entry) * MAX_GROUPS < MAX_MANIFEST_BYTES
