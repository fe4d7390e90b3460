"""Computes what a million tokens cost, trained or decoded, at four models' shapes over five links: the tables of
docs/cost.md.

Nothing is timed and nothing is sent. Bytes and disk follow exactly from a model's shapes, by the product's own
functions.
Times, processor seconds, memory and prices follow from these and from the numbers of `Measured` and `Assumed`; the
formulas stand in docs/cost.md. So the same options always print the same tables. Figures that were measured are
printed in bold; docs/benchmarks.md, docs/memory.md and docs/accelerators.md have their commands and machines.

Left out: the checks of replies, retries, evaluations, and what connecting and making hints take once.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any

from noise.blocks.pool import STEP_BYTES, default_bytes
from noise.hints.file import Layout
from noise.hints.store import DEFAULT_DROPPED_BITS
from noise.params import PARAMETERS
from noise.scheme import number_bits
from wire.frame import HEADER_BYTES
from wire.limits import CHUNK_BYTES
from wire.ring.kernels import EFFECT_BYTES
from wire.ring.widths import row_bytes

TOKENS = 1_000_000
GPU_BYTES = 80e9
"""The memory of a GPU, of which a larger model needs several."""
MANY = 16
"""How many answers an engine decodes at once."""
CONCRETE_MB, CONCRETE_S = 18.0, 83.0
"""MB and seconds a training token of Llama-3.2-1B, as Concrete ML 1.9 reports them; not measured here."""
MOST = 1e6
"""The most that an option may say."""
RANK = 16
"""The rank of the LoRA adapter, on all linear layers."""
NORM = 48.0
"""The largest norm of a column or row of int8 weights, over the root of its length, where a model's own is not known:
docs/decisions/0018-short-rows.md, "What it saves"."""
FORWARD, BACKWARD = 0, 1
_MASK_BYTES = 4
"""The most bytes that a number of a mask, or of its effect, takes."""


# ---- numbers that are measured or assumed ----------------------------------------------------------------------------


def _number(value: float, unit: str, source: str) -> Any:
    return field(default=value, metadata={"unit": unit, "source": source})


@dataclass(frozen=True)
class Measured:
    """Holds what was measured, or fitted to what was measured, with its place. Two cores are those of AMD EPYC machines
    with AVX512-VNNI, unless the source says otherwise."""

    mask_ns: float = _number(
        2.7, "ns a number, two cores", "masks and effects, both directions, 8 blocks, AVX2, 2026-11-27 (benchmarks.md)"
    )
    fp32_flops: float = _number(145e9, "FLOP/s, two cores", "a product 4,096 wide, 2026-11-24 (benchmarks.md)")
    bf16_flops: float = _number(394e9, "FLOP/s, two cores", "the same in bf16")
    int8_flops: float = _number(725e9, "op/s, two cores", "the same in int8")
    memory_rate: float = _number(
        23e9, "byte/s", "one row through 106 MB of weights, 4.6 ms, 2026-11-25 (benchmarks.md)"
    )
    tls_rate: float = _number(
        2.0e9, "byte/s, both ways", "echo of 4 MB by the tensor port, an Intel Xeon, 2026-11-25 (benchmarks.md)"
    )
    ipc_rate: float = _number(7.8e9, "byte/s, both ways", "the same by ipc")
    tls_call_s: float = _number(1e-4, "s a call", "one row, tensor port, without the link (benchmarks.md)")
    ipc_call_s: float = _number(7e-5, "s a call", "one row, ipc (benchmarks.md)")
    kept_ns: float = _number(
        12.0, "ns a number, two cores", "norms, activations, sums in training; fitted to a step by ipc, 2026-11-25"
    )
    block_s: float = _number(
        1e-3, "s a block and step", "torch's small operations in decoding; fitted to 20.1 tokens/s by ipc"
    )
    ring_ops: float = _number(258e12, "op/s, one H100", "512 rows through a 7B's block, 0.803 ms (accelerators.md)")
    ring_rate: float = _number(2.27e12, "byte/s, one H100", "one row through it, 0.089 ms (accelerators.md)")
    bf16_rate: float = _number(2.54e12, "byte/s, one H100", "the same in bf16, 0.159 ms (accelerators.md)")
    gpu_flops: float = _number(
        55e12,
        "FLOP/s, one H100",
        "transformers and PEFT in bf16, steps of 2 × 256, 15.0 ms for two 7B blocks (accelerators.md)",
    )
    cpu_ring_ops: float = _number(
        504e9, "op/s, two cores", "a provider without a GPU (benchmarks.md, A few rows together)"
    )


@dataclass(frozen=True)
class Assumed:
    """Holds what is assumed: typical list prices of 2026-11, and settings. Each is an option of the command."""

    gpu_per_hour: float = _number(2.5, "$", "an hour of a rented H100")
    confidential_gpu_per_hour: float = _number(4.0, "$", "an hour of an H100 in confidential mode")
    confidential_slowdown: float = _number(1.1, "×", "the time of confidential mode over that without")
    egress_per_gb: float = _number(0.09, "$", "a GB that leaves the provider's cloud for the internet")
    core_per_hour: float = _number(0.05, "$", "an hour of one of the tenant's cores")
    step_tokens: float = _number(512, "tokens", "a training step, of rows of 256 tokens")
    context_tokens: float = _number(512, "tokens", "what a decoded token attends to")
    code_ns: float = _number(1.0, "ns a number, one core", "encode, add, pack, unpack, decode")
    free_memory_gb: float = _number(
        16, "GB", "what is free at the tenant, of which the pool of masks takes at most a tenth"
    )


@dataclass(frozen=True)
class Link:
    """Describes a way to the provider.

    Attributes:
        bits_per_s: its rate, each way; None for `ipc`.
        round_trip_s: assumed; `ipc` has none beside its call.
    """

    name: str
    bits_per_s: float | None
    round_trip_s: float


LINKS = (
    Link("0.1 Gbit/s, 20 ms", 1e8, 0.020), Link("1 Gbit/s, 5 ms", 1e9, 0.005), Link("10 Gbit/s, 1 ms", 1e10, 0.001),
    Link("100 Gbit/s, 0.1 ms", 1e11, 0.0001), Link("ipc", None, 0.0),
)  # fmt: skip


# ---- shapes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Holds a layer group: layers that read the same rows, and so share a call.

    Attributes:
        kind: `attention`, `mlp` or `head`.
        outs: the outputs of each of its layers.
        norms: the largest norm over the root of its length, of a column and of a row.
    """

    kind: str
    in_features: int
    outs: tuple[int, ...]
    norms: tuple[float, float] = (NORM, NORM)

    @property
    def widths(self) -> tuple[int, int]:
        """Returns (inputs, outputs)."""
        return self.in_features, sum(self.outs)

    @property
    def weights(self) -> int:
        return self.in_features * sum(self.outs)

    def bits(self, direction: int) -> int:
        """Returns the width of a masked number, and of its reply, with precision `balanced`."""
        cols = self.widths[direction]
        return number_bits(cols, self.norms[direction] * math.sqrt(cols), "balanced")[0]

    def message_bytes(self, direction: int, rows: int) -> tuple[int, int]:
        """Returns the bytes (up, down) of a call with its reply, frames included."""
        bits, found = self.bits(direction), []
        for cols in (self.widths[direction], self.widths[1 - direction]):
            payload = rows * row_bytes(cols, bits)
            found.append(payload + HEADER_BYTES * max(1, -(-payload // CHUNK_BYTES)))
        return found[0], found[1]


@dataclass(frozen=True)
class _Shape:
    """Holds a model's shape, from its published config.

    Attributes:
        kv: the outputs of k, and of v.
        tied: whether the head is the embedding, which stays with the tenant.
        up_norm: the norms' factor for rows of gate and up, if the model's own is known.
    """

    name: str
    config: str
    num_blocks: int
    hidden: int
    kv: int
    inner: int
    vocab: int
    tied: bool
    up_norm: float = NORM

    def groups(self, block: int | None = None) -> tuple[Group, ...]:
        """Returns those of all blocks, in the model's order, and the head's if the provider has it; or one block's."""
        attention = (
            Group("attention", self.hidden, (self.hidden, self.kv, self.kv)),
            Group("attention", self.hidden, (self.hidden,)),
        )
        mlp = (
            Group("mlp", self.hidden, (self.inner, self.inner), (NORM, self.up_norm)),
            Group("mlp", self.inner, (self.hidden,)),
        )
        one = attention + mlp
        head = () if self.tied else (Group("head", self.hidden, (self.vocab,)),)
        return one if block is not None else one * self.num_blocks + head

    @property
    def base_weights(self) -> int:
        """Returns the weights that the provider multiplies by."""
        return sum(group.weights for group in self.groups())

    @property
    def embedding(self) -> int:
        return self.vocab * self.hidden

    @property
    def adapter_weights(self) -> int:
        return sum(RANK * (group.in_features + out) for group in self.groups(0) for out in group.outs) * self.num_blocks

    @property
    def kept_numbers(self) -> int:
        """Returns the numbers that a training token keeps for its backward pass (docs/memory.md)."""
        return self.num_blocks * (2 * self.inner + 4 * self.hidden + 2 * self.kv)


SHAPES = (
    _Shape("135M", "SmolLM2-135M", 30, 576, 192, 1536, 49152, tied=True, up_norm=41.6),
    _Shape("1B", "Llama-3.2-1B", 16, 2048, 512, 8192, 128256, tied=True),
    _Shape("7B", "Llama-2-7B", 32, 4096, 4096, 11008, 32000, tied=False),
    _Shape("70B", "Llama-3-70B", 80, 8192, 1024, 28672, 128256, tied=False),
)


@dataclass(frozen=True)
class Calls:
    """Holds the calls of one pass: groups with a direction each."""

    each: tuple[tuple[Group, int], ...]

    @classmethod
    def decoding(cls, shape: _Shape, keep: str = "") -> Calls:
        """Returns those of a decode step; `keep` names the kind of groups that the tenant computes."""
        return cls(tuple((group, FORWARD) for group in shape.groups() if group.kind != keep))

    @classmethod
    def training(cls, shape: _Shape, keep: str = "", adapted: float = 1.0, cached: bool = False) -> Calls:
        """Returns those of a training step.

        Args:
            adapted: the share of the blocks, from the top, that have adapters.
            cached: whether what enters the lowest of them is kept from an earlier epoch.
        """
        groups, num_below = shape.groups(), 4 * (shape.num_blocks - round(adapted * shape.num_blocks))
        forward = groups[num_below:] if cached else groups
        backward = groups[num_below + 1 :]  # Nothing is trained below the lowest adapted group.
        both = [(group, FORWARD) for group in forward] + [(group, BACKWARD) for group in backward]
        return cls(tuple((group, direction) for group, direction in both if group.kind != keep))

    def message_bytes(self, rows: int) -> tuple[int, int]:
        """Returns the bytes (up, down) of a pass over so many rows."""
        sizes = [group.message_bytes(direction, rows) for group, direction in self.each]
        return sum(up for up, _ in sizes), sum(down for _, down in sizes)

    @property
    def numbers(self) -> int:
        """Returns the numbers that cross for each row, both ways."""
        return sum(sum(group.widths) for group, _ in self.each)

    @property
    def products(self) -> int:
        """Returns the multiplications and additions of the provider for each row."""
        return sum(2 * group.weights for group, _ in self.each)


def hint_bytes(shape: _Shape, direction: int) -> int:
    """Returns the disk that hints of a direction take with the default parameters."""
    rows = PARAMETERS["default"].dimension
    groups = shape.groups()
    return sum(Layout(rows, each.widths[1 - direction], DEFAULT_DROPPED_BITS).file_bytes for each in groups)


# ---- time, processor time and memory ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Provider:
    """Holds a provider's speed: products, and reading of int8 weights."""

    ops: float
    rate: float


@dataclass(frozen=True)
class _Step:
    """Holds the parts of a step, in seconds, and the bytes that it sends and receives."""

    masks: float
    code: float
    link: float
    provider: float
    trips: float
    own: float
    up: int
    down: int
    is_ipc: bool

    @property
    def seconds(self) -> float:
        """Returns the time of the step: masks are made while the provider is waited for, if it is on another host."""
        waits = self.link + self.provider + self.trips
        return (self.masks + waits if self.is_ipc else max(self.masks, waits)) + self.code + self.own


class Model:
    """Computes steps from measured and assumed numbers."""

    def __init__(self, measured: Measured, assumed: Assumed) -> None:
        """Takes the numbers."""
        self.measured, self.assumed = measured, assumed
        self.gpu = Provider(measured.ring_ops, measured.ring_rate)

    def training(
        self,
        shape: _Shape,
        link: Link,
        provider: Provider | None = None,
        tokens: int | None = None,
        ready: bool = False,
    ) -> _Step:
        """Returns a training step; with `ready` its masks were made before."""
        rows = tokens or int(self.assumed.step_tokens)
        own = rows * self.own_training_s(shape)
        return self._step(Calls.training(shape), rows, link, provider, own, ready)

    def decoding(
        self,
        shape: _Shape,
        link: Link,
        batch: int,
        provider: Provider | None = None,
        keep: str = "",
        ready: bool = False,
    ) -> _Step:
        """Returns a decode step of so many answers; `keep` names the kind of groups that the tenant computes."""
        calls = Calls.decoding(shape, keep)
        own = self.own_decoding_s(shape, batch)
        kept = sum(group.weights for group in shape.groups() if group.kind == keep)
        own += max(kept / self.measured.memory_rate, 2 * kept * batch / self.measured.int8_flops)
        return self._step(calls, batch, link, provider, own, ready)

    def _step(
        self, calls: Calls, rows: int, link: Link, provider: Provider | None, own: float, ready: bool
    ) -> _Step:  # fmt: skip
        measured, up_down, is_ipc = self.measured, calls.message_bytes(rows), link.bits_per_s is None
        provider = provider or self.gpu
        rate = measured.ipc_rate if link.bits_per_s is None else min(link.bits_per_s / 8, measured.tls_rate)
        weights = calls.products / 2
        return _Step(
            masks=0.0 if ready else rows * calls.numbers * measured.mask_ns * 1e-9,
            code=rows * calls.numbers * self.assumed.code_ns * 1e-9 / 2,
            link=sum(up_down) / rate,
            provider=max(rows * calls.products / provider.ops, weights / provider.rate),
            trips=len(calls.each) * (link.round_trip_s + (measured.ipc_call_s if is_ipc else measured.tls_call_s)),
            own=own, up=up_down[0], down=up_down[1], is_ipc=is_ipc,
        )  # fmt: skip

    def own_training_s(self, shape: _Shape) -> float:
        """Returns the tenant's own work for a token: adapters, attention over rows of 256, head, small operations."""
        flops = 6 * shape.adapter_weights + 12 * 128 * shape.hidden * shape.num_blocks
        flops += 4 * shape.embedding if shape.tied else 0
        return flops / self.measured.fp32_flops + shape.kept_numbers * self.measured.kept_ns * 1e-9

    def own_decoding_s(self, shape: _Shape, batch: int) -> float:
        """Returns the tenant's own work for a step: small operations, attention's keys and values, a tied head."""
        measured = self.measured
        kv = 2 * 4 * shape.kv * shape.num_blocks * self.assumed.context_tokens * batch
        head = shape.embedding if shape.tied else 0
        work = max(4 * head / measured.memory_rate, 2 * head * batch / measured.fp32_flops)
        return shape.num_blocks * measured.block_s + kv / measured.memory_rate + work

    def core_seconds(self, step: _Step) -> float:
        """Returns the tenant's processor time: two cores for masks and own work, one for encoding and for messages."""
        rate = self.measured.ipc_rate if step.is_ipc else self.measured.tls_rate
        return 2 * (step.masks + step.own + step.code) + (step.up + step.down) / rate

    def local_training_s(self, shape: _Shape, flops: float) -> float:
        """Returns the time of a token on the tenant's two cores, whose products have this speed."""
        return 4 * shape.base_weights / flops + self.own_training_s(shape)

    def local_decoding_s(self, shape: _Shape, weight_bytes: int, batch: int) -> float:
        """Returns the time of a decode step on the tenant's two cores."""
        flops = self.measured.int8_flops if weight_bytes == 1 else self.measured.bf16_flops
        products = max(
            shape.base_weights * weight_bytes / self.measured.memory_rate, 2 * shape.base_weights * batch / flops
        )
        return products + self.own_decoding_s(shape, batch)

    def rented_s(self, shape: _Shape, is_training: bool, batch: int = 1) -> float:
        """Returns the time of a million tokens on a GPU that holds everything, in bf16. It is in the peer's favour:
        decoding is taken to be as fast as weights are read."""
        weights = shape.base_weights + (shape.embedding if shape.tied else 0)
        if is_training:
            return TOKENS * 4 * weights / self.measured.gpu_flops
        return TOKENS / batch * 2 * weights / self.measured.bf16_rate

    def memory(self, shape: _Shape, training: bool) -> float:
        """Returns the bytes that the tenant holds beside libraries, KV and what is under way: embedding, adapter, ready
        masks and, in training, activations."""
        if training:
            widest = max(sum(group.widths) for group in shape.groups())
            return self.own_memory(shape, training) + STEP_BYTES + _MASK_BYTES * widest * int(self.assumed.step_tokens)
        features = Calls.decoding(shape).numbers
        free = int(self.assumed.free_memory_gb * 1e9)
        return self.own_memory(shape, training) + default_bytes(features, free, EFFECT_BYTES)

    def local_memory(self, shape: _Shape, weight_bytes: int, training: bool) -> float:
        """Returns the same of a local run."""
        return shape.base_weights * weight_bytes + self.own_memory(shape, training)

    def own_memory(self, shape: _Shape, training: bool) -> float:
        """Returns the bytes of embedding, adapter and activations, which both have."""
        held = 4 * shape.embedding
        if training:
            held += 16 * shape.adapter_weights + 4 * shape.kept_numbers * int(self.assumed.step_tokens)
        return held


# ---- tables ----------------------------------------------------------------------------------------------------------


def number(value: float, digits: int = 2) -> str:
    """Returns a number with so many significant digits."""
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(value))
    return f"{round(value, places):,.{max(places, 0)}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table whose first column is text."""
    rule = "|---|" + "--:|" * (len(head) - 1)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])


def _bytes_table(model: Model) -> str:
    """Returns what follows from the shapes alone."""
    head = (
        "model", "calls a token, forward", "numbers a token, forward", "bits, forward; backward", "MB decoded",
        "the same at 32 bits", "MB trained", "hints, GB, forward + backward", "int8 weights, GB",
    )  # fmt: skip
    rows, tokens = [], int(model.assumed.step_tokens)
    for shape in SHAPES:
        decoding = Calls.decoding(shape)
        bits = [sorted({group.bits(way) for group in shape.groups()}) for way in (FORWARD, BACKWARD)]
        rows.append((
            f"{shape.name} ({shape.config})", str(len(decoding.each)), f"{decoding.numbers:,}",
            "; ".join("/".join(map(str, each)) for each in bits),
            number(sum(decoding.message_bytes(1)) / 1e6, 3), number(4 * decoding.numbers / 1e6, 3),
            number(sum(Calls.training(shape).message_bytes(tokens)) / tokens / 1e6, 3),
            " + ".join(number(hint_bytes(shape, way) / 1e9) for way in (FORWARD, BACKWARD)),
            number(shape.base_weights / 1e9),
        ))  # fmt: skip
    return table(head, rows)


def _tenant_table(model: Model) -> str:
    """Returns what a million tokens take of the tenant, but for time."""
    head = (
        "model", "", "TB up + down", "tenant's core seconds", "disk, GB", "memory at least, GB", "the same local, int8",
        "local, bf16",
    )  # fmt: skip
    rows = []
    for shape, is_training, what, step, times in _of_a_million(model):
        hints = hint_bytes(shape, FORWARD) + (hint_bytes(shape, BACKWARD) if is_training else 0)
        rows.append((
            shape.name, what, f"{number(step.up * times / 1e12)} + {number(step.down * times / 1e12)}",
            number(model.core_seconds(step) * times), number((hints + shape.base_weights) / 1e9),
            number(model.memory(shape, is_training) / 1e9),
            *(number(model.local_memory(shape, size, is_training) / 1e9) for size in (1, 2)),
        ))  # fmt: skip
    return table(head, rows)


def _of_a_million(model: Model) -> Iterator[tuple[_Shape, bool, str, _Step, float]]:
    """Yields, for each shape over 10 Gbit/s, first trained and then decoded: the shape, whether it is trained, the same
    in words, a step, and how many steps a million tokens take."""
    for is_training in (True, False):
        for shape in SHAPES:
            step, tokens = _step(model, shape, LINKS[2], is_training)
            yield shape, is_training, "trained" if is_training else f"decoded, {MANY} at once", step, TOKENS / tokens


def _step(model: Model, shape: _Shape, link: Link, is_training: bool) -> tuple[_Step, int]:
    """Returns a step, and the tokens that it trains or decodes."""
    if is_training:
        return model.training(shape, link), int(model.assumed.step_tokens)
    return model.decoding(shape, link, MANY), MANY


_HOURS = ("model", *(link.name for link in LINKS), "local int8", "local bf16", "rented GPU", "confidential GPU")


def _training_table(model: Model) -> str:
    """Returns the hours of a million tokens trained, over each link and with its peers."""
    measured, times = model.measured, TOKENS / int(model.assumed.step_tokens) / 3600
    rows = []
    for shape in SHAPES:
        hours = [model.training(shape, link).seconds * times for link in LINKS]
        for flops in (measured.int8_flops, measured.bf16_flops):
            hours.append(TOKENS / 3600 * model.local_training_s(shape, flops))
        rented = model.rented_s(shape, is_training=True) / 3600
        hours += [rented, rented * model.assumed.confidential_slowdown]
        rows.append((shape.name, *map(number, hours)))
    return table(_HOURS, rows)


def _decoding_table(model: Model, batch: int) -> str:
    """Returns the same of a million tokens decoded, so many answers at once."""
    rows, times = [], TOKENS / batch / 3600
    for shape in SHAPES:
        hours = [model.decoding(shape, link, batch).seconds * times for link in LINKS]
        hours += [model.local_decoding_s(shape, size, batch) * times for size in (1, 2)]
        rented = model.rented_s(shape, is_training=False, batch=batch) / 3600
        hours += [rented, rented * model.assumed.confidential_slowdown]
        rows.append((shape.name, *map(number, hours)))
    return table(_HOURS, rows)


def _price_table(model: Model) -> str:
    """Returns the price of a million tokens over 10 Gbit/s, beside a rented and a confidential GPU."""
    assumed = model.assumed
    head = (
        "model", "", "provider's GPU, while it computes", "bytes that leave the provider", "tenant's cores", "together",
        "the same if the GPU is held all the time", "rented GPU", "confidential GPU",
    )  # fmt: skip
    rows = []
    for shape, is_training, what, step, times in _of_a_million(model):
        a_second = math.ceil(1.1 * shape.base_weights / GPU_BYTES) * assumed.gpu_per_hour / 3600
        busy, held = (a_second * each * times for each in (step.provider, step.seconds))
        egress = step.down * times / 1e9 * assumed.egress_per_gb
        cores = model.core_seconds(step) * times / 3600 * assumed.core_per_hour
        hours = math.ceil(2.2 * shape.base_weights / GPU_BYTES) * model.rented_s(shape, is_training, MANY) / 3600
        confidential = hours * assumed.confidential_slowdown * assumed.confidential_gpu_per_hour
        together = egress + cores
        prices = (busy, egress, cores, busy + together, held + together, hours * assumed.gpu_per_hour, confidential)
        rows.append((shape.name, what, *map(number, prices)))
    return table(head, rows)


def _encrypted_table(model: Model) -> str:
    """Returns Concrete ML's encrypted products beside ours."""
    shape = SHAPES[1]
    step, tokens = _step(model, shape, LINKS[2], is_training=True)
    forward = 4 * Calls.decoding(shape).numbers / 1e6
    rows = (
        ("seconds a token, one 576 → 576 layer, 16 tokens a call (benchmarks.md)", "**4.30**", "**0.0000189**"),
        ("bytes a token, the same", "**18,698**", "**4,608** (32 bits)"),
        ("MB a token, Llama-3.2-1B", number(CONCRETE_MB), f"{number(forward)} forward at 32 bits"),
        ("TB for a million tokens", number(CONCRETE_MB), f"{number((step.up + step.down) / tokens / 1e6)} trained"),
        (
            "hours for a million tokens trained",
            number(CONCRETE_S * TOKENS / 3600),
            number(step.seconds * TOKENS / tokens / 3600),
        ),
    )
    return table(("", "Concrete ML", "Veilbase"), rows)


def _savings_table(model: Model) -> str:
    """Returns what `keep="attention"` and `cache_frozen_prefix` save."""
    head = (
        "model", "calls a token, forward", "MB decoded", "MB trained", "memory for kept weights, GB",
        "MB trained, top third adapted", "from the second epoch, frozen prefix",
        "its disk, GB for a million tokens",
    )  # fmt: skip
    rows, tokens = [], int(model.assumed.step_tokens)

    def less(before: Calls, after: Calls, rows: int) -> str:
        was, now = (sum(calls.message_bytes(rows)) / rows for calls in (before, after))
        return f"{number(now / 1e6)} (−{1 - now / was:.0%})"

    for shape in SHAPES:
        decoding, kept = Calls.decoding(shape), Calls.decoding(shape, "attention")
        upper = Calls.training(shape, adapted=1 / 3)
        rows.append((
            shape.name, f"{len(kept.each)} of {len(decoding.each)}", less(decoding, kept, 1),
            less(Calls.training(shape), Calls.training(shape, "attention"), tokens),
            number(sum(group.weights for group in shape.groups() if group.kind == "attention") / 1e9),
            less(Calls.training(shape), upper, tokens),
            less(upper, Calls.training(shape, adapted=1 / 3, cached=True), tokens),
            number(4 * shape.hidden * TOKENS / 1e9),
        ))  # fmt: skip
    return table(head, rows)


def _check_table(model: Model) -> str:
    """Returns what was measured on SmolLM2-135M beside what the formulas give for it."""
    shape, tls, ipc = SHAPES[0], Link("loopback", 1e12, 0.0), LINKS[-1]
    far = Link("20 ms", 1e9, 0.0206)
    measured = model.measured
    cpu = Provider(measured.cpu_ring_ops, measured.memory_rate)
    upper = Calls.training(shape, adapted=1 / 3)
    cached = Calls.training(shape, adapted=1 / 3, cached=True)

    def trained(calls: Calls) -> float:
        return sum(calls.message_bytes(512)) / 512 / 1e6

    def shared(step: _Step) -> float:
        return step.provider + step.link + step.trips + step.code + step.own + step.masks

    rows = (
        ("MB trained, top third adapted: 7,994 MB, 7,705 tokens", 7994 / 7705, trained(upper), "finetune.md"),
        ("the same with `cache_frozen_prefix`: 4,008 MB", 4008 / 7705, trained(cached), "finetune.md"),
        ("hints on disk, GB", 1.17, (hint_bytes(shape, 0) + hint_bytes(shape, 1)) / 1e9, "masks.md"),
        ("s a step of 2 × 256, `ipc`, masks ready (`kept_ns` is fitted to it)", 2.30,
         shared(model.training(shape, ipc, cpu, 512, ready=True)), "benchmarks.md, 2026-11-25"),
        ("the same by the tensor port", 2.69, shared(model.training(shape, tls, cpu, 512, ready=True)), "the same"),
        ("s a decoded token, `ipc`, masks ready (`block_s` is fitted to it)", 1 / 20.1,
         shared(model.decoding(shape, ipc, 1, cpu, ready=True)), "the same"),
        ("the same by the tensor port", 1 / 16.6, shared(model.decoding(shape, tls, 1, cpu, ready=True)), "the same"),
        ("tokens/s over 1 Gbit/s and 20.5 ms, mean of two runs", 0.355,
         1 / shared(model.decoding(shape, far, 1, cpu, ready=True)),
         "benchmarks.md, 2026-11-28"),
        ('the same with `keep="attention"`', 0.665,
         1 / shared(model.decoding(shape, far, 1, cpu, "attention", ready=True)), "the same"),
        ("s a step of 2 × 256, local fp32", 2.62, 512 * model.local_training_s(shape, measured.fp32_flops),
         "benchmarks.md, 2026-11-24"),
        ("the same in bf16", 2.13, 512 * model.local_training_s(shape, measured.bf16_flops), "the same"),
        ("memory in training, GB, libraries 0.3, the pool then 0.52", 2.01,
         0.3 + 0.519 + model.own_memory(shape, True) / 1e9, "memory.md, 2026-11-28"),
        ("the same, local in fp32", 1.97, 0.3 + model.local_memory(shape, 4, True) / 1e9, "the same"),
    )  # fmt: skip
    head = ("SmolLM2-135M", "measured or counted", "computed", "computed / measured", "where")
    return table(
        head, [(what, f"**{number(had)}**", number(got), f"{got / had:.2f}", where) for what, had, got, where in rows]
    )


def _flag(each: Field[Any]) -> str:
    return "--" + each.name.replace("_", "-")


def _numbers_table(model: Model) -> str:
    """Returns the numbers that the other tables are computed from."""
    rows = [
        (
            f"**{each.name}**",
            f"{getattr(model.measured, each.name):.3g}",
            each.metadata["unit"],
            each.metadata["source"],
        )
        for each in fields(model.measured)
    ]
    rows += [
        (
            f"`{_flag(each)}`",
            f"{getattr(model.assumed, each.name):.3g}",
            each.metadata["unit"],
            f"assumed: {each.metadata['source']}",
        )
        for each in fields(model.assumed)
    ]
    return table(("number", "value", "unit", "from"), rows)


TABLES: dict[str, Callable[[Model], str]] = {
    "bytes": _bytes_table,
    "tenant": _tenant_table,
    "training": _training_table,
    "decoding one answer at a time": lambda model: _decoding_table(model, 1),
    f"decoding {MANY} answers at once": lambda model: _decoding_table(model, MANY),
    "price": _price_table,
    "encrypted": _encrypted_table,
    "savings": _savings_table,
    "check": _check_table,
    "numbers": _numbers_table,
}
"""The tables by name, in the page's order."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the tables, each after a comment with its name.

    Args:
        arguments: the command line; None for the process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost")
    for each in fields(Assumed):
        parser.add_argument(
            _flag(each), type=float, default=each.default, help=f"{each.metadata['source']} ({each.metadata['unit']})"
        )
    given = parser.parse_args(arguments)
    for each in fields(Assumed):
        least = {"$": 0.0, "tokens": 1.0}.get(each.metadata["unit"], 1e-3)
        if not least <= getattr(given, each.name) <= MOST:
            parser.error(f"{_flag(each)} is a number from {least:g} to {MOST:g}, got {getattr(given, each.name)}")
    model = Model(Measured(), Assumed(**vars(given)))
    print("\n\n".join(f"<!-- table: {name} -->\n{make(model)}" for name, make in TABLES.items()))


if __name__ == "__main__":
    main()
