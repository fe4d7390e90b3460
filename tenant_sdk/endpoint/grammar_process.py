"""This module is a process of its own, in which JSON schemas are compiled and the tokens that they allow are computed.

A schema of a few kilobytes can make the library llguidance allocate gigabytes, until the library or the operating
system ends the process, and can make it compute for minutes in native code that nothing can interrupt. So this never
happens in the process of `tenant serve`. That process starts `python -m tenant_sdk.endpoint.grammar_process`, which
prepares the vocabulary once and stays (the spawner). For each request with a schema the spawner forks a worker, which
has the vocabulary at once. A worker compiles one grammar, and computes which tokens may come next in the request's
answers.

Guarantees: a worker that exceeds one of its limits (`WorkerLimits`) is ended by the kernel, also in the middle of
native code; a worker whose socket is closed at the other end is killed; and a spawner whose socket is closed kills its
workers and ends. Each process is ended by the process that started it. The spawner never compiles a grammar, so that it
always answers. It imports neither torch nor grpc and has one thread, so that it may fork. What a worker writes to
stderr is dropped, since it may quote the schema.

Messages in both directions are frames: the length, 4 bytes, then a byte for the kind, then the content.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

VOCABULARY, READY, FAILED = b"v", b"r", b"f"
"""The frames between the server and the spawner: the vocabulary as JSON, and whether it can be used."""
GRAMMAR, COMPILED, REFUSED, STEP, MASK, STOPPED, ENDED = b"g", b"c", b"x", b"s", b"m", b"e", b"d"
"""The frames between the server and a worker: a grammar, and whether it was compiled or refused; the new tokens of an
answer, and the mask after them, or that the grammar goes no further; and how the worker ended (from the spawner)."""
STEP_HEAD = struct.Struct("<I")
"""The beginning of STEP, MASK and STOPPED: the number of the answer among those of the request."""
GROWTH = struct.Struct("<I")
"""The beginning of COMPILED, and what follows the head in MASK: by how many KiB the worker has grown."""
MOST_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")
_OUT_OF_MEMORY = 77
"""The exit status of a worker to which Python reported that memory ran out. Rust aborts instead (SIGABRT)."""


@dataclass(frozen=True)
class WorkerLimits:
    """Holds what one grammar may cost. Ordinary schemas compile in 2 to 30 ms, take 0.02 to 0.3 ms for a token and
    grow by less than 20 MiB (49,152 tokens); `{"multipleOf": 99991}` takes 0.9 s and 50 MiB.

    Attributes:
        compile_s: the seconds of processor time for compiling a grammar.
        burst_s: the seconds of processor time that the masks of a request may take beyond `token_s` each, in all.
        token_s: the seconds of processor time for a mask that do not count towards `burst_s`.
        wall_s: the seconds after which compiling, or a mask, is given up, whatever the processor did.
        memory_bytes: by how much a worker may grow.
    """

    compile_s: float = 2.0
    burst_s: float = 0.5
    token_s: float = 0.01
    wall_s: float = 10.0
    memory_bytes: int = 192 << 20

    def words(self, ended: int, is_compiling: bool) -> str | None:
        """Returns the limit at which a worker ended, in words.

        Args:
            ended: the worker's exit status, or minus the number of the signal that ended it.
            is_compiling: whether the worker was compiling; otherwise it computed masks.

        Returns:
            None if the worker did not end at a limit.
        """
        if ended in (-signal.SIGABRT, -signal.SIGSEGV, _OUT_OF_MEMORY):
            return f"{self.memory_bytes >> 20} MiB of memory"
        if ended == -signal.SIGPROF:
            return f"{self.compile_s if is_compiling else self.burst_s:g} s of processor time"
        return f"{self.wall_s:g} s" if ended == -signal.SIGALRM else None


def send_frame(end: socket.socket, kind: bytes, content: bytes = b"") -> None:
    """Sends one frame."""
    end.sendall(_LENGTH.pack(len(content) + 1) + kind + content)


def read_frame(end: socket.socket) -> tuple[bytes, bytes]:
    """Returns the kind and the content of the next frame.

    Raises:
        EOFError: the other end is closed.
        OSError: the socket failed or its time ran out, or no frame came.
    """
    (size,) = _LENGTH.unpack(_exactly(end, _LENGTH.size))
    if not 0 < size <= MOST_FRAME_BYTES:
        raise OSError("no frame")
    frame = _exactly(end, size)
    return frame[:1], frame[1:]


def _exactly(end: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = end.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


def vocabulary_bytes(
    tokenizer: str | None, tokens: Sequence[bytes], special: Sequence[int], stop_ids: Sequence[int],
    limits: WorkerLimits,
) -> bytes:  # fmt: skip
    """Returns the content of the frame with the vocabulary.

    Args:
        tokenizer: the tokenizer's file (tokenizer.json) as text; None if there is none that llguidance reads.
        tokens: without such a file, the text of each token.
        special: without such a file, the tokens that stand for no text.
        stop_ids: the tokens at which an answer ends.
        limits: the limits of each worker.
    """
    made = {
        "tokenizer": tokenizer, "tokens": [each.hex() for each in tokens], "special": list(special),
        "stop_ids": list(stop_ids), "limits": asdict(limits),
    }  # fmt: skip
    return json.dumps(made).encode()


class _PlainTokens:
    """Gives llguidance the text of each token, for tokenizers whose files llguidance cannot read."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special: Sequence[int], eos: int) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = list(tokens), list(special), eos

    def __call__(self, text: str | bytes) -> list[int]:
        raise NotImplementedError  # a grammar without forcing (grammar.py) asks for the tokens of no text


def _vocabulary(given: dict[str, Any]) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    if given["tokenizer"] is not None:
        return LLTokenizer(given["tokenizer"], eos_token=given["stop_ids"], slices=LLTokenizer.json_slices())
    tokens = [bytes.fromhex(each) for each in given["tokens"]]
    plain = _PlainTokens(tokens, given["special"], given["stop_ids"][0])
    return LLTokenizer(TokenizerWrapper(plain), eos_token=given["stop_ids"])


class _Spawner:
    """Forks a worker for each socket that the server sends, and ends and buries workers."""

    def __init__(self, control: socket.socket, vocabulary: Any, limits: WorkerLimits) -> None:
        self._control, self._vocabulary, self._limits = control, vocabulary, limits
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._woken, waker = os.pipe()
        for each in (self._woken, waker):
            os.set_blocking(each, False)
        self._poll.register(self._woken, select.POLLIN)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # a handler, so that the wakeup descriptor is written to
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        self._workers: dict[int, tuple[int, socket.socket]] = {}
        """For each worker's end of its socket, by descriptor: the worker, and this process's copy of this end."""

    def serve(self) -> None:
        """Serves until the server's socket is closed, and then kills the workers."""
        while True:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            for descriptor in self._workers.keys() & ready:  # first, since `_bury` and `_take` change what is open
                self._kill(descriptor)
            if self._woken in ready:
                self._bury()
            if self._control.fileno() in ready and not self._take():
                for descriptor in self._workers:
                    self._kill(descriptor)
                return

    def _take(self) -> bool:
        """Forks a worker for the socket that has come; returns False if the server is gone."""
        word, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not word:
            return False
        for descriptor in descriptors:
            end = socket.socket(fileno=descriptor)
            try:
                worker = os.fork()
            except OSError:  # no process, or no memory for one: the server finds the socket closed
                end.close()
                continue
            if worker == 0:
                self._work(end)
            self._workers[descriptor] = worker, end
            self._poll.register(descriptor, 0)  # nothing but that the other end was closed
        return True

    def _work(self, end: socket.socket) -> NoReturn:
        """Becomes a worker."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if hasattr(os, "SCHED_BATCH"):  # a worker that wakes does not push the engine's thread off its core
                with contextlib.suppress(OSError):
                    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            self._control.close()
            for _, other in self._workers.values():
                other.close()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            _Worker(end, self._vocabulary, self._limits).serve()
            status = 0
        except MemoryError:
            status = _OUT_OF_MEMORY
        except (EOFError, OSError):
            status = 0
        finally:
            os._exit(status)

    def _kill(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._poll.unregister(descriptor)  # it is closed by `_bury`
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._workers[descriptor][0], signal.SIGKILL)

    def _bury(self) -> None:
        """Takes the status of each worker that has ended, and sends it to the server over the worker's socket."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._woken, 4096)
        for descriptor, (worker, end) in tuple(self._workers.items()):
            found, status = os.waitpid(worker, os.WNOHANG)
            if not found:
                continue
            del self._workers[descriptor]
            with contextlib.suppress(KeyError):
                self._poll.unregister(descriptor)
            end.setblocking(False)  # a server that does not read is told nothing
            with contextlib.suppress(OSError):
                send_frame(end, ENDED, str(os.waitstatus_to_exitcode(status)).encode())
            end.close()


class _Worker:
    """Compiles one grammar, and computes the masks of the answers to one request."""

    def __init__(self, end: socket.socket, vocabulary: Any, limits: WorkerLimits) -> None:
        self._end, self._vocabulary, self._limits = end, vocabulary, limits
        self._credit_s = limits.burst_s
        self._compiled: Any = None
        self._matchers: list[Any] = []
        self._first_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # there is no /proc: the limits on time remain
            with open("/proc/self/statm") as statm:
                held = int(statm.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held + limits.memory_bytes,) * 2)

    def serve(self) -> None:
        """Serves until the server closes the socket, or a limit is exceeded."""
        kind, text = read_frame(self._end)
        with _bounded(self._limits.compile_s, self._limits.wall_s):
            self._compiled = _matcher(text.decode(), self._vocabulary) if kind == GRAMMAR else None
        if self._compiled is None:
            send_frame(self._end, REFUSED)
            return
        send_frame(self._end, COMPILED, GROWTH.pack(self._growth()))
        while True:
            self._step(read_frame(self._end)[1])

    def _growth(self) -> int:
        return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._first_kib)

    def _step(self, content: bytes) -> None:
        (number,) = STEP_HEAD.unpack_from(content)
        tokens = [token for (token,) in struct.iter_unpack("<I", content[STEP_HEAD.size :])]
        began_s = time.thread_time()  # process_time lags behind while its timer runs
        with _bounded(self._credit_s + self._limits.token_s, self._limits.wall_s):
            while len(self._matchers) <= number:
                self._matchers.append(self._compiled.deep_copy())
            mask = _mask(self._matchers[number], tokens)
        spent_s = time.thread_time() - began_s - self._limits.token_s
        self._credit_s -= max(0.0, spent_s)
        if self._credit_s < 0:
            signal.raise_signal(signal.SIGPROF)  # as the timer would have done, which the kernel looks at now and then
        head = STEP_HEAD.pack(number)
        if mask is None:
            send_frame(self._end, STOPPED, head)
        else:
            send_frame(self._end, MASK, head + GROWTH.pack(self._growth()) + mask)


@contextlib.contextmanager
def _bounded(cpu_s: float, wall_s: float) -> Iterator[None]:
    """Lets the kernel end this process after some seconds of processor time (SIGPROF), or of time (SIGALRM)."""
    signal.setitimer(signal.ITIMER_PROF, max(cpu_s, 1e-3))
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _matcher(text: str, vocabulary: Any) -> Any:
    """Returns the state of llguidance at the beginning of a text of the grammar; None if the grammar is refused.

    The limits are half of llguidance's own or less, since they are cheaper to meet than the end of a process: by its
    documentation, about 10 ms for the start and 7 ms for a token. They do not bound everything."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=500_000, step_lexer_fuel=100_000, step_max_items=20_000, max_lexer_states=50_000,
        max_grammar_size=100_000, verbose_errors=False,
    )  # fmt: skip
    try:
        made = LLMatcher(vocabulary, text, log_level=0, limits=limits)
        return None if made.is_error() else made
    except MemoryError:
        raise
    except BaseException:  # noqa: BLE001 - native code that panics raises BaseException
        return None


def _mask(matcher: Any, tokens: Sequence[int]) -> bytes | None:
    """Returns the tokens that may follow, a bit for each, lowest bit first; None if the grammar goes no further."""
    try:
        if not all(matcher.consume_token(token) for token in tokens) or matcher.is_error():
            return None
        bits: bytes = matcher.compute_bitmask()
        return None if matcher.is_error() or not any(bits) else bits
    except MemoryError:
        raise
    except BaseException:  # noqa: BLE001 - native code that panics raises BaseException
        return None


def main() -> None:
    """Prepares the vocabulary and forks workers until the server closes its end of the socket."""
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        given = json.loads(read_frame(control)[1])
        vocabulary = _vocabulary(given)
    except (EOFError, OSError):
        return
    except BaseException as exc:  # noqa: BLE001 - native code that panics raises BaseException
        send_frame(control, FAILED, type(exc).__name__.encode())
        return
    import llguidance  # noqa: F401 - loaded before the first fork

    gc.collect()
    gc.freeze()  # workers then share more of this process's memory
    send_frame(control, READY)
    _Spawner(control, vocabulary, WorkerLimits(**given["limits"])).serve()


if __name__ == "__main__":
    main()
