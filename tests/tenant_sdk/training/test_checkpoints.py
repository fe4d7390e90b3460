"""Tests which contents an output folder may have, and that an adapter that is replaced is never lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tenant_sdk.training.checkpoints import check_replaceable, save_adapter
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
