"""Shows the whole mechanism in one file: hints, a masked product, its check, and LoRA training over it.

    python examples/from_scratch.py

The "provider" is the class `Provider`: it holds the weights of two linear layers and multiplies rows. The tenant trains
LoRA over them, and the provider sees nothing but uniform-looking numbers. The numbers here are toys, so nothing here is
secure, and nothing is fast. The real thing has structured matrices, a CSPRNG, a ledger of what was used, and bounds on
every size (docs/architecture.md, docs/parameters.md).

All integers are counted mod 2^32, which int64 arithmetic gives after `wrap`. W is int8, so y = α·(x W) for a scale α.
"""

from __future__ import annotations

import torch

MODULUS = 1 << 32
NUM_SECRETS = 64
"""The number of secret trits in a mask; the shipped parameters have 3 x 512."""
LARGEST = 1 << 20
"""What the largest number of some rows becomes when they are rounded to integers; their product stays below 2^31."""
WIDTH, RANK = 32, 4


def wrap(numbers: torch.Tensor) -> torch.Tensor:
    """Returns numbers mod 2^32, from -2^31 to 2^31 - 1."""
    return (numbers + MODULUS // 2) % MODULUS - MODULUS // 2


def uniform(*shape: int) -> torch.Tensor:
    """Returns uniform numbers mod 2^32. The real thing draws secrets from the operating system."""
    return torch.randint(-MODULUS // 2, MODULUS // 2, shape)


class Provider:
    """Holds int8 weights of two layers, shape (inputs, outputs), and keeps every message that it gets."""

    def __init__(self) -> None:
        self.weights = [torch.randint(-20, 21, (WIDTH, WIDTH)) for _ in range(2)]
        self.alpha = 1 / (12 * WIDTH**0.5)
        self.seen: list[torch.Tensor] = []

    def product(self, rows: torch.Tensor, layer: int, transposed: bool) -> torch.Tensor:
        """Returns rows times the weight, or times its transpose, mod 2^32."""
        self.seen.append(rows)
        weight = self.weights[layer].T if transposed else self.weights[layer]
        return wrap(rows @ weight)


class Masked:
    """Is the tenant's end of one layer and one direction: it masks rows and takes the effect off the replies."""

    def __init__(self, provider: Provider, layer: int, transposed: bool, trusted: torch.Tensor) -> None:
        self.provider, self.layer, self.transposed = provider, layer, transposed
        # The hint. The rows of `public` are known to everybody, so the provider may multiply them. It does so once.
        self.public = uniform(NUM_SECRETS, WIDTH)
        self.hint = provider.product(self.public, layer, transposed)
        # For the check (Freivalds): secret columns, and the trusted weight's product with them. A reply that is wrong
        # by d passes if d times every column is 0 mod 2^32, which has probability at most 1/2 for each of 40 columns.
        weight = trusted.T if transposed else trusted
        self.columns = torch.randint(0, 2, (WIDTH, 40))
        self.projected = wrap(weight @ self.columns)
        self.check(self.public, self.hint)

    def check(self, rows: torch.Tensor, reply: torch.Tensor) -> None:
        """Raises ValueError if a reply is not the product of rows and the trusted weight."""
        if not torch.equal(wrap(reply @ self.columns), wrap(rows @ self.projected)):
            raise ValueError("the provider's reply is forged")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x W, or x Wᵀ, which the provider computes without seeing x. x is real, shape (rows, inputs)."""
        secret = torch.randint(
            -1, 2, (len(x), NUM_SECRETS)
        )  # Each row has a secret and an error of its own, used once.
        error = torch.randn(x.shape).mul(3.2).round().long()
        mask = secret @ self.public + error  # Learning with errors: who knows `public` still sees uniform numbers.
        scale = LARGEST / x.abs().max().clamp(min=1e-12).double()  # The provider does not learn it.
        message = wrap((x * scale).round().long() + mask)
        reply = self.provider.product(message, self.layer, self.transposed)
        self.check(message, reply)
        unmasked = wrap(reply - secret @ self.hint)  # (x + secret·public + error) W - secret·(public W)
        return (unmasked / scale).float()  # x W, and error W / scale, which is small


class RemoteProduct(torch.autograd.Function):
    """Makes a masked layer differentiable: the gradient of x is a product too, with the transpose, and masked."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, ends: tuple[Masked, Masked]) -> torch.Tensor:
        ctx.ends = ends  # type: ignore[attr-defined]
        return ends[0](x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.ends[1](grad), None  # type: ignore[attr-defined]


class Tenant:
    """Trains LoRA, A and B of each layer, over a provider's layers: y = α·(x W) + (x A) B."""

    def __init__(self, provider: Provider) -> None:
        trusted = [weight.clone() for weight in provider.weights]  # The tenant's own copy of the public model's file.
        self.alpha = provider.alpha
        self.ends = [
            (Masked(provider, layer, False, weight), Masked(provider, layer, True, weight))
            for layer, weight in enumerate(trusted)
        ]
        self.lora = [
            (torch.randn(WIDTH, RANK).mul(WIDTH**-0.5).requires_grad_(), torch.zeros(RANK, WIDTH, requires_grad=True))
            for _ in trusted
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the adapted model's output for x, both of shape (rows, WIDTH)."""
        for ends, (lora_a, lora_b) in zip(self.ends, self.lora, strict=True):
            x = torch.tanh(self.alpha * RemoteProduct.apply(x, ends) + x @ lora_a @ lora_b)
        return x


def main() -> list[float]:
    """Trains on a task that a hidden low-rank change of the layers solves, and returns the loss of each step."""
    torch.manual_seed(0)
    provider = Provider()
    tenant = Tenant(provider)
    x, change = torch.randn(64, WIDTH), torch.randn(WIDTH, 2) @ torch.randn(2, WIDTH) / WIDTH
    hidden = x
    for weight in provider.weights:
        hidden = torch.tanh(hidden @ (weight * provider.alpha + change))
    optimizer = torch.optim.AdamW([each for pair in tenant.lora for each in pair], lr=0.02)
    num_hints, losses = len(provider.seen), []
    for _ in range(60):
        loss = torch.nn.functional.mse_loss(tenant(x), hidden)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    seen = torch.cat(provider.seen[num_hints:]).double()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    mean, deviation = float(seen.mean()) / MODULUS, float(seen.std()) / MODULUS
    print(f"the provider saw {len(seen)} rows: mean {mean:+.4f}, deviation {deviation:.4f}, in units of 2^32")
    print(f"uniform numbers have         mean +0.0000, deviation {12**-0.5:.4f}")
    return losses


if __name__ == "__main__":
    main()
