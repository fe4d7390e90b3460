"""This module implements the default mask. The mask adds a fresh Module-LWE sample A·s + e to every row, with a public
matrix A, a secret s and a small error e. From the reply it subtracts the effect H·s. The hint H = A·W̃ is the product
of the public matrix and the int8 weight, which the provider computes once, or the tenant itself if it has weights that
it trusts. The product e·W̃ stays in the result, and is of the size of an activation's rounding.

Guarantees: the provider sees rows of A·s + e + x̃ mod 2^32, for the encoded row x̃. Secret and error are drawn for this
group, direction and block alone, from a CSPRNG that the operating system keys (noise/sampling.py, and
noise/polynomial/device_error.py for errors that a GPU draws). Every mask row is used at most once. Scales leave room
for the error and for the hint's rounding, so that no unmasked result overflows. The rows are confidential under
decision Module-LWE with the stated parameters. This module does not guarantee that replies are right (verification
does), and it does not hide row counts and timing.

Source: docs/decisions/0006-lattice.md. It applies the multi-secret plaintext-ciphertext product of Bae, Cheon, Hanrot,
Park and Stehlé (CRYPTO 2024) and a SimplePIR-style hint (Henzinger et al., USENIX Security 2023) to a base model as a
service.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from noise import sampling
from noise.blocks.arena import copied, packed
from noise.blocks.pool import DEFAULT_BYTES, Block, Key, MaskPool
from noise.blocks.row_file import RowFile
from noise.blocks.slots import Slots, SlotsExhausted
from noise.hints import local
from noise.hints.file import Hint
from noise.hints.store import HintKey, HintStore
from noise.ledger.ledger import Ledger, Reservation, Seed, SeedExhausted
from noise.params import LatticeParameters
from noise.polynomial import negacyclic
from noise.polynomial.toeplitz import DeviceProducts
from noise.scheme import (
    EffectPath,
    EncodedRow,
    GroupSpec,
    Masked,
    Message,
    Reply,
    RowEncoder,
    WeightOf,
    decode_rows,
    encode_for_mask,
)
from noise.staging import on_device, on_host
from wire.errors import ConfigurationError, MaskError
from wire.frame import ITEM_BYTES, Arithmetic, Call, Direction, Purpose
from wire.limits import Limits
from wire.payload import RowsPayload, SeedPayload
from wire.ring.kernels import EFFECT_BYTES
from wire.ring.seeded_rows import SeededRows
from wire.ring.widths import FULL_BITS, PACKED_EFFECT_BITS, add_rounded

BLOCKS_RESERVED_AT_ONCE = 64
"""How many blocks one record in the ledger reserves, at the cost of one fsync. Blocks that a process leaves unused stay
counted."""
MOST_BLOCKS_AT_ONCE = 8
"""The most blocks that share the transforms of A and H, the hint. Sharing among more blocks gained nothing.
docs/benchmarks_history.md, "Making masks", has figures for one and for eight."""
NO_WEIGHTS = (
    "hints='local' (--hints local) needs prepared weights of the trusted checkpoint, and none could be kept, as a "
    "warning says: mend that, or take hints='fetched' (--hints fetched)"
)
MOST_PIECES = 8
"""The most pieces of a block, since each piece costs the work of a whole block."""
_CPU = torch.device("cpu")


def packs_effects(hints: HintStore, device: torch.device | None) -> bool:
    """Tells whether effects wait packed, as the high three bytes of each number (`wire.ring.widths.pack_effect`).

    They do so where hints lack as many bits. A rounded hint's numbers are multiples of 256 then, and so are their
    products with a secret, so nothing is lost. A mask keeps its 32 bits. Effects on a device are whole.

    Args:
        hints: the store of the mask's hints.
        device: where masks are made; None for the CPU.
    """
    return device is None and hints.dropped_bits >= FULL_BITS - PACKED_EFFECT_BITS


def _moved_here(taken: torch.Tensor) -> torch.Tensor:
    """Returns a row of the pool on the CPU."""
    if taken.is_cpu:
        return taken
    here = taken.to(_CPU)
    taken.zero_()  # What stays on the device would unmask the row.
    return here


_OF_LOCAL_HINTS = " (hints computed here)"
"""What follows the name of a parameter set in the ledger for seeds whose hints the tenant computes: the seeds of one
name are never those of the other, so that no seed of theirs is sent to a provider."""


@dataclass(frozen=True, eq=False)
class _Epoch:
    """Holds one seed of the public matrix A, with the transforms and reservations made under it, until a new seed is
    drawn."""

    seed: Seed
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    matrices: list[Any] = field(default_factory=list, repr=False)
    reservations: list[Reservation] = field(default_factory=list, repr=False)


@dataclass(eq=False)
class _Cut:
    """Holds a block of mask rows that is made in pieces. The block's secret is kept until every row is in a piece."""

    epoch: _Epoch = field(repr=False)
    secrets_hat: torch.Tensor = field(repr=False)
    slots: Slots = field(repr=False)


class Lattice:
    """Masks rows in ring arithmetic with Module-LWE samples."""

    name = "lattice"
    arithmetic = Arithmetic.RING

    def __init__(
        self,
        parameters: LatticeParameters,
        ledger: Ledger,
        hints: HintStore,
        verified: bool = False,
        pool_bytes: int = DEFAULT_BYTES,
        background: bool = True,
        limits: Limits | None = None,
        features: int = 0,
        device: torch.device | None = None,
        file: RowFile | None = None,
        precision: str = "exact",
        hints_from: str | None = "fetched",
        step_bytes: int | None = None,
    ) -> None:
        """Makes a mask without any rows yet. Each hint is fetched, or computed, when it is first needed.

        Args:
            parameters: a set from `noise.params.choose`.
            ledger: the ledger of this tenant's identity.
            hints: the store that keeps hints.
            verified: whether the function that `bind` stores checks the rows that it returns.
            pool_bytes: the most bytes of masks and effects made ahead.
            background: whether a worker thread makes them.
            limits: the provider's limits; None for the defaults of wire/limits.py.
            features: see `MaskPool`.
            device: where masks and effects are computed, by `DeviceProducts`; None for the CPU, by
                noise/polynomial/negacyclic.py. They stay where they are made.
            file: see `MaskPool`; not with a device.
            precision: how many bits of a masked row and of its reply cross; one of `noise.options.PRECISIONS`.
            hints_from: `fetched`; or `local` or None, with which `settle_hints` must be called before the first use. It
                then decides where hints come from, if this is None.
            step_bytes: see `MaskPool`.
        """
        self.parameters = parameters
        self.polynomials: Any = negacyclic if device is None else DeviceProducts(device)
        self._ledger, self._hints, self._verified = ledger, hints, verified
        self._limits = limits or Limits()
        # These bounds hold for every error and secret, so no scale depends on the block that is used.
        self._error_bound = sampling.error_bound(parameters)
        self._slack = float(hints.rounding_bound() * parameters.dimension)
        self._packs_effects = packs_effects(hints, device)
        self.precision = precision
        self._row_encoder = RowEncoder(self._error_bound, self._slack, precision)
        self._rng = sampling.Csprng()
        self._lock = threading.Lock()
        self._epoch: _Epoch | None = None
        self._effect_path: EffectPath | None = None
        self._hints_from = hints_from
        self._weight_of: WeightOf | None = None
        self._why_hints = "fetched from the provider"
        self._cuts: dict[Key, _Cut] = {}
        degree = parameters.ring_degree
        # A hint that is not stored would be fetched again for every piece.
        least_rows = degree // MOST_PIECES if self.keeps_hints else None
        self.pool = MaskPool(
            self._make, degree, pool_bytes, background, least_rows, features, self._cuts.clear, file,
            EFFECT_BYTES if self._packs_effects else ITEM_BYTES, step_bytes,
        )  # fmt: skip

    def bind(self, effect_path: EffectPath) -> None:
        self._effect_path = effect_path

    def settle_hints(self, weight_of: WeightOf | None, pairs: Sequence[tuple[GroupSpec, Direction]]) -> str | None:
        """Decides whether hints are computed here or fetched, before the mask is first used (noise/hints/local.py has
        the rule).

        Args:
            weight_of: returns the tenant's own W̃ of a group, which equals the provider's; None if the tenant has none.
            pairs: all groups and directions.

        Returns:
            One line for the user, which says what was chosen and why; None if no hints are missing, or if there was no
            choice.

        Raises:
            ConfigurationError: hints were to be computed here, and the tenant has no weights.
            VeilbaseError: the link was to be measured, and the provider did not answer.
        """
        if self._hints_from == "fetched":
            return None
        if weight_of is None:
            if self._hints_from == "local":
                raise ConfigurationError(NO_WEIGHTS)
            self._why_hints = "fetched from the provider, since there are no prepared weights"
            return None
        if self._hints_from == "local":
            choice = local.Choice(True, "computed here, as you chose")
        else:
            choice = self._chosen(pairs)
        self._weight_of, self._why_hints = weight_of if choice.is_local else None, choice.why
        return None if self.has_hints(pairs) else f"hints of the mask are {choice.why}"

    def _chosen(self, pairs: Sequence[tuple[GroupSpec, Direction]]) -> local.Choice:
        path = self._effect_path
        if path is None:
            raise ConfigurationError("the hints of a mask were to be chosen before its client had a connection")
        # Every tenant may ask for forward hints, whatever classes of work its provider allows.
        forward = [pair for pair in pairs if pair[1] is Direction.FORWARD] or pairs
        widest = max(forward, key=lambda pair: pair[0].widths(pair[1])[1])
        work = local.Work.of(pairs, self.parameters.dimension)
        return local.choose(
            work,
            self._has_some(pairs, is_local=True),
            self._has_some(pairs, is_local=False),
            local.product_speed,
            lambda: local.link_speed(widest, work.num_bytes, path, self._limits),
        )

    def _has_some(self, pairs: Sequence[tuple[GroupSpec, Direction]], is_local: bool) -> bool:
        """Tells whether a hint that this session can use is on disk, of those that were computed here or of those that
        were fetched."""
        name = self.parameters.name + (_OF_LOCAL_HINTS if is_local else "")
        seed, rows = self._ledger.known_seed(name, self.parameters.max_secrets), self.parameters.dimension
        return seed is not None and any(
            self._hints.has(
                HintKey(group.digest, seed.seed, group.id, direction, is_local),
                (rows, group.widths(direction)[1]),
                self._verified,
            )
            for group, direction in pairs
        )

    @property
    def computes_hints(self) -> bool:
        """Tells whether the tenant computes its hints itself, so that no provider sees them or the seed of A."""
        return self._weight_of is not None

    @property
    def seed(self) -> bytes:
        """Returns the seed of the public matrix A under which blocks are made now."""
        return self._current().seed.seed

    # ---- one call ---------------------------------------------------------------------------------------------------

    def mask(self, group: GroupSpec, direction: Direction, rows: torch.Tensor) -> Masked:
        """Adds fresh mask rows; see `MaskScheme.mask`."""
        row = self._row_encoder.encode(group, direction, rows)
        if row is not None:
            return self._mask_row(group, direction, row)
        # This raises an error before a mask row is used up.
        call, encoded, scales = encode_for_mask(group, direction, rows, self.precision, self._error_bound, self._slack)
        mask, effect = self.pool.take(group, direction, rows.shape[0])
        if mask.is_cuda:
            for each in (mask, effect):  # The caller's stream may be another one than that of the pool's thread.
                each.record_stream(torch.cuda.current_stream(each.device))

        # Rows are masked where the masks are. This adds in place, since fresh pages cost time. The rows of the pool are
        # used up, so nothing else reads them.
        with on_host(encoded) if mask.is_cpu else on_device(encoded, mask.device) as here:
            masked = add_rounded(mask, here, call.bits)

        def unmask(replies: Sequence[torch.Tensor]) -> torch.Tensor:
            with on_device(effect, replies[0].device) as there:
                product = decode_rows(group, direction, replies[0], scales, there)
            if not effect.is_cpu:
                effect.zero_()  # A device's memory may come to another process.
            return product

        return Masked((Message(call, RowsPayload(masked, is_masked=True)),), unmask)

    def _mask_row(self, group: GroupSpec, direction: Direction, row: EncodedRow) -> Masked:
        """Adds a fresh mask row to a row that was encoded directly into the bytes that are sent."""
        mask, effect = self.pool.take(group, direction, 1)
        if not (mask.is_cpu and effect.is_cpu):
            mask, effect = _moved_here(mask), _moved_here(effect)
        row.add(mask)
        return Masked(
            (Message(row.call, row.payload),), lambda replies: row.codec.decode(replies[0], row.scale, effect)
        )

    # ---- ahead of use -----------------------------------------------------------------------------------------------

    def _make(self, group: GroupSpec, direction: Direction, num_rows: int) -> Sequence[Block]:
        blocks: list[Block] = []
        missing = self.pool.rounded(num_rows) // self.parameters.ring_degree
        rest = num_rows - missing * self.parameters.ring_degree
        while missing > 0:
            self.pool.check_open()
            most = min(MOST_BLOCKS_AT_ONCE, self.parameters.max_secrets)
            made = self._make_blocks(group, direction, min(missing, most))
            missing -= len(made)
            blocks += made
        while rest > 0:
            self.pool.check_open()
            made = self._make_pieces(group, direction, self.pool.rounded(rest))
            rest -= sum(each.slots.remaining for each in made)
            blocks += made
        if isinstance(self.polynomials, DeviceProducts):
            self.polynomials.finish()
        return blocks

    def _make_blocks(self, group: GroupSpec, direction: Direction, num_blocks: int) -> list[Block]:
        """Makes blocks that share one pass over A, the public matrix, and the hint. Their secrets and errors live only
        during this call."""
        epoch, slots = self._open_blocks(num_blocks)
        hint = self._hint(epoch, group, direction)
        request_cols, _ = group.widths(direction)
        degree, rank = self.parameters.ring_degree, self.parameters.rank
        secrets_hat = self.polynomials.secret_transform(sampling.ternary(self._rng, (num_blocks, rank, degree)))
        masks: Sequence[torch.Tensor]
        effects: Sequence[torch.Tensor]
        if isinstance(self.polynomials, DeviceProducts):
            made = self.polynomials.combine(self._matrix(epoch, request_cols), secrets_hat)
            self.polynomials.add_error(made, self._rng, self.parameters)
            masks, effects = tuple(made), tuple(self.polynomials.product(hint, secrets_hat, self.parameters))
        else:

            def draw(shape: Sequence[int]) -> torch.Tensor:
                return sampling.error(self._rng, shape, self.parameters)

            matrix_hat = self._matrix(epoch, request_cols)
            masks, effects = negacyclic.masks_and_effects(
                matrix_hat, secrets_hat, hint, draw, self.parameters, self._packs_effects
            )
        self._forget(secrets_hat)
        return [Block(*parts) for parts in zip(masks, effects, slots, strict=True)]

    def _make_pieces(self, group: GroupSpec, direction: Direction, num_rows: int) -> list[Block]:
        """Makes at most `num_rows` rows of one block, in pieces. All rows of the block are computed, and those that
        were not requested are dropped.

        A block has one secret, however often the block is computed. Each of its rows is in exactly one piece, with an
        error of its own.
        """
        cut = self._cut(group, direction)
        hint = self._hint(cut.epoch, group, direction)
        request_cols, _ = group.widths(direction)
        rows = cut.slots.take_up_to(num_rows)
        kept = slice(rows.start, rows.stop)
        if cut.slots.remaining == 0:
            self._cuts.pop((group.id, direction), None)
        with torch.inference_mode(False):  # `mask` later adds to these tensors in place, also outside inference mode.
            exact = self.polynomials.combine(self._matrix(cut.epoch, request_cols), cut.secrets_hat)[0]
            made = [exact]
            try:
                masks = exact[kept]
                if isinstance(self.polynomials, DeviceProducts):
                    self.polynomials.add_error(masks, self._rng, self.parameters)
                else:
                    masks += sampling.error(self._rng, masks.shape, self.parameters)
                made.append(self.polynomials.product(hint, cut.secrets_hat, self.parameters)[0])
                effects = made[1][kept]
                if cut.slots.remaining == 0:
                    self._forget(cut.secrets_hat)
                piece = self.pool.piece_rows
                # Each piece is a copy, so that its memory is free as soon as its own rows are used.
                pairs = zip(masks.split(piece), effects.split(piece), strict=True)
                keep = packed if self._packs_effects else copied
                return [Block(copied(mask), keep(effect), Slots(len(mask))) for mask, effect in pairs]
            finally:
                for each in made:  # Rows without an error give the secret away; the memory is used later.
                    each.zero_()

    def _cut(self, group: GroupSpec, direction: Direction) -> _Cut:
        """Returns the block that is being cut into pieces for a layer group and direction, or opens a new one. Only one
        thread at a time may call this for a group and direction."""
        cut = self._cuts.get((group.id, direction))
        if cut is None or cut.epoch is not self._current():  # Rows under an old seed are abandoned.
            epoch, (slots,) = self._open_blocks(1)
            shape = (1, self.parameters.rank, self.parameters.ring_degree)
            cut = _Cut(epoch, self.polynomials.secret_transform(sampling.ternary(self._rng, shape)), slots)
            self._cuts[group.id, direction] = cut
            try:
                self.pool.check_open()
            except MaskError:  # The pool was closed meanwhile, which dropped the other secrets.
                self._cuts.clear()
                raise
        return cut

    def _forget(self, secrets_hat: torch.Tensor) -> None:
        """Overwrites a block's secrets if a device makes the products. Callers must have made all rows of the block.
        Without a device this does nothing, and the secrets' transforms are only released."""
        if isinstance(self.polynomials, DeviceProducts):
            secrets_hat.zero_()

    def _open_blocks(self, num_blocks: int) -> tuple[_Epoch, list[Slots]]:
        """Returns the epoch of the current seed, and the slots (rows) of blocks that the ledger has reserved under that
        seed. Draws a new seed if the current one has served its budget."""
        while True:
            epoch = self._current()
            try:
                return epoch, self._open_under(epoch, num_blocks)
            except SeedExhausted:
                self._renew(epoch)

    def _open_under(self, epoch: _Epoch, num_blocks: int) -> list[Slots]:
        opened: list[Slots] = []
        with epoch.lock:
            while len(opened) < num_blocks:
                if not epoch.reservations:
                    epoch.reservations.append(self._reserve(epoch, num_blocks - len(opened)))
                try:
                    opened.append(epoch.reservations[0].open_block(self.parameters.ring_degree))
                except SlotsExhausted:
                    epoch.reservations.pop()
        return opened

    def _reserve(self, epoch: _Epoch, at_least: int) -> Reservation:
        at_once = min(BLOCKS_RESERVED_AT_ONCE, self.parameters.max_secrets)
        try:
            return self._ledger.reserve(epoch.seed.seed_id, max(at_least, at_once), "lattice blocks")
        except SeedExhausted:
            # The budget has only a few blocks left.
            return self._ledger.reserve(epoch.seed.seed_id, at_least, "lattice blocks")

    def _current(self) -> _Epoch:
        with self._lock:
            if self._epoch is None:
                name = self.parameters.name + (_OF_LOCAL_HINTS if self.computes_hints else "")
                seed = self._ledger.current_seed(name, self.parameters.max_secrets)
                self._epoch = _Epoch(seed)
            return self._epoch

    def _renew(self, old: _Epoch) -> None:
        with self._lock:
            is_first = self._epoch is old
            if is_first:
                self._epoch = _Epoch(self._ledger.renew(old.seed.seed_id))
        if is_first:
            self._hints.forget(old.seed.seed)

    def _matrix(self, epoch: _Epoch, features: int) -> Any:
        """Returns the transforms of the first columns of A, the public matrix. They are kept, since all layers use the
        same columns."""
        with epoch.lock:
            have = epoch.matrices[0].features if epoch.matrices else 0
            if have < features:
                matrix = SeededRows(epoch.seed.seed, 0, self.parameters.dimension).expand(features)
                epoch.matrices[:] = [self.polynomials.transform(matrix, self.parameters)]
            return epoch.matrices[0].first(features)

    def _hint(self, epoch: _Epoch, group: GroupSpec, direction: Direction) -> Hint:
        path, weight_of = self._effect_path, self._weight_of
        if path is None:
            raise ConfigurationError("the mask was used before its client had a connection")
        request_cols, reply_cols = group.widths(direction)
        call = Call(group.id, direction, Arithmetic.RING, Purpose.HINT)

        def fetch(first: int, count: int) -> Reply:
            return path(call, SeedPayload(SeededRows(epoch.seed.seed, first, count), request_cols), reply_cols)

        return self._hints.get(
            HintKey(group.digest, epoch.seed.seed, group.id, direction, weight_of is not None),
            (self.parameters.dimension, reply_cols),
            fetch if weight_of is None else local.computing(epoch.seed.seed, (group, direction), weight_of),
            # The function that `bind` stored has checked these rows, or they were computed from trusted weights. The
            # store only has to remember this.
            verify=(lambda first, rows: None) if self._verified or weight_of is not None else None,
            rows_per_fetch=local.most_rows((group, direction), self._limits) if weight_of is None else None,
        )

    @property
    def keeps_hints(self) -> bool:
        """Tells whether hints are kept on disk. If so, fetching them ahead of use saves time."""
        return self._hints.folder is not None

    def has_hints(self, pairs: Sequence[tuple[GroupSpec, Direction]]) -> bool:
        """Tells whether the hints of all given groups and directions are on disk. The files' contents are checked only
        when they are read."""
        seed, rows = self.seed, self.parameters.dimension
        return all(
            self._hints.has(
                HintKey(group.digest, seed, group.id, direction, self.computes_hints),
                (rows, group.widths(direction)[1]),
                self._verified,
            )
            for group, direction in pairs
        )

    def check_room(self, pairs: Sequence[tuple[GroupSpec, Direction]]) -> None:
        """Raises ConfigurationError if the hints of these groups and directions that are missing do not fit on the disk
        beside what is there."""
        missing = [pair for pair in pairs if not self.has_hints([pair])]
        self._hints.check_room(self.hint_disk_bytes(missing))

    def fetches(self, pair: tuple[GroupSpec, Direction]) -> list[int]:
        """Returns the rows of each request by which a hint is fetched; none if hints are computed here."""
        if self.computes_hints:
            return []
        rows = self._hints.rows_at_once(pair[0].widths(pair[1])[1], local.most_rows(pair, self._limits))
        whole, rest = divmod(self.parameters.dimension, rows)
        return [rows] * whole + [rest] * (rest > 0)

    def hint_disk_bytes(self, pairs: Sequence[tuple[GroupSpec, Direction]]) -> int:
        """Returns the bytes that the hints of these groups and directions take on disk."""
        return self._hints.total_bytes((self.parameters.dimension, each.widths(way)[1]) for each, way in pairs)

    def prefetch(self, group: GroupSpec, direction: Direction) -> None:
        """Fetches or computes the hint of a group and direction before it is needed."""
        self._hint(self._current(), group, direction)

    def prepare(self, group: GroupSpec, direction: Direction, num_rows: int) -> None:
        """Makes mask rows before they are needed, or none if they do not fit into the pool; see `MaskPool.prepare`."""
        self.pool.prepare(group, direction, num_rows)

    # ---- description ------------------------------------------------------------------------------------------------

    def describe(self) -> Mapping[str, str]:
        """Returns scheme, assumption, parameters, secrets used and storage, for the user."""
        chosen = self.parameters
        rounded = 32 - self._hints.dropped_bits
        generators = "AES-256-CTR keyed by the operating system"
        if isinstance(self.polynomials, DeviceProducts) and self.polynomials.draws_errors(chosen):
            generators += "; for errors on the GPU ChaCha20, keyed by the same"
        described = {
            "scheme": "lattice: a fresh Module-LWE sample masks every row",
            "assumption": f"decision Module-LWE with a ternary secret; {generators}",
            "parameters": f"{chosen.name}: q=2^32, {chosen.rank}x{chosen.ring_degree}, sigma={chosen.sigma}",
            "bits": f"{chosen.bits} estimated ({chosen.source})",
            "pool": self.pool.describe("masks"),
            "hints": "streamed, not stored",
        }
        if self.keeps_hints:
            stored = f"{self._hints.stored_bytes() / 1e6:.0f} MB on disk, of all models and seeds"
            described["hints"] = f"{stored}, at {rounded} bits a number; {self._why_hints}"
            if self.computes_hints:
                described["hints"] += "; the provider sees neither them nor the seed of A"
        try:
            seed = self._current().seed
            used = next(each.used for each in self._ledger.audit() if each.seed_id == seed.seed_id)
            described["secrets"] = f"{used} of {chosen.max_secrets} reserved under the present seed"
        except (MaskError, ConfigurationError, StopIteration):
            described["secrets"] = "the ledger cannot be read"
        return described

    def close(self) -> None:
        """Drops every mask and closes the hint store and the ledger."""
        self.pool.close()
        self._hints.close()
        self._ledger.close()
