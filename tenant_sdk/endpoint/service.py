"""This module holds the objects that the routes share: the engine, the names of models, prompts, grammars and the rules
for the release of numbers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from noise.off import READABLE
from tenant_sdk.endpoint.errors import bad_request
from tenant_sdk.endpoint.grammar import Grammars
from tenant_sdk.endpoint.logprobs import TokenTexts
from tenant_sdk.endpoint.metrics import Metrics
from tenant_sdk.endpoint.models import ModelNames
from tenant_sdk.endpoint.privacy import Released
from tenant_sdk.endpoint.prompts import Prompts
from tenant_sdk.endpoint.settings import EndpointSettings
from tenant_sdk.serving.answer import Answer
from tenant_sdk.serving.engine import Engine
from tenant_sdk.session_protocol import TextSession
from tenant_sdk.text.ready import ReadyText, ReadyTokens
from tenant_sdk.text.rows import CutWarning
from tenant_sdk.warn import warn_and_go_on
from wire.errors import VeilbaseError, VerificationFailed


class Service:
    """Holds the parts of one endpoint."""

    def __init__(
        self, client: TextSession, engine: Engine, names: ModelNames, released: Released, settings: EndpointSettings,
        privacy: str, on_end: Callable[[VeilbaseError], None],
    ) -> None:  # fmt: skip
        """Keeps the parts.

        Args:
            client: the tenant's session.
            engine: an engine over this session.
            names: the names of models.
            released: which numbers may be released.
            privacy: the privacy in force, a line for each subject.
            settings: where the endpoint listens, and its limits.
            on_end: called once, in any thread, with the error after which this endpoint cannot handle requests any
                more.
        """
        text = client.text
        self.engine, self.names, self.released, self.settings = engine, names, released, settings
        self.privacy = privacy
        self.vocab_size = len(text.tokenizer)
        self._context, self._is_padded = client.context_length, client.bucket is not None
        self._most_characters = self._context * max(map(len, text.tokenizer.get_vocab()), default=1)
        self.prompts = Prompts(copy.deepcopy(text.tokenizer), is_trusted=text.origin != "provider")
        self.grammars = Grammars(copy.deepcopy(text.tokenizer), text.stop_ids, settings.limits.schema_bytes)
        self.token_texts = TokenTexts(copy.deepcopy(text.tokenizer))
        self.metrics = Metrics(self._gauges)
        self.ended_by: VeilbaseError | None = None
        self.count_jobs: Callable[[], Mapping[str, float]] = dict
        """Returns the numbers of jobs and of their steps, for the metrics."""
        self._on_end = on_end

    def submit(self, prompt: Any, adapter: str | None, options: Mapping[str, Any], on_text: Any) -> Answer:
        """Asks the engine for one answer.

        Raises:
            HttpError: the prompt is larger than the model's context, and prompts are not padded.
            VeilbaseError: the engine refused the request, or the endpoint has ended.
        """
        if self.ended_by is not None:
            raise copy.copy(self.ended_by)
        prompt = self._of_possible_size(prompt)
        try:
            answer = self.engine.submit(prompt, adapter, on_text=on_text, **options)
        except VeilbaseError as exc:
            self.note(exc, is_engine=type(exc) is VeilbaseError)
            raise
        answer.add_done_callback(lambda each: self.note(each.error))
        return answer

    def _of_possible_size(self, prompt: Any) -> Any:
        """Returns a prompt that is not so large that its tokenizer would take seconds for it while other requests wait.

        With padded prompts (`pad_rows`) a larger one loses its beginning, as every prompt longer than the bucket does:
        the provider would see a refusal. The tokens that the bucket keeps are the same.

        Raises:
            HttpError: the prompt cannot fit into the model's context, and prompts are not padded.
        """
        if isinstance(prompt, ReadyTokens):
            size, most, unit = len(prompt.token_ids), self._context, "tokens"
        else:
            texts = [prompt.text] if isinstance(prompt, ReadyText) else [turn["content"] for turn in prompt]
            size, most, unit = sum(map(len, texts)), self._most_characters, "characters"
        if size <= most:
            return prompt
        if not self._is_padded:
            raise bad_request(f"the prompt has {size} {unit}, and the model's context holds {most} at most")
        warn_and_go_on(f"a prompt has {size} {unit}: its beginning is left out before it is tokenized", CutWarning)
        return _last_part(prompt, most)

    def note(self, error: VeilbaseError | None, is_engine: bool = False) -> None:
        """Ends the endpoint for good if the error is a reply that failed its check, or (`is_engine`) the end of the
        engine."""
        if self.ended_by is None and error is not None and (is_engine or isinstance(error, VerificationFailed)):
            self.ended_by = copy.copy(error)
            self._on_end(self.ended_by)

    def health(self) -> str:
        """Returns `ok`, or `ended` after an error that cannot be recovered from."""
        return "ok" if self.ended_by is None else "ended"

    def status(self) -> dict[str, Any]:
        """Returns what the web page shows: the numbers of running and waiting requests, each adapter with its tier, the
        privacy in force, and a warning if the mask hides nothing."""
        engine, tiers = self.engine.status(), self.names.tiers()
        privacy = [re.split(" {2,}", line, maxsplit=1) for line in self.privacy.splitlines() if "  " in line]
        readable = next((text for name, text in privacy if name == READABLE), None)
        return {
            "running": engine.num_running,
            "waiting": engine.num_waiting,
            "adapters": None if tiers is None else [{"name": name, "tier": tier} for name, tier in tiers],
            "privacy": privacy,
            "warning": None if readable is None else f"{READABLE}: {readable}",
        }

    def _gauges(self) -> dict[str, float]:
        status = self.engine.status()
        return {
            "requests_running": status.num_running,
            "requests_waiting": status.num_waiting,
            "kv_reserved_bytes": status.reserved_bytes,
            "requests_preempted": status.num_preemptions,
            "is_serving": 1.0 if self.ended_by is None else 0.0,
            **self.names.load_counts(),
            **self.count_jobs(),
        }


def _last_part(prompt: Any, most: int) -> Any:
    """Returns a prompt with its last `most` tokens or characters. All messages stay, the first ones perhaps empty."""
    if isinstance(prompt, ReadyTokens):
        return ReadyTokens(prompt.token_ids[-most:])
    if isinstance(prompt, ReadyText):
        return replace(prompt, text=prompt.text[-most:])
    turns: list[dict[str, str]] = []
    for turn in reversed(prompt):
        begin = max(0, len(turn["content"]) - most)
        turns.append({**turn, "content": turn["content"][begin:]})
        most -= len(turns[-1]["content"])
    return turns[::-1]
