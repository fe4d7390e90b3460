"""This module keeps fine-tuning jobs (`/v1/fine_tuning/jobs`), runs them one after another beside serving, and handles
their routes and those of training files.

A job trains an adapter by `finetune`, and can be stopped between two forward passes. The adapter is written beside the
jobs and moved into the folder of adapters when it is complete, so that no request sees an incomplete adapter. A job
that was stopped, or whose process died, resumes from its last checkpoint.

Training and the engine share the processors and the provider, and training waits for the engine (`Turns`), so that
answers stay fast. While the engine computes a step for its requests, a job goes on for a short time, its slice, and
then waits at its next call to the provider until the step is over. Without requests a job never waits.

Clients see jobs, their events and their checkpoints as objects of OpenAI's interface. Jobs and events are listed in
pages, so that looking at a job of a million steps costs no more than looking at a short one.

Guarantees:
- a client's request (to create, cancel or resume a job) is on disk before the client is told so. A job therefore
  survives a crash: if it was running, it is queued again and resumes from its last checkpoint. The losses of the steps
  after this checkpoint are in memory only, since a resumed job computes them again;
- a job's record holds settings, states and losses, and nothing of its data;
- if the disk is full, the request fails, or the running job fails, and the next job runs;
- the engine never waits for a job; a job gets at least one call for each step of the engine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from peft import LoraConfig
from pydantic import Field, Tag

from noise.disk.private_files import make_private_folder, write_private
from tenant_sdk.endpoint.errors import HttpError, bad_request, link_or_copy, storing
from tenant_sdk.endpoint.schema import NUMBER, TEXT, ClientNotes, Strict, one_of, parsed
from tenant_sdk.endpoint.uploads import Uploads
from tenant_sdk.model.run_state import NO_MODEL, run_states
from tenant_sdk.training.checkpoints import checkpoints_folder
from tenant_sdk.training.finetune import finetune
from tenant_sdk.training.settings import FinetuneOptions, FinetuneResult
from tenant_sdk.training.waiting import WAIT_S
from wire.errors import ConfigurationError, DatasetError, VeilbaseError

_SHARE = 0.5
"""A job's slice, as a share of the shortest of the last steps. Even if a step stands still while they overlap, answers
then take half as long again."""
NUM_STEPS = 16
"""The number of last steps among which the shortest one is taken: a step that overlapped, or that read a long prompt,
says little about how fast the engine can be."""


class Turns:
    """Holds whether the engine computes a step, how long its last steps took, and when the job's slice began."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, most_wait_s: float = 2.0) -> None:
        """Makes turns without a step.

        Args:
            clock: Returns the present time in seconds.
            most_wait_s: The most seconds that a job waits for one step, which may itself wait for a provider that is
                away.
        """
        self.most_wait_s = most_wait_s
        self._clock = clock
        self._changed = threading.Condition()
        self._is_in_step = False
        self._lasted_s: deque[float] = deque([0.0], maxlen=NUM_STEPS)
        self._slice_began = clock()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Returns a context in which the engine computes a step."""
        began = self._clock()
        self._is_in_step = True
        try:
            yield
        finally:
            with self._changed:
                self._is_in_step = False
                self._lasted_s.append(self._clock() - began)
                self._changed.notify_all()

    def pause(self) -> None:
        """Waits until no step is computed, if the job's slice is over; the job calls this before each of its calls."""
        with self._changed:
            if self._clock() - self._slice_began < _SHARE * min(self._lasted_s):
                return
            self._changed.wait_for(lambda: not self._is_in_step, self.most_wait_s)
            self._slice_began = self._clock()


SAVE_STEPS = 5
"""The number of optimizer steps from one checkpoint to the next."""


_TAKEN = "name_taken"
"""The code of the error that says that an adapter of the job's name is there already."""


class _NameTaken(ConfigurationError):
    """Says that an adapter of the job's name is there already."""


class JobStopped(Exception):
    """Says that a job was asked to stop. The worker thread for jobs catches this exception; no user sees it."""


class StoppableSession:
    """Wraps a session. Its models call `check`, which raises `JobStopped` to stop the job, before every forward pass,
    and `pause` before every call to the provider."""

    def __init__(self, session: Any, check: Callable[[], None], pause: Callable[[], None]) -> None:
        self._session, self._check, self._pause = session, check, pause
        self.loaded: tuple[Any, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def load_model(self) -> Any:
        """Returns a model that calls `check` before its embeddings, with which every forward pass begins."""
        model = self._session.load_model()
        states = run_states(model)
        if states is not NO_MODEL:  # which other models share
            states.before_call = self._pause
        model.get_input_embeddings().register_forward_pre_hook(lambda *_: self._check())
        return model


def train(
    session: Any, data: Path, output: Path, settings: dict[str, Any], check: Callable[[], None],
    on_step: Callable[[int, float], None], pause: Callable[[], None],
) -> FinetuneResult:  # fmt: skip
    """Trains an adapter, and resumes from the job's last checkpoint if there is one.

    Args:
        session: the tenant's session.
        data: the job's JSONL file.
        output: the adapter's folder; checkpoints are beside it.
        settings: num_epochs, batch_size, learning_rate, seed, rank and max_steps.
        check: called before every forward pass, and several times a second during a wait for the provider; raises
            `JobStopped` if the job should stop.
        on_step: called with the number and the loss of each optimizer step.
        pause: called before every call to the provider; it may wait.

    Raises:
        JobStopped: the job was stopped.
        VeilbaseError: the run failed.
    """
    rank = settings["rank"]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    options = FinetuneOptions(
        max_steps=settings["max_steps"], num_epochs=settings["num_epochs"], batch_size=settings["batch_size"],
        learning_rate=settings["learning_rate"], seed=settings["seed"], save_steps=SAVE_STEPS, overwrite=True,
        provider_wait_s=WAIT_S, progress=False,
    )  # fmt: skip
    stoppable: Any = StoppableSession(session, check, pause)
    return finetune(stoppable, data, config, output, options, on_step=on_step, while_waiting=check)


def _publish(output: Path, adapter: Path) -> None:
    """Moves a complete adapter into the folder of adapters.

    Raises:
        ConfigurationError: the folder cannot be written.
    """
    try:
        os.rename(output, adapter)
    except OSError as exc:
        raise ConfigurationError(f"the adapter cannot be moved to the folder of adapters: {exc.strerror}") from exc


def _checkpoints_of(output: Path) -> list[tuple[int, list[float]]]:
    """Returns for each complete checkpoint of a run, in order: its step, and the losses of all steps up to it."""
    found = []
    for mark in checkpoints_folder(output).glob("checkpoint-*/complete"):
        try:
            state = json.loads((mark.parent / "trainer_state.json").read_text(encoding="utf-8"))
            losses = [float(entry["loss"]) for entry in state["log_history"] if "loss" in entry]
            found.append((int(state["global_step"]), losses))
        except (OSError, ValueError, KeyError, TypeError):  # it is being removed
            continue
    return sorted(found)


_BASE_RATE = FinetuneOptions.learning_rate
"""The learning rate at a `learning_rate_multiplier` of 1."""
_PAGE, _MOST_IN_PAGE = 20, 1000
"""How many entries of a list are given by default, as by OpenAI, and at most."""
_MOST_POINTS = 256
"""The most points of a loss curve."""


def described(job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the description of a job."""
    settings = job["settings"]
    shown = {"n_epochs": settings["num_epochs"], "batch_size": settings["batch_size"]}
    shown["learning_rate_multiplier"] = settings["learning_rate"] / _BASE_RATE
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


def _checkpoint_list(job: Mapping[str, Any], found: Sequence[tuple[int, float | None]]) -> dict[str, Any]:
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


MOST_JOBS = 256
"""The most jobs that are remembered, ended ones included; further ones are refused."""
_ENDED = ("succeeded", "failed", "cancelled")
_log = logging.getLogger("veilbase.endpoint")


class Jobs:
    """Holds the fine-tuning jobs of one endpoint, and the thread that runs them."""

    def __init__(
        self, session: Any, folder: Path, adapters: Path, on_error: Callable[[VeilbaseError], None],
        shown: Callable[[float], float], pause: Callable[[], None], served: Callable[[], Collection[str]],
    ) -> None:  # fmt: skip
        """Reads the jobs that an earlier process has stored, and queues those that had not ended.

        Args:
            session: the tenant's session, with which jobs train.
            folder: a private folder for the jobs, on the same file system as `adapters`.
            adapters: the folder to which complete adapters are moved.
            on_error: called with the VeilbaseError that ended a job; other errors are only stored with the job.
            shown: returns a loss in the form in which clients may see it.
            pause: called before every call of a job to the provider; it may wait.
            served: returns the names of the adapters that are served, those of a catalogue included.
        """
        self._session, self._folder, self._adapters, self._on_error = session, folder, adapters, on_error
        self._shown, self._pause, self._served = shown, pause, served
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
            settings: see `train`.
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
        """Refuses the name of another adapter or job, or of the base model."""
        jobs = [job["adapter"] for job in self._jobs.values() if job["status"] not in ("failed", "cancelled")]
        if self._is_taken(adapter, base, *jobs):
            raise bad_request("an adapter has this name already: choose another suffix", "suffix", _TAKEN)

    def _is_taken(self, adapter: str, *more: str) -> bool:
        """Returns whether an adapter of the folder or of the catalogue has this name, or one of `more` is this name,
        also if only the case of its letters differs: the folder of adapters may then not be opened again."""
        taken = [*more, *(path.name for path in self._adapters.iterdir()), *self._served()]
        return adapter.casefold() in {each.casefold() for each in taken}

    def described(self, job_id: str) -> dict[str, Any]:
        """Returns the description of a job, as an object of OpenAI's interface.

        Raises:
            HttpError: there is no such job.
        """
        return described(self._job(job_id))

    def listed(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Returns a page of the list of jobs, the newest first. Args, Raises: see `job_page`."""
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
        found = _checkpoints_of(self._output(job))
        return _checkpoint_list(job, [(step, self._shown(losses[-1]) if losses else None) for step, losses in found])

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
        found = _checkpoints_of(self._output(job))
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
                if self._is_taken(job["adapter"], job["model"]):  # by one that came while the job ran
                    raise _NameTaken(
                        f"an adapter {job['adapter']} is there already: rename it, and let the job go on (resume)"
                    )
                _publish(self._output(job), self._adapters / job["adapter"])
                self._note_or_log(job, "succeeded", f"The adapter {job['adapter']} is served.")
        except JobStopped:
            return  # cancelled, which was written down, or goes on with the next process
        except _NameTaken as exc:
            self._fail(job, str(exc), _TAKEN, "suffix")
        except VeilbaseError as exc:
            code = next(each.__name__ for each in type(exc).__mro__ if not each.__name__.startswith("_"))
            self._fail(job, str(exc), code, "training_file" if isinstance(exc, DatasetError) else None)
            self._on_error(exc)
        except Exception as exc:  # noqa: BLE001 - its text may show rows
            self._fail(job, f"training failed ({type(exc).__name__})", "failed")

    def _fail(self, job: dict[str, Any], text: str, code: str, param: str | None = None) -> None:
        """Ends a job with an error; `param` is the field of its request that is at fault, if one is."""
        with self._changed:
            job["error"] = {"code": code, "message": text, "param": param}
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


_Auto = Annotated[Literal["auto"], Tag(TEXT)]
_CHOICE = one_of("auto or a number")


class _Hyperparameters(Strict):
    n_epochs: Annotated[_Auto | Annotated[int, Field(ge=1, le=1000), Tag(NUMBER)], _CHOICE] = "auto"
    batch_size: Annotated[_Auto | Annotated[int, Field(ge=1, le=1024), Tag(NUMBER)], _CHOICE] = "auto"
    learning_rate_multiplier: Annotated[_Auto | Annotated[float, Field(gt=0, le=1000), Tag(NUMBER)], _CHOICE] = "auto"
    max_steps: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    rank: Annotated[int, Field(ge=1, le=256)] = 16


class _Supervised(Strict):
    hyperparameters: _Hyperparameters = Field(default_factory=_Hyperparameters)


class _Method(Strict):
    type: Literal["supervised"]
    supervised: _Supervised = Field(default_factory=_Supervised)


class JobRequest(ClientNotes):
    """Holds a request for a new fine-tuning job."""

    model: str = Field(min_length=1, max_length=512)
    training_file: str = Field(min_length=1, max_length=64)
    suffix: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    seed: int = Field(0, ge=0, lt=1 << 31)
    hyperparameters: _Hyperparameters | None = None
    method: _Method | None = None


class JobRoutes:
    """Handles requests whose path is that of a training file or a fine-tuning job."""

    def __init__(self, base: str, uploads: Uploads, jobs: Jobs) -> None:
        """Keeps the arguments; `base` is the base model's name."""
        self._base, self._uploads, self._jobs = base, uploads, jobs

    def answer(
        self, method: str, path: str, query: Mapping[str, str], content_type: str, body: bytes,
        is_gone: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any] | None:  # fmt: skip
        """Handles one request. Returns the response, or None if there is no such route.

        Args:
            method, path, query, content_type, body: the request's parts.
            is_gone: returns whether the client has gone away, so that long work for it may end.

        Raises:
            HttpError: the request is refused.
            ClientGone: the client went away.
        """
        parts = path.removeprefix("/v1/").split("/")
        if parts[0] == "files":
            return self._files(method, parts[1:], content_type, body, is_gone)
        if parts[:2] == ["fine_tuning", "jobs"]:
            return self._fine_tuning(method, parts[2:], query, body)
        return None

    def _files(
        self, method: str, rest: list[str], content_type: str, body: bytes, is_gone: Callable[[], bool]
    ) -> dict[str, Any] | None:  # fmt: skip
        match method, rest:
            case "GET", []:
                return self._uploads.listed()
            case "POST", []:
                return self._uploads.add(content_type, body, is_gone)
            case "GET", [file_id]:
                return self._uploads.get(file_id)
            case "DELETE", [file_id]:
                return self._uploads.delete(file_id)
        return None

    def _fine_tuning(
        self, method: str, rest: list[str], query: Mapping[str, str], body: bytes
    ) -> dict[str, Any] | None:  # fmt: skip
        match method, rest:
            case "GET", []:
                return self._jobs.listed(query)
            case "POST", []:
                return self._create(body)
            case "GET", [job_id]:
                return self._jobs.described(job_id)
            case "GET", [job_id, "events"]:
                return self._jobs.events(job_id, query)
            case "GET", [job_id, "losses"]:
                return self._jobs.losses(job_id)
            case "GET", [job_id, "checkpoints"]:
                return self._jobs.checkpoints(job_id)
            case "POST", [job_id, "cancel" | "pause"]:
                return self._jobs.cancel(job_id)
            case "POST", [job_id, "resume"]:
                return self._jobs.resume(job_id)
        return None

    def _create(self, body: bytes) -> dict[str, Any]:
        request = parsed(JobRequest, body)
        if request.model != self._base:
            text = f"jobs train adapters of the base model only, which is {self._base} here"
            raise HttpError(404, text, "model_not_found", "model")
        if request.hyperparameters is not None and request.method is not None:
            raise bad_request("hyperparameters stand in the method, or beside it, and not in both", "hyperparameters")
        chosen = request.hyperparameters or (request.method or _Method(type="supervised")).supervised.hyperparameters
        if chosen.max_steps is not None and chosen.n_epochs != "auto":
            raise bad_request("n_epochs has no effect beside max_steps: leave one of them out", "hyperparameters")
        rate = 1.0 if chosen.learning_rate_multiplier == "auto" else chosen.learning_rate_multiplier
        settings = {
            "num_epochs": FinetuneOptions.num_epochs if chosen.n_epochs == "auto" else float(chosen.n_epochs),
            "batch_size": FinetuneOptions.batch_size if chosen.batch_size == "auto" else chosen.batch_size,
            "learning_rate": _BASE_RATE * rate, "seed": request.seed, "rank": chosen.rank,
            "max_steps": chosen.max_steps,
        }  # fmt: skip
        data = self._uploads.path(request.training_file)
        return self._jobs.create(request.model, request.training_file, data, request.suffix, settings, request.metadata)
