"""Tests how usage is counted by UTC day and kept in a file: days are bounded, old files are read, nothing is lost."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from datetime import date, timedelta
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.call import Arithmetic, Call, Direction, Purpose
from wire.errors import ConfigurationError, WireCode
from wire.usage import (
    DAY_S,
    KINDS,
    MOST_DAYS,
    Account,
    StreamTokens,
    Usage,
    UsageBook,
    UsageCounter,
    kind_of,
    month_of,
    read_usage_file,
)

CALL = Call(0, Direction.FORWARD, Arithmetic.RING)
NOON = 20_000.5 * DAY_S
FIRST = date(2024, 10, 4)
"""The day of `NOON`."""


class Clock:
    """Stands for the time of day, which tests set."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(tmp_path: Path, clock: Clock) -> UsageBook:
    return UsageBook(tmp_path / "usage.json", KINDS, pytest.fail, clock)


def work(book: UsageBook, num_rows: int = 1, tenant: str = "acme") -> None:
    book.of(tenant).answered(0, CALL, num_rows, 10 * num_rows, 20 * num_rows)


def rows_by_day(path: Path, tenant: str = "acme") -> dict[date, int]:
    days = read_usage_file(path).tenants[tenant].days
    return {day: usage.rows["forward"] for day, usage in days.items()}


def test_days_are_kept_apart_whenever_they_are_saved(tmp_path: Path, book: UsageBook, clock: Clock) -> None:
    for num_rows in (1, 2, 4):  # the second day is not saved before the third
        work(book, num_rows)
        if num_rows != 2:
            assert book.save()
        clock.now += DAY_S
    work(book, 8)
    book.of("acme").failed(WireCode.QUOTA)
    book.of("acme").computed(0.5)
    assert book.save()
    path = tmp_path / "usage.json"
    assert rows_by_day(path) == {FIRST + timedelta(days=n): 1 << n for n in range(4)}
    last = read_usage_file(path).tenants["acme"].days[FIRST + timedelta(days=3)]
    assert (last.bytes_up, last.bytes_down, last.seconds, last.errors) == (80, 160, 0.5, {"QUOTA": 1})
    assert read_usage_file(path).since == FIRST
    assert book.totals()["acme"].rows["forward"] == 15  # since the start, whatever was saved


def test_the_day_ends_at_midnight_of_utc(tmp_path: Path, book: UsageBook, clock: Clock) -> None:
    clock.now = 20_001 * DAY_S - 0.001
    work(book, 3)
    clock.now = 20_001 * DAY_S
    work(book, 5)
    assert book.save()
    assert rows_by_day(tmp_path / "usage.json") == {FIRST: 3, FIRST + timedelta(days=1): 5}


def test_a_clock_that_is_set_back_loses_nothing(tmp_path: Path, book: UsageBook, clock: Clock) -> None:
    for days in (0, 1, 0, 1, 0):
        clock.now = NOON + days * DAY_S
        work(book)
        assert book.save()
        assert book.save()
    assert rows_by_day(tmp_path / "usage.json") == {FIRST: 3, FIRST + timedelta(days=1): 2}


def test_saved_days_do_not_pile_up_in_memory(book: UsageBook, clock: Clock) -> None:
    for _ in range(5):
        work(book)
        assert book.save()
        clock.now += DAY_S
    assert len(book.of("acme").by_day()) <= 2


def test_the_file_is_bounded_and_loses_nothing(tmp_path: Path, book: UsageBook, clock: Clock) -> None:
    path, num_days = tmp_path / "usage.json", MOST_DAYS + 28 + 30
    for _ in range(num_days):
        work(book, 2)
        clock.now += DAY_S
    assert book.save()
    account = read_usage_file(path).tenants["acme"]
    assert len(account.days) == MOST_DAYS
    assert sorted(account.months) == ["2024-10", "2024-11"]
    assert account.months["2024-11"].rows["forward"] == 2 * 30
    assert account.total().rows["forward"] == 2 * num_days
    assert min(account.days) == date(2024, 12, 1)
    account.add(date(2024, 11, 5), Usage(rows={"forward": 1}))  # a day of a month that was added up
    assert (min(account.days), account.months["2024-11"].rows["forward"]) == (date(2024, 12, 1), 61)


def test_a_file_without_days_is_read_without_loss(tmp_path: Path, book: UsageBook) -> None:
    path = tmp_path / "usage.json"
    old = {"requests": {"decode": 2}, "rows": {"decode": 5}, "bytes_up": 7, "bytes_down": 8, "seconds": 1.5,
           "errors": {"QUOTA": 2}}  # fmt: skip
    path.write_text(json.dumps({"version": 1, "tenants": {"acme": old, "globex": {}}}))
    assert read_usage_file(path).since is None
    assert read_usage_file(path).tenants["acme"].total() == Usage.model_validate(old)
    work(book, 3)
    assert book.save()
    file = read_usage_file(path)
    assert (file.since, file.tenants["acme"].before) == (FIRST, Usage.model_validate(old))
    assert rows_by_day(path) == {FIRST: 3}
    assert file.tenants["acme"].total().bytes_up == 37
    assert file.tenants["globex"] == Account()


@pytest.mark.parametrize(
    "account",
    ['{"days": {"2024-13-01": {}}}', '{"days": {"x": {}}}', '{"months": {"2024-1": {}}}', '{"others": 1}',
     '{"before": {"tokens": {"a": -1}}}', '{"days": {"0999-12-31": {}}}', '{"days": {"1969-12-31": {}}}',
     '{"days": {"3000-01-01": {}}}', '{"months": {"1969-12": {}}}', '{"months": {"3000-01": {}}}',
     '{"months": {"202\u0664-01": {}}}',
     f'{{"before": {{"bytes_up": {2**63}}}}}', f'{{"before": {{"rows": {{"a": {10**400}}}}}}}',
     '{"before": {"seconds": 1.1e12}}', '{"before": {"seconds": 1e999}}', '{"before": {"seconds": NaN}}'],
)  # fmt: skip
def test_a_file_with_days_that_cannot_be_read_is_no_empty_account(tmp_path: Path, account: str) -> None:
    path = tmp_path / "usage.json"
    path.write_text(f'{{"version": 2, "since": null, "tenants": {{"acme": {account}}}}}')
    with pytest.raises(ConfigurationError, match="cannot be read as usage"):
        read_usage_file(path)


def test_a_month_is_padded_as_it_is_read() -> None:
    account = Account()
    account.add(date(999, 1, 1), Usage())
    assert month_of(date(999, 1, 1)) == "0999-01"


@pytest.mark.parametrize("now", [-DAY_S, 1e11, 1e300], ids=["before 1970", "year 5138", "no date"])
def test_a_clock_that_is_far_off_writes_nothing_that_cannot_be_read(tmp_path: Path, clock: Clock, now: float) -> None:
    lines: list[str] = []
    book = UsageBook(tmp_path / "usage.json", KINDS, lines.append, clock)
    work(book)
    assert book.save()
    clock.now = now
    work(book)
    assert not book.save()
    assert "out of range; check the file and this machine's clock" in lines[0]
    assert rows_by_day(tmp_path / "usage.json") == {FIRST: 1}


def test_a_sum_that_is_out_of_range_is_said_and_written_to_no_file(tmp_path: Path, clock: Clock) -> None:
    path, lines = tmp_path / "usage.json", list[str]()
    day = {"requests": {"forward": 1}, "rows": {"forward": 1}, "bytes_up": 2**63 - 1, "seconds": 1e12}
    path.write_text(json.dumps({"version": 2, "since": str(FIRST), "tenants": {"acme": {
        "before": day, "days": {str(FIRST): day}}}}))  # fmt: skip
    before = path.read_bytes()
    assert read_usage_file(path).tenants["acme"].total().bytes_up == 2**64 - 2
    book = UsageBook(path, KINDS, lines.append, clock)
    work(book)
    assert not book.save()
    assert (len(lines), book.failed_saves, path.read_bytes()) == (1, 1, before)
    assert "\n" not in lines[0]


def test_a_lock_that_is_held_does_not_hang_the_end(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wire.usage.LOCK_S", 0.1)
    lines: list[str] = []
    book = UsageBook(tmp_path / "usage.json", KINDS, lines.append, clock)
    work(book)
    with (tmp_path / "usage.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ending = threading.Thread(target=book.close, daemon=True)
        ending.start()
        ending.join(5)
        assert not ending.is_alive()
    assert len(lines) == 1
    assert "another process has locked usage.lock" in lines[0]
    assert book.save()
    assert rows_by_day(tmp_path / "usage.json") == {FIRST: 1}


def test_nothing_new_is_not_written(tmp_path: Path, book: UsageBook) -> None:
    book.of("acme")
    assert book.save()
    assert os.listdir(tmp_path) == []
    work(book)
    assert book.save()
    before = (tmp_path / "usage.json").stat().st_ino
    assert book.save()
    assert (tmp_path / "usage.json").stat().st_ino == before


def test_a_forked_child_adds_nothing(tmp_path: Path, book: UsageBook, monkeypatch: pytest.MonkeyPatch) -> None:
    work(book)
    with monkeypatch.context() as patched:
        patched.setattr("wire.usage.os.getpid", lambda: 1)
        book.close()
    assert os.listdir(tmp_path) == []
    book.close()
    assert rows_by_day(tmp_path / "usage.json") == {FIRST: 1}


@pytest.mark.parametrize(
    ("call", "kind", "tokens"),
    [
        (CALL, "forward", 5),
        (Call(0, Direction.FORWARD, Arithmetic.RING, bits=24, reply_bits=24), "forward", 5),
        (Call(1, Direction.FORWARD, Arithmetic.RING), "forward", 5),
        (Call(0, Direction.BACKWARD, Arithmetic.RING), "backward", 0),
        (Call(0, Direction.FORWARD, Arithmetic.RING, Purpose.HINT), "hint", 0),
        (Call(0, Direction.FORWARD, Arithmetic.FLOAT, Purpose.EFFECT), "effect", 0),
    ],
)
def test_tokens_are_rows_of_forward_products(call: Call, kind: str, tokens: int) -> None:
    assert (KINDS[kind_of(call)], StreamTokens().add(call, 5)) == (kind, tokens)


def test_the_group_with_most_rows_of_a_stream_counts() -> None:
    """A group that a tenant computes itself, or that sees a part of the rows only, does not decide."""
    counter, first, second = UsageCounter(), StreamTokens(), StreamTokens()
    calls = [Call(group, Direction.FORWARD, Arithmetic.RING) for group in range(3)]
    for call, num_rows in ((calls[1], 7), (calls[2], 2), (calls[2], 4), (calls[1], 1), (calls[2], 3)):
        counter.answered(0, call, num_rows, 1, 1, first)
    assert counter.total().tokens["forward"] == 9  # group 2 has passed group 1
    counter.answered(0, calls[0], 4, 1, 1, second)
    assert counter.total().tokens["forward"] == 13


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9))), st.randoms())
def test_tokens_do_not_depend_on_the_order_of_replies(answered: list[tuple[int, int]], chance: Random) -> None:
    """Tenant and provider see the replies of one stream complete in different orders."""
    shuffled = chance.sample(answered, len(answered))
    counts = []
    for order in (answered, shuffled):
        stream = StreamTokens()
        counts.append(sum(stream.add(Call(group, Direction.FORWARD, Arithmetic.RING), rows) for group, rows in order))
    by_group = [sum(rows for group, rows in answered if group == each) for each in range(4)]
    assert counts == [max(by_group)] * 2
