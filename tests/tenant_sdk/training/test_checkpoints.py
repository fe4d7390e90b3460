"""Tests which contents an output folder may have, and that an adapter that is replaced is never lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tenant_sdk.training.checkpoints import (
    Checkpoints,
    check_output,
    check_replaceable,
    checkpoints_folder,
    save_adapter,
)
from tenant_sdk.training.run_identity import RunIdentity
from wire.errors import ConfigurationError


def adapter(folder: Path, text: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(text)
    return folder


def test_only_an_adapter_or_nothing_is_replaced(tmp_path: Path) -> None:
    check_replaceable(tmp_path / "new")
    check_replaceable(adapter(tmp_path / "old"))
    (tmp_path / "empty").mkdir()
    check_replaceable(tmp_path / "empty")
    (tmp_path / "file").write_text("thesis")
    adapter(tmp_path / "parent" / "child")
    mixed = adapter(tmp_path / "mixed")
    (mixed / "notes").mkdir()
    for precious in ("file", "parent", "mixed"):
        with pytest.raises(ConfigurationError, match="something other than an adapter"):
            check_replaceable(tmp_path / precious)


def test_an_adapter_is_replaced_only_on_demand(tmp_path: Path) -> None:
    old = adapter(tmp_path / "old")
    with pytest.raises(ConfigurationError, match=r"holds an adapter already: .*--output.*overwrite=True"):
        check_output(old, overwrite=False)
    (tmp_path / "link").symlink_to(old)
    with pytest.raises(ConfigurationError, match="holds an adapter already"):
        check_output(tmp_path / "link", overwrite=False)
    for path in (old, tmp_path / "link"):
        check_output(path, overwrite=True)
    check_output(tmp_path / "new" / "folder", overwrite=False)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("x" * 250, "expected a name of at most 242 bytes .* 250 came"),
        ("\u00e9" * 122, "expected a name of at most 242 bytes .* 244 came"),
        ("dangling", "dangling is a link to nothing"),
        ("loop", "loop is a link to nothing"),
        ("dangling/out", "dangling is a link to nothing"),
        ("file", "holds something other than an adapter"),
        ("file/out", "file is no folder"),
        ("y" * 300 + "/out", "cannot be written: "),
        ("z/" * 2500 + "out", "cannot be written: "),
        ("null\0", "cannot be written: it is no path"),
        ("a\nb/" + "z" * 300, "expected a name of at most 242 bytes"),
        ("", "is no name of a new folder"),
        ("new/..", "is no name of a new folder"),
    ],
    ids=range(13),
)
def test_an_output_that_cannot_be_written_is_named_before_the_work(
    path: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("dangling").symlink_to("nowhere")
    Path("loop").symlink_to("loop")
    Path("file").write_text("")
    with pytest.raises(ConfigurationError, match=reason) as failure:
        check_output(Path(path), overwrite=True)
    assert "\n" not in str(failure.value)


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    out = tmp_path / ("x" * 242)
    check_output(out, overwrite=False)
    Checkpoints(checkpoints_folder(out)).open("run", None)
    save_adapter(_Model(), out)
    assert (out / "adapter_config.json").exists()


class _Model:
    def save_pretrained(self, folder: Path, **_: Any) -> None:
        adapter(folder, "fresh")


def test_the_old_adapter_comes_back_when_the_new_one_cannot_be_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = adapter(tmp_path / "adapter", "old")
    rename = Path.rename

    def fail_for_new(self: Path, to: Path) -> Path:
        if self.name == "new":
            raise OSError(28, "No space left on device")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail_for_new)
    with pytest.raises(OSError, match="No space left"):
        save_adapter(_Model(), target)
    monkeypatch.undo()
    assert (target / "adapter_config.json").read_text() == "old"
    save_adapter(_Model(), target)
    assert (target / "adapter_config.json").read_text() == "fresh"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]


def test_checkpoints_of_another_run_are_told_with_what_differs(tmp_path: Path) -> None:
    then, now = RunIdentity(options={"seed": "1", "max_steps": "6"}), RunIdentity(options={"seed": "2"})
    checkpoints = Checkpoints(tmp_path / ".out.checkpoints")
    checkpoints.check(None, then)
    assert not checkpoints.folder.exists()
    with pytest.raises(ConfigurationError, match="there is no complete checkpoint"):
        checkpoints.check(True, then)
    checkpoints.open("run", None, then)
    (checkpoints.folder / "checkpoint-1").mkdir()
    checkpoints.check(None, now)  # nothing of it would be lost
    (checkpoints.folder / "checkpoint-1" / "complete").touch()
    checkpoints.check(True, then)
    checkpoints.check(False, now)
    for call in (lambda: checkpoints.check(None, now), lambda: checkpoints.open("other", None, now)):
        with pytest.raises(ConfigurationError, match=r"settings \(seed \(--seed\) is 2, theirs is 1\): pass resume"):
            call()
    with pytest.raises(ConfigurationError, match="with other data or settings: pass resume"):
        checkpoints.open("other", None, then)
    (checkpoints.folder / "run.json").write_text(json.dumps({"fingerprint": "run"}))  # of an earlier release
    checkpoints.check(None, now)
    assert checkpoints.open("run", None, then) == checkpoints.folder / "checkpoint-1"


@pytest.mark.parametrize("content", ["", "[1]", '{"fingerprint": 1, "options": "x"}', "[" * 100_000])
def test_a_damaged_description_of_a_run_is_that_of_another(tmp_path: Path, content: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "complete").touch()
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConfigurationError, match="with other data or settings: pass resume"):
        checkpoints.open("run", None)
