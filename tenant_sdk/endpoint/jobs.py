"""This module keeps fine-tuning jobs (`/v1/fine_tuning/jobs`) and runs them one after another beside serving.

Guarantees: the state of a job is on disk before any client is told of it. A job therefore survives a crash: if it was
running, it is queued again and resumes from its last checkpoint. A job's record holds settings, states and losses, and
nothing of its data.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from noise.disk.private_files import make_private_folder, write_private
from tenant_sdk.endpoint.errors import HttpError, bad_request
from tenant_sdk.endpoint.training import JobStopped, checkpoints_of, publish, train
from wire.errors import VeilbaseError

MOST_JOBS = 256
"""The most jobs that are remembered."""
_ID = re.compile(r"ftjob-[0-9a-f]{24}")
_ENDED = ("succeeded", "failed", "cancelled")


class Jobs:
    """Holds the fine-tuning jobs of one endpoint, and the thread that runs them."""

    def __init__(
        self, session: Any, folder: Path, adapters: Path, on_error: Callable[[VeilbaseError], None]
    ) -> None:  # fmt: skip
        """Reads the jobs that an earlier process has stored, and queues those that had not ended.

        Args:
            session: the tenant's session, with which jobs train.
            folder: a private folder for the jobs, on the same file system as `adapters`.
            adapters: the folder to which complete adapters are moved.
            on_error: called with the error of a job that failed.
        """
        self._session, self._folder, self._adapters, self._on_error = session, folder, adapters, on_error
        self._changed = threading.Condition()
        self._is_closed = False
        self._jobs: dict[str, dict[str, Any]] = {
            path.parent.name: json.loads(path.read_text()) for path in folder.glob("ftjob-*/job.json")
        }
        for job in self._jobs.values():
            if job["status"] == "running":
                self._note(job, "queued", "The job goes on after the end of the process that ran it.")
        self._thread = threading.Thread(target=self._run, name="veilbase-jobs", daemon=True)
        self._thread.start()

    def create(
        self, model: str, file_id: str, data: Path, name: str | None, settings: dict[str, Any]
    ) -> dict[str, Any]:
        """Queues a job and returns its description.

        Args:
            model: the base model's name, for the record.
            file_id, data: the id of the training file, and its path; the job gets a copy of the file.
            name: the adapter's name; None for a generated name.
            settings: see `training.train`.

        Raises:
            HttpError: an adapter or a job has this name, or there are too many jobs.
        """
        job_id = f"ftjob-{secrets.token_hex(12)}"
        adapter = name or job_id
        with self._changed:
            taken = {job["adapter"] for job in self._jobs.values() if job["status"] not in ("failed", "cancelled")}
            if adapter in taken or (self._adapters / adapter).exists():
                raise bad_request("an adapter has this name already", "suffix", "name_taken")
            if len(self._jobs) >= MOST_JOBS:
                raise HttpError(429, f"{MOST_JOBS} jobs are remembered: delete some of their folders", "too_many_jobs")
            job = {
                "id": job_id, "created_at": int(time.time()), "finished_at": None, "model": model, "adapter": adapter,
                "status": "new", "training_file": file_id, "settings": settings, "error": None, "tokens": None,
                "losses": [], "messages": [],
            }  # fmt: skip
            make_private_folder(self._folder / job_id)
            shutil.copyfile(data, self._folder / job_id / "data.jsonl")
            (self._folder / job_id / "data.jsonl").chmod(0o600)
            self._note(job, "queued", "The job waits for its turn.")
            self._jobs[job_id] = job
            self._changed.notify_all()
        return self.described(job_id)

    def described(self, job_id: str) -> dict[str, Any]:
        """Returns the description of a job, as an object of OpenAI's interface.

        Raises:
            HttpError: there is no such job.
        """
        job = self._job(job_id)
        settings = job["settings"]
        shown = {"n_epochs": settings["num_epochs"], "batch_size": settings["batch_size"]}
        shown["learning_rate_multiplier"] = settings["learning_rate"] / 1e-3
        return {
            "id": job["id"], "object": "fine_tuning.job", "created_at": job["created_at"],
            "finished_at": job["finished_at"], "model": job["model"], "organization_id": "", "status": job["status"],
            "fine_tuned_model": job["adapter"] if job["status"] == "succeeded" else None, "result_files": [],
            "seed": settings["seed"], "trained_tokens": job["tokens"], "training_file": job["training_file"],
            "validation_file": None, "error": job["error"], "hyperparameters": shown,
            "method": {"type": "supervised", "supervised": {"hyperparameters": shown}},
        }  # fmt: skip

    def listed(self) -> dict[str, Any]:
        """Returns all jobs, the newest first."""
        with self._changed:
            ids = sorted(self._jobs, key=lambda each: -self._jobs[each]["created_at"])
        return {"object": "list", "data": [self.described(each) for each in ids], "has_more": False}

    def events(self, job_id: str) -> dict[str, Any]:
        """Returns the events of a job, the newest first: messages, and the loss of each step that a checkpoint holds.

        Raises: see `described`.
        """
        job = self._job(job_id)
        told = [
            _event(job, f"m{number}", at, text, "message", None) for number, (at, text) in enumerate(job["messages"])
        ]
        steps = enumerate(job["losses"] or self._losses(job), 1)
        measured = [
            _event(job, f"s{step}", job["created_at"], f"Step {step}: training loss={loss:.4f}", "metrics",
                   {"step": step, "train_loss": loss})
            for step, loss in steps
        ]  # fmt: skip
        return {"object": "list", "data": [*reversed(measured), *reversed(told)], "has_more": False}

    def checkpoints(self, job_id: str) -> dict[str, Any]:
        """Returns the checkpoints from which a job can go on, the newest first. Raises: see `described`."""
        job = self._job(job_id)
        found = [
            {
                "id": f"ftckpt-{job['id']}-{step}", "object": "fine_tuning.job.checkpoint",
                "created_at": job["created_at"], "fine_tuning_job_id": job["id"], "step_number": step,
                "fine_tuned_model_checkpoint": job["adapter"],
                "metrics": {"step": step, "train_loss": losses[-1] if losses else None},
            }
            for step, losses in reversed(checkpoints_of(self._output(job)))
        ]  # fmt: skip
        return {"object": "list", "data": found, "has_more": False}

    def cancel(self, job_id: str) -> dict[str, Any]:
        """Cancels a job; it stops before its next forward pass. Its checkpoints stay, for `resume`.

        Raises:
            HttpError: there is no such job, or it has ended.
        """
        with self._changed:
            job = self._job(job_id)
            if job["status"] in _ENDED:
                raise bad_request(f"the job has {job['status']} already", code="job_ended")
            self._note(job, "cancelled", "The job was cancelled.")
        return self.described(job_id)

    def resume(self, job_id: str) -> dict[str, Any]:
        """Queues a cancelled or failed job again; it goes on from its last checkpoint.

        Raises:
            HttpError: there is no such job, or it is under way or has succeeded.
        """
        with self._changed:
            job = self._job(job_id)
            if job["status"] not in ("cancelled", "failed"):
                raise bad_request(f"the job is {job['status']}", code="job_not_stopped")
            job["error"] = job["finished_at"] = None
            self._note(job, "queued", "The job goes on from its last checkpoint.")
            self._changed.notify_all()
        return self.described(job_id)

    def close(self) -> None:
        """Stops the running job before its next forward pass. The next process of the endpoint resumes it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _job(self, job_id: str) -> dict[str, Any]:
        with self._changed:
            if job_id not in self._jobs:
                raise HttpError(404, "there is no such job here", "not_found")
            return self._jobs[job_id]

    def _output(self, job: dict[str, Any]) -> Path:
        return self._folder / str(job["id"]) / "adapter"

    def _losses(self, job: dict[str, Any]) -> list[float]:
        found = checkpoints_of(self._output(job))
        return found[-1][1] if found else []

    def _note(self, job: dict[str, Any], status: str, text: str) -> None:
        """Sets a job's state, adds `text` to its events, and stores the job on disk."""
        job["status"] = status
        if status in _ENDED:
            job["finished_at"] = int(time.time())
        job["messages"].append([int(time.time()), text])
        path = self._folder / str(job["id"]) / "job.json"
        write_private(path.with_suffix(".new"), json.dumps(job))
        os.replace(path.with_suffix(".new"), path)

    def _run(self) -> None:
        """Runs queued jobs, the oldest first, until the endpoint ends. The worker thread for jobs runs this method."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._next() is not None)
                job = None if self._is_closed else self._next()
                if job is None:
                    return
                self._note(job, "running", "The job runs.")
            self._train(job)

    def _next(self) -> dict[str, Any] | None:
        queued = [job for job in self._jobs.values() if job["status"] == "queued"]
        return min(queued, key=lambda job: job["created_at"], default=None)

    def _train(self, job: dict[str, Any]) -> None:
        def check() -> None:
            if self._is_closed or job["status"] != "running":
                raise JobStopped("the job was stopped")

        try:
            data = self._folder / str(job["id"]) / "data.jsonl"
            result = train(self._session, data, self._output(job), job["settings"], check)
            with self._changed:  # no cancel may come between the check and the end
                check()
                publish(self._output(job), self._adapters / job["adapter"])
                job["losses"], job["tokens"] = result.losses, result.tokens
                self._note(job, "succeeded", f"The adapter {job['adapter']} is served.")
        except JobStopped:
            return  # cancelled, which was written down, or goes on with the next process
        except VeilbaseError as exc:
            self._fail(job, str(exc), type(exc).__name__)
            self._on_error(exc)
        except Exception as exc:  # noqa: BLE001 - its text may show rows
            self._fail(job, f"training failed ({type(exc).__name__})", "failed")

    def _fail(self, job: dict[str, Any], text: str, code: str) -> None:
        with self._changed:
            job["error"] = {"code": code, "message": text, "param": None}
            self._note(job, "failed", "The job failed.")


def _event(
    job: dict[str, Any], number: str, created_at: int, text: str, kind: str, data: dict[str, Any] | None
) -> dict[str, Any]:  # fmt: skip
    return {
        "id": f"ftevent-{job['id']}-{number}", "object": "fine_tuning.job.event", "created_at": created_at,
        "level": "info", "message": text, "type": kind, "data": data,
    }  # fmt: skip
