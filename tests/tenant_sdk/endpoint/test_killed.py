"""Tests the end of `tenant serve`: a signal ends it with exit code 0, and if it is killed in the middle of a job, the
job goes on when it is started again."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.commands import ServeCommand
from tests.support.endpoints import WHO
from tests.support.waiting import SLOW_TIMEOUT_S, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SLOW_TIMEOUT_S)]
NUM_STEPS = 60
ROW = json.dumps({"prompt": "who?", "completion": " me"}).encode()


def client_of(serving: ServeCommand) -> openai.OpenAI:
    return openai.OpenAI(base_url=serving.url, api_key=serving.key, max_retries=0, timeout=60)


def steps_of(ai: openai.OpenAI, job_id: str) -> dict[int, float]:
    """Returns the losses that the events of a job report, by step."""
    told: list[Any] = [each.data for each in ai.fine_tuning.jobs.list_events(job_id) if each.type == "metrics"]
    return {each["step"]: each["train_loss"] for each in told}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_with_exit_code_0(folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    with ServeCommand(folder, tmp_path, {"VEILBASE_CACHE": str(tmp_path / "cache")}) as serving:
        assert client_of(serving).models.list().data
        log = serving.end(number)
        assert serving.process.returncode == 0
        assert "Traceback" not in log


def test_a_killed_server_goes_on_with_its_job(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    root.mkdir()
    with ServeCommand(folder, root, {"VEILBASE_CACHE": str(tmp_path / "cache")}) as serving:
        ai = client_of(serving)
        extra: Any = {"hyperparameters": {"max_steps": NUM_STEPS, "batch_size": 1, "rank": 2}}
        file = ai.files.create(file=("rows.jsonl", ROW), purpose="fine-tune")
        job = ai.fine_tuning.jobs.create(model="llama", training_file=file.id, suffix="mine", extra_body=extra)
        until(lambda: ai.fine_tuning.jobs.checkpoints.list(job.id).data, "a checkpoint")
        before = steps_of(ai, job.id)
        assert max(before) < NUM_STEPS
        serving.end(signal.SIGKILL)
    assert json.loads((root / ".jobs" / job.id / "job.json").read_text())["status"] == "running"
    assert not (root / "mine").exists()
    with ServeCommand(folder, root, {"VEILBASE_CACHE": str(tmp_path / "cache")}) as serving:
        ai = client_of(serving)
        until(lambda: ai.fine_tuning.jobs.retrieve(job.id).status == "succeeded", "the end of the job")
        told = [each.message for each in ai.fine_tuning.jobs.list_events(job.id)]
        assert "The job goes on after the end of the process that ran it." in told
        after = steps_of(ai, job.id)
        assert sorted(after) == list(range(1, NUM_STEPS + 1))
        kept = range(1, 6)  # up to the first checkpoint at the latest
        assert [after[step] for step in kept] == [before[step] for step in kept]
        messages: Any = WHO
        answer = ai.chat.completions.create(model="mine", messages=messages, max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
