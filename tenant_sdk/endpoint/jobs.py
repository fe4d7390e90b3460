"""This module keeps fine-tuning jobs (`/v1/fine_tuning/jobs`) and runs them one after another beside serving.

Guarantees: a client's request (to create, cancel or resume a job) is on disk before the client is told so. A job
therefore survives a crash: if it was running, it is queued again and resumes from its last checkpoint. The losses of
the steps after this checkpoint are in memory only, since a resumed job computes them again. A job's record holds
settings, states and losses, and nothing of its data. If the disk is full, the request fails, or the running job fails,
and the next job runs.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from noise.disk.private_files import make_private_folder, write_private
from tenant_sdk.endpoint.disk import link_or_copy, storing
from tenant_sdk.endpoint.errors import HttpError, bad_request
from tenant_sdk.endpoint.job_views import checkpoint_list, described, event_page, job_page, loss_curve
from tenant_sdk.endpoint.training import JobStopped, checkpoints_of, publish, train
from wire.errors import VeilbaseError

MOST_JOBS = 256
"""The most jobs that are remembered, ended ones included; further ones are refused."""
_ENDED = ("succeeded", "failed", "cancelled")
_log = logging.getLogger("veilbase.endpoint")


class Jobs:
    """Holds the fine-tuning jobs of one endpoint, and the thread that runs them."""

    def __init__(
        self, session: Any, folder: Path, adapters: Path, on_error: Callable[[VeilbaseError], None],
        shown: Callable[[float], float], pause: Callable[[], None],
    ) -> None:  # fmt: skip
        """Reads the jobs that an earlier process has stored, and queues those that had not ended.

        Args:
            session: the tenant's session, with which jobs train.
            folder: a private folder for the jobs, on the same file system as `adapters`.
            adapters: the folder to which complete adapters are moved.
            on_error: called with the VeilbaseError that ended a job; other errors are only stored with the job.
            shown: returns a loss in the form in which clients may see it.
            pause: called before every call of a job to the provider; it may wait.
        """
        self._session, self._folder, self._adapters, self._on_error = session, folder, adapters, on_error
        self._shown, self._pause = shown, pause
        self._changed = threading.Condition()
        self._is_closed = False
        self._live: dict[str, list[float]] = {}
        self._num_steps = 0
        self._jobs = {job["id"]: job for job in _stored(folder)}
        for job in self._jobs.values():
            if job["status"] == "running":
                self._go_on(job)
        self._thread = threading.Thread(target=self._run, name="veilbase-jobs", daemon=True)
        self._thread.start()

    def create(
        self, model: str, file_id: str, data: Path, name: str | None, settings: dict[str, Any],
        metadata: dict[str, str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Queues a job and returns its description.

        Args:
            model: the base model's name, for the record.
            file_id, data: the id of the training file, and its path; the job keeps a link or copy, so the upload may
                be deleted.
            name: the adapter's name; None for a generated name.
            settings: see `training.train`.
            metadata: the client's own notes, which descriptions of the job repeat.

        Raises:
            HttpError: an adapter or a job has this name, there are too many jobs, or the disk is full.
        """
        job_id = f"ftjob-{secrets.token_hex(12)}"
        job: dict[str, Any] = {
            "id": job_id, "created_at": int(time.time()), "finished_at": None, "model": model,
            "adapter": name or job_id, "status": "new", "training_file": file_id, "settings": settings, "error": None,
            "tokens": None, "losses": [], "messages": [], "metadata": metadata,
        }  # fmt: skip
        with self._changed:
            self._check_name(job["adapter"], model)
            if len(self._jobs) >= MOST_JOBS:
                raise HttpError(429, f"{MOST_JOBS} jobs are remembered: delete some of their folders", "too_many_jobs")
            folder = self._folder / job_id
            with storing(lambda: shutil.rmtree(folder, ignore_errors=True)):
                make_private_folder(folder)
                link_or_copy(data, folder / "data.jsonl")
                self._note(job, "queued", "The job waits for its turn.")
            self._jobs[job_id] = job
            self._changed.notify_all()
        return described(job)

    def _check_name(self, adapter: str, base: str) -> None:
        """Refuses the name of another adapter or job, or of the base model, also if only the case of its letters
        differs: the folder of adapters may then not be opened again."""
        taken = [base, *(job["adapter"] for job in self._jobs.values() if job["status"] not in ("failed", "cancelled"))]
        taken += [path.name for path in self._adapters.iterdir()]
        if adapter.casefold() in {each.casefold() for each in taken}:
            raise bad_request("an adapter has this name already: choose another suffix", "suffix", "name_taken")

    def described(self, job_id: str) -> dict[str, Any]:
        """Returns the description of a job, as an object of OpenAI's interface.

        Raises:
            HttpError: there is no such job.
        """
        return described(self._job(job_id))

    def listed(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Returns a page of the list of jobs, the newest first. Args, Raises: see `job_views.job_page`."""
        with self._changed:
            jobs = sorted(self._jobs.values(), key=lambda job: -int(job["created_at"]))
        return job_page(jobs, query)

    def events(self, job_id: str, query: Mapping[str, str]) -> dict[str, Any]:
        """Returns a page of the events of a job: the loss of each step, and messages.

        Raises:
            HttpError: there is no such job, or the query is wrong.
        """
        job = self._job(job_id)
        return event_page(job, self._losses(job), query, self._shown)

    def losses(self, job_id: str) -> dict[str, Any]:
        """Returns the loss curve of a job. Raises: see `described`."""
        return loss_curve(self._losses(self._job(job_id)), self._shown)

    def checkpoints(self, job_id: str) -> dict[str, Any]:
        """Returns the checkpoints from which a job can go on, the newest first. Raises: see `described`."""
        job = self._job(job_id)
        found = checkpoints_of(self._output(job))
        return checkpoint_list(job, [(step, self._shown(losses[-1]) if losses else None) for step, losses in found])

    def counts(self) -> dict[str, float]:
        """Returns the numbers of jobs that run and that wait, and of steps that were trained since the start."""
        with self._changed:
            states = [job["status"] for job in self._jobs.values()]
            return {
                "jobs_running": states.count("running"), "jobs_waiting": states.count("queued"),
                "job_steps": self._num_steps,
            }  # fmt: skip

    def cancel(self, job_id: str) -> dict[str, Any]:
        """Cancels a job; it stops before its next forward pass. Its checkpoints stay, for `resume`.

        Raises:
            HttpError: there is no such job, it has ended, or the disk is full.
        """
        with self._changed:
            job = self._job(job_id)
            if job["status"] in _ENDED:
                raise bad_request(f"the job has {job['status']} already", code="job_ended")
            with storing():
                self._note(job, "cancelled", "The job was cancelled.")
        return described(job)

    def resume(self, job_id: str) -> dict[str, Any]:
        """Queues a cancelled or failed job again; it goes on from its last checkpoint.

        Raises:
            HttpError: there is no such job, it is under way or has succeeded, another has its name, or the disk is
                full.
        """
        with self._changed:
            job = self._job(job_id)
            if job["status"] not in ("cancelled", "failed"):
                raise bad_request(
                    f"only a job that was cancelled or has failed goes on, and this one is {job['status']}",
                    code="job_not_stopped",
                )
            self._check_name(job["adapter"], job["model"])  # another job may have it by now
            with storing():
                self._note(job, "queued", "The job goes on from its last checkpoint.")
            self._changed.notify_all()
        return described(job)

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
        """Returns the losses of all steps so far."""
        with self._changed:
            known = list(job["losses"] or self._live.get(job["id"], ()))
        return known or self._saved_losses(job)

    def _saved_losses(self, job: dict[str, Any]) -> list[float]:
        found = checkpoints_of(self._output(job))
        return found[-1][1] if found else []

    def _note(self, job: dict[str, Any], status: str, text: str) -> None:
        """Stores a job on disk with a new state, and with `text` among its events, and then changes the job.

        Raises:
            OSError: the job cannot be stored; it has not changed then.
        """
        now = int(time.time())
        is_over = status in _ENDED
        changed = {
            "status": status, "finished_at": now if is_over else None, "messages": [*job["messages"], [now, text]],
            "error": job["error"] if is_over else None,
        }  # fmt: skip
        path = self._folder / str(job["id"]) / "job.json"
        write_private(path.with_suffix(".new"), json.dumps({**job, **changed}))
        os.replace(path.with_suffix(".new"), path)
        job.update(changed)

    def _note_or_log(self, job: dict[str, Any], status: str, text: str) -> None:
        """Calls `_note`. If the job cannot be stored, logs this and gives the job its new state in memory only."""
        try:
            self._note(job, status, text)
        except OSError as exc:
            job["status"] = status
            _log.error("a job could not be stored (%s)", exc.strerror)

    def _go_on(self, job: dict[str, Any]) -> None:
        """Queues a job whose process ended while it ran. If its adapter was already published, the job has
        succeeded."""
        is_published = job["losses"] and not self._output(job).exists() and (self._adapters / job["adapter"]).exists()
        if is_published:
            self._note_or_log(job, "succeeded", f"The adapter {job['adapter']} is served.")
        else:
            self._note_or_log(job, "queued", "The job goes on after the end of the process that ran it.")

    def _run(self) -> None:
        """Runs queued jobs, the oldest first, until the endpoint ends. The worker thread for jobs runs this method."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._next() is not None)
                job = None if self._is_closed else self._next()
                if job is None:
                    return
                self._note_or_log(job, "running", "The job runs.")
                job["losses"], self._live[job["id"]] = [], self._saved_losses(job)
            self._train(job)

    def _next(self) -> dict[str, Any] | None:
        queued = [job for job in self._jobs.values() if job["status"] == "queued"]
        return min(queued, key=lambda job: job["created_at"], default=None)

    def _train(self, job: dict[str, Any]) -> None:
        def check() -> None:
            if self._is_closed or job["status"] != "running":
                raise JobStopped("the job was stopped")

        def note_step(step: int, loss: float) -> None:
            with self._changed:
                live = self._live[job["id"]]
                live[step - 1 :] = [loss]
                self._num_steps += 1

        try:
            data = self._folder / str(job["id"]) / "data.jsonl"
            result = train(self._session, data, self._output(job), job["settings"], check, note_step, self._pause)
            with self._changed:  # no cancel may come between the check and the end
                check()
                job["losses"], job["tokens"] = result.losses, result.tokens
                self._note(job, "running", "The adapter is complete.")
                publish(self._output(job), self._adapters / job["adapter"])
                self._note_or_log(job, "succeeded", f"The adapter {job['adapter']} is served.")
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
            self._note_or_log(job, "failed", "The job failed.")


def _stored(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the jobs that are stored in a folder. A job that cannot be read is left out, and the log says so."""
    for path in folder.glob("ftjob-*/job.json"):
        try:
            job = json.loads(path.read_text(encoding="utf-8"))
            if job["id"] != path.parent.name:
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError):
            _log.error("a stored job cannot be read, and is left out")
            continue
        yield job
