"""Tests the client bundle of a lying provider: no code is run, and nothing is fetched or written where it should not
be."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from transformers import PreTrainedTokenizerFast

from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient
from tenant_sdk.report import megabytes
from tenant_sdk.trust.bundle import fetch_bundle, without_unsafe
from tests.support.false_providers import Liar
from tests.support.training import QUICK, ROWS, lora
from wire.errors import ConfigurationError, DatasetError, MalformedFrame, VeilbaseError
from wire.manifest import parse_manifest
from wire.transport.inproc import InprocConnection


@pytest.fixture
def liar(chat_served_model: ServedModel) -> Liar:
    return Liar(chat_served_model)


@pytest.fixture
def client(liar: Liar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TenantClient]:
    monkeypatch.setattr("tenant_sdk.embedded.connect_inproc", lambda *_: InprocConnection(liar))
    made = TenantClient("inproc:liar", mask="off", cache=tmp_path / "cache")  # connects when it is used: after the lie
    yield made
    made.close()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes any attempt to reach another machine fail the test."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("something was looked up on the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def cached(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "scales.safetensors"])
@pytest.mark.parametrize("damage", ["flipped", "short", "long", "empty"])
def test_a_file_other_than_announced(liar: Liar, client: TenantClient, tmp_path: Path, name: str, damage: str) -> None:
    data = liar.files[name]
    liar.files[name] = {
        "flipped": bytes([data[0] ^ 1]) + data[1:], "short": data[:-1], "long": data + b" ", "empty": b"",
    }[damage]  # fmt: skip
    with pytest.raises(MalformedFrame, match=name):
        client.load_model()
    assert cached(tmp_path) == [], "an unchecked file stayed in the cache"


def test_what_has_come_of_a_bundle_is_told(liar: Liar, tmp_path: Path) -> None:
    manifest, told = parse_manifest(liar.manifest().to_bytes()), list[tuple[Any, ...]]()
    total = megabytes(sum(file.size_bytes for file in manifest.bundle))
    fetch_bundle(InprocConnection(liar), manifest, tmp_path, lambda *each: told.append(each))
    assert len(told) >= len(manifest.bundle)
    assert told[-1] == ("fetching config, tokenizer, small tensors", total, total, "MB")
    told.clear()
    fetch_bundle(InprocConnection(liar), manifest, tmp_path, lambda *each: told.append(each))
    assert told == [], "it is in the cache"


def test_a_forged_file_list(liar: Liar, client: TenantClient, tmp_path: Path) -> None:
    """A provider that announces the honest bundle's digest with other files is refused. Otherwise these files would be
    cached as the honest bundle."""
    honest = liar.manifest().bundle_digest
    liar.change_json("config.json", hidden_act="gelu")
    liar.announce(bundle_digest=honest)
    with pytest.raises(MalformedFrame, match="does not fit its list of files"):
        client.load_model()
    assert liar.fetched == []
    assert cached(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["../../evil", "/etc/evil", "evil.py", "modeling.py", "pytorch_model.bin", "sub/config.json", "..", ""]
)
def test_file_names_that_no_bundle_may_hold(liar: Liar, name: str) -> None:
    content = json.loads(liar.manifest().to_bytes())
    content["bundle"][0]["name"] = name
    with pytest.raises(MalformedFrame):
        parse_manifest(json.dumps(content).encode())


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_a_number_that_is_not_finite(liar: Liar, client: TenantClient, tmp_path: Path, name: str, wrong: float) -> None:
    """Such a number for one letter would let the provider choose which texts give values that are not finite."""
    tensors = load(liar.files["model.safetensors"])
    tensors[name][-1] = wrong
    liar.files["model.safetensors"] = save(tensors)
    liar.announce()
    for use in (
        client.load_model,
        lambda: client.generate("who?", max_new_tokens=2),
        lambda: client.finetune(ROWS, lora(), tmp_path / "out", **QUICK),
    ):
        with pytest.raises(MalformedFrame, match=rf"^the bundle's {name} holds a number that is NaN or infinite as"):
            use()
    assert liar.num_rows == []


def test_a_number_that_is_infinite_in_the_tenants_type(
    liar: Liar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = load(liar.files["model.safetensors"])
    tensors["model.norm.weight"][-1] = 7e4
    liar.files["model.safetensors"] = save(tensors)
    liar.announce()
    monkeypatch.setattr("tenant_sdk.embedded.connect_inproc", lambda *_: InprocConnection(liar))
    options: Any = {"mask": "off", "cache": tmp_path / "cache", "progress": False}
    with TenantClient("inproc:liar", **options) as client:
        client.load_model()
    refused = pytest.raises(MalformedFrame, match="infinite as float16")
    with TenantClient("inproc:liar", dtype=torch.float16, **options) as client, refused:
        client.load_model()


UNSAFE = {
    "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil--a.Model"},
    "attn_implementation": "evil/kernel",
    "_attn_implementation": "evil/kernel",
    "experts_implementation": "evil/kernel",
    "quantization_config": {"quant_method": "gptq", "bits": 4},
    "use_kernels": True,
    "trust_remote_code": True,
    "custom_generate": "evil/repo",
    "compile_config": {"backend": "evil"},
}  # fmt: skip


def test_unsafe_keys_go_at_any_depth() -> None:
    safe = {"hidden_size": 4, "deep": {"list": [{"n": 1}, [2, {"m": None}]]}}
    unsafe = {**safe, **UNSAFE, "deep": {**UNSAFE, "list": [{"n": 1, **UNSAFE}, [2, {"m": None, **UNSAFE}]]}}
    assert without_unsafe(unsafe) == safe


@pytest.mark.usefixtures("offline")
def test_settings_that_would_fetch_or_run_something(
    liar: Liar, client: TenantClient, chat_folder: Path, tmp_path: Path
) -> None:
    """The model and the tokenizer are still built, from the remaining settings."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        liar.change_json(name, **UNSAFE)
    liar.announce()
    model = client.load_model()
    assert type(model).__module__.startswith("transformers.models.llama.")
    assert isinstance(client.tokenizer, PreTrainedTokenizerFast)
    assert client.generate("who?", max_new_tokens=3) is not None
    text = b"".join(path.read_bytes() for path in cached(tmp_path) if path.suffix == ".json")
    assert b"evil" not in text


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "evil"}, {"model_type": "../../evil"}, {"vocab_size": -1}, {"vocab_size": "many"},
        {"hidden_act": "evil"}, {"num_attention_heads": 0}, {"hidden_size": 33}, {"rope_scaling": {"type": "evil"}},
        {"dtype": "evil"}, {"dtype": "__class__"},
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_makes_no_model(liar: Liar, client: TenantClient, changes: dict[str, Any]) -> None:
    liar.change_json("config.json", **changes)
    liar.announce()
    with pytest.raises(VeilbaseError) as failure:
        client.load_model()
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions"])
@pytest.mark.parametrize("length", ["many", [1], 1e400, -5, 0, True, 128.0, (1 << 31) + 1, {}], ids=repr)
def test_a_context_that_is_no_length(liar: Liar, client: TenantClient, tmp_path: Path, key: str, length: Any) -> None:
    liar.change_json("config.json", **{key: length})
    liar.announce()
    for use in (
        lambda: client.generate("who?", max_new_tokens=2),
        lambda: client.finetune(ROWS, lora(), tmp_path / "out", **QUICK),
    ):
        with pytest.raises(MalformedFrame, match=rf"whole number from 1 to 2\^31 as {key}") as failure:
            use()
        assert "\n" not in str(failure.value)


@pytest.mark.usefixtures("client")
def test_a_context_that_is_not_named(liar: Liar, tmp_path: Path) -> None:
    config = json.loads(liar.files["config.json"])
    del config["max_position_embeddings"]
    for changes in ({}, {"n_positions": 1 << 31}):
        liar.files["config.json"] = json.dumps(config | changes).encode()
        liar.announce()
        with TenantClient("inproc:liar", mask="off", cache=tmp_path / "cache") as client:
            assert client.context_length >= 1 << 20
            assert client.generate("who?", max_new_tokens=2) is not None


def test_a_manifest_with_another_config_than_the_bundle(liar: Liar, client: TenantClient) -> None:
    """The manifest's copy of the config must equal the config in the bundle, since no digest covers the copy."""
    liar.announce(config=json.loads(liar.files["config.json"]) | {"max_position_embeddings": 3})
    with pytest.raises(MalformedFrame, match="config in the provider's manifest is not the one in its bundle"):
        client.load_model()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "data", [b"not json", b"\xff\xfe", b"[" * 100_000, b"[]"], ids=["text", "bytes", "deep", "list"]
)
def test_settings_that_are_no_json_object(liar: Liar, client: TenantClient, name: str, data: bytes) -> None:
    liar.files[name] = data
    liar.announce()
    with pytest.raises(MalformedFrame, match=name):
        client.load_model()


@pytest.mark.parametrize("name", ["model.safetensors", "scales.safetensors"])
def test_tensors_that_cannot_be_read(liar: Liar, client: TenantClient, name: str) -> None:
    liar.files[name] = b"\xff" * 64
    liar.announce()
    with pytest.raises(MalformedFrame):
        client.load_model()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "scales.safetensors"])
def test_a_bundle_without_a_file(liar: Liar, client: TenantClient, name: str) -> None:
    del liar.files[name]
    liar.announce()
    with pytest.raises(VeilbaseError):
        client.load_model()


def test_a_tensor_is_missing(liar: Liar, client: TenantClient) -> None:
    tensors = load(liar.files["model.safetensors"])
    del tensors["model.norm.weight"]
    liar.files["model.safetensors"] = save(tensors, {"format": "pt"})
    liar.announce()
    with pytest.raises(MalformedFrame, match=r"lacks 1 tensors of the model, such as model\.norm\.weight"):
        client.load_model()


def changed_layers(liar: Liar, **changes: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = [group.model_dump() for group in liar.manifest().groups]
    single = next(group for group in groups if len(group["layers"]) == 1)
    layer = single["layers"][0]
    layer.update(changes)
    for key in ("in_features", "out_features"):
        single[key] = layer[key]
    return groups


@pytest.mark.parametrize(
    "changes",
    [
        {"in_features": 31}, {"out_features": 31}, {"kind": "conv1d"}, {"bias": True}, {"name": "nowhere.at.all"},
        {"name": "model.norm"}, {"name": "model"}, {"name": "model.layers.0.__class__"},
    ],
    ids=str,
)  # fmt: skip
def test_layers_that_do_not_fit_the_config(liar: Liar, client: TenantClient, changes: dict[str, Any]) -> None:
    liar.announce(groups=tuple(changed_layers(liar, **changes, max_column_norm=1.0, max_row_norm=1.0)))
    with pytest.raises(MalformedFrame):
        client.load_model()


LAYER = "model.layers.0.self_attn.o_proj"


@pytest.mark.parametrize(
    "alpha",
    [
        None, torch.full((32,), float("nan")), torch.full((32,), float("inf")), torch.zeros(32), -torch.ones(32),
        torch.ones(31), torch.ones(32, dtype=torch.float64), torch.ones(1, 32),
    ],
    ids=["missing", "nan", "inf", "zero", "negative", "short", "float64", "two-d"],
)  # fmt: skip
def test_scales_that_are_none(liar: Liar, client: TenantClient, alpha: torch.Tensor | None) -> None:
    liar.change_scales(LAYER, alpha)
    liar.announce()
    with pytest.raises(MalformedFrame, match=re.escape(f"scales of {LAYER}")):
        client.load_model()


def test_cached_by_digest(liar: Liar, client: TenantClient, tmp_path: Path) -> None:
    client.load_model()
    assert sorted(liar.fetched) == sorted(liar.files)
    liar.fetched.clear()
    with TenantClient("inproc:liar", mask="off", cache=tmp_path / "cache") as second:
        second.load_model()
        assert second.tokenizer is not None
    assert liar.fetched == []
    (folder,) = (tmp_path / "cache" / "bundles").iterdir()
    assert folder.name == liar.manifest().bundle_digest
    liar.change_json("generation_config.json", max_new_tokens=5)
    liar.announce()
    with TenantClient("inproc:liar", mask="off", cache=tmp_path / "cache") as third:
        third.load_model()
    assert sorted(liar.fetched) == sorted(liar.files)


def test_a_generation_config_that_asks_for_more_than_text(liar: Liar, client: TenantClient) -> None:
    liar.change_json("generation_config.json", return_dict_in_generate=True, output_scores=True)
    liar.announce()
    assert isinstance(client.generate("abc", max_new_tokens=2), str)


def test_nothing_is_written_outside_the_cache(
    liar: Liar, client: TenantClient, tmp_path: Path, monkeypatch: Any
) -> None:
    home, here = tmp_path / "home", tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    client.load_model()
    assert client.tokenizer is not None
    written = {path.relative_to(tmp_path).parts[0] for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {"cache"}
    assert {path.name for path in cached(tmp_path)} == set(liar.files)


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('touch PATH').read() }}",
    "{{ lipsum.__globals__['os'].system('touch PATH') }}",
    "{{ messages.__class__.__base__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ messages.append(1) }}",
    "{% include '/etc/passwd' %}",
    "{% for m in messages %}{% for i in range(10**12) %}{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_a_chat_template_stays_in_its_sandbox(liar: Liar, client: TenantClient, tmp_path: Path, template: str) -> None:
    touched = tmp_path / "touched"
    liar.files["chat_template.jinja"] = (template.replace("PATH", str(touched)) + "{{ messages[0].content }}").encode()
    liar.announce()
    assert "messages" in client.tokenizer.chat_template
    with pytest.raises(ConfigurationError, match="chat template"):
        client.generate("who?")
    with pytest.raises(DatasetError, match="template"):
        client.finetune(ROWS, lora(), tmp_path / "out", **QUICK)
    assert not touched.exists()


@pytest.mark.parametrize("template", ["{{ raise_exception.__globals__ }}", "{{ messages | attr('__class__') }}"])
def test_private_attributes_are_not_there(liar: Liar, client: TenantClient, template: str) -> None:
    liar.files["chat_template.jinja"] = (template + "{{ messages[0].content }}").encode()
    liar.announce()
    messages = [{"role": "user", "content": "who?"}]
    assert client.tokenizer.apply_chat_template(messages, tokenize=False) == "who?"
