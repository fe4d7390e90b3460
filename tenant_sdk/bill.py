"""This module says what a fine-tuning run, or an answer, will cost before anything of its data is sent: calls, bytes,
time and memory.

Calls are counted and not modelled. The run's own model, adapter and Trainer are made, over an executor that sends
nothing. A few tiny batches of made-up tokens go through them forward and backward; how the number of rows of each call
follows from a batch's shape is solved from these. Then Trainer goes through the run's own batches, in their own order
and with its evaluations, and only their shapes are noted. The bytes are those of wire/frame.py for the mask's calls
within the provider's limits.

Time is measured in parts and added up:
- the provider and the link, by a probe: fresh random rows of the operating system, in the form of masked rows, of which
  nothing depends on the data: which layers, directions and counts follow from the manifest and the adapter. They use no
  mask slot, and at most `PROBE_S`;
- the tenant's own layers, by one batch of the run's typical shape, of at most `MOST_TYPICAL_TOKENS`;
- the encoding of rows and the decoding of replies;
- masks and hints, by the speed at which this machine makes a throwaway block and multiplies. Masks are made while the
  provider is waited for. So the longer of the two counts, but for a provider on this machine, which uses the same
  cores: then it is the sum.

Guarantees: nothing of the data is sent. The count leaves torch's, numpy's and Python's random state as it was, and
writes nothing into the run's folders.

Left out: waits, retries and resumed runs; early stopping (the planned steps count); where a mixture of experts sends
its tokens (rows of experts are those of made-up tokens); the checkpoints that are written; that attention takes more
time for rows longer than `MOST_TYPICAL_TOKENS`; and what connecting and reading the checkpoint took. In a long run,
what comes after `count_s` seconds of counting is taken to be as what came before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import random
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from noise import sampling
from noise.disk.private_files import write_private
from noise.hints import local
from noise.masks.lattice import Lattice
from noise.masks.pad import Pad
from noise.options import PRECISIONS
from noise.params import LatticeParameters
from noise.polynomial import negacyclic
from noise.registry import product_calls
from noise.scheme import GroupSpec, Masked, MaskScheme, decode_rows, encode_rows
from tenant_sdk.model.build import group_spec, load_alphas
from tenant_sdk.model.remote_group import RemoteExecutor, most_rows
from tenant_sdk.model.run_state import NO_MODEL, RunStates
from tenant_sdk.session import Session
from tenant_sdk.session_protocol import TrainingSession
from tenant_sdk.training.activation_checkpointing import Checkpointing, Estimate, estimate, has_dropout
from tenant_sdk.training.checkpoints import Checkpoints, save_adapter
from tenant_sdk.training.finetune import Prepared, Run
from tenant_sdk.training.loss import REMOTE_CHUNK_BYTES
from tenant_sdk.training.token_rows import IGNORE_INDEX
from tenant_sdk.training.trainers import StopEarly, own_accelerate_state
from tenant_sdk.training.windows import EMBEDDINGS, kind_of
from wire.errors import ConfigurationError
from wire.frame import HEADER_BYTES, Arithmetic, Call, Direction, FrameType, Purpose, payload_bytes
from wire.limits import CHUNK_BYTES, Limits
from wire.manifest import Manifest
from wire.ring.seeded_rows import SEED_BYTES
from wire.transport.inproc import InprocConnection

PROBE_S = 10.0
"""The most seconds of a probe."""
PROBE_ROWS = 256
"""The rows of the larger of a probe's two requests for each shape of a layer, or fewer if the limits allow no more."""
MOST_TYPICAL_TOKENS = 512
"""The most tokens of the batch with which the tenant's own layers are timed."""
COUNT_S = 5.0
"""The seconds after which the count of a long run's batches ends, and the rest is taken to be alike."""
SMALL_BYTES = 4_000_000
"""A run of fewer bytes is not probed before it begins: it takes seconds, and the probe would be a part of them."""

_Key = tuple[int, Direction, bool]
"""A group's number, the direction, and whether the rows are public constants, which go without a mask."""
_Shape = tuple[int, int, int]
"""The shape of a batch: its sequences, their tokens, and the positions at which some sequence has a label."""
_NO_LABEL, _LABEL = 0, 5


# ---- what a plan says ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saving:
    """Says what another setting would save.

    Attributes:
        setting: the setting, for the user.
        num_bytes: the bytes that would be sent and received less.
    """

    setting: str
    num_bytes: int


@dataclass(frozen=True)
class Bill:
    """Holds what a run will cost. `str` gives it as a table.

    Attributes:
        what: what was planned: `finetune` or `tokens`.
        steps: optimizer steps; for tokens, the steps of decoding.
        tokens: tokens trained on, without padding, as in `FinetuneResult`; or tokens of prompts and answers.
        positions: tokens that go through the model, with padding and evaluations.
        bytes_up, bytes_down: what is sent and received, hints included, as in `FinetuneResult`.
        round_trips: how often the tenant waits for the provider.
        hint_bytes: the part of `bytes_down` that is for hints of the lattice mask.
        hint_disk_bytes: the disk that these hints take, whether they are fetched or computed.
        seconds: the time in all; None if nothing was measured.
        provider_s, tenant_s, mask_s, hint_s: its parts: the provider and the link; this machine's own layers and
            encoding; masks; hints.
        memory_bytes: the tenant's memory at its peak, beside the libraries.
        local_seconds, local_bytes: time and memory of the same run on this machine alone, in float32.
        savings: what other settings would save.
        is_exact: whether every call of the run is known from its shape; if not, bytes are an estimate.
        manifest: the digest of the provider's manifest.
        run: the fingerprint of data, adapter and options; empty for tokens.
        mask, precision: the session's.
    """

    what: str
    steps: int
    tokens: int
    positions: int
    bytes_up: int
    bytes_down: int
    round_trips: int
    hint_bytes: int = 0
    hint_disk_bytes: int = 0
    seconds: float | None = None
    provider_s: float = 0.0
    tenant_s: float = 0.0
    mask_s: float = 0.0
    hint_s: float = 0.0
    memory_bytes: int = 0
    local_seconds: float | None = None
    local_bytes: int = 0
    savings: tuple[Saving, ...] = ()
    is_exact: bool = True
    manifest: str = ""
    run: str = field(default="", repr=False)
    mask: str = ""
    precision: str = ""

    @property
    def num_bytes(self) -> int:
        """Returns the bytes in both directions."""
        return self.bytes_up + self.bytes_down

    def price(self, per_gb: float = 0.0, per_hour: float = 0.0) -> float:
        """Returns the price of the run, by its bytes in GB (10^9 bytes) in both directions and by its hours."""
        return self.num_bytes / 1e9 * per_gb + (self.seconds or 0.0) / 3600 * per_hour

    def __str__(self) -> str:
        rows = [("tokens", self._tokens()), ("traffic", self._traffic())]
        if self.hint_disk_bytes:
            fetched = f"{size(self.hint_bytes)} to fetch" if self.hint_bytes else "computed here"
            rows.append(("hints", f"{fetched}, {size(self.hint_disk_bytes)} on disk"))
        elif self.hint_bytes:
            rows.append(("hints", f"{size(self.hint_bytes)} to fetch, not kept"))
        if self.seconds is not None:
            rows.append(("time", self._time()))
        if self.memory_bytes:
            rows.append(("memory", f"about {size(self.memory_bytes)} here, beside the libraries"))
        if self.local_seconds is not None:
            rows.append(("locally", self.locally()))
        rows += [("saving", f"{each.setting}: {self._less(each)}") for each in self.savings]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    def _tokens(self) -> str:
        steps = "step" if self.steps == 1 else "steps"
        return f"{self.tokens:,} in {self.steps:,} {steps} ({self.positions:,} through the model)"

    def _traffic(self) -> str:
        about = "" if self.is_exact else "about "
        return (
            f"{about}{size(self.bytes_up)} sent, {size(self.bytes_down)} received, {self.round_trips:,} round trips"
        )

    def _time(self) -> str:
        parts = [("provider and link", self.provider_s), ("this machine", self.tenant_s)]
        parts += [(name, took) for name, took in (("masks", self.mask_s), ("hints", self.hint_s)) if took]
        return f"about {duration(self.seconds or 0.0)}: " + ", ".join(f"{name} {duration(took)}" for name, took in parts)

    def locally(self) -> str:
        """Returns one line on the same run on this machine alone."""
        took, here = self.local_seconds or 0.0, self.seconds
        verdict = "" if here is None else "; that is faster" if took < here else "; that is slower"
        return f"in float32 about {duration(took)} in {size(self.local_bytes)}{verdict}"

    def _less(self, saving: Saving) -> str:
        return f"{size(saving.num_bytes)} less ({saving.num_bytes / max(self.num_bytes, 1):.0%})"

    def line(self) -> str:
        """Returns the plan as one line."""
        took = "" if self.seconds is None else f" and about {duration(self.seconds)}"
        return f"estimated {size(self.num_bytes)}, {self.round_trips:,} round trips{took}"

    def compared(self, num_bytes: int, seconds: float) -> str:
        """Returns one line that compares the plan with what the run took."""
        planned = size(self.num_bytes) + ("" if self.seconds is None else f" and {duration(self.seconds)}")
        return f"estimated {planned}; it took {size(num_bytes)} and {duration(seconds)}"

    def to_json(self) -> str:
        """Returns the plan as JSON; it holds no contents of the data, but a fingerprint of it."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON into a file of mode 0600.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        try:
            write_private(Path(path), self.to_json() + "\n")
        except OSError as exc:
            raise ConfigurationError(f"the plan {path} cannot be written: {exc.strerror}") from exc

    @classmethod
    def load(cls, path: str | Path) -> Bill:
        """Returns a plan that `save` wrote.

        Raises:
            ConfigurationError: there is no such file, or it holds no plan.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            found["savings"] = tuple(Saving(**each) for each in found["savings"])
            return cls(**found)
        except OSError as exc:
            raise ConfigurationError(f"the plan {path} cannot be read: {exc.strerror}") from exc
        except (ValueError, TypeError, KeyError):  # `from None`: the text quotes the file
            raise ConfigurationError(f"{path} is no plan: expected a file of `tenant plan --out`") from None

    def check(self, manifest: str, run: str, mask: str, precision: str) -> None:
        """Checks that a run is the one that was planned.

        Raises:
            ConfigurationError: it is another; the text says in what.
        """
        for planned, now, what in (
            (self.manifest, manifest, "the provider has changed since (its manifest is another)"),
            (self.run, run, "the data, the adapter or the options are others"),
            ((self.mask, self.precision), (mask, precision), "the mask or its precision is another"),
        ):
            if planned != now:
                raise ConfigurationError(f"this is not the run of the plan: {what}; nothing was sent: plan it anew")


def size(num_bytes: float) -> str:
    """Returns a number of bytes for people."""
    for unit_bytes, unit in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:,.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


def duration(seconds: float) -> str:
    """Returns a time for people."""
    if seconds < 120:
        return f"{seconds:.{1 if seconds < 10 else 0}f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def manifest_digest(manifest: Manifest) -> str:
    """Returns the SHA-256 of a manifest, in hex."""
    return hashlib.sha256(manifest.to_bytes()).hexdigest()


# ---- an executor that sends nothing ----------------------------------------------------------------------------------


class _Unsent:
    """Is a mask that makes no messages: it notes each call, and answers small random numbers."""

    name, precision = "unsent", "exact"

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic
        self.calls: list[tuple[_Key, int]] = []
        self._numbers = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)) * 0.1

    def bind(self, effect_path: Any) -> None:
        """Does nothing."""

    def mask(self, group: GroupSpec, direction: Direction, rows: torch.Tensor) -> Masked:
        """Notes the call; see `MaskScheme.mask`."""
        self.calls.append(((group.id, direction, False), rows.shape[0]))
        shape = rows.shape[0], group.widths(direction)[1]
        return Masked((), lambda replies: self.answer(shape).to(rows.device))

    def answer(self, shape: tuple[int, int]) -> torch.Tensor:
        """Returns numbers in the place of a product. Zeros would make norms zero, by which some adapters divide."""
        needed = shape[0] * shape[1]
        again = -(-needed // self._numbers.numel())
        numbers = self._numbers if again <= 1 else self._numbers.repeat(again)
        return numbers[:needed].clone().view(shape)

    def describe(self) -> Mapping[str, str]:
        """Returns nothing: no user sees this mask."""
        return {}

    def close(self) -> None:
        """Does nothing."""


class _Recorder(RemoteExecutor):
    """Notes the calls of a model, whole, and sends nothing."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.unsent = _Unsent(arithmetic)
        unlimited = Limits(max_rows=1 << 24, max_tensor_bytes=1 << 32, max_in_flight_bytes=1 << 36)
        super().__init__((), self.unsent, unlimited)

    def run_public(self, group: GroupSpec, direction: Direction, rows: torch.Tensor) -> torch.Tensor:
        """Notes the call; see `RemoteExecutor.run_public`."""
        self.unsent.calls.append(((group.id, direction, True), rows.shape[0]))
        return self.unsent.answer((rows.shape[0], group.widths(direction)[1])).to(rows.device)

    def run_states(self) -> RunStates:
        """Returns run states under which made-up numbers that overflow raise no error."""
        return RunStates(may_stop=False)

    def taken(self) -> list[tuple[_Key, int]]:
        """Returns the calls that were noted since the last time."""
        calls, self.unsent.calls = self.unsent.calls, []
        return calls


class PlannedSession(TrainingSession, Protocol):
    """Describes a session whose runs can be planned, as `TenantClient` is."""

    def model_over(self, executor: RemoteExecutor) -> PreTrainedModel:
        """Returns a model whose calls go to an executor."""


class _Unconnected:
    """Is a session whose models send nothing; all else is that of a real one."""

    def __init__(self, session: PlannedSession, executor: _Recorder) -> None:
        self._session, self._executor, self.loaded = session, executor, None

    def load_model(self) -> PreTrainedModel:
        return self._session.model_over(self._executor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


# ---- how calls follow from a batch's shape ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Law:
    """Says how many calls of a group a batch makes, and how many rows they have together: both are sums of a batch's
    features with these factors."""

    key: _Key
    num_calls: np.ndarray[Any, Any]
    num_rows: np.ndarray[Any, Any]

    def at(self, features: np.ndarray[Any, Any], most: int | None = None) -> Iterator[tuple[_Key, int, int]]:
        """Yields (key, rows of a call, number of such calls) for a batch with these features.

        Args:
            most: the most rows of a call, for a head that gets them in chunks.
        """
        calls, rows = round(float(self.num_calls @ features)), round(float(self.num_rows @ features))
        if calls <= 0 or rows <= 0:
            return
        if most is not None:
            whole, rest = divmod(rows, calls * most)
            if whole:
                yield self.key, most, whole * calls
            rows = rest
        least, more = divmod(rows, calls)
        for each, count in ((least, calls - more), (least + 1, more)):
            if each and count:
                yield self.key, each, count


class _Windowed:
    """Turns a batch's shape into the features on which its calls depend."""

    def __init__(self, window_tokens: int | None, num_virtual: int) -> None:
        """Takes the run's window, and the virtual tokens that a window counts as its own."""
        self.window_tokens, self._num_virtual = window_tokens, num_virtual

    def features(self, shape: _Shape, window_tokens: int | None = None) -> np.ndarray[Any, Any]:
        """Returns 1, and the numbers of tokens, of sequences, and of positions of the head; with windows also that of
        windows, and that of tokens that go through the model twice."""
        batch, num_tokens, num_labels = shape
        values = [1, batch * num_tokens, batch, batch * num_labels]
        window = window_tokens or self.window_tokens
        if window is not None:
            length, whole = max(window // batch, 1), num_tokens + self._num_virtual
            num_windows = -(-whole // length)
            values += [num_windows, batch * (num_windows - 1) * length]
        return np.array(values, dtype=np.float64)

    def samples(self, unit: int) -> list[tuple[_Shape, int | None]]:
        """Returns shapes of tiny batches, with their windows, that are enough to solve for all factors.

        Args:
            unit: the sequences of one row of the data: two for a preference.
        """
        plain: list[tuple[_Shape, int | None]] = [
            ((batch * unit, num_tokens, num_labels), None)
            for batch, num_tokens, num_labels in ((1, 8, 3), (2, 8, 3), (1, 16, 3), (1, 8, 6))
        ]
        if self.window_tokens is None:
            return plain
        room = self._num_virtual
        windowed = [(shape, shape[0] * (shape[1] + room)) for shape, _ in plain]
        longest = 16 + room
        return [*windowed, *(((unit, 16, 3), unit * -(-longest // parts)) for parts in (2, 3))]


def _laws(
    samples: Sequence[tuple[np.ndarray[Any, Any], list[tuple[_Key, int]]]],
) -> tuple[list[_Law], bool]:
    """Solves for how calls follow from features, and returns whether that fits the samples exactly.

    Args:
        samples: for each sample batch its features and its calls, each with its rows.
    """
    matrix = np.stack([features for features, _ in samples])
    orders = [[key for key, _ in calls] for _, calls in samples]
    found: list[_Law] = []
    is_exact = True

    def solved(values: list[int]) -> np.ndarray[Any, Any]:
        nonlocal is_exact
        factors = np.linalg.lstsq(matrix, np.array(values, dtype=np.float64), rcond=None)[0]
        is_exact &= bool(np.abs(matrix @ factors - values).max(initial=0.0) < 1e-6)
        is_exact &= bool(np.abs(factors - factors.round()).max(initial=0.0) < 1e-6)
        return np.asarray(factors)

    if all(order == orders[0] for order in orders):
        once = np.zeros(matrix.shape[1])
        once[0] = 1.0
        for index, key in enumerate(orders[0]):
            found.append(_Law(key, once, solved([calls[index][1] for _, calls in samples])))
        return found, is_exact
    for key in dict.fromkeys(each for order in orders for each in order):
        rows = [[num_rows for other, num_rows in calls if other == key] for _, calls in samples]
        found.append(_Law(key, solved([len(each) for each in rows]), solved([sum(each) for each in rows])))
    return found, is_exact


@dataclass(eq=False)
class _Pass:
    """Holds what is known of one kind of pass of a run: training, evaluation or the reference of preferences."""

    laws: list[_Law] = field(default_factory=list)
    shapes: Counter[_Shape] = field(default_factory=Counter)
    fixed_s: float = 0.0
    """The seconds that a batch takes here, however small."""
    token_s: float = 0.0
    """The seconds that each of its tokens adds."""


@dataclass(eq=False)
class _Count:
    """Holds the calls of a run, as its own Trainer makes them, without their bytes."""

    calls: Counter[tuple[_Key, int]]
    """How often each group gets a call of so many rows."""
    steps: int
    tokens: int
    positions: int
    tenant_s: float
    is_exact: bool
    need: Estimate
    mode: str | None
    model_bytes: int
    trained_bytes: int


# ---- a run of Trainer over batches of which only the shapes are noted ------------------------------------------------


def _shape(inputs: Mapping[str, torch.Tensor]) -> _Shape:
    batch, num_tokens = inputs["input_ids"].shape
    labelled = inputs["labels"] != IGNORE_INDEX if "labels" in inputs else inputs["completion_mask"] != 0
    return batch, num_tokens, int(labelled[:, 1:].any(dim=0).sum())


def _made_up(inputs: Mapping[str, torch.Tensor], shape: _Shape) -> dict[str, torch.Tensor]:
    """Returns a batch of another shape with the entries of `inputs`, and with contents that are the same for all
    data."""
    batch, num_tokens, num_labels = shape
    made = {}
    for name, value in inputs.items():
        if value.dim() == 1:  # the reference's numbers, one for each preference
            made[name] = value.new_zeros(value.shape[0] * batch // inputs["input_ids"].shape[0])
            continue
        made[name] = value.new_full((batch, num_tokens), 1 if name == "attention_mask" else _LABEL)
        if name in ("labels", "completion_mask"):
            made[name][:, : num_tokens - num_labels] = IGNORE_INDEX if name == "labels" else 0
            made[name][:, num_tokens - num_labels :] = _LABEL if name == "labels" else 1
    return made


class _Counter:
    """Replaces the steps of a Trainer, so that it goes through a run's batches without computing them."""

    def __init__(
        self, trainer: Any, recorder: _Recorder, windowed: _Windowed, count_s: float, most_typical: int
    ) -> None:
        self._trainer, self._recorder, self.windowed = trainer, recorder, windowed
        self._until, self._most_typical = time.monotonic() + count_s, most_typical
        self.passes: dict[str, _Pass] = {}
        self.is_exact = True
        self.num_tokens = 0
        step, predict = trainer.training_step, trainer.prediction_step

        def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            self._note("training", inputs, lambda made: step(model, made, None))
            self.num_tokens += int(inputs["attention_mask"].sum())
            if time.monotonic() > self._until:
                trainer.control.should_training_stop = True
            return torch.zeros(())

        def prediction_step(model: Any, inputs: Any, *others: Any, **options: Any) -> tuple[Any, None, None]:
            self._note("evaluation", inputs, lambda made: predict(model, made, True, []))
            return torch.zeros(()), None, None

        trainer.training_step, trainer.prediction_step = training_step, prediction_step
        if hasattr(trainer, "precompute_reference"):
            refer = trainer._reference

            def reference(inputs: Any) -> dict[str, torch.Tensor]:
                if self._is_inside:
                    return dict(refer(inputs))
                self._note("reference", inputs, refer)
                zeros = torch.zeros(inputs["input_ids"].shape[0] // 2)
                return {"ref_chosen_logps": zeros, "ref_rejected_logps": zeros}

            trainer._reference = reference

    _is_inside = False

    def _note(self, kind: str, inputs: Mapping[str, torch.Tensor], run: Callable[[Any], Any]) -> None:
        shape = _shape(inputs)
        if kind not in self.passes:
            began = time.monotonic()
            self.passes[kind] = self._learn(inputs, shape, run)
            self._until += time.monotonic() - began
        self.passes[kind].shapes[shape] += 1

    def _learn(self, inputs: Mapping[str, torch.Tensor], shape: _Shape, run: Callable[[Any], Any]) -> _Pass:
        """Runs tiny batches, and returns how calls follow from shapes, and how long they take here."""
        unit = 1 if "labels" in inputs else 2
        samples = []
        self._is_inside = True
        try:
            for sample, window in self.windowed.samples(unit):
                took_s = self._timed(inputs, sample, window, run)
                samples.append((self.windowed.features(sample, window), self._recorder.taken()))
            laws, is_exact = _laws(samples)
            self.is_exact &= is_exact
            small = sample[0] * sample[1]
            typical = self._typical(shape, unit)
            typical_s = self._timed(inputs, typical, None, run)
            self._recorder.taken()
        finally:
            self._is_inside = False
        token_s = max(typical_s - took_s, 0.0) / max(typical[0] * typical[1] - small, 1)
        return _Pass(laws, fixed_s=max(took_s - small * token_s, 0.0), token_s=token_s)

    def _typical(self, shape: _Shape, unit: int) -> _Shape:
        num_tokens = max(8, min(shape[1], self._most_typical))
        batch = max(1, min(shape[0], self._most_typical // num_tokens) // unit) * unit
        return batch, num_tokens, max(1, min(num_tokens - 1, round(shape[2] * num_tokens / shape[1])))

    def _timed(self, inputs: Any, shape: _Shape, window: int | None, run: Callable[[Any], Any]) -> float:
        trainer = self._trainer
        kept = trainer.num_tokens
        windows = getattr(trainer, "windows", None)
        before = None if windows is None else windows.window_tokens
        if windows is not None and window is not None:
            windows.window_tokens = window
        with torch.no_grad():
            for parameter in trainer.model.parameters():  # an optimizer step has changed them, as far as torch knows
                if parameter.requires_grad:
                    parameter.add_(0)
        began = time.perf_counter()
        try:
            run(_made_up(inputs, shape))
        finally:
            trainer.num_tokens = kept
            if windows is not None:
                windows.window_tokens = before
            trainer.model.zero_grad(set_to_none=True)
        return time.perf_counter() - began


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Leaves the random states of Python, numpy and torch's CPU generator as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@own_accelerate_state()
def _count(
    session: PlannedSession, prepared: Prepared, arithmetic: Arithmetic, output_dir: Path, count_s: float, typical: int
) -> _Count:
    """Counts the calls of a run."""
    recorder = _Recorder(arithmetic)
    unconnected: Any = _Unconnected(session, recorder)
    quiet = dataclasses.replace(prepared, options=dataclasses.replace(prepared.options, progress=False))
    with (
        tempfile.TemporaryDirectory(prefix="veilbase-plan-", ignore_cleanup_errors=True) as scratch,
        _same_random_numbers(), warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.simplefilter("ignore")  # a run says what there is to warn about
        run = Run(unconnected, quiet, Checkpoints(Path(scratch) / "checkpoints"), output_dir)
        with run.made_trainer() as (trainer, kept):
            return _counted(run, trainer, kept, recorder, Path(scratch), count_s, typical, _blocks(session.connect()))


def _counted(
    run: Run, trainer: Any, kept: Checkpointing, recorder: _Recorder, scratch: Path, count_s: float, typical: int,
    blocks: Mapping[int, int],
) -> _Count:
    options, model = run.options, trainer.model
    args = trainer.args
    args.save_strategy = args.logging_strategy = type(args.save_strategy)("no")
    args.load_best_model_at_end = False
    trainer.remove_callback(StopEarly)
    num_virtual = model.active_peft_config.num_virtual_tokens if kind_of(model) in EMBEDDINGS else 0
    counter = _Counter(trainer, recorder, _Windowed(options.window_tokens, num_virtual), count_s, typical)
    calls: Counter[tuple[_Key, int]] = Counter(recorder.taken())
    if options.dpo_precompute_reference and run.rows.are_preferences:
        trainer.precompute_reference()
    trainer.train()
    calls.update(recorder.taken())
    save_adapter(model, scratch / "adapter")
    calls.update(recorder.taken())
    steps, done = int(trainer.state.max_steps), max(int(trainer.state.global_step), 1)
    scale = steps / done
    positions, tenant_s = 0.0, 0.0
    base = model.get_base_model()
    chunk = max(1, REMOTE_CHUNK_BYTES // (4 * int(base.config.get_text_config().vocab_size)))
    head_rows = chunk, options.window_tokens or chunk
    for kind, each in counter.passes.items():
        factor = 1.0 if kind == "reference" else scale
        for shape, times in each.shapes.items():
            tokens = shape[0] * (shape[1] + num_virtual)
            positions += factor * times * tokens
            tenant_s += factor * times * (each.fixed_s + each.token_s * tokens)
            features = counter.windowed.features(shape)
            for law in each.laws:
                most = None if law.key[0] in blocks else head_rows[kind == "training"]
                for key, rows, count in law.at(features, most):
                    calls[key, rows] += round(factor * times * count)
    longest = run.rows.longest_batch(options.batch_size, num_virtual)
    trained = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    return _Count(
        calls, steps, round(counter.num_tokens * scale), round(positions), tenant_s,
        counter.is_exact and scale == 1.0, estimate(base, longest, has_dropout(model)), kept.mode,
        sum(each.nbytes for each in (*model.parameters(), *model.buffers()) if not each.is_meta), trained,
    )  # fmt: skip


# ---- bytes -----------------------------------------------------------------------------------------------------------


def _message_bytes(call: Call, kind: FrameType, rows: int, cols: int, header_bytes: int) -> int:
    whole = payload_bytes(kind, call, rows, cols)
    return whole + header_bytes * max(1, -(-whole // CHUNK_BYTES))


@dataclass(frozen=True, eq=False)
class _Wire:
    """Turns calls into bytes, as a session's mask and limits make them."""

    scheme: MaskScheme
    limits: Limits
    groups: Mapping[int, GroupSpec]
    header_bytes: int

    @classmethod
    def of(cls, session: Session, folder: Path) -> _Wire:
        """Returns that of a session; `folder` is the bundle's."""
        alphas, cpu = load_alphas(folder, session.manifest), torch.device("cpu")
        groups = {info.id: group_spec(info, alphas, cpu) for info in session.manifest.groups}
        is_here = all(isinstance(each, InprocConnection) for each in session.connections)  # which has no frames
        return cls(session.scheme, session.manifest.limits, groups, 0 if is_here else HEADER_BYTES)

    def messages(self, key: _Key, precision: str | None = None) -> Sequence[Call]:
        """Returns the calls that one request for a group becomes."""
        group, direction, is_public = key
        if is_public:
            return (Call(group, direction, self.scheme.arithmetic),)
        return [call for call, _ in product_calls(self.scheme, self.groups[group], direction, precision)]

    def both(self, calls: Mapping[tuple[_Key, int], int], precision: str | None = None) -> tuple[int, int, int]:
        """Returns (bytes sent, bytes received, requests that are waited for)."""
        up = down = trips = 0
        for (key, rows), count in calls.items():
            widths = self.groups[key[0]].widths(key[1])
            most = most_rows(widths, self.limits)
            whole, rest = divmod(rows, most)
            for part, times in ((most, whole * count), (rest, count if rest else 0)):
                if times:
                    trips += times
                    for call in self.messages(key, precision):
                        up += times * _message_bytes(call, FrameType.REQUEST, part, widths[0], self.header_bytes)
                        down += times * _message_bytes(call, FrameType.REPLY, part, widths[1], self.header_bytes)
        more = self._effects(calls)
        return up + more[0], down + more[1], trips + more[2]

    def _effects(self, calls: Mapping[tuple[_Key, int], int]) -> tuple[int, int, int]:
        """Returns what gaussian-pool asks for its vectors: bytes sent, bytes received and requests."""
        if self.scheme.name != "gaussian-pool":
            return 0, 0, 0
        pool: Any = self.scheme
        uses: Counter[_Key] = Counter()
        for (key, rows), count in calls.items():
            uses[key] += count * -(-rows // most_rows(self.groups[key[0]].widths(key[1]), self.limits))
        up = down = trips = 0
        for key, used in uses.items():
            widths, times = self.groups[key[0]].widths(key[1]), -(-used // pool.renew_every)
            call = Call(key[0], key[1], Arithmetic.FLOAT, Purpose.EFFECT)
            up += times * _message_bytes(call, FrameType.REQUEST, pool.pool_size, widths[0], self.header_bytes)
            down += times * _message_bytes(call, FrameType.REPLY, pool.pool_size, widths[1], self.header_bytes)
            trips += times
        return up, down, trips

    def hints(self, used: Sequence[_Key], directions: Sequence[Direction]) -> tuple[int, int, int, int]:
        """Returns what hints of the lattice mask take: bytes sent, bytes received, requests, and bytes on disk, of
        those that are not there yet.

        Args:
            used: the groups and directions of the run, for hints that are not kept.
            directions: those whose hints are fetched before a run, where hints are kept.
        """
        scheme = self.scheme
        if not isinstance(scheme, Lattice):
            return 0, 0, 0, 0
        pairs = [(group, direction) for direction in directions for group in self.groups.values()]
        if not scheme.keeps_hints:
            pairs = [(self.groups[group], way) for group, way, is_public in dict.fromkeys(used) if not is_public]
        missing = [pair for pair in pairs if not scheme.keeps_hints or not scheme.has_hints([pair])]
        up = down = trips = 0
        for group, direction in missing:
            widths, call = group.widths(direction), Call(group.id, direction, Arithmetic.RING, Purpose.HINT)
            for rows in scheme.fetches((group, direction)):
                up += _message_bytes(call, FrameType.REQUEST, rows, widths[0], self.header_bytes)
                down += _message_bytes(call, FrameType.REPLY, rows, widths[1], self.header_bytes)
                trips += 1
        return up, down, trips, scheme.hint_disk_bytes(missing) if scheme.keeps_hints else 0


def _fewer_layers(calls: Mapping[tuple[_Key, int], int], blocks: Mapping[int, int], first: int) -> dict[Any, int]:
    """Returns the calls of a run whose adapter begins at block `first`, if that of this one begins below: without the
    backward calls of lower blocks, and in block `first` without those that the lowest adapted block does not have."""
    backward = {key[0] for key, _ in calls if key[1] is Direction.BACKWARD}
    numbers = sorted({blocks[group] for group in backward if group in blocks})
    if not numbers or numbers[0] >= first:
        return dict(calls)
    order = {number: sorted(group for group, block in blocks.items() if block == number) for number in blocks.values()}
    lowest = [group in backward for group in order[numbers[0]]]
    kept_first = {group for group, kept in zip(order[first], lowest, strict=False) if kept}

    def is_kept(key: _Key) -> bool:
        block = blocks.get(key[0])
        if key[1] is Direction.FORWARD or block is None or block > first:
            return True
        return block == first and key[0] in kept_first

    return {call: count for call, count in calls.items() if is_kept(call[0])}


def _blocks(manifest: Manifest) -> dict[int, int]:
    """Returns the number of the transformer block of each group that is in one, by its layers' names."""
    found = {group.id: re.search(r"\.(\d+)\.", f".{group.layers[0].name}.") for group in manifest.groups}
    return {number: int(match[1]) for number, match in found.items() if match is not None}


def _savings(wire: _Wire, session: Session, calls: Mapping[tuple[_Key, int], int], now: int) -> tuple[Saving, ...]:
    """Returns the settings that would save bytes, the largest first."""
    found = []
    for precision in PRECISIONS:
        is_allowed = session.verifier is None or precision != "short"
        if is_allowed and precision != wire.scheme.precision and isinstance(wire.scheme, Lattice | Pad) | (
            wire.scheme.name == "shares"
        ):
            up, down, _ = wire.both(calls, precision)
            found.append(Saving(f"precision {precision} (--precision)", now - up - down))
    blocks = _blocks(session.manifest)
    num_blocks = max(blocks.values(), default=0) + 1
    for part, name in ((2, "half"), (3, "third")):
        first = num_blocks - -(-num_blocks // part)
        if any(key[1] is Direction.BACKWARD for key, _ in calls) and first > 0:
            up, down, _ = wire.both(_fewer_layers(calls, blocks, first))
            found.append(Saving(f"adapters on the upper {name} of the blocks only ({first} to {num_blocks - 1})", now - up - down))
    return tuple(sorted((each for each in found if each.num_bytes > 0), key=lambda each: -each.num_bytes))


# ---- a plan of a fine-tuning run -------------------------------------------------------------------------------------


def plan_run(
    client: PlannedSession, session: Session, folder: Path, prepared: Prepared, output_dir: Path, *, count_s: float = COUNT_S
) -> Bill:
    """Returns what a fine-tuning run will send and receive, and its memory, without a time. Sends nothing.

    Args:
        client, session: the client, and its open session.
        folder: the folder of the provider's bundle.
        prepared: what `tenant_sdk.training.finetune.prepare` returned.
        output_dir: the run's output folder, which is not written to; its disk may have to hold replies.
        count_s: the seconds after which the count of batches ends.
    """
    count = _count(client, prepared, session.scheme.arithmetic, output_dir, count_s, MOST_TYPICAL_TOKENS)
    wire = _Wire.of(session, folder)
    up, down, trips = wire.both(count.calls)
    hints = wire.hints([key for key, _ in count.calls], (Direction.FORWARD, Direction.BACKWARD))
    savings = _savings(wire, session, count.calls, up + down)
    return Bill(
        "finetune", count.steps, count.tokens, count.positions, up + hints[0], down + hints[1], trips + hints[2],
        hint_bytes=hints[1], hint_disk_bytes=hints[3], savings=savings, is_exact=count.is_exact,
        manifest=manifest_digest(session.manifest), run=prepared.run_id, mask=session.scheme.name,
        precision=session.scheme.precision,
    )  # fmt: skip
