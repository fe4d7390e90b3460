"""Tests that the tree of folders agrees with the docs and with the picture (an SVG file): each folder is in both, and
all files that these name exist."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tests.support.repository import ROOT

PACKAGES = ("wire", "noise", "tenant_sdk", "provider", "attacks")
FOLDERS = sorted(
    str(init.parent.relative_to(ROOT))
    for package in PACKAGES
    for init in (ROOT / package).glob("**/__init__.py")
    if init.parent.parent != ROOT
)
SVG = "{http://www.w3.org/2000/svg}"


def architecture() -> str:
    return (ROOT / "docs" / "architecture.md").read_text()


def layout() -> str:
    """Returns the tree in README, from its title to the next title."""
    (found,) = re.findall(r"^## Layout\n(.*?)^## ", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


def picture() -> list[str]:
    """Returns the lines of text in the picture."""
    root = ElementTree.parse(ROOT / "docs" / "rooms.svg").getroot()  # noqa: S314 - a file of this repository
    return [line.text or "" for line in root.iter(f"{SVG}text")]


def in_picture() -> set[str]:
    """Returns the folders in the picture, with their package. A folder without a package belongs to the last package
    named before it."""
    found, package = set(), ""
    for word in re.findall(r"[a-z_]+(?:/[a-z_]+)*/", " ".join(picture())):
        first, _, rest = word.removesuffix("/").partition("/")
        package = first if first in PACKAGES else package
        if inner := rest if first in PACKAGES else word.removesuffix("/"):
            found.add(f"{package}/{inner}")
    return found


def test_there_are_folders() -> None:
    assert {"wire/ring", "noise/ledger", "provider/schedule"} <= set(FOLDERS)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_has_a_line_in_the_docs(folder: str) -> None:
    assert re.search(rf"^\| `{folder}/` \| .+ \|$", architecture(), re.MULTILINE)


def test_the_docs_name_no_other_folder() -> None:
    assert sorted(re.findall(r"^\| `(\w+(?:/\w+)+)/` \|", architecture(), re.MULTILINE)) == FOLDERS


def test_readme_shows_every_folder() -> None:
    shown, package = set(), ""
    for line in layout().splitlines():
        if found := re.match(r"    (\w+)/", line):
            package = found[1]
        elif package in PACKAGES:
            shown |= {f"{package}/{name}" for name in re.findall(r"(\w+(?:/\w+)*)/", line) if line.startswith("      ")}
    assert shown == set(FOLDERS)


def test_the_picture_shows_every_folder() -> None:
    assert in_picture() == set(FOLDERS)


def test_files_that_the_picture_names_are_there() -> None:
    """Each file must be in a folder whose name is above it in the picture."""
    room, named = "", 0
    for line in picture():
        if re.match(r"\d+ \w+/", line):
            room = line.split()[1]
        for file in re.findall(r"[\w/]+\.py", line):
            places = [ROOT / file] if "/" in file else [ROOT / room / file]
            assert any(place.is_file() for place in places), f"{room}: {file}"
            named += 1
    assert named >= 10


def test_files_that_the_architecture_names_are_there() -> None:
    """Each file is named with its path, or with its bare name if the same paragraph or table row names its folder."""
    tracked = {file.name for package in PACKAGES for file in (ROOT / package).glob("**/*")}
    for name in re.findall(r"`([\w/]+\.(?:py|c|md))`", architecture()):
        assert (ROOT / name).is_file() if "/" in name else name in tracked, name
