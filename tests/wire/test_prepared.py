"""Tests the prepared store: what it gives back, and that no store that others may have made or changed is used."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from wire.errors import ConfigurationError
from wire.prepared import PreparedLayer, StoreKey, open_store, prepare_layer, writing
from wire.ring import quantise

KEY = StoreKey({"model.safetensors": "ab" * 32}, {"reader": "1"})


def layers() -> dict[str, PreparedLayer]:
    generator = torch.Generator().manual_seed(3)
    return {
        "first": prepare_layer(torch.randn(7, 5, generator=generator), "linear"),
        "second": prepare_layer(torch.randn(3, 9, generator=generator), "conv1d"),
    }


def write(folder: Path, key: StoreKey = KEY) -> Path:
    with writing(folder, key) as writer:
        for name, layer in layers().items():
            writer.add_layer(name, layer)
        writer.add_blob("config.json", b"{}\n")
        writer.facts = {"names": ["a", "b"]}
    return folder / key.file_name


def same(one: PreparedLayer, other: PreparedLayer) -> bool:
    tensors = ("weight", "alpha", "row_squares", "column_squares")
    equal = all(torch.equal(getattr(one, name), getattr(other, name)) for name in tensors)
    return equal and (one.kind, one.digest) == (other.kind, other.digest)


def is_sound(folder: Path) -> bool:
    store = open_store(folder, KEY)
    return store is not None and all(same(store.layer(name), layer) for name, layer in layers().items())


def test_gives_back_what_was_written(tmp_path: Path) -> None:
    file, checked = write(tmp_path / "new" / "prepared"), list[tuple[int, int]]()
    store = open_store(file.parent, KEY, lambda done, total: checked.append((done, total)))
    assert store is not None
    assert checked[-1] == (file.stat().st_size - 32, file.stat().st_size - 32), "all bytes but the SHA-256 itself"
    assert is_sound(file.parent)
    assert store.layer_names == {"first", "second"}
    assert store.blobs() == {"config.json": b"{}\n"}
    assert store.facts == {"names": ["a", "b"]}
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in file.parent.iterdir()] == [KEY.file_name]


def test_a_layer_is_that_of_the_quantiser() -> None:
    weight = torch.randn(6, 4)
    layer, (quantised, alpha) = prepare_layer(weight, "linear"), quantise.quantise(weight)
    assert torch.equal(layer.weight, quantised)
    assert layer.digest == quantise.digest(quantised, alpha)
    assert quantise.norm_bounds(layer.column_squares, layer.row_squares) == quantise.max_norms(quantised)
    norms = quantise.norms_of_columns(layer.column_squares, alpha)
    assert torch.equal(norms, quantise.column_norms(quantised, alpha))


def test_none_is_none(tmp_path: Path) -> None:
    assert open_store(tmp_path / "nowhere", KEY) is None
    tmp_path.chmod(0o700)
    assert open_store(tmp_path, KEY) is None


def flip(offset: int) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[offset] ^= 1
        file.write_bytes(content)

    return change


def link(file: Path) -> None:
    file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent / "elsewhere")


def link_folder(file: Path) -> None:
    file.parent.rename(file.parent.parent / "elsewhere")
    file.parent.symlink_to(file.parent.parent / "elsewhere", target_is_directory=True)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "first byte": (flip(0), "bytes are damaged"),
    "header": (flip(-80), "bytes are damaged"),
    "its own SHA-256": (flip(-1), "bytes are damaged"),
    "magic": (flip(-40), "bytes are damaged"),
    "truncated": (lambda file: os.truncate(file, file.stat().st_size - 1), "bytes are damaged"),
    "longer": (lambda file: file.write_bytes(file.read_bytes() + b"\0"), "bytes are damaged"),
    "almost empty": (lambda file: os.truncate(file, 10), "cut short"),
    "empty": (lambda file: os.truncate(file, 0), "cut short"),
    "group may write": (lambda file: file.chmod(0o660), "others may"),
    "others may write": (lambda file: file.chmod(0o602), "others may"),
    "others may read": (lambda file: file.chmod(0o604), "others may"),
    "group may write the folder": (lambda file: file.parent.chmod(0o770), "its folder"),
    "link": (link, "link"),
    "link to the folder": (link_folder, "link"),
    "second name": (lambda file: os.link(file, file.parent.parent / "second"), "file of its own"),
    "pipe": (pipe, "file of its own"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_store_is_refused_and_replaced(case: str, tmp_path: Path) -> None:
    file = write(tmp_path / "prepared")
    change, why = BAD[case]
    change(file)
    with pytest.raises(ConfigurationError, match=why):
        open_store(file.parent, KEY)
    write(file.parent)
    assert is_sound(file.parent)
    assert not file.is_symlink()
    assert not file.parent.is_symlink()


def test_a_foreign_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, owner = write(tmp_path / "prepared"), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigurationError, match="another user"):
        open_store(file.parent, KEY)
    with pytest.raises(PermissionError, match="another user"):
        write(file.parent)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_foreign_file_in_our_folder(tmp_path: Path) -> None:
    file = write(tmp_path / "prepared")
    os.chown(file, 12345, -1)
    with pytest.raises(ConfigurationError, match="another user"):
        open_store(file.parent, KEY)
    write(file.parent)
    assert is_sound(file.parent)


def test_stores_in_an_open_folder_are_all_removed(tmp_path: Path) -> None:
    """Others could have put any of them there."""
    other = StoreKey({"model.safetensors": "cd" * 32}, {})
    planted = write(tmp_path / "prepared", other)
    planted.parent.chmod(0o777)
    write(planted.parent)
    assert not planted.exists()
    assert is_sound(planted.parent)


@pytest.mark.parametrize(
    "key", [StoreKey(KEY.source, {"reader": "2"}), StoreKey({"model.safetensors": "cd" * 32}, KEY.versions)]
)
def test_a_store_of_something_else(key: StoreKey, tmp_path: Path) -> None:
    file = write(tmp_path / "prepared", key)
    file.rename(file.parent / KEY.file_name)
    with pytest.raises(ConfigurationError, match="another checkpoint or by other releases"):
        open_store(file.parent, KEY)


def test_a_store_of_another_quantiser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "prepared")
    monkeypatch.setattr("wire.prepared.QUANTISER_VERSION", 2)
    assert open_store(file.parent, KEY) is None
    file.rename(file.parent / KEY.file_name)
    with pytest.raises(ConfigurationError, match="other releases"):
        open_store(file.parent, KEY)


def test_environments_with_other_versions_keep_their_stores_side_by_side(tmp_path: Path) -> None:
    other = StoreKey(KEY.source, {"reader": "2"})
    files = {write(tmp_path), write(tmp_path, other)}
    assert len(files) == 2
    assert all(file.exists() for file in files)
    assert open_store(tmp_path, other) is not None
    assert is_sound(tmp_path)


def break_off(folder: Path) -> None:
    with writing(folder, KEY) as writer:
        writer.add_blob("half", b"x")
        raise KeyError


def test_a_failure_leaves_the_old_store(tmp_path: Path) -> None:
    file = write(tmp_path / "prepared")
    with pytest.raises(KeyError):
        break_off(file.parent)
    assert is_sound(file.parent)
    assert len(list(file.parent.iterdir())) == 1


def test_a_mapped_store_survives_its_replacement(tmp_path: Path) -> None:
    file = write(tmp_path / "prepared")
    store = open_store(file.parent, KEY)
    write(file.parent)
    assert store is not None
    assert same(store.layer("first"), layers()["first"])


def test_many_writers_at_once(tmp_path: Path) -> None:
    threads = [threading.Thread(target=write, args=(tmp_path / "prepared",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert is_sound(tmp_path / "prepared")
    assert len(list((tmp_path / "prepared").iterdir())) == 1


def test_what_a_crash_left_is_removed(tmp_path: Path) -> None:
    file = write(tmp_path / "prepared")
    old, new = file.parent / ".partial-1", file.parent / ".partial-2"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    write(file.parent)
    assert not old.exists()
    assert new.exists()


def test_a_store_that_nobody_opens_is_removed_after_a_month(tmp_path: Path) -> None:
    other = StoreKey({"model.safetensors": "cd" * 32}, {"reader": "1"})
    files = [write(tmp_path), write(tmp_path, other)]
    for file in files:
        os.utime(file, (0, 0))
    assert open_store(tmp_path, KEY) is not None  # which counts as use
    write(tmp_path, StoreKey({"model.safetensors": "ef" * 32}, {"reader": "1"}))
    assert [file.exists() for file in files] == [True, False]
