"""This module handles the routes of training files and fine-tuning jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from tenant_sdk.endpoint.errors import HttpError, bad_request
from tenant_sdk.endpoint.jobs import Jobs
from tenant_sdk.endpoint.schema import NUMBER, TEXT, ClientNotes, Strict, one_of, parsed
from tenant_sdk.endpoint.uploads import Uploads

_BASE_RATE = 1e-3
"""The learning rate at a `learning_rate_multiplier` of 1, which is the default of `TenantClient.finetune`."""
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
            raise HttpError(404, "jobs train adapters of the base model: see /v1/models", "model_not_found", "model")
        if request.hyperparameters is not None and request.method is not None:
            raise bad_request("hyperparameters stand in the method, or beside it, and not in both", "hyperparameters")
        chosen = request.hyperparameters or (request.method or _Method(type="supervised")).supervised.hyperparameters
        rate = 1.0 if chosen.learning_rate_multiplier == "auto" else chosen.learning_rate_multiplier
        settings = {
            "num_epochs": 3.0 if chosen.n_epochs == "auto" else float(chosen.n_epochs),
            "batch_size": 8 if chosen.batch_size == "auto" else chosen.batch_size,
            "learning_rate": _BASE_RATE * rate, "seed": request.seed, "rank": chosen.rank,
            "max_steps": chosen.max_steps,
        }  # fmt: skip
        data = self._uploads.path(request.training_file)
        return self._jobs.create(request.model, request.training_file, data, request.suffix, settings, request.metadata)
