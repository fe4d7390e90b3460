"""Tests how fine-tuning jobs and the engine take turns: a job that has used up its slice of time waits for the end of
the engine's present step, and does not wait if there is none."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tenant_sdk import TenantClient
from tenant_sdk.endpoint.jobs import NUM_STEPS, StoppableSession, Turns
from tests.support.endpoints import chat, endpoint_of, raw
from tests.support.waiting import comes, end


class Clock:
    """Returns the time that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_job_waits_for_a_step_after_its_slice() -> None:
    clock = Clock()
    made = Turns(clock, most_wait_s=60.0)
    for _ in range(3):
        made.pause()  # no step: no waiting
        clock.now += 1.0
    gone_on = threading.Event()

    def work() -> None:
        made.pause()
        gone_on.set()

    with made.step():
        waiting = threading.Thread(target=work)
        waiting.start()
        assert not gone_on.wait(0.05)
    comes(gone_on, "the end of the pause")
    end(waiting)
    for _ in range(NUM_STEPS):
        with made.step():
            clock.now += 4.0
    made.pause()
    with made.step():
        clock.now += 1.9
        made.pause()  # the slice, half of a step, that began with the last pause is not over
        clock.now += 0.2
        made.most_wait_s = 0.01
        made.pause()  # a step that takes too long does not stop a job


def test_every_call_of_a_jobs_model_pauses_first(client: TenantClient) -> None:
    calls: list[int] = []
    model = StoppableSession(client, lambda: None, lambda: calls.append(1)).load_model()
    before = client.traffic.calls
    ids = client.tokenizer("who?", return_tensors="pt")
    embedded = model.get_input_embeddings()(ids["input_ids"]).requires_grad_()
    model(inputs_embeds=embedded).logits.sum().backward()
    num_calls = client.traffic.calls - before
    assert len(calls) == num_calls > 4  # forward and backward


def test_an_endpoint_sends_every_call_in_a_step_that_a_job_waits_for(
    client: TenantClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "adapters").mkdir()
    sent: list[int] = []
    step = Turns.step

    @contextlib.contextmanager
    def counted(made: Turns) -> Iterator[None]:
        with step(made):
            before = client.traffic.calls
            yield
            sent.append(client.traffic.calls - before)

    monkeypatch.setattr(Turns, "step", counted)
    with endpoint_of(client, tmp_path / "adapters") as endpoint, raw(endpoint) as http:
        before = client.traffic.calls
        assert http.post("/v1/chat/completions", json=chat()).status_code == 200
        assert sum(sent) == client.traffic.calls - before > 0
