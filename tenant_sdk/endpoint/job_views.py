"""This module describes fine-tuning jobs as objects of OpenAI's interface: jobs, their events and their checkpoints.

A job is a dict, as jobs.py stores it. Jobs and events are listed in pages, so that looking at a job of a million steps
costs no more than looking at a short one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tenant_sdk.endpoint.errors import bad_request

_PAGE, _MOST_IN_PAGE = 20, 1000
"""How many entries of a list are given by default, as by OpenAI, and at most."""
_MOST_POINTS = 256
"""The most points of a loss curve."""


def described(job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the description of a job."""
    settings = job["settings"]
    shown = {"n_epochs": settings["num_epochs"], "batch_size": settings["batch_size"]}
    shown["learning_rate_multiplier"] = settings["learning_rate"] / 1e-3
    return {
        "id": job["id"], "object": "fine_tuning.job", "created_at": job["created_at"],
        "finished_at": job["finished_at"], "model": job["model"], "organization_id": "", "status": job["status"],
        "fine_tuned_model": job["adapter"] if job["status"] == "succeeded" else None, "result_files": [],
        "seed": settings["seed"], "trained_tokens": job["tokens"] if job["status"] == "succeeded" else None,
        "training_file": job["training_file"], "validation_file": None, "error": job["error"],
        "user_provided_suffix": job["adapter"], "metadata": job.get("metadata"),
        "hyperparameters": shown, "method": {"type": "supervised", "supervised": {"hyperparameters": shown}},
    }  # fmt: skip


def job_page(jobs: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Returns a page of the list of jobs.

    Args:
        jobs: all jobs, the newest first.
        query: the request's `limit`, and `after`: the id of the last entry of the page before.

    Raises:
        HttpError: the query is wrong.
    """
    begin = 0
    if "after" in query:
        begin = next((place for place, job in enumerate(jobs, 1) if job["id"] == query["after"]), len(jobs))
    end = begin + _limit(query)
    return {"object": "list", "data": [described(job) for job in jobs[begin:end]], "has_more": end < len(jobs)}


def event_page(
    job: Mapping[str, Any], losses: Sequence[float], query: Mapping[str, str], shown: Callable[[float], float]
) -> dict[str, Any]:  # fmt: skip
    """Returns a page of a job's events: first the loss of each step, then the messages, both the newest first.

    Args:
        job: the job.
        losses: the losses of its steps so far, the oldest first.
        query: see `job_page`.
        shown: returns a loss in the form in which clients may see it.

    Raises:
        HttpError: the query is wrong.
    """
    told = job["messages"]
    begin = _place_after(query.get("after"), str(job["id"]), len(losses), len(told))
    end = min(begin + _limit(query), len(losses) + len(told))
    data = [
        _step(job, len(losses) - place, shown(losses[-1 - place]))
        if place < len(losses)
        else _message(job, len(losses) + len(told) - 1 - place)
        for place in range(begin, end)
    ]
    return {"object": "list", "data": data, "has_more": end < len(losses) + len(told)}


def _place_after(after: str | None, job_id: str, num_steps: int, num_told: int) -> int:
    """Returns the place in the list of events that follows the event with the id `after`; 0 if this is None.

    Raises:
        HttpError: the id is not that of an event of this job.
    """
    if after is None:
        return 0
    found = re.fullmatch(rf"ftevent-{job_id}-([sm])([0-9]{{1,9}})", after)
    if found is None:
        raise bad_request("after is the id of an event of this job", "after")
    number = int(found[2])
    place = num_steps - number + 1 if found[1] == "s" else num_steps + num_told - number
    return max(0, place)


def _limit(query: Mapping[str, str]) -> int:
    given = query.get("limit", str(_PAGE))
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= _MOST_IN_PAGE):
        raise bad_request(f"limit is a number from 1 to {_MOST_IN_PAGE}", "limit")
    return int(given)


def _step(job: Mapping[str, Any], step: int, loss: float) -> dict[str, Any]:
    text, data = f"Step {step}: training loss={loss:.4f}", {"step": step, "train_loss": loss}
    return _event(job, f"s{step}", job["created_at"], text, "metrics", data)


def _message(job: Mapping[str, Any], number: int) -> dict[str, Any]:
    created_at, text = job["messages"][number]
    return _event(job, f"m{number}", created_at, text, "message", None)


def _event(
    job: Mapping[str, Any], number: str, created_at: int, text: str, kind: str, data: dict[str, Any] | None
) -> dict[str, Any]:  # fmt: skip
    return {
        "id": f"ftevent-{job['id']}-{number}", "object": "fine_tuning.job.event", "created_at": created_at,
        "level": "info", "message": text, "type": kind, "data": data,
    }  # fmt: skip


def checkpoint_list(job: Mapping[str, Any], found: Sequence[tuple[int, float | None]]) -> dict[str, Any]:
    """Returns the list of a job's checkpoints, the newest first.

    Args:
        job: the job.
        found: the step of each checkpoint, and the loss of this step; the oldest first.
    """
    data = [
        {
            "id": f"ftckpt-{job['id']}-{step}", "object": "fine_tuning.job.checkpoint",
            "created_at": job["created_at"], "fine_tuning_job_id": job["id"], "step_number": step,
            "fine_tuned_model_checkpoint": job["adapter"], "metrics": {"step": step, "train_loss": loss},
        }
        for step, loss in reversed(found)
    ]  # fmt: skip
    return {"object": "list", "data": data, "has_more": False}


def loss_curve(losses: Sequence[float], shown: Callable[[float], float]) -> dict[str, Any]:
    """Returns at most 256 points of the loss curve, each a pair of a step and its loss. With more steps, it takes every
    second one, every third one and so on, and always the newest one. Args: see `event_page`."""
    every = -(-len(losses) // _MOST_POINTS) or 1
    points = [[step, shown(losses[step - 1])] for step in range(len(losses), 0, -every)]
    return {"object": "fine_tuning.job.losses", "num_steps": len(losses), "data": points[::-1]}
