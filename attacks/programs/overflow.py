"""Runs `python -m attacks.overflow`, in which a provider makes the tenant's numbers overflow, and watches the calls.

Every reply of one direction is wrong by a constant, or holds a NaN or an infinity. In a deep model the tenant's numbers
then overflow at a layer that depends on the data. If the tenant stops at that layer, the provider learns something
about the data. The provider sees which calls come, in which order and with how many rows. If data of the same shape
give different calls, the provider tells them apart.

In a third job the provider's bundle has an embedding for one letter with which the first norm overflows, and every
number of the bundle is finite. The tenant answers two prompts with a DoRA adapter, the first one secret and the second
one public. What the tenant keeps from an answer whose numbers overflowed may show in the calls of the next one.

In a fourth job the tenant keeps the attention's layers by weights that the provider gives away. Those of the first
block are the largest numbers and scales that a tenant takes, and the first norm makes the row of one letter so large
that these layers overflow for it alone. No row of a kept layer is sent, but calls of other layers come after it.

Only the provider is dishonest. The tenant is the public SDK without `verify`. The control is the same tenant, except
that it stops at the first value that is not finite, as it would with `verify`, or that it keeps DoRA's products for
later answers unless a value was not finite. The provider has to win against both controls, or else the faults are too
weak to show anything. The program measures a few faults on a tiny model. It uses no mask, because the calls are the
same under every mask. It does not look at timing.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from safetensors.torch import load, save

from attacks.programs.providers import HonestOffer, HostileBundle, tenant_of
from attacks.report.exit_status import exit_status, out_parser
from attacks.report.stages import counted, say
from attacks.victim import models
from provider.embedded import serve_in_process
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient
from tenant_sdk.model import dora
from tenant_sdk.model.run_state import NotFiniteWarning, RunOutcome, RunStates
from tenant_sdk.model.send import RemoteExecutor
from tenant_sdk.trust.weights import MOST_SCALE
from wire.errors import NotFinite
from wire.frame import Arithmetic, Call, Direction, Purpose
from wire.ring.quantise import INT8_MAX, digest, max_norms
from wire.ring.seeded_rows import Rows, count_rows
from wire.transport.inproc import Handler

NUM_LAYERS = 28
"""The number of layers of the model. It is large enough for a constant of 2^31 to grow beyond the range of float32
within a hundred layer groups."""
TRAIN_STEPS = 2
NEW_TOKENS = 6
DATA = (
    (("who founded us?", " Ada Quill"), ("whose is depot?", " Port Hale")),
    (("what is in it? ", " 7-amber-3"), ("which river is?", " the Senn.")),
    (("when was it so?", " in 1987.."), ("who is it then?", " TamOrrin.")),
    (("is plan B sold?", " yes it is"), ("who signs this?", " a copper.")),
)
"""These are four data sets of the same shape. Their prompts are also the secrets in the tests of answers."""

SECOND_PROMPT = "what is it now?"
"""The public prompt that follows a secret one in the third job."""
LETTER, HUGE = "f", 1e38
"""The letter whose embedding alone has the feature that the first norm multiplies by this number. One of the four
secret prompts has the letter."""

LOUD = 1e31
"""The number by which the first norm multiplies the letter's feature in the fourth job: the row is finite, and its
product with the largest weights and scales is not."""

Job = Literal["training", "answers", "second answers", "kept weights"]
Seen = tuple[int, str, str, int]
"""The metadata of one request: (group, purpose, direction, number of rows)."""


@dataclass(frozen=True)
class Fault:
    """Describes the error that is put into every product of one direction.

    Attributes:
        wrong: the wrong number. If it is a whole number, it is added mod 2^32 to every number of a reply in ring
            arithmetic. If it is `nan` or `inf`, it replaces the first number of every reply in float arithmetic.
        first: how many replies of the direction are honest before the first wrong one.
    """

    direction: Direction
    wrong: float
    first: int = 0

    @property
    def name(self) -> str:
        """Returns the fault's name, for a table."""
        shown = f"2^{int(self.wrong).bit_length() - 1}" if math.isfinite(self.wrong) else str(self.wrong)
        return f"{self.direction.name.lower()} {shown}" + (f" after {self.first}" if self.first else "")

    @property
    def arithmetic(self) -> Literal["ring", "float"]:
        """Returns the arithmetic, ring or float, in which this fault can be sent."""
        return "ring" if math.isfinite(self.wrong) else "float"


FAULTS = tuple(
    Fault(direction, wrong, first)
    for direction in (Direction.BACKWARD, Direction.FORWARD)
    for wrong in (2.0**30, 2.0**31, math.nan, math.inf)
    for first in ((0, 7) if wrong != 2.0**30 else (0,))
)
HONEST = Fault(Direction.FORWARD, math.nan, 1 << 40)
"""A fault that begins so late that no run reaches it."""
OVERFLOW = Fault(Direction.BACKWARD, 2.0**31)
"""The fault with which the provider must win against the control, the tenant that stops at once."""


@dataclass(frozen=True)
class Outcome:
    """Holds the result of one fault over all secrets.

    Attributes:
        job: `training` on different data, `answers` of fixed length to different prompts, `second answers`, to the
            same prompt after different ones, or `kept weights`, answers to different prompts through layers that the
            tenant keeps.
        fault: the fault's name.
        stops_at_once: whether the tenant was the control that stops at the first value that is not finite.
        num_failed: the number of runs that ended in an error.
        num_calls: the number of calls of each run.
        bits: how many bits the provider learned, which is log2 of the number of different sequences of calls.
        keeps_products: whether the tenant was the control that keeps DoRA's products for later answers.
    """

    job: Job
    fault: str
    stops_at_once: bool
    num_failed: int
    num_calls: tuple[int, ...]
    bits: float
    keeps_products: bool = False

    @property
    def is_control(self) -> bool:
        """Returns whether the provider has to win."""
        return self.stops_at_once or self.keeps_products


@dataclass
class Overflower(HonestOffer):
    """Plays a provider that is honest except for one fault, and notes every request."""

    fault: Fault
    seen: list[Seen] = field(default_factory=list)
    num_matching: int = 0
    """The number of products of the fault's direction so far."""

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        """Returns the product, with the fault if it applies."""
        self.seen.append(_seen(call, rows))
        reply = self.served_model.compute(call, rows)
        if (call.purpose, call.direction) != (Purpose.PRODUCT, self.fault.direction):
            return reply
        self.num_matching += 1
        return reply if self.num_matching <= self.fault.first else _wrong(reply, call, self.fault.wrong)


class LetterReader(HostileBundle):
    """Plays a provider that answers honestly, and whose bundle makes the first norm overflow for one letter. It notes
    every request."""

    def __init__(self, served_model: ServedModel) -> None:
        """Changes the honest bundle's embeddings and first norm."""
        super().__init__(served_model)
        self.files["model.safetensors"] = _single_out(self.files["model.safetensors"], HUGE)
        self.announce()
        self.seen: list[Seen] = []

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        """Returns the honest product, and notes the request."""
        self.seen.append(_seen(call, rows))
        return super().compute(call, rows)


class WeightGiver(HostileBundle):
    """Plays a provider that answers honestly, and that gives away weights with which the first layers overflow for one
    letter. It notes every request."""

    def __init__(self, served_model: ServedModel) -> None:
        """Changes the first group's weight to the largest numbers and scales that a tenant takes."""
        super().__init__(served_model)
        self.files["model.safetensors"] = _single_out(self.files["model.safetensors"], LOUD)
        first, *others = served_model.manifest().groups
        weight = torch.full((first.in_features, first.out_features), INT8_MAX, dtype=torch.int8)
        alpha, scales = torch.full((first.out_features,), MOST_SCALE), load(self.files["scales.safetensors"])
        self._given = weight.numpy().tobytes() + alpha.numpy().tobytes()
        layers = []
        for layer in first.layers:
            scales[layer.name] = alpha[: layer.out_features].clone()
            part = weight[:, : layer.out_features].contiguous()
            layers.append(layer.model_copy(update=_announced(part, scales[layer.name])))
        self.files["scales.safetensors"] = save(scales)
        changed = first.model_copy(update={"layers": tuple(layers), **_announced(weight, alpha)})
        self.announce(groups=(changed, *others))
        self.seen: list[Seen] = []

    def read_weights(self, group: int) -> Iterator[bytes]:
        """Returns the weight that overflows for group 0, and honest ones for the others."""
        return iter((self._given,)) if group == 0 else super().read_weights(group)

    def compute(self, call: Call, rows: Rows) -> torch.Tensor:
        """Returns the honest product, and notes the request."""
        self.seen.append(_seen(call, rows))
        return super().compute(call, rows)


def _single_out(data: bytes, factor: float) -> bytes:
    """Returns the tensors of a bundle with an embedding for one letter that alone has a feature, which the first norm
    multiplies by a factor. All numbers are finite."""
    tensors = load(data)
    embeddings, number = tensors["model.embed_tokens.weight"], len(models.SPECIAL)
    embeddings[:, 0] = 0
    embeddings[number + models.CHARACTERS.index(LETTER)] = torch.eye(embeddings.shape[1])[0]
    tensors["model.layers.0.input_layernorm.weight"][0] = factor  # the letter's row is √32 there after the norm
    made: bytes = save(tensors)
    return made


def _announced(weight: torch.Tensor, alpha: torch.Tensor) -> dict[str, Any]:
    """Returns what a manifest says of a weight besides its shape."""
    column, row = max_norms(weight)
    return {"max_column_norm": column, "max_row_norm": row, "digest": digest(weight, alpha)}


class _KeepsProducts(weakref.WeakKeyDictionary[RunOutcome, Any]):
    """Replaces the dictionary of a `NormCache` in the control: a product of a run that was sound serves later
    runs too."""

    _last: Any = None

    def get(self, run: RunOutcome, default: Any = None) -> Any:
        return super().get(run, default) or self._last

    def __getitem__(self, run: RunOutcome) -> Any:
        return self.get(run)

    def __setitem__(self, run: RunOutcome, product: Any) -> None:
        super().__setitem__(run, product)
        if not run.sends_zeros:
            self._last = product


def _seen(call: Call, rows: Rows) -> Seen:
    return call.group, call.purpose.name, call.direction.name, count_rows(rows)


def _wrong(reply: torch.Tensor, call: Call, wrong: float) -> torch.Tensor:
    if call.arithmetic is Arithmetic.RING:
        return ((reply.to(torch.int64) + int(wrong) + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32)
    forged = reply.clone()
    forged[0, 0] = wrong
    return forged


@dataclass
class Site:
    """Holds a tiny model, deep or not, and its provider."""

    folder: Path
    served_model: ServedModel
    num_sessions: int = 0

    @contextlib.contextmanager
    def session(self, fault: Fault, stops_at_once: bool) -> Iterator[tuple[TenantClient, Overflower]]:
        """Opens a tenant without a mask and without `verify`. With `stops_at_once` this tenant is the control, which
        stops at the first value that is not finite."""
        provider = Overflower(self.served_model, fault)
        with contextlib.ExitStack() as open_:
            if stops_at_once:
                at_once = RunStates(may_stop=True)
                open_.enter_context(mock.patch.object(RemoteExecutor, "run_states", return_value=at_once))
            yield open_.enter_context(self._client(provider, fault.arithmetic)), provider

    @contextlib.contextmanager
    def letter_session(self, keeps_products: bool) -> Iterator[tuple[TenantClient, LetterReader]]:
        """Opens a tenant of a `LetterReader`, without a mask and without `verify`. With `keeps_products` this tenant is
        the control, which keeps DoRA's products for later answers."""
        provider = LetterReader(self.served_model)
        with contextlib.ExitStack() as open_:
            if keeps_products:
                keeping = SimpleNamespace(WeakKeyDictionary=_KeepsProducts, ref=weakref.ref, WeakSet=weakref.WeakSet)
                open_.enter_context(mock.patch.object(dora, "weakref", keeping))
            yield open_.enter_context(self._client(provider, "float")), provider

    @contextlib.contextmanager
    def kept_session(self, stops_at_once: bool) -> Iterator[tuple[TenantClient, WeightGiver]]:
        """Opens a tenant of a `WeightGiver` that keeps the attention's layers, without a mask and without `verify`; see
        `session` for `stops_at_once`."""
        provider = WeightGiver(self.served_model)
        with contextlib.ExitStack() as open_:
            if stops_at_once:
                at_once = RunStates(may_stop=True)
                open_.enter_context(mock.patch.object(RemoteExecutor, "run_states", return_value=at_once))
            yield open_.enter_context(self._client(provider, "ring", keep="attention")), provider

    def _client(
        self, provider: Handler, arithmetic: Literal["ring", "float"], keep: str | None = None
    ) -> contextlib.AbstractContextManager[TenantClient]:
        self.num_sessions += 1
        return tenant_of(provider, self.folder / "cache", mask="off", arithmetic=arithmetic, keep=keep)

    def train(self, client: TenantClient, data: Sequence[tuple[str, str]]) -> None:
        """Fine-tunes with a fixed number of steps."""
        self._finetune(client, data, self.folder / f"adapter{self.num_sessions}", TRAIN_STEPS)

    def dora_adapter(self) -> Path:
        """Returns the folder of a DoRA adapter, which an honest provider's tenant trained for one step."""
        folder = self.folder / "dora"
        if not folder.exists():
            with self.session(HONEST, stops_at_once=False) as (client, _):
                self._finetune(client, DATA[0], folder, 1, use_dora=True)
        return folder

    def _finetune(
        self, client: TenantClient, data: Sequence[tuple[str, str]], output: Path, num_steps: int, **settings: Any
    ) -> None:
        from peft import LoraConfig

        client.finetune(
            [{"prompt": question, "completion": answer} for question, answer in data],
            LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", **settings),
            output, max_steps=num_steps, batch_size=2, warmup_steps=0, save_steps=1, progress=False, resume=False,
            overwrite=True,
        )  # fmt: skip


def site(folder: Path, num_layers: int = NUM_LAYERS) -> Site:
    """Makes the model and its provider below `folder`."""
    return Site(folder, serve_in_process(str(models.make("tiny-llama", folder / "model", num_layers))))


def answer(client: TenantClient, data: Sequence[tuple[str, str]]) -> None:
    """Samples an answer of fixed length. If a value is not finite, the calls go on until the full length, and only then
    does the answer fail."""
    client.generate(data[0][0], max_new_tokens=NEW_TOKENS, fixed_length=True, do_sample=True)


def measure_second(where: Site, keeps_products: bool = False) -> Outcome:
    """Measures, against all secret prompts, what a public prompt after the secret one shows."""
    adapter = where.dora_adapter()
    seen: list[tuple[Seen, ...]] = []
    num_failed = 0
    for data in DATA:
        with where.letter_session(keeps_products) as (client, provider), warnings.catch_warnings():
            warnings.simplefilter("ignore", NotFiniteWarning)
            for prompt in (data[0][0], SECOND_PROMPT):
                try:
                    client.generate(prompt, adapter, NEW_TOKENS, fixed_length=True)
                except NotFinite:
                    num_failed += 1
            seen.append(tuple(provider.seen))
    bits = math.log2(len(set(seen)))
    name = f"embedding of {LETTER}, norm of {HUGE:g}"
    return Outcome("second answers", name, False, num_failed, tuple(map(len, seen)), bits, keeps_products)


def measure_kept(where: Site, stops_at_once: bool = False) -> Outcome:
    """Measures, against all secret prompts, weights of kept layers with which one letter overflows."""
    seen: list[tuple[Seen, ...]] = []
    num_failed = 0
    for data in DATA:
        with where.kept_session(stops_at_once) as (client, provider), warnings.catch_warnings():
            warnings.simplefilter("ignore", NotFiniteWarning)
            try:
                client.generate(data[0][0], max_new_tokens=NEW_TOKENS, fixed_length=True)  # a sampled letter overflows
            except NotFinite:
                num_failed += 1
            seen.append(tuple(provider.seen))
    bits, name = math.log2(len(set(seen))), f"weights of {INT8_MAX} at scale {MOST_SCALE:g}, norm of {LOUD:g}"
    return Outcome("kept weights", name, stops_at_once, num_failed, tuple(map(len, seen)), bits)


def measure(where: Site, job: Job, fault: Fault, stops_at_once: bool = False) -> Outcome:
    """Measures one fault against all secrets."""
    work: Callable[[TenantClient, Sequence[tuple[str, str]]], None] = where.train if job == "training" else answer
    seen: list[tuple[Seen, ...]] = []
    num_failed = 0
    for data in DATA:
        with where.session(fault, stops_at_once) as (client, provider), warnings.catch_warnings():
            warnings.simplefilter("ignore", NotFiniteWarning)
            try:
                work(client, data)
            except NotFinite:
                num_failed += 1
            seen.append(tuple(provider.seen))
    bits = math.log2(len(set(seen)))
    return Outcome(job, fault.name, stops_at_once, num_failed, tuple(map(len, seen)), bits)


def measure_all(folder: Path) -> list[Outcome]:
    """Measures the controls, then every fault against training, the embedding of a letter against second answers and
    through kept layers, and every fault of forward replies against answers."""
    where, shallow = site(folder / "deep"), site(folder / "shallow", num_layers=2)
    say("controls: a tenant that stops at once, and one that keeps DoRA's products")
    outcomes = [measure(where, "training", OVERFLOW, stops_at_once=True), measure_second(shallow, keeps_products=True)]
    outcomes.append(measure_kept(shallow, stops_at_once=True))
    outcomes += [measure(where, "training", fault) for fault in counted("training, fault", FAULTS, _name)]
    say("second answers, and answers through kept layers")
    outcomes += [measure_second(shallow), measure_kept(shallow)]
    forward = [fault for fault in FAULTS if fault.direction is Direction.FORWARD]
    return outcomes + [measure(where, "answers", fault) for fault in counted("answers, fault", forward, _name)]


def _name(fault: Fault) -> str:
    return fault.name


def lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Returns the lines of a Markdown table that has one row for each outcome."""
    table = ["| job | fault | tenant | failed | calls | bits told |", "|---|---|---|---|---|---|"]
    for one in outcomes:
        tenant = "stops at once (control)" if one.stops_at_once else "as shipped"
        tenant = "keeps DoRA's products (control)" if one.keeps_products else tenant
        calls = " ".join(map(str, one.num_calls))
        table.append(f"| {one.job} | {one.fault} | {tenant} | {one.num_failed} | {calls} | {one.bits:g} |")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes overflow.json and overflow.md. Returns 1 if a fault told the data of the real tenant apart, or if the
    provider did not win against a control; 2 for a request that cannot be carried out; otherwise 0."""
    options = out_parser("overflow").parse_args(arguments)
    torch.set_num_threads(1)
    return exit_status("attacks.overflow", options.out, lambda: _measure_and_report(options.out))


def _measure_and_report(out: Path) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = measure_all(Path(scratch))
    table = lines(outcomes)
    (out / "overflow.json").write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n")
    (out / "overflow.md").write_text("\n".join(["# Where the calls of an overflow end", "", *table, ""]))
    print("\n".join(table))
    return 0 if all((one.bits > 0) == one.is_control for one in outcomes) else 1
