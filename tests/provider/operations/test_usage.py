"""Tests usage counts: they survive a crash, add up over several processes, and never disturb a tenant; and how they are
shown by period and with what they cost."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import threading
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from provider.cli import app
from provider.operations.usage import FILE_NAME, PriceList, Usage, UsageBook, read_usage
from provider.schedule.ticket import RequestClass
from tests.support.waiting import end, until
from wire.call import Arithmetic, Call, Direction
from wire.errors import ConfigurationError, VeilbaseError, WireCode
from wire.usage import Account, UsageFile

CALL = Call(0, Direction.FORWARD, Arithmetic.RING)


def work(book: UsageBook, tenant: str = "acme", times: int = 1) -> None:
    for _ in range(times):
        book.of(tenant).answered(RequestClass.DECODE, CALL, 2, 100, 200)
        book.of(tenant).computed(0.5)


def test_what_was_saved_is_added_to(tmp_path: Path) -> None:
    path = tmp_path / "usage.json"
    for _ in range(3):  # the provider is started three times
        book = UsageBook(path)
        work(book, times=2)
        book.of("globex").failed(WireCode.QUOTA)
        assert book.save()
        assert book.save()  # there is nothing new, so nothing is added
        work(book)
        book.close()
    totals = read_usage(path)
    assert set(totals) == {"acme", "globex"}
    acme = totals["acme"]
    assert (acme.requests["decode"], acme.rows["decode"], acme.rows["prefill"]) == (9, 18, 0)
    assert (acme.bytes_up, acme.bytes_down) == (900, 1800)
    assert acme.seconds == pytest.approx(4.5)
    assert totals["globex"].errors == {"QUOTA": 3}
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(tmp_path)) == ["usage.json", "usage.lock"]


ADDS = """
import sys
from pathlib import Path
from provider.operations.usage import UsageBook
from provider.schedule.ticket import RequestClass
from wire.call import Arithmetic, Call, Direction
CALL = Call(0, Direction.FORWARD, Arithmetic.RING)
book = UsageBook(Path(sys.argv[1]))
for _ in range(50):
    book.of("acme").answered(RequestClass.PREFILL, CALL, 3, 1, 1)
    assert book.save()
"""


def test_what_came_before_the_last_minute_survives_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wire.usage.SAVE_S", 0.02)
    path = tmp_path / "usage.json"
    book = UsageBook(path)
    book.keep_saving()
    for times in (1, 2):  # saves repeatedly, and without `close`
        work(book)

        def is_saved(rows: int = 2 * times) -> bool:
            saved = read_usage(path).get("acme")
            return saved is not None and saved.rows["decode"] == rows

        until(is_saved, "what was counted in the file")
    book.close()


def test_two_providers_of_one_state_directory_add_to_one_account(tmp_path: Path) -> None:
    path = tmp_path / "usage.json"
    processes = [subprocess.Popen([sys.executable, "-c", ADDS, str(path)]) for _ in range(2)]
    assert [one.wait(60) for one in processes] == [0, 0]
    assert read_usage(path)["acme"].rows["prefill"] == 300


def test_threads_lose_nothing(tmp_path: Path) -> None:
    book = UsageBook(tmp_path / "usage.json")
    threads = [threading.Thread(target=work, args=(book, "acme", 500)) for _ in range(4)]
    for one in threads:
        one.start()
    while any(one.is_alive() for one in threads):
        assert book.save()
    end(threads)
    book.close()
    assert read_usage(tmp_path / "usage.json")["acme"].rows["decode"] == 4000


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version": 2}', '{"tenants": {"Not A Name": {}}}', '{"tenants": {"a": {"bytes_up": -1}}}',
     '{"tenants": {"a": {"seconds": NaN}}}', '{"tenants": {"a": {"other": 1}}}'],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_no_empty_account(tmp_path: Path, text: str) -> None:
    path = tmp_path / "usage.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"usage\.json"):
        UsageBook(path)
    path.write_text("{}")
    book = UsageBook(path)
    path.write_text(text)
    work(book)
    assert not book.save()
    assert path.read_text() == text
    path.unlink()
    assert book.save()
    assert read_usage(path)["acme"].rows["decode"] == 2


def test_a_full_disk_is_said_and_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "usage.json"
    book = UsageBook(path)
    work(book)
    assert book.save()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("wire.usage.create_file", full)
        work(book)
        assert not book.save()
    assert book.failed_saves == 1
    assert "No space left on device" in caplog.text
    assert read_usage(path)["acme"].rows["decode"] == 2  # the old file is complete
    assert book.save()
    assert read_usage(path)["acme"].rows["decode"] == 4


def test_without_a_file_nothing_is_kept(tmp_path: Path) -> None:
    book = UsageBook()
    work(book)
    assert book.save()
    assert os.listdir(tmp_path) == []
    assert json.loads(book.totals()["acme"].model_dump_json())["rows"]["decode"] == 2


def test_sums_and_differences() -> None:
    one = Usage(requests={"decode": 1}, rows={"decode": 5}, bytes_up=7, seconds=1.5, errors={"QUOTA": 2})
    other = Usage(requests={"prefill": 1}, rows={"prefill": 6}, bytes_down=8, seconds=0.5)
    both = one.plus(other)
    assert both.rows == {"decode": 5, "prefill": 6}
    assert both.plus(other, -1).rows == {"decode": 5, "prefill": 0}
    assert both.plus(other, -1).seconds == 1.5


# ---- reports ---------------------------------------------------------------------------------------------------------


def used(rows: int, **more: Any) -> Usage:
    """Returns usage of `rows` rows, of which a tenth are tokens, with a byte up and two down for each row."""
    return Usage(
        requests={"decode": 1}, rows={"decode": rows}, tokens={"decode": rows // 10}, bytes_up=rows,
        bytes_down=2 * rows, **more,
    )  # fmt: skip


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Provides a provider's state directory with usage of two tenants in three months."""
    old = Usage(requests={"decode": 9}, rows={"decode": 9})
    acme = Account(
        before=old,
        months={"2026-05": used(1000)},
        days={date(2026, 6, 30): used(20), date(2026, 7, 1): used(30, seconds=1.0005), date(2026, 7, 2): used(40)},
    )
    globex = Account(days={date(2026, 7, 2): used(500, errors={"QUOTA": 3})})
    file = UsageFile(version=2, since=date(2026, 5, 3), tenants={"globex": globex, "acme": acme})
    (tmp_path / FILE_NAME).write_text(file.model_dump_json())
    return tmp_path


def run(state: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["usage", "--state", str(state), *words])


def lines(done: Result) -> list[list[str]]:
    assert done.exit_code == 0, done.exception
    return [line.split() for line in done.stdout.splitlines()]


def test_a_table_in_total(state: Path) -> None:
    done = run(state)
    assert lines(done) == [
        ["tenant", "requests", "rows", "tokens", "bytes", "up", "bytes", "down", "seconds", "errors"],
        ["acme", "13", "1,099", "109", "1,090", "2,180", "1.000", "0"],
        ["globex", "1", "500", "50", "500", "1,000", "0.000", "3"],
        ["sum", "14", "1,599", "159", "1,590", "3,180", "1.000", "3"],
    ]
    assert done.stderr.count("\n") == 1
    assert "before 2026-05-03 was counted by an earlier release" in done.stderr
    assert len({len(line) for line in done.stdout.splitlines()}) == 1  # numbers end at one place


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--by", "month"], [("before 2026-05-03", "acme", 9), ("2026-05", "acme", 1000), ("2026-06", "acme", 20),
                             ("2026-07", "acme", 70), ("2026-07", "globex", 500)]),
        (["--by", "day", "--tenant", "acme"], [("before 2026-05-03", "acme", 9), ("2026-05", "acme", 1000),
                                               ("2026-06-30", "acme", 20), ("2026-07-01", "acme", 30),
                                               ("2026-07-02", "acme", 40)]),
        (["--by", "day", "--since", "2026-07-02"], [("2026-07-02", "acme", 40), ("2026-07-02", "globex", 500)]),
        (["acme", "--by", "day", "--since", "2026-06-30", "--until", "2026-07-01"],
         [("2026-06-30", "acme", 20), ("2026-07-01", "acme", 30)]),
        (["acme", "--by", "month", "--since", "2026-05-01", "--until", "2026-05-31"], [("2026-05", "acme", 1000)]),
        (["acme", "--until", "2026-06-30"], [("total", "acme", 1029)]),
        (["acme", "--since", "2026-08-01"], []),
    ],
)  # fmt: skip
def test_periods(state: Path, words: list[str], expected: list[tuple[str, str, int]]) -> None:
    shown = list(csv.DictReader(io.StringIO(run(state, "--csv", *words).stdout)))
    assert [(row["period"], row["tenant"], int(row["rows"])) for row in shown] == expected
    table = lines(run(state, *words))
    assert len(table) == (len(expected) + 1 + (len(expected) > 1) if expected else 0)


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["acme", "--since", "2026-05-02"], "left out: 2026-05, of which only the sum is kept"),
        (["acme", "--until", "2026-05-30"], "left out: 2026-05, of which only the sum is kept"),
        (["acme", "--since", "2026-07-01"], "left out: what is before 2026-05-03"),
        (["globex", "--since", "2026-08-01"], "no requests of globex are counted here since 2026-08-01"),
    ],
)
def test_what_is_left_out_is_said(state: Path, words: list[str], note: str) -> None:
    assert note in run(state, *words).stderr


def test_csv_and_json_have_every_number(state: Path) -> None:
    (row,) = csv.DictReader(io.StringIO(run(state, "globex", "--csv").stdout))
    assert row == {
        "period": "total", "tenant": "globex", "requests": "1", "rows": "500", "tokens": "50", "bytes_up": "500",
        "bytes_down": "1000", "seconds": "0.000", "errors": "3", "weight_bytes": "0",
        "requests_decode": "1", "requests_prefill": "0", "requests_finetune": "0",
        "rows_decode": "500", "rows_prefill": "0", "rows_finetune": "0",
        "tokens_decode": "50", "tokens_prefill": "0", "tokens_finetune": "0",
    }  # fmt: skip
    shown = json.loads(run(state, "globex", "--json").stdout)
    assert shown == {"globex": used(500, errors={"QUOTA": 3}).model_dump()}
    shown = json.loads(run(state, "globex", "--json", "--by", "day").stdout)
    assert shown["globex"]["2026-07-02"]["errors"] == {"QUOTA": 3}


PRICES = "currency: EUR\nper_gb_up: 0.1\nper_gb_down: 200\nper_million_tokens: 7.77777\nper_hour: 3600\n"


def test_costs_add_up_to_what_is_shown(state: Path, tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text(PRICES)
    words = ("--by", "day", "--since", "2026-06-30", "--prices", str(prices))
    shown = list(csv.DictReader(io.StringIO(run(state, "--csv", *words).stdout)))
    assert [row["currency"] for row in shown] == ["EUR"] * 4
    parts = [name for name in shown[0] if name.startswith("cost_")]
    assert parts == ["cost_up", "cost_down", "cost_tokens", "cost_time"]
    for row in shown:
        assert sum(Decimal(row[part]) for part in parts) == Decimal(row["cost"])
        assert all(len(row[part].partition(".")[2]) == 4 for part in (*parts, "cost"))
    by_row = {(row["period"], row["tenant"]): row for row in shown}
    # 1.0005 s are shown as 1.000 s, and it is these that cost something; 3 tokens cost 0.00002333, and 50 0.0003889.
    assert by_row["2026-07-01", "acme"]["cost_time"] == "1.0000"
    assert by_row["2026-07-01", "acme"]["cost_tokens"] == "0.0000"
    assert by_row["2026-07-02", "globex"]["cost_tokens"] == "0.0004"
    assert by_row["2026-07-02", "globex"]["cost_down"] == "0.0002"
    table = lines(run(state, *words))
    assert table[0][-10:] == ["EUR", "up", "EUR", "down", "EUR", "tokens", "EUR", "time", "EUR", "cost"]
    assert Decimal(table[-1][-1]) == sum(Decimal(row["cost"]) for row in shown)
    assert json.loads(run(state, "globex", "--json", "--prices", str(prices)).stdout)["globex"]["cost"] == "0.0006"


def test_prices_are_decimal() -> None:
    """0.7 is no binary number: in binary, these bytes would cost 0.04934999..., and so 0.0493."""
    prices = PriceList.model_validate({"currency": "EUR", "per_gb_up": "0.7", "per_gb_down": "0.00005"})
    assert prices.costs(Usage(bytes_up=70_500_000, bytes_down=10**9)) == {
        "cost_up": Decimal("0.0494"), "cost_down": Decimal("0.0000"), "cost": Decimal("0.0494"),
    }  # fmt: skip
    most = PriceList.model_validate({"currency": "EUR", "per_gb_up": "999999999.999999999999"})
    assert most.costs(Usage(bytes_up=10**18))["cost"] == Decimal("999999999999999999.9990")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot be read: No such file"),
        ("", "is not a price list"), ("[1]", "is not a price list"), ("EUR", "is not a price list"),
        ("a: [", "is not a price list"), ("a: {b: 1}", "is not a price list"), ("[" * 5000, "is not a price list"),
        ("\x00", "is not a price list"), ("#" * 70_000, "is not a price list"),
        ("currency: EUR", "expected at least one price of per_gb_up"),
        ("per_hour: 1", "expected currency:"), ("currency: euro\nper_hour: 1", "expected currency:"),
        ("currency: EUR\nper_gb_upp: 1", "per_gb_upp is no key of a price list: the nearest is per_gb_up"),
        ("currency: EUR\nper_hours: 1", "the nearest is per_hour"),
        ("currency: EUR\nper_hour: 1\nper_hour: 2", "per_hour is there twice"),
        ("currency: EUR\nper_hour: -1", "per_hour: input should be greater than or equal to 0"),
        ("currency: EUR\nper_hour: -0.0000001", "per_hour: input should be greater than or equal to 0"),
        ("currency: EUR\nper_hour: .nan", "per_hour: "), ("currency: EUR\nper_hour: nan", "per_hour: "),
        ("currency: EUR\nper_hour: inf", "per_hour: "), ("currency: EUR\nper_hour: 1e12", "per_hour: "),
        ("currency: EUR\nper_hour: yes", "per_hour: "), ("currency: EUR\nper_hour:", "per_hour: "),
        ("currency: EUR\nper_hour: 0,5", "per_hour: "),
    ],
)  # fmt: skip
def test_price_lists_that_cannot_be_used(state: Path, tmp_path: Path, text: str | None, said: str) -> None:
    prices = tmp_path / "prices.yaml"
    if text is not None:
        prices.write_text(text)
    done = run(state, "--prices", str(prices))
    assert isinstance(done.exception, ConfigurationError), done.output
    assert said in str(done.exception)
    assert "\n" not in str(done.exception)
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--by", "week"], "is no period: there are day, month, total"), (["--by", "dya"], "the nearest is day"),
        (["--since", "yesterday"], "--since: expected a day"), (["--until", "2026-02-30"], "--until: expected a day"),
        (["--until", "20260201"], "--until: expected a day"),
        (["--since", "2026-07-02", "--until", "2026-07-01"], "expected --since before --until"),
        (["--csv", "--json"], "one of --csv and --json"), (["acme", "--tenant", "globex"], "expected one tenant"),
        (["--tenant", "globx"], "did you mean globex"), (["acm"], "did you mean acme"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for(state: Path, words: list[str], said: str) -> None:
    done = run(state, *words)
    assert isinstance(done.exception, VeilbaseError), done.output
    assert said in str(done.exception)
    assert "\n" not in str(done.exception)
