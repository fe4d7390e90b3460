"""Tests what is pinned at first use, and how a change is accepted."""

from __future__ import annotations

import json
import os
import stat
import threading
from pathlib import Path

import pytest

from provider.model.served_model import ServedModel
from tenant_sdk.trust.pins import PARTS, Pins, canonical_digests
from wire.errors import ConfigurationError, ProviderChanged
from wire.manifest import Manifest

FIRST = dict.fromkeys(PARTS, "aa" * 32)


def test_first_use_and_after(tmp_path: Path) -> None:
    for _ in range(2):
        Pins(tmp_path).check("one", FIRST)
    path = tmp_path / "pins.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == {"one": FIRST}


@pytest.mark.parametrize("part", PARTS)
def test_a_change_is_refused_until_it_is_accepted_by_name(tmp_path: Path, part: str) -> None:
    Pins(tmp_path).check("one", FIRST)
    changed = FIRST | {part: "bb" * 32}
    others = [name for name in PARTS if name != part]
    for accepted in ([], others):
        with pytest.raises(ProviderChanged, match=PARTS[part]) as failure:
            Pins(tmp_path).check("one", changed, accepted)
        assert "\n" not in str(failure.value)
        assert f"--accept-change {part}" in str(failure.value)
    Pins(tmp_path).check("one", changed, [part])
    Pins(tmp_path).check("one", changed)
    with pytest.raises(ProviderChanged):
        Pins(tmp_path).check("one", FIRST)


def test_models_and_tenants_have_pins_of_their_own(tmp_path: Path) -> None:
    Pins(tmp_path).check("one", FIRST)
    Pins(tmp_path).check("two", dict.fromkeys(PARTS, "bb" * 32))
    with pytest.raises(ProviderChanged):
        Pins(tmp_path).check("two", FIRST)


def test_parts_that_a_session_does_not_use_are_pinned_later(tmp_path: Path) -> None:
    Pins(tmp_path).check("one", {"config": "aa" * 32})
    Pins(tmp_path).check("one", FIRST)
    with pytest.raises(ProviderChanged):
        Pins(tmp_path).check("one", FIRST | {"tokenizer": "bb" * 32})


@pytest.mark.parametrize("damage", ["", "not json", "[]", '{"one": 1}', '{"one": {"template": 7}}', "[" * 100_000])
def test_damaged_pins_are_no_empty_pins(tmp_path: Path, damage: str) -> None:
    (tmp_path / "pins.json").write_text(damage)
    with pytest.raises(ConfigurationError, match=r"pins\.json is damaged") as failure:
        Pins(tmp_path).check("one", FIRST)
    assert "\n" not in str(failure.value)


def test_pins_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a read-only folder the first use is an error. If nothing has to be written, there is no error."""
    Pins(tmp_path).check("one", FIRST)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    Pins(tmp_path).check("one", FIRST)
    with pytest.raises(ConfigurationError, match="cannot be written: Permission denied; make it writable") as failure:
        Pins(tmp_path).check("two", FIRST)
    assert "\n" not in str(failure.value)


def test_several_at_once(tmp_path: Path) -> None:
    names = [f"provider {number}" for number in range(12)]
    threads = [threading.Thread(target=Pins(tmp_path).check, args=(name, FIRST)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(json.loads((tmp_path / "pins.json").read_text())) == set(names)
    assert os.listdir(tmp_path) == ["pins.json"]


def test_canonical_values(chat_served_model: ServedModel, tmp_path: Path) -> None:
    """The release that wrote a file and the order of its keys do not count as a change. Any other value does."""
    manifest = chat_served_model.manifest()
    for file in manifest.bundle:
        (tmp_path / file.name).write_bytes(b"".join(chat_served_model.read_file(file.name)))
    before = canonical_digests(tmp_path, manifest)

    def rewritten(name: str, **changes: object) -> dict[str, str]:
        path = tmp_path / name
        content = json.loads(path.read_text())
        path.write_text(json.dumps(dict(reversed((content | changes).items())), indent=3))
        after = canonical_digests(tmp_path, manifest)
        path.write_text(json.dumps(content))
        return {part: digest for part, digest in after.items() if digest != before[part]}

    assert rewritten("config.json", transformers_version="9.9") == {}
    assert rewritten("tokenizer.json") == {}
    assert set(rewritten("config.json", rms_norm_eps=0.5)) == {"config"}
    assert set(rewritten("tokenizer.json", transformers_version="a token of this name")) == {"tokenizer"}
    assert set(rewritten("tokenizer.json", normalizer={"type": "NFC"})) == {"tokenizer"}
    assert set(rewritten("tokenizer_config.json", eos_token="a")) == {"tokenizer"}
    assert set(rewritten("tokenizer_config.json", chat_template="x")) == {"template"}
    other = Manifest.model_validate(manifest.model_dump() | {"config": {**manifest.config, "rms_norm_eps": 0.5}})
    assert set(PARTS) - {"weights"} == set(before)  # weights are in no bundle
    after = canonical_digests(tmp_path, other)
    assert {part for part in before if after[part] != before[part]} == {"config"}
    renamed = Manifest.model_validate(manifest.model_dump() | {"model_id": "other"})
    after = canonical_digests(tmp_path, renamed)
    assert {part for part in before if after[part] != before[part]} == {"model"}
