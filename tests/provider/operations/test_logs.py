"""Tests the lines that a provider's log has about refusals: one at once, then a count, whatever peers do."""

from __future__ import annotations

import json
import logging

import pytest

from provider.operations.logs import MOST_KEYS, QUIET_S, JsonFormatter, RefusalLog, TextFormatter


class Clock:
    """Is a clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str | None]]:
    """Returns message and tenant of each line so far, and forgets them."""
    found = [(one.getMessage(), getattr(one, "tenant", None)) for one in caplog.records]
    caplog.clear()
    return found


def test_the_first_refusal_is_written_at_once_and_the_others_are_counted(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    log = RefusalLog(clock)
    for _ in range(5000):
        log.add("acme", "it is over its quota")
        log.look()
    assert lines(caplog) == [("refused: it is over its quota", "acme")]
    clock.now += QUIET_S
    log.look()
    assert lines(caplog) == [(f"refused: it is over its quota (4999 more in {QUIET_S:.0f} s)", "acme")]
    log.add("acme", "it is over its quota")  # the line about 4999 has just been written
    assert lines(caplog) == []
    log.look(is_last=True)
    assert lines(caplog) == [("refused: it is over its quota (1 more in 0 s)", "acme")]


def test_after_a_quiet_time_a_refusal_is_written_at_once_again(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = RefusalLog(clock)
    log.add("acme", "it has no certificate")
    clock.now += QUIET_S
    log.look()
    assert len(lines(caplog)) == 1  # nothing was left out, so there is no second line
    log.add("acme", "it has no certificate")
    assert len(lines(caplog)) == 1


def test_tenants_and_reasons_do_not_hide_each_other(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = RefusalLog(clock)
    for tenant in ("acme", "globex", None):
        for reason in ("one", "other"):
            log.add(tenant, reason)
            log.add(tenant, reason)
    assert lines(caplog) == [
        (f"refused: {reason}", tenant) for tenant in ("acme", "globex", None) for reason in ("one", "other")
    ]


def test_any_number_of_names_takes_bounded_memory_and_few_lines(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = RefusalLog(clock)
    for number in range(3 * MOST_KEYS):
        log.add(f"t{number}", "one", stream="ab", request=number)
    found = lines(caplog)
    assert log.num_kept == len(found) == MOST_KEYS + 1
    assert found[-1] == ("refused: one", "other tenants")
    clock.now += QUIET_S
    log.look()
    assert lines(caplog) == [(f"refused: one ({2 * MOST_KEYS - 1} more in {QUIET_S:.0f} s)", "other tenants")]
    log.look(is_last=True)
    assert log.num_kept == 0


def test_a_line_names_the_tenant_in_both_formats(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    RefusalLog(clock).add("acme", "it is over its quota", stream="0a1b", request=7)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert TextFormatter().format(record).endswith("refused: it is over its quota tenant=acme stream=0a1b request=7")
    written = json.loads(JsonFormatter().format(record))
    assert (written["tenant"], written["message"]) == ("acme", "refused: it is over its quota")
