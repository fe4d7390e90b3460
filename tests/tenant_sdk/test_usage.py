"""Tests what `tenant status` says of a tenant's own count, without a provider."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from provider.identity.authority import StateDir, current_time
from provider.identity.registry import enroll
from tenant_sdk.cli import app
from tenant_sdk.usage import OwnUsage, status_of, status_text
from tests.support.identities import ENDPOINT
from wire.call import Arithmetic, Call, Direction
from wire.errors import ConfigurationError
from wire.transport.identity import load_identity
from wire.usage import FILE_NAME, Usage, read_usage_file

CALL = Call(0, Direction.FORWARD, Arithmetic.RING)
ONE = Usage(requests={"forward": 1}, rows={"forward": 20}, tokens={"forward": 2}, bytes_up=3000, bytes_down=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Provides the identity of tenant acme."""
    enroll(StateDir(tmp_path / "state"), "acme", tmp_path / "acme", ENDPOINT)
    return tmp_path / "acme"


def use(folder: Path, times: int = 1) -> None:
    """Counts requests as a session does."""
    own = OwnUsage(folder, load_identity(folder))
    for _ in range(times):
        own.counter.answered(0, CALL, 20, 3000, 4)
    own.close()


def test_today_this_month_and_all_are_told_apart(folder: Path) -> None:
    use(folder)
    file = read_usage_file(folder / FILE_NAME)
    (account,) = file.tenants.values()
    account.days = {date(2026, 6, 30): ONE, date(2026, 7, 1): ONE, date(2026, 7, 2): ONE}
    account.months = {"2026-05": ONE}
    (folder / FILE_NAME).write_text(file.model_dump_json())
    known = status_of(folder, date(2026, 7, 2))
    assert [known[each]["rows"] for each in ("today", "this_month", "total")] == [20, 40, 80]
    assert known["today"] == {
        "requests": 1, "rows": 20, "tokens": 2, "bytes_up": 3000, "bytes_down": 4, "weight_bytes": 0,
        "by_kind": {
            "forward": {"requests": 1, "rows": 20},
            **{kind: {"requests": 0, "rows": 0} for kind in ("backward", "effect", "hint")},
        },
    }  # fmt: skip
    lines = [line.split() for line in status_text([known], as_json=False).splitlines()]
    assert lines[0] == ["provider", ENDPOINT]
    assert lines[-3:] == [
        ["today,", "2026-07-02", "1", "20", "2", "3,000", "4"],
        ["month,", "2026-07", "2", "40", "4", "6,000", "8"],
        ["in", "total", "4", "80", "8", "12,000", "16"],
    ]
    assert status_of(folder, date(2026, 5, 9))["this_month"]["rows"] == 20
    assert status_of(folder, date(2026, 8, 1))["today"]["rows"] == 0


def test_several_sessions_add_up(folder: Path) -> None:
    first, second = (OwnUsage(folder, load_identity(folder)) for _ in range(2))
    for own in (first, second, second):
        own.counter.answered(0, CALL, 20, 3000, 4)
        assert own.save()
    first.close()
    second.close()
    assert status_of(folder)["total"]["rows"] == 60


def test_another_identity_in_the_folder_begins_at_zero(folder: Path, tmp_path: Path) -> None:
    """An authority that a tenant's folder was enrolled with later is another provider."""
    use(folder, 3)
    key = f"acme of {status_of(folder)['authority']}"
    count = (folder / FILE_NAME).read_text()
    enroll(StateDir(tmp_path / "other"), "acme", tmp_path / "new", ENDPOINT)
    (tmp_path / "new" / FILE_NAME).write_text(count)
    known = status_of(tmp_path / "new")
    assert (known["total"]["rows"], known["other_identities"]) == (0, [key])
    use(tmp_path / "new")
    assert status_of(tmp_path / "new")["total"]["rows"] == 20
    assert read_usage_file(tmp_path / "new" / FILE_NAME).tenants[key].total().rows["forward"] == 60
    assert f"also      {key}" in status_text([status_of(tmp_path / "new")], as_json=False)


def test_an_expired_identity_still_tells_its_count(tmp_path: Path) -> None:
    long_ago = current_time() - timedelta(days=30)
    enroll(StateDir(tmp_path / "state"), "acme", tmp_path / "acme", ENDPOINT, days=1, now=long_ago)
    done = CliRunner().invoke(app, ["status", "--identity", str(tmp_path / "acme")])
    assert done.exit_code == 0, done.exception
    assert "(expired: enrol again)" in done.stdout


def test_several_identities_and_one_without_an_endpoint(folder: Path, tmp_path: Path) -> None:
    enroll(StateDir(tmp_path / "other"), "globex", tmp_path / "globex", ENDPOINT)
    (folder / "endpoint").unlink()
    words = ["status", "--identity", str(folder), "--identity", str(tmp_path / "globex")]
    known = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert [(each["tenant"], each["provider"]) for each in known] == [("acme", None), ("globex", ENDPOINT)]
    assert "not named by the identity" in CliRunner().invoke(app, words).stdout


def test_a_folder_that_is_no_identity_is_said(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["status", "--identity", str(tmp_path)])
    assert isinstance(done.exception, ConfigurationError)
    assert "is not an identity" in str(done.exception)


UNCLOSED = """
import sys
from pathlib import Path
from tenant_sdk.usage import OwnUsage
from wire.call import Arithmetic, Call, Direction
from wire.transport.identity import load_identity
folder = Path(sys.argv[1])
own = OwnUsage(folder, load_identity(folder))
own.counter.answered(0, Call(0, Direction.FORWARD, Arithmetic.RING), 20, 3000, 4)
"""


def test_a_client_that_is_never_closed_is_counted_when_its_process_ends(folder: Path) -> None:
    subprocess.run([sys.executable, "-c", UNCLOSED, str(folder)], check=True, timeout=60)
    assert status_of(folder)["total"]["rows"] == 20


TERMINATED = """
import signal, sys
from pathlib import Path
from types import SimpleNamespace
from tenant_sdk import cli
from tenant_sdk.usage import OwnUsage
from wire.call import Arithmetic, Call, Direction
from wire.transport.identity import load_identity
folder = Path({folder!r})

class Client:
    # a client as the commands use it, which has used something

    def __init__(self, *_, **__):
        self.own = OwnUsage(folder, load_identity(folder))
        self.own.counter.answered(0, Call(0, Direction.FORWARD, Arithmetic.RING), 20, 3000, 4)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def connect(self, *_):
        pass

    def close(self):
        self.own.close()

    def generate(self, *_, **__):
        used()

    explain = generate

def used(*_, **__):
    print("used", flush=True)
    signal.pause()

cli._client = cli._checked_client = Client
sys.modules["tenant_sdk.training.command"] = SimpleNamespace(finetune_command=used)
sys.argv = ["tenant", *{words!r}]
cli.main()
"""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain"], "tenant: stopped\n"),
        (["generate", "who?"], "tenant: stopped\n"),
        (
            ["finetune", "rows.jsonl", "--output", "new"],
            "tenant: stopped; the same command goes on from the last checkpoint, if there is one\n",
        ),
    ],
)
def test_what_was_used_is_saved_when_a_command_is_terminated(words: list[str], said: str, folder: Path) -> None:
    code = TERMINATED.format(folder=str(folder), words=words)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "used\n"
        process.terminate()
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (128 + signal.SIGTERM, said)
    assert status_of(folder)["total"]["rows"] == 20
