"""Tests a tenant whose rows are on a GPU, from the start or after the model was moved: results are the same as on the
CPU.

Every test also runs for the device "cpu", which shows that the test itself is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from noise.hints.store import HintStore
from noise.ledger.ledger import Ledger
from noise.masks.lattice import Lattice
from noise.masks.off import Off
from noise.masks.pad import Pad
from tenant_sdk import TenantClient
from tests.support.cuda import cpu_and
from tests.support.lattice import BACKWARD, DEFAULT, FORWARD, Provider, bounds, rows_of, sent, weight_of, wide
from tests.support.parity import RELATIVE, adapted, batch, grads, relative
from tests.support.tiny_models import make_chat_model
from tests.support.training import lora
from wire.frame import Arithmetic, Direction
from wire.ring import coding

pytestmark = pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning")

DEVICES = cpu_and("cuda")
MASKS: dict[str, dict[str, Any]] = {
    "lattice": {"mask": "lattice", "mask_options": {"precision": "exact"}},
    "off": {"mask": "off", "arithmetic": "ring"},
}


# ---- masks of rows --------------------------------------------------------------------------------------------------


@pytest.fixture
def provider() -> Provider:
    return Provider([weight_of(40, 24, 1)])


@pytest.fixture(params=["lattice", "pad", "off"])
def scheme(request: Any, tmp_path: Path, provider: Provider) -> Iterator[Any]:
    if request.param == "off":
        yield Off(Arithmetic.RING)
        return
    ledger = Ledger.open(tmp_path / "ledger", "tenant")
    made: Any = (
        Pad(provider.weights.__getitem__, lambda: ledger.fresh_seed("pad"), background=False, on_close=ledger.close)
        if request.param == "pad"
        else Lattice(DEFAULT, ledger, HintStore(tmp_path / "hints", 8), background=False)
    )
    made.bind(provider.effect)
    yield made
    made.close()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_rows_are_masked_and_unmasked_where_they_are(
    scheme: Any, provider: Provider, device: str, direction: Direction, num_rows: int
) -> None:
    """This is what `RemoteExecutor` does: rows are copied to the CPU before they are sent, and replies are copied to
    the device of the rows."""
    spec = provider.groups[0]
    rows = rows_of(num_rows, spec.widths(direction)[0])
    exact, bound, _ = bounds(spec, direction, provider.weights[0], rows, DEFAULT, 128)
    masked = scheme.mask(spec, direction, rows.to(device))
    reply = coding.product(sent(masked).to("cpu"), provider.matrix(masked.messages[0].call))
    found = masked.unmask([reply.to(device)])
    assert (found.device.type, found.dtype, found.shape) == (device, torch.float32, exact.shape)
    assert bool(((wide(found.to("cpu")) - exact).abs() <= bound).all())


# ---- a whole model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, make_chat_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def load(folder: tuple[str, Path], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Provides a function that loads an adapted model. The adapter is drawn on the CPU, so that it is the same for
    every device."""
    kind, path = folder
    targets: Any = ["c_attn", "c_proj", "c_fc"] if kind == "gpt2" else "all-linear"
    config = lora(target_modules=targets, fan_in_fan_out=kind == "gpt2")
    with ExitStack() as stack:

        def run(mask: str, **options: Any) -> Any:
            client = TenantClient(f"inproc:{path}", cache=tmp_path / "cache", progress=False, **MASKS[mask], **options)
            return adapted(stack.enter_context(client).load_model(), config)

        yield run


def assert_same(model: Any, reference: Any, device: str) -> None:
    """Checks that logits and LoRA gradients are the same."""
    ids = batch()
    with torch.no_grad():
        logits = model(ids.to(device)).logits
        assert logits.device.type == device
        assert relative(logits.cpu(), reference(ids).logits) < RELATIVE
    got, want = grads(model, ids.to(device)), grads(reference, ids)
    assert got.keys() == want.keys()
    assert len(want) > 8
    for name, gradient in want.items():
        assert got[name].device.type == device
        assert relative(got[name].cpu(), gradient) < RELATIVE, name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", MASKS)
def test_a_moved_model_gives_the_same_logits_and_gradients(load: Callable[..., Any], mask: str, device: str) -> None:
    """The model is loaded for the CPU and then moved, as the Trainer of transformers does."""
    assert_same(load(mask).to(device), load("off"), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", MASKS)
def test_a_model_loaded_there_gives_the_same(load: Callable[..., Any], mask: str, device: str) -> None:
    model = load(mask, device=device)
    assert next(model.parameters()).device.type == device
    assert_same(model, load("off"), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", MASKS)
def test_there_and_back(load: Callable[..., Any], mask: str, device: str) -> None:
    """A model is moved to the device, to the CPU and back to the device, and its results stay the same. On the CPU,
    single rows use the compiled code."""
    model, reference, token = load(mask, device=device), load("off"), batch(4, (1, 1))
    for place in (device, "cpu", device):
        model.to(place)
        with torch.no_grad():
            found = model(token.to(place)).logits
            assert found.device.type == place
            assert relative(found.cpu(), reference(token).logits) < RELATIVE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mask", MASKS)
def test_the_default_device_changes_nothing(load: Callable[..., Any], mask: str, device: str) -> None:
    """Scripts use `torch.set_default_device` to move everything. For a model on the CPU, the default device is `meta`,
    on which tensors have no data."""
    ids = batch()
    model = load(mask).to(device)
    with torch.no_grad():
        want = load("off")(ids).logits
        model(ids.to(device))  # fetches hints: the provider, in this process, is not what is tested
        torch.set_default_device("meta" if device == "cpu" else device)
        try:
            found = model(ids.to(device)).logits
        finally:
            torch.set_default_device(None)
    assert relative(found.cpu(), want) < RELATIVE
