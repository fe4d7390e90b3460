"""Runs `python -m attacks.game`, which tests whether two known texts, or two known adapters, can be told apart behind a
mask.

Each run tosses a coin, masks one of two known inputs of a layer with the code of noise/, and lets every score of
attacks/adversaries/distinguisher.py rate what a provider would see. The result is the area under the ROC curve (AUC) of
each score. An AUC of 1.0 means that the score always tells the inputs apart, and 0.5 means guessing. A message fills a
whole block of the default parameters (512 rows). So every run of the lattice game has its own secret and its own error,
and runs are independent. An interval around 0.5 shows that these scores find nothing in this number of runs. It is not
a proof.

The intervals of all scores hold together with 99.9% confidence (Bonferroni). The half-width of an interval is the
normal quantile times the standard error from a bootstrap over the runs. Even with a perfect mask, an interval misses
0.5 in one game of a thousand. So play again before you conclude anything.

The exit status is 0 if every interval contains 0.5 and every control wins, 1 if not, and 2 for a request that cannot be
carried out. If FULL_RUNS runs or more are played, no half-width may be above NEEDED_HALF_WIDTH, or the status is 1.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from attacks.adversaries.distinguisher import SCORES, Known, Seen, known
from attacks.controls import ControlResult
from attacks.game import FULL_RUNS, MASKS, QUICK_RUNS, make_parser
from attacks.report.exit_status import exit_status
from attacks.report.stages import say
from attacks.victim.models import tiny_model
from noise import params, sampling
from noise.hints.store import DEFAULT_DROPPED_BITS
from noise.ledger.ledger import Ledger
from noise.polynomial import negacyclic
from noise.registry import Setting, make_scheme
from noise.scheme import GroupSpec, MaskScheme, encode_rows, error_bounds, product_call
from wire.errors import ConfigurationError
from wire.frame import Call, Direction
from wire.payload import Payload
from wire.ring import coding
from wire.ring.quantise import digest, max_norms, quantise
from wire.ring.seeded_rows import SEED_BYTES, SeededRows
from wire.ring.widths import FULL_BITS, rounded

# ---- the inputs: one of two texts, or one of two adapters over the same text ----------------------------------------

SECRETS = ("prompt", "adapter")
PARAMETERS = params.PARAMETERS["default"]
"""The parameters of the game's masks. Each message fills a block of mask rows under these parameters."""
_SEQUENCES = 2
_NUM_LINES = 5
"""How many lines say how far a game is."""
REUSE = "lattice, a slot used twice"


@dataclass(frozen=True)
class Choice:
    """Holds one group (layers that read the same input) and the two inputs between which the game's coin
    chooses.

    Attributes:
        group: the facts about the group that a mask scheme needs.
        weight: W̃, the int8 weight, shape (in_features, out_features).
        inputs: the two inputs, each float32, shape (512, in_features).
    """

    group: GroupSpec
    weight: torch.Tensor
    inputs: tuple[torch.Tensor, torch.Tensor]


def choice(secret: str) -> Choice:
    """Returns the inputs for a secret: two texts at the first layer, or one text under two adapters at the second
    block's first layer.

    Raises:
        ConfigurationError: there is no such secret.
    """
    if secret not in SECRETS:
        raise ConfigurationError(f"the secret is one of {', '.join(SECRETS)}, got {secret!r}")
    generator = torch.Generator().manual_seed(11)
    shape = 2, _SEQUENCES, PARAMETERS.ring_degree // _SEQUENCES
    texts = torch.randint(64, shape, generator=generator)
    if secret == "prompt":  # noqa: S105 - the name of a game, not a secret
        block, models = 0, (tiny_model(), tiny_model())
    else:
        block, models = 1, (_adapted(1), _adapted(2))
        texts[1] = texts[0]
    first, second = (_inputs(model, text, block) for model, text in zip(models, texts, strict=True))
    attention = tiny_model().model.layers[block].self_attn
    parts = [quantise(getattr(attention, name).weight.detach().t()) for name in ("q_proj", "k_proj", "v_proj")]
    weight, alpha = torch.cat([part[0] for part in parts], dim=1), torch.cat([part[1] for part in parts])
    num_in, num_out = weight.shape
    group = GroupSpec(0, num_in, num_out, *max_norms(weight), alpha, digest(weight, alpha))
    return Choice(group, weight, (first, second))


def _adapted(seed: int) -> Any:
    """Returns a copy of the tiny model with a random LoRA of rank 4, whose ΔW is about as large as that of a trained
    one."""
    from peft import LoraConfig, get_peft_model

    generator = torch.Generator().manual_seed(seed)
    adapted: Any = get_peft_model(
        copy.deepcopy(tiny_model()), LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapted.base_model.model


def _inputs(model: Any, token_ids: torch.Tensor, block: int) -> torch.Tensor:
    """Returns the input of a block's first layers, float32, shape (num_rows, hidden)."""
    seen: list[torch.Tensor] = []
    module = model.model.layers[block].self_attn.q_proj
    hook = module.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    try:
        with torch.no_grad():
            model(input_ids=token_ids)
    finally:
        hook.remove()
    return seen[0].reshape(-1, seen[0].shape[-1])  # (sequences, tokens, hidden) to (rows, hidden)


CONFIDENCE = 0.999
NEEDED_HALF_WIDTH = 0.03
CONTROL_RUNS = 200
NEEDED_CONTROL = 0.95
_RESAMPLES = 1000
"""The number of bootstrap samples, which determines a standard deviation to 2.2%."""
_NARROW_BITS, _COARSE_BITS = 26, 4


# ---- what is seen ---------------------------------------------------------------------------------------------------

Sender = Callable[[int], Seen]
"""A sender plays one run: it maps the coin to what the adversary sees."""


@dataclass(frozen=True)
class _Sent:
    reply: torch.Tensor

    def result(self) -> torch.Tensor:
        return self.reply


class Tenant:
    """Holds a mask, bound to a provider of one group (layers that read the same input), and what the adversary knows of
    the two inputs."""

    def __init__(self, mask: str, secret: str, folder: Path) -> None:
        """Makes the tenant's mask, and connects the mask to a provider in the same process.

        Args:
            mask: one of MASKS.
            secret: one of SECRETS.
            folder: holds the ledger and hints.

        Raises:
            ConfigurationError: the mask or the secret is unknown.
        """
        if mask not in MASKS:
            raise ConfigurationError(f"the game is played on ring arithmetic, with one of {', '.join(MASKS)}")
        self.choice = choice(secret)
        self._seed = bytes(SEED_BYTES)  # masks without a public matrix fit any matrix
        options = {} if mask in ("shares", "off") else {"background": False}
        self._scheme: MaskScheme = make_scheme(mask, "ring", options, self._setting(folder, mask))
        self._scheme.bind(self._effect)
        self.candidates = self._encoded(mask)
        self._before = self.message(0), self.candidates[0]

    def _setting(self, folder: Path, mask: str) -> Setting:
        return Setting(
            "int8", ("ring",), lambda: Ledger.open(folder / "ledger", "tenant"), folder / "hints",
            num_providers=2 if mask == "shares" else 1, weight_of=lambda _: self.choice.weight,
        )  # fmt: skip

    def _effect(self, call: Call, payload: Payload, reply_cols: int) -> _Sent:
        rows = payload.rows(call)
        if not isinstance(rows, SeededRows):
            raise ConfigurationError("this provider answers hints only")
        self._seed = rows.seed  # the seed is public: the provider receives it
        return _Sent(coding.product(rows.expand(self.choice.weight.shape[0]), self.choice.weight))

    def _encoded(self, mask: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns both inputs encoded as integers x̃, with the scale that this mask uses."""
        group, error, slack = self.choice.group, 0.0, 0.0
        if mask == "lattice":
            error = sampling.error_bound(PARAMETERS)
            slack = float((1 << (DEFAULT_DROPPED_BITS - 1)) * PARAMETERS.dimension)
        room = error_bounds(self.call, group.in_features, error, slack)
        first, second = (encode_rows(group, Direction.FORWARD, rows, *room)[0] for rows in self.choice.inputs)
        return first, second

    @property
    def known(self) -> Known:
        """Returns what the adversary knows after the first message, which makes the seed public."""
        return known(self.candidates, self.public_matrix, self.call.bits)

    @property
    def call(self) -> Call:
        """Returns the call of every message, which says how many bits of a number are sent."""
        return product_call(self.choice.group, Direction.FORWARD, self._scheme.precision)

    @functools.cached_property
    def public_matrix(self) -> torch.Tensor:
        """Returns the public matrix A, int32, shape (rank·512, in_features)."""
        return SeededRows(self._seed, 0, PARAMETERS.dimension).expand(self.choice.group.in_features)

    def message(self, coin: int) -> torch.Tensor:
        """Returns one input under fresh mask rows, as the provider receives it, int32. With the mask `shares`, this is
        the provider that receives masked rows and not seeds."""
        rows = self._scheme.mask(self.choice.group, Direction.FORWARD, self.choice.inputs[coin]).messages[0].rows
        if not isinstance(rows, torch.Tensor):
            raise ConfigurationError("the first message of this mask has no rows")
        return rows

    def send(self, coin: int) -> Seen:
        """Plays one run. `Seen.before` is the message of the previous run, whose text the adversary was told."""
        before, plain = self._before
        sent = self.message(coin)
        self._before = sent, self.candidates[coin]
        return Seen(sent, before, plain)

    def close(self) -> None:
        """Closes the mask scheme, which drops the remaining masks."""
        self._scheme.close()


# ---- the game -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Holds the result of one score over all runs."""

    score: str
    auc: float
    interval: tuple[float, float]

    @property
    def half_width(self) -> float:
        """Returns half of the interval's width."""
        return (self.interval[1] - self.interval[0]) / 2

    @property
    def is_at_chance(self) -> bool:
        """Returns whether the interval holds 0.5."""
        return self.interval[0] <= 0.5 <= self.interval[1]


def play(mask: str = "lattice", num_runs: int = FULL_RUNS, secret: str = "prompt") -> list[Outcome]:  # noqa: S107
    """Plays one game against a mask with the default parameters of noise/.

    Args:
        mask: one of MASKS.
        num_runs: the number of independent runs.
        secret: one of SECRETS.

    Raises:
        ConfigurationError: the mask or the secret is unknown, or there are too few runs to compare the two inputs.
    """
    with _tenant(mask, secret) as tenant:
        played = run(tenant.send, tenant.known, num_runs, f"{mask}, {secret}")
    say("the intervals of the scores")
    return outcomes(*played)


@contextlib.contextmanager
def _tenant(mask: str, secret: str = "prompt") -> Iterator[Tenant]:  # noqa: S107 - as in `choice`
    with tempfile.TemporaryDirectory() as folder:
        tenant = Tenant(mask, secret, Path(folder))
        try:
            yield tenant
        finally:
            tenant.close()


def run(send: Sender, facts: Known, num_runs: int, what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tosses the coins and scores the views.

    Args:
        send: sends one message.
        facts: what the provider knows.
        num_runs: how many messages are sent.
        what: what is played, for the lines that say how far it is.

    Returns:
        scores, float64, shape (num_scores, num_runs); coins, bool, shape (num_runs,).

    Raises:
        ConfigurationError: there are fewer than 2 runs.
    """
    if num_runs < 2:
        raise ConfigurationError(f"a game takes at least 2 runs, got {num_runs}")
    coins = torch.randint(2, (num_runs,), generator=torch.Generator().manual_seed(1)).bool()
    scores = torch.empty(len(SCORES), num_runs, dtype=torch.float64)
    for index, coin in enumerate(coins.tolist()):
        if index % max(1, num_runs // _NUM_LINES) == 0:
            say(f"{what}: {index} of {num_runs} runs")
        seen = send(int(coin))
        scores[:, index] = torch.tensor([score(facts, seen) for score in SCORES.values()], dtype=torch.float64)
    return scores, coins


def outcomes(scores: torch.Tensor, coins: torch.Tensor) -> list[Outcome]:
    """Computes the AUC and the interval of every score from the results of `run`.

    Raises:
        ConfigurationError: all coins are equal, or a score is not finite or is the same in all runs, so that there is
            nothing to compare.
    """
    if bool(coins.all()) or not bool(coins.any()):
        raise ConfigurationError(f"all of {len(coins)} coins fell on one side: play more runs")
    if not bool(scores.isfinite().all()) or bool((scores == scores[:, :1]).all(1).any()):
        raise ConfigurationError("a score is not finite, or the same in all runs: it measures nothing")
    ranks = [_ranks(row) for row in scores]
    generator = torch.Generator().manual_seed(2)
    drawn = torch.empty(_RESAMPLES, len(ranks), dtype=torch.float64)
    for resample in drawn:
        chosen = torch.randint(len(coins), (len(coins),), generator=generator)
        for index, rank in enumerate(ranks):
            resample[index] = auc(rank[chosen], coins[chosen])
    reach = quantile(len(ranks)) * drawn.std(dim=0)
    found = []
    for name, rank, half in zip(SCORES, ranks, reach.tolist(), strict=True):
        value = auc(rank, coins)
        found.append(Outcome(name, value, (max(0.0, value - half), min(1.0, value + half))))
    return found


def _ranks(scores: torch.Tensor) -> torch.Tensor:
    """Returns the rank of each score in ascending order, int64. Equal scores have the same rank."""
    ranks: torch.Tensor = torch.unique(scores, return_inverse=True)[1]
    return ranks


def auc(ranks: torch.Tensor, coins: torch.Tensor) -> float:
    """Returns the probability that a run with the second input has a higher score than a run with the first. A tie
    counts half.

    Args:
        ranks: int64, not negative, shape (num_runs,).
        coins: bool, the same shape.
    """
    size = int(ranks.max()) + 1
    ones = torch.bincount(ranks[coins], minlength=size).to(torch.float64)
    zeros = torch.bincount(ranks[~coins], minlength=size).to(torch.float64)
    below = zeros.cumsum(0) - zeros / 2
    return float((ones * below).sum() / (ones.sum() * zeros.sum()))


def quantile(num_scores: int) -> float:
    """Returns the normal quantile for two-sided intervals that all hold together at CONFIDENCE."""
    return statistics.NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / (2 * num_scores))


def expected_half_width(num_runs: int, num_scores: int = len(SCORES)) -> float:
    """Returns the half-width of an interval if the score is pure chance. It is the quantile times √((n+1)/(12·n₀·n₁)),
    the standard deviation of the AUC of n₀ and n₁ random scores; n₀ and n₁ are n/2, half of the runs."""
    half = num_runs / 2
    return quantile(num_scores) * math.sqrt((num_runs + 1) / (12 * half * half))


# ---- controls -------------------------------------------------------------------------------------------------------


def controls(num_runs: int = CONTROL_RUNS) -> list[ControlResult]:
    """Tests each score on traffic on which it should win. The traffic on which a score must win is fixed before
    the games are played, so that no score is picked afterwards."""
    with _tenant("lattice") as tenant:
        found = [_won(REUSE, "difference", run(_reuse(tenant), tenant.known, num_runs, f"control, {REUSE}"))]
        for setting, score, masks in _weak_masks(tenant):
            send = functools.partial(_under, masks, tenant)
            found.append(_won(setting, score, run(send, tenant.known, num_runs, f"control, {setting}")))
    with _tenant("off") as unmasked:
        found.append(_won("no mask", "size", run(unmasked.send, unmasked.known, num_runs, "control, no mask"), 1.0))
    return found


def _won(
    setting: str, score: str, played: tuple[torch.Tensor, torch.Tensor], needed: float = NEEDED_CONTROL
) -> ControlResult:
    scores, coins = played
    value = auc(_ranks(scores[list(SCORES).index(score)]), coins)
    return ControlResult("distinguisher", setting, f"AUC of {score}", value, needed, smaller_wins=False)


def _reuse(tenant: Tenant) -> Sender:
    """Returns a sender that uses one mask for two messages, the first of which holds a known text. No mask of noise/
    would do this."""

    def send(coin: int) -> Seen:
        first = tenant.message(0)
        again = first - tenant.candidates[0] + tenant.candidates[coin]
        return Seen(rounded(again, tenant.call.bits), first, tenant.candidates[0])

    return send


def _under(masks: Callable[[], torch.Tensor], tenant: Tenant, coin: int) -> Seen:
    before, sent = (rounded(masks() + tenant.candidates[each], tenant.call.bits) for each in (0, coin))
    return Seen(sent, before, tenant.candidates[0])


def _weak_masks(tenant: Tenant) -> Iterator[tuple[str, str, Callable[[], torch.Tensor]]]:
    """Yields masks with one fault each, as (setting, the score that must find the fault, a function that makes fresh
    mask rows)."""
    generator = torch.Generator().manual_seed(3)
    shape = tenant.candidates[0].shape

    def uniform(bits: int) -> torch.Tensor:
        return torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), shape, generator=generator).to(torch.int32)

    hat = negacyclic.transform(tenant.public_matrix, PARAMETERS)
    rng = sampling.Csprng()

    def one_trit() -> torch.Tensor:
        secret = torch.zeros(1, PARAMETERS.rank, PARAMETERS.ring_degree, dtype=torch.int8)
        place = int(torch.randint(secret.numel(), (1,), generator=generator))
        secret.view(-1)[place] = int(torch.randint(2, (1,), generator=generator)) * 2 - 1
        error = sampling.error(rng, (1, *shape), PARAMETERS)
        return negacyclic.combine(hat, negacyclic.secret_transform(secret), error)[0]

    yield f"masks of {_NARROW_BITS} bits", "phase", lambda: uniform(_NARROW_BITS)
    coarse = FULL_BITS - tenant.call.bits + _COARSE_BITS
    yield f"masks on a grid of 2^{coarse}", "low bits", lambda: uniform(FULL_BITS - coarse) << coarse
    yield "lattice, a secret of one trit", "public matrix", one_trit


# ---- command line ---------------------------------------------------------------------------------------------------


def lines(mask: str, secret: str, found: Sequence[Outcome], checks: Sequence[ControlResult]) -> list[str]:
    """Returns the report's lines: the table, then the score farthest from chance, then the controls."""
    table = [f"| score ({mask}, {secret}) | AUC | {CONFIDENCE:.1%} interval, all scores together |", "|---|---|---|"]
    table += [f"| {one.score} | {one.auc:.4f} | {one.interval[0]:.4f} to {one.interval[1]:.4f} |" for one in found]
    best = max(found, key=lambda one: abs(one.auc - 0.5))
    told = "at chance" if best.is_at_chance else "NOT at chance"
    table += ["", f"Farthest from 0.5: {best.score}, {told}; half-width {best.half_width:.4f}.", ""]
    table += ["| control | metric | value | needed | wins |", "|---|---|---|---|---|"]
    for check in checks:
        won = "yes" if check.wins else "NO"
        table.append(f"| {check.setting} | {check.metric} | {check.value:.4f} | ≥ {check.needed:g} | {won} |")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the module's docstring explains the exit status."""
    options = make_parser().parse_args(arguments)
    num_runs = options.runs if options.runs is not None else QUICK_RUNS if options.quick else FULL_RUNS
    torch.set_num_threads(1)
    return exit_status(
        "attacks.game", options.out, lambda: _play_and_report(options.mask, options.secret, num_runs, options.out)
    )


def _play_and_report(mask: str, secret: str, num_runs: int, out: Path | None) -> int:
    began = time.monotonic()
    found = play(mask, num_runs, secret)
    checks = controls()
    print("\n".join(lines(mask, secret, found, checks)))
    print(f"\n{num_runs} runs in {time.monotonic() - began:.1f} s, controls of {CONTROL_RUNS} runs included")
    if out is not None:
        scores, wins = [asdict(one) for one in found], [{**asdict(check), "wins": check.wins} for check in checks]
        data = {"mask": mask, "secret": secret, "runs": num_runs, "scores": scores, "controls": wins}
        data |= {"confidence": CONFIDENCE, "method": "bootstrap over runs, normal, Bonferroni over scores"}
        (out / "game.json").write_text(json.dumps(data, indent=1) + "\n")
    is_narrow = num_runs < FULL_RUNS or all(one.half_width <= NEEDED_HALF_WIDTH for one in found)
    return 0 if is_narrow and all(one.is_at_chance for one in found) and all(check.wins for check in checks) else 1
