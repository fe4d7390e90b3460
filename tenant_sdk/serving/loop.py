"""This module holds the loop of an engine: the thread that plans a step, computes the rows of its requests with the
model, chooses each request's next token, and begins again.

All other threads add requests, cancel them and read answers. A request belongs to the loop from `add` until its answer
is done.

Rows of many requests share a call. In `generate`, a value that is NaN or infinite ends the answer, or makes the whole
model send zeros (tenant_sdk/model/run_state.py). In the engine, this would end or spoil the answers of other requests.
A step that stopped early would also show the provider in which layer the value appeared. So here such a value ends only
the request that has it, and is hidden from the provider (`LosesRows`).

Guarantees:
- every request that was added is ended exactly once: by its own end, by its own failure, by the failure of a step that
  has its rows, by `cancel`, or by the end of the loop. Nothing is retried;
- a step makes all its calls with all its rows, whether values are finite or not. A row that is not finite is sent as a
  row of zeros under a fresh mask, and the model gets NaN as the row's product. So the row stays NaN up to the last
  hidden state, in which the engine finds it and gives up the request;
- a value that is not finite is reported only for the request that has this value in one of its rows.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from tenant_sdk.model.run_state import RunState, run_states
from tenant_sdk.serving.adapters.loan import Lender
from tenant_sdk.serving.kv import KvLayout, RequestKv
from tenant_sdk.serving.prefix_cache import PrefixCache
from tenant_sdk.serving.ragged import RaggedModel
from tenant_sdk.serving.requests import Request
from tenant_sdk.serving.scheduler import Scheduler, Step
from tenant_sdk.serving.speculation.drafter import Drafter
from wire.errors import ConfigurationError, QuotaExceeded, VeilbaseError, VerificationFailed


class LosesRows(RunState):
    """Decides what the calls of an engine's model send. A row that is not finite is sent as zeros, and the other rows
    of the call are sent as they are."""

    def __init__(self) -> None:
        """Makes the state of a run that makes all its calls, whatever the values are."""
        super().__init__(may_stop=False)
        self._is_repaired = False

    def finite_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows, with zeros in place of each row that is not finite."""
        self._is_repaired = True
        return torch.where(torch.isfinite(rows).all(dim=-1, keepdim=True), rows, 0.0)

    def product_of(self, rows: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """Returns the product with NaN in the rows that were sent as zeros."""
        if not self._is_repaired:
            return product
        self._is_repaired = False
        return torch.where(torch.isfinite(rows).all(dim=-1, keepdim=True), product, torch.nan)


@dataclass(frozen=True)
class SegmentResult:
    """Holds the result of a segment, which is the rows of one request in a step.

    Attributes:
        logits: the logits of the next token, float32, shape (num_wanted, vocab_size), with a row for each row of the
            segment whose logits are wanted; None if the prompt is not complete yet.
        is_finite: whether all last hidden states are finite, and each row of logits has a finite maximum, so that
            single logits may be minus infinity.
    """

    logits: torch.Tensor | None = field(repr=False)
    is_finite: bool


class StepRunner:
    """Computes steps with one model, its adapters and its keys and values."""

    def __init__(
        self, model: RaggedModel, layout: KvLayout, lender: Lender, kv_device: torch.device,
        drafter: Drafter | None = None,
    ) -> None:  # fmt: skip
        """Keeps the model, the layout and the store with which steps are computed.

        Args:
            model: the model that computes the rows.
            layout: the layout of the keys and values that requests get.
            lender: the store of adapters.
            kv_device: the device on which requests' keys and values are kept.
            drafter: drafts tokens before each step; None without speculation.
        """
        self._model, self._layout, self._lender, self._drafter = model, layout, lender, drafter
        self._device: torch.device = model.model.device
        self._kv_device = kv_device

    def run(self, step: Step, requests: Sequence[Request]) -> list[SegmentResult]:
        """Drafts tokens if there is a drafter, computes the step, and adds the new keys and values to those of the
        step's requests.

        Args:
            step: the segments to compute.
            requests: the request of each segment.

        Returns:
            The result of each segment.

        Raises:
            VeilbaseError: a call to the provider failed, or the engine does not serve the model.
        """
        if self._drafter is not None:
            self._drafter.draft(step.segments, requests)
        rows = [request.rows(segment) for segment, request in zip(step.segments, requests, strict=True)]
        parts = [
            request.rows_of(segment, self._make_kv) for segment, request in zip(step.segments, requests, strict=True)
        ]
        with self._lender.in_step(step.index_of_row):
            logits, is_finite = self._model.forward(
                parts,
                self._numbers([token_id for ids, _ in rows for token_id in ids]),
                self._numbers([position for _, positions in rows for position in positions]),
                self._numbers(_wanted(step)),
                lambda hidden: _pool(step, requests, hidden),
            )
        return _results(step, logits, is_finite)

    def _numbers(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _make_kv(self, num_tokens: int) -> RequestKv:
        return RequestKv(self._layout, num_tokens, self._kv_device)


def _wanted(step: Step) -> list[int]:
    """Returns the indices of the rows whose logits are wanted."""
    ends = accumulate(segment.num_rows for segment in step.segments)
    return [
        row for segment, end in zip(step.segments, ends, strict=True) for row in range(end - segment.num_wanted, end)
    ]


def _pool(step: Step, requests: Sequence[Request], hidden: torch.Tensor) -> None:
    """Gives each request the last hidden states of its rows, from those of all rows, shape (num_rows, hidden_size)."""
    begin = 0
    for segment, request in zip(step.segments, requests, strict=True):
        request.pool(segment, hidden[begin : begin + segment.num_rows])
        begin += segment.num_rows


def _results(step: Step, logits: torch.Tensor, is_finite: torch.Tensor) -> list[SegmentResult]:
    """Returns the result of each segment.

    Args:
        logits: the rows that `_wanted` names, shape (num_wanted, vocab_size).
        is_finite: one flag for each row of the step, shape (num_rows,).
    """
    largest_finite = torch.isfinite(logits.amax(dim=-1)).tolist()  # The maximum of a row with NaN is NaN.
    finite_rows = is_finite.tolist()
    results, begin, index = [], 0, 0
    for segment in step.segments:
        ok = all(finite_rows[begin : begin + segment.num_rows])
        begin += segment.num_rows
        if segment.samples:
            own = slice(index, index + segment.num_wanted)
            results.append(SegmentResult(logits[own], ok and all(largest_finite[own])))
            index = own.stop
        else:
            results.append(SegmentResult(None, ok))
    return results


DuringStep = Callable[[], AbstractContextManager[object]]
_CLOSED = "this engine was closed before the answer was complete"


@dataclass(frozen=True)
class EngineStatus:
    """Holds the numbers of an engine's running and waiting requests.

    Attributes:
        num_running: the requests that are admitted, so that their prompts or answers are being computed.
        num_waiting: the requests that are not admitted yet, or were preempted.
        reserved_bytes: the bytes of keys and values (KV) that the running requests reserve.
        kept_bytes: the bytes of KV of prompts that are kept for later requests.
        num_preemptions: how often a request gave up its KV for want of memory, to be computed again later.
    """

    num_running: int
    num_waiting: int
    reserved_bytes: int
    kept_bytes: int = 0
    num_preemptions: int = 0


class ServingLoop:
    """Computes the steps of one engine in a thread of its own until it is closed."""

    def __init__(
        self,
        model: Any,
        scheduler: Scheduler,
        layout: KvLayout,
        runner: StepRunner,
        lender: Lender,
        *,
        woken: threading.Event,
        max_waiting: int,
        clock: Callable[[], float],
        prefixes: PrefixCache | None = None,
        during_step: DuringStep = contextlib.nullcontext,
    ) -> None:
        """Keeps the parts of the engine. `start` begins to serve.

        Args:
            model: the model whose remote layers are called.
            scheduler: plans the steps.
            layout: the layout of keys and values, which gives the bytes that a request reserves.
            runner: computes steps.
            lender: the store of adapters, which the loop closes at its end.
            woken: an event that the store sets when an adapter becomes ready or fails.
            max_waiting: the most requests that wait.
            clock: returns the present time in seconds.
            prefixes: the kept prompts of ended requests, which the loop drops at its end.
            during_step: returns a context in which each step is computed.
        """
        self._during_step = during_step
        self._model, self._scheduler, self._layout, self._runner, self._lender = (
            model,
            scheduler,
            layout,
            runner,
            lender,
        )
        self._max_waiting, self._clock, self._prefixes = max_waiting, clock, prefixes
        self._lock = threading.Lock()
        self._woken = woken  # Set without `_lock`, since a store may hold its own lock when it sets this event.
        self._requests: dict[int, Request] = {}
        self._cancelled: set[int] = set()
        self._fresh: list[tuple[Request, str]] = []
        self._next_number = 0
        self._is_closed = False
        self._failure: VeilbaseError | None = None
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._serve, name="veilbase-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def next_number(self) -> int:
        """Returns a number for a new request.

        Raises:
            QuotaExceeded: too many requests wait.
            VeilbaseError: the loop has failed or was closed.
        """
        with self._lock:
            self._check_open()
            if len(self._requests) - self._scheduler.num_running >= self._max_waiting:
                raise QuotaExceeded(f"{self._max_waiting} requests wait already: try again later")
            number = self._next_number
            self._next_number += 1
        return number

    def add(self, request: Request, caller: str) -> None:
        """Queues a request.

        Raises:
            VeilbaseError: the loop has failed or was closed.
        """
        with self._lock:
            self._check_open()
            self._requests[request.number] = request
            self._fresh.append((request, caller))
        self._woken.set()

    def cancel(self, number: int) -> None:
        """Cancels a request; a request that is not known, or has ended, is ignored."""
        with self._lock:
            if number in self._requests:
                self._cancelled.add(number)
        self._woken.set()

    def status(self) -> EngineStatus:
        """Returns the numbers of running and waiting requests, and the bytes of their keys and values."""
        with self._lock:
            num_running = self._scheduler.num_running
            kept = 0 if self._prefixes is None else self._prefixes.num_bytes
            return EngineStatus(
                num_running, len(self._requests) - num_running, self._scheduler.reserved_bytes, kept,
                self._scheduler.num_preemptions,
            )  # fmt: skip

    def step_s(self) -> float:
        """Returns for how many seconds the present step has been computed; 0 between steps. It takes no lock."""
        began = self._step_began
        return 0.0 if began is None else self._clock() - began

    def close(self) -> None:
        """Ends the loop after the step that is being computed, and waits for this end, except in the loop's own
        thread."""
        with self._lock:
            self._is_closed = True
        self._woken.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise copy.copy(self._failure)
        if self._is_closed:
            raise ConfigurationError("this engine was closed")

    def _serve(self) -> None:
        """Computes steps until the engine is closed or fails, then fails all requests that have not ended. The engine's
        thread runs this."""
        failure: VeilbaseError = ConfigurationError(_CLOSED)
        try:
            with torch.no_grad(), run_states(self._model).within(LosesRows()):
                while (step := self._next_step()) is not None:
                    self._step_began = self._clock()
                    self._compute(step)
                    self._step_began = None
        except VerificationFailed as exc:
            failure = self._failure = copy.copy(exc)  # The traceback is left out, since its frames hold rows and masks.
        except BaseException as exc:  # noqa: BLE001 - nobody may wait for ever for a thread that is gone
            failure = self._failure = VeilbaseError(f"the engine failed ({type(exc).__name__})")
        finally:
            with self._lock:
                self._is_closed = True
                left = [self._forget(number) for number in tuple(self._requests)]
            for request in left:
                request.fail(failure)
            if self._prefixes is not None:
                self._prefixes.clear()
            self._lender.close()

    def _next_step(self) -> Step | None:
        """Waits until there are rows to compute, and returns the step; returns None when the engine is closed. Ends
        requests that are cancelled, or whose adapter failed, and takes the memory of those that are preempted."""
        while True:
            self._woken.clear()  # The flag is cleared before the state is read, so that no change is missed.
            with self._lock:
                if self._is_closed:
                    return None
                ended = self._take_in()
                step = self._scheduler.plan(self._clock())
            for number in step.preempted:
                self._requests[number].preempt()
            for request, error in ended:
                if error is None:
                    request.cancel()
                else:
                    request.fail(error)
            if step.segments:
                return step
            if not ended:
                self._woken.wait()

    def _take_in(self) -> list[tuple[Request, VeilbaseError | None]]:
        """Gives new requests to the scheduler, and removes requests that are cancelled or whose adapter failed.

        Returns:
            The removed requests, each with the failure of its adapter, or None if it was cancelled.
        """
        for request, caller in self._fresh:
            # With `fixed_length` all tokens are computed in any case, and none is computed twice, since how often it is
            # would depend on the texts of others.
            bytes_for = None if request.ending.fixed_length else self._layout.bytes_for
            self._scheduler.add(
                request.number, request.prompt.num_rows, self._layout.bytes_for(request.num_tokens), request, caller,
                request.start, bytes_for,
            )  # fmt: skip
        self._fresh.clear()
        ended: list[tuple[Request, VeilbaseError | None]] = [
            (self._forget(number), None) for number in self._cancelled if number in self._requests
        ]
        self._cancelled.clear()
        for number in self._scheduler.waiting():
            failure = self._requests[number].loan.failure
            if failure is not None:
                ended.append((self._forget(number), failure))
        return ended

    def _forget(self, number: int) -> Request:
        self._scheduler.remove(number)
        return self._requests.pop(number)

    def _compute(self, step: Step) -> None:
        """Computes a step with the model, and chooses the next tokens of each request whose prompt is computed. If the
        step fails, all its requests fail.

        Raises:
            VerificationFailed: a reply of the provider failed its check, which ends the session.
        """
        requests = [self._requests[segment.request] for segment in step.segments]
        try:
            with self._during_step():
                results = self._runner.run(step, requests)
        except VerificationFailed:
            raise
        except VeilbaseError as exc:
            self._end_all(requests, exc)
            return
        except Exception as exc:  # noqa: BLE001 - torch raises many kinds; their texts may show values
            self._end_all(requests, VeilbaseError(f"a step of the engine failed ({type(exc).__name__})"))
            return
        self._scheduler.advance(step)
        for request, result in zip(requests, results, strict=True):
            if not result.is_finite and not request.is_lost:
                request.lose()
            if request.is_lost and not request.ending.fixed_length:
                self._end(request)
            elif result.logits is not None:
                self._take(request, result.logits)

    def _take(self, request: Request, logits: torch.Tensor) -> None:
        num_known = len(request.known_ids)
        try:
            request.take(logits)
        except BaseException as exc:  # noqa: BLE001 - a hook of the user's may be native code that panics
            if not request.ending.fixed_length:
                self._end(request, _of_the_users(exc))
                return
            request.give_up(_of_the_users(exc), num_known)
        if request.is_over:
            self._end(request)
        else:
            with self._lock:
                self._scheduler.append(request.number, len(request.known_ids) - num_known)

    def _end(self, request: Request, error: VeilbaseError | None = None) -> None:
        with self._lock:
            self._forget(request.number)
        if error is None:
            try:
                request.finish()
            except BaseException as exc:  # noqa: BLE001 - `on_text` got the rest of the text
                error = _of_the_users(exc)
        if error is not None:
            request.fail(error)

    def _end_all(self, requests: Iterable[Request], error: VeilbaseError) -> None:
        for request in requests:
            self._end(request, error)


def _of_the_users(exc: BaseException) -> VeilbaseError:
    """Returns the error for a request whose logits hook or `on_text` raised an exception. The error does not quote the
    exception's text, which may show values."""
    if isinstance(exc, VeilbaseError):
        return exc
    return VeilbaseError(f"on_text or a logits_processor of this request failed ({type(exc).__name__})")
