"""Tests that bad input to an engine is refused in one line, that a neighbour's answer stays what it is alone, and that
the provider is sent nothing but the neighbour's rows.

The engine and the folders of adapters are real. The neighbour is in the middle of a step when the bad input comes, and
the rows that the provider gets are compared number by number, since they have no mask here.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tenant_sdk import Speculation, TenantClient
from tenant_sdk.plain_values import WrongOption
from tenant_sdk.serving.adapters import AdapterStore
from tenant_sdk.serving.adapters.reader import CONFIG, WEIGHTS
from tenant_sdk.serving.engine import Engine
from tenant_sdk.testing import ScriptedProvider, character_tokenizer
from tests.support.engines import TIMEOUT_S, Gate
from tests.support.lattice import PLAIN, TOY_MASK
from tests.support.saved_adapters import save_adapter, save_kind
from tests.support.spies import before_requests
from wire.errors import ConfigurationError, VeilbaseError

pytestmark = [
    pytest.mark.filterwarnings("ignore::tenant_sdk.session.NotVerifiedWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
NUMBER = 31337.5
"""A number that is in every bad adapter, so that a text that quotes a number of the file would show it."""
NEIGHBOUR: dict[str, Any] = {"prompt": "why so?", "adapter": "good", "max_new_tokens": 6, "eos_token_id": []}
BAD_PROMPT = "xyzzy"
TARGETS = ["q_proj", "v_proj", "down_proj"]
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
HOST_BYTES = 40_000
"""A host tier that has room for the good adapter and for none of rank 64."""


Opened = tuple[TenantClient, list[torch.Tensor]]
"""A client, and all rows that it has sent."""


@pytest.fixture(scope="module")
def opened(folder: Path) -> Iterator[Opened]:
    sent: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, ScriptedProvider(model=folder) as provider:
        before_requests(patch, lambda call, payload: sent.append(payload.rows(call)))
        with provider.client(**PLAIN) as client:
            yield client, sent


# ---- bad adapters ----------------------------------------------------------------------------------------------------


class Touches:
    """Is pickled as a call that makes a file, which shows that the pickle was loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def changed(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Changes the tensors of an adapter, after `NUMBER` was put into each of them."""
    tensors = load_file(path / WEIGHTS)
    for each in tensors.values():
        each.view(-1)[1] = NUMBER
    change(tensors)
    save_file(tensors, path / WEIGHTS)


def unchanged(tensors: dict[str, torch.Tensor]) -> None:
    """Leaves the tensors as they are."""


def lora(change: Callable[[dict[str, torch.Tensor]], object] = unchanged, **settings: Any) -> Callable[..., None]:
    """Returns a function that saves a LoRA adapter whose tensors are changed."""

    def save(model: Any, path: Path) -> None:
        save_adapter(model, path, seed=2, target_modules=TARGETS, **settings)
        changed(path, change)

    return save


def of_another_name(model: Any, path: Path) -> None:
    lora()(model, path)
    settings = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps({**settings, "base_model_name_or_path": "acme/elsewhere"}))


def twice(tensors: dict[str, torch.Tensor]) -> None:
    name = f"{LAYER}.lora_A.weight"
    tensors[name.removeprefix("base_model.model.")] = tensors[name].clone()


def of_other_shapes(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAYER}.lora_A.weight"] = torch.full((8, 48), NUMBER)


def pickle_alone(model: Any, path: Path) -> None:
    lora()(model, path)
    (path / WEIGHTS).unlink()
    (path / "adapter_model.bin").write_bytes(pickle.dumps(Touches(path / "loaded")))


def pickle_by_another_name(model: Any, path: Path) -> None:
    lora()(model, path)
    (path / WEIGHTS).write_bytes(pickle.dumps(Touches(path / "loaded")))


def with_nan(ending: str, value: float = torch.nan) -> Callable[[dict[str, torch.Tensor]], None]:
    """Returns a change that puts NaN, or another value, into the first tensor whose name has this ending."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        next(each for name, each in tensors.items() if name.endswith(ending)).view(-1)[0] = value

    return change


def ia3_with_nan(model: Any, path: Path) -> None:
    save_kind(model, "llama", path, "IA3", 2, target_modules=["v_proj", "down_proj"])
    changed(path, with_nan("ia3_l"))


def larger_file(model: Any, path: Path) -> None:
    """Makes the weights longer than any that this store reads, without taking disk."""
    lora()(model, path)
    with (path / WEIGHTS).open("r+b") as file:
        file.truncate(16 << 20)


BAD_ADAPTERS: dict[str, tuple[Callable[[Any, Path], None], str]] = {
    "another-base": (of_another_name, "was trained on 'acme/elsewhere', and this model is"),
    "other-shapes": (lora(of_other_shapes), "is for another base: .* they have the shapes"),
    "a-factor-twice": (lora(twice), "twice, with and without base_model.model. or another ending"),
    "pickle": (pickle_alone, "keeps its weights in a pickle, which is not opened: save it as safetensors"),
    "renamed-pickle": (pickle_by_another_name, "has an adapter_model.safetensors that is no such file"),
    "nan": (lora(with_nan("lora_B.weight")), "holds NaN or infinite numbers"),
    "infinity": (lora(with_nan("lora_A.weight", torch.inf)), "holds NaN or infinite numbers"),
    "ia3-nan": (ia3_with_nan, "holds NaN or infinite numbers"),
    "dora-nan": (lora(with_nan("magnitude_vector"), use_dora=True), "magnitudes of .* that are no numbers"),
    "large-rank": (lora(r=264), "has the rank 264: the device tier takes up to 256"),
    "large-numbers": (lora(r=64), r"takes [0-9.]+ MB: the host tier has [0-9.]+ MB"),
    "large-file": (larger_file, "has 16777216 bytes of weights: at most 8468608 fit"),
    "none": (lambda model, path: None, "there is no adapter 'none'"),
}
"""Bad adapters by name: a function that saves one, and what is said of it."""
IN_A_SMALL_TIER = {"large-numbers", "large-file"}
"""The adapters that are refused only because the host tier is small."""


@pytest.fixture(scope="module")
def root(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, model = tmp_path_factory.mktemp("adapters"), AutoModelForCausalLM.from_pretrained(folder)
    save_adapter(model, root / "good", seed=1, target_modules=TARGETS)
    for name, (save, _) in BAD_ADAPTERS.items():
        save(model, root / name)
    return root


# ---- beside a neighbour ----------------------------------------------------------------------------------------------


class Neighbour:
    """Compares what a neighbour gets and sends beside bad input with what it gets and sends alone."""

    def __init__(self, client: TenantClient, sent: list[torch.Tensor], root: Path) -> None:
        self.client, self.sent, self.root = client, sent, root
        sent.clear()
        with Engine(client, root) as engine:
            self.alone = engine.submit(**NEIGHBOUR).result(TIMEOUT_S)
        self.sent_alone = [*sent]
        assert self.sent_alone

    def beside(self, submit: Callable[[Engine], Any], **options: Any) -> list[VeilbaseError]:
        """Gives bad input to an engine in the middle of one of the neighbour's steps, and again after its answer.

        Args:
            submit: gives the bad input, which is refused at once, or whose answer fails later.
            options: options of the engine.

        Returns:
            Both errors of the bad input.
        """
        gate = Gate()
        self.sent.clear()
        with Engine(self.client, **{"make_slots": self.root, **options}) as engine:
            answer = engine.submit(**NEIGHBOUR, logits_processor=[gate])
            assert gate.reached.wait(TIMEOUT_S)
            failures = [failure_of(lambda: submit(engine), gate.open.set)]
            assert answer.result(TIMEOUT_S) == self.alone
            failures.append(failure_of(lambda: submit(engine)))
        assert len(self.sent) == len(self.sent_alone)
        assert all(map(torch.equal, self.sent, self.sent_alone))
        return failures


def failure_of(submit: Callable[[], Any], then: Callable[[], None] = lambda: None) -> VeilbaseError:
    """Returns the error of bad input, which is raised by `submit` or by the answer. `then` is called after `submit`."""
    try:
        answer = submit()
    except VeilbaseError as exc:
        return exc
    finally:
        then()
    with pytest.raises(VeilbaseError) as failed:
        answer.result(TIMEOUT_S)
    return failed.value


def check(failures: list[VeilbaseError], said: str) -> None:
    """Checks that errors are of the stated class and of one line, and quote neither numbers of a file nor a prompt."""
    for failure in failures:
        text = str(failure)
        assert type(failure) in (ConfigurationError, WrongOption)
        assert re.search(said, text), text
        assert "\n" not in text
        assert str(int(NUMBER)) not in text
        assert BAD_PROMPT not in text


@pytest.fixture(scope="module")
def neighbour(opened: Opened, root: Path) -> Neighbour:
    return Neighbour(*opened, root)


@pytest.mark.parametrize("name", BAD_ADAPTERS)
def test_a_bad_adapter(neighbour: Neighbour, name: str) -> None:
    def small(model: Any, wake: Callable[[], None]) -> AdapterStore:
        return AdapterStore(model, neighbour.root, on_ready=wake, host_bytes=HOST_BYTES)

    options = {"make_slots": small} if name in IN_A_SMALL_TIER else {}
    failures = neighbour.beside(lambda engine: engine.submit(BAD_PROMPT, name, 6), **options)
    check(failures, f"the adapter {name} .*{BAD_ADAPTERS[name][1]}" if name != "none" else BAD_ADAPTERS[name][1])
    assert not (neighbour.root / name / "loaded").exists(), "the pickle was loaded"


LARGE_KV = {"max_new_tokens": 100}
BAD_REQUESTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "prompt beyond the context": (
        {"prompt": BAD_PROMPT * 30},
        {},
        "the prompt has 153 tokens; prompt and answer together may have 128: shorten the prompt by at least 26",
    ),
    "answer beyond the context": ({"max_new_tokens": 125}, {}, "together they may have 128: ask for at most"),
    "beyond the engine's context": ({"max_new_tokens": 40}, {"max_context": 40}, "may have 40 here"),
    "more than the KV budget": (LARGE_KV, {"kv_bytes": 20_000}, "bytes of KV, the engine has 20000"),
    "more than the KV budget, adapted": (
        {**LARGE_KV, "adapter": "good"},
        {"kv_bytes": 20_000},
        "bytes of KV, the engine",
    ),
}
"""Bad requests: arguments of `submit`, options of the engine, and what is said."""


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request(neighbour: Neighbour, case: str) -> None:
    request, options, said = BAD_REQUESTS[case]
    check(neighbour.beside(lambda engine: engine.submit(**{"prompt": BAD_PROMPT, **request}), **options), said)


# ---- engines that cannot be ------------------------------------------------------------------------------------------


BAD_ENGINES = {
    "no request in the KV budget": "kv_bytes is 100, .*: nothing could be answered",
    "two names but for case": "the adapters Good and good have one name but for case",
    "a draft with another tokenizer": "the draft has another tokenizer than the remote model",
}
"""What is said of an engine that cannot be."""


@pytest.fixture(scope="module")
def bad_options(root: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Provides the options of each of these engines."""
    twins = root.with_name("twins")
    for name in ("good", "Good"):
        shutil.copytree(root / "good", twins / name)
    other = character_tokenizer()
    other.add_tokens(["owl"])
    draft = AutoModelForCausalLM.from_pretrained(folder)
    return {
        "no request in the KV budget": {"kv_bytes": 100},
        "two names but for case": {"make_slots": twins},
        "a draft with another tokenizer": {"speculation": Speculation(3, draft=draft, draft_tokenizer=other)},
    }


@pytest.mark.parametrize("case", BAD_ENGINES)
def test_an_engine_that_cannot_be(neighbour: Neighbour, bad_options: dict[str, dict[str, Any]], case: str) -> None:
    """The neighbour is answered by another engine of the same client."""
    check(neighbour.beside(lambda _: Engine(neighbour.client, **bad_options[case])), BAD_ENGINES[case])


def test_engines_that_cannot_be_fetch_no_hints(folder: Path, bad_options: dict[str, dict[str, Any]]) -> None:
    with ScriptedProvider(model=folder) as provider:
        client = provider.client(mask_options={**TOY_MASK, "hints": "fetched"}, verify=False)
        for case, options in bad_options.items():
            check([failure_of(lambda options=options: Engine(client, **options))], BAD_ENGINES[case])
        assert provider.calls == []
        Engine(client).close()
        assert {call.purpose for call in provider.calls} == {"hint"}, "the control"
