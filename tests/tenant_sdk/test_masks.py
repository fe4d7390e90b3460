"""The masks at work under a model: results, what is sent, and everything that must stop before it is."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from noise.params import LatticeParameters
from noise.scheme import GroupSpec
from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient, embedded
from tenant_sdk.model.build import group_spec, load_alphas
from tenant_sdk.model.planned_calls import NotFiniteWarning
from tenant_sdk.session import NotVerifiedWarning
from tenant_sdk.trust.checkpoint import TrustedCheckpoint
from tests.noise.test_lattice import DEFAULT, bounds, wide
from tests.reference.test_parity import adapted, batch, grads, relative
from tests.tenant_sdk import tiny
from tests.tenant_sdk.tiny import QUICK, ROWS, lora
from wire.errors import (
    ConfigurationError,
    MalformedFrame,
    MaskError,
    RemoteFault,
    Unauthenticated,
    Unavailable,
    WeakParameters,
)
from wire.frame import Call, Direction, Purpose
from wire.manifest import parse_manifest
from wire.ring.seeded_rows import Rows, SeededRows
from wire.transport.inproc import InprocConnection

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
TOY = LatticeParameters("toy", 16, 2, 3.2, 0, "a test", toy=True)
TOY_OPTIONS = {"parameters": TOY, "allow_toy": True}
BF16 = 2.0**-8
MODEL_NOISE = 1e-4
"""Of nine groups in a row, 32 wide. One group's result is off by β·α·√(‖w‖²·21/2 + (2·1536/3)·2^16/12), its own size is
β·α·‖w‖·‖x̃‖/√32, and ‖x̃‖ is nearly 2^31/‖w‖ with ‖w‖ about 400: 1e-5 of itself. Nine of these in a row, if all added up
and none was damped by a residual connection: 1e-4."""
TIMEOUT_S = 60.0


class Watched:
    """A provider that keeps what it receives, as a handler of either transport."""

    def __init__(self, core: ServedModel) -> None:
        self._core = core
        self.seen: list[tuple[Call, Rows]] = []
        self.fail: Callable[[Call], None] = lambda call: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def row_product(self, call: Call) -> None:
        """Every product is `compute`'s."""

    def compute(self, call: Call, rows: Rows, *others: Any) -> torch.Tensor:
        self.seen.append((call, rows.clone() if isinstance(rows, torch.Tensor) else rows))
        self.fail(call)
        return self._core.compute(call, rows, *others)

    def products(self, direction: Direction | None = None) -> list[torch.Tensor]:
        return [
            rows
            for call, rows in self.seen
            if isinstance(rows, torch.Tensor) and direction in (None, call.direction)
        ]  # fmt: skip

    def hints(self) -> list[SeededRows]:
        return [rows for _, rows in self.seen if isinstance(rows, SeededRows)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("masks")
    return {kind: tiny.chat_model(parent / kind, kind) for kind in ("llama", "gpt2")}


@pytest.fixture(scope="module")
def cores(folders: dict[str, Path]) -> dict[str, ServedModel]:
    return {kind: tiny.make_core(folder, "int8") for kind, folder in folders.items()}


@dataclass
class Site:
    """Makes clients of providers that are watched, in process or over mTLS, and closes them."""

    folder: Path
    cores: dict[str, ServedModel]
    monkeypatch: pytest.MonkeyPatch
    open: ExitStack = field(default_factory=ExitStack)
    served: dict[str, Any] = field(default_factory=dict)

    def inproc(self, *kinds: str, **options: Any) -> tuple[TenantClient, list[Watched]]:
        watched = [Watched(self.cores[kind]) for kind in kinds]
        waiting = list(watched)
        self.monkeypatch.setattr(
            embedded, "connect_inproc", lambda url, weights: InprocConnection(waiting.pop(0))  # type: ignore[arg-type]
        )  # fmt: skip
        urls: Any = [f"inproc:{kind}" for kind in kinds]
        return self._client(urls if len(urls) > 1 else urls[0], options), watched

    def mtls(self, *kinds: str, **options: Any) -> tuple[TenantClient, list[Watched]]:
        urls, identities, watched = [], [], []
        for kind in kinds:
            watched.append(Watched(self.cores[kind]))
            name = str(len(self.served))
            state = StateDir(self.folder / f"state{name}")
            server = self.open.enter_context(tiny.serving(watched[-1], state=state))
            self.served[name] = server, state
            urls.append(f"grpcs://127.0.0.1:{server.port}")
            identities.append(self.folder / f"tenant{name}")
            enroll(state, "acme", identities[-1], urls[-1])
        one = len(kinds) == 1
        options = {"identity": identities[0] if one else identities, **options}
        return self._client(urls[0] if one else urls, options), watched

    def _client(self, url: Any, options: dict[str, Any]) -> TenantClient:
        client = TenantClient(url, cache=self.folder / "cache", progress=False, **options)
        return self.open.enter_context(client)


@pytest.fixture
def site(tmp_path: Path, cores: dict[str, ServedModel], monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    made = Site(tmp_path, cores, monkeypatch)
    with made.open:
        yield made


@pytest.fixture(params=["inproc", "mtls"])
def connect(request: Any, site: Site) -> Callable[..., tuple[TenantClient, list[Watched]]]:
    made: Callable[..., tuple[TenantClient, list[Watched]]] = getattr(site, request.param)
    return made


def unmasked(site: Site, kind: str = "llama", **options: Any) -> Any:
    """A model over the same int8 weights without a mask."""
    client, _ = site.inproc(kind, mask="off", arithmetic="ring", **options)
    return client.load_model()


def taken(client: TenantClient, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every mask row that the pool hands out from now on."""
    rows: list[bytes] = []
    pool: Any = client._open().scheme.pool  # type: ignore[attr-defined]
    take = pool.take

    def spy(*arguments: Any) -> Any:
        mask, effect = take(*arguments)
        rows.extend(bytes(row.numpy()) for row in mask)
        return mask, effect

    monkeypatch.setattr(pool, "take", spy)
    return rows


def specs(client: TenantClient) -> dict[int, GroupSpec]:
    manifest = client.connect()
    alphas = load_alphas(client._bundle(), manifest)
    return {info.id: group_spec(info, alphas, torch.device("cpu")) for info in manifest.groups}


# ---- lattice: results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_every_layer_forward_and_backward(connect: Any, site: Site, kind: str, dtype: torch.dtype) -> None:
    """Fused groups, Conv1D and biases, at the default parameters: within what the error and the rounding imply."""
    client, (watched,) = connect(kind, dtype=dtype)
    model, spec_of = client.load_model(), specs(client)
    for info in client.connect().groups:
        spec, served = spec_of[info.id], site.cores[kind].served.groups[info.id]
        generator = torch.Generator().manual_seed(info.id)
        x = torch.randn(2, 5, info.in_features, generator=generator).to(dtype).requires_grad_()
        x.data[0, 0] = 0.0
        x.data[1, 3, 2] = 1e4
        gradient = torch.randn(2, 5, info.out_features, generator=generator).to(dtype)
        before = len(watched.products())
        outputs = [model.get_submodule(layer.name)(x) for layer in info.layers]
        y = torch.cat(outputs, dim=-1)
        y.backward(gradient)
        assert len(watched.products()) == before + 2, "one call each way for all members of a group"
        given = x.detach().float().flatten(0, 1)
        exact, bound, _ = bounds(spec, FORWARD, served.quantised, given, DEFAULT, 128)
        if served.bias is not None:
            exact = exact + wide(served.bias)
        assert y.dtype is dtype
        assert_within(y, exact, bound, dtype)
        back, back_bound, _ = bounds(spec, BACKWARD, served.quantised, gradient.float().flatten(0, 1), DEFAULT, 128)
        assert x.grad is not None
        assert_within(x.grad, back, back_bound, dtype)


def assert_within(got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, dtype: torch.dtype) -> None:
    """Within the bound, and for bf16 within its rounding of product, bias and sum."""
    distance = (wide(got.detach().flatten(0, 1)) - exact).abs()
    fp = 2.0**-22 if dtype is torch.float32 else BF16
    largest = exact.abs().amax() if dtype is torch.bfloat16 else exact.abs()
    assert bool((distance <= bound + fp * largest + 1e-37).all())


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_logits_and_lora_gradients(connect: Any, site: Site, kind: str) -> None:
    targets: Any = ["c_attn", "c_proj", "c_fc"] if kind == "gpt2" else "all-linear"
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, fan_in_fan_out=kind == "gpt2", task_type="CAUSAL_LM")
    client, _ = connect(kind)
    ours, theirs = adapted(client.load_model(), config), adapted(unmasked(site, kind), config)
    with torch.no_grad():
        distance = relative(ours(batch()).logits, theirs(batch()).logits)
    assert 1e-8 < distance < MODEL_NOISE, "equal numbers would mean that nothing was masked"
    got, want = grads(ours, batch()), grads(theirs, batch())
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert relative(got[name], gradient) < 2 * MODEL_NOISE, name  # twice as many groups, there and back


@pytest.mark.parametrize("name", ["conservative", "lean"])
def test_other_parameters(site: Site, name: str) -> None:
    client, _ = site.inproc("llama", mask_options={"parameters": name})
    noise = {"conservative": 1.2, "lean": 10.0}[name] * MODEL_NOISE  # hints of 2048 rows; σ is ten times as large
    with torch.no_grad():
        assert relative(client.load_model()(batch()).logits, unmasked(site)(batch()).logits) < noise


def test_streamed_hints(site: Site, tmp_path: Path) -> None:
    client, (watched,) = site.inproc("llama", mask_options={"hints": "stream"})
    with torch.no_grad():
        assert relative(client.load_model()(batch()).logits, unmasked(site)(batch()).logits) < MODEL_NOISE
    assert watched.hints()
    assert not (tmp_path / "cache" / "hints").exists()


def greedy(model: Any, ids: torch.Tensor) -> Any:
    return model.generate(
        input_ids=ids, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip


def test_generation_with_a_cache_gives_the_unmasked_tokens(
    connect: Any, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = batch(7, (2, 5))
    want = greedy(unmasked(site), prompt)
    top = torch.stack(want.logits).topk(2).values
    margin = float(((top[..., 0] - top[..., 1]) / torch.stack(want.logits).norm(dim=-1)).min())
    assert margin > 10 * MODEL_NOISE, "the test's own premise: no near ties"
    client, (watched,) = connect("llama")
    model, rows = client.load_model(), taken(client, monkeypatch)
    assert torch.equal(greedy(model, prompt).sequences, want.sequences)
    assert {len(sent) for sent in watched.products()} == {10, 2}, "a cache sends one row a token"
    assert len(rows) == len(set(rows))


# ---- lattice: what is sent ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"mask_options": {"background": False}}], ids=["worker", "on use"])
def test_gradient_checkpointing_draws_fresh_rows(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """A recomputed layer sends the same activations (but for noise): under the same mask they would cancel."""
    forwards = []
    for checkpointing in (False, True):
        client, (watched,) = site.inproc("llama", **options)
        rows = taken(client, monkeypatch)
        client.finetune(
            ROWS, lora(), tmp_path / f"out{checkpointing}",
            **QUICK | {"max_steps": 2, "gradient_checkpointing": checkpointing},
        )  # fmt: skip
        sent = [bytes(row.numpy()) for tensor in watched.products() for row in tensor]
        assert len(sent) == len(rows)
        assert len(set(sent)) == len(sent)
        assert len(set(rows)) == len(rows)
        forwards.append(len(watched.products(FORWARD)))
    assert forwards[1] > 1.7 * forwards[0], "nothing was recomputed"


def test_padded_and_zero_rows_are_masked(site: Site) -> None:
    """The pad token's embedding is zero, and so is its normalised row in the first layer: it must not show."""
    client, (watched,) = site.inproc("llama")
    model: Any = client.load_model()
    ids, attention = batch(3, (4, 16)), torch.ones(4, 16, dtype=torch.int64)
    for row, padding in enumerate((0, 5, 9, 15)):
        ids[row, :padding], attention[row, :padding] = 0, 0
    assert not bool(model.get_input_embeddings()(torch.tensor([0])).any()), "the test's own premise"
    with torch.no_grad():
        model(input_ids=ids, attention_mask=attention)
    assert all(len(rows) == 64 for rows in watched.products()), "as many rows as positions, padded or not"
    first = watched.products()[0][attention.flatten() == 0]
    assert len({bytes(row.numpy()) for row in first}) == 29
    zeros = (first == 0).sum()
    assert int(zeros) <= 3  # of 928 uniform numbers
    small = (first.abs() < 2**24).float().mean()
    assert 0.0 <= float(small) < 0.05  # 2^-7 of uniform ones


def test_two_runs_on_the_same_data_share_no_message(site: Site) -> None:
    seen: list[bytes] = []
    for _ in range(2):
        client, (watched,) = site.inproc("llama")
        model = client.load_model()
        with torch.no_grad():
            model(batch())
        seen += [bytes(row.numpy()) for rows in watched.products() for row in rows]
    assert len(set(seen)) == len(seen)


def test_members_with_inputs_of_their_own_have_masks_of_their_own(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client, (watched,) = site.inproc("llama")
    attention: Any = client.load_model().model.layers[0].self_attn
    rows, x = taken(client, monkeypatch), torch.randn(3, 32)
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection(x.clone())
    assert len(watched.products()) == 3
    assert len(set(rows)) == 9


def test_a_call_that_is_split_uses_each_row_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client, (watched,) = site.inproc("llama")
    model, want = client.load_model(), unmasked(site)
    executor: Any = client._open().executor
    executor._limits = executor._limits.model_copy(update={"max_rows": 5})
    rows = taken(client, monkeypatch)
    with torch.no_grad():
        assert relative(model(batch()).logits, want(batch()).logits) < MODEL_NOISE
    assert max(map(len, watched.products())) == 5
    assert len(set(rows)) == len(rows) == 9 * 24


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_zeros_go_out_under_fresh_rows_for_values_that_are_not_finite(
    site: Site, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, (watched,) = site.inproc("llama")
    layer: Any = client.load_model().model.layers[0].mlp.down_proj
    x = torch.randn(3, 64, requires_grad=True)
    y = layer(x)
    rows, sent = taken(client, monkeypatch), len(watched.products())
    x.data[1, 7] = bad
    with pytest.warns(NotFiniteWarning):
        assert not layer(x).any()
    y.backward(torch.full_like(y, bad))
    assert x.grad is not None
    assert not x.grad.any()
    assert list(map(len, watched.products()))[sent:] == [3, 3], "as many rows as there would have been"
    assert len(set(rows)) == len(rows) == 6


# ---- lattice: interruptions, threads, forks --------------------------------------------------------------------------


def test_after_a_restart_of_the_provider_the_next_step_uses_fresh_rows(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, (watched,) = site.mtls("llama")
    model = client.load_model()
    want = unmasked(site)(batch()).logits
    server, state = site.served["0"]
    rows = taken(client, monkeypatch)
    with torch.no_grad():
        model(batch())
        server.stop()
        for _ in range(2):
            with pytest.raises(Unavailable):
                model(batch())
        burnt = len(rows)
        site.open.enter_context(tiny.serving(watched, server.port, state))
        assert relative(model(batch()).logits, want) < MODEL_NOISE
    assert burnt >= 9 * 24 + 2 * 24, "what was masked for a call that failed is burnt"
    assert len(set(rows)) == len(rows) == burnt + 9 * 24


def test_a_request_that_the_provider_fails_is_not_sent_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client, (watched,) = site.mtls("llama")
    model = client.load_model()
    with torch.no_grad():
        model(batch())
        rows, left = taken(client, monkeypatch), [True]

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
        rows, left = taken(client, monkeypatch), [True, True]
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
    model, rows = client.load_model(), taken(client, monkeypatch)
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
    read, write = os.pipe()
    sent = len(watched.seen)
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        try:
            with torch.no_grad():
                layer(x)
            said = "no error"
        except BaseException as exc:  # noqa: BLE001 - the child must end here, whatever happened
            said = f"{type(exc).__name__} {len(watched.seen) - sent}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"MaskReused 0"
    os.waitpid(pid, 0)
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
    assert "Traceback" not in done.stderr


# ---- lattice: seeds, hints, ledger -----------------------------------------------------------------------------------


class Few(LatticeParameters):
    @property
    def max_secrets(self) -> int:
        return 50


def test_an_exhausted_seed_is_renewed_in_the_middle_of_a_run(site: Site, tmp_path: Path) -> None:
    few = Few("few", 16, 2, 3.2, 0, "a test", toy=True)
    client, (watched,) = site.mtls("llama", mask_options={"parameters": few, "allow_toy": True})
    model, want = client.load_model(), unmasked(site)
    with torch.no_grad():
        for _ in range(5):
            assert relative(model(batch()).logits, want(batch()).logits) < MODEL_NOISE
    # The pool reserves ahead: its worker may have drawn a seed and not yet have the hint. It ends its turn with it.
    scheme: Any = client._open().scheme
    scheme.pool.close()
    scheme.pool._worker.join(TIMEOUT_S)
    assert not scheme.pool._worker.is_alive()
    seeds = scheme._ledger.audit()
    client.close()
    assert all(seed.used <= 50 for seed in seeds)
    assert {rows.seed for rows in watched.hints()} == {seed.seed for seed in seeds}
    assert len(seeds) >= 2
    (kept,) = (tmp_path / "cache" / "hints").iterdir()
    assert kept.name.startswith(seeds[-1].seed_id)


def test_hints_are_fetched_once_and_found_again(site: Site) -> None:
    client, (watched,) = site.inproc("llama")
    client.fetch_hints(backward=True)
    assert len(watched.hints()) == 18
    client.fetch_hints(backward=True)
    assert len(watched.hints()) == 18
    again, (other,) = site.inproc("llama")
    again.fetch_hints(backward=True)
    model = again.load_model()
    with torch.no_grad():
        model(batch())
    assert other.hints() == []
    assert all(isinstance(rows, torch.Tensor) for _, rows in other.seen)


def test_models_share_a_cache_and_never_a_hint(site: Site, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    tiny.chat_model(twin, seed=1)  # the same shapes, other weights
    site.cores = {**site.cores, "twin": tiny.make_core(twin, "int8")}
    for kind in ("llama", "twin", "llama"):
        client, _ = site.inproc(kind)
        with torch.no_grad():
            assert relative(client.load_model()(batch()).logits, unmasked(site, kind)(batch()).logits) < MODEL_NOISE


def test_damaged_and_foreign_hint_files_stop_the_call(site: Site, tmp_path: Path) -> None:
    client, _ = site.inproc("llama")
    client.fetch_hints()
    client.close()
    files = sorted((tmp_path / "cache" / "hints").glob("*/*.safetensors"), key=lambda path: path.stat().st_size)
    spoilt = bytearray(files[0].read_bytes())
    spoilt[-1] ^= 0x40
    for data in (bytes(spoilt), files[-1].read_bytes(), b"", b"x" * 100):
        for file in files:
            file.write_bytes(data)
        client, (watched,) = site.inproc("llama")
        with torch.no_grad(), pytest.raises(MaskError, match="delete it, and it will be fetched again") as failure:
            client.load_model()(batch())
        assert "\n" not in str(failure.value)
        assert watched.seen == []


def test_a_ledger_that_is_damaged_or_anothers(site: Site, tmp_path: Path) -> None:
    client, (watched,) = site.mtls("llama")
    ledger, url = tmp_path / "tenant0" / "ledger", client.url
    with torch.no_grad():
        client.load_model()(batch())
    client.close()
    sent, good = len(watched.seen), ledger.read_bytes()
    _, state = site.served["0"]
    enroll(state, "umbrella", tmp_path / "umbrella", url)
    shutil.copy(ledger, tmp_path / "umbrella" / "ledger")
    with pytest.raises(ConfigurationError, match="another identity"):
        TenantClient(url, identity=tmp_path / "umbrella", progress=False).connect()
    for data in (b"", b"garbage\n", good[:-20] + b"x" + good[-19:], good.replace(b'"used":0', b'"used":1', 1)):
        if data == good:
            continue
        ledger.write_bytes(data)
        with pytest.raises(ConfigurationError, match=r"damaged at record \d+") as failure:
            TenantClient(url, identity=tmp_path / "tenant0", progress=False).connect()
        assert "\n" not in str(failure.value)
    assert len(watched.seen) == sent


def test_each_identity_has_its_own_ledger_and_the_key_stays_private(site: Site, tmp_path: Path) -> None:
    client, _ = site.mtls("llama")
    client.fetch_hints()
    ledger = tmp_path / "tenant0" / "ledger"
    assert ledger.stat().st_mode & 0o077 == 0
    assert not (tmp_path / "cache" / "ledger").exists()
    inproc, _ = site.inproc("llama")
    inproc.connect()
    assert inproc._open().scheme._ledger._path == tmp_path / "cache" / "ledger"  # type: ignore[attr-defined]


# ---- pad and shares -------------------------------------------------------------------------------------------------


def both_ways(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    peft_model = adapted(model, lora())
    with torch.no_grad():
        logits = peft_model(batch()).logits
    return logits, grads(peft_model, batch())


def assert_same_bits(got: Any, want: Any) -> None:
    assert torch.equal(got[0], want[0])
    assert got[1].keys() == want[1].keys()
    assert all(torch.equal(got[1][name], want[1][name]) for name in want[1])


def test_pad_is_off_bit_for_bit(connect: Any, site: Site, folders: dict[str, Path], monkeypatch: Any) -> None:
    client, (watched,) = connect("llama", mask="pad", verify=folders["llama"])
    client.prepare(64, backward=True)
    made = client._open().scheme.pool.ready_bytes  # type: ignore[attr-defined]
    features = sum(info.in_features + info.out_features for info in client.connect().groups)
    assert made == 2 * 64 * features * 4
    model, rows = client.load_model(), taken(client, monkeypatch)
    assert_same_bits(both_ways(model), both_ways(unmasked(site)))
    assert watched.hints() == []
    sent = [bytes(row.numpy()) for tensor in watched.products() for row in tensor]
    assert len(set(sent)) == len(sent) == len(rows) == len(set(rows))


def test_pad_needs_the_weights(site: Site) -> None:
    with pytest.raises(ConfigurationError, match="verify="):
        site.inproc("llama", mask="pad")


def test_shares_are_off_bit_for_bit_and_split_as_promised(connect: Any, site: Site) -> None:
    client, (first, second) = connect("llama", "llama", mask="shares")
    assert_same_bits(both_ways(client.load_model()), both_ways(unmasked(site)))
    assert first.seen
    assert all(isinstance(rows, torch.Tensor) for _, rows in first.seen), "the first never sees a seed"
    assert all(isinstance(rows, SeededRows) for _, rows in second.seen), "the second never sees rows"
    assert {call.purpose for call, _ in first.seen} == {Purpose.PRODUCT}
    assert len(first.seen) == len(second.seen)
    seeds = [rows.seed for rows in second.hints()]
    assert len(set(seeds)) == len(seeds)
    sent = [bytes(row.numpy()) for tensor in first.products() for row in tensor]
    assert len(set(sent)) == len(sent)


def test_shares_verified(site: Site, folders: dict[str, Path]) -> None:
    client, _ = site.inproc("llama", "llama", mask="shares", verify=folders["llama"])
    assert_same_bits(both_ways(client.load_model()), both_ways(unmasked(site)))


def test_shares_of_two_models_are_refused(site: Site, tmp_path: Path) -> None:
    tiny.chat_model(tmp_path / "twin", seed=1)
    site.cores = {**site.cores, "twin": tiny.make_core(tmp_path / "twin", "int8")}
    for kinds in (("llama", "twin"), ("llama", "gpt2")):
        with pytest.raises(ConfigurationError, match="same weights"):
            site.mtls(*kinds, mask="shares")


def test_each_provider_of_shares_has_its_own_identity(site: Site) -> None:
    client, _ = site.mtls("llama", "llama", mask="shares")
    urls, identities = client._plan.urls, client._plan.identities
    client.close()
    for given, error in (
        (identities[::-1], Unauthenticated),
        ([identities[0]] * 2, ConfigurationError),
        (identities[:1], ConfigurationError),
    ):
        with pytest.raises(error), TenantClient(list(urls), identity=list(given), mask="shares", progress=False):
            pass


def test_one_provider_is_not_two_providers_of_shares(site: Site, tmp_path: Path) -> None:
    """It would have x̃ − p and p. By its address or by its authority, also in another folder and under another name."""
    client, (first, second) = site.mtls("llama", "llama", mask="shares")
    (a, b), (acme, other) = client._plan.urls, client._plan.identities
    client.close()
    assert acme is not None
    copied = Path(shutil.copytree(acme, tmp_path / "copied"))
    (copied / "ca.pem").write_bytes(b"a comment, as some tools write it\n" + (acme / "ca.pem").read_bytes())
    for urls, given in (([a, a], [acme, acme]), ([a, f"{a.upper()}/"], [acme, other]), ([a, b], [acme, copied])):
        with pytest.raises(ConfigurationError, match="one twice"):
            TenantClient(urls, identity=given, mask="shares", progress=False).connect()
    assert first.seen == second.seen == []


def test_one_broken_provider_of_shares_is_one_error(site: Site) -> None:
    client, _ = site.mtls("llama", "llama", mask="shares")
    model = client.load_model()
    with torch.no_grad():
        model(batch())
        site.served["1"][0].stop()
        with pytest.raises(Unavailable):
            model(batch())


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("urls", "options", "sentence"),
    [
        (1, {"mask": "shares"}, "exactly two provider URLs"),
        (3, {"mask": "shares"}, "exactly two provider URLs"),
        (2, {"mask": "lattice"}, "every other mask one"),
        (2, {}, "every other mask one"),
        (1, {"mask": "lattice", "arithmetic": "float"}, "ring arithmetic only"),
        (1, {"mask": "pad", "arithmetic": "float", "verify": "x"}, "ring arithmetic only"),
        (2, {"mask": "shares", "arithmetic": "float"}, "ring arithmetic only"),
        (1, {"mask": "gaussian-pool", "arithmetic": "ring"}, "float arithmetic only"),
        (1, {"mask": "gaussian-pool", "verify": "x"}, "verify= needs ring arithmetic"),
        (1, {"mask": "off", "arithmetic": "float", "verify": "x"}, "verify= needs ring arithmetic"),
        (1, {"arithmetic": "complex"}, "ring or float"),
    ],
)
def test_pairs_that_do_not_exist_are_refused_before_the_network(
    tmp_path: Path, urls: int, options: dict[str, Any], sentence: str
) -> None:
    """Nobody listens at port 1: whoever went there first would say so."""
    enroll(StateDir(tmp_path / "state"), "acme", tmp_path / "acme", "grpcs://127.0.0.1:1")
    given = ["grpcs://127.0.0.1:1"] * urls
    client = TenantClient(given, identity=[tmp_path / "acme"] * urls, progress=False, **options)
    with pytest.raises(ConfigurationError, match=sentence):
        client.connect()
    assert not (tmp_path / "acme" / "ledger").exists()


@pytest.mark.parametrize(
    ("mask_options", "error"),
    [
        ({"parameters": TOY}, WeakParameters),
        ({"parameters": LatticeParameters("own", 512, 2, 3.2, 100, "me")}, WeakParameters),
        ({"parameters": LatticeParameters("own", 512, 3, 1.0, 161, "me")}, WeakParameters),
        ({"parameters": LatticeParameters("own", 512, 3, 3.2, 200, "me")}, WeakParameters),
        ({"parameters": "tiny"}, ConfigurationError),
        ({"sigma": 1.0}, ConfigurationError),
        ({"pool_size": 8}, ConfigurationError),
        ({"hints": "memory"}, ConfigurationError),
        ({"hint_bits": 23}, ConfigurationError),
        ({"hint_bits": 16}, ConfigurationError),
        ({"hint_ram_bytes": -1}, ConfigurationError),
    ],
    ids=str,
)
def test_weak_parameters_and_unknown_options(site: Site, mask_options: dict[str, Any], error: Any) -> None:
    with pytest.raises(error) as failure:
        site.inproc("llama", mask_options=mask_options)
    assert "\n" not in str(failure.value)


def test_a_wrong_option_is_said_before_the_checkpoint_is_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a large checkpoint takes minutes."""
    monkeypatch.setattr(TrustedCheckpoint, "open", lambda name: pytest.fail("the checkpoint was opened"))
    with pytest.raises(WeakParameters):
        site.inproc("llama", verify="some/where", mask_options={"parameters": TOY})


@pytest.mark.parametrize("change", [{"max_column_norm": 1e9}, {"max_row_norm": 0.0}, {"max_column_norm": float("nan")}])
def test_norms_out_of_range_are_refused(site: Site, change: dict[str, float]) -> None:
    parsed = json.loads(site.cores["llama"].manifest().to_bytes())
    parsed["groups"][0].update(change)
    with pytest.raises(MalformedFrame, match="not valid"):
        parse_manifest(json.dumps(parsed).encode())


# ---- words ----------------------------------------------------------------------------------------------------------


def explained(client: TenantClient) -> dict[str, str]:
    return {name.strip(): text for name, _, text in (line.partition("  ") for line in client.explain().splitlines())}


def test_explain_lattice(site: Site, capsys: pytest.CaptureFixture[str], folders: dict[str, Path]) -> None:
    client, _ = site.inproc("llama")
    client.fetch_hints(backward=True)
    said = explained(client)
    assert capsys.readouterr().out.strip(), "explain prints"
    groups = client.connect().groups
    up, down = 4 * sum(info.in_features for info in groups), 4 * sum(info.out_features for info in groups)
    assert "lattice" in said["scheme"]
    assert "Module-LWE" in said["assumption"]
    assert "3x512" in said["parameters"]
    assert "sigma=3.2" in said["parameters"]
    assert "161 estimated" in said["bits"]
    assert f"of {2**33}" in said["secrets"]
    assert "token counts" in said["visible"]
    assert "who you are" in said["visible"]
    assert f"forward {up / 1e3:.1f} kB up, {down / 1e3:.1f} kB down" in said["bytes per token"]
    assert f"backward {down / 1e3:.1f} kB up, {up / 1e3:.1f} kB down" in said["bytes per token"]
    stored = client._open().scheme._hints.stored_bytes()  # type: ignore[attr-defined]
    assert said["hints"].strip().startswith(f"{stored / 1e6:.0f} MB on disk, of all models and seeds, at 24 bits")
    assert "in memory only" in said["pool"]
    assert "not verified" in said["verification"]
    assert "honest-but-curious" in said["verification"]
    assert "not been audited" in said["status"]
    assert "unbreakable" not in " ".join(said.values())
    verified, _ = site.inproc("llama", verify=folders["llama"], kappa=50)
    assert "2^-50" in explained(verified)["verification"]
    assert str(folders["llama"]) in explained(verified)["verification"]
    streamed, _ = site.inproc("llama", mask_options={"hints": "stream"})
    assert "streamed" in explained(streamed)["hints"]


def test_explain_the_others(site: Site, folders: dict[str, Path]) -> None:
    groups = site.cores["llama"].manifest().groups
    up, down = 4 * sum(info.in_features for info in groups), 4 * sum(info.out_features for info in groups)
    pad = explained(site.inproc("llama", mask="pad", verify=folders["llama"])[0])
    assert "pseudorandom" in pad["assumption"]
    assert "in memory only" in pad["pool"]
    shares = explained(site.inproc("llama", "llama", mask="shares")[0])
    assert "do not collude" in shares["assumption"]
    assert f"{up / 1e3:.1f} kB up, {2 * down / 1e3:.1f} kB down" in shares["bytes per token"]
    for said in (pad, shares):
        assert said["bits"].strip() == "256-bit keys"
        assert {"secrets", "visible", "verification", "protected", "bytes per token"} <= said.keys()
    off = explained(site.inproc("llama", mask="off")[0])
    assert off["protected"].strip() == "nothing"
    assert "trusted" in off["assumption"]
    with pytest.warns(UserWarning, match="not private"):
        gaussian, _ = site.inproc("llama", mask="gaussian-pool")
    said = explained(gaussian)
    assert said["protected"].strip() == "nothing"
    assert "none holds" in said["assumption"]


def test_what_the_second_provider_announces_counts_too(site: Site) -> None:
    core = site.cores["llama"]
    manifest = core.manifest().model_copy(update={"recording": True})
    site.cores = {**site.cores, "records": ServedModel(replace(core.served, manifest=manifest))}
    assert "recording" in explained(site.inproc("llama", "records", mask="shares")[0])
    assert "recording" not in explained(site.inproc("llama", "llama", mask="shares")[0])
    manifest = core.manifest().model_copy(update={"arithmetic": ("float",)})
    site.cores = {**site.cores, "float": ServedModel(replace(core.served, manifest=manifest))}
    with pytest.raises(ConfigurationError, match="does not offer ring"):
        site.inproc("llama", "float", mask="shares")


@pytest.mark.filterwarnings("default::tenant_sdk.session.NotVerifiedWarning")
def test_one_warning_without_verify_and_none_with(site: Site, folders: dict[str, Path]) -> None:
    for mask, kinds in (("lattice", ("llama",)), ("shares", ("llama", "llama"))):
        for verify, expected in ((None, 1), (folders["llama"], 0)):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                client, _ = site.inproc(*kinds, mask=mask, verify=verify)
                client.connect()
                client.load_model()
                client.explain()
            about = [each for each in seen if issubclass(each.category, NotVerifiedWarning)]
            assert len(about) == expected
            if about:
                assert "honest-but-curious" in str(about[0].message)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        site.inproc("llama", mask="off")
    assert not [each for each in seen if issubclass(each.category, NotVerifiedWarning)]


def test_nothing_secret_is_pickled_copied_or_printed(site: Site, folders: dict[str, Path]) -> None:
    client, _ = site.inproc("llama", verify=folders["llama"])
    model = client.load_model()
    with torch.no_grad():
        model(batch())
    session = client._open()
    scheme: Any = session.scheme
    block = next(shelf.blocks[0] for shelf in scheme.pool._shelves.values() if shelf.blocks)
    for secret in (client, session, scheme, scheme.pool, block, session.verifier, session.executor, model):
        with pytest.raises((TypeError, pickle.PicklingError, AttributeError)):
            pickle.dumps(secret)
    for secret in (scheme, scheme.pool, block, session.verifier):
        with pytest.raises(TypeError):
            copy.deepcopy(secret)
    assert copy.deepcopy(session.executor) is session.executor
    numbers = [str(int(number)) for number in (*block.mask[-1], *block.effect[-1]) if abs(int(number)) > 10**5]
    seed = scheme._epoch.seed.seed
    for text in map(repr, (client, session, scheme, scheme.pool, block, session.verifier, session.executor)):
        assert not any(number in text for number in numbers)
        assert seed.hex() not in text
        assert repr(seed) not in text


def test_prepared_tokens_are_found_ready(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    client, _ = site.inproc("llama", mask_options={"background": False})
    client.prepare(100, backward=True)
    scheme: Any = client._open().scheme
    assert scheme.pool.ready_bytes == 2 * 512 * 4 * sum(
        info.in_features + info.out_features for info in client.connect().groups
    )
    monkeypatch.setattr(scheme.pool, "_make", lambda *arguments: pytest.fail("masks were to be ready"))
    model = adapted(client.load_model(), lora())
    model(batch(), labels=batch()).loss.backward()


def test_more_tokens_than_the_budget_holds_are_shared_fairly(site: Site) -> None:
    """No layer goes without so that another may have more than a step can use."""
    features = sum(info.in_features + info.out_features for info in site.cores["llama"].manifest().groups)
    client, _ = site.inproc(
        "llama", mask_options={"background": False, "pool_bytes": 3 * 16 * 4 * features} | TOY_OPTIONS
    )
    client.prepare(10_000)
    pool: Any = client._open().scheme.pool  # type: ignore[attr-defined]
    assert {shelf.num_rows for shelf in pool._shelves.values()} == {48}
    assert pool.ready_bytes == 3 * 16 * 4 * features
