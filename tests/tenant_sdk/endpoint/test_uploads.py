"""Tests that uploads and records of jobs leave nothing on disk that is incomplete, and that forms are read strictly and
in linear time."""

from __future__ import annotations

import contextlib
import errno
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tenant_sdk import TenantClient
from tenant_sdk.endpoint import jobs, uploads
from tenant_sdk.endpoint.disk import write_new
from tenant_sdk.endpoint.errors import HttpError
from tenant_sdk.endpoint.forms import Part, read_form
from tenant_sdk.endpoint.settings import EndpointLimits
from tests.support.endpoints import chat, endpoint_of, raw
from tests.support.waiting import until

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


# ---- bodies in memory ------------------------------------------------------------------------------------------------


def test_bodies_of_all_requests_share_one_limit(client: TenantClient) -> None:
    with endpoint_of(client, limits=EndpointLimits(held_bytes=3000)) as endpoint, raw(endpoint) as http:
        for _ in range(3):  # what a request held is free again after it, whether it was answered or refused
            answer = http.post("/v1/chat/completions", json=chat(user="x" * 400, metadata={"a": "x" * 3000}))
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_requests")
            assert answer.headers["retry-after"]
            assert http.post("/v1/chat/completions", json=chat(metadata={"a": "x" * 2000})).status_code == 200
