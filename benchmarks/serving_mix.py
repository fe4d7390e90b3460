"""Runs a random mix of requests through the engine, over mTLS, with a provider that is killed now and then.

Requests join and are cancelled at random. They use more adapters than the device has slots, so that adapters are loaded
all the time. `python -m benchmarks.serving_mix [SECONDS]` returns exit status 1 if an answer was wrong, if a masked row
was sent twice, if a request failed for another reason than the provider's absence, or if a request, an adapter's slot
or KV memory was still held at the end.

An answer is right if its tokens are those of `client.generate` with the same prompt and adapter, up to the first token
whose two largest logits are closer than MARGIN times the error of a logit. This error is measured as the largest
difference between two runs of `generate` with fresh masks. A request may also fail because the provider is away.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from benchmarks.common import provider

if TYPE_CHECKING:
    import numpy as np

    from tenant_sdk import Engine, TenantClient
    from tenant_sdk.serving.answer import Answer

PROMPTS = ("Why are there tides?", "Name a bird that cannot fly, and say where it lives.", "Count to five.")
NUM_ADAPTERS, SLOTS = 5, 2
NEW_TOKENS = 10
MARGIN = 4.0
AT_A_TIME = 24
"""The most requests that are open at a time. The next request is submitted when one of them has ended."""
KILL_EVERY_S = 40.0
Case = tuple[str, str | None]
"""A request's prompt, and the name of its adapter (None for the base model)."""


@dataclass
class Mix:
    """Holds the results of a run.

    Attributes:
        right, wrong: how many answers had the right tokens, and how many had a wrong one. Of a cancelled answer, the
            tokens that it has are judged.
        cancelled: the number of answers that were cancelled; they are counted in `right` or `wrong`, too.
        failed: the number of requests that failed because the provider was away.
        other: the names of all other errors.
        deaths: how often the provider was killed.
        rows, rows_twice: the number of masked rows sent, and how many of them equal an earlier one.
        left: what was still held at the end: requests, KV bytes, adapters.
        distinct: the number of different reference answers. If adapters changed nothing, it would be the number of
            prompts.
    """

    right: int = 0
    wrong: int = 0
    cancelled: int = 0
    failed: int = 0
    other: list[str] = field(default_factory=list)
    deaths: int = 0
    rows: int = 0
    rows_twice: int = 0
    left: tuple[int, int, int] = (0, 0, 0)
    distinct: int = 0

    @property
    def is_good(self) -> bool:
        """Returns whether nothing was wrong, sent twice or left over, and no other error came. There must also be more
        than ten right answers and at least one cancelled answer, and adapters must have changed answers."""
        wrong = self.wrong or self.other or self.rows_twice or any(self.left)
        return not wrong and self.right > 10 and self.cancelled > 0 and self.distinct > len(PROMPTS)


# ---- what is watched -------------------------------------------------------------------------------------------------


class SentRows:
    """Keeps a fingerprint of each masked row that is sent: its first eight bytes, which are as good as random."""

    def __init__(self) -> None:
        """Watches the rows that all gRPC and tensor-port connections of this process send from now on."""
        from wire.frame import Purpose
        from wire.transport.grpc_connection import GrpcConnection

        self._parts: list[np.ndarray[Any, Any]] = []
        submit = GrpcConnection.submit

        def watched(connection: Any, call: Any, payload: Any, reply_cols: int) -> Any:
            if call.purpose is not Purpose.HINT:  # Such a call has a seed, and no rows of its own.
                self._parts.append(payload.rows(call)[:, :2].contiguous().numpy().copy())
            return submit(connection, call, payload, reply_cols)

        GrpcConnection.submit = watched  # type: ignore[method-assign]

    def counts(self) -> tuple[int, int]:
        """Returns the number of rows, and how many of them have the fingerprint of an earlier row."""
        import numpy as np

        rows = np.concatenate(self._parts)
        return len(rows), len(rows) - len(np.unique(rows, axis=0))


def references(client: TenantClient, folder: Path, cases: list[Case]) -> dict[Case, list[int]]:
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


def save_adapters(client: TenantClient, folder: Path) -> None:
    """Saves random LoRA adapters that change answers, of different ranks, on q and v of all blocks."""
    import torch
    from peft import LoraConfig, get_peft_model

    for number in range(NUM_ADAPTERS):
        torch.manual_seed(number)
        config = LoraConfig(r=4 * 2**number, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
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
        url, identity=folder / "bench", mask="lattice", cache=folder / "cache", progress=False
    ) as client:
        yield client


def mix(seconds: float, seed: int = 0, kill_every_s: float = KILL_EVERY_S) -> Mix:
    """Runs the mix for `seconds`, killing the provider every `kill_every_s` seconds, and returns the results."""
    result, chance = Mix(), random.Random(seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        served = Provider(folder)
        stack.callback(served.close)
        sent = SentRows()
        client = stack.enter_context(opened(folder, served.url))
        save_adapters(client, folder / "adapters")
        names = [None, *(f"a{number}" for number in range(NUM_ADAPTERS))]
        want = references(client, folder / "adapters", [(prompt, name) for prompt in PROMPTS for name in names])
        result.distinct = len({tuple(tokens) for tokens in want.values()})
        _drive(result, client, folder / "adapters", served, want, chance, seconds, kill_every_s)
        result.rows, result.rows_twice = sent.counts()
    return result


def _drive(
    result: Mix, client: TenantClient, adapters: Path, served: Provider, want: dict[Case, list[int]],
    chance: random.Random, seconds: float, kill_every_s: float,
) -> None:  # fmt: skip
    """Submits and cancels requests until the time is over, and counts how they ended."""
    import torch

    import tenant_sdk
    from tenant_sdk.serving.adapters import AdapterStore

    stores: list[AdapterStore] = []

    def make_store(model: Any, wake: Any) -> AdapterStore:
        stores.append(AdapterStore(model, adapters, device_slots=SLOTS, on_ready=wake, dtype=torch.float32))
        return stores[0]

    ends, next_kill_s = time.monotonic() + seconds, time.monotonic() + min(kill_every_s, seconds / 3)
    with tenant_sdk.Engine(client, make_store, max_running=8, step_tokens=64, overtaking_s=0.5) as engine:
        open_answers: list[tuple[Case, Answer]] = []
        while time.monotonic() < ends:
            if time.monotonic() > next_kill_s:
                served.kill()
                _submit(engine, open_answers, want, chance)  # Some requests come while nobody is there.
                served.start_again()
                result.deaths += 1
                next_kill_s = time.monotonic() + kill_every_s
            _submit(engine, open_answers, want, chance)
            while len(open_answers) >= AT_A_TIME:
                _count(result, *open_answers.pop(chance.randrange(len(open_answers))), want)
        while open_answers:
            _count(result, *open_answers.pop(), want)
        status = engine.status()
        result.left = (status.num_running + status.num_waiting, status.reserved_bytes, stores[0].status().device_held)


def _submit(engine: Engine, open_answers: list[Any], want: dict[Case, list[int]], chance: random.Random) -> None:
    """Submits one random request for as many tokens as its reference answer has. Now and then, cancels one of the
    requests in `open_answers`."""
    case = chance.choice(list(want))
    answer = engine.submit(case[0], case[1], len(want[case]), eos_token_id=[], caller=chance.choice("ab"))
    open_answers.append((case, answer))
    if chance.random() < 0.15:
        chance.choice(open_answers)[1].cancel()


def _count(result: Mix, case: Case, answer: Answer, want: dict[Case, list[int]]) -> None:
    from wire.errors import DeadlineExceeded, Unavailable, VeilbaseError

    try:
        answer.result(120)
    except (Unavailable, DeadlineExceeded):
        result.failed += 1
        return
    except VeilbaseError as exc:
        result.other.append(type(exc).__name__)
        return
    tokens, is_cancelled = answer.token_ids, answer.finish_reason == "cancelled"
    is_right = tokens == (want[case][: len(tokens)] if is_cancelled else want[case])
    result.right, result.wrong = result.right + is_right, result.wrong + (not is_right)
    result.cancelled += is_cancelled


def main() -> int:
    """Runs the mix, prints what it found, and returns the exit status."""
    import tenant_sdk

    tenant_sdk.tune()
    result = mix(float(sys.argv[1]) if len(sys.argv) > 1 else 600.0)
    print(
        f"answers: {result.right} right, {result.wrong} wrong, {result.cancelled} of these cancelled; {result.failed} "
        f"failed while the provider was away, {len(result.other)} otherwise {sorted(set(result.other))}\n"
        f"provider killed {result.deaths} times; {result.distinct} different reference answers\n"
        f"masked rows sent: {result.rows}, of these twice: {result.rows_twice}\n"
        f"still held at the end: {result.left[0]} requests, {result.left[1]} bytes of KV, {result.left[2]} adapters"
    )
    return 0 if result.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
