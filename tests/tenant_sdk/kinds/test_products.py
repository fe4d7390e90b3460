"""Tests what adapters compute from products with base weights, and the rows that are sent for these products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import ShiraConfig, get_peft_model

from tenant_sdk import TenantClient
from tenant_sdk.kinds.low_rank import row_norms
from tenant_sdk.kinds.products import KnownProduct, hadamard_product, leading_columns, leading_factors
from tenant_sdk.model import base_products
from tenant_sdk.training.activation_checkpointing import KeptReplies, ReplyStore
from tests.support.lattice import TOY_OPTIONS
from tests.support.parity import RELATIVE, local, relative
from tests.support.spies import before_requests
from tests.support.tiny_models import make_tiny
from wire.frame import Call, Direction
from wire.payload import Payload, RowsPayload

NAMES = {"llama": "model.layers.1.self_attn.k_proj", "gpt2": "transformer.h.1.mlp.c_fc"}
LATTICE: dict[str, Any] = {
    "mask": "lattice", "mask_options": {**TOY_OPTIONS, "hints": "stream", "background": False}, "progress": False,
}  # fmt: skip


@pytest.fixture(scope="module", params=NAMES)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Provides (a remote layer, its weight of shape (outputs, inputs)), in float arithmetic without a mask."""
    folder = tmp_path_factory.mktemp(request.param)
    make_tiny(request.param, folder)
    with TenantClient(
        f"inproc:{folder}", weights="native", mask="off", arithmetic="float", cache=folder / "cache"
    ) as client:
        weight: Any = local(folder).get_submodule(NAMES[request.param]).weight.detach()
        yield client.load_model().get_submodule(NAMES[request.param]), weight.T if request.param == "gpt2" else weight


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Direction, int]]:
    """Provides the list of (direction, number of rows) of all calls."""
    seen: list[tuple[Direction, int]] = []
    before_requests(monkeypatch, lambda call, payload: seen.append((call.direction, payload.num_rows)))
    return seen


def test_a_product_with_a_weight_times_low_rank(site: Any, calls: Any) -> None:
    layer, weight = site
    x, down, up = (
        torch.randn(shape, requires_grad=True)
        for shape in ((2, 5, weight.shape[1]), (3, weight.shape[1]), (len(weight), 3))
    )
    got = hadamard_product(layer, x, down, up)
    assert calls == [(Direction.FORWARD, 30)]
    want = x @ (weight * (up @ down)).T
    assert relative(got, want) < RELATIVE
    for mine, other in zip(
        torch.autograd.grad(got.square().sum(), (x, down, up)), torch.autograd.grad(want.square().sum(), (x, down, up)),
        strict=True,
    ):  # fmt: skip
        assert relative(mine, other) < RELATIVE
    assert calls[1:] == [(Direction.BACKWARD, 30)]


def test_rows_that_are_trained_are_sent_each_time_and_others_once(site: Any, calls: Any) -> None:
    layer, weight = site
    known, rows = KnownProduct(), torch.nn.Parameter(torch.randn(3, len(weight)))
    for _ in range(2):
        assert relative(known.of(layer, rows), rows @ weight) < RELATIVE
    rows.requires_grad_(False)
    for _ in range(2):
        assert relative(known.of(layer, rows), rows @ weight) < RELATIVE
    rows.data = torch.randn(3, len(weight))
    assert relative(known.of(layer, rows), rows @ weight) < RELATIVE
    assert calls == [(Direction.BACKWARD, 3)] * 4


def test_a_product_that_is_known_is_not_in_the_store_of_replies(site: Any, tmp_path: Path) -> None:
    """In the second run of a checkpointed block, a known product is not requested again. If the store held its reply,
    the second run would get this reply in place of the next one."""
    layer, weight = site
    known, frozen, trained = KnownProduct(), torch.randn(3, len(weight)), torch.randn(3, len(weight)).requires_grad_()
    store = ReplyStore(1 << 20, tmp_path)
    for run in KeptReplies(store, layer.group.run_states).contexts():
        with run:
            found = [known.of(layer, frozen), KnownProduct().of(layer, trained)]
        assert relative(found[0], frozen @ weight) < RELATIVE
        assert relative(found[1], trained @ weight) < RELATIVE
    store.close()


def test_what_masks_and_checks_multiply_is_not_kept(site: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DoRA makes its requests in the first run of a checkpointed block. The block's own narrow products are kept for
    the second run, but not those that masks and checks make during a request."""
    layer, weight = site
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(ReplyStore, "keep_extra", lambda store, tensor: kept.append(tensor))
    before_requests(monkeypatch, lambda *_: torch.ones(2, 32) @ torch.ones(32, 1))
    store = ReplyStore(1 << 20, tmp_path)
    with KeptReplies(store, layer.group.run_states).contexts()[0]:
        base_products.product(layer, torch.randn(3, weight.shape[1]))
        base_products.transposed_product(layer, torch.randn(3, len(weight)))
        assert kept == []
        _ = torch.ones(2, 32) @ torch.ones(32, 1)
    assert len(kept) == 1
    store.close()


def test_zeros_of_a_spoilt_answer_are_not_the_product_of_the_next(site: Any, calls: Any) -> None:
    """A provider sees the same calls, whether or not there was a value that is not finite in the answer before."""
    layer, weight = site
    states, rows = layer.group.run_states, torch.randn(3, len(weight))
    for is_spoilt in (True, False):
        calls.clear()
        known = KnownProduct()
        with states.own(may_stop=False) as run:
            run.outcome.sends_zeros = is_spoilt
            assert bool((known.of(layer, rows) == 0).all()) is is_spoilt
        with states.own(may_stop=False):
            for _ in range(2):
                assert relative(known.of(layer, rows), rows @ weight) < RELATIVE
        assert calls == [(Direction.BACKWARD, 3)] * 2


def test_the_gradient_of_such_rows(site: Any) -> None:
    layer, weight = site
    rows = torch.nn.Parameter(torch.randn(3, len(weight)))
    (got,) = torch.autograd.grad(KnownProduct().of(layer, rows).square().sum(), rows)
    (want,) = torch.autograd.grad((rows @ weight).square().sum(), rows)
    assert relative(got, want) < RELATIVE


def test_the_first_columns_and_rows_of_a_qr_decomposition(site: Any) -> None:
    layer, weight = site
    outer, inner = leading_columns(layer, 4)
    want_outer, want_inner = torch.linalg.qr(weight)
    assert relative(outer, want_outer[:, :4]) < RELATIVE
    assert relative(inner, want_inner[:4]) < RELATIVE


def test_iterations_find_nearly_the_best_subspace(site: Any) -> None:
    layer, weight = site
    left, values, right = leading_factors(layer, 4, 8)
    best = torch.linalg.svdvals(weight)[:4]
    assert relative(left.T @ left, torch.eye(4)) < RELATIVE
    assert relative(right @ right.T, torch.eye(4)) < RELATIVE
    held = float((left.T @ weight @ right.T).diagonal().square().sum() / best.square().sum())
    assert 0.99 < held < 1 + RELATIVE
    assert relative(values, best) < 0.01


def test_norms_of_rows(site: Any, calls: Any) -> None:
    layer, weight = site
    assert relative(row_norms(layer), weight.norm(dim=0)) < RELATIVE
    asked = list(calls)
    row_norms(layer)  # the norms of a group are asked for once
    assert calls == asked


def starts(layer: Any) -> list[torch.Tensor]:
    return [*leading_factors(layer, 4, 2), *leading_columns(layer, 4), row_norms(layer)]


def test_what_an_adapter_starts_from_is_asked_for_with_public_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such rows are sent without a mask, also in a session with the lattice mask. Otherwise the adapter's file would
    hold the mask's noise. The test compares two sessions with different random numbers: rows and products are the same
    bits, which would not be so with a mask."""
    make_tiny("llama", tmp_path)
    sent: list[list[tuple[int, Direction, torch.Tensor]]] = []

    def keep(call: Call, payload: Payload) -> None:
        assert isinstance(payload, RowsPayload)
        sent[-1].append((call.group, call.direction, torch.as_tensor(payload.rows(call)).clone()))

    before_requests(monkeypatch, keep)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        sent.append([])
        with TenantClient(f"inproc:{tmp_path}", cache=tmp_path / "cache", **LATTICE) as client:
            found.append(starts(client.load_model().get_submodule(NAMES["llama"])))
    assert len(sent[0]) == len(sent[1]) == 2 * 2 + 1 + 2 + 1
    for one, other in zip(*sent, strict=True):
        assert one[:2] == other[:2]
        assert torch.equal(one[2], other[2])
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


def test_a_provider_that_answers_nonsense_changes_no_call(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _ = site
    counts = []
    for nonsense in (None, float("nan"), float("inf"), 3e38):
        calls: list[int] = []
        before_requests(monkeypatch, lambda call, payload, calls=calls: calls.append(payload.num_rows))
        with monkeypatch.context() as patched:
            if nonsense is not None:
                answer = type(layer.group).run_public
                patched.setattr(
                    type(layer.group), "run_public",
                    lambda *given, answer=answer, nonsense=nonsense: torch.full_like(answer(*given), nonsense),
                )  # fmt: skip
            made = [*leading_factors(layer, 4, 3), *leading_columns(layer, 4)]
        assert all(bool(torch.isfinite(each).all()) for each in made)
        counts.append(calls)
        monkeypatch.undo()
    assert all(each == counts[0] for each in counts)


@torch.no_grad()
def test_the_scale_of_shira_counts(chat_client: TenantClient) -> None:
    config = ShiraConfig(r=2, target_modules=["down_proj"], init_weights=False, random_seed=1)
    model: Any = get_peft_model(chat_client.load_model(), config)
    layer = model.get_submodule("base_model.model.model.layers.1.mlp.down_proj")
    x = torch.randn(3, layer.in_features)
    plain = layer.base_layer(x)
    whole = layer(x) - plain
    layer.set_scale("default", 0.25)
    assert whole.abs().max() > 1e-2
    assert relative(layer(x) - plain, whole / 4) < RELATIVE
