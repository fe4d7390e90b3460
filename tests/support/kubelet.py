"""Does to folders and variables what a kubelet does before it starts a pod's containers, so that manifests are tested
without a cluster.

Sources: Kubernetes 1.37, pkg/kubelet/envvars/envvars.go and pkg/volume/volume_linux.go. Groups are left as they are, as
only root may change them: what a test sees are the modes.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ADDRESS = "10.96.7.1"
_FOR_THE_GROUP = 0o660
_OF_FOLDERS = stat.S_ISGID | 0o110


def service_variables(service: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables that describe a Service to the containers of its namespace."""
    prefix, ports = service["metadata"]["name"].upper().replace("-", "_"), service["spec"]["ports"]
    made = {f"{prefix}_SERVICE_HOST": _ADDRESS, f"{prefix}_SERVICE_PORT": str(ports[0]["port"])}
    for number, port in enumerate(ports):
        protocol = port.get("protocol", "TCP")
        url = f"{protocol.lower()}://{_ADDRESS}:{port['port']}"
        if "name" in port:
            made[f"{prefix}_SERVICE_PORT_{port['name'].upper().replace('-', '_')}"] = str(port["port"])
        if number == 0:
            made[f"{prefix}_PORT"] = url
        of_port = f"{prefix}_PORT_{port['port']}_{protocol}"
        made |= {of_port: url, f"{of_port}_PROTO": protocol.lower(), f"{of_port}_PORT": str(port["port"])}
        made[f"{of_port}_ADDR"] = _ADDRESS
    return made


def environment(
    pod: Mapping[str, Any], container: Mapping[str, Any], services: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Returns the variables of a container; those that its manifest names come before those of Services."""
    made: dict[str, str] = {}
    if pod.get("enableServiceLinks", True):
        for service in services:
            made |= service_variables(service)
    return made | {one["name"]: one["value"] for one in container.get("env", [])}


def mount(folder: Path, security: Mapping[str, Any], knows_policy: bool = True) -> None:
    """Opens a volume's files to the group of `fsGroup`, as at each mount.

    Args:
        folder: the volume.
        security: the pod's securityContext.
        knows_policy: whether the volume's driver lets the kubelet follow `fsGroupChangePolicy`.
    """
    if "fsGroup" not in security:
        return
    wanted = _FOR_THE_GROUP | _OF_FOLDERS
    is_open = folder.stat().st_mode & wanted == wanted
    if knows_policy and security.get("fsGroupChangePolicy") == "OnRootMismatch" and is_open:
        return
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = stat.S_IMODE(path.stat().st_mode)
            path.chmod(mode | _FOR_THE_GROUP | (_OF_FOLDERS if path.is_dir() else 0))


def run_init_containers(pod: Mapping[str, Any], places: Mapping[str, Path]) -> None:
    """Runs the commands of a pod's init containers, in order.

    Args:
        pod: the pod's spec.
        places: by path in the containers, the folder on this machine that a test has there.
    """

    def here(text: str) -> str:
        for path, folder in places.items():
            text = text.replace(path, str(folder))
        return text

    for container in pod["initContainers"]:
        variables = {name: here(value) for name, value in environment(pod, container, []).items()}
        subprocess.run([here(word) for word in container["command"]], env=os.environ | variables, check=True)
