"""This module handles requests to /v1/embeddings.

An embedding is the mean of the last hidden states of a text's tokens, scaled to the length 1. The base model or an
adapter computes it, without a chat template. Under a mask that leaves an error, embeddings are refused or rounded
(privacy.py); they are rounded before they are scaled, so that the scaling shows nothing more.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from functools import partial

import torch

from tenant_sdk.endpoint.completions import plain_prompts
from tenant_sdk.endpoint.errors import HttpError
from tenant_sdk.endpoint.http import Reply
from tenant_sdk.endpoint.schema import EmbeddingRequest, parsed
from tenant_sdk.endpoint.service import Answering, Service, in_thread
from tenant_sdk.serving.requests import Answer
from tenant_sdk.text.ready import ReadyText, ReadyTokens

_AT_A_TIME = 16
"""The most texts of a request that the engine gets at a time."""
_OPTIONS = {"max_new_tokens": 1, "do_sample": False, "pools": True}
"""The engine's options for a text. The engine chooses one token after it, which is not used."""

_FIELDS = {"prompt": "input", "max_new_tokens": "input"}


class Embeddings:
    """Handles requests for embeddings with an engine."""

    def __init__(self, service: Service) -> None:
        """Keeps the parts of the endpoint that the routes share."""
        self._service = service

    async def __call__(self, body: bytes) -> Reply:
        """Handles one request and returns the response.

        Raises:
            HttpError: the request is refused.
            VeilbaseError: the engine refuses it, or fails.
        """
        began = time.monotonic()
        request, adapter, prompts = await in_thread(self._prepare, body)
        answers: list[Answer] = []
        for start in range(0, len(prompts), _AT_A_TIME):
            answers += await self._embed(prompts[start : start + _AT_A_TIME], adapter)
        data = [
            {"object": "embedding", "index": index, "embedding": self._shown(answer.mean_hidden, request)}
            for index, answer in enumerate(answers)
        ]
        num_tokens = sum(answer.num_prompt_tokens for answer in answers)
        self._service.metrics.count_answer(num_tokens, 0, time.monotonic() - began)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return {"object": "list", "data": data, "model": request.model, "usage": usage}

    def _prepare(self, body: bytes) -> tuple[EmbeddingRequest, str | None, list[ReadyText | ReadyTokens]]:
        request = parsed(EmbeddingRequest, body)
        adapter = self._service.names.adapter_of(request.model)
        self._service.released.check("embeddings")
        return request, adapter, plain_prompts(request.input)

    async def _embed(self, prompts: Sequence[ReadyText | ReadyTokens], adapter: str | None) -> list[Answer]:
        async with Answering() as answering:
            submit = self._service.submit
            await answering.submit([partial(submit, prompt, adapter, _OPTIONS, _FIELDS) for prompt in prompts])
            await answering.texts()
            return answering.answers

    def _shown(self, mean_hidden: torch.Tensor | None, request: EmbeddingRequest) -> list[float] | str:
        """Returns an embedding as a list of numbers, or as the base64 text of little-endian float32 numbers.

        Raises:
            HttpError: rounding has made all numbers 0.
        """
        if mean_hidden is None:
            raise TypeError("an answer without its mean hidden state")
        rounded = self._service.released.rounded_vector(mean_hidden)
        if not bool(rounded.any()):
            raise HttpError(
                403,
                "rounded to four times --release-values, nothing is left of this embedding: a smaller STEP keeps more, "
                "0.25 the most with the default parameters of the mask",
                "values_not_released",
            )
        vector = torch.nn.functional.normalize(rounded, dim=0)
        if request.encoding_format == "base64":
            return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
        return [float(each) for each in vector.tolist()]
