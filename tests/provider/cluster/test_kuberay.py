"""Tests docs/deploy/kuberay.yaml: its pods and policies pass Kubernetes' schemas, its RayCluster has the fields of
KubeRay's v1, and what it names exists and belongs together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from provider.config import load_settings
from tests.support import kubelet
from tests.support.repository import ROOT

CLUSTER, SERVICE, CONFIG, POLICY = yaml.safe_load_all((ROOT / "docs/deploy/kuberay.yaml").read_text())
VERSION = "1.37"
TEMPLATE = {"type": "object", "required": ["metadata", "spec"]}
PARAMETERS = {"type": "object", "additionalProperties": {"type": "string"}}
RAY_CLUSTER = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "spec": {
            "type": "object",
            "required": ["headGroupSpec"],
            "additionalProperties": False,
            "properties": {
                "rayVersion": {"type": "string"},
                "headGroupSpec": {
                    "type": "object",
                    "required": ["template"],
                    "additionalProperties": False,
                    "properties": {
                        "serviceType": {"type": "string"}, "rayStartParams": PARAMETERS, "template": TEMPLATE,
                    },
                },
                "workerGroupSpecs": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["groupName", "maxReplicas", "minReplicas", "template"],
                        "additionalProperties": False,
                        "properties": {
                            "groupName": {"type": "string"}, "replicas": {"type": "integer"},
                            "minReplicas": {"type": "integer"}, "maxReplicas": {"type": "integer"},
                            "rayStartParams": PARAMETERS, "template": TEMPLATE,
                        },
                    },
                },
            },
        },
    },
}  # fmt: skip
"""The part of KubeRay's schema of a RayCluster (ray.io_rayclusters.yaml, v1) whose fields the manifest uses."""


def pods() -> list[Any]:
    groups = [CLUSTER["spec"]["headGroupSpec"], *CLUSTER["spec"]["workerGroupSpecs"]]
    return [group["template"] for group in groups]


@pytest.mark.parametrize("template", pods(), ids=["head", "workers"])
def test_pods_pass_the_schema(template: Any) -> None:
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x", **template["metadata"]},
        "spec": template["spec"],
    }
    kubernetes_validate.validate(pod, VERSION, strict=True)
    pod["spec"] = {**template["spec"], "volums": []}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(pod, VERSION, strict=True)


@pytest.mark.parametrize("manifest", [SERVICE, CONFIG, POLICY], ids=["service", "settings", "policy"])
def test_service_settings_and_policy_pass_the_schema(manifest: Any) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_the_cluster_has_the_operators_fields() -> None:
    jsonschema.validate(CLUSTER, RAY_CLUSTER)
    for changes in ({"headGroup": {}}, {"rayVersion": 2}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**CLUSTER, "spec": {**CLUSTER["spec"], **changes}}, RAY_CLUSTER)


def test_what_belongs_together_has_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "provider.yaml").write_text(CONFIG["data"]["provider.yaml"])
    settings = load_settings({}, tmp_path / "provider.yaml")
    settings.check_front()
    assert settings.ray_address == f"{CLUSTER['metadata']['name']}-head-svc:6379"
    assert settings.shards * settings.replicas <= CLUSTER["spec"]["workerGroupSpecs"][0]["replicas"]
    ports = {port["port"] for port in POLICY["spec"]["ingress"][1]["ports"]}
    assert ports == {settings.port, settings.tensor_port} == {port["port"] for port in SERVICE["spec"]["ports"]}
    assert SERVICE["spec"]["selector"]["ray.io/cluster"] == CLUSTER["metadata"]["name"]
    for template in pods():
        assert template["metadata"]["labels"] == POLICY["spec"]["podSelector"]["matchLabels"]
        volumes = {volume["name"] for volume in template["spec"]["volumes"]}
        started = [*template["spec"]["initContainers"], *template["spec"]["containers"]]
        mounts = {mount["name"] for one in started for mount in one["volumeMounts"]}
        assert mounts == volumes
        for container in template["spec"]["containers"]:
            variables = {one["name"]: one["value"] for one in container["env"]}
            assert variables["RAY_USE_TLS"] == "1"
            assert variables["RAY_AUTH_MODE"] == "token"
            folders = [mount["mountPath"] for mount in container["volumeMounts"]]
            for name in ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT", "RAY_AUTH_TOKEN_PATH"):
                assert str(Path(variables[name]).parent) in folders
    start = CLUSTER["spec"]["headGroupSpec"]["rayStartParams"]
    assert start["include-dashboard"] == "false"


@pytest.mark.parametrize("group", [CLUSTER["spec"]["headGroupSpec"], *CLUSTER["spec"]["workerGroupSpecs"]])
def test_no_container_gets_the_operators_probes(group: Any) -> None:
    """KubeRay adds each probe that the first container of a pod lacks, and asks a dashboard that does not run."""
    container = group["template"]["spec"]["containers"][0]
    probes = {name: container[name] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert all(
        probe["tcpSocket"] == {"port": int(group["rayStartParams"]["node-manager-port"])} for probe in probes.values()
    )


@pytest.mark.parametrize("links", [False, True], ids=["as written", "with the variables of Services"])
def test_settings_are_read_in_the_environment_of_a_container(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "provider.yaml").write_text(CONFIG["data"]["provider.yaml"])
    head = pods()[0]["spec"]
    assert all(template["spec"]["enableServiceLinks"] is False for template in pods())
    if links:
        head = {**head, "enableServiceLinks": True}
    for name, value in kubelet.environment(head, head["containers"][1], [SERVICE]).items():
        monkeypatch.setenv(name, value)
    settings = load_settings({}, tmp_path / "provider.yaml")
    opened = {port["name"]: port["containerPort"] for port in head["containers"][1]["ports"]}
    assert opened == {"grpcs": settings.port, "tensors": settings.tensor_port}


@pytest.mark.parametrize("template", pods(), ids=["head", "workers"])
def test_keys_of_secrets_are_the_users_alone_at_every_start(template: Any, tmp_path: Path) -> None:
    """Kubernetes shows each file of a secret as a link, and opens it to the group."""
    spec = template["spec"]
    places: dict[str, Path] = {}
    for container in spec["initContainers"]:
        for place in container["volumeMounts"]:
            folder = places.setdefault(place["mountPath"], tmp_path / place["name"])
            (folder / "..data").mkdir(parents=True, exist_ok=True)
            if place.get("readOnly"):
                (folder / "..data" / "key.pem").write_text(place["name"])
                (folder / "key.pem").symlink_to("..data/key.pem")
    for _ in range(2):
        for folder in places.values():
            kubelet.mount(folder, spec["securityContext"])
        kubelet.run_init_containers(spec, places)
        keys = [folder / "key.pem" for path, folder in places.items() if not path.startswith("/secrets/")]
        assert keys
        assert all(key.stat().st_mode & 0o777 == 0o600 for key in keys)


def test_a_new_registry_copy_reaches_the_provider_without_a_restart() -> None:
    """Kubernetes renews the files of a secret that is mounted as a whole; an init container copies once."""
    settings = yaml.safe_load(CONFIG["data"]["provider.yaml"])
    template = pods()[0]["spec"]
    (front,) = [one for one in template["containers"] if one["name"] == "provider"]
    (mount,) = [one for one in front["volumeMounts"] if one["mountPath"] == str(Path(settings["registry"]).parent)]
    assert "subPath" not in mount
    (volume,) = [one for one in template["volumes"] if one["name"] == mount["name"]]
    assert volume["secret"]["secretName"]
