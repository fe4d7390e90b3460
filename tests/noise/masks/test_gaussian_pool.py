"""Tests the paper's equations on Linear and Conv1D, with and without bias: masked results equal unmasked ones within
the tolerance of float32.

In float32, noise that is as strong as the data costs at most a few units in the last place of the sum. So products
agree to about 1e-6 of their norm, and a tolerance of 1e-5 leaves room for a hidden size of 64 and K draws.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from noise.masks.gaussian_pool import GaussianPool, NotPrivateWarning
from noise.registry import Setting, make_scheme
from noise.sampling import gaussian, other_index
from noise.scheme import GroupSpec
from tenant_sdk import TenantClient
from tests.support.lattice import Answered
from tests.support.parity import adapted, batch, grads, lora, relative
from tests.support.tiny_models import make_tiny
from wire.errors import ConfigurationError, InvalidTensor
from wire.frame import Arithmetic, Call, Direction, Purpose

TOLERANCE = 1e-5


def pool(**options: Any) -> GaussianPool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPrivateWarning)
        return GaussianPool(**options)


def layer(kind: str, bias: bool) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Makes a real layer, and returns it with its W as (in, out) and its b."""
    torch.manual_seed(5)
    if kind == "linear":
        module: Any = nn.Linear(24, 40, bias=bias)
        weight = module.weight.detach().t()
    else:
        module = Conv1D(40, 24)
        with torch.no_grad():
            module.bias.normal_() if bias else module.bias.zero_()
        weight = module.weight.detach()
    b = module.bias.detach() if bias else torch.zeros(40)
    return module, weight, b


def provider_path(weight: torch.Tensor, bias: torch.Tensor) -> Callable[[Call, torch.Tensor, int], torch.Tensor]:
    """Returns a function that answers as the provider does: with the bias for a product in the forward direction, and
    without it for noise effects and gradients."""

    def answer(call: Call, rows: torch.Tensor, cols: int) -> torch.Tensor:
        product = rows @ (weight if call.direction is Direction.FORWARD else weight.t())
        assert product.shape[1] == cols
        normal = call.purpose is Purpose.PRODUCT and call.direction is Direction.FORWARD
        return product + bias if normal else product

    return answer


SPEC = GroupSpec(0, 24, 40, 1.0, 1.0, torch.ones(40))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_equations(kind: str, bias: bool) -> None:
    module, weight, b = layer(kind, bias)
    answer = provider_path(weight, b)
    scheme = pool(pool_size=4)
    scheme.bind(lambda call, payload, cols: Answered(answer(call, payload.rows(call), cols)))
    x = torch.randn(7, 24, requires_grad=True)
    want = module(x)
    upstream = torch.randn_like(want)
    want.backward(upstream)

    forward = scheme.mask(SPEC, Direction.FORWARD, x.detach())
    sent = forward.messages[0]
    assert relative(sent.rows, x.detach()) > 0.3, "the rows went out as they were"
    assert relative(forward.unmask([answer(sent.call, sent.rows, 40)]), want.detach()) < TOLERANCE

    backward = scheme.mask(SPEC, Direction.BACKWARD, upstream)
    sent = backward.messages[0]
    assert relative(sent.rows, upstream) > 0.3
    assert x.grad is not None
    assert relative(backward.unmask([answer(sent.call, sent.rows, 24)]), x.grad) < TOLERANCE


def test_each_effect_is_computed_once_and_renewed() -> None:
    asked: list[tuple[Direction, int]] = []
    answer = provider_path(torch.randn(24, 40), torch.zeros(40))

    def counting(call: Call, rows: torch.Tensor, cols: int) -> torch.Tensor:
        assert call.purpose is Purpose.EFFECT
        asked.append((call.direction, rows.shape[0]))
        return answer(call, rows, cols)

    scheme = pool(pool_size=3, renew_every=10)
    scheme.bind(lambda call, payload, cols: Answered(counting(call, payload.rows(call), cols)))
    rows = torch.ones(2, 24)
    sent = [scheme.mask(SPEC, Direction.FORWARD, rows).messages[0].rows for _ in range(10)]
    assert asked == [(Direction.FORWARD, 3)]
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(sent)), "the same vector twice running"
    distinct = {tuple((message - rows)[0].tolist()) for message in sent}
    assert 2 <= len(distinct) <= 3
    renewed = scheme.mask(SPEC, Direction.FORWARD, rows).messages[0].rows
    assert asked == [(Direction.FORWARD, 3)] * 2
    assert tuple((renewed - rows)[0].tolist()) not in distinct


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_model_logits_and_gradients_match_off(kind: str, tmp_path: Path) -> None:
    make_tiny(kind, tmp_path)
    with TenantClient(f"inproc:{tmp_path}", weights="native", mask="off", arithmetic="float") as plain:
        reference = adapted(plain.load_model(), lora(kind))
        want_logits = reference(batch()).logits.detach()
        want = grads(reference, batch())
    options = {"pool_size": 4}
    client = TenantClient(f"inproc:{tmp_path}", weights="native", mask="gaussian-pool", mask_options=options)
    with pytest.warns(NotPrivateWarning):
        client.connect()
    with client:
        masked = adapted(client.load_model(), lora(kind))
        assert relative(masked(batch()).logits.detach(), want_logits) < TOLERANCE
        for name, gradient in grads(masked, batch()).items():
            assert relative(gradient, want[name]) < 10 * TOLERANCE, name


def setting(weights: str = "int8", offered: tuple[str, ...] = ("ring", "float")) -> Setting:
    def no_ledger() -> Any:
        raise AssertionError("this mask counts no secrets")

    return Setting(weights, offered, no_ledger, Path("/nowhere"))


def test_warns_and_refuses() -> None:
    with pytest.warns(NotPrivateWarning, match="not private"):
        GaussianPool()
    with pytest.raises(ConfigurationError, match="float arithmetic only"):
        make_scheme("gaussian-pool", "ring", {}, setting())
    with pytest.raises(ConfigurationError, match="has no option 'sigma'"):
        make_scheme("off", None, {"sigma": 1}, setting())
    with pytest.raises(ConfigurationError, match="mask is one of"):
        make_scheme("rot13", None, {}, setting())
    with pytest.raises(ConfigurationError, match="does not offer"):
        make_scheme("off", "ring", {}, setting(offered=("float",)))
    with pytest.raises(ConfigurationError, match="pool_size"):
        pool(pool_size=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["off-ring", "off-float", "pool"])
def test_nothing_is_sent_for_values_that_are_not_finite(bad: float, name: str) -> None:
    asked = []
    scheme: Any = pool() if name == "pool" else make_scheme("off", name[4:], {}, setting())
    scheme.bind(lambda call, payload, cols: asked.append(call))
    rows = torch.zeros(3, 24)
    rows[1, 5] = bad
    with pytest.raises(InvalidTensor, match="nothing was sent"):
        scheme.mask(SPEC, Direction.FORWARD, rows)
    assert asked == []


def test_a_sum_that_overflows_uses_as_many_vectors_as_any_other() -> None:
    """Vectors are drawn anew after a number of calls, which shows. Finite rows with which the noise would overflow must
    not change when."""
    _, weight, b = layer("linear", True)
    answer = provider_path(weight, b)
    draws = []
    for size in (1.0, 3.4e38):
        scheme, asked = pool(renew_every=2), []

        def effect(call: Call, payload: Any, cols: int, asked: list[Call] = asked) -> Any:
            asked.append(call)
            return Answered(answer(call, payload.rows(call), cols))

        scheme.bind(effect)
        draws.append([])
        for _ in range(4):
            call, payload, _ = scheme.mask(SPEC, Direction.FORWARD, torch.full((3, 24), size)).messages[0]
            assert bool(torch.isfinite(torch.as_tensor(payload.rows(call))).all())
            draws[-1].append(len(asked))
    assert draws[0] == draws[1] == [1, 1, 2, 2]


def test_gaussian_is_standard_normal() -> None:
    """The moments of 200,000 draws are checked. The bounds are six standard errors, so a correct sampler fails once in
    10^8 runs."""
    drawn = gaussian(400, 500).double().flatten()
    n = drawn.numel()
    assert abs(float(drawn.mean())) < 6 / n**0.5
    assert abs(float(drawn.var()) - 1) < 6 * (2 / n) ** 0.5
    assert abs(float((drawn**4).mean()) - 3) < 6 * (96 / n) ** 0.5
    assert abs(float((drawn.abs() < 1).double().mean()) - 0.682689) < 6 * (0.2166 / n) ** 0.5
    assert not torch.equal(gaussian(2, 3), gaussian(2, 3))
    assert gaussian(0, 5).shape == (0, 5)
    assert gaussian(1, 1).shape == (1, 1)


def test_other_index_never_repeats_and_reaches_all() -> None:
    seen, last = set(), None
    for _ in range(500):
        drawn = other_index(4, last)
        assert drawn != last
        seen.add(drawn)
        last = drawn
    assert seen == {0, 1, 2, 3}
    assert other_index(1, 0) == 0


def test_arithmetic_defaults() -> None:
    assert make_scheme("off", None, {}, setting()).arithmetic is Arithmetic.RING
    assert make_scheme("off", None, {}, setting("native")).arithmetic is Arithmetic.FLOAT
