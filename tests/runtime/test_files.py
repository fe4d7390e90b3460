"""Tests that a folder in which nothing can be made is told, whoever asks, and that asking leaves nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.files import nearest_there, why_not_writable


def test_a_folder_that_takes_files(tmp_path: Path) -> None:
    assert why_not_writable(tmp_path) == ""
    assert not [*tmp_path.iterdir()]


def test_a_file_system_that_takes_none() -> None:
    assert why_not_writable(Path("/proc")).startswith("nothing can be made in '/proc' (")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert why_not_writable(tmp_path) == "permission denied"


def test_what_is_there_of_a_path(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    assert nearest_there(tmp_path / "a" / "b") == tmp_path
    assert nearest_there(tmp_path / "link" / "b") == tmp_path / "link"
