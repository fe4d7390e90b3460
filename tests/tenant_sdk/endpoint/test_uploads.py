"""Tests that uploads and records of jobs leave nothing on disk that is incomplete, and that forms are read strictly and
in linear time."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import errno
import json
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest

from tenant_sdk import TenantClient
from tenant_sdk.endpoint import jobs, uploads
from tenant_sdk.endpoint.errors import HttpError, write_new
from tenant_sdk.endpoint.http import ClientGone, Part, read_body, read_form
from tenant_sdk.endpoint.settings import EndpointLimits
from tests.support.endpoints import KEY, chat, endpoint_of, raw
from tests.support.waiting import end, until

ROW = json.dumps({"prompt": "a", "completion": "b"}).encode()


def upload(http: httpx2.Client, data: bytes = ROW) -> httpx2.Response:
    form: Any = {"files": {"file": ("x.jsonl", data)}, "data": {"purpose": "fine-tune"}}
    return http.post("/v1/files", **form)


def left(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".jobs").rglob("*") if path.is_file())


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def half(path: Path, data: bytes) -> None:
    write_new(path, data[: len(data) // 2])
    full()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "adapters").mkdir()
    return tmp_path / "adapters"


# ---- disks that are full ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "fault"), [("write_new", half), ("write_private", full), ("load_rows", full)])
def test_a_full_disk_leaves_no_part_of_an_upload(
    client: TenantClient, root: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: Any
) -> None:
    with endpoint_of(client, root) as endpoint, raw(endpoint) as http:
        with monkeypatch.context() as context:
            context.setattr(uploads, name, fault)
            answer = upload(http)
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "not_stored")
        assert "No space left" in answer.json()["error"]["message"]
        assert left(root) == []
        assert upload(http).status_code == 200
        assert len(left(root)) == 2


def test_a_refused_file_leaves_nothing(client: TenantClient, root: Path) -> None:
    with endpoint_of(client, root) as endpoint, raw(endpoint) as http:
        for data in (b"", b"{", b"[" * 100_000, b"9" * 10_000, b"\xff", ROW + b"\n\x00", b'{"prompt": "\\ud800"}'):
            assert upload(http, data).status_code == 400, data[:20]
        assert left(root) == []


def test_what_a_dead_process_has_left_is_removed(client: TenantClient, root: Path) -> None:
    with endpoint_of(client, root) as endpoint, raw(endpoint) as http:
        kept = upload(http).json()["id"]
    for ending in ("jsonl", "new"):
        (root / ".jobs" / "files" / f"file-{'0' * 24}.{ending}").write_bytes(ROW)
    (root / ".jobs" / f"ftjob-{'0' * 24}").mkdir()
    (root / ".jobs" / f"ftjob-{'0' * 24}" / "job.json").write_text("{")
    with endpoint_of(client, root) as endpoint, raw(endpoint) as http:
        assert [each["id"] for each in http.get("/v1/files").json()["data"]] == [kept]
        assert http.get("/v1/fine_tuning/jobs").json()["data"] == []
        assert left(root) == [f"{kept}.json", f"{kept}.jsonl", "job.json"]


def test_a_full_disk_refuses_a_job_and_fails_a_running_one(
    client: TenantClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = jobs.write_private

    def full_at_the_end(path: Path, text: str) -> None:
        if json.loads(text)["losses"]:
            full()
        store(path, text)

    def status(job: httpx2.Response) -> str:
        return str(http.get(f"/v1/fine_tuning/jobs/{job.json()['id']}").json()["status"])

    def asked(name: str) -> httpx2.Response:
        steps = {"max_steps": 1, "rank": 2}
        body = {"model": "llama", "training_file": file_id, "suffix": name, "hyperparameters": steps}
        return http.post("/v1/fine_tuning/jobs", json=body)

    with endpoint_of(client, root) as endpoint, raw(endpoint) as http:
        file_id = upload(http).json()["id"]
        before = left(root)
        with monkeypatch.context() as context:
            context.setattr(jobs, "write_private", full)
            assert asked("first").status_code == 507
            assert left(root) == before
            context.setattr(jobs, "write_private", full_at_the_end)
            first = asked("first")
            until(lambda: status(first) == "failed", "the end of the job")
        second = asked("second")  # the thread that runs jobs goes on
        until(lambda: status(second) == "succeeded", "the end of the next job")
        assert http.post(f"/v1/fine_tuning/jobs/{first.json()['id']}/resume").status_code == 200
        until(lambda: status(first) == "succeeded", "the end of the resumed job")
        assert {"first", "second"} <= {each["id"] for each in http.get("/v1/models").json()["data"]}


def test_names_that_differ_by_case_only(client: TenantClient, root: Path) -> None:
    (root / "support").mkdir()
    with endpoint_of(client, root) as endpoint, raw(endpoint) as http:
        file_id = upload(http).json()["id"]
        for name in ("Support", "SUPPORT", "llama", "Llama"):
            body = {"model": "llama", "training_file": file_id, "suffix": name}
            answer = http.post("/v1/fine_tuning/jobs", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "name_taken")


def test_a_job_whose_name_another_has_taken_does_not_go_on(client: TenantClient, root: Path) -> None:
    with endpoint_of(client, root) as endpoint, raw(endpoint) as http:
        body = {"model": "llama", "training_file": upload(http).json()["id"], "suffix": "same"}
        body["hyperparameters"] = {"max_steps": 1000, "rank": 2}
        paths = []
        for _ in range(2):
            paths.append(f"/v1/fine_tuning/jobs/{http.post('/v1/fine_tuning/jobs', json=body).json()['id']}")
            if len(paths) == 1:
                assert http.post(f"{paths[0]}/cancel").status_code == 200
        answer = http.post(f"{paths[0]}/resume")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "name_taken")
        assert http.get(paths[0]).json()["status"] == "cancelled"
        assert http.post(f"{paths[1]}/cancel").status_code == 200
        assert http.post(f"{paths[0]}/resume").status_code == 200
        assert http.post(f"{paths[0]}/cancel").status_code == 200


# ---- forms -----------------------------------------------------------------------------------------------------------


def form(*parts: tuple[str, bytes], boundary: bytes = b"x") -> bytes:
    return b"".join(
        b"--" + boundary + b"\r\n" + head.encode() + b"\r\n\r\n" + data + b"\r\n" for head, data in parts
    ) + (b"--" + boundary + b"--\r\n")


NAMED = 'Content-Disposition: form-data; name="{}"'
FILE = 'content-disposition: form-data; name="file"; filename="a \\"b\\".jsonl"\r\nContent-Type: text/plain'
KIND = "multipart/form-data; boundary=x"


def test_forms_are_read() -> None:
    data = b'{"a": "--x\\r\\n"}\r\n-x\n--x\r\n'
    body = form((FILE, data), (NAMED.format("purpose"), b"fine-tune"))
    found = read_form('multipart/form-data; charset=utf-8; boundary="x"', body)
    assert found == {"file": Part(data, 'a \\"b\\".jsonl'), "purpose": Part(b"fine-tune", None)}
    assert read_form(KIND, form((NAMED.format("é"), b""))) == {"é": Part(b"", None)}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", form((FILE, b"x"))), ("multipart/form-data; boundary=", form((FILE, b"x"))),
        (KIND, b""), (KIND, b"--x"), (KIND, b"--x\r\n"), (KIND, b"before\r\n" + form((FILE, b"x"))), (KIND, b"--y--"),
        (KIND, form((FILE, b"x"))[:-6]), (KIND, form(("X: y", b"x"))), (KIND, form((FILE, b"x"), (FILE, b"y"))),
        (KIND, form(("Content-Disposition: form-data; name=file", b"x"))), (KIND, b"--x\r\n\r\n\r\n--x--"),
        (KIND, form((f"{FILE}\r\nContent-Transfer-Encoding: base64", b"x"))), (KIND, form((FILE + "y" * 5000, b"x"))),
        (KIND, form(*((NAMED.format(number), b"") for number in range(17)))),
    ],
)  # fmt: skip
def test_what_is_no_form(kind: str, body: bytes) -> None:
    with pytest.raises(HttpError, match="invalid_form"):
        read_form(kind, body)


@pytest.mark.parametrize(
    "body",
    [b"--x\r\n" * 3_000_000, b"--x\r\n" + b"a:\r\n" * 4_000_000, b"--x\r\n\r\n\r\n" + b"\r\n--" * 4_000_000,
     b"--x\r\n" + NAMED.format("a").encode() + b"\r\n\r\n" + b"\r\n--" * 4_000_000 + b"\r\n--x--"],
    ids=["boundaries", "headers", "no end", "nearly boundaries"],
)  # fmt: skip
def test_forms_take_linear_time(body: bytes) -> None:
    """A quadratic reading of 15 MB would take longer than a test may."""
    with contextlib.suppress(HttpError):
        assert set(read_form(KIND, body)) == {"a"}


def test_a_form_with_another_field_is_refused_by_its_name(tmp_path: Path) -> None:
    purpose = (NAMED.format("purpose"), b"fine-tune")
    store = uploads.Uploads(tmp_path / "files")
    with pytest.raises(HttpError) as refused:
        store.add(KIND, form((FILE, ROW), purpose, (NAMED.format("expires_after[seconds]"), b"3600")))
    assert refused.value.param == "expires_after[seconds]"
    assert refused.value.text == "expires_after[seconds] is not supported here: leave it out"
    assert store.add(KIND, form((FILE, ROW), purpose, (NAMED.format("expires_after"), b"")))["bytes"] == len(ROW)


# ---- large files -----------------------------------------------------------------------------------------------------

ROWS = form((FILE, b"\n".join([ROW] * 50)), (NAMED.format("purpose"), b"fine-tune"))


@contextlib.contextmanager
def held_checks(
    monkeypatch: pytest.MonkeyPatch, most: int = 100
) -> Iterator[tuple[threading.Semaphore, threading.Event, list[object]]]:
    """Holds the first `most` checks of a row while the context lasts.

    Yields a semaphore that is released for each check that has begun, an event that lets the checks go on, and the list
    of the rows that were checked.
    """
    begun, go_on, seen = threading.Semaphore(0), threading.Event(), []
    load = uploads.load_rows

    def held(rows: Any) -> Any:
        seen.append(rows)
        begun.release()
        assert len(seen) > most or go_on.wait(60)
        return load(rows)

    monkeypatch.setattr(uploads, "load_rows", held)
    try:
        yield begun, go_on, seen
    finally:
        go_on.set()


def test_an_upload_does_not_wait_for_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = uploads.Uploads(tmp_path / "files")
    with held_checks(monkeypatch, most=1) as (begun, go_on, _):
        slow = threading.Thread(target=store.add, args=(KIND, ROWS))
        slow.start()
        assert begun.acquire(timeout=60)
        assert store.add(KIND, ROWS)["status"] == "processed"
        go_on.set()
        end(slow)
    assert len(store.listed()["data"]) == 2


def test_files_that_are_being_checked_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MOST_FILES", 1)
    store = uploads.Uploads(tmp_path / "files")
    with held_checks(monkeypatch) as (begun, go_on, _):
        slow = threading.Thread(target=store.add, args=(KIND, ROWS))
        slow.start()
        assert begun.acquire(timeout=60)
        with pytest.raises(HttpError, match="too_many_files"):
            store.add(KIND, ROWS)
        go_on.set()
        end(slow)
    assert len(store.listed()["data"]) == 1
    store.delete(store.listed()["data"][0]["id"])
    assert store.add(KIND, ROWS)  # what was counted while it arrived is not counted after it


def test_questions_about_jobs_do_not_wait_for_uploads(
    client: TenantClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with endpoint_of(client, root) as endpoint, raw(endpoint) as http, held_checks(monkeypatch) as (begun, go_on, _):
        threads = [threading.Thread(target=upload, args=(http,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        assert begun.acquire(timeout=60)
        assert begun.acquire(timeout=60)
        assert http.get("/v1/files", timeout=20).status_code == 200
        assert http.get("/v1/fine_tuning/jobs", timeout=20).status_code == 200
        go_on.set()
        for thread in threads:
            end(thread)


def test_the_check_ends_when_the_client_goes_away(
    client: TenantClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with endpoint_of(client, root) as endpoint, held_checks(monkeypatch) as (begun, go_on, seen):
        url = urlsplit(endpoint.url)
        head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\nContent-Type: {KIND}\r\n"
        with socket.create_connection((url.hostname, url.port), timeout=60) as gone:
            gone.sendall(f"{head}Content-Length: {len(ROWS)}\r\n\r\n".encode() + ROWS)
            assert begun.acquire(timeout=60)
        until(lambda: b'status="gone"' in endpoint.service.metrics.text(), "the end of the request")
        go_on.set()
        with raw(endpoint) as http:
            for _ in range(2):  # with two threads, both are free again after two further uploads
                assert upload(http).status_code == 200
        assert len(seen) == 3  # one of the 50 rows, and the two of the last uploads
        assert len(left(root)) == 4


def test_a_client_that_went_away_leaves_no_file(tmp_path: Path) -> None:
    store = uploads.Uploads(tmp_path / "files")
    with pytest.raises(ClientGone):
        store.add(KIND, ROWS, lambda: True)
    assert not list((tmp_path / "files").glob("*"))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (ROW + b"\n" + b"x" * 101, "the file, line 2: expected at most 100 bytes a line"),
        (b"\n\n" + b"x" * 300 + b"\n" + ROW, "the file, line 3: expected at most 100 bytes a line"),
        (ROW + b"\n" * 10, "the file: expected at most 10 lines, 11 came: upload several files"),
        (b"\n" + ROW + b"\n[]", "the file, line 3: expected an object, list came"),
        (ROW + b"\nnull", "the file, line 2: expected an object, null came"),
        (ROW + b'\n{"text": 5}', "the file, line 2: text: expected a string, int came"),
        (ROW + b"\n\n\xff", "the file, line 3: expected UTF-8; byte 1 of the line is not"),
        (ROW + b'\n{"x', "the file, line 2: expected one JSON object per line; invalid JSON at column 2"),
        (b"\n \n", "the file: expected at least one row, none came"),
        (
            ROW + b'\n{"prompt": "a", "chosen": "b", "rejected": "c"}',
            "the file, line 2: expected chosen and rejected in all rows or in none",
        ),
    ],
)
def test_a_file_that_is_no_training_set_is_refused_with_the_line(tmp_path: Path, data: bytes, text: str) -> None:
    store = uploads.Uploads(tmp_path / "files", EndpointLimits(file_rows=10, row_bytes=100))
    with pytest.raises(HttpError) as refused:
        store.add(KIND, form((FILE, data), (NAMED.format("purpose"), b"fine-tune")))
    assert (refused.value.status, refused.value.text) == (400, text)
    assert not list((tmp_path / "files").glob("*"))


def test_lines_of_exactly_the_limit_are_kept(tmp_path: Path) -> None:
    store = uploads.Uploads(tmp_path / "files", EndpointLimits(file_rows=4, row_bytes=len(ROW)))
    data = b"\n".join([ROW] * 3) + b"\n"
    assert store.add(KIND, form((FILE, data), (NAMED.format("purpose"), b"fine-tune")))["bytes"] == len(data)
    bom = codecs.BOM_UTF8 + b'{"text": "a"}'
    assert store.add(KIND, form((FILE, bom), (NAMED.format("purpose"), b"fine-tune")))["bytes"] == len(bom)


LARGE = {
    "one line of 60 MB": "b'{\"text\": \"' + b'a' * (60 << 20) + b'\"}'",
    "a line of empty lists": "b'{\"text\": \"a\", \"x\": [' + b'[],' * (20 << 20) + b'0]}'",
    "rows of empty lists": "(b'{\"text\": \"a\", \"x\": [' + b'[],' * 300_000 + b'0]}\\n') * 10",
    "many rows": 'b\'{"text": "a"}\\n\' * 60_000',
}


@pytest.fixture(scope="module")
def extra_kilobytes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Returns, for each of LARGE, the kilobytes that an upload takes besides its own bytes. Each file is taken in a
    child of one process, since to import the store takes longer than that."""
    cases = ", ".join(f"{name!r}: lambda: {data}" for name, data in LARGE.items())
    code = (
        "import os, resource, sys; from pathlib import Path; from tenant_sdk.endpoint import uploads\n"
        "def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"for name, make in {{{cases}}}.items():\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        data = make()\n"
        "        purpose = b'--x\\r\\nContent-Disposition: form-data; name=\"purpose\"\\r\\n\\r\\nfine-tune\\r\\n'\n"
        "        file = b'--x\\r\\nContent-Disposition: form-data; name=\"file\"\\r\\n\\r\\n'\n"
        "        body = purpose + file + data + b'\\r\\n--x--\\r\\n'\n"
        "        store, before = uploads.Uploads(Path(sys.argv[1]) / name), peak()\n"
        "        try: store.add('multipart/form-data; boundary=x', body)\n"
        "        except uploads.HttpError: pass\n"
        "        print(name, peak() - before - len(body) // 1024, sep='\\t', flush=True)\n"
        "        os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
    )
    folder = str(tmp_path_factory.mktemp("large"))
    told = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, check=True, text=True).stdout
    return {name: int(kilobytes) for name, kilobytes in (line.split("\t") for line in told.splitlines())}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_file_takes_little_more_memory_than_its_bytes(name: str, extra_kilobytes: dict[str, int]) -> None:
    """The old check took 1.7 GB for a line of 62 MB, and a kilobyte for each short row."""
    assert extra_kilobytes[name] < 80_000


def test_a_body_that_comes_in_tiny_parts_takes_its_own_bytes() -> None:
    num_left = num_parts = 100_000

    async def receive() -> Any:
        nonlocal num_left
        num_left -= 1
        return {"type": "http.request", "body": bytes(bytearray(b"ab")), "more_body": num_left > 0}

    tracemalloc.start()
    try:
        body = asyncio.run(read_body({"headers": []}, receive, 1 << 20, lambda _: None))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert body == b"ab" * num_parts
    assert peak < 3_000_000  # kept as a list, the parts took 45 bytes each


# ---- bodies in memory ------------------------------------------------------------------------------------------------


def filled(text: str) -> dict[str, Any]:
    """Returns fields of a request that have no effect on its answer, with this text in them."""
    return {"metadata": {str(place): text[place : place + 500] for place in range(0, len(text), 500)}}


def test_bodies_of_all_requests_share_one_limit(client: TenantClient) -> None:
    with endpoint_of(client, limits=EndpointLimits(held_bytes=3000)) as endpoint, raw(endpoint) as http:
        for _ in range(3):  # what a request held is free again after it, whether it was answered or refused
            answer = http.post("/v1/chat/completions", json=chat(**filled("x" * 3000)))
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_requests")
            assert answer.headers["retry-after"]
            assert http.post("/v1/chat/completions", json=chat(**filled("x" * 2000))).status_code == 200
