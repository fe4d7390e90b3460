"""Tests shards on other hosts: which hosts may join, with which weights, and what a tenant notices when a host
leaves."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch

from provider.engine.executor import Executor
from provider.engine.profile import make_scheduler
from provider.engine.replica import RETRY_S
from provider.identity.authority import StateDir
from provider.identity.registry import enroll, revoke
from provider.model.served_group import ServedGroup
from provider.model.served_model import ServedModel
from provider.net.server import Server
from provider.net.service import ProviderService
from provider.schedule.policy import Policy
from provider.shards.join import JoiningShard
from provider.shards.listener import ShardListener
from provider.shards.messages import JOINED, SHARD_METHOD, Assignment, Join, Ready, pack, unpack
from provider.shards.plan import make_plan
from provider.shards.router import Shard
from tests.support.payloads import payload_of
from tests.support.raw_stream import RawStream
from tests.support.spies import results_of
from tests.support.waiting import comes, end, until
from wire import frame
from wire.errors import ConfigurationError, InvalidTensor, Unauthenticated, WireCode
from wire.frame import PROTOCOL_VERSION, Arithmetic, Call, Direction, FrameType, Header, Purpose
from wire.ring.seeded_rows import SeededRows
from wire.transport.grpc_connection import GrpcConnection, open_channel
from wire.transport.identity import TlsIdentity

RING = Arithmetic.RING


class Site:
    """Runs a provider of two shards without weights of its own, and hosts that join it."""

    def __init__(self, served_model: ServedModel, folder: Path, joins: Sequence[None]) -> None:
        """Starts the provider. `joins` is a sequence that grows by one for each replica that has joined an executor."""
        self.served_model, self.folder, self._joins = served_model, folder, joins
        self.state = StateDir(folder / "state")
        self.plan = make_plan(served_model.manifest().groups, 2)
        self.server = Server("127.0.0.1", 0, self.state)
        front = ServedModel(served_model.served)
        front.let_weights_go()
        self.service: ProviderService = self.server.start(
            front, [Shard(ids, [], make_scheduler(served_model.served, Policy(), profiled=False)) for ids in self.plan]
        )
        self.url = f"grpcs://127.0.0.1:{self.server.port}"
        self.connection = GrpcConnection(self.url, self.identity("acme"))
        self._joining: list[tuple[JoiningShard, threading.Thread]] = []

    def identity(self, name: str, role: str = "tenant") -> TlsIdentity:
        if not (self.folder / name).exists():
            enroll(self.state, name, self.folder / name, self.url, role=role)  # type: ignore[arg-type]
        return TlsIdentity.read(self.folder / name)

    def join(self, shard: int, name: str = "host") -> JoiningShard:
        """Makes one more host join, and waits until the provider uses it."""
        before = len(self._joins)
        joining = JoiningShard(self.url, self.identity(name, "shard"), shard, self.load)
        thread = threading.Thread(target=joining.run)
        thread.start()
        self._joining.append((joining, thread))
        until(lambda: len(self._joins) > before, "the shard that joins")
        return joining

    def load(self, assignment: Assignment) -> dict[int, ServedGroup]:
        return {group: self.served_model.served.groups[group] for group in assignment.digests}

    def product(self, call: Call, rows: torch.Tensor | SeededRows) -> torch.Tensor:
        info = self.served_model.manifest().groups[call.group]
        cols, reply_cols = info.widths(call.direction)
        return self.connection.submit(call, payload_of(rows, cols), reply_cols).result()

    def rows(self, call: Call, count: int) -> torch.Tensor:
        info = self.served_model.manifest().groups[call.group]
        cols = info.in_features if call.direction is Direction.FORWARD else info.out_features
        if call.arithmetic is Arithmetic.FLOAT:
            return torch.randn(count, cols)
        return torch.randint(-(2**31), 2**31 - 1, (count, cols), dtype=torch.int64).to(torch.int32)

    def close(self) -> None:
        for joining, _ in self._joining:
            joining.stop()
        self.connection.close()
        self.server.stop()
        for _, thread in self._joining:
            end(thread)


@pytest.fixture
def site(tiny_served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tiny_served_model, tmp_path, results_of(monkeypatch, Executor, "join"))
    yield made
    made.close()


def test_every_product_of_joined_shards_is_the_same(site: Site) -> None:
    site.join(0)
    site.join(1)
    for group in range(len(site.served_model.manifest().groups)):
        for direction in Direction:
            for arithmetic in Arithmetic:
                call = Call(group, direction, arithmetic)
                for count in (0, 1, 7):
                    rows = site.rows(call, count)
                    assert torch.allclose(site.product(call, rows), site.served_model.compute(call, rows))
            hint = Call(group, direction, RING, Purpose.HINT)
            seeded = SeededRows(bytes(32), 3, 9)
            assert torch.equal(site.product(hint, seeded), site.served_model.compute(hint, seeded))
    call = Call(0, Direction.FORWARD, RING)
    rows = site.rows(call, 4096)  # enough for several pieces and frames
    assert torch.equal(site.product(call, rows), site.served_model.compute(call, rows))


def test_a_fault_of_a_request_is_no_loss(site: Site) -> None:
    site.join(0)
    call = Call(0, Direction.FORWARD, Arithmetic.FLOAT)
    broken = site.rows(call, 20)
    broken[3, 3] = float("inf")
    with pytest.raises(InvalidTensor):
        site.product(call, broken)
    assert site.service.num_replicas[0] == (1, 1)


def test_a_host_that_leaves_and_one_that_comes(site: Site) -> None:
    """A shard's only host leaves, and a tenant's request waits until another host joins. The reply is the same as
    before."""
    first = site.join(0)
    call = Call(0, Direction.FORWARD, RING)
    rows = site.rows(call, 20)
    expected = site.served_model.compute(call, rows)
    assert torch.equal(site.product(call, rows), expected)
    first.stop()
    until(lambda: site.service.num_replicas[0] == (0, 1), "the loss to be known")
    answers: list[torch.Tensor] = []
    asking = threading.Thread(target=lambda: answers.append(site.product(call, rows)))
    asking.start()
    site.join(0, "another")
    end(asking)
    assert torch.equal(answers[0], expected)


def test_one_of_two_hosts_is_lost(site: Site) -> None:
    one = site.join(0)
    site.join(0, "another")
    assert site.service.num_replicas[0] == (2, 2)
    call = Call(0, Direction.FORWARD, RING)
    one.stop()
    for _ in range(30):
        rows = site.rows(call, 20)
        assert torch.equal(site.product(call, rows), site.served_model.compute(call, rows))
    until(lambda: site.service.num_replicas[0] == (1, 1), "the loss to be known")


def test_a_tenant_is_no_shard_and_a_shard_no_tenant(site: Site) -> None:
    with pytest.raises(Unauthenticated):
        JoiningShard(site.url, site.identity("acme"), 0, site.load).run()
    with pytest.raises(Unauthenticated):
        GrpcConnection(site.url, site.identity("host", "shard")).manifest()
    assert site.service.num_replicas == [(0, 1), (0, 1)]


def test_a_revoked_host_gets_no_more_rows(site: Site) -> None:
    site.join(0)
    call = Call(0, Direction.FORWARD, RING)
    site.product(call, site.rows(call, 20))
    revoke(site.state, "host")
    stream = RawStream(site, "acme")  # type: ignore[arg-type]
    stream.send(*stream.request(1, site.rows(call, 20), call))
    last = stream.receive()
    assert (last.kind, last.request_id, last.code) == (FrameType.ERROR, 1, WireCode.UNAVAILABLE)
    assert last.deadline_ms == 1000 * RETRY_S  # another host may still join
    stream.close()
    until(lambda: site.service.num_replicas[0] == (0, 1), "the loss to be known")


@pytest.mark.parametrize("part", ["quantised", "bias", "native"])
def test_weights_that_differ_are_refused_at_both_ends(site: Site, part: str) -> None:
    """A host whose weights differ from the provider's is refused by itself and by the provider. Biases and native
    weights are compared, too, although the manifest's digest does not cover them."""

    def others(assignment: Assignment) -> dict[int, ServedGroup]:
        groups = site.load(assignment)
        one = groups[0]
        if part == "quantised":
            return {**groups, 0: replace(one, info=one.info.model_copy(update={"digest": "0" * 64}))}
        shape = one.alpha.shape if part == "bias" else one.quantised.shape
        return {**groups, 0: replace(one, **{part: torch.ones(shape)})}

    with pytest.raises(ConfigurationError, match="weights of group 0 are not the provider's"):
        JoiningShard(site.url, site.identity("host", "shard"), 0, others).run()
    status = speak(site, [pack(Join(protocol=PROTOCOL_VERSION, shard=0)), pack(Ready(digests={0: "0" * 64}))])
    assert status is grpc.StatusCode.FAILED_PRECONDITION
    assert site.service.num_replicas[0] == (0, 1)


def test_a_host_that_says_nothing_is_shown_out(quick_sweeps: None, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that joins and sends nothing is disconnected when its time is over. A host whose certificate is revoked is
    disconnected at once."""
    late_s, swept, sweep = 0.0, [], ShardListener.sweep

    def sweep_late(listener: ShardListener, now: float) -> None:
        sweep(listener, now + late_s)
        swept.append(late_s)

    monkeypatch.setattr(ShardListener, "sweep", sweep_late)
    with open_channel(site.url, site.identity("host", "shard")) as channel:
        silent = channel.stream_stream(SHARD_METHOD)(iter(threading.Event().wait, None))
        until(lambda: site.service.status().num_joining == 1, "the visit")
        before = len(swept)
        until(lambda: len(swept) > before + 1, "a whole sweep")
        assert site.service.status().num_joining == 1
        late_s = 30
        with pytest.raises(grpc.RpcError):
            next(silent)
    until(lambda: site.service.status().num_joining == 0, "the end of the visit")
    late_s = 0
    with open_channel(site.url, site.identity("host", "shard")) as channel:
        silent = channel.stream_stream(SHARD_METHOD)(iter(threading.Event().wait, None))
        until(lambda: site.service.status().num_joining == 1, "the visit")
        revoke(site.state, "host")
        with pytest.raises(grpc.RpcError):
            next(silent)  # the provider notices by itself


def test_an_idle_host_that_is_revoked_leaves(site: Site) -> None:
    site.join(0)
    revoke(site.state, "host")
    until(lambda: site.service.num_replicas[0] == (0, 1), "the loss to be known")


def test_a_provider_that_is_not_there_is_named_and_tried_again(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:  # the port is bound, but nothing listens
        taken.bind(("127.0.0.1", 0))
        url = f"grpcs://127.0.0.1:{taken.getsockname()[1]}"
        joining = JoiningShard(url, site.identity("host", "shard"), 0, site.load)
        running = threading.Thread(target=joining.run)
        running.start()
        until(lambda: len(caplog.records) >= 2, "a second try")
        joining.stop()
        end(running)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) >= 2
    assert set(messages) == {f"no provider at {url} (Unavailable); trying again"}


def test_a_shard_that_there_is_not(site: Site) -> None:
    with pytest.raises(ConfigurationError, match="no shard 7"):
        JoiningShard(site.url, site.identity("host", "shard"), 7, site.load).run()


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (b"", grpc.StatusCode.INVALID_ARGUMENT),
        (b"{}", grpc.StatusCode.INVALID_ARGUMENT),
        (b"\xff" * 900_000, grpc.StatusCode.INVALID_ARGUMENT),
        (pack(Join(protocol=PROTOCOL_VERSION + 1, shard=0)), grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
def test_a_first_word_that_is_none(site: Site, first: bytes, expected: grpc.StatusCode) -> None:
    assert speak(site, [first]) is expected


def speak(site: Site, words: list[bytes]) -> grpc.StatusCode:
    """Sends a host's messages, and returns the status with which the RPC ends."""
    with open_channel(site.url, site.identity("host", "shard")) as channel:
        call = channel.stream_stream(SHARD_METHOD)(iter(words))
        with pytest.raises(grpc.RpcError) as caught:
            for _ in call:
                pass
        code: grpc.StatusCode = caught.value.code()
        return code


@pytest.mark.slow
@pytest.mark.parametrize("what", ["shape", "number", "kind", "bytes"])
def test_a_host_that_breaks_the_protocol_is_lost(site: Site, what: str) -> None:
    """A host that sends an invalid reply is disconnected, and another host computes the product that was requested from
    it."""
    answered = threading.Event()

    def words() -> Iterator[bytes]:
        yield pack(Join(protocol=PROTOCOL_VERSION, shard=0))
        yield pack(Ready(digests={one: site.served_model.fingerprints[one] for one in site.plan[0]}))
        comes(asked, "a request")
        header = headers[0]
        reply = Header(FrameType.REPLY, header.request_id, header.call, header.rows, 64, 0, header.rows * 64 * 4)
        if what == "shape":
            reply.rows, reply.total_bytes = header.rows + 1, (header.rows + 1) * 64 * 4
        elif what == "number":
            reply.request_id += 1
        elif what == "kind":
            reply.kind = FrameType.WELCOME
        yield b"x" if what == "bytes" else reply.pack() + bytes(64)
        comes(answered, "the other host's answer")

    asked, headers = threading.Event(), []

    def host() -> None:
        with open_channel(site.url, site.identity("host", "shard")) as channel:
            call = channel.stream_stream(SHARD_METHOD)(words())
            try:
                unpack(Assignment, next(call))
                assert next(call) == JOINED
                for message in call:
                    headers.append(frame.parse(message)[0])
                    asked.set()
            except grpc.RpcError:
                pass

    thread = threading.Thread(target=host)
    thread.start()
    until(lambda: site.service.num_replicas[0][0] == 1, "the host")
    call = Call(0, Direction.FORWARD, RING)
    rows = site.rows(call, 20)
    answers: list[torch.Tensor] = []
    asking = threading.Thread(target=lambda: answers.append(site.product(call, rows)))
    asking.start()
    comes(asked, "a request")
    site.join(0, "another")
    end(asking)
    assert torch.equal(answers[0], site.served_model.compute(call, rows))
    answered.set()
    end(thread)


def test_without_tls_nobody_joins(tiny_served_model: ServedModel) -> None:
    server = Server("127.0.0.1", 0, None)
    server.start(tiny_served_model)
    try:
        with pytest.raises(ConfigurationError, match="takes none"):
            JoiningShard(f"grpc://127.0.0.1:{server.port}", None, 0, lambda assignment: {}).run()
    finally:
        server.stop()
