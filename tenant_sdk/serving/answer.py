"""This module holds the handle of one request, which gives the answer piece by piece, waits for the end and can cancel
the request.

Any thread may use the handle.
"""

from __future__ import annotations

import copy
import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Literal

import torch

from wire.errors import DeadlineExceeded, VeilbaseError

FinishReason = Literal["stop", "length", "cancelled"]
"""How an answer ended: at a stop token or stop string, at its length limit, or because it was cancelled."""


class Answer:
    """Holds the answer to one request. The engine's thread writes the answer; all other threads read it."""

    def __init__(self, num_prompt_tokens: int, cancel: Callable[[], None]) -> None:
        """Makes an answer that has no text yet.

        Args:
            num_prompt_tokens: the number of tokens of the prompt, without padding.
            cancel: a function that asks the engine to end the request.
        """
        self.num_prompt_tokens = num_prompt_tokens
        self.num_reused_tokens = 0
        """The number of the prompt's first tokens whose keys and values were kept from an earlier request
        (`prefix_bytes`)."""
        self.token_ids: list[int] = []
        """The tokens of the answer so far. The list grows until the answer is done."""
        self.token_ends: list[int] = []
        """For each token whose text is known, the number of characters of the text up to its end (text_stream.py)."""
        self.mean_hidden: torch.Tensor | None = None
        """The mean of the last hidden states of the prompt's tokens, float32, shape (hidden_size,), on the CPU. It is
        None until the answer is done, if the request failed or was cancelled, and for a request without `pools`. A mask
        such as `lattice` leaves a small error in it, which anyone who knows the prompt and the model can compute."""
        self.finish_reason: FinishReason | None = None
        self._cancel = cancel
        self._changed = threading.Condition()
        self._pieces: list[str] = []
        self._error: VeilbaseError | None = None
        self._is_done = False
        self._callbacks: list[Callable[[Answer], None]] = []

    @property
    def is_done(self) -> bool:
        """Returns whether the answer has ended, so that no more text will come."""
        return self._is_done

    @property
    def error(self) -> VeilbaseError | None:
        """Returns the reason why the request failed; None if the request did not fail."""
        return self._error

    def cancel(self) -> None:
        """Ends the request after the step that is being computed; does nothing if the answer is done."""
        if not self._is_done:
            self._cancel()

    def __iter__(self) -> Iterator[str]:
        """Yields the pieces of text, starting with the first. Each piece is yielded as soon as it is complete.

        Raises:
            VeilbaseError: the request failed; the text before the failure was yielded.
        """
        num_given = 0
        while fresh := self._pieces_after(num_given):
            num_given += len(fresh)
            yield from fresh
        self._raise_error()

    def _pieces_after(self, num_given: int) -> list[str]:
        """Waits for text after the first `num_given` pieces and returns the new pieces; returns an empty list if the
        answer has ended without more text."""
        with self._changed:
            self._changed.wait_for(lambda: num_given < len(self._pieces) or self._is_done)
            return self._pieces[num_given:]

    def result(self, timeout_s: float | None = None) -> str:
        """Waits for the end of the answer and returns its whole text. For a cancelled request, the text ends at the
        cancellation.

        Args:
            timeout_s: seconds to wait; None waits without a limit.

        Raises:
            DeadlineExceeded: the answer was not complete in this time; the engine goes on with it.
            VeilbaseError: the request failed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_done, timeout_s):
                raise DeadlineExceeded(f"the answer was expected within {timeout_s} s, and is not complete")
        self._raise_error()
        return "".join(self._pieces)

    def add_done_callback(self, callback: Callable[[Answer], None]) -> None:
        """Registers a function that is called when the answer is done.

        The engine's thread calls the function, so it must return quickly. An exception that the function raises there
        is logged by its type only, and changes nothing. If the answer is already done, the function is called at once
        in the calling thread.
        """
        with self._changed:
            if not self._is_done:
                self._callbacks.append(callback)
                return
        callback(self)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise copy.copy(self._error) from None  # Each thread that raises the error has its own traceback.

    def num_tokens_within(self, num_characters: int) -> int:
        """Returns how many of the answer's first tokens have their text within the first characters of its text. Tokens
        without text at its end, and those of a stop string, are in none."""
        return bisect_right(self.token_ends, num_characters)

    def put(self, text: str) -> None:
        """Adds a piece of text. Only the engine calls this method."""
        if text:
            with self._changed:
                self._pieces.append(text)
                self._changed.notify_all()

    def finish(self, reason: FinishReason | None, error: VeilbaseError | None = None) -> None:
        """Ends the answer, with an error if the request failed. Only the engine calls this method, and only the first
        call counts."""
        with self._changed:
            if self._is_done:
                return
            # The copy has no traceback, whose frames would keep the rows, keys and values of all requests of the step.
            self.finish_reason, self._error, self._is_done = reason, copy.copy(error), True
            self._changed.notify_all()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except BaseException as exc:  # noqa: BLE001 - a function of the user's; its text may show the answer
                logging.getLogger(__name__).error("a callback of an answer failed (%s)", type(exc).__name__)
