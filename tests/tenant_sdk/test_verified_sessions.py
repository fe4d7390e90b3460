"""Tests sessions that check their provider: an honest provider passes, and any lie ends the session for good."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from noise.blocks.pool import Block
from noise.verify import FAILED
from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient, embedded
from tenant_sdk.session import Session
from tests.support.false_providers import Liar
from tests.support.lattice import TOY_OPTIONS
from tests.support.mask_site import unrounded
from tests.support.parity import adapted, batch, grads, relative
from tests.support.providers import WrappedModel, make_served_model, serving
from tests.support.reachable import reachable
from tests.support.spies import mask_makers, opened_sessions
from tests.support.tiny_models import make_chat_model
from tests.support.training import QUICK, ROWS, lora
from tests.support.waiting import WAIT_S, end
from wire.errors import ConfigurationError, Unavailable, VeilbaseError, VerificationFailed
from wire.frame import Arithmetic, Call, Direction, Purpose
from wire.ring.seeded_rows import Rows
from wire.transport.inproc import InprocConnection

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
FETCHED = {"mask_options": {"hints": "fetched"}}
"""The option of a client that has the provider compute the hints of its mask, as one without `verify` does."""
Forgery = Callable[[Call, torch.Tensor], torch.Tensor | None]
"""Maps (call, honest reply) to a forged reply, or to None if this call gets the honest reply."""


class Forger(WrappedModel):
    """Plays an honest provider until a forgery is set, and counts its requests."""

    def __init__(self, served_model: ServedModel) -> None:
        super().__init__(served_model)
        self.forge: Forgery = lambda call, reply: None
        self.asked: list[Call] = []
        self.num_forged = 0

    def compute(self, call: Call, rows: Rows, *others: Any) -> torch.Tensor:
        self.asked.append(call)
        reply = self.served_model.compute(call, rows, *others)
        forged = self.forge(call, reply)
        self.num_forged += forged is not None
        return reply if forged is None else forged


def changed(reply: torch.Tensor, by: int = 1) -> torch.Tensor:
    """Returns the reply with one number, anywhere, changed by `by`."""
    forged = reply.clone()
    forged.view(-1)[reply.numel() * 2 // 3] += by
    return forged


def lie(purpose: Purpose, direction: Direction, by: int = 1, after: int = 0) -> Forgery:
    """Returns a forgery that changes one number of every matching reply, except for the first `after` ones."""
    seen = [0]

    def forge(call: Call, reply: torch.Tensor) -> torch.Tensor | None:
        if (call.purpose, call.direction) != (purpose, direction):
            return None
        seen[0] += 1
        return changed(reply, by) if seen[0] > after else None

    return forge


@dataclass
class Site:
    """Makes clients that trust the checkpoint in `folder`. They share one provider, in process or over mTLS, which may
    forge replies."""

    where: Path
    folder: Path
    served_model: ServedModel
    monkeypatch: pytest.MonkeyPatch
    open: ExitStack = field(default_factory=ExitStack)
    sessions: list[Session] = field(init=False)
    """The sessions of the clients, in the order in which they were made."""

    def __post_init__(self) -> None:
        self.sessions = opened_sessions(self.monkeypatch)

    def inproc(self, *handlers: Any, **options: Any) -> TenantClient:
        waiting = list(handlers)
        self.monkeypatch.setattr(embedded, "connect_inproc", lambda *_: InprocConnection(waiting.pop(0)))
        return self.client("inproc:x" if len(handlers) == 1 else ["inproc:x"] * len(handlers), options)

    def mtls(self, handler: Any, **options: Any) -> TenantClient:
        state = StateDir(self.where / "state")
        server = self.open.enter_context(serving(handler, state=state))
        url, identity = f"grpcs://127.0.0.1:{server.port}", self.where / "acme"
        enroll(state, "acme", identity, url)
        return self.client(url, {"identity": identity, **options})

    def client(self, url: Any, options: dict[str, Any]) -> TenantClient:
        """Returns a client. Under a mask its rows go unrounded, unless the options say how, so that the smallest lie is
        one that can be sent, and results can be compared closely."""
        options = {"verify": self.folder, "cache": self.where / "cache", "progress": False, **options}
        return self.open.enter_context(TenantClient(url, **unrounded(options)))


@pytest.fixture
def site(
    tmp_path: Path, chat_folder: Path, served_model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    made = Site(tmp_path, chat_folder, served_model, monkeypatch)
    with made.open:
        yield made


@pytest.fixture
def forger(served_model: ServedModel) -> Forger:
    return Forger(served_model)


def step(model: Any) -> None:
    """Computes one forward and one backward pass through every group."""
    grads(model, batch())


def assert_over(site: Site, model: Any, forger: Forger) -> None:
    """Checks that secrets and connections are gone, and that no further request reaches the provider."""
    session: Any = site.sessions[-1]
    assert session.verifier.failed
    assert reachable(session.verifier, torch.Tensor) == []
    pool = getattr(session.scheme, "pool", None)
    if pool is not None:
        assert pool.ready_bytes == 0
        assert reachable(pool, Block) == []
    forger.forge = lambda call, reply: None  # honest again: too late
    asked, num_sessions = len(forger.asked), len(site.sessions)
    for _ in range(2):
        with pytest.raises(VerificationFailed) as failure:
            step(model)
        assert str(failure.value) == FAILED
    assert len(forger.asked) == asked
    assert len(site.sessions) == num_sessions, "no new session by itself"


# ---- honest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["inproc", "mtls"])
def test_an_honest_provider_passes(site: Site, forger: Forger, transport: str, tmp_path: Path) -> None:
    client = getattr(site, transport)(forger)
    ours = adapted(client.load_model(), lora())
    plain = site.inproc(Forger(site.served_model), mask="off", arithmetic="ring", verify=None)
    theirs = adapted(plain.load_model(), lora())
    with torch.no_grad():
        assert relative(ours(batch()).logits, theirs(batch()).logits) < 1e-4  # MODEL_NOISE of mask_site.py
    step(ours)
    result = client.finetune(ROWS, lora(), tmp_path / "out", **QUICK | {"max_steps": 2})
    assert len(result.losses) == 2
    client.generate("who?", tmp_path / "out", max_new_tokens=4)
    (verifier,) = {one.verifier for one in site.sessions} - {None}
    assert not verifier.failed


def test_long_calls_are_checked_too(site: Site, forger: Forger) -> None:
    """From 160 rows on, the check may add up random subsets of the rows and compare only the sums (noise/verify.py). An
    honest call passes, and a single wrong number in 2,000 rows does not."""
    client = site.inproc(forger)
    layer: Any = client.load_model().lm_head
    with torch.no_grad():
        layer(torch.randn(2000, 32))
        forger.forge = lie(Purpose.PRODUCT, FORWARD)
        with pytest.raises(VerificationFailed):
            layer(torch.randn(2000, 32))


@pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")
def test_hints_that_were_stored_unchecked_are_fetched_again_and_checked(site: Site, served_model: ServedModel) -> None:
    counts = []
    for verify in (None, site.folder, site.folder, None):
        handler = Forger(served_model)
        client = site.inproc(handler, verify=verify, **FETCHED)
        client.fetch_hints(backward=True)
        counts.append(len(handler.asked))
        client.close()
    assert counts == [18, 18, 0, 0]


@pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")
def test_a_forged_hint_that_was_stored_unchecked_is_not_trusted(site: Site, served_model: ServedModel) -> None:
    liar = Forger(served_model)
    liar.forge = lie(Purpose.HINT, FORWARD)
    unchecked = site.inproc(liar, verify=None)
    unchecked.fetch_hints()
    unchecked.close()
    client = site.inproc(Forger(served_model), **FETCHED)
    plain = site.inproc(Forger(served_model), mask="off", arithmetic="ring", verify=None)
    with torch.no_grad():
        assert relative(client.load_model()(batch()).logits, plain.load_model()(batch()).logits) < 1e-4


# ---- lies in the middle of a session ---------------------------------------------------------------------------------

LIES = {
    "a product": lie(Purpose.PRODUCT, FORWARD),
    "a later product": lie(Purpose.PRODUCT, FORWARD, after=5),
    "the highest bit": lie(Purpose.PRODUCT, FORWARD, by=-(2**31)),
    "a backward product": lie(Purpose.PRODUCT, BACKWARD),
    "a hint": lie(Purpose.HINT, FORWARD),
    "a backward hint": lie(Purpose.HINT, BACKWARD),
    "a hint's highest bit": lie(Purpose.HINT, FORWARD, by=-(2**31)),
    "zeros": lambda call, reply: torch.zeros_like(reply),
    "negated": lambda call, reply: -reply if call.purpose is Purpose.PRODUCT else None,
    "rows in another order": lambda call, reply: reply.flip(0) if call.purpose is Purpose.PRODUCT else None,
}


def fresh(name: str) -> Forgery:
    """Returns the forgery of this name, a new one for each test if the forgery counts the replies that it has seen."""
    made = {
        "a later product": lambda: lie(Purpose.PRODUCT, FORWARD, after=5),
    }
    return made[name]() if name in made else LIES[name]


@pytest.mark.parametrize("transport", ["inproc", "mtls"])
@pytest.mark.parametrize("name", LIES)
def test_a_lie_ends_the_session(site: Site, forger: Forger, transport: str, name: str) -> None:
    client = getattr(site, transport)(forger, **FETCHED)
    model = adapted(client.load_model(), lora())
    forger.forge = fresh(name)
    with pytest.raises(VerificationFailed) as failure:
        step(model)
    assert str(failure.value) == FAILED
    assert forger.num_forged >= 1
    assert_over(site, model, forger)


@pytest.mark.parametrize("num_tokens", [1, 12])
@pytest.mark.parametrize("transport", ["inproc", "mtls"])
def test_the_smallest_lie_about_a_short_row_ends_the_session(
    site: Site, forger: Forger, transport: str, num_tokens: int
) -> None:
    """Numbers of 24 bits are multiples of 2^8 in memory, and no smaller difference can be sent."""
    client = getattr(site, transport)(forger, mask_options={"precision": "balanced"})
    model = adapted(client.load_model(), lora())
    with torch.no_grad():
        model(torch.full((1, num_tokens), 3))
        forger.forge = lie(Purpose.PRODUCT, FORWARD, by=1 << 8, after=2)
        with pytest.raises(VerificationFailed) as failure:
            model(torch.full((1, num_tokens), 3))
    assert str(failure.value) == FAILED
    assert_over(site, model, forger)


@pytest.mark.parametrize("transport", ["inproc", "mtls"])
def test_a_lie_about_a_single_token_ends_the_session(site: Site, forger: Forger, transport: str) -> None:
    client = getattr(site, transport)(forger)
    model = adapted(client.load_model(), lora())
    token = torch.tensor([[3]])
    with torch.no_grad():
        model(token)
        forger.forge = lie(Purpose.PRODUCT, FORWARD, after=2)
        with pytest.raises(VerificationFailed) as failure:
            model(token)
    assert str(failure.value) == FAILED
    assert forger.num_forged == 1
    assert_over(site, model, forger)


def test_nothing_of_a_forged_hint_stays_on_disk(site: Site, forger: Forger, tmp_path: Path) -> None:
    client = site.inproc(forger, **FETCHED)
    forger.forge = lie(Purpose.HINT, FORWARD, after=2)
    with pytest.raises(VerificationFailed):
        client.fetch_hints()
    assert len(list((tmp_path / "cache" / "hints").glob("*/*.safetensors"))) == 2, "the two that had passed"
    assert not list((tmp_path / "cache" / "hints").glob("*/*.part"))


def test_a_replayed_reply_ends_the_session(site: Site, forger: Forger) -> None:
    client = site.inproc(forger)
    layer: Any = client.load_model().model.layers[0].mlp.down_proj
    kept: list[torch.Tensor] = []

    def replay(call: Call, reply: torch.Tensor) -> torch.Tensor | None:
        if call.purpose is not Purpose.PRODUCT:
            return None
        kept.append(reply)
        return kept[0] if len(kept) > 1 else None

    forger.forge = replay
    x = torch.randn(3, 64)
    with torch.no_grad():
        layer(x)
        with pytest.raises(VerificationFailed):  # the same x, another mask
            layer(x)


def test_a_reply_of_another_layer_of_the_same_shape(site: Site, forger: Forger, served_model: ServedModel) -> None:
    client = site.inproc(forger)
    model: Any = client.load_model()
    other = next(info.id for info in client.connect().groups if info.name.endswith("layers.1.mlp.down_proj"))
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj(torch.randn(3, 64))

        def compute(call: Call, rows: Rows, *_: Any) -> torch.Tensor:
            return served_model.compute(replace(call, group=other), rows)

        site.monkeypatch.setattr(forger, "compute", compute)
        with pytest.raises(VerificationFailed):
            model.model.layers[0].mlp.down_proj(torch.randn(3, 64))


@pytest.mark.parametrize("mask", ["pad", "off"])
def test_other_masks_are_checked_as_well(site: Site, forger: Forger, mask: str) -> None:
    client = site.mtls(forger, mask=mask, arithmetic="ring")
    model = adapted(client.load_model(), lora())
    step(model)
    forger.forge = lie(Purpose.PRODUCT, BACKWARD)
    with pytest.raises(VerificationFailed, match="session is over"):
        step(model)
    assert_over(site, model, forger)


@pytest.mark.parametrize("liar", [0, 1])
def test_either_provider_of_shares_is_checked(site: Site, served_model: ServedModel, liar: int) -> None:
    handlers = [Forger(served_model), Forger(served_model)]
    client = site.inproc(*handlers, mask="shares")
    model = adapted(client.load_model(), lora())
    step(model)
    handlers[liar].forge = lie(Purpose.PRODUCT if liar == 0 else Purpose.HINT, BACKWARD)
    with pytest.raises(VerificationFailed, match="session is over"):
        step(model)
    assert_over(site, model, handlers[0])
    asked = len(handlers[1].asked)
    with pytest.raises(VeilbaseError):
        step(model)
    assert len(handlers[1].asked) == asked


def test_finetune_and_generate_end_with_the_one_error(site: Site, forger: Forger, tmp_path: Path) -> None:
    client = site.mtls(forger)
    client.fetch_hints(backward=True)
    forger.forge = lie(Purpose.PRODUCT, FORWARD, after=30)
    with pytest.raises(VerificationFailed) as failure:
        client.finetune(ROWS, lora(), tmp_path / "out", **QUICK)
    assert str(failure.value) == FAILED
    assert not (tmp_path / "out").exists()


def test_a_lie_that_two_threads_meet(site: Site, forger: Forger) -> None:
    client = site.mtls(forger)
    model = client.load_model()
    with torch.no_grad():
        model(batch())
    forger.forge = lie(Purpose.PRODUCT, FORWARD, after=9)
    outcomes: list[BaseException | None] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(WAIT_S)
        try:
            with torch.no_grad():
                for _ in range(20):
                    model(batch())
            outcomes.append(None)
        except BaseException as exc:  # noqa: BLE001 - looked at below
            outcomes.append(exc)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(outcomes) == 4
    assert all(isinstance(each, VerificationFailed) for each in outcomes), outcomes
    assert {str(each) for each in outcomes} == {FAILED}, "also to threads whose connection or mask was closed by it"


# ---- afterwards: the one error ---------------------------------------------------------------------------------------


def fail_once(site: Site, forger: Forger, **options: Any) -> tuple[TenantClient, Any]:
    """Makes a client whose session has just ended by a failed check, and returns it with its model."""
    client = site.inproc(forger, **options)
    model = client.load_model()
    forger.forge = lie(Purpose.PRODUCT, FORWARD)
    with torch.no_grad(), pytest.raises(VerificationFailed):
        model(batch())
    forger.forge = lambda call, reply: None
    return client, model


@pytest.mark.parametrize("mask", ["lattice", "pad"])
def test_every_later_call_says_why(site: Site, forger: Forger, mask: str, tmp_path: Path) -> None:
    client, model = fail_once(site, forger, mask=mask)
    asked = len(forger.asked)
    uses: list[Callable[[], Any]] = [
        lambda: model(batch()),
        client.load_model,
        lambda: client.fetch_hints(backward=True),
        lambda: client.prepare(8),
        lambda: client.generate("who?", max_new_tokens=2),
        lambda: client.finetune(ROWS, lora(), tmp_path / "out", **QUICK),
    ]
    for use in uses:
        with pytest.raises(VerificationFailed, match="session is over"):
            use()
    assert len(forger.asked) == asked, "nothing is sent after the failure"


def test_nothing_is_sent_unmasked_after_a_failure(site: Site, forger: Forger) -> None:
    """After a failed check, no call sends anything. The mask `off` has no secrets to delete and an `inproc:` provider
    no connection to close, so the client itself must refuse."""
    client, model = fail_once(site, forger, mask="off", arithmetic="ring")
    asked = len(forger.asked)
    for use in (lambda: model(batch()), client.connect, client.load_model):
        with torch.no_grad(), pytest.raises(VerificationFailed) as failure:
            use()
        assert str(failure.value) == FAILED
    assert len(forger.asked) == asked


def test_explain_tells_of_the_failure(site: Site, forger: Forger, capsys: pytest.CaptureFixture[str]) -> None:
    client, _ = fail_once(site, forger)
    text = client.explain()
    assert FAILED in text
    assert "every reply" not in text
    assert text in capsys.readouterr().out


def test_a_forged_hint_that_the_worker_meets_is_said_to_the_next_caller(site: Site, forger: Forger) -> None:
    """The worker thread, which makes masks ahead of use, fetches a forged hint. The session ends, and the next call
    raises the error."""
    options = TOY_OPTIONS | {"hints": "stream", "hint_ram_bytes": 0}
    others = mask_makers()
    client = site.inproc(forger, mask_options=options)
    layer: Any = client.load_model().model.layers[0].mlp.down_proj
    forger.forge = lie(Purpose.HINT, FORWARD, after=1)
    with torch.no_grad():
        layer(torch.randn(1, 64))
        with contextlib.suppress(VerificationFailed):  # the worker may be faster than this call
            layer(torch.randn(8, 64))  # less than half of a block is left: the worker makes another
        end(mask_makers() - others)
        assert forger.num_forged >= 1
        with pytest.raises(VerificationFailed, match="session is over"):
            layer(torch.randn(1, 64))


# ---- weights that change under a session -----------------------------------------------------------------------------


class Swaps:
    """Plays a provider that is restarted with another model of the same shapes."""

    def __init__(self, site: Site, first: Any, second: Any) -> None:
        self.site, self.first, self.second = site, first, second
        self.state = StateDir(site.where / "state")
        self.server = site.open.enter_context(serving(first, state=self.state))
        self.url, self.identity = f"grpcs://127.0.0.1:{self.server.port}", site.where / "acme"
        enroll(self.state, "acme", self.identity, self.url)

    def swap(self) -> None:
        self.server.stop()
        self.site.open.enter_context(serving(self.second, self.server.port, self.state))


@pytest.fixture
def swaps(site: Site, served_model: ServedModel, tmp_path: Path) -> Swaps:
    return Swaps(
        site, Forger(served_model), Forger(make_served_model(make_chat_model(tmp_path / "twin", seed=1), "int8"))
    )


def step_after_the_swap(site: Site, swaps: Swaps, verify: Path | None) -> VeilbaseError:
    client = site.client(swaps.url, {"identity": swaps.identity, "verify": verify})
    model = client.load_model()
    with torch.no_grad():
        model(batch())
        swaps.swap()
        for _ in range(3):
            try:
                model(batch())
            except Unavailable:  # the end of the old stream
                continue
            except VeilbaseError as exc:
                return exc
    pytest.fail("the other weights were not noticed")


def test_other_weights_after_a_restart_end_a_session_that_verifies(site: Site, swaps: Swaps) -> None:
    """The session ends at the first reply, or earlier, if the client reads the manifest again."""
    assert isinstance(step_after_the_swap(site, swaps, site.folder), VerificationFailed | ConfigurationError)


@pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")
def test_other_weights_after_a_restart_are_an_error_before_anything_is_sent(site: Site, swaps: Swaps) -> None:
    """This is a mistake of the operator and not a lie. Without an error, the hints of the old weights would turn every
    result into noise."""
    failure = step_after_the_swap(site, swaps, None)
    assert isinstance(failure, ConfigurationError)
    assert "other weights" in str(failure)
    assert swaps.second.asked == []


# ---- lies at the beginning -------------------------------------------------------------------------------------------


def refused(site: Site, handler: Any, **options: Any) -> str:
    with pytest.raises(VerificationFailed) as failure:
        site.inproc(handler, **options)
    assert "\n" not in str(failure.value)
    return str(failure.value)


def test_other_weights_are_refused(site: Site, tmp_path: Path) -> None:
    twin = Forger(make_served_model(make_chat_model(tmp_path / "twin", seed=1), "int8"))
    refused(site, twin)
    assert twin.asked == []


@pytest.mark.parametrize("name", ["max_column_norm", "max_row_norm"])
def test_other_norms_are_refused(site: Site, served_model: ServedModel, name: str) -> None:
    """The provider halves the norm that it states for a weight. A tenant would choose too large a scale, and results
    would wrap, so the client refuses."""
    manifest = served_model.manifest()
    first = manifest.groups[0]
    groups = (first.model_copy(update={name: getattr(first, name) * 0.5}), *manifest.groups[1:])
    handler = Forger(ServedModel(replace(served_model.served, manifest=manifest.model_copy(update={"groups": groups}))))
    assert "norm" in refused(site, handler)
    assert handler.asked == []


@pytest.mark.parametrize("file", ["scales.safetensors", "model.safetensors"])
def test_other_scales_or_tensors_are_refused(site: Site, served_model: ServedModel, file: str) -> None:
    """A bundle whose digests are right differs from the checkpoint in one number of a scale α or of an embedding. The
    client refuses it."""
    liar = Liar(served_model)
    tensors = load(liar.files[file])
    name = sorted(tensors)[0]
    tensors[name].view(-1)[-1] *= 1 + 2.0**-20
    liar.files[file] = save(tensors, {"format": "pt"})
    liar.announce()
    refused(site, liar)


@pytest.mark.parametrize("mask", ["lattice", "pad"])
def test_another_template_is_refused(site: Site, served_model: ServedModel, mask: str) -> None:
    liar = Liar(served_model)
    name = "chat_template.jinja" if "chat_template.jinja" in liar.files else "tokenizer_config.json"
    liar.files[name] = liar.files[name].replace(b"user", b"ubus")
    liar.files[name] += b" "
    liar.announce()
    refused(site, liar, mask=mask)


def test_a_refused_client_may_connect_to_an_honest_provider_later(
    site: Site, served_model: ServedModel, tmp_path: Path
) -> None:
    """The client has masked nothing for the lying provider, so no mask is lost."""
    twin = make_served_model(make_chat_model(tmp_path / "twin", seed=1), "int8")
    waiting = [Forger(twin), Forger(served_model)]
    site.monkeypatch.setattr(embedded, "connect_inproc", lambda *_: InprocConnection(waiting.pop(0)))
    client = TenantClient("inproc:x", verify=site.folder, cache=tmp_path / "cache", progress=False)
    with pytest.raises(VerificationFailed):
        client.connect()
    client.connect()
    with torch.no_grad():
        client.load_model()(batch())
    client.close()


def test_what_cannot_be_checked_is_refused(site: Site, chat_folder: Path, forger: Forger) -> None:
    for options in (
        {"mask": "gaussian-pool"},
        {"mask": "off", "arithmetic": "float"},
        {"mask": "off", "weights": "native"},
        {"kappa": 39},
        {"kappa": 65},
        {"verify": "no/such/checkpoint/here"},
    ):
        with pytest.raises(ConfigurationError) as failure:
            site.inproc(forger, **options)
        assert "\n" not in str(failure.value)
    assert forger.asked == []


def test_a_wrong_kappa_is_refused_before_a_provider_is_asked(chat_folder: Path) -> None:
    client = TenantClient("grpc://127.0.0.1:1", verify=str(chat_folder), kappa=39)  # nobody listens there
    with pytest.raises(ConfigurationError, match="kappa is 40 to 64"):
        client.connect()


def test_native_weights_of_a_networked_provider_are_refused_with_verify(site: Site, chat_folder: Path) -> None:
    native = make_served_model(chat_folder, "native")
    with pytest.raises(ConfigurationError, match="ring arithmetic"):
        site.mtls(native, mask="off")


def test_the_check_is_of_what_was_sent(site: Site, forger: Forger, served_model: ServedModel) -> None:
    """The provider returns correct products of other rows than those that were sent, and fails the check."""
    client = site.inproc(forger)
    layer: Any = client.load_model().model.layers[0].mlp.down_proj
    with torch.no_grad():
        layer(torch.randn(3, 64))
        rows = torch.zeros(3, 64, dtype=torch.int32)
        forger.forge = lambda call, reply: served_model.compute(call, rows)
        assert forger.served_model.check(Call(0, FORWARD, Arithmetic.RING), 32)
        with pytest.raises(VerificationFailed):
            layer(torch.randn(3, 64))
