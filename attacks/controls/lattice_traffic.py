"""Makes traffic for controls and tests, under lattice masks of toy or shipped size that the code of noise/ computes."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from attacks.seen.adversary import Claim, StolenRows
from attacks.seen.public_model import Norm, PublicModel
from attacks.seen.view import View
from attacks.victim.synthetic import Exchange, write_recording
from noise import sampling
from noise.params import LatticeParameters
from noise.polynomial import negacyclic
from wire.frame import PROTOCOL_VERSION
from wire.limits import Limits
from wire.manifest import BundleFile, GroupInfo, LayerInfo, Manifest
from wire.ring import coding
from wire.ring.seeded_rows import SEED_BYTES, SeededRows

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
class Traffic:
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
