"""Tests that what a benchmark says is there when it is said, also in a pipe."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.common import interleaved
from tests.support.repository import ROOT


def test_a_line_in_a_pipe_is_not_kept_to_the_end() -> None:
    code = "import benchmarks, os\nprint('a table')\nos._exit(0)  # writes nothing that is still kept"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "a table\n"


def test_rounds_are_told_on_stderr_but_not_each_of_many(capsys: pytest.CaptureFixture[str]) -> None:
    interleaved({"ours": lambda: None, "theirs": lambda: None}, 200)
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", "round 1/201 of ours, theirs\n")
