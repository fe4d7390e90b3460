"""Tests that the files in the folder of adapters are checked before they are used, and that no file outside of it is
opened."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tenant_sdk.serving.adapters.host import PackedAdapter, pack
from tenant_sdk.serving.adapters.reader import CONFIG, WEIGHTS, AdapterFolder, LoraFile
from tenant_sdk.serving.adapters.targets import Base, base_of
from tests.support.saved_adapters import base_model, open_files, save_adapter
from wire.errors import ConfigurationError, StorageError

_BASE = base_of(base_model())
KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
MOST = 1 << 20


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(
        base_model(), tmp_path_factory.mktemp("made") / "good", seed=1, target_modules=["q_proj", "v_proj"]
    )


@pytest.fixture(scope="session")
def base() -> Base:
    return _BASE


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "root" / "good")
    return tmp_path / "root"


@pytest.fixture
def folder(root: Path) -> AdapterFolder:
    return AdapterFolder(root)


def checked(folder: AdapterFolder, name: str = "good") -> LoraFile:
    """Returns what an adapter's files contain."""
    with folder.open(name) as opened:
        contents = opened.check_served(_BASE, MOST)
    assert isinstance(contents, LoraFile)
    return contents


def packed_from(folder: AdapterFolder, name: str = "good", dtype: torch.dtype = torch.float32) -> PackedAdapter:
    """Reads all of an adapter into memory."""
    with folder.open(name) as opened:
        contents = opened.check_served(_BASE, MOST)
        assert isinstance(contents, LoraFile)
        return pack(opened, contents, dtype)[0]


def refuse(folder: AdapterFolder, name: str, match: str) -> None:
    """Checks that an adapter is refused with an error of one line, and leaves no file open."""
    before = open_files()
    with pytest.raises(ConfigurationError, match=match) as caught:
        checked(folder, name)
    assert "\n" not in str(caught.value)
    assert open_files() == before


def test_a_good_one_is_read_whole(folder: AdapterFolder, root: Path) -> None:
    packed = packed_from(folder)
    assert [layer.module for layer in packed.layers] == [
        f"model.layers.{at}.self_attn.{name}_proj" for at in (0, 1) for name in ("q", "v")
    ]
    saved = load_file(root / "good" / WEIGHTS)
    for layer, values in zip(
        packed.layers, packed.values.split([each.num_weights for each in packed.layers]), strict=True
    ):
        lora_a, lora_b = layer.factors(values)
        assert torch.equal(lora_a, saved[f"base_model.model.{layer.module}.lora_A.weight"])
        assert torch.equal(lora_b.t(), 2 * saved[f"base_model.model.{layer.module}.lora_B.weight"])  # alpha / rank
    assert (
        4 * packed.values.numel()
        == checked(folder).packed_bytes(torch.float32)
        == 4 * sum(each.numel() for each in saved.values())
    )


def test_the_digest_is_what_sha256sum_says(folder: AdapterFolder, root: Path) -> None:
    both = b"".join((root / "good" / file).read_bytes() for file in (CONFIG, WEIGHTS))
    assert packed_from(folder).digest == hashlib.sha256(both).hexdigest()
    command = f"cat {CONFIG} {WEIGHTS} | sha256sum"
    said = subprocess.run(command, shell=True, cwd=root / "good", capture_output=True, text=True, check=True)  # noqa: S602
    assert said.stdout.split()[0] == packed_from(folder).digest


@pytest.mark.parametrize(
    "name", ["..", ".", "../good", "good/../good", "/etc", "", "a" * 200, "good\0", "gööd", ".hidden", 7]
)
def test_a_name_that_could_be_a_path_is_none(name: Any, folder: AdapterFolder) -> None:
    refuse(folder, name, "cannot be an adapter's name")


def test_an_unknown_name(folder: AdapterFolder) -> None:
    refuse(folder, "nobody", "there is no adapter 'nobody' in the folder of adapters")


def test_what_a_run_leaves_is_no_adapter(folder: AdapterFolder, root: Path, made: Path) -> None:
    before = folder.names()
    for name in (".new.checkpoints", ".new.logs", "old.checkpoints", "old.logs"):
        (root / name / "checkpoint-2").mkdir(parents=True)
        assert not folder.has(name)
    assert folder.names() == before
    shutil.copytree(made, root / "v1.logs")
    assert all(map(folder.has, [*before, "v1.logs"]))
    assert folder.names() == sorted([*before, "v1.logs"])


def test_links_are_not_followed(folder: AdapterFolder, root: Path, made: Path, tmp_path: Path) -> None:
    (root / "linked").symlink_to(made, target_is_directory=True)
    (root / "inside").symlink_to(root / "good", target_is_directory=True)
    for name in ("linked", "inside"):
        refuse(folder, name, f"there is no adapter {name!a} in the folder of adapters")
        assert name not in folder.names()
    for file in (CONFIG, WEIGHTS):
        shutil.copytree(made, root / f"with-{file}")
        (root / f"with-{file}" / file).unlink()
        (root / f"with-{file}" / file).symlink_to(made / file)
        refuse(folder, f"with-{file}", f"no {file} that is a regular file")


def test_a_pipe_keeps_nobody_waiting(folder: AdapterFolder, root: Path) -> None:
    (root / "good" / WEIGHTS).unlink()
    os.mkfifo(root / "good" / WEIGHTS)
    refuse(folder, "good", "no adapter_model.safetensors that is a regular file")


def test_a_pickle_is_not_opened(folder: AdapterFolder, root: Path) -> None:
    (root / "good" / WEIGHTS).rename(root / "good" / "adapter_model.bin")
    refuse(folder, "good", "in a pickle, which is not opened")


def test_two_of_one_name(root: Path) -> None:
    shutil.copytree(root / "good", root / "Good")
    with pytest.raises(ConfigurationError, match="Good and good have one name"):
        AdapterFolder(root)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        AdapterFolder(tmp_path / "nowhere")


def test_too_large_a_file_is_not_read(folder: AdapterFolder, root: Path) -> None:
    with (root / "good" / WEIGHTS).open("r+b") as file:
        file.truncate(MOST + 1)
    refuse(folder, "good", "1048577 bytes of weights: at most 1048576 fit")


def test_too_many_settings_are_not_read(folder: AdapterFolder, root: Path) -> None:
    (root / "good" / CONFIG).write_text(" " * (2 << 20))
    refuse(folder, "good", "bytes of settings")


def test_a_file_that_is_written_meanwhile(folder: AdapterFolder, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, path = os.preadv, root / "good" / WEIGHTS

    def written(*args: Any) -> int:
        os.utime(path, ns=(1, 1))
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", written)
    with pytest.raises(ConfigurationError, match="is being written"):
        packed_from(folder)


def test_a_file_that_shrinks_meanwhile(folder: AdapterFolder, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, path = os.preadv, root / "good" / WEIGHTS

    def shortened(*args: Any) -> int:
        os.truncate(path, 100)
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", shortened)
    with pytest.raises(ConfigurationError, match="became shorter"):
        packed_from(folder)


@pytest.mark.parametrize("function", ["open", "pread", "preadv"])
def test_what_the_disk_does_not_give_is_told_in_one_line(
    function: str, folder: AdapterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is wrong with the adapter, so that the error is none that is remembered."""

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = open_files()
    monkeypatch.setattr(os, function, fail)
    with pytest.raises(StorageError) as caught:
        packed_from(folder)
    monkeypatch.undo()
    assert str(caught.value) == "the files of the adapter good cannot be read: Too many open files"
    assert open_files() == before


def test_a_change_shows_in_the_stamp(folder: AdapterFolder, root: Path) -> None:
    path = root / "good" / WEIGHTS
    os.utime(path, (1, 1))
    with folder.open("good") as before, folder.open("good") as same:
        assert same.stamp == before.stamp
        path.write_bytes(path.read_bytes())
        with folder.open("good") as after:
            assert after.stamp != before.stamp


def test_a_stamp_of_a_moment_ago_is_not_relied_on(folder: AdapterFolder, root: Path) -> None:
    now = time.time()
    os.utime(root / "good" / CONFIG, (now + 1000, now + 1000))  # however slow this test is
    with folder.open("good") as opened:
        assert opened.settled_stamp is None
        assert not opened.is_unchanged()


def test_files_are_closed_once(folder: AdapterFolder, tmp_path: Path) -> None:
    opened = folder.open("good")
    opened.close()
    with (tmp_path / "other").open("w") as other:  # it gets the number of a file that was closed
        opened.close()
        other.write("still open")
    assert (tmp_path / "other").read_text() == "still open"


def test_an_adapter_whose_settings_are_looked_at_is_parsed_once(
    folder: AdapterFolder, base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text, **options: parsed.append(text) or loads(text, **options))
    with folder.open("good") as opened:
        opened.settings(base, MOST)["r"] = 7  # a copy
        assert opened.settings(base, MOST)["r"] == 8
        assert opened.check(base, MOST) is opened.check_served(base, MOST)
    assert len(parsed) == 2  # the settings, and the header


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Returns a function that changes the header of a file and leaves the numbers unchanged."""

    def apply(path: Path) -> None:
        content = path.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        entries = json.loads(content[8 : 8 + length])
        change(entries)
        text = json.dumps(entries).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return apply


def start(**fields: Any) -> Callable[[Path], None]:
    return header(lambda entries: entries[KEY].update(fields))


def raw(content: bytes) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(content), None)[1]


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def twice(path: Path) -> None:
    text = b'{"a": 1, "a": 2}'
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def without_prefix_too(path: Path) -> None:
    tensors = load_file(path)
    save_file(tensors | {KEY.removeprefix("base_model.model."): tensors[KEY].clone()}, path)


BAD_FILES: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (raw(b""), "no such file"),
    "a pickle by another name": (raw(b"\x80\x04}q\0."), "no such file"),
    "a header longer than the file": (raw(struct.pack("<Q", 1 << 30) + b"{}"), "no such file"),
    "a header of the largest number": (raw(b"\xff" * 8 + b"{}"), "no such file"),
    "a header that is no JSON": (raw(struct.pack("<Q", 4) + b"nope"), "without a header"),
    "a header that is deep": (raw(struct.pack("<Q", 200_000) + b"[" * 200_000), "without a header"),
    "a header that is a list": (raw(struct.pack("<Q", 2) + b"[]"), "without a header"),
    "no tensors": (raw(struct.pack("<Q", 2) + b"{}"), "holds no tensors"),
    "a name twice": (twice, "without a header"),
    "a factor under two names": (without_prefix_too, "twice, with and without"),
    "bytes behind the last tensor": (longer, "overlap, leave gaps or pass"),
    "too many tensors": (header(lambda e: e.update({f"t{at}": 0 for at in range(20_001)})), "20009 tensors: at most"),
    "an entry that is no table": (header(lambda e: e.update({KEY: 5})), "another form"),
    "a dtype that PEFT does not save": (start(dtype="I64"), "another form than a matrix of F32, F16, BF16"),
    "three dimensions": (start(shape=[8, 32, 1]), "another form"),
    "an empty shape": (start(shape=[0, 32], data_offsets=[0, 0]), "another form"),
    "a negative shape": (start(shape=[-8, -32]), "another form"),
    "a shape of booleans": (start(shape=[True, True]), "another form"),
    "a huge shape": (start(shape=[1 << 39, 1 << 39]), "a size that is not its shape's"),
    "offsets that are too short": (start(data_offsets=[0, 4]), "a size that is not its shape's"),
    "offsets beyond the end": (start(data_offsets=[1 << 30, (1 << 30) + 1024]), "overlap, leave gaps or pass"),
    "a tensor over another": (start(data_offsets=[1024, 2048]), "overlap, leave gaps or pass"),
    "only one factor": (
        lambda path: save_file({KEY: torch.zeros(8, 32)}, path),
        "only one of A and B",
    ),
    "DoRA's magnitudes": (
        lambda path: save_file({KEY.replace("lora_A.weight", "lora_magnitude_vector"): torch.zeros(1, 32)}, path),
        "which is DoRA",
    ),
    "a whole base layer": (
        lambda path: save_file({KEY.replace("lora_A", "base_layer"): torch.zeros(32, 32)}, path),
        "a copy of a base layer",
    ),
    "a layer that the model lacks": (
        lambda path: save_file({KEY.replace("layers.0", "layers.9"): torch.zeros(8, 32)}, path),
        "for another base: this model has no linear layer",
    ),
    "shapes of another model": (
        lambda path: save_file({KEY: torch.zeros(8, 48), KEY.replace("lora_A", "lora_B"): torch.zeros(48, 8)}, path),
        "for another base: .* 32 inputs and 32 outputs",
    ),
    "another rank than the settings say": (
        lambda path: save_file({KEY: torch.zeros(4, 32), KEY.replace("lora_A", "lora_B"): torch.zeros(32, 4)}, path),
        "of rank 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_weights_are_refused_before_they_are_read(case: str, folder: AdapterFolder, root: Path) -> None:
    change, match = BAD_FILES[case]
    change(root / "good" / WEIGHTS)
    refuse(folder, "good", match)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numbers_that_are_none_are_refused(value: float, dtype: torch.dtype, folder: AdapterFolder, root: Path) -> None:
    saved = {key: each.to(dtype) for key, each in load_file(root / "good" / WEIGHTS).items()}
    saved[KEY][3, 5] = value
    save_file(saved, root / "good" / WEIGHTS)
    for packed in (torch.float32, torch.bfloat16):
        with pytest.raises(ConfigurationError, match="NaN or infinite"):
            packed_from(folder, dtype=packed)


def test_a_number_that_bfloat16_has_not_is_refused(folder: AdapterFolder, root: Path) -> None:
    saved = load_file(root / "good" / WEIGHTS)
    saved[KEY][0, 0] = 3.4e38  # rounds to infinity
    save_file(saved, root / "good" / WEIGHTS)
    with pytest.raises(ConfigurationError, match="NaN or infinite"):
        packed_from(folder, dtype=torch.bfloat16)
    assert packed_from(folder).values.max() == torch.tensor(3.4e38)


def test_large_numbers_whose_sum_is_infinite_are_numbers(folder: AdapterFolder, root: Path) -> None:
    saved = load_file(root / "good" / WEIGHTS)
    saved[KEY].fill_(3e38)
    save_file(saved, root / "good" / WEIGHTS)
    assert bool(torch.isfinite(packed_from(folder, dtype=torch.bfloat16).values).all())


@pytest.mark.parametrize("alpha", [0, -16, 1e-300])
def test_any_alpha_that_is_a_number_is_multiplied_into_b(alpha: float, folder: AdapterFolder, root: Path) -> None:
    settings = json.loads((root / "good" / CONFIG).read_text())
    (root / "good" / CONFIG).write_text(json.dumps(settings | {"lora_alpha": alpha}))
    saved = load_file(root / "good" / WEIGHTS)
    packed = packed_from(folder, dtype=torch.bfloat16)
    layer = packed.layers[0]
    _, lora_b = layer.factors(packed.values[: layer.num_weights])
    expected = saved[KEY.replace("lora_A", "lora_B")].bfloat16().float() * (alpha / 8)
    assert torch.equal(lora_b.t().float() * layer.scaling, expected)


def test_half_precision_files_give_the_same_numbers(folder: AdapterFolder, root: Path) -> None:
    wide = packed_from(folder, dtype=torch.bfloat16)
    saved = {key: each.bfloat16() for key, each in load_file(root / "good" / WEIGHTS).items()}
    save_file(saved, root / "good" / WEIGHTS)
    narrow = packed_from(folder, dtype=torch.bfloat16)
    assert torch.equal(wide.values, narrow.values)
    assert wide.digest != narrow.digest


def test_a_header_of_odd_length_is_read(folder: AdapterFolder, root: Path) -> None:
    wide = packed_from(folder)
    path = root / "good" / WEIGHTS
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    for extra in range(1, 5):
        path.write_bytes(
            struct.pack("<Q", length + extra) + content[8 : 8 + length] + b" " * extra + content[8 + length :]
        )
        assert torch.equal(packed_from(folder).values, wide.values)
