"""This module restricts an answer to a grammar: JSON that fits a schema, any JSON object, or a call of a tool.

It uses the library llguidance in processes of their own (grammar_process.py). A hook is a function that changes the
logits before a token is chosen.

Guarantees: every token that the hook allows continues a text of the grammar, and the stop tokens are allowed only where
the text is complete. A schema that no grammar can express is refused before the engine gets the request. Whatever a
schema makes the library do costs at most the limits (`EndpointLimits`, `WorkerLimits`), and fails at most its own
request: the next one gets a process of its own. A schema is its own document, also as the parameters of a tool: "#" in
its references is the schema itself. Not guaranteed: an answer that reaches its length limit may end in the middle.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch

from tenant_sdk.endpoint import grammar_process as process
from tenant_sdk.endpoint.errors import HttpError, bad_request
from tenant_sdk.endpoint.grammar_process import WorkerLimits
from tenant_sdk.endpoint.settings import EndpointLimits
from wire.errors import ConfigurationError, VeilbaseError

_ANY_OBJECT = {"type": "object"}
_OPTIONS = {"x-guidance": {"whitespace_flexible": False}}
"""llguidance's own options, which stand in a schema."""
_VALUES = ("const", "enum", "default", "examples", "example")
"""The keywords whose values are data: what looks like a keyword there is none."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""The keywords whose values are schemas by name: a name that looks like a keyword is none."""
_START_S = 120.0
"""The seconds in which the process has to prepare the vocabulary. It takes about one."""
_END_S = 5.0
LATE_S = 5.0
"""The seconds that are added to `WorkerLimits.wall_s` for the way to a worker and back."""
_WEIGHED_BYTES = 1 << 20
"""A worker's growth since its last weighing at which all workers are weighed again."""
_FULL_RETRY_S = 5.0
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
"""Makes llguidance allow every token that continues a text, also where the text that follows is certain. Otherwise it
asks for the tokens of this text, which only the tokenizer's own file can tell."""
_TOO_COMPLEX = "became too complex in the middle of the answer"
_LOST = "the process that held this request's grammar ended: send the request again"


class _Lost(Exception):
    """Says that a process ended without reaching one of its limits, or does not answer."""


class _Over(Exception):
    """Says that a limit was reached, which the text names."""


class Grammars:
    """Makes the grammars of requests, in a process that is started at the first use, which takes about a second, and
    then kept."""

    def __init__(
        self, tokenizer: Any, stop_ids: Sequence[int], limits: EndpointLimits, each: WorkerLimits | None = None
    ) -> None:
        """Keeps what the grammars of all requests need.

        Args:
            tokenizer: a transformers tokenizer that no other code uses at the same time.
            stop_ids: the tokens at which an answer ends.
            limits: the limits on a schema, and on the grammars of all requests together.
            each: what the grammar of one request may cost.
        """
        self._tokenizer, self._stop_ids, self._limits = tokenizer, list(stop_ids), limits
        self._each = each or WorkerLimits()
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._is_plain: bool | None = None
        self.spawner: _Spawner | None = None
        self._is_closed = False
        self._held: weakref.WeakSet[_Worker] = weakref.WeakSet()

    @property
    def num_held(self) -> int:
        """Returns the number of requests whose grammars are held now."""
        with self._lock:
            return sum(not each.is_over for each in self._held)

    def of_schema(self, schema: Mapping[str, Any] | None, param: str) -> Grammar:
        """Returns the grammar of JSON that fits a schema; None stands for any JSON object. Callers must not call this
        in the event loop's thread, since it takes milliseconds, and with hostile schemas seconds.

        Raises:
            HttpError: the schema exceeds a limit, which the text names, or no grammar can express it.
            ConfigurationError: the model has no stop token, or its tokenizer does not work with llguidance.
        """
        given = _ANY_OBJECT if schema is None else schema
        self._check(json.dumps(given), [given], param)
        return self._compiled(f"start: {_rule(given)}", param)

    def of_call(self, tools: Sequence[tuple[str, Mapping[str, Any]]], param: str) -> Grammar:
        """Returns the grammar of a call of one of the tools, as `{"name": …, "arguments": …}`; see `of_schema`.

        Args:
            tools: the name of each tool, which needs no escape in JSON, and the schema of its arguments.
            param: the field of the request that an error names.
        """
        self._check(json.dumps(tools), [schema for _, schema in tools], param)
        start = " | ".join(f"call_{number}" for number in range(len(tools)))
        rules = [
            f'call_{number}: {json.dumps(_opening(name))} args_{number} "}}"\nargs_{number}: {_rule(schema)}'
            for number, (name, schema) in enumerate(tools)
        ]
        return self._compiled("\n".join([f"start: {start}", *rules]), param)

    def _check(self, text: str, schemas: Sequence[Mapping[str, Any]], param: str) -> None:
        limits = self._limits
        if len(text) > limits.schema_bytes:
            raise bad_request(f"a schema has at most {limits.schema_bytes} bytes here", param, "schema_too_large")
        num_patterns, num_intersected, references = _counts(schemas)
        if any(not _leads_to_schema(each) for each in references):
            raise bad_request(
                f"a $ref points at a schema of its document, and not into {', '.join(_VALUES)}, whose values are data, "
                f"nor at the whole of {', '.join(_NAMED)}: put what it points at into $defs under a name",
                param,
                "bad_reference",
            )
        for number, most, what in (
            (num_patterns, limits.schema_patterns, "patterns (pattern, patternProperties)"),
            (num_intersected, limits.schema_intersections, "intersections (members of allOf after the first)"),
        ):
            if number > most:
                raise bad_request(f"a schema has at most {most} {what} here, got {number}", param, "schema_too_large")

    def _compiled(self, text: str, param: str) -> Grammar:
        for _ in range(2):  # a second time if the processes were ended meanwhile
            worker = self._forked()
            with contextlib.ExitStack() as undo:
                undo.callback(worker.end)
                try:
                    is_compiled = worker.compile(f"{_NO_FORCING}{text}" if self._is_plain else text)
                except _Lost:
                    continue
                except _Over as exc:
                    most = f"compiling this JSON schema takes more than {exc}, the most here: make it simpler"
                    raise HttpError(400, most, "schema_too_complex", param) from None
                if not is_compiled:
                    raise HttpError(
                        400, "this JSON schema is invalid, or too complex to be held to", "bad_schema", param
                    )
                undo.pop_all()
                return Grammar(worker, self._stop_ids)
        raise HttpError(503, "the process that compiles JSON schemas ended: try again", "grammar_lost", param, 1.0)

    def _forked(self) -> _Worker:
        """Returns a new worker. Starts the spawner if there is none, or if it has ended.

        Raises:
            HttpError: too many grammars are held.
            ConfigurationError: no spawner can be started.
        """
        with self._lock:
            if sum(not each.is_over for each in self._held) >= self._limits.schemas_held:
                text = f"{self._limits.schemas_held} requests with a schema are under way, the most here: try again"
                raise HttpError(429, text, "too_many_schemas", None, _FULL_RETRY_S)
        with self._starting:
            if self._is_closed:
                raise ConfigurationError("this endpoint was closed")
            for is_last in (False, True):
                if self.spawner is None:
                    self.spawner = self._started()
                try:
                    worker = _Worker(self.spawner.fork(), self._each, self._weigh)
                    break
                except OSError as exc:
                    self.spawner.end()
                    self.spawner = None
                    if is_last:
                        raise ConfigurationError(f"no process for grammars can be started: {exc.strerror}") from None
        with self._lock:
            self._held.add(worker)
        return worker

    def _started(self) -> _Spawner:
        if not self._stop_ids:
            raise ConfigurationError("this model has no stop token, so that no grammar can end its answers")
        text = None if self._is_plain else _tokenizer_text(self._tokenizer)
        if text is not None:
            with contextlib.suppress(ConfigurationError):
                made = _Spawner(process.vocabulary_bytes(text, (), (), self._stop_ids, self._each))
                self._is_plain = False
                return made
        try:
            tokens, special = _plain_tokens(self._tokenizer)
        except Exception as exc:  # noqa: BLE001 - whatever it raises, this tokenizer has no grammars
            raise ConfigurationError(f"grammars are not possible with this tokenizer ({type(exc).__name__})") from None
        made = _Spawner(process.vocabulary_bytes(None, tokens, special, self._stop_ids, self._each))
        self._is_plain = True
        return made

    def _weigh(self) -> None:
        """Ends the largest worker if all of them together take more memory than they may."""
        with self._lock:
            held = [each for each in self._held if not each.is_over]
        if sum(each.num_bytes for each in held) > self._limits.schemas_bytes:
            largest = max(held, key=lambda each: each.num_bytes)
            largest.give_up(f"its share of the {self._limits.schemas_bytes >> 20} MiB for all schemas together")

    def close(self) -> None:
        """Ends all processes."""
        with self._starting:
            self._is_closed = True
            if self.spawner is not None:
                self.spawner.end()
                self.spawner = None


class Grammar:
    """Holds the grammar of one request, for all of its answers, in a process of its own until `close`."""

    def __init__(self, worker: _Worker, stop_ids: Sequence[int]) -> None:
        """Keeps a worker that has compiled the grammar, and the tokens at which an answer ends."""
        self._worker, self._stop_ids = worker, stop_ids
        self._num_hooks = 0

    def hook(self, raises: bool = True) -> GrammarHook:
        """Returns the hook of one answer; see `GrammarHook`."""
        self._num_hooks += 1
        return GrammarHook(self._worker, self._num_hooks - 1, self._stop_ids, raises)

    def close(self) -> None:
        """Ends the process. Hooks that are called later fail."""
        self._worker.end()


class GrammarHook:
    """Allows only tokens that continue a text of the grammar, as a logits processor of one answer.

    The worker computes which tokens may come next as soon as it knows the one before (`chosen`), while the engine
    computes the next step. After the end of the text every token is allowed. Only an answer of fixed length goes on
    after the end.
    """

    def __init__(self, worker: _Worker, number: int, stop_ids: Sequence[int], raises: bool = True) -> None:
        """Asks for the first tokens.

        Args:
            worker: a worker that has compiled the grammar.
            number: the number of this answer among those of the worker.
            stop_ids: the tokens at which an answer ends.
            raises: whether a grammar that reaches its limits ends the answer immediately. If not, as for an answer of
                fixed length, the answer goes on, and `check` raises the error after its end.
        """
        self._worker, self._number, self._stop_ids, self._raises = worker, number, stop_ids, raises
        self._num_seen: int | None = None
        self._num_told = 0
        self._is_over = False
        self._failure: VeilbaseError | None = None
        worker.ask(number, ())
        self._num_asked = 1

    def check(self) -> None:
        """Raises the error that ended the grammar in the middle of the answer, if there was one."""
        if self._failure is not None:
            raise copy.copy(self._failure)

    def chosen(self, token_id: int) -> None:
        """Takes the token that was chosen after the last call, so that the tokens after it are computed meanwhile."""
        if not self._is_over and token_id not in self._stop_ids:
            self._ask((token_id,))
            self._num_told += 1

    def _ask(self, tokens: Sequence[int]) -> None:
        self._worker.ask(self._number, tokens)
        self._num_asked += 1

    def __call__(self, token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits, with minus infinity for the tokens that the grammar forbids. After the end of the text,
        returns them unchanged.

        Raises:
            ConfigurationError: the grammar reached a limit, and the hook was made with `raises`.
            VeilbaseError: its process ended otherwise.
        """
        fresh = [] if self._num_seen is None else token_ids[0, self._num_seen :].tolist()
        self._num_seen = token_ids.shape[1]
        untold, self._num_told = fresh[self._num_told :], 0
        if self._is_over:
            return logits
        if fresh and fresh[-1] in self._stop_ids:
            self._is_over = True
            return logits
        if untold or not self._num_asked:
            self._ask(untold)
        allowed = self._allowed(logits.shape[1])
        if allowed is None:
            if self._raises:
                self.check()
            return logits
        return logits.masked_fill(~torch.from_numpy(allowed).to(logits.device), -torch.inf)

    def _allowed(self, vocab_size: int) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
        """Returns for each token whether it may come next; None after a failure."""
        bits: bytes | None = b""
        try:
            while self._num_asked and bits is not None:
                self._num_asked -= 1
                bits = self._worker.answer(self._number)
            if bits is None:
                self._failure = ConfigurationError(f"the grammar of this request {_TOO_COMPLEX}")
        except _Over as exc:
            self._failure = ConfigurationError(f"the grammar of this request {_TOO_COMPLEX}: it takes more than {exc}")
        except _Lost:
            self._failure = VeilbaseError(_LOST)
        if bits is None or self._failure is not None:
            self._is_over = True
            return None
        return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), bitorder="little", count=vocab_size).astype(bool)


class _Worker:
    """Holds this side of a worker: a process with one grammar. Any thread may use it."""

    def __init__(self, end: socket.socket, limits: WorkerLimits, weigh: Callable[[], None]) -> None:
        """Keeps the socket. Args: weigh: called when the worker has grown."""
        self._end, self._limits, self._weigh = end, limits, weigh
        end.settimeout(limits.wall_s + LATE_S)
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._answers: dict[int, list[bytes | None]] = {}
        self._is_compiling = True
        self._ended: _Lost | _Over | None = None
        self.num_bytes = self._weighed_bytes = 0
        self.is_over = False

    def compile(self, text: str) -> bool:
        """Compiles the grammar; returns False if llguidance refuses it.

        Raises:
            _Over: a limit was reached.
            _Lost: the process ended.
        """
        self._send(process.GRAMMAR, text.encode())
        kind, content = self._read()
        self._is_compiling = False
        if kind == process.REFUSED:
            return False
        if kind != process.COMPILED:
            raise _Lost
        self._grow(content)
        return True

    def ask(self, number: int, tokens: Sequence[int]) -> None:
        """Asks for the tokens that may come after the next tokens of an answer. A failure shows in `answer`."""
        self._send(process.STEP, struct.pack(f"<{1 + len(tokens)}I", number, *tokens))

    def answer(self, number: int) -> bytes | None:
        """Returns the reply to the oldest `ask` of an answer that has none yet: a bit for each token; None if the
        grammar goes no further. See `compile` for what it raises."""
        while not self._answers.get(number):
            kind, content = self._read()
            if kind not in (process.MASK, process.STOPPED) or len(content) < process.STEP_HEAD.size:
                raise _Lost
            (found,) = process.STEP_HEAD.unpack_from(content)
            rest = content[process.STEP_HEAD.size :]
            if kind == process.MASK:
                self._grow(rest)
            self._answers.setdefault(found, []).append(rest[process.GROWTH.size :] if kind == process.MASK else None)
        return self._answers[number].pop(0)

    def _send(self, kind: bytes, content: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            process.send_frame(self._end, kind, content)

    def _read(self) -> tuple[bytes, bytes]:
        if self._ended is not None:
            raise self._ended
        with self._lock:
            try:
                kind, content = process.read_frame(self._end)
            except TimeoutError:
                kind, content = process.ENDED, str(-signal.SIGALRM).encode()
            except (EOFError, OSError):
                kind, content = b"", b""
        words = self._reason
        if words is None and kind == process.ENDED:
            words = self._limits.words(int(content), self._is_compiling)
        if words is not None or kind in (b"", process.ENDED):
            self._ended = _Lost() if words is None else _Over(words)
            self._shut()
            raise self._ended
        return kind, content

    def _grow(self, content: bytes) -> None:
        self.num_bytes = process.GROWTH.unpack_from(content)[0] << 10
        if self.num_bytes >= self._weighed_bytes + _WEIGHED_BYTES:
            self._weighed_bytes = self.num_bytes
            self._weigh()

    def give_up(self, reason: str) -> None:
        """Ends the process because of a limit, which `reason` names. Whoever waits for it gets the error."""
        self._reason = reason
        self._shut()

    def end(self) -> None:
        """Ends the process."""
        self._shut()
        with self._lock:
            self._end.close()

    def _shut(self) -> None:
        """Closes the connection, at which the spawner kills the worker; a thread that reads from it reads its end."""
        self.is_over = True
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def __del__(self) -> None:
        """Ends the process of a request that was dropped, such as one whose client went away."""
        if not sys.is_finalizing():  # when Python ends, the kernel closes the socket
            self.end()


class _Spawner:
    """Holds the process that forks workers."""

    def __init__(self, vocabulary: bytes) -> None:
        """Starts the process, and waits until it has prepared the vocabulary.

        Raises:
            ConfigurationError: the process does not start, or llguidance cannot use the vocabulary.
        """
        self._control, theirs = socket.socketpair()
        with theirs:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", process.__name__, str(theirs.fileno())], pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=_environment(),
                    start_new_session=True,  # a Ctrl-C is for the server, which then ends this process
                )  # fmt: skip
            except OSError as exc:
                self._control.close()
                raise ConfigurationError(f"no process for grammars can be started: {exc.strerror}") from exc
        try:
            self._control.settimeout(_START_S)
            process.send_frame(self._control, process.VOCABULARY, vocabulary)
            kind, content = process.read_frame(self._control)
            word = content.decode("ascii", "replace")[:80]
        except (EOFError, OSError) as exc:
            kind, word = b"", type(exc).__name__
        if kind != process.READY:
            self.end()
            raise ConfigurationError(f"grammars are not possible with this tokenizer ({word})")

    def fork(self) -> socket.socket:
        """Returns this side of the socket of a new worker.

        Raises:
            OSError: the process has ended.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"w"], [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        return ours

    def end(self) -> None:
        """Ends the process, which first ends its workers, and waits for its end."""
        self._control.close()
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _environment() -> dict[str, str]:
    """Returns this process's environment, in which a new Python finds this very package."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}


def _tokenizer_text(tokenizer: Any) -> str | None:
    """Returns a tokenizer's file (tokenizer.json), with tokens that were added later; None if it has none."""
    try:
        backend = copy.copy(tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return str(backend.to_str())
    except BaseException as exc:
        if isinstance(exc, KeyboardInterrupt | SystemExit):
            raise
        return None


def _plain_tokens(tokenizer: Any) -> tuple[list[bytes], list[int]]:
    """Returns the text of each token, and the tokens that stand for no text."""
    special = set(tokenizer.all_special_ids)
    tokens = [
        str(tokenizer.convert_ids_to_tokens(number) if number in special else tokenizer.decode([number])).encode()
        for number in range(len(tokenizer))
    ]
    return tokens, sorted(special)


def _opening(name: str) -> str:
    return f'{{"name":{json.dumps(name)},"arguments":'


def _rule(schema: Mapping[str, Any]) -> str:
    """Returns a schema as it stands in llguidance's variant of Lark, where it is a document of its own."""
    return f"%json {json.dumps({**schema, **_OPTIONS})}"


def _counts(schemas: Sequence[Any]) -> tuple[int, int, list[str]]:
    """Returns the number of patterns in schemas, the number of members of `allOf` after the first, and the references
    (`$ref`). What is counted is all that llguidance reads as a schema, if every reference passes `_leads_to_schema`."""
    num_patterns = num_intersected = 0
    references: list[str] = []
    left = list(schemas)
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += value
        if not isinstance(value, dict):
            continue
        num_patterns += isinstance(value.get("pattern"), str)
        references += [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        patterns, members = value.get("patternProperties"), value.get("allOf")
        num_patterns += len(patterns) if isinstance(patterns, dict) else 0
        num_intersected += max(0, len(members) - 1) if isinstance(members, list) else 0
        for key, inner in value.items():
            if key in _NAMED and isinstance(inner, dict):
                left += inner.values()
            elif key not in _VALUES:
                left.append(inner)
    return num_patterns, num_intersected, references


def _leads_to_schema(reference: str) -> bool:
    """Returns whether what a reference points at is counted by `_counts`, which takes the same steps: neither data nor
    a table of schemas by name, which llguidance would read as one schema.

    Only JSON pointers are looked at (RFC 6901): llguidance finds no `$id` and no `$anchor` inside data. Whether `%2F`
    parts two steps is not relied on: both readings have to pass.
    """
    pointer = reference.partition("#")[2]
    return _passes(unquote(pointer).split("/")) and _passes([unquote(step) for step in pointer.split("/")])


def _passes(steps: Sequence[str]) -> bool:
    is_name = False
    for step in steps[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if not is_name and key in _VALUES:
            return False
        is_name = not is_name and key in _NAMED
    return not is_name
