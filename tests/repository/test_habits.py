"""Tests the tools that CONTRIBUTING.md names: `make help`, hooks, editor settings, and the list of commits that blame
ignores."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import tomllib

import pytest
import yaml

from tests.support.repository import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
(PHONY,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)


@pytest.mark.parametrize("words", [["make", "help"], ["make"]], ids=" ".join)
def test_make_help_names_every_target_with_a_line(words: list[str]) -> None:
    # These tests run inside `make test`, and a make inside a make would print the folder that it enters.
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(words, cwd=ROOT, env=alone, capture_output=True, text=True, check=True)
    shown = dict(re.findall(r"^make ([a-z-]+) +(\S.*)$", done.stdout, re.MULTILINE))
    assert len(shown) == len(done.stdout.splitlines())
    assert sorted(shown) == sorted(PHONY.split())


def test_every_target_that_is_no_file_is_phony() -> None:
    assert sorted(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE)) == sorted(PHONY.split())


def test_make_setup_says_what_each_long_step_does() -> None:
    lines = re.search(r"^\$\(READY\): .*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1].splitlines()  # type: ignore[index]
    long = [place for place, line in enumerate(lines) if "pip download" in line or "$(INSTALL)" in line]
    assert len(long) == 4
    assert all(re.match(r'\t@echo ".* takes .*\.\.\."', lines[place - 1]) for place in long)


def test_make_setup_tells_the_stages_of_the_longest_step() -> None:
    """What pip prints is taken from pip 26.1: a line for each file, of which those of metadata are no packages."""
    fetched = [f"  Downloading package{number}-1.0-py3-none-any.whl (2.1 MB)" for number in range(40)]
    fetched += [f"  Using cached package{number}-1.0-py3-none-any.whl (2.1 MB)" for number in range(40, 50)]
    fetched += [f"Processing ./wheels/package{number}-1.0-py3-none-any.whl" for number in range(50, 60)]
    told_first = ["Collecting package0==1.0", "  Downloading package0-1.0-py3-none-any.whl.metadata (3 kB)"] * 30
    lines = [*told_first, *fetched, "Installing collected packages: package0, package1", "Successfully installed x"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    program = ["make", "--silent", '--eval=stages: ; @$(PYTHON) -u -c "$$STAGES"', "stages"]
    done = subprocess.run(
        program, cwd=ROOT, env=alone, capture_output=True, text=True, check=True, input="\n".join(lines)
    )
    assert done.stdout.splitlines() == [
        "25 packages fetched ...", "50 packages fetched ...", "installing 60 packages ...",
    ]  # fmt: skip


def test_hooks_are_local_and_download_nothing() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    assert [hook["entry"].split()[:2] for hook in repository["hooks"]] == [
        [".venv/bin/ruff", "check"], [".venv/bin/ruff", "format"],
    ]  # fmt: skip
    assert all(hook["language"] == "system" for hook in repository["hooks"])


def test_editors_are_told_ruffs_line_length() -> None:
    settings = configparser.ConfigParser()
    settings.read_string("[top]\n" + (ROOT / ".editorconfig").read_text())
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert settings["*.py"].getint("max_line_length") == ruff["line-length"]


def test_blame_ignores_whole_hashes_alone() -> None:
    lines = (ROOT / ".git-blame-ignore-revs").read_text().splitlines()
    assert all(re.fullmatch(r"#.*|[0-9a-f]{40}|", line) for line in lines)
