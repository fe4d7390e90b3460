"""Tests the lines by which programs say what they are doing, before it is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from attacks.report.stages import counted
from attacks.victim.harness import Stages
from attacks.victim.names import STAGE


def test_each_item_is_said_before_it_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for item in counted("fault", ["hint", "product"], str.upper):
        said.append((item, capsys.readouterr().err))
    assert said == [("hint", "fault 1/2: HINT\n"), ("product", "fault 2/2: PRODUCT\n")]


def test_a_victims_stages_are_said_once_and_long_ones_again(tmp_path: Path) -> None:
    log, now, said = tmp_path / "log", [100.0], list[str]()
    log.write_text("a library's word\n")
    stages = Stages(log, said.append, lambda: now[0])
    stages.look()
    assert said == []
    log.write_text(f"{log.read_text()}{STAGE}trains\nanother word\n{STAGE}sends\n")
    for now[0] in (101.0, 102.0):
        stages.look()
    assert said == ["victim: trains", "victim: sends"]
    for now[0] in (115.0, 116.0, 130.0, 131.0):
        stages.look()
    assert said[2:] == ["victim: sends, for 15 s so far", "victim: sends, for 30 s so far"]
