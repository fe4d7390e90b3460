"""This module implements `tenant chat`, a conversation in a terminal with the base model or an adapter.

Guarantees: the text of the conversation stays in this process; nothing of it is written to a file or a log.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from runtime.command_line import instead
from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.engine import Engine
from tenant_sdk.serving.requests import Answer
from tenant_sdk.serving.settings import check_store_early
from tenant_sdk.session_protocol import TrainingSession
from wire.errors import ConfigurationError, VeilbaseError, VerificationFailed
from wire.transport.connection import Traffic

HELP = (
    "/adapter NAME answers with an adapter, /adapter alone with the base model,\n"
    "/adapters lists them, /new forgets the conversation,\n"
    "/explain says what the provider sees, /quit ends"
)


class Talking(TrainingSession, Protocol):
    """Describes a session that can also print the privacy in force; `TenantClient` fulfils it."""

    def explain(self) -> str:
        """Prints and returns the privacy in force."""


class Terminal:
    """Holds one conversation, and the name of the adapter that is in use."""

    def __init__(
        self,
        engine: Engine,
        store: AdapterStore | None,
        traffic: Callable[[], Traffic],
        write: Callable[[str], None],
        *,
        max_new_tokens: int | None = None,
        explain: Callable[[], object] = lambda: None,
        base: str = "base",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins an empty conversation with the base model.

        Args:
            engine: the engine that generates answers.
            store: the adapters that may be chosen; None if there are no adapters.
            traffic: returns the bytes that the session has sent and received so far.
            write: a function that prints a text without adding a newline.
            max_new_tokens: the length limit of an answer; for None see `Engine.submit`.
            explain: a function that prints the privacy in force.
            base: the base model's name, by which /adapter chooses it too.
            clock: returns the present time in seconds.
        """
        self._engine, self._store, self._traffic, self._write = engine, store, traffic, write
        self._max_new_tokens, self._explain, self._base, self._clock = max_new_tokens, explain, base, clock
        self._turns: list[dict[str, str]] = []
        self.adapter: str | None = None

    def run(self, lines: Iterable[str]) -> None:
        """Answers line after line until the lines end or one is /quit.

        Raises:
            VerificationFailed: a reply failed its check, which ends the session.
        """
        self._write(f"{HELP}\n")
        for line in lines:
            text = line.strip()
            if text == "/quit":
                return
            try:
                if text.startswith("/"):
                    self._command(text)
                else:
                    self._answer(text)
            except VerificationFailed:
                raise
            except VeilbaseError as exc:  # the next line may be answered all the same
                self._write(f"\n{exc}\n")

    def _command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        if name == "/adapter":
            self._choose(argument.strip() or None)
        elif name == "/adapters":
            self._write(f"{' '.join(self._names()) or 'no adapters'}\n")
        elif name == "/new":
            self._turns.clear()
            self._write("the conversation is forgotten\n")
        elif name == "/explain":
            self._explain()
        else:
            self._write(f"{HELP}\n")

    def _names(self) -> list[str]:
        return [] if self._store is None else self._store.names()

    def _choose(self, name: str | None) -> None:
        names = self._names()
        if name in (self._base, "base") and name not in names:
            name = None
        if name is not None and name not in names:
            advice = instead(name[:100], [*names, self._base], "/adapters")
            raise ConfigurationError(f"there is no adapter {ascii(name)[:100]}: {advice}")
        self.adapter = name
        self._write(f"answers with {'the base model' if name is None else f'the adapter {name}'}\n")

    def _answer(self, text: str) -> None:
        if not text:
            return
        before, began = self._traffic(), self._clock()
        turns = [*self._turns, {"role": "user", "content": text}]
        answer = self._engine.submit(turns, self.adapter, self._max_new_tokens)
        try:
            for piece in answer:
                self._write(piece)
        except KeyboardInterrupt:  # ends this answer, and not the conversation
            answer.cancel()
        said = answer.result()
        self._turns = [*turns, {"role": "assistant", "content": said}]
        self._write(f"\n{self._figures(answer, self._clock() - began, before)}\n")

    def _figures(self, answer: Answer, seconds: float, before: Traffic) -> str:
        after, num_tokens = self._traffic(), len(answer.token_ids)
        speed = num_tokens / seconds if seconds > 0 else 0.0
        up, down = after.bytes_up - before.bytes_up, after.bytes_down - before.bytes_down
        return (
            f"[{self.adapter or 'base'}: {num_tokens} tokens, {speed:.1f} tokens/s, {up / 1e6:.2f} MB up, "
            f"{down / 1e6:.2f} MB down]"
        )


def talk(
    client: Talking, adapters: Path | None, lines: Iterable[str], write: Callable[[str], None],
    max_new_tokens: int | None = None, store_options: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Opens an engine over a client, and holds a conversation.

    Args:
        client: a connected client.
        adapters: the folder of adapters; None if there is none.
        lines: the lines that the user types.
        write: a function that prints a text without adding a newline.
        max_new_tokens: the length limit of an answer.
        store_options: options of `AdapterStore`.

    Raises:
        ConfigurationError: the folder or an option of the store cannot be used.
        VerificationFailed: a reply failed its check.
    """
    options = {} if store_options is None else store_options
    check_store_early(adapters, options)
    stores: list[AdapterStore] = []

    def make_store(model: Any, wake: Callable[[], None]) -> AdapterStore:
        stores.append(AdapterStore(model, adapters, on_ready=wake, **options))
        return stores[0]

    with Engine(client, make_store if adapters is not None or options.get("catalogue") is not None else None) as engine:
        terminal = Terminal(
            engine, next(iter(stores), None), lambda: client.traffic, write, max_new_tokens=max_new_tokens,
            explain=client.explain, base=client.connect().model_id,
        )  # fmt: skip
        terminal.run(lines)
