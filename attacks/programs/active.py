"""Runs `python -m attacks.active`, which shows what a provider learns of the tenant by replying wrongly on purpose.

The provider is honest except for one fault: a wrong hint, a wrong product or a reply sent again. It can see metadata:
which calls come, with how many rows, and when they end. If two secrets of the same shape give the same metadata under a
fault, the fault told the provider nothing. If the two give different metadata, the provider has an oracle.

The faults are made in the provider only. The tenant is the public SDK with the shipped mask parameters. The program
measures a few faults on a tiny model. If none of them is an oracle, another fault may still be one. The program does
not look at timing. Source of the question: docs/threat-model.md, "A provider that lies".
"""

from __future__ import annotations

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal
from unittest import mock

import torch

from attacks.programs import row_counts
from attacks.programs.providers import HonestOffer, tenant_of
from attacks.report.exit_status import exit_status, out_parser
from attacks.report.stages import counted, say
from attacks.victim import models
from noise import sampling
from noise.verify import FAILED
from provider.embedded import serve_in_process
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient
from wire.errors import VeilbaseError
from wire.frame import Call, Direction, Purpose
from wire.ring.seeded_rows import Rows, SeededRows, count_rows

NEW_TOKENS = 8
"""The length limit of an answer in tokens; an honest answer to these prompts has exactly this many."""
PROMPTS = (
    "who founded it?", "where is depot?", "in which year? ", "what is a seal?", "who signs this?", "what is plan B?",
    "which river is?", "what code is 7?",
)  # fmt: skip
"""The prompts are the secrets. All have the same length, so that honest runs look alike."""
DATA = (
    (("who founded us?", " Ada Quill"), ("whose is depot?", " Port Hale")),
    (("what is in it? ", " 7-amber-3"), ("which river is?", " the Senn.")),
)
"""These are two data sets of the same shape. Their contents are the secrets."""
_RANK = 4
_TRAIN_STEPS = 2


@dataclass(frozen=True)
class Fault:
    """Describes how the provider falsifies its replies of one kind: it changes one number of each reply, in the output
    head's column of the end-of-answer token, or sends the previous reply again.

    Attributes:
        purpose, direction: the kind of requests whose replies are changed. In the reply to a request for a product the
            last row is changed, and for a hint the first row.
        delta: the number that is added mod 2^32; None means that the previous reply is sent again, if it has the same
            shape.
        first: how many replies of the kind are honest before the first wrong one.
    """

    name: str
    purpose: Purpose
    direction: Direction
    delta: int | None
    first: int = 0


_FORWARD, _BACKWARD = Direction.FORWARD, Direction.BACKWARD
FORWARD_FAULTS = (
    Fault("product + 1", Purpose.PRODUCT, _FORWARD, 1),
    Fault("product + 2^29", Purpose.PRODUCT, _FORWARD, 1 << 29),
    Fault("product + 2^30", Purpose.PRODUCT, _FORWARD, 1 << 30),
    Fault("product + 2^31", Purpose.PRODUCT, _FORWARD, 1 << 31),
    Fault("reply replayed", Purpose.PRODUCT, _FORWARD, None, 1),
    Fault("hint + 1, one entry", Purpose.HINT, _FORWARD, 1),
    Fault("hint + 2^30, one entry", Purpose.HINT, _FORWARD, 1 << 30),
    Fault("hint + 2^31, one entry", Purpose.HINT, _FORWARD, 1 << 31),
)
BACKWARD_FAULTS = (
    Fault("gradient + 2^31", Purpose.PRODUCT, _BACKWARD, 1 << 31),
    Fault("gradient replayed", Purpose.PRODUCT, _BACKWARD, None, 1),
    Fault("gradient hint + 2^30, one entry", Purpose.HINT, _BACKWARD, 1 << 30),
)
TRAINING_FAULTS = FORWARD_FAULTS[:1] + FORWARD_FAULTS[3:5] + FORWARD_FAULTS[6:7] + BACKWARD_FAULTS
SECRET_FAULT = FORWARD_FAULTS[6]
"""The fault in a hint by which the provider reads secrets. Because of it, row t of a block is wrong, in the column of
the end-of-answer token, by 2^30 times coefficient t of the block's first secret polynomial."""

Job = Literal["answers", "repeated", "training"]


@dataclass(frozen=True)
class Seen:
    """Holds the metadata of one request."""

    purpose: str
    direction: str
    group: int
    num_rows: int


@dataclass(frozen=True)
class Outcome:
    """Holds the result of one fault against one job, over all of the job's secrets.

    Attributes:
        job: `answers` (different prompts are answered), `repeated` (one prompt is answered several times) or `training`
            (on different data).
        fault: the fault's name; None for the honest run.
        verify: whether the tenant checks replies.
        caught: whether every run ended with the fixed error of a failed check.
        failed: the number of runs that ended in any error.
        requests_after: the most requests of a run after the first wrong reply. They include those of another prompt,
            which the tenant tries after an error.
        metadata: how runs compare with their honest runs: all are the `same`, all are the same but some are `cut
            short`, or some are `different`.
        decode_steps: the number of decode steps of each answer; empty for training.
        answer_length_changed: whether some run has another number of decode steps than its honest run; always False if
            `caught` is True.
        tells_secrets_apart: whether the metadata differed between runs that differ only in the secret.
    """

    job: Job
    fault: str | None
    verify: bool
    caught: bool
    failed: int
    requests_after: int
    metadata: Literal["same", "cut short", "different"]
    decode_steps: tuple[int, ...]
    answer_length_changed: bool
    tells_secrets_apart: bool


@dataclass(frozen=True)
class SecretReading:
    """Holds how well the provider reads the mask's own secret from answer lengths, with SECRET_FAULT and without
    `verify`.

    Attributes:
        num_answers: the number of sessions, each with one answer.
        num_claims: the number of answers that ended early. If an answer ends in row t, the provider claims that
            coefficient t is -1.
        num_right: the number of right claims; a guess is right in a third of the cases.
    """

    num_answers: int
    num_claims: int
    num_right: int


@dataclass
class Liar(HonestOffer):
    """Plays a provider that is honest except for one fault, and notes the metadata of every request.

    Attributes:
        fault: the fault; None for an honest provider.
        group, column: the output head's group, and the head's column of the end-of-answer token.
        seen: the metadata of the requests so far, in order.
        first_wrong: the number of requests up to the first wrong reply, included; None before it.
    """

    fault: Fault | None
    group: int
    column: int
    seen: list[Seen] = field(default_factory=list)
    first_wrong: int | None = None
    _before: torch.Tensor | None = field(default=None, repr=False)
    _num_matching: int = 0

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        """Returns the product, or a wrong one if the fault applies."""
        num_rows = count_rows(rows)
        self.seen.append(Seen(call.purpose.name.lower(), call.direction.name.lower(), call.group, num_rows))
        reply = self.served_model.compute(call, rows)
        fault = self.fault
        if fault is None or (call.group, call.purpose, call.direction) != (self.group, fault.purpose, fault.direction):
            return reply
        if isinstance(rows, SeededRows) and rows.first_row:
            return reply  # a later part of the hint; the changed entry is in the first part
        forged = self._forged(fault, reply)
        if forged is not reply and self.first_wrong is None:
            self.first_wrong = len(self.seen)
        return forged

    def _forged(self, fault: Fault, reply: torch.Tensor) -> torch.Tensor:
        self._num_matching += 1
        before, self._before = self._before, reply
        if self._num_matching <= fault.first:
            return reply
        if fault.delta is None:
            return reply if before is None or before.shape != reply.shape else before
        forged = reply.clone()
        row = 0 if fault.purpose is Purpose.HINT else -1
        value = (int(forged[row, self.column]) + fault.delta + (1 << 31)) % (1 << 32) - (1 << 31)
        forged[row, self.column] = value
        return forged


@dataclass
class Site:
    """Holds a tiny model, its provider, and the folder of the tenants that connect to it."""

    folder: Path
    model: Path
    served_model: ServedModel
    group: int
    column: int
    num_sessions: int = 0

    @contextlib.contextmanager
    def session(self, fault: Fault | None, verify: bool) -> Iterator[tuple[TenantClient, Liar]]:
        """Opens a session of a tenant with the default mask, connected to a provider with a fault."""
        liar = Liar(self.served_model, fault, self.group, self.column)
        # hints are streamed, because later sessions would use a stored hint, even a forged one
        options = {"hints": "stream", "background": False}
        self.num_sessions += 1
        verified = self.model if verify else None
        with tenant_of(liar, self.folder / "cache", mask="lattice", verify=verified, mask_options=options) as client:
            yield client, liar

    def answer(self, client: TenantClient, prompt: str) -> None:
        """Asks for one answer of at most NEW_TOKENS tokens."""
        client.generate(prompt, max_new_tokens=NEW_TOKENS)

    def train(self, client: TenantClient, data: Sequence[tuple[str, str]]) -> None:
        """Fine-tunes with a fixed number of steps."""
        from peft import LoraConfig

        rows = [{"prompt": question, "completion": answer} for question, answer in data]
        client.finetune(
            rows, LoraConfig(task_type="CAUSAL_LM", r=_RANK, target_modules="all-linear"),
            self.folder / f"adapter{self.num_sessions}", max_steps=_TRAIN_STEPS, batch_size=2, warmup_steps=0,
            progress=False, resume=False, overwrite=True,
        )  # fmt: skip


def site(folder: Path) -> Site:
    """Makes the model and its provider below `folder`."""
    model = models.make("tiny-llama", folder / "model")
    served_model = serve_in_process(str(model))
    head = next(group for group in served_model.manifest().groups if group.layers[0].name == "lm_head")
    return Site(folder, model, served_model, head.id, models.SPECIAL.index("<|end|>"))


@dataclass(frozen=True)
class _Run:
    """Holds what the provider saw of one secret under one fault, and how the run ended."""

    seen: tuple[Seen, ...]
    error: str | None
    requests_after: int
    num_decode_steps: int


def _run(where: Site, fault: Fault | None, verify: bool, work: Callable[[TenantClient], None]) -> _Run:
    """Runs one session. After an error the tenant tries another prompt. The requests for this prompt count towards
    `requests_after`."""
    error: str | None = None
    with where.session(fault, verify) as (client, liar):
        try:
            work(client)
        except VeilbaseError as exc:
            error = str(exc)
            with contextlib.suppress(VeilbaseError):
                where.answer(client, PROMPTS[0])
        after = len(liar.seen) - liar.first_wrong if liar.first_wrong is not None else 0
        head = (where.group, "product", "forward")
        steps = sum((one.group, one.purpose, one.direction) == head for one in liar.seen)
        return _Run(tuple(liar.seen), error, after, steps)


def _outcome(job: Job, fault: Fault | None, verify: bool, runs: Sequence[_Run], honest: Sequence[_Run]) -> Outcome:
    caught = all(run.error == FAILED for run in runs)
    pairs = list(zip(runs, honest, strict=True))
    return Outcome(
        job, fault.name if fault else None, verify, caught,
        failed=sum(run.error is not None for run in runs),
        requests_after=max(run.requests_after for run in runs),
        metadata=_compared(pairs),
        decode_steps=() if job == "training" else tuple(run.num_decode_steps for run in runs),
        answer_length_changed=not caught and any(run.num_decode_steps != true.num_decode_steps for run, true in pairs),
        tells_secrets_apart=len({run.seen for run in runs}) > 1,
    )  # fmt: skip


def _compared(pairs: Sequence[tuple[_Run, _Run]]) -> Literal["same", "cut short", "different"]:
    if all(run.seen == true.seen for run, true in pairs):
        return "same"
    return "cut short" if all(run.seen == true.seen[: len(run.seen)] for run, true in pairs) else "different"


def measure(folder: Path, num_prompts: int = 5) -> list[Outcome]:
    """Runs the honest jobs, then every fault against every job, with and without `verify`. The job `repeated` runs only
    without `verify`.

    Args:
        folder: an empty folder for the model and the tenants' caches.
        num_prompts: how many of PROMPTS are used, and how often the job `repeated` sends one prompt.
    """
    where = site(folder)
    answers = [functools.partial(where.answer, prompt=prompt) for prompt in PROMPTS[:num_prompts]]
    training = [functools.partial(where.train, data=data) for data in DATA]
    outcomes: list[Outcome] = []
    for verify in (True, False):
        outcomes += _faults(where, "answers", answers, FORWARD_FAULTS, verify)
        if not verify:
            outcomes += _faults(where, "repeated", answers[:1] * num_prompts, FORWARD_FAULTS, verify)
        outcomes += _faults(where, "training", training, TRAINING_FAULTS, verify)
    return outcomes


def _faults(
    where: Site, job: Job, work: Sequence[Callable[[TenantClient], None]], faults: Sequence[Fault], verify: bool
) -> list[Outcome]:
    told = f"{job}, verify {'on' if verify else 'off'}"
    say(f"{told}: an honest provider")
    honest = [_run(where, None, verify, each) for each in work]
    outcomes = [_outcome(job, None, verify, honest, honest)]
    for fault in counted(f"{told}, fault", faults, lambda one: one.name):
        outcomes.append(_outcome(job, fault, verify, [_run(where, fault, verify, each) for each in work], honest))
    return outcomes


def read_secret(folder: Path, num_answers: int = 24) -> SecretReading:
    """Derives coefficients of the mask's secret from answer lengths alone, and compares them with the true secret.

    Row 0 of the public matrix A is coefficient 0 of A's first polynomials. If an entry of the hint in this row is wrong
    by δ, row t of a block is unmasked with an error of δ·s[t], where s is the secret. If s[t] is -1, the logit of the
    end-of-answer token rises by 2^30 units of the ring, and the answer ends in row t.

    Args:
        folder: an empty folder.
        num_answers: the number of sessions; the prompts are used in turn.
    """
    where = site(folder)
    claimed = right = 0
    drawn: list[torch.Tensor] = []
    draw = sampling.ternary

    def noting(rng: sampling.Csprng, shape: Sequence[int]) -> torch.Tensor:
        drawn.append(draw(rng, tuple(shape)))
        return drawn[-1].clone()

    with mock.patch.object(sampling, "ternary", noting):
        for number in range(num_answers):
            prompt = PROMPTS[number % len(PROMPTS)]
            run = _run(where, SECRET_FAULT, False, functools.partial(where.answer, prompt=prompt))
            last_row = run.num_decode_steps - 1
            if run.num_decode_steps < NEW_TOKENS:
                claimed += 1
                right += int(drawn[-1][0, 0, last_row]) == -1  # the secret of the output head, whose block is made last
    return SecretReading(num_answers, claimed, right)


def lines(outcomes: Sequence[Outcome], reading: SecretReading | None = None) -> list[str]:
    """Returns a Markdown table and, if there is a `SecretReading`, a line about the mask's secret."""
    table = [
        "| verify | job | fault | caught | requests after it | metadata | decode steps | secrets told apart |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        caught = "–" if one.fault is None else _yes(one.caught)
        steps = " ".join(map(str, one.decode_steps)) or "–"
        table.append(
            f"| {'on' if one.verify else 'off'} | {one.job} | {one.fault or 'none'} | {caught} | {one.requests_after} "
            f"| {one.metadata} | {steps} | {_yes(one.tells_secrets_apart)} |"
        )
    if reading is not None:
        table += ["", f"Without verify, “{SECRET_FAULT.name}”: {reading.num_claims} of {reading.num_answers} answers "
                  f"ended early; each was read as one coefficient of the mask's secret, {reading.num_right} rightly "
                  "(guessing: a third)."]  # fmt: skip
    return table


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes active.json and active.md. Returns 1 if `verify` let a fault pass, or if `row_counts.is_held_off` is
    false for the hostile bundles; 2 for a request that cannot be carried out; otherwise 0."""
    options = out_parser("active").parse_args(arguments)
    torch.set_num_threads(1)
    return exit_status("attacks.active", options.out, lambda: _measure_and_report(options.out))


def _measure_and_report(out: Path) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = measure(Path(scratch) / "faults")
        say("the mask's secret, read from the lengths of answers")
        reading = read_secret(Path(scratch) / "secret")
        leaks = row_counts.measure(Path(scratch) / "rows")
    table = [*lines(outcomes, reading), "", *row_counts.lines(leaks)]
    data = {
        "outcomes": [asdict(one) for one in outcomes],
        "secret_reading": asdict(reading),
        "row_counts": [asdict(one) for one in leaks],
    }
    (out / "active.json").write_text(json.dumps(data, indent=1) + "\n")
    (out / "active.md").write_text("\n".join(["# A provider that answers wrongly", "", *table, ""]))
    print("\n".join(table))
    caught = all(one.caught for one in outcomes if one.verify and one.fault)
    return 0 if caught and row_counts.is_held_off(leaks) else 1
