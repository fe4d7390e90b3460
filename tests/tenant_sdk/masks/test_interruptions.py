"""Tests a model whose rows the lattice mask hides, across restarts, failures, threads and forks."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.mask_site import MODEL_NOISE, Site, taken, unmasked
from tests.support.parity import batch, relative
from tests.support.providers import serving
from tests.support.threads import in_child
from tests.support.waiting import WAIT_S
from wire.errors import (
    MaskReused,
    RemoteFault,
    Unavailable,
)
from wire.frame import Call, Purpose

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")


# ---- lattice: interruptions, threads, forks --------------------------------------------------------------------------


def test_after_a_restart_of_the_provider_the_next_step_uses_fresh_rows(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, (watched,) = site.mtls("llama")
    model = client.load_model()
    want = unmasked(site)(batch()).logits
    server, state = site.served["0"]
    rows = taken(monkeypatch)
    with torch.no_grad():
        model(batch())
        server.stop()
        for _ in range(2):
            with pytest.raises(Unavailable):
                model(batch())
        burnt = len(rows)
        site.open.enter_context(serving(watched, server.port, state))
        assert relative(model(batch()).logits, want) < MODEL_NOISE
    assert burnt >= 9 * 24 + 2 * 24, "what was masked for a call that failed is burnt"
    assert len(set(rows)) == len(rows) == burnt + 9 * 24


def test_a_request_that_the_provider_fails_is_not_sent_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client, (watched,) = site.mtls("llama")
    model = client.load_model()
    with torch.no_grad():
        model(batch())
        rows, left = taken(monkeypatch), [True]

        def fail(call: Call) -> None:
            if left and call.purpose is Purpose.PRODUCT:
                left.pop()
                raise RemoteFault("a broken kernel")

        watched.fail = fail
        before = len(watched.products())
        with pytest.raises(RemoteFault):
            model(batch())
        assert len(watched.products()) == before + 1
        model(batch())
    sent = [bytes(row.numpy()) for tensor in watched.products() for row in tensor]
    assert len(set(sent)) == len(sent)
    assert len(set(rows)) == len(rows)


def test_a_request_that_comes_again_in_time_is_the_same_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client, (watched,) = site.mtls("llama")
    model, want = client.load_model(), unmasked(site)(batch()).logits
    with torch.no_grad():
        model(batch())
        rows, left = taken(monkeypatch), [True, True]
        watched.seen.clear()

        def fail(call: Call) -> None:
            if left and call.purpose is Purpose.PRODUCT and call.group == 2:
                left.pop()
                raise Unavailable("the shard that holds this layer is lost", 0.01)

        watched.fail = fail
        assert relative(model(batch()).logits, want) < MODEL_NOISE
    products = [sent for sent in watched.seen if sent[0].purpose is Purpose.PRODUCT]
    assert [call.group for call, _ in products] == [0, 1, 2, 2, 2, *range(3, 9)]
    assert all(torch.equal(sent, products[2][1]) for _, sent in products[3:5])  # type: ignore[arg-type]
    assert len(set(rows)) == len(rows) == 9 * 24, "no mask row was taken for what was sent again"


def test_threads_of_one_client(connect: Any, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = connect("llama")
    model, rows = client.load_model(), taken(monkeypatch)
    with torch.no_grad():
        want = unmasked(site)(batch()).logits

    def work(_: int) -> float:
        with torch.no_grad():
            return max(relative(model(batch()).logits, want) for _ in range(3))

    with ThreadPoolExecutor(8) as threads:
        assert max(threads.map(work, range(8))) < MODEL_NOISE
    assert len(set(rows)) == len(rows) == 8 * 3 * 9 * 24


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_sends_nothing_and_the_parent_goes_on(site: Site) -> None:
    client, (watched,) = site.inproc("llama")
    layer: Any = client.load_model().model.layers[0].mlp.down_proj
    x = torch.randn(1, 64)
    with torch.no_grad():
        layer(x)
    sent = len(watched.seen)

    def child() -> str:
        with torch.no_grad(), pytest.raises(MaskReused):
            layer(x)
        return f"refused, sent {len(watched.seen) - sent}"

    assert in_child(child) == "refused, sent 0"
    with torch.no_grad():
        layer(x)
    assert len(watched.seen) == sent + 1


LEAVES_WITHOUT_CLOSING = """
import sys, torch, warnings
warnings.simplefilter("ignore")
torch.set_num_threads(1)
from tenant_sdk import TenantClient
from wire.frame import Direction
client = TenantClient("inproc:" + sys.argv[1], cache=sys.argv[2])
spec, pool = client.load_model().lm_head._group.spec, client._open().scheme.pool
for _ in range(2):  # twice, so that the worker makes as many ready
    pool.take(spec, Direction.FORWARD, 50000)
print(pool._worker.is_alive(), flush=True)
"""


@pytest.mark.slow
def test_a_program_that_ends_while_the_worker_works_ends_well(folders: dict[str, Path], tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVES_WITHOUT_CLOSING, str(folders["llama"]), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert "Traceback" not in done.stderr
