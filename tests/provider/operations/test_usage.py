"""Tests usage counts: they survive a crash, add up over several processes, and never disturb a tenant."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from provider.operations.usage import Usage, UsageBook, read_usage
from provider.schedule.ticket import RequestClass
from tests.support.waiting import end, until
from wire.call import Arithmetic, Call, Direction
from wire.errors import ConfigurationError, WireCode

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
        patched.setattr("wire.usage._create_file", full)
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
