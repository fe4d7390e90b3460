"""This module says what a fine-tuning run, or an answer, will cost before anything of its data is sent: calls, bytes,
time and memory.

Calls are counted and not modelled. The run's own model, adapter and Trainer are made, over an executor that sends
nothing. A few tiny batches of made-up tokens go through them forward and backward; how the number of rows of each call
follows from a batch's shape is solved from these. Then Trainer goes through the run's own batches, in their own order
and with its evaluations, and only their shapes are noted. The bytes are those of wire/frame.py for the mask's calls
within the provider's limits.

Time is measured in parts and added up:
- the provider and the link, by a probe: fresh random rows of the operating system, in the form of masked rows, of which
  nothing depends on the data or the adapter: layers and counts follow from the manifest, and both directions are asked
  for in a plan of a run, forward alone in one of answers. They use no mask slot, and at most `PROBE_S`;
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
what comes after `count_s` processor seconds of counting is taken to be as what came before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from noise import sampling
from noise.hints import local
from noise.masks.lattice import Lattice
from noise.masks.pad import Pad
from noise.options import PRECISIONS
from noise.params import LatticeParameters
from noise.polynomial import negacyclic
from noise.registry import product_calls
from noise.scheme import GroupSpec, Masked, MaskScheme, decode_rows, encode_rows
from tenant_sdk.keep import ATTENTION, block_of, choose_kept, spoken_keep
from tenant_sdk.model.build import group_spec, load_alphas
from tenant_sdk.model.run_state import RunStates
from tenant_sdk.model.send import RemoteExecutor, most_rows
from tenant_sdk.peft_model import virtual_tokens
from tenant_sdk.plain_values import positive
from tenant_sdk.plan_file import Bill, Saving, size
from tenant_sdk.report import Report, unseen
from tenant_sdk.session import Session
from tenant_sdk.session_protocol import TrainingSession
from tenant_sdk.training.activation_checkpointing import Checkpointing, estimate, has_dropout
from tenant_sdk.training.checkpoints import Checkpoints, save_adapter
from tenant_sdk.training.finetune import Prepared, Run
from tenant_sdk.training.frozen_prefix import FrozenPrefix, frozen_prefix
from tenant_sdk.training.loss import LOCAL_CHUNK_BYTES, REMOTE_CHUNK_BYTES
from tenant_sdk.training.token_rows import IGNORE_INDEX
from tenant_sdk.training.trainers import StopEarly, own_accelerate_state
from tenant_sdk.training.windows import EMBEDDINGS, kind_of
from wire.errors import ConfigurationError, VeilbaseError
from wire.frame import HEADER_BYTES, Arithmetic, Call, Direction, FrameType, Purpose, payload_bytes
from wire.limits import CHUNK_BYTES, Limits
from wire.manifest import Manifest
from wire.ring.seeded_rows import SEED_BYTES, SeededRows
from wire.transport.inproc import InprocConnection

PROBE_S = 10.0
"""The most seconds of a probe."""
PROBE_ROWS = 256
"""The rows of the larger of a probe's two requests for each shape of a layer, or fewer if the limits allow no more."""
MOST_TYPICAL_TOKENS = 512
"""The most tokens of the batch with which the tenant's own layers are timed."""
COUNT_S = 5.0
"""The processor seconds after which the count of a long run's batches ends, and the rest is taken to be alike."""
BRIEF_S = 1.0
"""The seconds of the probe and of the count in the estimate before a run. Model and tiny batches come on top."""
BRIEF_STEPS = 20
"""A run of fewer optimizer steps is not estimated before it begins: making its model and the tiny batches take about as
long as five steps."""
SMALL_BYTES = 4_000_000
"""A run of fewer bytes is not probed before it begins: it takes seconds, and the probe would be a part of them."""

_TINY, _COUNTING = "counting with made-up tokens", "counting the run's batches"
_PROBING = "timing the provider and the link"
"""Stages of a plan, as they are shown."""

_Key = tuple[int, Direction, bool]
"""A group's number, the direction, and whether the rows are public constants, which go without a mask."""
_NO_LABEL, _LABEL = 0, 5


class _Shape(NamedTuple):
    """Holds the shape of a batch.

    Attributes:
        batch, num_tokens: its sequences, and their tokens with padding.
        num_labels: the positions at which some sequence has a label.
        padding: the tokens that are not sent (tenant_sdk/model/padding.py).
        head_padding: those of them at the positions for which the head is called.
        padding_twice: those of them in windows that go through the model twice.
    """

    batch: int
    num_tokens: int
    num_labels: int
    padding: int = 0
    head_padding: int = 0
    padding_twice: int = 0


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
    """Notes the calls of a model, whole, and sends nothing. Kept layers are computed, which is a part of the time."""

    def __init__(self, executor: RemoteExecutor) -> None:
        """Takes the arithmetic and the kept layers of a session's executor."""
        self.unsent = _Unsent(executor.scheme.arithmetic)
        unlimited = Limits(max_rows=1 << 24, max_tensor_bytes=1 << 32, max_in_flight_bytes=1 << 36)
        super().__init__((), self.unsent, unlimited, kept=executor.kept)

    def run_public(self, group: GroupSpec, direction: Direction, rows: torch.Tensor) -> torch.Tensor:
        """Notes the call; see `RemoteExecutor.run_public`."""
        if group.id in self.kept.groups:
            return super().run_public(group, direction, rows)
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

    def __init__(self, window_tokens: int | None, num_virtual: int, sends_padding: bool) -> None:
        """Takes the run's window, the virtual tokens that a window counts as its own, and whether padding is sent."""
        self.window_tokens, self._num_virtual, self._sends_padding = window_tokens, num_virtual, sends_padding

    def shape(self, inputs: Mapping[str, torch.Tensor]) -> _Shape:
        """Returns the shape of a batch of Trainer's."""
        batch, num_tokens = inputs["input_ids"].shape
        labelled = inputs["labels"] != IGNORE_INDEX if "labels" in inputs else inputs["completion_mask"] != 0
        predicts = labelled[:, 1:].any(dim=0)
        shape = _Shape(batch, num_tokens, int(predicts.sum()))
        if self._sends_padding or "attention_mask" not in inputs:
            return shape
        padded = inputs["attention_mask"] == 0
        twice = 0
        if self.window_tokens is not None:
            length, num_windows = self._windows(shape, self.window_tokens)
            twice = int(padded[:, : max((num_windows - 1) * length - self._num_virtual, 0)].sum())
        at_head = int((padded[:, :-1] & ~labelled[:, 1:])[:, predicts].sum())
        return shape._replace(padding=int(padded.sum()), head_padding=at_head, padding_twice=twice)

    def _windows(self, shape: _Shape, window: int) -> tuple[int, int]:
        """Returns the positions of a window, and how many windows a batch has."""
        length = max(window // shape.batch, 1)
        return length, -(-(shape.num_tokens + self._num_virtual) // length)

    def features(self, shape: _Shape, window_tokens: int | None = None) -> np.ndarray[Any, Any]:
        """Returns 1, and the numbers of tokens, of sequences, and of positions of the head; with windows also that of
        windows, and that of tokens that go through the model twice."""
        batch = shape.batch
        values = [1, batch * shape.num_tokens - shape.padding, batch, batch * shape.num_labels - shape.head_padding]
        window = window_tokens or self.window_tokens
        if window is not None:
            length, num_windows = self._windows(shape, window)
            values += [num_windows, batch * (num_windows - 1) * length - shape.padding_twice]
        return np.array(values, dtype=np.float64)

    def samples(self, unit: int) -> list[tuple[_Shape, int | None]]:
        """Returns shapes of tiny batches, with their windows, that are enough to solve for all factors.

        Args:
            unit: the sequences of one row of the data: two for a preference.
        """
        plain: list[tuple[_Shape, int | None]] = [
            (_Shape(batch * unit, num_tokens, num_labels), None)
            for batch, num_tokens, num_labels in ((1, 8, 3), (2, 8, 3), (1, 16, 3), (1, 8, 6))
        ]
        if self.window_tokens is None:
            return plain
        room = self._num_virtual
        windowed = [(shape, shape[0] * (shape[1] + room)) for shape, _ in plain]
        longest = 16 + room
        return [*windowed, *((_Shape(unit, 16, 3), unit * -(-longest // parts)) for parts in (2, 3))]


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
    again: Counter[_Shape] = field(default_factory=Counter)
    """Those of them whose rows had all been met before."""
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
    memory_bytes: int
    """The tenant's own tensors, the adapter with its gradients and AdamW's two moments, activations and logits."""
    local_bytes: int
    """The same for a run on this machine alone, without checkpointing and without the base layers' weights."""
    prefix_bytes: int
    """The disk that `cache_frozen_prefix` takes."""
    again: Counter[tuple[_Key, int]]
    """The forward calls of batches whose rows had all been met before; none if they are not known."""
    first: int
    """The number of blocks that `cache_frozen_prefix` would leave out; 0 if it is not possible, or on."""


# ---- a run of Trainer over batches of which only the shapes are noted ------------------------------------------------


def _made_up(inputs: Mapping[str, torch.Tensor], shape: _Shape) -> dict[str, torch.Tensor]:
    """Returns a batch of another shape with the entries of `inputs`, and with contents that are the same for all
    data."""
    batch, num_tokens, num_labels = shape[:3]
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


_KEPT = " without lower blocks"
"""The end of the name of a kind of pass that leaves out the blocks below the lowest adapted one."""


class _PlannedPrefix:
    """Takes the place of a run's `PrefixCache`: it knows which rows would be kept, and keeps nothing."""

    def __init__(self, prefix: FrozenPrefix) -> None:
        self._prefix = prefix
        self._met: set[int] = set()
        self.leaves_out = False
        """Whether passes leave out the lower blocks."""

    def meet(self, positions: torch.Tensor) -> None:
        """Decides about the lower blocks as a run does at a batch with these rows, which then count as kept."""
        rows = set(positions.tolist())
        self.leaves_out = rows <= self._met
        self._met |= rows

    def batch(self, positions: torch.Tensor) -> contextlib.AbstractContextManager[None]:
        """Returns a context for a pass over a tiny batch."""
        return self._prefix.given(lambda hidden: hidden) if self.leaves_out else contextlib.nullcontext()

    def close(self) -> None:
        """Does nothing."""


class _Counter:
    """Replaces the steps of a Trainer, so that it goes through a run's batches without computing them."""

    def __init__(
        self, trainer: Any, recorder: _Recorder, windowed: _Windowed, count_s: float, most_typical: int, report: Report
    ) -> None:
        self._trainer, self._recorder, self.windowed, self._report = trainer, recorder, windowed, report
        self._until, self._most_typical = time.thread_time() + count_s, most_typical
        self.passes: dict[str, _Pass] = {}
        self.is_exact = True
        self.num_tokens = 0
        self._prefix: _PlannedPrefix | None = None
        if getattr(trainer, "prefix", None) is not None:
            trainer.prefix = self._prefix = _PlannedPrefix(trainer.prefix.prefix)
        step, predict = trainer.training_step, trainer.prediction_step

        def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            self._note("training", inputs, lambda made: step(model, made, None))
            self.num_tokens += int(inputs["attention_mask"].sum())
            report(_COUNTING, trainer.state.global_step, trainer.state.max_steps, "steps")
            if time.thread_time() > self._until:
                self._note_rest(inputs, lambda made: step(model, made, None))
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
    optimizer_s = 0.0
    """The seconds of an optimizer step here."""
    learning_s = 0.0
    """The seconds of the tiny batches, which a run does not have."""

    def _optimizer_s(self) -> float:
        trainer = self._trainer
        took_s = 0.0
        for _ in range(2):  # the first one makes the optimizer's state
            for parameter in trainer.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            began = time.perf_counter()
            torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
            trainer.optimizer.step()
            took_s = time.perf_counter() - began
        trainer.model.zero_grad(set_to_none=True)
        return took_s

    def _note(self, kind: str, inputs: Mapping[str, torch.Tensor], run: Callable[[Any], Any]) -> None:
        shape = self.windowed.shape(inputs)
        if self._prefix is not None:
            self._prefix.meet(inputs["positions"])
            kind += _KEPT if self._prefix.leaves_out else ""
        self._know(kind, inputs, shape, run)
        self.passes[kind].shapes[shape] += 1
        if self._prefix is None:
            is_again = self.passes[kind].shapes.total() > self._num_batches(kind)
        else:
            is_again = self._prefix.leaves_out
        self.passes[kind].again[shape] += is_again

    def _num_batches(self, kind: str) -> float:
        """Returns after how many batches of a kind every row was met."""
        trainer, args = self._trainer, self._trainer.args
        if kind == "training":
            return float(math.ceil(len(trainer.train_dataset) / args.per_device_train_batch_size))
        if kind == "evaluation":
            return float(math.ceil(len(trainer.eval_dataset) / args.per_device_eval_batch_size))
        return math.inf

    def _know(self, kind: str, inputs: Any, shape: _Shape, run: Callable[[Any], Any]) -> None:
        if kind in self.passes:
            return
        began, began_s = time.thread_time(), time.perf_counter()
        self.passes[kind] = self._learn(kind, inputs, shape, run)
        self._until += time.thread_time() - began
        self.learning_s += time.perf_counter() - began_s

    def _note_rest(self, inputs: Any, run: Callable[[Any], Any]) -> None:
        """Learns of passes without lower blocks, if a count that ends early has met none."""
        if self._prefix is not None:
            self._prefix.leaves_out = True
            self._know(f"training{_KEPT}", inputs, self.windowed.shape(inputs), run)

    def times(self, scale: float) -> Iterator[tuple[str, _Shape, float]]:
        """Yields (kind of pass, shape, number of such batches in the run) for all batches.

        Args:
            scale: how many times as many steps the run has as were counted.
        """
        for kind, each in self.passes.items():
            if kind.endswith(_KEPT):
                continue
            kept = self.passes.get(f"{kind}{_KEPT}")
            met = each.shapes.total()
            met_again = 0 if kept is None else kept.shapes.total()
            first, again = (scale if kind != "reference" else 1.0) * met, scale * met_again
            if kept is not None and scale != 1.0:  # rows are met for the first time once, however long the run is
                whole = scale * (met + met_again)
                first = met if met_again else min(whole, self._num_batches("training"))
                again = whole - first
            for shape, times in each.shapes.items():
                yield kind, shape, first * times / met
            for shape, times in (kept.shapes if met_again else each.shapes).items() if kept is not None else ():
                yield f"{kind}{_KEPT}", shape, again * times / (met_again or met)

    def _learn(self, kind: str, inputs: Mapping[str, torch.Tensor], shape: _Shape, run: Callable[[Any], Any]) -> _Pass:
        """Runs tiny batches, and returns how calls follow from shapes, and how long they take here."""
        unit = 1 if "labels" in inputs else 2
        samples, tiny, stage = [], self.windowed.samples(unit), f"{_TINY}: {kind}"
        self._is_inside = True
        try:
            for number, (sample, window) in enumerate(tiny):
                self._report(stage, number, len(tiny) + 1, "batches")
                took_s = self._timed(inputs, sample, window, run)
                samples.append((self.windowed.features(sample, window), self._recorder.taken()))
            self._report(stage, len(tiny), len(tiny) + 1, "batches")
            laws, is_exact = _laws(samples)
            self.is_exact &= is_exact
            if kind == "training":  # which is met before any that leaves out lower blocks
                self.optimizer_s = self._optimizer_s()
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
        return _Shape(batch, num_tokens, max(1, min(num_tokens - 1, round(shape[2] * num_tokens / shape[1]))))

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
    """Leaves the random states of Python, numpy and torch's CPU generator as they were. The generators of CUDA devices
    are not kept: nothing here draws from them."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@own_accelerate_state()
def count_calls(
    session: PlannedSession, prepared: Prepared, executor: RemoteExecutor, output_dir: Path, count_s: float,
    typical: int, report: Report = unseen,
) -> _Count:  # fmt: skip
    """Counts the calls of a run; `report` is told how far this is."""
    report("making the run's model, to count")
    recorder = _Recorder(executor)
    unconnected: Any = _Unconnected(session, recorder)
    quiet = dataclasses.replace(prepared, options=dataclasses.replace(prepared.options, progress=False))
    with (
        tempfile.TemporaryDirectory(prefix="veilbase-plan-", ignore_cleanup_errors=True) as scratch,
        _same_random_numbers(), warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.simplefilter("ignore")  # a run says what there is to warn about
        run, began = (
            Run(unconnected, quiet, Checkpoints(Path(scratch) / "checkpoints"), output_dir),
            time.perf_counter(),
        )
        with run.made_trainer() as (trainer, kept):
            return _counted(
                run, trainer, kept, recorder, Path(scratch), count_s, typical, _blocks(session.connect()), began, report
            )


def _counted(
    run: Run,
    trainer: Any,
    kept: Checkpointing,
    recorder: _Recorder,
    scratch: Path,
    count_s: float,
    typical: int,
    blocks: Mapping[int, int],
    began: float,
    report: Report,
) -> _Count:
    options, model = run.options, trainer.model
    prefix_bytes = trainer.prefix.num_bytes if getattr(trainer, "prefix", None) is not None else 0
    args = trainer.args
    args.save_strategy = args.logging_strategy = type(args.save_strategy)("no")
    args.load_best_model_at_end = False
    trainer.remove_callback(StopEarly)
    num_virtual = model.active_peft_config.num_virtual_tokens if kind_of(model) in EMBEDDINGS else 0
    sends_padding = run.session.bucket is not None or bool(getattr(model.get_base_model(), "_is_stateful", False))
    windowed = _Windowed(options.window_tokens, num_virtual, sends_padding)
    counter = _Counter(trainer, recorder, windowed, count_s, typical, report)
    calls: Counter[tuple[_Key, int]] = Counter(recorder.taken())
    if options.dpo_precompute_reference and run.rows.are_preferences:
        trainer.precompute_reference()
    trainer.train()
    calls.update(recorder.taken())
    save_adapter(model, scratch / "adapter")
    calls.update(recorder.taken())
    steps, done = int(trainer.state.max_steps), max(int(trainer.state.global_step), 1)
    scale = steps / done
    # what is not the tiny batches, the run does too: making the model, going through the batches, writing the adapter
    positions, tenant_s = 0.0, time.perf_counter() - began - counter.learning_s + steps * counter.optimizer_s
    base = model.get_base_model()
    chunk = max(1, REMOTE_CHUNK_BYTES // (4 * int(base.config.get_text_config().vocab_size)))
    head_rows = chunk, options.window_tokens or chunk
    for kind, shape, times in counter.times(scale):
        each = counter.passes[kind]
        tokens = shape[0] * (shape[1] + num_virtual)
        positions += times * tokens
        tenant_s += times * (each.fixed_s + each.token_s * tokens)
        features = counter.windowed.features(shape)
        for law in each.laws:
            most = None if law.key[0] in blocks else head_rows[kind.startswith("training")]
            for key, rows, count in law.at(features, most):
                calls[key, rows] += round(times * count)
    own_bytes = sum(each.nbytes for each in (*model.parameters(), *model.buffers()) if not each.is_meta)
    own_bytes += 3 * sum(each.nbytes for each in model.parameters() if each.requires_grad) + 3 * LOCAL_CHUNK_BYTES
    longest = run.rows.longest_batch(options.batch_size, num_virtual)
    need = estimate(base, longest, has_dropout(model))
    kept_bytes = need.plain
    if kept.mode is not None:
        kept_bytes = need.working + (min(need.stored, kept.store.memory_bytes) if kept.store is not None else 0)
    elif options.window_tokens is not None:
        kept_bytes = estimate(base, min(longest, options.window_tokens), has_dropout(model)).plain
    return _Count(
        calls, steps, round(counter.num_tokens * scale), round(positions), tenant_s,
        counter.is_exact and scale == 1.0, own_bytes + kept_bytes, own_bytes + need.plain, prefix_bytes,
        _calls_again(counter, blocks) if scale == 1.0 else Counter(),
        0 if prefix_bytes else _first_of_prefix(run, model),
    )  # fmt: skip


def _calls_again(counter: _Counter, blocks: Mapping[int, int]) -> Counter[tuple[_Key, int]]:
    """Returns the forward calls of all blocks in batches whose rows had all been met before."""
    calls: Counter[tuple[_Key, int]] = Counter()
    for each in counter.passes.values():
        for shape, times in each.again.items():
            features = counter.windowed.features(shape)
            for law in each.laws:
                if law.key[0] in blocks and law.key[1] is Direction.FORWARD:
                    for key, rows, count in law.at(features):
                        calls[key, rows] += times * count
    return calls


def _first_of_prefix(run: Run, model: Any) -> int:
    """Returns how many blocks `cache_frozen_prefix` would leave out; 0 if it is not possible. The model is of no use
    afterwards."""
    options = run.options
    if options.window_tokens is not None or run.rows.are_preferences or virtual_tokens(run.peft_config):
        return 0
    try:
        return frozen_prefix(model, bf16=options.bf16).first
    except VeilbaseError:
        return 0


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
    kept: frozenset[int] = frozenset()
    """The groups that are computed here."""

    @classmethod
    def of(cls, session: Session, folder: Path) -> _Wire:
        """Returns that of a session; `folder` is the bundle's."""
        alphas, cpu = load_alphas(folder, session.manifest), torch.device("cpu")
        groups = {info.id: group_spec(info, alphas, cpu) for info in session.manifest.groups}
        is_here = all(isinstance(each, InprocConnection) for each in session.connections)  # which has no frames
        header_bytes = 0 if is_here else HEADER_BYTES
        return cls(session.scheme, session.manifest.limits, groups, header_bytes, session.kept.groups)

    @property
    def asked(self) -> list[GroupSpec]:
        """Returns the groups that the provider is asked for."""
        return [group for group in self.groups.values() if group.id not in self.kept]

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

    def missing_hints(
        self, used: Sequence[_Key], directions: Sequence[Direction]
    ) -> list[tuple[GroupSpec, Direction]]:  # fmt: skip
        """Returns the groups and directions whose hints of the lattice mask a run has to get.

        Args:
            used: the groups and directions of the run, for hints that are not kept.
            directions: those whose hints are fetched before a run, where hints are kept.
        """
        scheme = self.scheme
        if not isinstance(scheme, Lattice):
            return []
        if not scheme.keeps_hints:
            return [(self.groups[group], way) for group, way, is_public in dict.fromkeys(used) if not is_public]
        pairs = [(group, direction) for direction in directions for group in self.asked]
        return [pair for pair in pairs if not scheme.has_hints([pair])]

    def hints(self, missing: Sequence[tuple[GroupSpec, Direction]]) -> tuple[int, int, int, int]:
        """Returns what these hints take: bytes sent, bytes received, requests, and bytes on disk."""
        scheme = self.scheme
        if not isinstance(scheme, Lattice):
            return 0, 0, 0, 0
        up = down = trips = 0
        for group, direction in missing:
            widths, call = group.widths(direction), Call(group.id, direction, Arithmetic.RING, Purpose.HINT)
            for rows in scheme.fetches((group, direction)):
                up += _message_bytes(call, FrameType.REQUEST, rows, widths[0], self.header_bytes)
                down += _message_bytes(call, FrameType.REPLY, rows, widths[1], self.header_bytes)
                trips += 1
        return up, down, trips, scheme.hint_disk_bytes(missing) if scheme.keeps_hints else 0

    @property
    def num_weights(self) -> int:
        """Returns the number of the base layers' weights, kept ones included."""
        return sum(group.in_features * group.out_features for group in self.groups.values())


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
    found = {group.id: block_of(group.layers[0].name) for group in manifest.groups}
    return {number: block for number, block in found.items() if block is not None}


def _below(again: Mapping[tuple[_Key, int], int], blocks: Mapping[int, int], first: int) -> Counter[Any]:
    """Returns those of some calls that are for blocks below `first`."""
    return Counter({call: count for call, count in again.items() if blocks.get(call[0][0], first) < first})


def _savings(wire: _Wire, session: Session, count: _Count, now: int) -> tuple[Saving, ...]:
    """Returns the settings that would save bytes, the largest first.

    Args:
        now: the bytes of the run without hints.
    """
    calls, found = count.calls, _savings_of_precision(wire, session, count.calls, now)
    blocks = _blocks(session.manifest)
    num_blocks = max(blocks.values(), default=0) + 1
    is_trained = any(key[1] is Direction.BACKWARD for key, _ in calls)
    parts = {num_blocks - -(-num_blocks // part): name for part, name in ((3, "third"), (2, "half"))}
    for first, name in parts.items():
        if is_trained and first > 0:
            fewer = Counter(_fewer_layers(calls, blocks, first))
            if count.prefix_bytes:
                fewer -= _below(count.again, blocks, first)
            up, down, _ = wire.both(fewer)
            setting = f"adapters on the upper {name} of the blocks only ({first} to {num_blocks - 1})"
            found.append(Saving(setting, now - up - down))
    if not count.prefix_bytes:
        up, down, _ = wire.both(Counter(calls) - _below(count.again, blocks, count.first))
        found.append(Saving("keeping the frozen prefix (--cache-frozen-prefix)", now - up - down))
    return _largest_first([*found, *_if_kept(wire, session, calls, now)])


def _largest_first(found: Sequence[Saving]) -> tuple[Saving, ...]:
    return tuple(sorted((each for each in found if each.num_bytes > 0), key=lambda each: -each.num_bytes))


def _savings_of_precision(
    wire: _Wire, session: Session, calls: Mapping[tuple[_Key, int], int], now: int
) -> list[Saving]:
    found = []
    for precision in PRECISIONS:
        is_allowed = session.verifier is None or precision != "short"
        if (
            is_allowed
            and precision != wire.scheme.precision
            and isinstance(wire.scheme, Lattice | Pad) | (wire.scheme.name == "shares")
        ):
            up, down, _ = wire.both(calls, precision)
            found.append(Saving(f"precision {precision} (--precision)", now - up - down))
    return found


def _if_kept(
    wire: _Wire, session: Session, calls: Mapping[tuple[_Key, int], int], now: int
) -> list[Saving]:  # fmt: skip
    """Returns what would be saved if the tenant computed the attention's layers itself; nothing where it keeps layers,
    where this cannot be, or in float arithmetic, which does not go with `verify`."""
    if wire.kept or wire.scheme.arithmetic is Arithmetic.FLOAT:
        return []
    try:
        kept = choose_kept((ATTENTION,), session.manifest).groups
    except ConfigurationError:
        return []
    up, down, _ = wire.both({call: count for call, count in calls.items() if call[0][0] not in kept})
    held = sum(wire.groups[group].in_features * wire.groups[group].out_features for group in kept)
    needs = "" if session.verifier is not None else "; needs --verify, or a provider that gives weights"
    return [Saving(f"attention computed here (--keep attention; {size(held)} of memory{needs})", now - up - down)]


# ---- time ------------------------------------------------------------------------------------------------------------

_Form = tuple[Any, ...]
"""What a probe tells requests apart by: the columns of request and reply, and the widths of their numbers."""


@dataclass(frozen=True)
class _Seconds:
    """Holds what one request of a form takes, and what each of its rows adds."""

    call_s: float
    row_s: float

    def of(self, rows: int) -> float:
        """Returns the seconds of a request with so many rows."""
        return self.call_s + rows * self.row_s


class _Probe:
    """Measures the provider, the link, and the encoding of rows here; see the module's docstring."""

    def __init__(
        self, session: Session, wire: _Wire, directions: Sequence[Direction], probe_s: float, report: Report
    ) -> None:
        """Sends and times random rows, in rounds, until rounds take no less time or `probe_s` are over.

        Args:
            session, wire: the session.
            directions: all forms of the model are asked for in each, by the first group that has it, so that a probe
                does not show what an adapter is on.
            probe_s: the most seconds.
            report: told how many of these are over.
        """
        self._wire, self._executor = wire, session.executor
        self._first: dict[_Form, _Key] = {}
        for direction in directions:
            for spec in wire.asked:
                self._first.setdefault(self._form((spec.id, direction, False)), (spec.id, direction, False))
        widths = [self._widths(form) for form in self._first]
        most = min([PROBE_ROWS, *(most_rows(each, wire.limits) for each in widths)])
        # so few that each round is done soon on a slow line, too
        self.rows = max(1, min(most, int(SMALL_BYTES / (4 * max(sum(map(sum, widths)), 1)))))
        took: dict[tuple[int, _Form], list[float]] = {}
        began_s, stale = time.perf_counter(), 0
        until = began_s + probe_s
        while stale < 3:
            stale += 1
            for rows in dict.fromkeys((1, self.rows)):
                for form, (group, direction, _) in self._first.items():
                    if took and time.perf_counter() >= until:
                        stale = 3
                        continue
                    began = time.perf_counter()
                    report(_PROBING, int(began - began_s), math.ceil(probe_s), "s at most")
                    session.executor.exchange(wire.groups[group], direction, rows)
                    times = took.setdefault((rows, form), [])
                    times.append(time.perf_counter() - began)
                    if len(times) == 1 or times[-1] < 0.95 * min(times[:-1]):
                        stale = min(stale, 1)
        self._seconds = {form: self._solved(form, took) for form in self._first}
        self._code = {form: self._coding(key) for form, key in self._first.items()}

    def _form(self, key: _Key) -> _Form:
        calls = tuple((call.bits, call.reply_bits, call.purpose) for call in self._wire.messages(key))
        return (*self._wire.groups[key[0]].widths(key[1]), calls)

    @staticmethod
    def _widths(form: _Form) -> tuple[int, int]:
        return form[0], form[1]

    def _solved(self, form: _Form, took: Mapping[tuple[int, _Form], list[float]]) -> _Seconds:
        """Returns the median times of a form; by its columns from another form if the time was over before it came."""

        def typical(rows: int) -> float:
            times = took.get((rows, form))
            if times:
                return float(np.median(times[1:] or times))
            others = [(self._widths(other), np.median(each)) for (n, other), each in took.items() if n == rows]
            others = others or [(self._widths(other), np.median(each) * rows / n) for (n, other), each in took.items()]
            return max(float(each) * sum(self._widths(form)) / sum(columns) for columns, each in others)

        if self.rows == 1:
            return _Seconds(typical(1), 0.0)
        row_s = max(typical(self.rows) - typical(1), 0.0) / (self.rows - 1)
        return _Seconds(max(typical(1) - row_s, 0.0), row_s)

    def _coding(self, key: _Key) -> _Seconds:
        """Returns how long rows of a form take to be encoded, masked and decoded here."""
        group, direction = self._wire.groups[key[0]], key[1]
        if self._wire.scheme.arithmetic is Arithmetic.FLOAT:
            return _Seconds(0.0, 0.0)
        cols, reply_cols = group.widths(direction)
        found = []
        for rows in (1, PROBE_ROWS):
            values, reply = torch.randn(rows, cols), torch.zeros(rows, reply_cols, dtype=torch.int32)
            times = []
            for _ in range(3):
                began = time.perf_counter()
                if self._wire.scheme.name == "shares":
                    SeededRows(os.urandom(SEED_BYTES), 0, rows).expand(cols)
                encoded, scales = encode_rows(group, direction, values)
                encoded += encoded
                decode_rows(group, direction, reply, scales, reply)
                times.append(time.perf_counter() - began)
            found.append(min(times))
        row_s = max(found[1] - found[0], 0.0) / (PROBE_ROWS - 1)
        return _Seconds(max(found[0] - row_s, 0.0), row_s)

    def seconds(self, calls: Mapping[tuple[_Key, int], int]) -> tuple[float, float]:
        """Returns the seconds that calls take at the provider and on the link, and those of their encoding here."""
        there = here = 0.0
        for (key, rows), count in calls.items():
            form = self._form(key)
            if form not in self._seconds:  # public rows, which are few
                continue
            most = most_rows(self._widths(form), self._wire.limits)
            for part, times in ((most, rows // most), (rows % most, 1)):
                if part and times:
                    there += count * times * self._seconds[form].of(part)
                    here += count * times * self._code[form].of(part)
        return there, here

    def hint_s(self, pairs: Sequence[tuple[GroupSpec, Direction]]) -> float:
        """Returns how long these hints take to be fetched or computed."""
        scheme = self._wire.scheme
        if not isinstance(scheme, Lattice) or not pairs:
            return 0.0
        if scheme.computes_hints:
            return local.Work.of(pairs, scheme.parameters.dimension).products / local.product_speed()
        known = {self._widths(form): each for form, each in self._seconds.items()}
        worst = max(each.row_s / sum(widths) for widths, each in known.items())
        total = 0.0
        for group, direction in pairs:
            widths = group.widths(direction)
            each = known.get(widths) or _Seconds(0.0, worst * sum(widths))
            total += sum(each.of(rows) for rows in scheme.fetches((group, direction)))
        return total


def _mask_s(wire: _Wire, calls: Mapping[tuple[_Key, int], int]) -> float:
    """Returns how long the masks of a run take, by the speed at which this machine makes a throwaway block."""
    scheme = wire.scheme
    rows: Counter[_Key] = Counter()
    for (key, num_rows), count in calls.items():
        if not key[2]:
            rows[key] += num_rows * count
    if isinstance(scheme, Pad):
        products = sum(
            num * wire.groups[key[0]].in_features * wire.groups[key[0]].out_features for key, num in rows.items()
        )
        return products / local.product_speed()
    if not isinstance(scheme, Lattice) or scheme.polynomials is not negacyclic:  # a GPU makes them beside all else
        return 0.0
    numbers = sum(scheme.pool.rounded(num) * sum(wire.groups[key[0]].widths(key[1])) for key, num in rows.items())
    return numbers / _mask_speed(scheme.parameters)


def _mask_speed(parameters: LatticeParameters, features: int = 256, num_blocks: int = 4) -> float:
    """Returns how many numbers of masks and effects this machine makes in a second. Secrets, matrix and hint are drawn
    for this and dropped."""
    rng = sampling.Csprng()
    matrix = SeededRows(os.urandom(SEED_BYTES), 0, parameters.dimension).expand(features)
    matrix_hat = negacyclic.transform(matrix, parameters)
    fastest_s = math.inf
    for _ in range(2):
        began = time.perf_counter()
        drawn = sampling.ternary(rng, (num_blocks, parameters.rank, parameters.ring_degree))
        negacyclic.masks_and_effects(
            matrix_hat, negacyclic.secret_transform(drawn), matrix,
            lambda shape: sampling.error(rng, shape, parameters), parameters,
        )  # fmt: skip
        fastest_s = min(fastest_s, time.perf_counter() - began)
    return 2 * num_blocks * parameters.ring_degree * features / max(fastest_s, 1e-9)


def _local_s(wire: _Wire, calls: Mapping[tuple[_Key, int], int]) -> float:
    """Returns how long the base layers of a run would take here in float32: 2·rows·in·out operations a call, forward
    and backward alike, but no gradient of a weight; or as long as it takes to read the weight, for few rows."""
    rows, wide = 256, 1024
    weight, batch = torch.randn(wide, 16 * wide), torch.randn(rows, wide)

    def fastest(left: torch.Tensor) -> float:
        times = []
        for _ in range(3):
            began = time.perf_counter()
            torch.mm(left, weight)
            times.append(time.perf_counter() - began)
        return max(min(times), 1e-9)

    flops = 2.0 * rows * weight.numel() / fastest(batch)
    bytes_s = 4.0 * weight.numel() / fastest(batch[:1])
    total = 0.0
    for ((group, _, _), num_rows), count in calls.items():
        numbers = wire.groups[group].in_features * wire.groups[group].out_features
        total += count * max(2.0 * num_rows * numbers / flops, 4.0 * numbers / bytes_s)
    return total


# ---- a plan of a fine-tuning run -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans runs and answers of one open session.

    Attributes:
        client, session: the client, and its open session.
        folder: the folder of the provider's bundle.
        is_on_this_host: whether the provider may use the cores of this machine.
        report: told how far a plan is.
    """

    client: PlannedSession
    session: Session
    folder: Path
    is_on_this_host: bool
    report: Report = unseen

    def run(
        self, prepared: Prepared, output_dir: Path, *, probe_s: float = PROBE_S, count_s: float = COUNT_S,
        typical_tokens: int = MOST_TYPICAL_TOKENS, probe_from_bytes: int = 0,
    ) -> Bill:  # fmt: skip
        """Returns what a fine-tuning run will cost. Sends nothing but the probe.

        Args:
            prepared: what `tenant_sdk.training.finetune.prepare` returned.
            output_dir: the run's output folder, which is not written to; its disk may have to hold replies.
            probe_s: the most seconds of the probe.
            count_s: the processor seconds after which the count of batches ends.
            typical_tokens: the most tokens of the batch with which the tenant's own layers are timed.
            probe_from_bytes: a run of fewer bytes is not probed, and has no time.
        """
        count = count_calls(
            self.client, prepared, self.session.executor, output_dir, count_s, typical_tokens, self.report
        )
        wire = _Wire.of(self.session, self.folder)
        up, down, trips = wire.both(count.calls)
        keys = list(dict.fromkeys(key for key, _ in count.calls))
        both = (Direction.FORWARD, Direction.BACKWARD)  # whatever the adapter needs
        missing = wire.missing_hints(keys, both)
        hints = wire.hints(missing)
        bill = Bill(
            "finetune", count.steps, count.tokens, count.positions, up + hints[0], down + hints[1], trips + hints[2],
            hint_bytes=hints[1], hint_disk_bytes=hints[3], prefix_disk_bytes=count.prefix_bytes,
            memory_bytes=count.memory_bytes + _pool_bytes(wire, count.calls) + self.session.executor.kept.num_bytes,
            local_bytes=count.local_bytes + 4 * wire.num_weights, is_exact=count.is_exact,
            savings=_savings(wire, self.session, count, up + down), run=prepared.run_id,
            **prepared.identity.to_dict(), **self._about(),
        )  # fmt: skip
        if bill.num_bytes < probe_from_bytes:
            return bill
        return self._timed(bill, wire, count.calls, both, missing, count.tenant_s, probe_s)

    def briefly(self, prepared: Prepared, output_dir: Path) -> Bill | str:
        """Returns what a run will cost, with a brief probe or none; or a line that says why it does not."""
        if _num_steps(prepared) < BRIEF_STEPS:
            return f"a run of fewer than {BRIEF_STEPS} steps is not estimated; `tenant plan` (client.plan) does so"
        try:
            return self.run(
                prepared, output_dir, probe_s=BRIEF_S / 2, count_s=BRIEF_S / 2, typical_tokens=MOST_TYPICAL_TOKENS // 8,
                probe_from_bytes=SMALL_BYTES,
            )  # fmt: skip
        except VeilbaseError:
            raise
        except Exception as exc:  # noqa: BLE001 - an adapter may not bear made-up numbers, which the run does not have
            return f"no estimate for this adapter ({type(exc).__name__})"

    def tokens(self, prompt_tokens: int, new_tokens: int, requests: int = 1, *, probe_s: float = PROBE_S) -> Bill:
        """Returns what answers will cost, one after the other. Sends nothing but the probe.

        Args:
            prompt_tokens: the tokens of each prompt.
            new_tokens: the tokens of each answer.
            requests: the number of answers.
            probe_s: the most seconds of the probe.

        Raises:
            ConfigurationError: a number is not positive, or one answer does not fit into the model's context.
        """
        for name, value in (("prompt_tokens", prompt_tokens), ("new_tokens", new_tokens), ("requests", requests)):
            positive(name, value)
        if prompt_tokens + new_tokens > (most := self.client.context_length):
            raise ConfigurationError(
                f"an answer and its prompt have at most {most} tokens in this model, got {prompt_tokens + new_tokens}"
            )
        self.report("making a model, to count the calls of an answer")
        calls, tenant_s = _answer_calls(self.client, self.session.executor, prompt_tokens, new_tokens)
        calls = Counter({call: count * requests for call, count in calls.items()})
        wire = _Wire.of(self.session, self.folder)
        up, down, trips = wire.both(calls)
        keys = list(dict.fromkeys(key for key, _ in calls))
        missing = wire.missing_hints(keys, (Direction.FORWARD,))
        hints = wire.hints(missing)
        tokens = requests * (prompt_tokens + new_tokens)
        bill = Bill(
            "tokens", requests * new_tokens, tokens, tokens - requests,
            up + hints[0], down + hints[1], trips + hints[2], hint_bytes=hints[1], hint_disk_bytes=hints[3],
            savings=_largest_first([
                *_savings_of_precision(wire, self.session, calls, up + down),
                *_if_kept(wire, self.session, calls, up + down),
            ]),
            **self._about(),
        )  # fmt: skip
        return self._timed(bill, wire, calls, (Direction.FORWARD,), missing, requests * tenant_s, probe_s)

    def _about(self) -> dict[str, Any]:
        return {
            "manifest": self.session.manifest.digest,
            "mask": self.session.scheme.name,
            "precision": self.session.scheme.precision,
            "keep": spoken_keep(self.client.keep),
        }

    def check(self, plan: Bill, prepared: Prepared) -> None:
        """Raises ConfigurationError if a run is not the one that was planned."""
        plan.check(run=prepared.run_id, identity=prepared.identity, **self._about())

    def _timed(
        self, bill: Bill, wire: _Wire, calls: Mapping[tuple[_Key, int], int], directions: Sequence[Direction],
        missing: Sequence[tuple[GroupSpec, Direction]], tenant_s: float, probe_s: float,
    ) -> Bill:  # fmt: skip
        with _same_random_numbers():
            probe = _Probe(self.session, wire, directions, probe_s, self.report)
            self.report("timing masks and products on this machine")
            provider_s, coding_s = probe.seconds(calls)
            mask_s, hint_s, base_s = _mask_s(wire, calls), probe.hint_s(missing), _local_s(wire, calls)
        both_s = provider_s + mask_s if self.is_on_this_host else max(provider_s, mask_s)
        return dataclasses.replace(
            bill, seconds=tenant_s + coding_s + both_s + hint_s, provider_s=provider_s, tenant_s=tenant_s + coding_s,
            mask_s=mask_s, hint_s=hint_s, local_seconds=tenant_s + base_s,
        )  # fmt: skip


def _num_steps(prepared: Prepared) -> int:
    """Returns the optimizer steps of a run, to within one for each epoch."""
    options = prepared.options
    if options.max_steps is not None:
        return options.max_steps
    return math.ceil(
        len(prepared.rows.rows) * options.num_epochs / (options.batch_size * options.gradient_accumulation_steps)
    )


def _pool_bytes(wire: _Wire, calls: Mapping[tuple[_Key, int], int]) -> int:
    """Returns the memory of masks that are made ahead: the pool's budget, or all masks of the run."""
    if not isinstance(wire.scheme, Lattice | Pad):
        return 0
    needed = sum(4 * rows * count * sum(wire.groups[key[0]].widths(key[1])) for (key, rows), count in calls.items())
    pool = wire.scheme.pool
    return min(pool.budget_bytes if pool.file is None else pool.file.held_bytes, needed)


@torch.no_grad()
def _answer_calls(
    client: PlannedSession, executor: RemoteExecutor, prompt_tokens: int, new_tokens: int
) -> tuple[Counter[tuple[_Key, int]], float]:
    """Returns the calls of one answer of the base model, and the seconds of the tenant's own layers. They are counted
    with a short prompt of made-up tokens."""
    recorder = _Recorder(executor)
    model: Any = client.model_over(recorder)
    recorder.taken()
    options: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        options["logits_to_keep"] = 1

    def step(num_tokens: int, cache: Any) -> tuple[Any, list[tuple[_Key, int]], float]:
        began = time.perf_counter()
        done = model(torch.full((1, num_tokens), _LABEL), past_key_values=cache, **options)
        return done.past_key_values, recorder.taken(), time.perf_counter() - began

    sample = 8
    cache, prompt, _ = step(sample, None)
    times = []
    for _ in range(6):
        cache, one, took_s = step(1, cache)
        times.append(took_s)
    prompt_s = step(sample, None)[2]
    calls: Counter[tuple[_Key, int]] = Counter()
    for key, rows in prompt:
        calls[key, prompt_tokens if rows == sample else rows] += 1
    for call in one:
        calls[call] += new_tokens - 1
    step_s = float(np.median(times))
    token_s = max(prompt_s - step_s, 0.0) / (sample - 1)
    return calls, step_s * new_tokens + token_s * (prompt_tokens - 1)
