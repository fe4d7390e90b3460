"""Tests the replica whose weights are on a device, on torch's `cpu` device: the same streams, pieces and checks as on a
GPU, without streams. Tests that take the `replica` run on a GPU as well if there is one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from provider.device import on_device
from provider.device.on_device import FLOAT_ROWS, Multiply, OnDevice
from provider.device.weights import Moved
from provider.embedded import ModelOnDevice, serve_in_process
from provider.engine.executor import Executor
from provider.engine.profile import latency_model
from provider.engine.replica import RETRY_S, ReplicaLost
from provider.model.served_group import ServedGroup
from provider.model.served_model import ServedModel
from provider.schedule.fairness import Policy
from provider.schedule.scheduler import Scheduler
from provider.shards.worker import product_of
from tests.support.cuda import cpu_and
from tests.support.executors import Answer
from tests.support.ring_products import ring_rows
from tests.support.tiny_models import make_tiny
from tests.support.waiting import until
from wire.errors import ConfigurationError, InvalidTensor, RemoteFault, Unavailable, UnknownLayer
from wire.frame import Arithmetic, Call, Direction, Purpose
from wire.payload import RowsPayload
from wire.ring import coding
from wire.ring.seeded_rows import SeededRows
from wire.transport.inproc import InprocConnection

RING, FLOAT = Arithmetic.RING, Arithmetic.FLOAT
FORWARD = Call(0, Direction.FORWARD, RING)
TOLERANCE = 1e-5
"""The stated tolerance of float products, relative to the largest number of the product (docs/accelerators.md)."""
DEVICES = cpu_and("cuda:0")


@pytest.fixture(scope="module", params=["int8", "native"])
def served_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """Provides a tiny GPT-2, whose layers have biases."""
    folder: Path = tmp_path_factory.mktemp("model") / "gpt2"
    make_tiny("gpt2", folder)
    return serve_in_process(str(folder), request.param)


@pytest.fixture(params=DEVICES)
def replica(request: pytest.FixtureRequest, served_model: ServedModel) -> Iterator[OnDevice]:
    made = OnDevice(list(served_model.served.groups), torch.device(request.param))
    yield made
    made.close()


@pytest.fixture
def lost(replica: OnDevice, monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Provides a function after whose call every product on the device raises an error."""

    def fail(error: BaseException) -> None:
        def raise_it(*given: object) -> torch.Tensor:
            raise error

        monkeypatch.setattr(coding, "product", raise_it)

    return fail


def calls(served_model: ServedModel) -> Iterator[Call]:
    for group in range(len(served_model.manifest().groups)):
        for direction in Direction:
            yield Call(group, direction, RING)
            yield Call(group, direction, FLOAT)
            yield Call(group, direction, FLOAT, Purpose.EFFECT)


def rows_for(served_model: ServedModel, call: Call, num_rows: int, seed: int = 1) -> torch.Tensor:
    cols = served_model.manifest().groups[call.group].widths(call.direction)[0]
    if call.arithmetic is RING:
        return ring_rows(num_rows, cols, seed)
    return torch.randn(num_rows, cols, generator=torch.Generator().manual_seed(seed))


def assert_agree(call: Call, found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.shape, found.dtype, found.device.type) == (expected.shape, expected.dtype, "cpu")
    if call.arithmetic is RING:
        assert torch.equal(found, expected)
    elif expected.numel():
        assert float((found - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


# ---- products -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [0, 1, 3, 8, 9, 150])
def test_replies_are_the_cpus(
    served_model: ServedModel, replica: OnDevice, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are made small, so that the streams take several turns."""
    monkeypatch.setattr(on_device, "COPY_BYTES", 40 * 4 * 96)
    for call in calls(served_model):
        rows = rows_for(served_model, call, num_rows)
        before = rows.clone()
        assert_agree(call, replica.product(call, rows), served_model.compute(call, rows))
        assert torch.equal(rows, before)


def test_requests_that_share_a_product_get_their_own_replies(
    served_model: ServedModel, replica: OnDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_device, "COPY_BYTES", 40 * 4 * 96)
    for call in calls(served_model):
        parts = [rows_for(served_model, call, count, seed=count) for count in (1, 70, 0, 5, 64)]
        replies = replica.products(call, parts)
        for rows, reply in zip(parts, replies, strict=True):
            assert_agree(call, reply, served_model.compute(call, rows))
        assert len({reply.data_ptr() for reply in replies if reply.numel()}) == 4, "memory of their own"


@pytest.mark.parametrize("num_rows", [1, 8, 9, 150])
def test_rows_on_the_device_are_answered_there(
    served_model: ServedModel, replica: OnDevice, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that a tenant has put into the device's memory share products with others."""
    monkeypatch.setattr(on_device, "COPY_BYTES", 40 * 4 * 96)
    for call in calls(served_model):
        if call.arithmetic is not RING:
            continue
        parts = [rows_for(served_model, call, count, seed=count) for count in (num_rows, 70, num_rows)]
        there = [parts[0].to(replica.device), parts[1], parts[2].to(replica.device)]
        for replies, rows in ((replica.products(call, there), parts), ([replica.product(call, there[0])], parts[:1])):
            for reply, given, mine in zip(replies, there, rows, strict=False):
                assert reply.device == given.device
                assert torch.equal(reply.cpu(), served_model.compute(call, mine))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("waits", [True, False])
def test_requests_that_are_all_on_the_device_share_a_product_there(
    served_model: ServedModel, device: str, waits: bool
) -> None:
    replica = OnDevice(copies(served_model), torch.device(device))
    replica.waits = waits
    for num_rows in (1, 70):
        parts = [rows_for(served_model, FORWARD, count, seed=count) for count in (num_rows, 0, 5)]
        replies = replica.products(FORWARD, [rows.to(device) for rows in parts])
        for reply, rows in zip(replies, parts, strict=True):
            assert reply.device == replica.device
            assert torch.equal(reply.cpu(), served_model.compute(FORWARD, rows))
    replica.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_on_a_device_in_the_tenants_process(
    served_model: ServedModel, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = replace(served_model.served, groups=copies(served_model))
    model = ModelOnDevice(prepared, torch.device(device))
    assert model.manifest() == served_model.manifest()
    connection = InprocConnection(model, model.device)
    for call in calls(served_model):
        for num_rows in (1, 9):
            rows = rows_for(served_model, call, num_rows)
            expected = served_model.compute(call, rows)
            assert_agree(call, connection.submit(call, RowsPayload(rows), expected.shape[1]).result(), expected)
            if call.arithmetic is RING:
                reply = connection.submit(call, RowsPayload(rows.to(device)), expected.shape[1]).result()
                assert reply.device == model.device
                assert torch.equal(reply.cpu(), expected)
    monkeypatch.setattr(coding, "product", lambda *given: (_ for _ in ()).throw(torch.AcceleratorError("numbers")))
    with pytest.raises(RemoteFault, match="the device was lost: start again"):
        model.compute(FORWARD, rows_for(served_model, FORWARD, 20))
    model.close()
    monkeypatch.undo()
    with pytest.raises((UnknownLayer, RemoteFault)):
        model.compute(FORWARD, rows_for(served_model, FORWARD, 20))


def test_a_device_and_shards_in_one_process_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="leave out the shards, or the device"):
        serve_in_process("smollm2-135m", device="cuda", num_shards=2)


def test_a_float_reply_does_not_depend_on_companions_or_on_cuts(served_model: ServedModel, replica: OnDevice) -> None:
    """The reply is the same to the last bit alone, as a part of a longer request, and beside other requests."""
    for call in calls(served_model):
        if call.arithmetic is not FLOAT:
            continue
        rows = rows_for(served_model, call, FLOAT_ROWS + 5)
        whole = replica.product(call, rows)
        others = rows_for(served_model, call, 30, seed=2) * 1e3
        _, beside, _ = replica.products(call, [others, rows, others])
        pieces = torch.cat([replica.product(call, rows[:3]), replica.product(call, rows[3:])])
        assert torch.equal(whole, beside)
        assert torch.equal(whole, pieces)


def test_a_hint_is_the_cpus(served_model: ServedModel, replica: OnDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "COPY_BYTES", 40 * 4 * 96)
    for direction in Direction:
        call = Call(1, direction, RING, Purpose.HINT)
        seed = SeededRows(b"s" * 32, 7, 130)
        assert torch.equal(replica.product(call, seed), served_model.compute(call, seed))


@pytest.mark.parametrize(
    ("call", "rows", "error"),
    [
        (Call(999, Direction.FORWARD, RING), torch.ones(1, 32, dtype=torch.int32), UnknownLayer),
        (FORWARD, torch.ones(1, 31, dtype=torch.int32), InvalidTensor),
        (FORWARD, torch.ones(1, 32), InvalidTensor),
        (Call(0, Direction.FORWARD, FLOAT), torch.full((1, 32), float("nan")), InvalidTensor),
        (Call(0, Direction.FORWARD, FLOAT), torch.full((9, 32), float("inf")), InvalidTensor),
    ],
)
def test_bad_requests_fail_alone(replica: OnDevice, call: Call, rows: torch.Tensor, error: type[Exception]) -> None:
    with pytest.raises(error):
        replica.product(call, rows)
    with pytest.raises(error):
        replica.products(call, [rows, rows])
    assert replica.is_alive


def test_pieces_are_even_and_lanes_take_turns(
    served_model: ServedModel, replica: OnDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[int, int]] = []
    for number, stream in enumerate(replica.streams):
        start = stream.start
        monkeypatch.setattr(
            stream,
            "start",
            lambda block, multiply, num_padded=0, number=number, start=start: (
                started.append((number, sum(rows.shape[0] for rows, _ in block))) or start(block, multiply, num_padded)
            ),
        )
    monkeypatch.setattr(on_device, "COPY_BYTES", 40 * 4 * 96)
    replica.product(FORWARD, rows_for(served_model, FORWARD, 100))
    assert started == [(0, 34), (1, 34), (0, 32)], "40 rows fit a piece, so 100 rows are three pieces"


@pytest.mark.parametrize(("num_rows", "height"), [(1, 1), (2, 8), (8, 8)])
def test_small_products_are_prepared_once(
    served_model: ServedModel, replica: OnDevice, num_rows: int, height: int
) -> None:
    rows = [rows_for(served_model, FORWARD, num_rows, seed=seed) for seed in (1, 2)]
    first = replica.product(FORWARD, rows[0])
    assert set(replica.few.graphs) == {((0, Direction.FORWARD), height)}
    (kept,) = replica.few.graphs.values()
    second = replica.product(FORWARD, rows[1])
    assert list(replica.few.graphs.values()) == [kept]
    for given, found in zip(rows, (first, second), strict=True):
        assert torch.equal(found, served_model.compute(FORWARD, given))


def test_without_room_for_graphs_small_products_go_on(
    served_model: ServedModel, replica: OnDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_device, "MOST_GRAPHS", 0)
    rows = rows_for(served_model, FORWARD, 1)
    assert torch.equal(replica.product(FORWARD, rows), served_model.compute(FORWARD, rows))
    assert not replica.few.graphs


# ---- weights --------------------------------------------------------------------------------------------------------


def copies(served_model: ServedModel) -> list[ServedGroup]:
    return [replace(group, quantised=group.quantised.clone()) for group in served_model.served.groups]


def test_the_list_of_groups_is_emptied_group_by_group(
    served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, left = copies(served_model), []
    total, check = len(groups), OnDevice.check_products
    monkeypatch.setattr(OnDevice, "check_products", lambda *given: left.append(len(groups)) or check(*given))
    OnDevice(groups, torch.device("cpu"))
    assert left == list(range(total))[::-1]


@pytest.mark.parametrize("arithmetic", [RING, FLOAT])
def test_a_wrong_product_is_found_before_serving(
    served_model: ServedModel, monkeypatch: pytest.MonkeyPatch, arithmetic: Arithmetic
) -> None:
    """The device's last number is wrong: by one in ring arithmetic, by a thousandth (as with TF32) in float."""
    right = on_device.multiply_of

    def wrong(moved: Moved, call: Call) -> Multiply:
        def multiply(rows: torch.Tensor) -> torch.Tensor:
            reply = right(moved, call)(rows).clone()
            if call.arithmetic is arithmetic:
                reply[0, -1] += 1 if arithmetic is RING else reply.abs().max() * 1e-3
            return reply

        return multiply

    monkeypatch.setattr(on_device, "multiply_of", wrong)
    with pytest.raises(ConfigurationError, match="cpu computed a wrong product of"):
        OnDevice(copies(served_model), torch.device("cpu"))


def test_weights_that_do_not_fit_say_how_many_layers_would(
    served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []

    def full(*given: object) -> None:
        moved.append(1)
        if len(moved) == 3:
            raise torch.OutOfMemoryError

    monkeypatch.setattr(OnDevice, "check_products", full)
    groups = copies(served_model)
    num_layers = sum(len(group.info.layers) for group in groups)
    num_fitting = sum(len(group.info.layers) for group in groups[:2])
    with pytest.raises(ConfigurationError, match=f"do not fit on cpu: {num_fitting} of {num_layers} layers would") as e:
        OnDevice(groups, torch.device("cpu"))
    assert "\n" not in str(e.value)


# ---- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 100])
def test_without_memory_a_request_is_refused_with_a_time(
    served_model: ServedModel, replica: OnDevice, lost: Callable[[BaseException], None], num_rows: int
) -> None:
    lost(torch.OutOfMemoryError("secret text"))
    with pytest.raises(Unavailable) as caught:
        replica.product(FORWARD, rows_for(served_model, FORWARD, num_rows))
    assert caught.value.retry_s == RETRY_S
    assert "secret" not in str(caught.value)
    assert replica.is_alive


@pytest.mark.parametrize("num_rows", [1, 100])
def test_a_lost_device_gives_no_number(
    served_model: ServedModel, replica: OnDevice, lost: Callable[[BaseException], None], num_rows: int
) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(coding, "product", lambda *given: (_ for _ in ()).throw(torch.AcceleratorError("gone")))
        with pytest.raises(ReplicaLost):
            replica.product(FORWARD, rows_for(served_model, FORWARD, num_rows))
    assert not replica.is_alive
    with pytest.raises(ReplicaLost):
        replica.product(FORWARD, rows_for(served_model, FORWARD, num_rows))


def test_after_a_fault_in_mid_product_no_old_rows_are_answered(
    served_model: ServedModel, replica: OnDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of three pieces fails. The next product gets its own rows, and not what was left in a stream."""
    monkeypatch.setattr(on_device, "COPY_BYTES", 40 * 4 * 96)
    product, number = coding.product, iter(range(99))

    def fail_once(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if next(number) == 1:
            raise torch.OutOfMemoryError
        return product(rows, weight)

    monkeypatch.setattr(coding, "product", fail_once)
    with pytest.raises(Unavailable):
        replica.product(FORWARD, rows_for(served_model, FORWARD, 100))
    rows = rows_for(served_model, FORWARD, 100, seed=5)
    expected = coding.products([rows], served_model.served.groups[0].quantised)[0]
    assert torch.equal(replica.product(FORWARD, rows), expected)


def test_a_device_comes_back_only_with_its_weights(served_model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "PAUSE_S", 0.0)
    monkeypatch.setattr(on_device, "MAX_TRIES", 2)
    for is_changed in (False, True):
        replica = OnDevice(copies(served_model), torch.device("cpu"))
        replica.is_lost = True
        if is_changed:
            replica.moved_groups[1].group.quantised[0, 0] += 1
        assert replica.revive(threading.Event()) is not is_changed
        assert replica.is_alive is not is_changed
        assert replica.can_return is not is_changed


def test_a_revival_ends_with_the_provider(served_model: ServedModel) -> None:
    replica, over = OnDevice(copies(served_model), torch.device("cpu")), threading.Event()
    replica.is_lost = True
    over.set()
    assert not replica.revive(over)


def submitted(executor: Executor, rows: torch.Tensor) -> Answer:
    answer = Answer(rows, FORWARD, "acme")
    executor.submit(answer.request)
    return answer


def test_behind_the_executor_a_loss_is_refused_with_a_time_and_passes(
    served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the device is lost, requests are refused with a time. Once it has passed its tests, they are answered."""
    monkeypatch.setattr(on_device, "PAUSE_S", 0.001)
    may_return, tested = threading.Event(), OnDevice.passes_self_test
    monkeypatch.setattr(on_device, "MAX_TRIES", 1 << 30)
    monkeypatch.setattr(OnDevice, "passes_self_test", lambda replica: may_return.is_set() and tested(replica))
    replica = OnDevice(copies(served_model), torch.device("cpu"))
    executor = Executor(
        [replica], Scheduler(Policy(max_wait_s=0.0), latency_model(served_model.served, profiled=False))
    )
    try:
        rows = rows_for(served_model, FORWARD, 50)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(coding, "product", lambda *given: (_ for _ in ()).throw(torch.AcceleratorError("gone")))
            outcomes: Sequence[object] = [submitted(executor, rows).get()]
        assert isinstance(outcomes[0], Unavailable)
        assert outcomes[0].retry_s == RETRY_S
        may_return.set()
        until(lambda: executor.num_replicas == (1, 1), "the device to come back")
        reply = submitted(executor, rows).get()
        assert isinstance(reply, torch.Tensor)
        assert torch.equal(reply, served_model.compute(FORWARD, rows))
    finally:
        executor.close()


def test_a_shards_process_computes_on_its_device(served_model: ServedModel) -> None:
    groups = {group.info.id: group for group in copies(served_model)}
    on_device_, on_cpu = (product_of(dict(groups), device) for device in (torch.device("cpu"), None))
    rows = rows_for(served_model, FORWARD, 20)
    assert torch.equal(on_device_(FORWARD, rows), on_cpu(FORWARD, rows))
    assert isinstance(getattr(on_device_, "__self__", None), OnDevice)
