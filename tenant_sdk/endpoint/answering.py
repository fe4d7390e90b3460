"""This module joins the answers of one HTTP request, which has several where n is above 1, into one stream of events
for asyncio.

Guarantees: if a request ends before an answer is complete, that answer is cancelled. A request ends early if its client
left, or if one of its answers failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from tenant_sdk.serving.answer import Answer

Submit = Callable[[Callable[[str], None]], Answer]
"""A function that asks the engine for one answer. Its argument is a function that gets each piece of text."""
T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """Runs a function in another thread and returns its result, so that the event loop can serve other requests.

    An example is writing the logprobs of a long answer, which takes seconds.
    """
    return await asyncio.get_running_loop().run_in_executor(None, work)


@dataclass(frozen=True)
class Piece:
    """Holds a piece of the text of one choice (one of the `n` answers to a request)."""

    index: int
    text: str


@dataclass(frozen=True)
class End:
    """Says that one choice is complete."""

    index: int
    answer: Answer


class Answering:
    """Holds the answers of one request. As an asynchronous context manager it cancels incomplete answers at its end."""

    def __init__(self) -> None:
        """Makes an object without answers. Callers must call it in the event loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Piece | End] = asyncio.Queue()
        self._lock = threading.Lock()
        self._is_over = False
        self.answers: list[Answer] = []

    async def submit(self, submits: Sequence[Submit]) -> None:
        """Asks the engine for all answers. This runs in another thread, since it tokenizes prompts and reads files.

        Raises:
            HttpError: a prompt is larger than the model's context.
            VeilbaseError: the engine refused one of them.
        """
        await asyncio.get_running_loop().run_in_executor(None, self._submit_all, submits)

    def _submit_all(self, submits: Sequence[Submit]) -> None:
        for index, submit in enumerate(submits):
            answer = submit(self._piece_of(index))
            with self._lock:
                self.answers.append(answer)
                is_over = self._is_over
            if is_over:  # the client left meanwhile
                answer.cancel()
                return
            answer.add_done_callback(self._end_of(index))

    def _piece_of(self, index: int) -> Callable[[str], None]:
        return lambda text: self._put(Piece(index, text))

    def _end_of(self, index: int) -> Callable[[Answer], None]:
        return lambda answer: self._put(End(index, answer))

    def _put(self, event: Piece | End) -> None:
        """Hands an event to the event loop; called in the engine's thread."""
        if not self._is_over:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def events(self) -> AsyncIterator[Piece | End]:
        """Yields the pieces and ends of all answers as they come.

        Raises:
            VeilbaseError: an answer failed.
        """
        num_left = len(self.answers)
        while num_left:
            event = await self._events.get()
            if isinstance(event, End):
                if event.answer.error is not None:
                    event.answer.result()  # raises a copy of the error
                num_left -= 1
            yield event

    async def texts(self) -> list[str]:
        """Waits for all answers and returns their texts. Raises: see `events`."""
        texts = [""] * len(self.answers)
        async for event in self.events():
            if isinstance(event, Piece):
                texts[event.index] += event.text
        return texts

    @property
    def num_prompt_tokens(self) -> int:
        """Returns the number of prompt tokens, without padding. A prompt counts once for each of its answers."""
        return sum(answer.num_prompt_tokens for answer in self.answers)

    @property
    def num_new_tokens(self) -> int:
        """Returns the number of tokens of all answers so far."""
        return sum(len(answer.token_ids) for answer in self.answers)

    async def __aenter__(self) -> Answering:
        """Returns this object."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancels the answers that are not complete, so that other requests can run."""
        with self._lock:
            self._is_over = True
            answers = list(self.answers)
        for answer in answers:
            answer.cancel()
