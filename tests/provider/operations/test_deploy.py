"""Tests docs/deploy: manifests are valid by the schemas of Kubernetes, and the settings, commands and metrics that they
name exist."""

from __future__ import annotations

import io
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import kubernetes_validate
import promql_parser
import pytest
import typer
import yaml
from dockerfile_parse import DockerfileParser
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
from grafana_foundation_sdk.models.prometheus import Dataquery
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from provider.cli import app
from provider.config import load_settings
from provider.identity.authority import StateDamaged, StateDir
from provider.operations.metrics import Meter, ProviderCollector, registry
from provider.operations.usage import UsageBook
from provider.schedule.ticket import RequestClass
from tests.support import kubelet
from tests.support.repository import ROOT
from wire.call import Arithmetic, Call, Direction
from wire.errors import WireCode

DEPLOY = ROOT / "docs" / "deploy"
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
VERSIONS = ("1.28", "1.37")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: one["kind"])
def test_manifests_pass_the_schema(manifest: dict[str, object], version: str) -> None:
    kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schema_check_can_fail() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**MANIFESTS[2], "spec": {"replicas": "one"}}, VERSIONS[-1], strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**MANIFESTS[1], "unknown": 1}, VERSIONS[-1], strict=True)


def test_what_belongs_together_has_the_same_names(tmp_path: Path) -> None:
    config, service, workload, policy = MANIFESTS
    (tmp_path / "provider.yaml").write_text(config["data"]["provider.yaml"])
    settings = load_settings({}, tmp_path / "provider.yaml")
    pod = workload["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    ports = {settings.port, settings.tensor_port}
    assert settings.tensor_port == 8444  # a fixed port: tenants connect to the number that the provider tells them
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert set(named.values()) == ports
    assert {port["port"] for port in service["spec"]["ports"]} == ports
    assert all(named[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])
    assert {port["port"] for port in policy["spec"]["ingress"][0]["ports"]} == ports
    assert settings.drain_s < pod["spec"]["terminationGracePeriodSeconds"]
    labels = pod["metadata"]["labels"]
    for selector in (service["spec"]["selector"], workload["spec"]["selector"]["matchLabels"]):
        assert selector == labels
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert mounted == volumes | {claim["metadata"]["name"] for claim in workload["spec"]["volumeClaimTemplates"]}
    for starts in pod["spec"]["initContainers"]:
        assert {mount["name"] for mount in starts["volumeMounts"]} <= mounted
    for probe in ("startupProbe", "livenessProbe"):
        _, name, *arguments = container[probe]["exec"]["command"]
        typer.main.get_command(app).commands[name].make_context(name, arguments)  # type: ignore[attr-defined]


@pytest.mark.parametrize("links", [False, True], ids=["as written", "with the variables of Services"])
def test_settings_are_read_in_the_environment_of_a_container(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second case is that of a pod without `enableServiceLinks: false`, such as one of `kubectl run`."""
    config, service, workload, _ = MANIFESTS
    pod = workload["spec"]["template"]["spec"]
    assert pod["enableServiceLinks"] is False
    if links:
        pod = {**pod, "enableServiceLinks": True}
    (tmp_path / "provider.yaml").write_text(config["data"]["provider.yaml"])
    variables = kubelet.environment(pod, pod["containers"][0], [service])
    assert ("VEILBASE_PROVIDER_PORT" in variables) is links
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = load_settings({}, tmp_path / "provider.yaml")
    assert (settings.port, settings.tensor_port) == (8443, 8444)
    assert load_settings({"state": None}).state == Path("/var/lib/veilbase/provider")  # as the probes read it


@pytest.mark.parametrize("knows_policy", [True, False], ids=["driver knows the policy", "driver does not"])
def test_the_state_stays_closed_when_its_volume_is_mounted_again(knows_policy: bool, tmp_path: Path) -> None:
    pod = MANIFESTS[2]["spec"]["template"]["spec"]
    volume = tmp_path / "volume"
    volume.mkdir()
    places = {"/var/lib/veilbase": volume}
    serials = set()
    for _ in range(3):
        kubelet.mount(volume, pod["securityContext"], knows_policy)
        kubelet.run_init_containers(pod, places)
        state = StateDir(volume / "provider")
        serials.add(state.ca.certificate.serial_number)
        (volume / "provider" / "tensors").mkdir(exist_ok=True)
    assert len(serials) == 1
    if knows_policy:  # kubelet itself was started again, and no init container runs
        kubelet.mount(volume, pod["securityContext"], knows_policy)
        StateDir(volume / "provider")
    kubelet.mount(volume, {"fsGroup": 10001}, knows_policy)
    with pytest.raises(StateDamaged, match="run chmod"):
        StateDir(volume / "provider")


def copied() -> set[str]:
    """Returns the paths that the Containerfile copies from the repository."""
    structure = DockerfileParser(fileobj=io.BytesIO((DEPLOY / "Containerfile").read_bytes())).structure
    return {path for one in structure if one["instruction"] == "COPY" for path in one["value"].split()[:-1]}


def is_sent(path: str) -> bool:
    """Returns whether a builder reads a file of the repository: the last line of .dockerignore that matches the path or
    a folder above it decides."""
    parts = path.split("/")
    sent = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        expression = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if pattern and not pattern.startswith("#"):
            above = ("/".join(parts[: end + 1]) for end in range(len(parts)))
            sent = line.startswith("!") if any(re.fullmatch(expression, one) for one in above) else sent
    return sent


def test_an_image_holds_what_the_installation_needs() -> None:
    find = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    packages = {pattern.rstrip("*") for pattern in find["include"]}
    beside = {"pyproject.toml", "setup.py", "README.md", "LICENSE", "lock.py", "constraints.txt", "requirements.lock"}
    assert copied() == packages | beside
    files = [path for name in copied() for path in [ROOT / name, *(ROOT / name).rglob("*")] if path.is_file()]
    needed = [path.relative_to(ROOT).as_posix() for path in files if path.suffix not in (".so", ".pyc")]
    assert len(needed) > 300
    assert [path for path in needed if not is_sent(path)] == []


@pytest.mark.parametrize(
    "path",
    [
        ".git/config", ".venv/bin/python", ".demo/state/ca_key.pem", "acme/key.pem", "acme/ca.pem", "key.pem",
        "provider/state/ca_key.pem", "wire/ring/_kernels.so", "wire/ring/__pycache__/coding.cpython-311.pyc",
        "noise/.env", "adapters/support/adapter_model.safetensors", "report/victim.json", "veilbase.egg-info/PKG-INFO",
        "tests/conftest.py",
    ],
)  # fmt: skip
def test_an_image_holds_nothing_else_of_a_checkout(path: str) -> None:
    assert not is_sent(path)


def test_every_image_is_one_that_the_containerfile_says_how_to_build() -> None:
    builds = re.findall(r"^# +podman build (.*)$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
    assert all("--file docs/deploy/Containerfile " in one and one.endswith(" .") for one in builds)
    tags = {tag for one in builds for tag in re.findall(r"--tag (\S+)", one)}
    texts = [(DEPLOY / name).read_text() for name in ("kubernetes.yaml", "kuberay.yaml")]
    assert tags == {image for text in texts for image in re.findall(r"image: (\S+)", text)}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {tag.rpartition(":")[2] for tag in tags} == {version}


def exported() -> set[str]:
    usage = UsageBook()
    usage.of("acme").answered(RequestClass.DECODE, Call(0, Direction.FORWARD, Arithmetic.RING), 1, 1, 1)
    usage.of("acme").failed(WireCode.QUOTA)
    meter = Meter()
    meter.inline(0, 1e-4)
    collector = ProviderCollector(
        meter, usage, lambda: 0, lambda: 0, lambda: [(1, 1)], registry_seconds_left=lambda: 60.0
    )
    text = generate_latest(registry(collector)).decode()
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for one in expressions for name in re.findall(r"veilbase_\w+", one)}
    assert len(expressions) >= 12
    assert asked <= exported()
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def unknown(given: object, read: object, where: str = "") -> Iterator[str]:
    """Returns those parts of a document that Grafana's own types do not know."""
    if isinstance(given, dict):
        for key, value in given.items():
            if isinstance(read, dict) and key in read:
                yield from unknown(value, read[key], f"{where}.{key}")
            else:
                yield f"{where}.{key}"
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for index, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from unknown(one, other, f"{where}[{index}]")
    elif given != read:
        yield where


def test_grafana_knows_every_word_of_the_dashboard() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())

    def read(document: dict[str, object]) -> object:
        return json.loads(JSONEncoder().encode(Dashboard.from_json(document)))

    def read_query(document: dict[str, object]) -> object:
        return json.loads(JSONEncoder().encode(Dataquery.from_json(document)))

    queries = [target for panel in dashboard["panels"] for target in panel["targets"]]
    assert list(unknown(dashboard, read(dashboard))) == []
    assert [list(unknown(one, read_query(one))) for one in queries] == [[]] * len(queries)
    dashboard["panels"][1]["gridPosition"] = queries[0]["expresion"] = "1"
    assert list(unknown(dashboard, read(dashboard))) == [".panels[1].gridPosition"]
    assert list(unknown(queries[0], read_query(queries[0]))) == [".expresion"]


def test_prometheus_can_read_every_expression() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            promql_parser.parse(target["expr"])
    with pytest.raises(ValueError, match="invalid"):
        promql_parser.parse("sum by kind rate(veilbase_rows_total[5m])")


def test_the_containerfile_is_made_of_instructions() -> None:
    structure = DockerfileParser(fileobj=io.BytesIO((DEPLOY / "Containerfile").read_bytes())).structure
    words = [one["instruction"] for one in structure if one["instruction"] != "COMMENT"]
    assert words[0] == "FROM"
    assert set(words) <= {"FROM", "ARG", "COPY", "RUN", "WORKDIR", "USER", "ENV", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert words.index("USER") > words.index("RUN")  # the user that runs the provider installs nothing


def test_metrics_md_names_every_metric() -> None:
    named = set(re.findall(r"`(veilbase_\w+)`", (DEPLOY / "metrics.md").read_text()))
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported()}
    assert named == families


def test_the_containers_command_is_one() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    (command,) = re.findall(r"^CMD (.*)$", text, re.MULTILINE)
    name, *arguments = json.loads(command)
    typer.main.get_command(app).commands[name].make_context(name, arguments)  # type: ignore[attr-defined]
    assert 'ENTRYPOINT ["provider"]' in text
