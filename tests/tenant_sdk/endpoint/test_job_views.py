"""Tests that lists of jobs and events come in pages, and that a loss curve is short, however long a job is."""

from __future__ import annotations

from typing import Any

import pytest

from tenant_sdk.endpoint.errors import HttpError
from tenant_sdk.endpoint.jobs import event_page, job_page, loss_curve

SETTINGS = {"num_epochs": 3.0, "batch_size": 8, "learning_rate": 1e-3, "seed": 0}


def job(number: int = 0, num_messages: int = 2) -> dict[str, Any]:
    return {
        "id": f"ftjob-{number:024x}", "created_at": 5, "finished_at": None, "model": "llama", "adapter": "a",
        "status": "running", "training_file": "file-0", "settings": SETTINGS, "error": None, "tokens": None,
        "losses": [], "messages": [[7, f"told {number}"] for number in range(num_messages)],
    }  # fmt: skip


def same(loss: float) -> float:
    return loss


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("limit", [1, 2, 3, 100])
def test_pages_of_events_are_the_whole_list(num_steps: int, limit: int) -> None:
    losses = [float(step) for step in range(1, num_steps + 1)]
    found: list[str] = []
    query = {"limit": str(limit)}
    while True:
        page = event_page(job(), losses, query, same)
        assert len(page["data"]) <= limit
        found += [each["message"] for each in page["data"]]
        if not page["has_more"]:
            break
        query["after"] = page["data"][-1]["id"]
    steps = [f"Step {step}: training loss={step:.4f}" for step in range(num_steps, 0, -1)]
    assert found == [*steps, "told 1", "told 0"]


def test_events_that_came_meanwhile_do_not_shift_a_page() -> None:
    losses = [1.0, 2.0, 3.0]
    first = event_page(job(), losses, {"limit": "2"}, same)
    query = {"limit": "2", "after": first["data"][-1]["id"]}
    later = event_page(job(), [*losses, 4.0], query, same)
    assert later["data"][0]["data"] == {"step": 1, "train_loss": 1.0}


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "x"}, {"limit": "1001"}, {"limit": "-1"}, {"limit": "9" * 5000}, {"after": "x"},
              {"after": f"ftevent-{job()['id']}-s"}, {"after": f"ftevent-{job()['id']}-s{'9' * 40}"}],
)  # fmt: skip
def test_queries_that_cannot_be(query: dict[str, str]) -> None:
    with pytest.raises(HttpError) as refused:
        event_page(job(), [1.0], query, same)
    assert refused.value.status == 400


def test_an_event_that_is_none_is_before_or_after_all() -> None:
    for number in ("s0", "s5", "m0", "m9"):
        page = event_page(job(), [1.0], {"after": f"ftevent-{job()['id']}-{number}"}, same)
        assert len(page["data"]) <= 3


def test_pages_of_jobs() -> None:
    jobs = [job(number) for number in range(25)]
    first = job_page(jobs, {})
    assert ([each["id"] for each in first["data"]], first["has_more"]) == ([each["id"] for each in jobs[:20]], True)
    last = job_page(jobs, {"after": jobs[19]["id"]})
    assert ([each["id"] for each in last["data"]], last["has_more"]) == ([each["id"] for each in jobs[20:]], False)
    assert job_page(jobs, {"after": "x"})["data"] == []


@pytest.mark.parametrize("num_steps", [0, 1, 255, 256, 257, 1000, 100_000])
def test_a_curve_is_short_and_has_the_newest_step(num_steps: int) -> None:
    seen: list[float] = []

    def shown(loss: float) -> float:
        seen.append(loss)
        return loss + 0.5

    curve = loss_curve([float(step) for step in range(1, num_steps + 1)], shown)
    assert curve["num_steps"] == num_steps
    assert len(curve["data"]) == len(seen) <= 256
    assert len(curve["data"]) >= min(num_steps, 128)
    assert [step for step, _ in curve["data"]] == sorted({step for step, _ in curve["data"]})
    assert all(loss == step + 0.5 for step, loss in curve["data"])
    assert num_steps == 0 or curve["data"][-1][0] == num_steps
