from __future__ import annotations

import io
import logging
import sys

import pytest

from runtime.logs import StderrHandler


def test_lines_follow_stderr_when_it_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.Logger("a test's own", logging.INFO)
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    logger.addHandler(StderrHandler())
    logger.info("one")
    first_text = first.getvalue()
    first.close()
    monkeypatch.setattr(sys, "stderr", second)
    logger.info("two")
    assert (first_text, second.getvalue()) == ("one\n", "two\n")
