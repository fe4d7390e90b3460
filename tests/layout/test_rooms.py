"""Tests that docs/architecture.md names each folder, and no file that is not there."""

from __future__ import annotations

import re

import pytest

from tests.support.repository import ROOT

PACKAGES = ("runtime", "wire", "noise", "tenant_sdk", "provider", "attacks")
FOLDERS = sorted(
    str(init.parent.relative_to(ROOT))
    for package in PACKAGES
    for init in (ROOT / package).glob("**/__init__.py")
    if init.parent.parent != ROOT
)


def architecture() -> str:
    return (ROOT / "docs" / "architecture.md").read_text()


def test_there_are_folders() -> None:
    assert {"wire/ring", "noise/ledger", "provider/schedule"} <= set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_has_a_line_in_the_docs(folder: str) -> None:
    assert re.search(rf"^\| `{folder}/` \| .+ \|$", architecture(), re.MULTILINE)


def test_the_docs_name_no_other_folder() -> None:
    assert sorted(re.findall(r"^\| `(\w+(?:/\w+)+)/` \|", architecture(), re.MULTILINE)) == FOLDERS


def test_files_that_the_architecture_names_are_there() -> None:
    """Each file is named with its path, or with its bare name if the same paragraph or table row names its folder."""
    tracked = {file.name for package in PACKAGES for file in (ROOT / package).glob("**/*")}
    for name in re.findall(r"`([\w/]+\.(?:py|c|md))`", architecture()):
        assert (ROOT / name).is_file() if "/" in name else name in tracked, name
