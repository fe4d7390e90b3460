"""Runs adversaries against the recorded traffic of one mask, and makes the report's lines from their claims."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from attacks.adversaries import byte_statistics, lattice_equations, slot_reuse
from attacks.report.table import FAILED, KL, Finding, Result, unclaimed, verdict_on
from attacks.report.verdict import METADATA
from attacks.seen.adversary import Adversary, Claim, StolenDelta, StolenDifference, StolenFact, StolenRows, StolenTokens
from attacks.seen.forward_passes import Opened
from attacks.seen.public_model import PublicModel
from attacks.seen.view import View
from attacks.truth.judge import in_words, judge
from attacks.truth.secrets import Batch, Truth
from attacks.truth.stolen_adapter import Gain, PrivateTask, Worth, write_adapter
from attacks.victim.draws import Check
from wire.errors import ConfigurationError

_CERTAIN: dict[str, tuple[str, ...]] = {
    "slot-reuse": (slot_reuse.SHARED_ROWS, slot_reuse.SHARED_SECRET),
    "byte-statistics": (byte_statistics.FACT,),
    "no-error": (),
    "tiny-error": (),
    "lattice-reduction": (),
    "seed-search": (),
    "sparse-secret": (),
    "shared-error": (lattice_equations.SHARED,),
}
"""The adversaries that check each claim before they make it, so that less than one claim in 2^40 is a mistake. Each is
mapped to the names of those of its facts that count in the verdict; its claims of other kinds always count."""
_THIEVES = ("layer-0 lookup", "deep-state inversion", "closed-form", "gradient-view", "gradient-equations")
"""The adversaries that run a second time, on unmasked rows, if another adversary has unmasked rows."""
_WHO = ("base", "victim", "stolen")
_NOTICED = 0.04
"""The smallest half-width of an interval of chance, for a gain or an agreement; a narrower interval is widened to this.
The verdict alarms at 2.5 times this, which is a tenth. A smaller distance would be only a few tokens in a hundred."""
_WON = 0.9
"""An attacker wins with at least this share of the victim's gain, or of the victim's answers."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """Holds one mask's view, and the truth about it.

    Attributes:
        label: the run's label, or the tenant's name.
        mask: the mask's name; `verdict.UNKNOWN` if the mask is not known.
        truth: the victim's secrets; None if they are not known. Claims are then counted and written down, but not
            judged.
        sent: for each prompt, the tokens that went through the layers; empty if they are not known.
        task: private questions, for the gain; None if there are none.
        trained: the batches of the victim's training steps, in order; empty if they are not known.
        tenant: the tenant's name for the report, if the traffic is not that of a run made here.
        draws: tests of the random numbers of the victim's masks, made inside the victim; empty if none were made.
    """

    label: str
    mask: str
    view: View
    public: PublicModel
    truth: Truth | None
    sent: Sequence[Sequence[int]]
    task: PrivateTask | None
    trained: Sequence[Batch] = ()
    tenant: str | None = None
    draws: Sequence[Check] = ()

    @property
    def arithmetic(self) -> str:
        """Returns the arithmetic of the first answered request for a product: `float` or `ring`; `ring` without one."""
        return next((message.arithmetic for message in self.view.select("product")), "ring")


def parts(adversaries: Sequence[Adversary]) -> list[list[Adversary]]:
    """Divides the adversaries into three parts that may run at the same time. In order, these are `_THIEVES`, all
    others, and adversaries that unmask rows."""
    thieves = [one for one in adversaries if one.name in _THIEVES]
    openers = [one for one in adversaries if one.opens_masks]
    return [thieves, [one for one in adversaries if one not in thieves and one not in openers], openers]


def attack(
    case: Case, part: Sequence[Adversary], adversaries: Sequence[Adversary], out: Path, say: Say
) -> list[Result]:
    """Runs the adversaries of one part on one mask and returns the report's lines. If one of them unmasks rows, the
    `_THIEVES` run once more on these rows. If the view has no tensors, only the adversary `METADATA` is run.

    Args:
        case: the mask's view and the truth about it.
        part: the adversaries to run.
        adversaries: all adversaries of the report; the `_THIEVES` among them run on unmasked rows.
        out: the folder below which stolen adapters and prompts are written.
        say: a function that is called with progress and failures, one line each.

    Raises:
        ConfigurationError: the recording cannot be read.
    """
    results: list[Result] = []
    opened: dict[str, Opened] = {}
    if not case.view.with_tensors().messages:
        part = [one for one in part if one.name == METADATA]  # without tensors the others would find nothing
    for one in part:
        claims = _run(one, case, None, say)
        results += _judged(case, one.name, claims, out)
        stolen = {claim.seq: claim.rows for claim in claims if isinstance(claim, StolenRows)}
        if one.opens_masks and stolen:
            opened[one.name] = stolen
    for opener, rows in opened.items():
        for one in adversaries:
            if one.name in _THIEVES:
                results += _judged(case, f"{opener} + {one.name}", _run(one, case, rows, say), out)
    return results


def _run(one: Adversary, case: Case, opened: Opened | None, say: Say) -> list[Claim]:
    """Returns an adversary's claims. If the adversary raises an exception, its only claim is the fact `FAILED`, which
    the verdict counts, so that other adversaries still run.

    Raises:
        ConfigurationError: the recording cannot be read.
    """
    began = time.monotonic()
    try:
        claims = one.attack(case.view, case.public, opened)
    except ConfigurationError:
        raise
    except Exception as exc:  # noqa: BLE001 - its own mistake, on a view that nobody tried before
        say(f"{case.label}: {one.name} FAILED: {type(exc).__name__}: {str(exc)[:200]}")
        return [StolenFact(FAILED, type(exc).__name__)]
    say(f"{case.label}: {one.name}{' on opened rows' if opened else ''}: {time.monotonic() - began:.1f} s")
    return claims


def _judged(case: Case, name: str, claims: Sequence[Claim], out: Path) -> list[Result]:
    truth = case.truth
    findings = _counted(claims) if truth is None else judge(claims, case.view, truth, case.sent, case.trained)
    findings += _certain(name, claims)
    if truth is not None:
        findings += _unjudged(claims, {one.module for one in findings}, _CERTAIN.get(name, ()))
    deltas = [claim for claim in claims if isinstance(claim, StolenDelta)]
    folder = out / "stolen" / f"{case.label}-{name.replace(' ', '-')}"
    stolen = write_adapter(deltas, case.public, folder) if deltas else None
    _write_prompts([claim for claim in claims if isinstance(claim, StolenTokens)], case.public, folder)
    if stolen is not None and case.task is not None:
        findings += _worth(case.task.measure(stolen), folder)
    return [Result(case.mask, case.arithmetic, name, finding, case.tenant) for finding in findings or _silent(claims)]


def _silent(claims: Sequence[Claim]) -> list[Finding]:
    """Returns the table's line for an adversary with nothing to judge, because it made no claim, or only claims whose
    truth is not known."""
    if not claims:
        return [unclaimed("–", "–")]
    return [Finding("claims", "claimed", float(len(claims)), 0.0, (0.0, 0.0), "not judged")]


def _certain(name: str, claims: Sequence[Claim]) -> list[Finding]:
    """Returns a line that counts the claims of an adversary of `_CERTAIN`, which count even if their contents cannot be
    judged, or a line that says that the adversary failed. Returns an empty list if there is neither."""
    failed = sum(isinstance(claim, StolenFact) and claim.name == FAILED for claim in claims)
    if failed:
        return [Finding("adversary", FAILED, 1.0, 0.0, (0.0, 0.0), FAILED)]
    told = _CERTAIN.get(name, ())
    count = sum(not isinstance(claim, StolenFact) or claim.name in told for claim in claims)
    if name not in _CERTAIN or not count:
        return []
    return [Finding("mask", "certain claims", float(count), 0.0, (0.0, 0.0), "wins")]


def _write_prompts(claims: Sequence[StolenTokens], public: PublicModel, folder: Path) -> None:
    """Writes the tokens that the adversary claims to prompts.json, as text if the model has a tokenizer."""
    if not claims:
        return
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = public.tokenizer
    read = [
        {"prompt": claim.prompt, "text": tokenizer.decode(claim.token_ids) if tokenizer else list(claim.token_ids)}
        for claim in claims
    ]
    (folder / "prompts.json").write_text(json.dumps(read, ensure_ascii=False, indent=1))


def _counted(claims: Sequence[Claim]) -> list[Finding]:
    names = {StolenDelta: "layers", StolenTokens: "prompts", StolenRows: "messages", StolenDifference: "differences"}
    found = []
    for kind, name in names.items():
        count = sum(isinstance(claim, kind) for claim in claims)
        if count:
            found.append(Finding(name, "claimed", float(count), 0.0, (0.0, 0.0), "not judged"))
    return [*found, *_unjudged(claims, set(), ())]


def _unjudged(claims: Sequence[Claim], judged: Collection[str], certain: Collection[str]) -> list[Finding]:
    """Returns a line for each claimed fact whose truth is not known, except for facts that other lines show."""
    facts = [claim for claim in claims if isinstance(claim, StolenFact)]
    return [
        Finding(one.name, "claimed", 1.0, 0.0, (0.0, 0.0), "not judged", said=in_words(one))
        for one in facts
        if one.name not in judged and one.name not in certain and one.name != FAILED
    ]


def _worth(gain: Gain, folder: Path) -> list[Finding]:
    (folder / "answers.json").write_text(json.dumps([dict(zip(_WHO, each, strict=True)) for each in gain.answers]))
    return [
        _worth_of("stolen task gain", gain.gain),
        replace(_worth_of("agreement of answers", gain.agreement), said=_first_answer(gain)),
        _divergence_of(gain.divergence),
    ]


def _divergence_of(worth: Worth) -> Finding:
    verdict = verdict_on(worth.value, worth.by_chance, worth.value < (1 - _WON) * worth.baseline, False)
    return Finding("adapter", KL, worth.value, worth.baseline, worth.by_chance, verdict, worth.spread)


def _worth_of(metric: str, worth: Worth) -> Finding:
    """Returns the table's line for one value of a stolen adapter. Its interval of chance is widened to at least
    `_NOTICED` on each side of the baseline, because the bootstrap's interval covers only the choice of questions, not
    an attacker's luck."""
    low, high = worth.by_chance
    interval = min(low, worth.baseline - _NOTICED), max(high, worth.baseline + _NOTICED)
    verdict = verdict_on(worth.value, interval, worth.value >= max(_WON, interval[1]))
    return Finding("adapter", metric, worth.value, worth.baseline, interval, verdict, worth.spread)


def _first_answer(gain: Gain) -> str:
    """Returns a text with the answers of base model, victim and stolen adapter to the first private question; it is
    empty if there are no answers. The other answers are in answers.json."""
    if not gain.answers:
        return ""
    said = dict(zip(_WHO, gain.answers[0], strict=True))
    return ", ".join(f"{who} “{said[who].strip()}”" for who in reversed(_WHO))
