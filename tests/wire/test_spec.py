"""Tests that the numbers in wire/SPEC.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import wire
from wire import frame, limits
from wire.errors import WireCode
from wire.frame import Arithmetic, Direction, FrameType, Purpose
from wire.manifest import BUNDLE_FILE_NAMES, GroupInfo, LayerInfo, Manifest
from wire.ring import seeded_rows

SPEC = (Path(wire.__file__).parent / "SPEC.md").read_text()
SECTIONS = {int(part[0]): part for part in re.split(r"^## ", SPEC, flags=re.MULTILINE)[1:]}


def table(section: int, num_columns: int) -> list[list[str]]:
    """Returns the rows, without heads, of those tables in the section that have this number of columns."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in SECTIONS[section].splitlines() if "|" in line]
    return [row for row in rows if len(row) == num_columns and not row[0].startswith("-")]


def test_sections_have_the_numbers_that_other_files_cite() -> None:
    titles = [text.splitlines()[0][2:] for _, text in sorted(SECTIONS.items())]
    assert titles == ["Connections", "Manifest and bundle", "Frames", "Limits", "Arithmetic", "Errors",
                      "What a peer may not do; versions"]  # fmt: skip


def test_header_table_is_the_struct() -> None:
    rows = [row for row in table(3, 4) if row[0].isdigit()]
    sizes = {"B": 1, "H": 2, "I": 4, "Q": 8}
    layout = frame._HEADER.format
    assert layout.startswith("<")  # no padding
    offset = 0
    for row, letter in zip(rows, layout[1:], strict=True):
        assert [int(cell) for cell in row[:2]] == [offset, sizes[letter]]
        offset += sizes[letter]
    assert offset == frame.HEADER_BYTES == 48
    assert " ".join(row[2] for row in rows) == (
        "type direction arithmetic purpose group request_id rows cols offset total_bytes deadline_ms code dropped "
        "reply_dropped"
    )


@pytest.mark.parametrize(
    ("field", "enum"),
    [("type", FrameType), ("direction", Direction), ("arithmetic", Arithmetic), ("purpose", Purpose)],
)
def test_header_numbers(field: str, enum: type[FrameType]) -> None:
    (meaning,) = [row[3] for row in table(3, 4) if row[2] == field]
    told = {name.upper(): int(number) for number, name in re.findall(r"(\d) (\w+)", meaning)}
    for member in enum:
        assert told[member.name] == member.value


def test_seeds() -> None:
    (seeds,) = [line for line in re.split(r"^- ", SECTIONS[3], flags=re.MULTILINE) if line.startswith("**Seeds.**")]
    text = " ".join(seeds.split())
    assert f"{seeded_rows.PACKED_BYTES} bytes" in text
    assert f"a seed of {seeded_rows.SEED_BYTES} bytes" in text
    assert "first_row + num_rows MUST NOT exceed 2^40" in text
    domain = re.findall(r"SHA-256\(`(.*?)` ‖ one zero byte ‖ seed\)", SECTIONS[5])[0]
    assert domain.encode() + b"\0" == seeded_rows.DOMAIN


def test_error_table() -> None:
    rows = [row for row in table(6, 4) if row[0].isdigit()]
    assert {row[1]: int(row[0]) for row in rows} == {code.name: code.value for code in WireCode}


def test_manifest_fields() -> None:
    named = {row[0].strip("`") for row in table(2, 2)} - {"field"}
    assert named == set(Manifest.model_fields)
    for model in (GroupInfo, LayerInfo):
        assert any(set(model.model_fields) == set(found) for found in braces(SECTIONS[2])), model


def braces(text: str) -> list[list[str]]:
    return [re.findall(r"\w+", found) for found in re.findall(r"`\{(.*?)\}`", text, flags=re.DOTALL)]


def test_bundle_names() -> None:
    told = re.search(r"Only these names: (.*?)\. None", SECTIONS[2], flags=re.DOTALL)
    assert told
    assert set(re.findall(r"`([^`]+)`", told[1])) == BUNDLE_FILE_NAMES


def test_limits_table() -> None:
    unit = {"": 1, "MiB": limits.MIB}
    for name, default, bounds, _ in table(4, 4)[1:]:
        field = limits.Limits.model_fields[name.strip("`")]
        number, _, kind = default.replace("65 536", "65536").partition(" ")
        assert int(number) * unit[kind] == field.default
        low, high = bounds.split(" … ")
        told = (int(low), 2 ** int(high.removeprefix("2^")))
        assert told == (field.metadata[0].ge, field.metadata[1].le)


def test_fixed_numbers() -> None:
    assert limits.CHUNK_BYTES == limits.MIB
    assert limits.MAX_FRAME_BYTES == limits.MIB + 4096
    assert limits.MAX_MANIFEST_BYTES == 64 * limits.MIB
    assert (limits.KEEPALIVE_TIME_MS, limits.KEEPALIVE_TIMEOUT_MS) == (20_000, 10_000)
    assert limits.MAX_DEADLINE_MS == 3_600_000
    assert limits.MAX_GROUPS == 65_536
    assert limits.MAX_FEATURES == 2**22
    assert limits.MAX_BUNDLE_BYTES == 64 << 30
    assert limits.MAX_BUNDLE_FILES == 32
    assert frame.PROTOCOL_VERSION == 2
    assert seeded_rows.MAX_ROWS == 2**40
    assert (seeded_rows.SEED_BYTES, seeded_rows.PACKED_BYTES) == (32, 48)
    assert frame.MAGIC == b"VEIL"
