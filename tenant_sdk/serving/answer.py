"""The handle of one request: its text as it comes, its end, and the way to cancel it; for use from any thread."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Literal

from wire.errors import DeadlineExceeded, VeilbaseError

FinishReason = Literal["stop", "length", "cancelled"]
"""How an answer ended: at a stop token or stop string, at its length limit, or because it was cancelled."""


class Answer:
    """What comes of one request. The engine's thread writes it; all others read it."""

    def __init__(self, num_prompt_tokens: int, cancel: Callable[[], None]) -> None:
        """Args: num_prompt_tokens: of the prompt, without padding; cancel: asks the engine to end the request."""
        self.num_prompt_tokens = num_prompt_tokens
        self.token_ids: list[int] = []
        """The tokens of the answer so far; it grows until the answer is done."""
        self.finish_reason: FinishReason | None = None
        self._cancel = cancel
        self._changed = threading.Condition()
        self._pieces: list[str] = []
        self._error: VeilbaseError | None = None
        self._is_done = False
        self._callbacks: list[Callable[[Answer], None]] = []

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come."""
        return self._is_done

    @property
    def error(self) -> VeilbaseError | None:
        """The reason why the request failed, if it did."""
        return self._error

    def cancel(self) -> None:
        """Ends the request after the step that is being computed; does nothing when it is done."""
        if not self._is_done:
            self._cancel()

    def __iter__(self) -> Iterator[str]:
        """Yields the pieces of text from the first on, each as soon as it is there.

        Raises:
            VeilbaseError: the request failed; what came before was yielded.
        """
        num_given = 0
        while fresh := self._pieces_after(num_given):
            num_given += len(fresh)
            yield from fresh
        self._raise_error()

    def _pieces_after(self, num_given: int) -> list[str]:
        """Waits for a piece that was not given yet; returns none at the end."""
        with self._changed:
            self._changed.wait_for(lambda: num_given < len(self._pieces) or self._is_done)
            return self._pieces[num_given:]

    def result(self, timeout_s: float | None = None) -> str:
        """Waits for the end and returns the whole text; of a cancelled request, what there was.

        Args:
            timeout_s: seconds to wait; None for as long as it takes.

        Raises:
            DeadlineExceeded: the answer is not complete in this time; it goes on.
            VeilbaseError: the request failed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_done, timeout_s):
                raise DeadlineExceeded(f"the answer was expected within {timeout_s} s, and is not complete")
        self._raise_error()
        return "".join(self._pieces)

    def add_done_callback(self, callback: Callable[[Answer], None]) -> None:
        """Has a function called when the answer is done, at once if it is: in the engine's thread, so briefly.

        What it raises there is logged by its kind, and changes nothing.
        """
        with self._changed:
            if not self._is_done:
                self._callbacks.append(callback)
                return
        callback(self)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise copy.copy(self._error) from None  # several threads may raise it, each with a traceback of its own

    def put(self, text: str) -> None:
        """Adds a piece; for the engine."""
        if text:
            with self._changed:
                self._pieces.append(text)
                self._changed.notify_all()

    def finish(self, reason: FinishReason | None, error: VeilbaseError | None = None) -> None:
        """Ends the answer, with an error if it failed; for the engine. Only the first end counts."""
        with self._changed:
            if self._is_done:
                return
            self.finish_reason, self._error, self._is_done = reason, error, True
            self._changed.notify_all()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception as exc:  # noqa: BLE001 - a function of the user's; its text may show the answer
                logging.getLogger(__name__).error("a callback of an answer failed (%s)", type(exc).__name__)
