"""Tests docs/deploy: manifests are valid by the schemas of Kubernetes, and the settings, commands and metrics that they
name exist."""

from __future__ import annotations

import io
import json
import re
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
from provider.operations.meter import Meter
from provider.operations.metrics import ProviderCollector, registry
from provider.operations.usage import UsageBook
from provider.schedule.request_class import RequestClass
from tests.support.repository import ROOT
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
    assert settings.port == container["ports"][0]["containerPort"] == service["spec"]["ports"][0]["port"]
    assert policy["spec"]["ingress"][0]["ports"][0]["port"] == settings.port
    assert settings.drain_s < pod["spec"]["terminationGracePeriodSeconds"]
    labels = pod["metadata"]["labels"]
    for selector in (service["spec"]["selector"], workload["spec"]["selector"]["matchLabels"]):
        assert selector == labels
    assert policy["spec"]["podSelector"]["matchLabels"] == labels
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert mounted == volumes | {claim["metadata"]["name"] for claim in workload["spec"]["volumeClaimTemplates"]}
    for probe in ("startupProbe", "livenessProbe"):
        _, name, *arguments = container[probe]["exec"]["command"]
        typer.main.get_command(app).commands[name].make_context(name, arguments)  # type: ignore[attr-defined]


def exported() -> set[str]:
    usage = UsageBook()
    usage.of("acme").answered(RequestClass.DECODE, 1, 1, 1)
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
