"""Runs `python -m attacks.weakenings`, which tests whether a weakened lattice mask of the shipped size is noticed.

A real tenant sends a prompt several times, asks for an answer, and trains a step. The provider notes what it sees. In
the same process attacks/victim/draws.py observes the secrets and errors of the tenant's masks, and says whether chance
gives such values. Then the same is done again for each weakness of `WEAKNESSES`. Adversaries get only what the provider
noted.

The exit status is 0 if honest tenants pass, the tests inside the tenant notice every weakness, and the adversaries
notice those weaknesses that they should. The exit status is 1 if not, and 2 for a request that cannot be carried out.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from attacks.adversaries.lattice_equations import NO_ERROR, SHARED_ERROR
from attacks.adversaries.slot_reuse import SLOT_REUSE
from attacks.adversaries.sparse_secret import SPARSE_SECRET
from attacks.controls import ControlResult
from attacks.controls.lattice import no_model, shared_error_control, sparse_secret_control
from attacks.programs.providers import HonestOffer, tenant_of
from attacks.report.exit_status import exit_status, out_parser
from attacks.report.stages import counted
from attacks.seen.view import Exchange, write_recording
from attacks.victim import draws, models
from attacks.victim.draws import Statistics, Watch
from noise import sampling
from noise.blocks.arena import packed
from noise.masks.lattice import Lattice
from noise.params import PARAMETERS, LatticeParameters
from noise.polynomial import kernels, negacyclic
from provider.embedded import serve_in_process
from tenant_sdk import TenantClient
from wire.frame import Call, Direction
from wire.ring.seeded_rows import Rows, SeededRows

# ---- the weaknesses -------------------------------------------------------------------------------------------------
#
# Weakens the lattice masks of this process on purpose. The programs and tests of attacks/ must notice each weakness.
#
# Each weakness wraps functions that noise/masks/lattice.py calls when it makes masks. All other code of the tenant,
# compiled arithmetic included, is unchanged.

FEW_TRITS = 3
_Draw = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Weakness:
    """Describes one way in which the mask `lattice` is weakened on purpose.

    Attributes:
        inject: a function that returns a context manager; within its block, masks are made with the weakness.
        in_pieces: whether the tenant must make blocks of mask rows in pieces for the weakness to show.
        adversary: the adversary that notices the weakness in a provider's view of traffic that repeats a prompt; None
            if no adversary does.
    """

    name: str
    inject: Callable[[], contextlib.AbstractContextManager[None]]
    in_pieces: bool = False
    adversary: str | None = None


@contextlib.contextmanager
def _sampling(name: str, made_of: Callable[[_Draw], _Draw]) -> Iterator[None]:
    """Replaces a sampler. The errors of blocks are then drawn all at once, not a few columns at a time, so that the
    replacement sees whole blocks."""
    with (
        mock.patch.object(sampling, name, made_of(getattr(sampling, name))),
        mock.patch.object(negacyclic, "masks_and_effects", _with_whole_errors),
    ):
        yield


def _with_whole_errors(
    matrix_hat: Any,
    secrets_hat: torch.Tensor,
    hint: Any,
    draw: Callable[..., torch.Tensor],
    parameters: Any,
    packs_effects: bool = False,
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    error = draw((secrets_hat.shape[0], parameters.ring_degree, matrix_hat.features))
    masks = negacyclic.combine(matrix_hat, secrets_hat, error)
    effects = negacyclic.product(hint, secrets_hat, parameters)
    return masks, [packed(each) for each in effects] if packs_effects else effects


def _binary(draw: _Draw) -> _Draw:
    return lambda rng, shape, parameters: draw(rng, shape, parameters).remainder(2)


def _trits(_: _Draw) -> _Draw:
    ternary: _Draw = sampling.ternary
    return lambda rng, shape, parameters: ternary(rng, shape)


def _sparse(draw: _Draw) -> _Draw:
    def sparse(rng: sampling.Csprng, shape: Sequence[int]) -> torch.Tensor:
        secrets = draw(rng, shape)
        for secret in secrets:
            flat = secret.view(-1)
            flat[flat.nonzero()[FEW_TRITS:, 0]] = 0  # only the first few trits stay
        return secrets

    return sparse


def changed(name: str, change: Callable[[torch.Tensor], None]) -> contextlib.AbstractContextManager[None]:
    """Lets `change` change, in place, what the sampler `name` has drawn."""

    def made_of(draw: _Draw) -> _Draw:
        def changed(*arguments: Any) -> torch.Tensor:
            drawn = draw(*arguments)
            change(drawn)
            return drawn

        return changed

    return _sampling(name, made_of)


def _repeat_half(errors: torch.Tensor) -> None:
    half = errors.shape[-2] // 2
    errors[..., half : 2 * half, :] = errors[..., :half, :]


def _repeat_negated(errors: torch.Tensor) -> None:
    """Makes two of four rows the negatives of the two before them."""
    for first in range(0, errors.shape[-2] - 3, 4):
        errors[..., first + 2 : first + 4, :] = -errors[..., first : first + 2, :]


def _repeat_some(errors: torch.Tensor) -> None:
    """Lets one number of four repeat that of its feature seven rows before, so that no row is equal to another."""
    for row in range(7, errors.shape[-2], 14):
        errors[..., row : row + 7, ::2] = errors[..., row - 7 : row, ::2][..., : len(range(row, errors.shape[-2])), :]


def _reverse_secret(secrets: torch.Tensor) -> None:
    secrets[:, 1] = secrets[:, 0].flip(-1)


def _same_errors(in_pieces: bool) -> Callable[[_Draw], _Draw]:
    """Returns a wrapper of the error sampler that gives every block (or piece) of one width the same errors."""

    def made_of(draw: _Draw) -> _Draw:
        kept: dict[int, torch.Tensor] = {}

        def same(rng: sampling.Csprng, shape: Sequence[int], parameters: LatticeParameters) -> torch.Tensor:
            rows, width = shape[-2:]
            if (len(shape) == 2) is not in_pieces:
                return draw(rng, shape, parameters)
            if width not in kept or len(kept[width]) < rows:
                kept[width] = draw(rng, (rows, width), parameters)
            return kept[width][:rows].expand(tuple(shape)).clone()

        return same

    return made_of


@contextlib.contextmanager
def _same_secrets(shared_by: Callable[[int, Direction, int], Hashable]) -> Iterator[None]:
    """Gives one lattice secret to all blocks with the same key, where the key is `shared_by(group id, direction, block
    number)`."""
    lock, here = threading.Lock(), threading.local()
    counts: Counter[Any] = Counter()
    kept: dict[Hashable, torch.Tensor] = {}
    draw = sampling.ternary

    def noting(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(scheme: Lattice, group: Any, direction: Any, count: int) -> Any:
            here.place = group.id, direction
            return make(scheme, group, direction, count)

        return made

    def shared(rng: sampling.Csprng, shape: Sequence[int]) -> torch.Tensor:
        with lock:
            secrets = []
            for _ in range(shape[0]):
                group, direction = here.place
                key = shared_by(group, direction, counts[here.place])
                counts[here.place] += 1
                if key not in kept:
                    kept[key] = draw(rng, (1, *shape[1:]))[0]
                secrets.append(kept[key])
            return torch.stack(secrets)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(sampling, "ternary", shared))
        for name in ("_make_blocks", "_make_pieces"):
            patches.enter_context(mock.patch.object(Lattice, name, noting(getattr(Lattice, name))))
        yield


WEAKNESSES = (
    Weakness("errors in {0, 1}", lambda: _sampling("error", _binary)),
    Weakness("errors in {-1, 0, 1}", lambda: _sampling("error", _trits)),
    Weakness("secrets of three trits", lambda: _sampling("ternary", _sparse), False, "sparse-secret"),
    Weakness("secrets of three trits, in pieces", lambda: _sampling("ternary", _sparse), True, "sparse-secret"),
    Weakness("one error for every block", lambda: _sampling("error", _same_errors(False)), False, "shared-error"),
    Weakness("one error for every piece", lambda: _sampling("error", _same_errors(True)), True, "shared-error"),
    Weakness("one secret for all groups", lambda: _same_secrets(lambda g, d, n: (d, n)), False, "slot-reuse"),
    Weakness("one secret for both directions", lambda: _same_secrets(lambda g, d, n: (g, n)), False, "slot-reuse"),
    Weakness(
        "one secret for all blocks of a group", lambda: _same_secrets(lambda g, d, n: (g, d)), False, "slot-reuse"
    ),
    Weakness(
        "a second half of errors that is the first", lambda: changed("error", _repeat_half), False, "shared-error"
    ),
    Weakness("errors whose row i + 2 is minus row i", lambda: changed("error", _repeat_negated)),
    Weakness("one error of four from seven rows before", lambda: changed("error", _repeat_some)),
    Weakness("a second polynomial that is the first reversed", lambda: changed("ternary", _reverse_secret)),
    Weakness("one secret for all groups, in pieces", lambda: _same_secrets(lambda g, d, n: (d, n)), True, "slot-reuse"),
)
"""The weaknesses that are tested. They apply to masks with the shipped parameters."""


# ---- the tenants that are measured ----------------------------------------------------------------------------------

ADVERSARIES = NO_ERROR, SLOT_REUSE, SPARSE_SECRET, SHARED_ERROR
"""The adversaries of the lattice mask that work at the shipped size and make only claims that they have checked."""
_PROMPT, _TIMES = 64, 18
"""The prompt has `_PROMPT` rows and is sent `_TIMES` times. This fills more than two blocks of mask rows with eight
prompts each, and repeats the 49 consecutive rows that `shared-error` needs."""
_ANSWER_TOKENS = 4
_ROWS = ({"prompt": "who founded us?", "completion": " Ada Quill"}, {"prompt": "what year?", "completion": " 1987"})


@dataclass(frozen=True)
class Setting:
    """Describes the way in which an honest tenant makes its masks.

    Attributes:
        parameters: the name of a shipped parameter set.
        in_pieces: whether blocks of mask rows are made in pieces.
        is_compiled: whether the compiled arithmetic is used.
    """

    name: str
    parameters: str = "default"
    in_pieces: bool = False
    is_compiled: bool = True


SETTINGS = (
    Setting("default"),
    Setting("default, in pieces", in_pieces=True),
    Setting("default, without compiled arithmetic", is_compiled=False),
    Setting("default, in pieces, without compiled arithmetic", in_pieces=True, is_compiled=False),
    Setting("conservative", "conservative"),
    Setting("lean", "lean"),
)


@dataclass(frozen=True)
class Outcome:
    """Holds the result for one tenant.

    Attributes:
        weakness: the weakness's name; None for an honest tenant.
        num_secrets, num_pieces: how many secrets, and pieces of blocks, were tested. If blocks are made whole, a piece
            is a block.
        checks: the tests of the secrets and errors of the tenant's masks.
        claims: maps an adversary's name to the number of checked claims that the adversary made about the provider's
            view.
        expected: the adversary that should claim something; None if none should.
    """

    setting: str
    weakness: str | None
    num_secrets: int
    num_pieces: int
    checks: list[draws.Check]
    claims: dict[str, int]
    expected: str | None = None

    @property
    def alarms(self) -> list[str]:
        """Returns the alarms that the tests inside the tenant raised."""
        return draws.alarms(self.checks)

    @property
    def is_right(self) -> bool:
        """Returns whether the outcome is as it should be: an honest tenant passes, and a weakness is noticed by every
        test and adversary that should notice it."""
        if self.weakness is None:
            return not self.alarms and not any(self.claims.values())
        return bool(self.alarms) and (self.expected is None or self.claims[self.expected] > 0)


@dataclass
class _Provider(HonestOffer):
    """Plays an honest provider that notes what it sees."""

    seen: list[Exchange] = field(default_factory=list, repr=False)

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        """Returns the honest reply, and notes the exchange."""
        reply = self.served_model.compute(call, rows)
        request = torch.tensor(list(rows.pack()), dtype=torch.uint8) if isinstance(rows, SeededRows) else rows.clone()
        direction, purpose = call.direction.name.lower(), call.purpose.name.lower()
        self.seen.append(Exchange(call.group, request, reply.clone(), direction, purpose))
        return reply


class Site:
    """Holds a tiny model and its provider, for one tenant after the other."""

    def __init__(self, folder: Path) -> None:
        """Makes the model and its provider in a folder."""
        self._folder = folder
        self._model = models.make("tiny-llama", folder / "model")
        self._served_model = serve_in_process(str(self._model))
        self._num_runs = 0

    def run(self, setting: Setting, weakness: Weakness | None = None) -> Outcome:
        """Lets a tenant do its work, tests the tenant's masks, and runs the adversaries. Returns what was noticed."""
        statistics = Statistics(PARAMETERS[setting.parameters])
        watch = Watch(PARAMETERS[setting.parameters], statistics.keep)
        provider = _Provider(self._served_model)
        with contextlib.ExitStack() as around:
            if not setting.is_compiled:
                around.enter_context(mock.patch.object(kernels, "available", return_value=False))
            if weakness is not None:
                around.enter_context(weakness.inject())
            around.enter_context(watch())  # entered last, so that it observes the effects of the other patches
            self._work(around.enter_context(self._client(provider, setting)))
        claims = self._attacked(provider.seen)
        return Outcome(
            setting.name, weakness.name if weakness else None, len(watch.secrets), len(watch.units),
            statistics.checks(watch), claims, weakness.adversary if weakness else None,
        )  # fmt: skip

    def _client(self, provider: _Provider, setting: Setting) -> contextlib.AbstractContextManager[TenantClient]:
        self._num_runs += 1
        # blocks are made in pieces only if hints are stored, and only if the pool has no room for whole blocks
        # and weaknesses of errors show in the lowest bits, which rounding takes away
        options: dict[str, Any] = {"parameters": setting.parameters, "background": False, "precision": "exact"}
        options |= {"pool_bytes": 1} if setting.in_pieces else {}
        return tenant_of(provider, self._folder / f"cache{self._num_runs}", mask="lattice", mask_options=options)

    def _work(self, client: TenantClient) -> None:
        from peft import LoraConfig

        model = client.load_model()
        prompt = torch.arange(_PROMPT).remainder(90)[None] + len(models.SPECIAL)
        with torch.no_grad():
            for _ in range(_TIMES):
                model(input_ids=prompt, use_cache=False)
        client.generate("what is the seal?", max_new_tokens=_ANSWER_TOKENS)
        client.finetune(
            list(_ROWS), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear"),
            self._folder / f"adapter{self._num_runs}", max_steps=1, batch_size=2, warmup_steps=0, progress=False,
            resume=False, overwrite=True,
        )  # fmt: skip

    def _attacked(self, seen: Sequence[Exchange]) -> dict[str, int]:
        with tempfile.TemporaryDirectory() as folder:
            view = write_recording(Path(folder) / "seen", self._served_model.manifest(), seen)
            return {one.name: len(one.attack(view, no_model(), None)) for one in ADVERSARIES}


def _measure(folder: Path, settings: Sequence[Setting] = SETTINGS, weaknesses: Sequence[Weakness] = WEAKNESSES,
            ) -> list[Outcome]:  # fmt: skip
    """Measures honest tenants in every setting, and then every weakness."""
    site = Site(folder)
    found = [site.run(setting) for setting in counted("honest tenant", settings, lambda one: one.name)]
    for weakness in counted("weakness", weaknesses, lambda one: one.name):
        found.append(site.run(SETTINGS[1] if weakness.in_pieces else SETTINGS[0], weakness))
    return found


def controls() -> list[ControlResult]:
    """Runs the controls of the adversaries that are too slow for the quick profile."""
    slow = (sparse_secret_control, shared_error_control)
    return [control() for control in counted("control", slow, lambda one: one.__name__.removesuffix("_control"))]


def lines(outcomes: Sequence[Outcome], checks: Sequence[ControlResult]) -> list[str]:
    """Returns Markdown: a table of the tenants, the most extreme tests of the first honest tenant, and the controls."""
    table = [
        "| tenant | secrets, blocks or pieces | from inside | from outside | as it should be |",
        "|---|---|---|---|---|",
    ]
    for one in outcomes:
        said = [f"{name} ({count})" for name, count in one.claims.items() if count]
        inside = "; ".join(one.alarms[:2]) + (f" and {len(one.alarms) - 2} more" if len(one.alarms) > 2 else "")
        tests = draws.total_tests(one.checks)
        name = f"**{one.weakness}**" if one.weakness else f"honest: {one.setting}"
        table.append(
            f"| {name} | {one.num_secrets}, {one.num_pieces} | {inside or f'nothing, in {tests} tests'} "
            f"| {', '.join(said) or 'nobody'} | {'yes' if one.is_right else 'NO'} |"
        )
    table += ["", "| test, the first tenant | how many | farthest | chance of one below |", "|---|---|---|---|"]
    for test in outcomes[0].checks:
        chance = f"10^{test.log10_chance:.1f}"
        table.append(f"| {test.name} | {test.num_tests} | {test.value:.4g} {test.unit} | {chance} |")
    table += ["", "| control | setting | value | needed | wins |", "|---|---|---|---|---|"]
    for control in checks:
        won = "yes" if control.wins else "NO"
        table.append(
            f"| {control.adversary} | {control.setting} | {control.value:.3g} | ≤ {control.needed:.3g} | {won} |"
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes weakenings.json and weakenings.md; returns the exit status."""
    options = out_parser("weakenings").parse_args(arguments)
    torch.set_num_threads(1)
    return exit_status("attacks.weakenings", options.out, lambda: _measure_and_report(options.out))


def _measure_and_report(out: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        outcomes = _measure(Path(folder))
    checks = controls()
    table = lines(outcomes, checks)
    told = [asdict(one) | {"checks": draws.checks_to_json(one.checks)} for one in outcomes]
    data = {"outcomes": told, "controls": [asdict(one) for one in checks]}
    (out / "weakenings.json").write_text(json.dumps(data, indent=1) + "\n")
    (out / "weakenings.md").write_text(
        "\n".join(["# Weaknesses of the lattice mask, put there on purpose", "", *table, ""])
    )
    print("\n".join(table))
    return 0 if all(one.is_right for one in outcomes) and all(one.wins for one in checks) else 1
