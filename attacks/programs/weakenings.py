"""Runs `python -m attacks.weakenings`, which tests whether a weakened lattice mask of the shipped size is noticed.

A real tenant sends a prompt several times, asks for an answer, and trains a step. The provider notes what it sees. In
the same process attacks/victim/draws.py observes the secrets and errors of the tenant's masks, and
attacks/victim/draws_statistics.py says whether chance gives such values. Then the same is done again for each weakness
of attacks/controls/weak_lattice.py. Adversaries get only what the provider noted.

The exit status is 0 if honest tenants pass, the tests inside the tenant notice every weakness, and the adversaries
notice those weaknesses that they should. The exit status is 1 if not, and 2 for a request that cannot be carried out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from attacks.adversaries import no_error, shared_error, slot_reuse, sparse_secret
from attacks.controls.control import ControlResult
from attacks.controls.lattice_traffic import no_model
from attacks.controls.shared_error import control as shared_error_control
from attacks.controls.sparse_secret import control as sparse_secret_control
from attacks.controls.weak_lattice import WEAKNESSES, Weakness
from attacks.programs.honest import HonestOffer
from attacks.report.exit_status import exit_status
from attacks.victim import check, quick_model
from attacks.victim.draws import Watch
from attacks.victim.draws_statistics import Statistics
from attacks.victim.synthetic import Exchange, write_recording
from noise.params import PARAMETERS
from noise.polynomial import kernels
from provider.embedded import serve_in_process
from tenant_sdk import TenantClient, embedded
from tenant_sdk.session import NotVerifiedWarning
from wire.frame import Call
from wire.ring.seeded_rows import Rows, SeededRows
from wire.transport.inproc import InprocConnection

ADVERSARIES = tuple(module.ADVERSARY for module in (no_error, slot_reuse, sparse_secret, shared_error))
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
    checks: list[check.Check]
    claims: dict[str, int]
    expected: str | None = None

    @property
    def alarms(self) -> list[str]:
        """Returns the alarms that the tests inside the tenant raised."""
        return check.alarms(self.checks)

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
        self._model = quick_model.make("tiny-llama", folder / "model")
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

    @contextlib.contextmanager
    def _client(self, provider: _Provider, setting: Setting) -> Iterator[TenantClient]:
        self._num_runs += 1
        # blocks are made in pieces only if hints are stored, and only if the pool has no room for whole blocks
        options: dict[str, Any] = {"parameters": setting.parameters, "background": False}
        options |= {"pool_bytes": 1} if setting.in_pieces else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotVerifiedWarning)
            # the public function for an embedded provider takes a model, not a handler that notes requests
            with mock.patch.object(embedded, "connect_inproc", return_value=InprocConnection(provider)):
                client = TenantClient(
                    "inproc:noting", mask="lattice", mask_options=options, progress=False,
                    cache=self._folder / f"cache{self._num_runs}",
                )  # fmt: skip
                client.connect()
        try:
            yield client
        finally:
            client.close()

    def _work(self, client: TenantClient) -> None:
        from peft import LoraConfig

        model = client.load_model()
        prompt = torch.arange(_PROMPT).remainder(90)[None] + len(quick_model.SPECIAL)
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


def measure(folder: Path, settings: Sequence[Setting] = SETTINGS, weaknesses: Sequence[Weakness] = WEAKNESSES,
            ) -> list[Outcome]:  # fmt: skip
    """Measures honest tenants in every setting, and then every weakness."""
    site = Site(folder)
    found = [site.run(setting) for setting in settings]
    for weakness in weaknesses:
        found.append(site.run(SETTINGS[1] if weakness.in_pieces else SETTINGS[0], weakness))
    return found


def controls() -> list[ControlResult]:
    """Runs the controls of the adversaries that are too slow for the quick profile."""
    return [sparse_secret_control(), shared_error_control()]


def lines(outcomes: Sequence[Outcome], checks: Sequence[ControlResult]) -> list[str]:
    """Returns Markdown: a table of the tenants, the most extreme tests of the first honest tenant, and the controls."""
    table = [
        "| tenant | secrets, blocks or pieces | from inside | from outside | as it should be |",
        "|---|---|---|---|---|",
    ]
    for one in outcomes:
        said = [f"{name} ({count})" for name, count in one.claims.items() if count]
        inside = "; ".join(one.alarms[:2]) + (f" and {len(one.alarms) - 2} more" if len(one.alarms) > 2 else "")
        tests = check.total_tests(one.checks)
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
    parser = argparse.ArgumentParser(prog="python -m attacks.weakenings", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder of weakenings.json and weakenings.md")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    return exit_status(options.out, lambda: _measure_and_report(options.out))


def _measure_and_report(out: Path) -> int:
    with tempfile.TemporaryDirectory() as folder:
        outcomes = measure(Path(folder))
    checks = controls()
    table = lines(outcomes, checks)
    told = [asdict(one) | {"checks": check.to_json(one.checks)} for one in outcomes]
    data = {"outcomes": told, "controls": [asdict(one) for one in checks]}
    (out / "weakenings.json").write_text(json.dumps(data, indent=1) + "\n")
    (out / "weakenings.md").write_text(
        "\n".join(["# Weaknesses of the lattice mask, put there on purpose", "", *table, ""])
    )
    print("\n".join(table))
    return 0 if all(one.is_right for one in outcomes) and all(one.wins for one in checks) else 1
