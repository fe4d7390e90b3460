"""Runs the adversaries of the lattice mask on masks of toy or shipped size that the code of noise/ computes.

`LatticeTraffic` makes the traffic, for controls, programs and tests.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from attacks.adversaries.lattice_equations import NO_ERROR, SHARED, SHARED_ERROR, TINY_ERROR
from attacks.adversaries.lattice_reduction import LATTICE_REDUCTION, load_fpylll
from attacks.adversaries.slot_reuse import SHARED_SECRET, SLOT_REUSE
from attacks.adversaries.sparse_secret import SPARSE_SECRET
from attacks.controls import ControlResult
from attacks.seen.adversary import Claim, StolenDifference, StolenFact, StolenRows
from attacks.seen.public_model import Norm, PublicModel
from attacks.seen.view import Exchange, View, write_recording
from noise import sampling
from noise.params import NOMINAL_SIGMA, PARAMETERS, LatticeParameters
from noise.polynomial import negacyclic
from wire.frame import PROTOCOL_VERSION
from wire.limits import Limits
from wire.manifest import BundleFile, GroupInfo, LayerInfo, Manifest
from wire.ring import coding
from wire.ring.seeded_rows import SEED_BYTES, SeededRows

# ---- traffic under lattice masks ------------------------------------------------------------------------------------

ACTIVATION = 1 << 17
"""The largest absolute value of an encoded activation in the traffic."""


def toy(ring_degree: int, rank: int, sigma: float) -> LatticeParameters:
    """Returns lattice parameters with the toy mark. A tenant does not accept parameters with this mark by default."""
    return LatticeParameters(f"toy {rank}x{ring_degree}", ring_degree, rank, sigma, 0, "a control", toy=True)


def manifest(*num_features: int) -> Manifest:
    """Returns the manifest of an imaginary provider with one square layer in each group, of the given widths."""
    groups = []
    for i, width in enumerate(num_features):
        norm = 127.0 * width**0.5
        shape = {
            "in_features": width, "out_features": width, "max_column_norm": norm, "max_row_norm": norm,
            "digest": "0" * 64,
        }  # fmt: skip
        layer = LayerInfo(name=f"l{i}", kind="linear", bias=False, **shape)
        groups.append(GroupInfo(id=i, name=f"g{i}", layers=(layer,), **shape))
    bundle = (BundleFile(name="config.json", size_bytes=2, sha256="0" * 64),)
    return Manifest(
        protocol=PROTOCOL_VERSION, model_id="toy", config={}, weights="int8", arithmetic=("ring",),
        groups=tuple(groups), bundle=bundle, bundle_digest="0" * 64, limits=Limits(),
    )  # fmt: skip


def no_model() -> PublicModel:
    """Returns an empty model, because the adversaries of the lattice mask do not read the model."""
    nothing = torch.zeros(0, 0, dtype=torch.float64)
    norm = Norm(nothing, None, 0.0)
    return PublicModel("llama", nothing, None, (), norm, None, 1, 1, 1, 1e4, "silu")


ErrorSampler = Callable[[Sequence[int]], torch.Tensor]


@dataclass
class LatticeTraffic:
    """Makes blocks of mask rows from one public matrix A, and the exchanges in which these rows are used.

    Attributes:
        parameters: toy or shipped parameters.
        num_features: the number of features of requests and replies.
        error: a function that draws lattice errors of a shape; None draws from the distribution that `parameters`
            define.
        truth: the unmasked encoded rows x̃ of each exchange, int64; None for the exchange of the hint.
        secrets: the secret of each block, int8, shape (rank, ring_degree).
    """

    parameters: LatticeParameters
    num_features: int
    error: ErrorSampler | None = None
    exchanges: list[Exchange] = field(default_factory=list)
    truth: list[torch.Tensor | None] = field(default_factory=list)
    secrets: list[torch.Tensor] = field(default_factory=list)
    num_groups: int = 1

    def __post_init__(self) -> None:
        """Draws the public matrix's seed, and adds the exchange of the hint (the product of the public matrix and the
        weight)."""
        self._rng = sampling.Csprng()
        self._generator = torch.Generator().manual_seed(0)
        seed = bytes(self._rng.random_bytes(SEED_BYTES).tolist())
        self.seed = SeededRows(seed, 0, self.parameters.dimension)
        self.matrix = self.seed.expand(self.num_features)
        shape = self.num_features, self.num_features
        self._weight = torch.randint(-127, 128, shape, generator=self._generator, dtype=torch.int8)
        payload = torch.tensor(list(self.seed.pack()), dtype=torch.uint8)
        self.exchanges.append(Exchange(0, payload, coding.product(self.matrix, self._weight), "forward", "hint"))
        self.truth.append(None)

    def activations(self, num_rows: int) -> torch.Tensor:
        """Draws random encoded activations, int64, shape (num_rows, num_features)."""
        shape = num_rows, self.num_features
        return torch.randint(-ACTIVATION, ACTIVATION + 1, shape, generator=self._generator, dtype=torch.int64)

    def block(self, secret: torch.Tensor | None = None) -> torch.Tensor:
        """Makes the mask of one block: int32, shape (ring_degree, num_features).

        Args:
            secret: the block's lattice secret, int8, shape (1, rank, ring_degree); None draws a fresh one.
        """
        if secret is None:
            secret = sampling.ternary(self._rng, (1, self.parameters.rank, self.parameters.ring_degree))
        shape = 1, self.parameters.ring_degree, self.num_features
        error = self.error(shape) if self.error else sampling.error(self._rng, shape, self.parameters)
        hat = negacyclic.transform(self.matrix, self.parameters)
        self.secrets.append(secret[0])
        return negacyclic.combine(hat, negacyclic.secret_transform(secret), error)[0]

    def send(self, rows: torch.Tensor, mask: torch.Tensor, direction: str = "backward", group: int = 0) -> None:
        """Masks encoded rows x̃, int64, with mask rows of the same shape, and adds the exchange."""
        masked = coding.to_int32(rows + mask.to(torch.int64))
        self.exchanges.append(Exchange(group, masked, coding.product(masked, self._weight), direction))
        self.truth.append(rows)

    def send_block(self, zero_rows: Sequence[int], num_messages: int = 2) -> None:
        """Adds exchanges of equal size that together use a fresh block of mask rows. The encoded rows at `zero_rows`
        are zero."""
        rows = self.activations(self.parameters.ring_degree)
        rows[list(zero_rows)] = 0
        mask = self.block()
        for part, mask_part in zip(rows.chunk(num_messages), mask.chunk(num_messages), strict=True):
            self.send(part, mask_part)

    def view(self, folder: Path) -> View:
        """Writes the traffic as a provider's recording into `folder`, and returns the view that adversaries get."""
        return write_recording(folder, manifest(*[self.num_features] * self.num_groups), self.exchanges)

    def attacked(self, attack: Callable[..., list[Claim]]) -> list[Claim]:
        """Runs an adversary's function on the view of this traffic, and returns the adversary's claims."""
        with tempfile.TemporaryDirectory() as folder:
            return attack(self.view(Path(folder) / "recording"), no_model(), None)

    def relative_error(self, claims: Sequence[Claim]) -> float:
        """Returns ‖x̂ − x̃‖/‖x̃‖ over all exchanges but the hint's, with the claimed rows x̂. Rows without a claim
        count as zero."""
        claimed = {claim.seq: claim.rows for claim in claims if isinstance(claim, StolenRows)}
        wrong = total = 0.0
        for seq, rows in enumerate(self.truth):
            if rows is not None:
                wide = rows.to(torch.float64)
                wrong += float((claimed.get(seq, torch.zeros_like(wide)) - wide).square().sum())
                total += float(wide.square().sum())
        return math.sqrt(wrong / total)


# ---- no-error -------------------------------------------------------------------------------------------------------
#
# Runs `no-error` on lattice masks without an error at dimension 32. One zero row reveals the whole block exactly.


def no_error_control() -> ControlResult:
    """Computes the relative error of the unmasked rows of two blocks; each block has one zero row."""
    traffic = LatticeTraffic(toy(16, 2, 0.0), 64)
    for zero_row in (0, 5):
        traffic.send_block([zero_row])
    error = traffic.relative_error(traffic.attacked(NO_ERROR.attack))
    setting = "lattice mask 2x16 without its error, one zero row in each block"
    return ControlResult(NO_ERROR.name, setting, "relative error of the unmasked rows", error, 0.0, True)


# ---- tiny-error -----------------------------------------------------------------------------------------------------
#
# Runs the adversary `tiny-error` on lattice errors that are 0 or 1, at dimension 8. Two rows whose contents are zeros
# reveal the secret, and with it all rows under the same secret, up to the errors.


def _binary_errors(shape: Sequence[int]) -> torch.Tensor:
    """Draws lattice errors that are 0 or 1, of the given shape."""
    return sampling.centred_binomial(sampling.Csprng(), shape).remainder(2)


def tiny_error_control() -> ControlResult:
    """Computes the relative error of the unmasked rows of three blocks. The lattice errors, which are 0 or 1, alone
    cause about 1.4/ACTIVATION (ACTIVATION: the largest number of a row)."""
    traffic = LatticeTraffic(toy(8, 1, 0.0), 64, _binary_errors)
    for first in (0, 2, 6):
        traffic.send_block([first, first + 1], 1)
    error = traffic.relative_error(traffic.attacked(TINY_ERROR.attack))
    setting = "lattice mask 1x8 with errors 0 or 1, two zero rows in each block"
    return ControlResult(TINY_ERROR.name, setting, "relative error of the unmasked rows", error, 2 / ACTIVATION, True)


# ---- shared-error ---------------------------------------------------------------------------------------------------
#
# Runs `shared-error` on lattice masks that reuse an error in two blocks, or in all pieces of a block.

NUM_FEATURES, PROMPT, PIECE = 32, 64, 64
"""These are the number of features, of rows of a prompt, and of rows of a piece of a block. One prompt is sent
repeatedly, and 49 repeated rows of 32 features give the adversary enough equations."""


def shared_error_traffic(share_blocks: bool, share_pieces: bool, num_blocks: int = 2) -> LatticeTraffic:
    """Makes traffic in which the first and the fifth message of each block hold the same prompt. With `share_pieces`,
    the second message of each block also holds this prompt. All other prompts differ. A block has eight pieces, and
    each piece masks one message.

    Args:
        share_blocks: whether all blocks have the same lattice error.
        share_pieces: whether all pieces of a block have the same lattice error.
        num_blocks: the number of blocks.
    """
    made = LatticeTraffic(PARAMETERS["default"], NUM_FEATURES)
    drawn = sampling.error(sampling.Csprng(), (1, made.parameters.ring_degree, NUM_FEATURES), made.parameters)
    if share_pieces:
        drawn = drawn[:, :PIECE].repeat(1, made.parameters.ring_degree // PIECE, 1)
    if share_blocks or share_pieces:
        made.error = lambda shape: drawn
    prompt = made.activations(PROMPT)
    for _ in range(num_blocks):
        for number, mask in enumerate(made.block().split(PROMPT)):
            again = number % 4 == 0 or (share_pieces and number == 1)
            made.send(prompt if again else made.activations(PROMPT), mask, "forward")
        if share_pieces and not share_blocks:
            drawn = sampling.error(sampling.Csprng(), drawn.shape, made.parameters)[:, :PIECE].repeat(1, 8, 1)
    return made


def differences_error(made: LatticeTraffic, claims: list[Claim]) -> float:
    """Returns the relative error of the claimed differences between each of the messages 1 to 8 and the message eight
    later. A difference that is not claimed counts as a claim of zero."""
    said = {(claim.seq, claim.other_seq): claim.rows for claim in claims if isinstance(claim, StolenDifference)}
    wrong = total = 0.0
    for seq in range(1, 9):
        one, other = made.truth[seq], made.truth[seq + 8]
        if one is None or other is None:
            continue
        true = (one - other).to(torch.float64)
        wrong += float((said.get((seq, seq + 8), torch.zeros_like(true)) - true).square().sum())
        total += float(true.square().sum())
    return math.sqrt(wrong / total)


def shared_error_control() -> ControlResult:
    """Computes the larger of two relative errors: that of the claimed differences if two blocks share a lattice error,
    and that of the unmasked rows if the pieces of a block share one. The adversary wins with a relative error of up to
    21/ACTIVATION, because 21 is the largest lattice error."""
    blocks = shared_error_traffic(share_blocks=True, share_pieces=False)
    claims = blocks.attacked(SHARED_ERROR.attack)
    worst = differences_error(blocks, claims) if StolenFact(SHARED, "1, 9") in claims else 1.0
    pieces = shared_error_traffic(share_blocks=False, share_pieces=True, num_blocks=1)
    worst = max(worst, pieces.relative_error(pieces.attacked(SHARED_ERROR.attack)))
    setting = "lattice mask 3x512 (default), one error in two blocks and one in the pieces of a block"
    return ControlResult(SHARED_ERROR.name, setting, "worst relative error of rows or differences", worst,
                         21 / ACTIVATION, True)  # fmt: skip


# ---- sparse-secret --------------------------------------------------------------------------------------------------
#
# Runs `sparse-secret` at the default parameters, on lattice secrets with one to three non-zero trits.
#
# A trit is a coefficient of the secret: -1, 0 or 1.

NUM_SPARSE_FEATURES, NUM_SPARSE_ROWS = 32, 40


def sparse(weight: int) -> torch.Tensor:
    """Draws a secret of the default parameters with `weight` non-zero trits: int8, shape (1, rank, ring_degree)."""
    parameters = PARAMETERS["default"]
    secret = torch.zeros(1, parameters.rank, parameters.ring_degree, dtype=torch.int8)
    rng = sampling.Csprng()
    numbers = rng.random_bytes(4 * weight + 2 * weight).view(torch.int16).to(torch.int64).remainder(1 << 16)
    places = (numbers[:weight] % secret.numel()).tolist()
    for place, sign in zip(places, (numbers[weight : 2 * weight] % 2 * 2 - 1).tolist(), strict=True):
        while int(secret.view(-1)[place]):
            place = (place + 1) % secret.numel()
        secret.view(-1)[place] = sign
    return secret


def sparse_secret_traffic(weights: tuple[int, ...]) -> LatticeTraffic:
    """Makes one message for each weight, which is the number of non-zero trits of the mask's secret. Weight 0 stands
    for an honest secret."""
    made = LatticeTraffic(PARAMETERS["default"], NUM_SPARSE_FEATURES)
    for weight in weights:
        mask = made.block(sparse(weight) if weight else None)
        made.send(made.activations(NUM_SPARSE_ROWS), mask[:NUM_SPARSE_ROWS], "forward")
    return made


def sparse_secret_control() -> ControlResult:
    """Computes the relative error of all unmasked rows. The lattice error alone causes less than 21/ACTIVATION, because
    21 is the largest lattice error."""
    sent = sparse_secret_traffic((1, 2, 3, 3))
    error = sent.relative_error(sent.attacked(SPARSE_SECRET.attack))
    setting = "lattice mask 3x512 (default), secrets of one, two and three trits"
    return ControlResult(
        SPARSE_SECRET.name, setting, "relative error of the unmasked rows", error, 21 / ACTIVATION, True
    )


# ---- slot-reuse -----------------------------------------------------------------------------------------------------
#
# Runs `slot-reuse` on two messages under the same mask rows. The adversary must recover the difference of their
# activations.
#
# In a second run the masks of two messages have the same secret and different errors; the adversary must name both
# messages.


def _attack_on_a_shared_secret() -> list[Claim]:
    """Returns the claims about traffic in which the masks of messages 2 and 3 have the same secret."""
    traffic = LatticeTraffic(PARAMETERS["default"], 32, num_groups=2)
    mask, other = traffic.block(), traffic.block()
    error = torch.randint(-21, 22, (8, 32), generator=torch.Generator().manual_seed(1))
    parts = (other[:8], "forward", 0), (mask[:8], "forward", 0), (mask[:8] + error, "backward", 1), \
        (other[8:16], "forward", 1)  # fmt: skip
    for part, direction, group in parts:
        traffic.send(traffic.activations(8), part, direction, group)
    return traffic.attacked(SLOT_REUSE.attack)


def slot_reuse_control() -> ControlResult:
    """Computes the correlation of the claimed difference of two messages with the true difference; 0 if the adversary
    makes any other claim, or does not name the messages with a shared secret."""
    traffic = LatticeTraffic(PARAMETERS["default"], 32)
    mask, other = traffic.block(), traffic.block()
    for part in (mask[:8], other[:8], mask[:8], mask[8:16]):
        traffic.send(traffic.activations(8), part, "forward")
    claims = traffic.attacked(SLOT_REUSE.attack)
    value = 0.0
    match claims:
        case [StolenDifference(seq=1, other_seq=3, rows=rows)]:
            one, three = traffic.truth[1], traffic.truth[3]
            if one is not None and three is not None:
                both = torch.stack((rows.flatten(), (one - three).to(torch.float64).flatten()))
                value = float(torch.corrcoef(both)[0, 1])
    if _attack_on_a_shared_secret() != [StolenFact(SHARED_SECRET, "2, 3")]:
        value = 0.0
    setting = "lattice mask 3x512 (default), eight mask rows used twice; a secret used in two layers"
    return ControlResult(SLOT_REUSE.name, setting, "correlation with the true difference", value, 0.99999, False)


# ---- lattice-reduction ----------------------------------------------------------------------------------------------
#
# Runs `lattice-reduction` at dimension 32 with the shipped σ. LLL unmasks blocks that have one zero row each.


def lattice_reduction_control() -> ControlResult:
    """Computes the relative error of the unmasked rows of two blocks. The lattice error alone causes about
    σ·√3/ACTIVATION.

    Raises:
        ConfigurationError: fpylll is not installed.
    """
    load_fpylll()
    traffic = LatticeTraffic(toy(16, 2, NOMINAL_SIGMA), 64)
    for zero_row in (0, 5):
        traffic.send_block([zero_row])
    error = traffic.relative_error(traffic.attacked(LATTICE_REDUCTION.attack))
    setting = "lattice mask 2x16 with the true error, one zero row in each block"
    needed = 4 * NOMINAL_SIGMA / ACTIVATION
    return ControlResult(LATTICE_REDUCTION.name, setting, "relative error of the unmasked rows", error, needed, True)
