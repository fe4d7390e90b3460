"""Tests files and fine-tuning jobs, mostly by OpenAI's own client. A job is trained beside serving, watched, cancelled
and resumed, and its adapter is served when it is done."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from peft import LoraConfig

from tenant_sdk import TenantClient
from tenant_sdk.endpoint import jobs
from tenant_sdk.endpoint.server import Endpoint
from tenant_sdk.training.settings import FinetuneResult
from tests.support.endpoints import WHO, endpoint_of, official, raw
from tests.support.files import mode
from tests.support.saved_adapters import save_adapter
from tests.support.spies import before_requests
from tests.support.waiting import until
from wire.errors import DatasetError, Unavailable, VeilbaseError

ROWS = [{"messages": [*WHO, {"role": "assistant", "content": f"me {number}"}]} for number in range(8)]
DATA = "\n".join(map(json.dumps, ROWS)).encode()
STEPS = {"max_steps": 12, "batch_size": 2, "rank": 4}


@pytest.fixture
def root(client: TenantClient, tmp_path: Path) -> Path:
    save_adapter(client.load_model(), tmp_path / "adapters" / "support", 1)
    return tmp_path / "adapters"


def upload(ai: openai.OpenAI, data: bytes = DATA) -> str:
    return ai.files.create(file=("rows.jsonl", data), purpose="fine-tune").id


NOTES = {"for": "the help desk"}


def begun(ai: openai.OpenAI, name: str, **steps: Any) -> Any:
    extra: Any = {"hyperparameters": {**STEPS, **steps}}
    return ai.fine_tuning.jobs.create(
        model="llama", training_file=upload(ai), suffix=name, seed=3, metadata=NOTES, extra_body=extra
    )


def state(ai: openai.OpenAI, job: Any) -> str:
    return ai.fine_tuning.jobs.retrieve(job.id).status


def answer(ai: openai.OpenAI, model: str) -> str:
    messages: Any = WHO
    made = ai.chat.completions.create(model=model, messages=messages, max_tokens=6, temperature=0)
    return made.choices[0].message.content or ""


def test_a_job_trains_beside_serving_and_its_adapter_is_served(
    client: TenantClient, root: Path, tmp_path: Path
) -> None:
    with endpoint_of(client, root) as endpoint:
        ai = official(endpoint)
        base = answer(ai, "llama")
        job = begun(ai, "mine")
        assert job.status in ("queued", "running")
        while state(ai, job) in ("queued", "running"):
            assert answer(ai, "llama") == base  # answered all the while
        done = ai.fine_tuning.jobs.retrieve(job.id)
        assert (done.status, done.fine_tuned_model, done.error) == ("succeeded", "mine", None)
        assert job.metadata == done.metadata == NOTES
        assert done.trained_tokens
        events = list(ai.fine_tuning.jobs.list_events(job.id, limit=5))  # the client asks for page after page
        losses = [each.data["train_loss"] for each in reversed(events) if each.type == "metrics"]  # type: ignore[index]
        assert len(losses) == 12
        assert losses[-1] < losses[0]
        assert [model.id for model in ai.models.list()] == ["llama", "mine", "support"]
        (want,) = client.generate_many(["who?"], root / "mine", max_new_tokens=6, progress=False)
        assert answer(ai, "mine") == want
        # the same as from finetune alone
        rows = tmp_path / "rows.jsonl"
        rows.write_bytes(DATA)
        config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        alone = client.finetune(rows, config, tmp_path / "alone", max_steps=12, batch_size=2, seed=3, progress=False)
        assert losses == pytest.approx(alone.losses)
        assert mode(root / ".jobs") == 0o700
        assert mode(root / ".jobs" / job.id / "data.jsonl") == 0o600


@pytest.mark.slow
def test_a_job_is_cancelled_and_goes_on(client: TenantClient, root: Path) -> None:
    with endpoint_of(client, root) as endpoint:
        ai = official(endpoint)
        job = begun(ai, "mine", max_steps=400)
        until(lambda: ai.fine_tuning.jobs.checkpoints.list(job.id).data, "a checkpoint")
        assert ai.fine_tuning.jobs.cancel(job.id).status == "cancelled"
        with pytest.raises(openai.BadRequestError):
            ai.fine_tuning.jobs.cancel(job.id)
        step = ai.fine_tuning.jobs.checkpoints.list(job.id).data[0].step_number
        assert step >= 5
        assert ai.fine_tuning.jobs.resume(job.id).status in ("queued", "running")
        until(lambda: ai.fine_tuning.jobs.checkpoints.list(job.id).data[0].step_number > step, "another checkpoint")
        assert ai.fine_tuning.jobs.cancel(job.id).status == "cancelled"
        assert "mine" not in [model.id for model in ai.models.list()]


@pytest.mark.slow
def test_a_job_goes_on_after_the_end_of_its_process(client: TenantClient, root: Path) -> None:
    with endpoint_of(client, root) as endpoint:
        ai = official(endpoint)
        job = begun(ai, "mine", max_steps=40)
        until(lambda: ai.fine_tuning.jobs.checkpoints.list(job.id).data, "a checkpoint")
    record = root / ".jobs" / job.id / "job.json"
    assert json.loads(record.read_text())["status"] == "running"  # as a crash leaves it
    with endpoint_of(client, root) as endpoint:
        ai = official(endpoint)
        until(lambda: state(ai, job) == "succeeded", "the end of the job")
        events = list(ai.fine_tuning.jobs.list_events(job.id))
        assert "The job goes on after the end of the process that ran it." in [each.message for each in events]
        assert len([each for each in events if each.type == "metrics"]) == 40
        assert answer(ai, "mine")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::tenant_sdk.ProviderAwayWarning")
def test_a_job_waits_for_a_provider_that_went_away(
    client: TenantClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_gone, num_refused = threading.Event(), [0]

    def act(*_: object) -> None:
        if is_gone.is_set():
            num_refused[0] += 1
            raise Unavailable("the provider is gone")

    before_requests(monkeypatch, act)
    with endpoint_of(client, root) as endpoint:
        ai = official(endpoint)
        job = begun(ai, "mine", max_steps=40)
        until(lambda: ai.fine_tuning.jobs.checkpoints.list(job.id).data, "a checkpoint")
        is_gone.set()
        until(lambda: num_refused[0] >= 2, "another try")
        assert state(ai, job) == "running"
        is_gone.clear()
        until(lambda: state(ai, job) == "succeeded", "the end of the job")
        assert answer(ai, "mine")
        is_gone.set()
        job = begun(ai, "other")
        until(lambda: num_refused[0] >= 4, "a try of the other job")
        assert ai.fine_tuning.jobs.cancel(job.id).status == "cancelled"
        is_gone.clear()
        job = begun(ai, "third")  # the thread of jobs waits no longer for the cancelled one
        until(lambda: state(ai, job) == "succeeded", "the end of the third job")


def test_files(endpoint: Endpoint) -> None:
    ai = official(endpoint)
    file_id = upload(ai)
    assert [each.id for each in ai.files.list()] == [file_id]
    assert (ai.files.retrieve(file_id).filename, ai.files.retrieve(file_id).bytes) == ("rows.jsonl", len(DATA))
    assert ai.files.delete(file_id).deleted
    with pytest.raises(openai.NotFoundError):
        ai.files.retrieve(file_id)


@pytest.mark.parametrize(
    "data", [b"", b"no json", b'{"messages": "x"}', b"\xff\xfe", DATA + b"\n{", b"[1, 2]", b'{"secret": 1}']
)
def test_a_file_that_is_no_jsonl(endpoint: Endpoint, data: bytes) -> None:
    ai = official(endpoint)
    with pytest.raises(openai.BadRequestError) as refused:
        upload(ai, data)
    assert refused.value.code == "invalid_file"
    assert "\n" not in refused.value.message
    assert not list(ai.files.list())


def test_forms_and_jobs_that_cannot_be(endpoint: Endpoint) -> None:
    ai = official(endpoint)
    with pytest.raises(openai.BadRequestError):
        ai.files.create(file=("x", DATA), purpose="assistants")
    file_id = upload(ai)
    with raw(endpoint) as http:
        for kind, content in (("multipart/form-data", b"x"), ("multipart/form-data; boundary=x", b"--x\r\n\r\n--x--")):
            assert http.post("/v1/files", content=content, headers={"content-type": kind}).status_code == 400
        assert http.post("/v1/files", json={}).status_code == 415
        for fields, status in (
            ({"model": "nobody"}, 404), ({"model": "support"}, 404), ({"training_file": "file-none"}, 404),
            ({"training_file": "../../etc/passwd"}, 404), ({"suffix": "../x"}, 400), ({"suffix": "support"}, 400),
            ({"suffix": ".jobs"}, 400), ({"hyperparameters": {"n_epochs": 0}}, 400), ({"seed": -1}, 400),
            ({"hyperparameters": {"n_epochs": 2, "max_steps": 2}}, 400),
            ({"hyperparameters": {"rank": 1000}}, 400), ({"method": {"type": "dpo"}}, 400), ({"shell": "x"}, 400),
        ):  # fmt: skip
            body = {"model": "llama", "training_file": file_id, **fields}
            answered = http.post("/v1/fine_tuning/jobs", json=body)
            assert answered.status_code == status, (fields, answered.text)
        for path in ("x", "ftjob-x", "..", "ftjob-" + "0" * 24):
            for tail in ("", "/events", "/checkpoints"):
                assert http.get(f"/v1/fine_tuning/jobs/{path}{tail}").status_code == 404
            assert http.post(f"/v1/fine_tuning/jobs/{path}/cancel").status_code == 404
        assert http.get("/v1/fine_tuning/jobs").json()["data"] == []
    ai.files.delete(file_id)


class _Inner(Unavailable):
    """Is an error that only this package knows."""


@pytest.mark.parametrize(
    ("error", "param"),
    [
        (DatasetError("line 1: expected text"), "training_file"), (Unavailable("it went away"), None),
        (_Inner("it went away"), None),
    ],
)  # fmt: skip
def test_a_failed_job_names_the_field_at_fault(
    client: TenantClient, root: Path, monkeypatch: pytest.MonkeyPatch, error: VeilbaseError, param: str | None
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(jobs, "train", fail)
    with endpoint_of(client, root) as endpoint:
        ai = official(endpoint)
        job = begun(ai, "mine")
        until(lambda: state(ai, job) == "failed", "the end of the job")
        told = ai.fine_tuning.jobs.retrieve(job.id).error
        code = "Unavailable" if isinstance(error, Unavailable) else "DatasetError"
        assert (told.code, told.param) == (code, param)  # type: ignore[union-attr]


def test_a_job_takes_no_name_of_the_catalogue(client: TenantClient, root: Path, tmp_path: Path) -> None:
    entry = {"source": f"file://{tmp_path}", "digest": f"sha256:{'0' * 64}"}
    (tmp_path / "list.json").write_text(json.dumps({"adapters": {"Far": entry}}))
    options = {"catalogue": tmp_path / "list.json", "cache": tmp_path / "cache"}
    with endpoint_of(client, root, **options) as endpoint:
        for name in ("Far", "far"):
            with pytest.raises(openai.BadRequestError) as refused:
                begun(official(endpoint), name)
            assert (refused.value.code, refused.value.param) == ("name_taken", "suffix")


@pytest.mark.parametrize("name", ["mine", "Mine"])
def test_a_name_that_is_taken_while_the_job_runs(
    client: TenantClient, root: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def take_the_name(session: Any, data: Path, output: Path, *_: Any) -> FinetuneResult:
        output.mkdir()
        (root / name).mkdir()
        return FinetuneResult(output, losses=[1.0], tokens=1, bytes_up=1, bytes_down=1, seconds=1.0)

    monkeypatch.setattr(jobs, "train", take_the_name)
    with endpoint_of(client, root) as endpoint:
        ai = official(endpoint)
        job = begun(ai, "mine")
        until(lambda: state(ai, job) == "failed", "the end of the job")
        told = ai.fine_tuning.jobs.retrieve(job.id).error
        assert (told.code, told.param) == ("name_taken", "suffix")  # type: ignore[union-attr]
        assert "an adapter mine is there already" in told.message  # type: ignore[union-attr]
