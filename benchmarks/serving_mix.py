"""Runs a random mix of requests through the engine, over mTLS, with a provider that is killed now and then.

Requests join and are cancelled at random. Six of the adapters are padded to the same rank, of which the device has two
places, and host memory has room for about three adapters. So adapters are loaded onto the device, and read from disk,
all the time. `python -m benchmarks.serving_mix [ANSWERS]` goes on until there are so many answers, however long that
takes. It returns exit status 1 if there were fewer right ones, if an answer was wrong, if a mask row was sent twice or
lost, if a request failed for another reason than the provider's absence, if an adapter's place was lost, if too few
adapters were loaded (`LOAD_EVERY`, `READ_EVERY`), or if a request, an adapter's place or KV memory was still held at
the end.

An answer is right if its tokens are those of `client.generate` with the same prompt and adapter, up to the first token
whose two largest logits are closer than MARGIN times the error of a logit. This error is measured as the largest
difference between two runs of `generate` with fresh masks. A request may also fail because the provider is away.
"""

from __future__ import annotations

import os
import queue
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from benchmarks.common import provider
from benchmarks.row_watch import RowBalance, WatchedRows

if TYPE_CHECKING:
    from tenant_sdk import Engine, TenantClient
    from tenant_sdk.serving.adapters import AdapterStore
    from tenant_sdk.serving.requests import Answer

PROMPTS = ("Why are there tides?", "Name a bird that cannot fly, and say where it lives.", "Count to five.")
RANKS = (16, 9, 16, 12, 16, 14, 8, 32)
"""The adapters' ranks. The first six are padded to 16, the others are not; see `tenant_sdk.serving.adapters.store`."""
PLACES = 2
"""The device places of each padded rank. So four of the six adapters of padded rank 16 are always absent."""
HOST_ADAPTERS = 3
"""The number of adapters of rank 16 that fit into host memory."""
NEW_TOKENS = 10
MARGIN = 4.0
AT_A_TIME = 24
"""The most requests that are open at a time. The next request is submitted when one of them has ended."""
ANSWERS = 1_700
"""The number of answers of a run, unless another one is given. On two cores without other work they take 10 minutes."""
KILL_EVERY = 140
"""The number of answers from one death of the provider to the next."""
LOAD_EVERY, READ_EVERY = 15, 15
"""The most answers, on average over each third of the run, from one load onto the device to the next, and from one read
from disk to the next. On two cores without other work they were about 4 and 2."""
FAILED_EACH = 4 * AT_A_TIME
"""The most requests that may fail for each death of the provider, and before the first one; then the run ends. On two
cores without other work there were about `AT_A_TIME`."""
HANGS_AFTER_S = 120.0
"""The seconds without the end of any request after which the open requests count as hanging."""
ENDS_IN_S = 60.0
"""The most seconds that the release of what the last requests held may take."""
Case = tuple[str, str | None]
"""A request's prompt, and the name of its adapter (None for the base model)."""


@dataclass(frozen=True)
class Loads:
    """Counts what the store of adapters did in a part of the run.

    Attributes:
        answers: how many answers ended in this part of the run.
        device_loads: how often an adapter was loaded onto the device.
        disk_reads: how often an adapter was read from disk.
    """

    answers: int
    device_loads: int
    disk_reads: int

    @property
    def are_enough(self) -> bool:
        """Returns whether adapters were loaded and read as often as `LOAD_EVERY` and `READ_EVERY` say."""
        return self.device_loads >= self.answers // LOAD_EVERY and self.disk_reads >= self.answers // READ_EVERY


@dataclass
class Mix:
    """Holds the results of a run.

    Attributes:
        wanted: the number of right answers with which the run is long enough.
        seconds: how long it took until there were so many answers.
        right, wrong: how many answers had the right tokens, and how many had a wrong one. Of a cancelled answer, the
            tokens that it has are judged.
        cancelled: the number of answers that were cancelled; they are counted in `right` or `wrong`, too.
        failed: the number of requests that failed because the provider was away.
        other: the names of all other errors.
        deaths: how often the provider was killed.
        loads: what the store did in each third of the run.
        rows: what became of the mask rows.
        left: what was still held at the end: requests, KV bytes, adapters.
        lost_places: the adapter places that were neither held nor reusable at the end. It is negative if a place
            counted as both.
        distinct: the number of different reference answers. If adapters changed nothing, it would be the number of
            prompts.
    """

    wanted: int = ANSWERS
    seconds: float = 0.0
    right: int = 0
    wrong: int = 0
    cancelled: int = 0
    failed: int = 0
    other: list[str] = field(default_factory=list)
    deaths: int = 0
    loads: tuple[Loads, ...] = ()
    rows: RowBalance = field(default_factory=RowBalance)
    left: tuple[int, int, int] = (0, 0, 0)
    lost_places: int = 0
    distinct: int = 0

    @property
    def is_good(self) -> bool:
        """Returns whether nothing was wrong, lost, sent twice or left over, and no other error came. There must also be
        all the right answers and at least one cancelled answer, adapters must have changed answers, and enough adapters
        must have been loaded in each third of the run."""
        lost = self.rows.twice or self.rows.lost or self.lost_places or any(self.left)
        if self.wrong or self.other or lost or not self.rows.sent:
            return False
        loaded = len(self.loads) == 3 and all(part.are_enough for part in self.loads)
        return loaded and self.right >= self.wanted and self.cancelled > 0 and self.distinct > len(PROMPTS)


# ---- what is watched -------------------------------------------------------------------------------------------------


def _references(client: TenantClient, folder: Path, cases: list[Case]) -> dict[Case, list[int]]:
    """Returns, for each case, the tokens of its answer before the first token whose two largest logits are too close to
    tell which token is right (see the module's docstring). A case without such clear tokens is left out."""
    import torch

    def logits_of(case: Case) -> torch.Tensor:
        seen: list[torch.Tensor] = []

        def keep(_: Any, logits: torch.Tensor) -> torch.Tensor:
            seen.append(logits[0].float().clone())
            return logits

        adapter = None if case[1] is None else folder / case[1]
        client.generate(
            case[0], adapter=adapter, max_new_tokens=NEW_TOKENS, eos_token_id=[], logits_processor=[keep]
        )  # fmt: skip
        return torch.stack(seen)

    first = {case: logits_of(case) for case in cases}
    again = logits_of(cases[-1])
    same = (first[cases[-1]].argmax(-1) == again.argmax(-1)).cumprod(0).bool()
    error = float((first[cases[-1]] - again)[same].abs().max())
    answers = {}
    for case, logits in first.items():
        top = logits.topk(2)
        unclear = (top.values[:, 0] - top.values[:, 1] < MARGIN * error).tolist()
        length = unclear.index(True) if True in unclear else len(unclear)
        answers[case] = top.indices[:length, 0].tolist()
    return {case: tokens for case, tokens in answers.items() if tokens}


class Provider:
    """Holds a provider process that can be killed and started again on the same port."""

    def __init__(self, folder: Path) -> None:
        """Starts the provider, and enrols the tenant `bench`."""
        self._folder, self._stack = folder, ExitStack()
        self.url, self._pid = self._stack.enter_context(provider(folder))

    def kill(self) -> None:
        """Ends the process at once, without a chance to finish anything."""
        os.kill(self._pid, signal.SIGKILL)
        self._stack.close()

    def start_again(self) -> None:
        """Starts a new process on the same port, and waits until it is ready."""
        port = str(urlsplit(self.url).port)
        _, self._pid = self._stack.enter_context(provider(self._folder, "--port", port))

    def close(self) -> None:
        """Ends the process."""
        self._stack.close()


# ---- the mix ---------------------------------------------------------------------------------------------------------


def _save_adapters(client: TenantClient, folder: Path) -> None:
    """Saves random LoRA adapters that change answers, of the ranks in `RANKS`, on q and v of all blocks."""
    import torch
    from peft import LoraConfig, get_peft_model

    for number, rank in enumerate(RANKS):
        torch.manual_seed(number)
        config = LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        adapted = get_peft_model(client.load_model(), config)
        with torch.no_grad():
            for name, weight in adapted.named_parameters():
                if "lora_B" in name:
                    weight.mul_(2.0)
        adapted.save_pretrained(folder / f"a{number}")


@contextmanager
def opened(folder: Path, url: str) -> Iterator[TenantClient]:
    """Opens a tenant's session with lattice masks, which are made in the background."""
    import tenant_sdk

    with tenant_sdk.TenantClient(
        url,
        identity=folder / "bench",
        mask="lattice",
        cache=folder / "cache",
        progress=False,
        mask_options={"precision": "exact"},  # With a larger error fewer tokens could be compared.
    ) as client:
        yield client


@contextmanager
def engine_of(client: TenantClient, adapters: Path) -> Iterator[tuple[Engine, AdapterStore]]:
    """Opens an engine with few device places and little host memory for adapters, and yields it and its store."""
    import torch

    import tenant_sdk
    from tenant_sdk.serving.adapters import AdapterStore

    stores: list[AdapterStore] = []
    host_bytes = HOST_ADAPTERS * (adapters / "a0" / "adapter_model.safetensors").stat().st_size

    def make_store(model: Any, wake: Any) -> AdapterStore:
        stores.append(
            AdapterStore(
                model, adapters, device_slots=PLACES, host_bytes=host_bytes, on_ready=wake, dtype=torch.float32
            )
        )
        return stores[0]

    with tenant_sdk.Engine(client, make_store, max_running=8, step_tokens=64, overtaking_s=0.5) as engine:
        yield engine, stores[0]


def mix(answers: int = ANSWERS, seed: int = 0, kill_every: int = KILL_EVERY) -> Mix:
    """Runs the mix until there are `answers` answers, kills the provider after every `kill_every` of them, and returns
    the results."""
    result = Mix(wanted=answers)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served = Provider(folder)
        stack.callback(served.close)
        rows = WatchedRows()
        client = stack.enter_context(opened(folder, served.url))
        _save_adapters(client, folder / "adapters")
        names = [None, *(f"a{number}" for number in range(len(RANKS)))]
        want = _references(client, folder / "adapters", [(prompt, name) for prompt in PROMPTS for name in names])
        result.distinct = len({tuple(tokens) for tokens in want.values()})
        with engine_of(client, folder / "adapters") as (engine, store):
            num_places = store.status().device_reusable
            requests = _Requests(engine, want, random.Random(seed), result)
            _drive(result, requests, store, served, kill_every)
            requests.count_all()
            result.left, result.lost_places = _left(engine, store, num_places)
        result.rows = rows.balance()  # The engine has ended, so no call is under way.
    return result


def _drive(result: Mix, requests: _Requests, store: AdapterStore, served: Provider, kill_every: int) -> None:
    """Submits and cancels requests until there are as many answers as wanted, or requests hang or keep failing. Kills
    the provider now and then, and notes how many adapters were loaded in each third of the answers."""
    begun = time.monotonic()
    next_kill, seen = min(kill_every, result.wanted // 3), [(0, store.status())]
    while len(seen) <= 3 and requests.step() and result.failed <= FAILED_EACH * (1 + result.deaths):
        answers = result.right + result.wrong
        if answers >= next_kill:
            served.kill()
            requests.submit()  # This request comes while nobody is there.
            served.start_again()
            result.deaths += 1
            next_kill = answers + kill_every
        if 3 * answers >= result.wanted * len(seen):
            seen.append((answers, store.status()))
    result.seconds = time.monotonic() - begun
    result.loads = tuple(
        Loads(then - before, new.device_loads - old.device_loads, new.disk_reads - old.disk_reads)
        for (before, old), (then, new) in pairwise(seen)
    )


def _left(engine: Engine, store: AdapterStore, num_places: int) -> tuple[tuple[int, int, int], int]:
    """Returns what is still held at the end (see `Mix.left`), and how many of `num_places` adapter places were lost.
    What the last requests held, such as the place of an adapter that was being loaded, may be held for a moment
    longer."""
    give_up_s = time.monotonic() + ENDS_IN_S
    while True:
        own, adapters = engine.status(), store.status()
        num_held = adapters.device_held + adapters.waiting
        left = own.num_running + own.num_waiting, own.reserved_bytes + own.kept_bytes, num_held
        if not any(left) or time.monotonic() > give_up_s:
            return left, num_places - adapters.device_held - adapters.device_reusable
        time.sleep(0.05)


class _Requests:
    """Submits random requests to an engine, and counts how they end."""

    def __init__(self, engine: Engine, want: dict[Case, list[int]], chance: random.Random, result: Mix) -> None:
        """Keeps the arguments.

        Args:
            engine: the engine that answers.
            want: the requests that may be submitted, each with its reference answer.
            chance: decides which requests are submitted and which are cancelled.
            result: the results in which ended requests are counted.
        """
        self._engine, self._want, self._chance, self._result = engine, want, chance, result
        self._open: dict[Answer, Case] = {}
        self._ended: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def step(self) -> bool:
        """Submits a request if fewer than `AT_A_TIME` are open; otherwise counts the next request that ends. Returns
        False if none ends."""
        if len(self._open) < AT_A_TIME:
            self.submit()
            return True
        return self._count_next()

    def submit(self) -> None:
        """Submits one random request for as many tokens as its reference answer has. Now and then, cancels one of the
        open requests."""
        case = self._chance.choice(list(self._want))
        answer = self._engine.submit(
            case[0], case[1], len(self._want[case]), eos_token_id=[], caller=self._chance.choice("ab")
        )  # fmt: skip
        self._open[answer] = case
        answer.add_done_callback(self._ended.put)
        if self._chance.random() < 0.15:
            self._chance.choice(list(self._open)).cancel()

    def count_all(self) -> None:
        """Waits for the end of all open requests and counts them. Requests that do not end count as another error."""
        while self._open and self._count_next():
            pass
        self._result.other += ["hanging"] * len(self._open)

    def _count_next(self) -> bool:
        """Counts the next request that ends; returns False if none ends within HANGS_AFTER_S."""
        try:
            answer = self._ended.get(timeout=HANGS_AFTER_S)
        except queue.Empty:
            return False
        self._count(self._open.pop(answer), answer)
        return True

    def _count(self, case: Case, answer: Answer) -> None:
        from wire.errors import DeadlineExceeded, Unavailable

        result = self._result
        if isinstance(answer.error, Unavailable | DeadlineExceeded):
            result.failed += 1
        elif answer.error is not None:
            result.other.append(type(answer.error).__name__)
        else:
            tokens, is_cancelled = answer.token_ids, answer.finish_reason == "cancelled"
            is_right = tokens == (self._want[case][: len(tokens)] if is_cancelled else self._want[case])
            result.right, result.wrong = result.right + is_right, result.wrong + (not is_right)
            result.cancelled += is_cancelled


def main() -> int:
    """Runs the mix, prints what it found, and returns the exit status."""
    import tenant_sdk

    tenant_sdk.tune()
    result = mix(int(sys.argv[1]) if len(sys.argv) > 1 else ANSWERS)
    rows, loads = result.rows, result.loads
    print(
        f"answers: {result.right} right, {result.wrong} wrong, {result.cancelled} of these cancelled; {result.failed} "
        f"failed while the provider was away, {len(result.other)} otherwise {sorted(set(result.other))}\n"
        f"provider killed {result.deaths} times; {result.distinct} different reference answers\n"
        f"adapters: {sum(part.device_loads for part in loads)} loads onto the device and "
        f"{sum(part.disk_reads for part in loads)} reads from disk in {result.seconds:.0f} s; by "
        f"thirds {[part.device_loads for part in loads]} and {[part.disk_reads for part in loads]}\n"
        f"mask rows made: {rows.made}; {rows.sent} sent, {rows.refused + rows.burnt} burnt by calls that failed, "
        f"{rows.ready} still ready, {rows.lost} lost\n"
        f"masked rows sent: {rows.sent}, of these twice: {rows.twice}\n"
        f"still held at the end: {result.left[0]} requests, {result.left[1]} bytes of KV, {result.left[2]} adapters; "
        f"adapter places lost: {result.lost_places}"
    )
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
