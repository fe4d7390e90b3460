"""Tests remote layers beyond their results: the calls that they make, the tensors that they keep, and when they share
an input."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tenant_sdk import TenantClient, embedded
from tenant_sdk.model.remote_linear import RemoteLinear, RemoteWeightError
from tests.support.parity import batch, relative
from tests.support.providers import make_served_model
from tests.support.spies import before_requests
from tests.support.tiny_models import make_tiny
from wire.errors import InvalidTensor
from wire.frame import Call, Direction
from wire.limits import Limits
from wire.payload import MessagePayload, RowsPayload
from wire.ring import kernels
from wire.transport.inproc import InprocConnection

GROUPS_A_BLOCK = 4  # qkv, o, gate+up, down


@pytest.fixture
def client(tmp_path: Path) -> Any:
    make_tiny("llama", tmp_path)
    with TenantClient(f"inproc:{tmp_path}", weights="native", mask="off", arithmetic="float") as made:
        yield made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Call, tuple[int, int]]]:
    """Returns a list of all calls that reach the provider."""
    seen: list[tuple[Call, tuple[int, int]]] = []
    before_requests(monkeypatch, lambda call, payload: seen.append((call, (payload.num_rows, payload.cols))))
    return seen


def backward_groups(calls: list[tuple[Call, tuple[int, int]]]) -> list[int]:
    return [call.group for call, _ in calls if call.direction is Direction.BACKWARD]


def test_members_that_share_an_input_share_a_call(client: TenantClient, calls: Any) -> None:
    model = client.load_model()
    with torch.no_grad():
        model(batch())
    names = {group.id: group.name for group in client.connect().groups}
    assert [names[call.group] for call, _ in calls].count("lm_head") == 1
    assert len(calls) == 2 * GROUPS_A_BLOCK + 1
    assert len({call.group for call, _ in calls}) == len(calls)


@pytest.mark.parametrize("rows", [1, 2])
def test_what_a_gradient_was_kept_for_outlives_a_change_of_its_neighbour(client: TenantClient, rows: int) -> None:
    """The outputs q and k are from one call. autograd keeps q for the gradient of w, and a change of k in place must
    not affect this gradient, as with local layers."""
    attention: Any = client.load_model().model.layers[0].self_attn
    x, w = torch.randn(rows, 32), torch.ones(32, requires_grad=True)
    q = attention.q_proj(x)
    (q * w).sum().backward(retain_graph=True)
    expected = w.grad
    w.grad = None
    loss = (q * w).sum()
    attention.k_proj(x).mul_(2)
    loss.backward()
    assert expected is not None
    assert torch.equal(w.grad, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_in_place_change_of_the_input_makes_a_new_call(client: TenantClient, calls: Any, mode: Any) -> None:
    """In inference mode no change can be told, so that nothing is shared."""
    attention: Any = client.load_model().model.layers[0].self_attn
    with mode():
        x = torch.randn(3, 32)
        attention.q_proj(x)
        x.mul_(2)
        doubled = attention.k_proj(x)
        assert len(calls) == 2
        assert relative(doubled, attention.k_proj(x.clone())) < 1e-6


def test_a_layer_asked_twice_calls_twice_and_agrees(client: TenantClient, calls: Any) -> None:
    attention: Any = client.load_model().model.layers[0].self_attn
    x = torch.randn(3, 32)
    with torch.no_grad():
        assert torch.equal(attention.q_proj(x), attention.q_proj(x))
    assert len(calls) == 2


def test_node_saves_no_tensor(client: TenantClient) -> None:
    attention: Any = client.load_model().model.layers[0].self_attn
    saved: list[torch.Tensor] = []
    x = torch.randn(5, 32, requires_grad=True)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = attention.q_proj(x)
    assert saved == []
    node = y.grad_fn
    while node is not None and "Product" not in type(node).__name__:
        node = node.next_functions[0][0]
    assert node is not None
    kept = [value for value in vars(node).values() if isinstance(value, torch.Tensor)]
    assert kept == []


def test_no_backward_call_below_the_lowest_adapter(client: TenantClient, calls: Any) -> None:
    config = LoraConfig(r=2, target_modules=r".*layers\.1\.mlp\.down_proj", task_type="CAUSAL_LM")
    model = get_peft_model(client.load_model(), config)
    model(batch(), labels=batch()).loss.backward()
    names = {group.id: group.name for group in client.connect().groups}
    assert [names[group] for group in backward_groups(calls)] == ["lm_head"]


def test_backward_stops_at_the_first_adapted_layer(client: TenantClient, calls: Any) -> None:
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(client.load_model(), config)
    model(batch(), labels=batch()).loss.backward()
    first = next(group.id for group in client.connect().groups if "q_proj" in group.name)
    assert first not in backward_groups(calls), "layer 0's input needs no gradient"
    assert len(backward_groups(calls)) == 2 * GROUPS_A_BLOCK  # lm_head and all groups but the first


def test_unused_outputs_have_zero_gradients(client: TenantClient) -> None:
    attention: Any = client.load_model().model.layers[0].self_attn
    x = torch.randn(4, 32, requires_grad=True)
    attention.k_proj(x).sum().backward()
    alone = x.grad
    x2 = x.detach().clone().requires_grad_()
    q, k, v = attention.q_proj(x2), attention.k_proj(x2), attention.v_proj(x2)
    (k.sum() + 0.0 * q.sum() + 0.0 * v.sum()).backward()
    assert alone is not None
    assert x2.grad is not None
    assert relative(x2.grad, alone) < 1e-6


def test_large_calls_are_split_by_rows(
    client: TenantClient, calls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.no_grad():
        want = client.load_model()(batch()).logits
    calls.clear()
    served_model = make_served_model(tmp_path, limits=Limits(max_rows=5))
    monkeypatch.setattr(embedded, "connect_inproc", lambda *_: InprocConnection(served_model))
    with TenantClient("inproc:narrow", weights="native", mask="off", arithmetic="float") as narrow, torch.no_grad():
        assert relative(narrow.load_model()(batch()).logits, want) < 1e-6
    assert len(calls) == (2 * GROUPS_A_BLOCK + 1) * 5  # 24 rows
    assert max(shape[0] for _, shape in calls) == 5


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", ["q_proj", "o_proj"])
def test_outputs_can_be_changed_in_place(client: TenantClient, name: str, rows: int) -> None:
    """As with a local layer, an output can be changed in place, also in training. The outputs of other layers from the
    same call do not change."""
    attention: Any = client.load_model().model.layers[0].self_attn
    x = torch.randn(2, rows, 32, requires_grad=True)
    y = getattr(attention, name)(x)
    want = y.detach().clone().relu()
    other = attention.k_proj(x) if name == "q_proj" else None
    kept = other.detach().clone() if other is not None else None
    y.relu_()
    y.sum().backward()
    assert torch.equal(y.detach(), want)
    assert x.grad is not None
    assert kept is None or torch.equal(other, kept)


@pytest.mark.parametrize("name", ["q_proj", "o_proj"])
def test_a_tokens_outputs_can_be_changed_in_place(client: TenantClient, name: str) -> None:
    """One row without a gradient takes a faster path. Changing an output in place still changes no other output, and
    the output can be used where gradients are needed."""
    attention: Any = client.load_model().model.layers[0].self_attn
    with torch.no_grad():
        x = torch.randn(1, 1, 32)
        y = getattr(attention, name)(x)
        others = [attention.k_proj(x), attention.v_proj(x)] if name == "q_proj" else []
        kept = [other.clone() for other in others]
        want = y + 1 + 1
        y.add_(1)
    adapter = torch.ones_like(y, requires_grad=True)
    y += adapter
    y.sum().backward()
    assert torch.equal(y.detach(), want)
    assert adapter.grad is not None
    assert all(torch.equal(other, before) for other, before in zip(others, kept, strict=True))
    assert all(each.is_contiguous() and each.shape[:-1] == (1, 1) for each in (y, *others))


def test_an_input_that_comes_to_need_a_gradient_makes_a_new_call(client: TenantClient, calls: Any) -> None:
    attention: Any = client.load_model().model.layers[0].self_attn
    x = torch.randn(3, 32)
    attention.q_proj(x)
    assert attention.k_proj(x.requires_grad_()).requires_grad
    assert len(calls) == 2


def test_a_token_of_a_wide_layer_goes_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny("llama", tmp_path)
    with TenantClient(f"inproc:{tmp_path}", mask="off") as client, torch.no_grad():
        model = client.load_model()
        kinds: list[type] = []
        before_requests(monkeypatch, lambda call, payload: kinds.append(type(payload)))
        short = model(batch()[:1, :1]).logits
        assert set(kinds) == {MessagePayload if kernels.available() else RowsPayload}
        kinds.clear()
        monkeypatch.setattr("wire.payload.CHUNK_BYTES", 4)
        assert torch.equal(model(batch()[:1, :1]).logits, short)
        assert set(kinds) == {RowsPayload}


def test_zero_rows_make_no_call(client: TenantClient, calls: Any) -> None:
    attention: Any = client.load_model().model.layers[0].self_attn
    assert attention.q_proj(torch.empty(0, 32)).shape == (0, 32)
    assert attention.k_proj(torch.empty(2, 0, 32)).shape == (2, 0, 16)
    assert calls == []


def test_dtypes(client: TenantClient) -> None:
    attention: Any = client.load_model().model.layers[0].self_attn
    x = torch.randn(4, 32)
    want = attention.q_proj(x)
    half = attention.q_proj(x.bfloat16())
    assert half.dtype is torch.bfloat16
    assert relative(half.float(), want) < 1e-2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention.q_proj(x).dtype is torch.bfloat16
    with pytest.raises(InvalidTensor, match="takes 32 features, got 31"):
        attention.q_proj(torch.randn(4, 31))


def test_copies_share_the_connection_and_pickling_is_refused(client: TenantClient) -> None:
    model = client.load_model()
    clone = copy.deepcopy(model)
    with torch.no_grad():
        assert torch.equal(clone(batch()).logits, model(batch()).logits)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model)


def test_ghost_weight_has_a_shape_and_no_data(client: TenantClient) -> None:
    layer: Any = client.load_model().model.layers[0].mlp.gate_proj
    assert isinstance(layer, RemoteLinear)
    assert (tuple(layer.weight.shape), layer.weight.dtype) == ((64, 32), torch.float32)
    assert sum(p.numel() for p in layer.parameters()) == 0
    for touch in (lambda w: w.sum(), lambda w: w + 1, lambda w: w.clone(), lambda w: w[0], lambda w: w.tolist()):
        with pytest.raises(RuntimeError):
            touch(layer.weight)
    assert layer.to(torch.bfloat16).weight.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "corda"}]
)
def test_methods_that_read_base_weights_fail_loudly(client: TenantClient, options: dict[str, Any]) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", **options)
    with pytest.raises(RemoteWeightError):
        get_peft_model(client.load_model(), config)
