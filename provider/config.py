"""Defines and loads the settings of `provider serve`.

A flag takes precedence over an environment variable, which takes precedence over the YAML file that --config names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BeforeValidator, ByteSize, Field, JsonValue, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)

from provider.flags import SHOWN
from provider.schedule.quota import EVERYBODY, LOCAL_TENANT, MAX_IN_FLIGHT_BYTES, TenantLimits
from runtime.command_line import instead, plain_message
from wire.errors import ConfigurationError, os_cause
from wire.transport.address import is_loopback
from wire.transport.busy_poll import LONGEST_S, MOST_S

ENV_PREFIX = "VEILBASE_PROVIDER_"
_RAY_ADDRESS = r"(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9.-]+):\d{1,5}"
"""A pattern of a host and a port. Words that Ray takes for an address and looks up in a file, such as `auto`, do not
match."""
DEFAULT_STATE = Path("~/.veilbase/provider")
STATE_HELP = "State directory: CA and registry."
NO_JOINING = "a shard on another host is now an actor in a Ray cluster: provider serve --engine ray (docs/ray.md)"
"""The error text for options and commands of earlier releases that made another host join a provider as a shard."""
_OF_THE_LOG = "Of the log on stderr."
_ALL: dict[str, JsonValue] = {SHOWN: "all"}
_TENANT_OR_ALL = r"^(\*|[a-z0-9][a-z0-9._-]{0,62})$"
_UserPath = Annotated[Path, BeforeValidator(lambda path: Path(path).expanduser())]


class _Settings(BaseSettings):
    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Returns the sources of settings, by falling precedence: flags, environment and YAML file.

        A .env file is not read, since another user could have written it into the working folder. The variables of
        `service_variables` are no settings.
        """
        if isinstance(env_settings, EnvSettingsSource):
            ignored = {name.lower() for name in service_variables()}
            env_settings.env_vars = {
                name: value for name, value in env_settings.env_vars.items() if name.lower() not in ignored
            }
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls)


LEAST_WINDOWS = 8 << 20
"""The least bytes of `gpu_windows`: one tenant gets half of them at most, and no window has less than 4 MiB."""


class ProviderSettings(_Settings):
    """Holds the settings of one provider process; each setting with a description is a flag of `provider serve`.

    Attributes:
        tensor_port: port of the tenants' streams, with TLS only. `none` opens no such port: tenants then use gRPC.
        ipc: folder of a socket for tenants on this host, with TLS only. None makes no such socket.
        server_cert, server_key, registry, registry_max_age_s: see `provider.identity.front`. None issues certificates
            with the CA in `state`.
        base_layers: patterns of the layers to serve. Layers that are not served go into the bundle, for the tenant.
        device: what computes: `cpu`, `cuda`, `cuda:N`, or `auto`, which is a CUDA device that passes its self-test, or
            else the CPU. With `auto` and `cuda`, process i of the shards gets device i mod n of the n devices.
        gpu_windows: the most bytes of GPU memory that is shared with tenants whose model is on the GPU that computes
            here, for their large requests (`provider.net.windows`). 0 shares none.
        threads: number of threads that compute in each process. With None, torch chooses the number, except that
            the processes of local shards divide the cores among themselves.
        shards: number of shards; each holds whole groups of layers. With one shard, one replica and the engine `local`,
            this process computes.
        replicas: number of processes for each shard, all with the same weights.
        engine: where products are computed. `local`: on this host, in processes of their own if there are several
            shards or replicas. `ray`: in the actors of a Ray cluster (`provider.cluster`).
        remote_shards: an option of earlier releases, which must be None; see `NO_JOINING`.
        max_wait_ms: longest time that a request waits for others to share its product; see `provider.schedule`. With 0,
            requests do not wait.
        busy_poll_ms: longest time of busy polling for the next request; see `wire.transport.busy_poll`. With 0, there
            is no busy polling.
        drain_s: longest time in seconds for finishing requests in flight at shutdown, while new requests are refused.
        metrics_port, health_port: loopback ports; None opens no port.
        log_format: `text`, or `json` for one JSON object per line.
        max_in_flight_bytes: the most bytes of requests and replies in flight, over all tenants. No tenant may hold more
            than the bytes that are still free.
        tenant_limits: limits by tenant's name, with `*` for all tenants without an entry; set in the YAML file, or as
            JSON in the environment.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    model: str = Field(
        default="smollm2-135m", min_length=1, description="Built-in name, GGUF file, Hugging Face folder or hub id."
    )
    tls: bool = Field(default=False, description="Mutual TLS; needed for any address but loopback.")
    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=8443, ge=0, le=65_535, description="0 picks a free one.")
    tensor_port: Literal["none"] | Annotated[int, Field(ge=0, le=65_535)] = Field(
        default=0, description="Port of the streams; 0 picks, none: by gRPC alone."
    )
    ipc: _UserPath | None = Field(default=None, description="Folder of a socket, for tenants on this host.")
    names: str = Field(
        default="",
        pattern=r"^[^,\s]*(,[^,\s]+)*$",
        description="Further names for the certificate, comma-separated, as tenants use them.",
    )
    state: _UserPath = Field(default=DEFAULT_STATE, validate_default=True, description=STATE_HELP)
    server_cert: _UserPath | None = Field(
        default=None, description="Certificate from `provider export-server`: no CA key is held here."
    )
    server_key: _UserPath | None = Field(default=None, description="Its private key.")
    registry: _UserPath | None = Field(default=None, description="Registry copy from `provider export-registry`.")
    registry_max_age_s: float = Field(
        default=3600.0, ge=1, le=31 * 86_400, description="Age at which the copy no longer counts."
    )
    weights: Literal["int8", "native"] = Field(
        default="int8", description="native keeps the checkpoint's weights next to int8."
    )
    base_layers: str | None = Field(
        default=None, description="Layers to serve: patterns, comma-separated, ! excludes.", json_schema_extra=_ALL
    )
    record: _UserPath | None = Field(
        default=None, description="Write down all that tenants send (security evaluation)."
    )
    record_limit: ByteSize = Field(
        default=ByteSize(4 << 30), description="Most bytes to record.", json_schema_extra={SHOWN: "4GiB"}
    )
    record_layers: str = Field(default="", description="Patterns of layers to record.", json_schema_extra=_ALL)
    threads: int | None = Field(default=None, ge=1, le=1024, description="Threads of the arithmetic, in each process.")
    device: str = Field(default="auto", description="What computes: auto, cpu, cuda or cuda:N.")
    gpu_windows: ByteSize = Field(
        default=ByteSize(0),
        description="Most GPU memory to share with tenants on this GPU.",
        json_schema_extra={SHOWN: "0: none"},
    )
    shards: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Processes that share the layer groups out.",
        json_schema_extra={SHOWN: "1: none of their own"},
    )
    replicas: int = Field(default=1, ge=1, le=64, description="Processes a shard.")
    engine: Literal["local", "ray"] = Field(
        default="local", description="ray: shards and replicas are actors in a Ray cluster."
    )
    ray_address: str | None = Field(default=None, description="HOST:PORT of the cluster's head.")
    ray_gpus: float = Field(default=0.0, ge=0, le=64, description="GPUs of each actor.")
    remote_shards: str | None = Field(default=None, description="No longer possible: see --engine ray.")
    batching: Literal["opportunistic", "none", "lockstep"] = Field(
        default="opportunistic", description="How requests share products; two are for comparison."
    )
    slo_ms: float | None = Field(
        default=None, gt=0, le=60_000, description="Latency target of decode, from arrival to reply."
    )
    max_wait_ms: float = Field(
        default=20.0, ge=0, le=60_000, description="The longest that a request waits for company."
    )
    busy_poll_ms: float = Field(
        default=1000 * MOST_S,
        ge=0,
        le=1000 * LONGEST_S,
        description="The longest that an idle core looks for the next decode request.",
    )
    drain_s: float = Field(default=10.0, ge=0, le=3600, description="At the end: time for what is in flight.")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65_535, description="Loopback port of Prometheus' metrics; 0 picks."
    )
    health_port: int | None = Field(
        default=None, ge=0, le=65_535, description="Loopback port of gRPC's health service; 0 picks."
    )
    log_format: Literal["text", "json"] = Field(default="text", description=_OF_THE_LOG)
    parallel: Literal["none", "tensor", "fsdp"] = Field(
        default="none", description="Processes started by torchrun make each product together."
    )
    parallel_timeout_s: float = Field(
        default=60.0, ge=1, le=3600, description="The longest that one of them waits for another."
    )
    max_in_flight_bytes: ByteSize = Field(default=ByteSize(MAX_IN_FLIGHT_BYTES), ge=256 << 20)
    tenant_limits: dict[Annotated[str, Field(pattern=_TENANT_OR_ALL)], TenantLimits] = Field(default_factory=dict)

    @property
    def certificate_names(self) -> list[str]:
        return [one for one in self.names.split(",") if one]

    def check_shards(self) -> None:
        if self.remote_shards is not None:
            raise ConfigurationError(NO_JOINING)

    def check_parallel(self) -> None:
        if self.parallel != "none" and (self.shards > 1 or self.replicas > 1):
            raise ConfigurationError(
                "with --parallel all processes make each product, with --shards and --replicas one of them: give one"
            )

    def check_device(self) -> None:
        """Raises ConfigurationError if `device` is not `auto`, `cpu`, `cuda` or `cuda:N`, or if a CUDA device is
        combined with `parallel`, whose processes compute on the CPU."""
        if re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device) is None:
            raise ConfigurationError(f"expected --device auto, cpu, cuda or cuda:N, got {self.device[:40]!r}")
        if self.parallel != "none" and self.device.startswith("cuda"):
            raise ConfigurationError("with --parallel all processes compute on the CPU: leave --device out")

    def check_conflicts(self) -> None:
        """Raises ConfigurationError if two settings contradict each other, or if a setting has no effect."""

        def is_default(*names: str) -> bool:
            return all(getattr(self, name) == type(self).model_fields[name].default for name in names)

        if self.slo_ms is not None and self.batching != "opportunistic":
            raise ConfigurationError(f"--slo-ms needs --batching opportunistic, got {self.batching}")
        if not is_default("max_wait_ms") and self.batching == "none":
            raise ConfigurationError("--max-wait-ms says nothing with --batching none, where no request waits")
        if not self.tls and self.tensor_port not in (0, "none"):
            raise ConfigurationError("the tensor port speaks TLS only: add --tls, or leave --tensor-port out")
        if self.ipc is not None and not self.tls:
            raise ConfigurationError("--ipc lets tenants in by their certificates: add --tls")
        self._check_windows()
        has_stream_port = self.tls and (self.tensor_port != "none" or self.ipc is not None)
        if self.busy_poll_ms and not is_default("busy_poll_ms") and not has_stream_port:
            raise ConfigurationError("--busy-poll-ms is of the tensor port, which there is none of here")
        ports = [
            one
            for one in (self.port, self.tensor_port, self.metrics_port, self.health_port)
            if one not in (0, None, "none")
        ]
        if len(set(ports)) < len(ports):
            raise ConfigurationError("--port, --tensor-port, --metrics-port and --health-port must be different ports")
        if self.names and not self.tls:
            raise ConfigurationError("--names are of a certificate, which needs --tls")
        if self.parallel == "none" and not is_default("parallel_timeout_s"):
            raise ConfigurationError("--parallel-timeout-s needs --parallel")
        if self.record is None and not is_default("record_limit", "record_layers"):
            raise ConfigurationError("--record-limit and --record-layers need --record, which names the folder")
        if not self.tls and self.tenant_limits.keys() - {EVERYBODY, LOCAL_TENANT}:
            raise ConfigurationError(
                f"without --tls all tenants are one: expected {EVERYBODY!r} or {LOCAL_TENANT!r} in tenant_limits"
            )

    def _check_windows(self) -> None:
        if not self.gpu_windows:
            return
        if self.gpu_windows < LEAST_WINDOWS:
            raise ConfigurationError(
                f"--gpu-windows is 0 or at least {LEAST_WINDOWS >> 20}MiB, for one window a tenant"
            )
        if self.ipc is None:
            raise ConfigurationError("--gpu-windows is for tenants on this host: add --ipc")
        if self.device == "cpu" or self.parallel != "none":
            raise ConfigurationError("--gpu-windows needs a GPU that computes: expected --device auto or cuda")
        if self.shards > 1 or self.replicas > 1 or self.engine != "local":
            raise ConfigurationError("--gpu-windows needs a provider of one process: leave shards and replicas out")
        if self.record is not None:
            raise ConfigurationError("--record writes down what crosses the socket: leave --gpu-windows out")

    def check_front(self) -> None:
        """Raises ConfigurationError if --server-cert, --server-key and --registry, the files of a provider without a CA
        key, are not given together, or are given without --tls or with --names. Also raises it if --engine ray lacks
        these files or its address or is combined with --parallel, and if options of Ray are given without --engine
        ray."""
        files = {"--server-cert": self.server_cert, "--server-key": self.server_key, "--registry": self.registry}
        missing = [name for name, path in files.items() if path is None]
        if self.engine == "ray":
            if self.ray_address is None:
                raise ConfigurationError("--engine ray needs --ray-address HOST:PORT, the cluster's head")
            if re.fullmatch(_RAY_ADDRESS, self.ray_address) is None:
                raise ConfigurationError(
                    f"expected --ray-address HOST:PORT, the cluster's head, got {ascii(self.ray_address)[:80]}"
                )
            if not self.tls or missing:
                raise ConfigurationError(
                    f"--engine ray needs --tls, --server-cert, --server-key and --registry, got no "
                    f"{'--tls' if not self.tls else missing[0]}: whoever is admitted to the cluster runs code on its "
                    "hosts, so none of them may hold the CA's key (docs/ray.md)"
                )
            if self.parallel != "none":
                raise ConfigurationError("--engine ray does not go with --parallel")
        elif self.ray_address is not None or self.ray_gpus:
            raise ConfigurationError("--ray-address and --ray-gpus need --engine ray")
        if 0 < len(missing) < len(files):
            raise ConfigurationError(f"--server-cert, --server-key and --registry go together, got no {missing[0]}")
        if self.server_cert is not None and (not self.tls or self.names):
            raise ConfigurationError("--server-cert needs --tls, and holds its names: leave --names out")

    def check_exposure(self) -> None:
        """Raises ConfigurationError if a provider without TLS would listen on an address other than loopback."""
        if not self.tls and not is_loopback(self.host):
            raise ConfigurationError(f"without --tls only loopback is served, got --host {self.host}: add --tls")


GROUPS = {
    "Addresses and certificates": (
        "tls", "host", "port", "tensor_port", "ipc", "names", "state", "server_cert", "server_key", "registry",
        "registry_max_age_s",
    ),
    "What computes": (
        "threads", "device", "gpu_windows", "shards", "replicas", "engine", "ray_address", "ray_gpus", "remote_shards",
        "parallel", "parallel_timeout_s",
    ),
    "How requests are answered": ("batching", "slo_ms", "max_wait_ms", "busy_poll_ms", "drain_s"),
    "Watching": ("metrics_port", "health_port", "log_format", "record", "record_limit", "record_layers"),
}  # fmt: skip
"""The settings by the heading under which the help lists their flags; the model, its weights and --config have none."""


def load_settings(flags: dict[str, Any], config: Path | None = None) -> ProviderSettings:
    """Reads the settings of `provider serve` from all sources.

    Args:
        flags: by setting's name, the value from the command line; None if the flag was not given.
        config: a YAML file, or None.

    Raises:
        ConfigurationError: a value is not valid, or a key or a variable is not a setting; the message names the
            setting, the variable or the file.
    """
    return _load(ProviderSettings, flags, config)


def _load(kind: type[_Kind], flags: dict[str, Any], config: Path | None) -> _Kind:
    _check_environment(kind)
    prefix = str(kind.model_config["env_prefix"])
    if config is not None and not config.expanduser().is_file():
        raise ConfigurationError(f"expected a settings file, found none at {str(config)!r}")
    settings = type(kind.__name__, (kind,), {"model_config": SettingsConfigDict(yaml_file=config)})
    try:
        made: _Kind = settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as exc:  # `from None`: the exception's text quotes the value.
        first = exc.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"] if not _is_literal(part)) or "the settings"
        place = _place_of(str(next(iter(first["loc"]), "")), prefix, flags, config)
        if first["type"] == "extra_forbidden":
            known = kind.model_fields if len(first["loc"]) == 1 else TenantLimits.model_fields
            raise ConfigurationError(
                f"{place}{ascii(where)[:100]} is no setting{_instead(str(first['loc'][-1]), known)}"
            ) from None
        raise ConfigurationError(f"{place}setting {where}: {_tried(exc, first)}") from None
    except (
        SettingsError
    ) as exc:  # A variable is not JSON; the exception's text names the setting, and its cause quotes it.
        found = re.search(r'field "(\w+)"', str(exc))
        name = f"{prefix}{found[1]}".upper() if found else f"of {prefix}* that holds more than one value"
        raise ConfigurationError(
            f"the environment variable {name} is not JSON, in which a setting of several values is written: "
            "docs/operations.md has an example"
        ) from None
    except yaml.MarkedYAMLError as exc:  # The exception's text quotes the file.
        line = "" if exc.problem_mark is None else f", see line {exc.problem_mark.line + 1}"
        raise ConfigurationError(f"{str(config)!r} is not a YAML file of settings{line}") from None
    except (yaml.YAMLError, OSError, TypeError, ValueError) as exc:
        raise ConfigurationError(f"{str(config)!r} is not a YAML file of settings") from os_cause(exc)
    return made


def _is_literal(part: str | int) -> bool:
    """Returns whether pydantic adds a part to the place of an error only to say which of several forms it tried."""
    return str(part).startswith("literal[")


def _tried(exc: ValidationError, first: ErrorDetails) -> str:
    """Returns what was expected of a value; of one that may be a word or a number, both."""
    texts = [
        plain_message(each["msg"])
        for each in exc.errors(include_url=False, include_input=False)
        if each["loc"][:1] == first["loc"][:1]
    ]
    return " or ".join(texts) if any(map(_is_literal, first["loc"])) else plain_message(first["msg"])


def _place_of(name: str, prefix: str, flags: dict[str, Any], config: Path | None) -> str:
    """Returns the beginning of an error's text that names the environment variable or the file of a setting's value; an
    empty text if the value is that of a flag, which takes precedence."""
    if flags.get(name) is not None:
        return ""
    variables = [each for each in os.environ if each not in service_variables()]
    given = [each for each in variables if each.lower() == f"{prefix}{name}".lower()]
    return f"the environment variable {given[0]}: " if given else "" if config is None else f"{config}: "


def service_variables() -> set[str]:
    """Returns the names of the environment variables with the prefix that Kubernetes made, and that are no settings.

    In every container, Kubernetes describes each Service of the namespace by variables that begin with the Service's
    name (`enableServiceLinks`). So a Service `veilbase-provider` makes VEILBASE_PROVIDER_PORT=tcp://10.0.0.1:8443
    beside VEILBASE_PROVIDER_SERVICE_HOST and others. A variable of a setting's name counts as Kubernetes' own only if
    its value is such a URL, which no port is; a pod's own variable of the same name takes the place of Kubernetes'.

    Source: Kubernetes 1.37, pkg/kubelet/envvars/envvars.go, `FromServices` and `makeLinkVariables`.
    """
    services = {
        name.removesuffix("_SERVICE_HOST")
        for name in os.environ
        if name.startswith(ENV_PREFIX) and name.endswith("_SERVICE_HOST")
    }
    return {
        name
        for name, value in os.environ.items()
        for service in services
        if name.startswith(service) and _is_of_service(name.removeprefix(service), value)
    }


def _is_of_service(rest: str, value: str) -> bool:
    """Returns whether a variable describes a Service, by the part of its name after the Service's."""
    if rest == "_PORT":
        return re.match(r"(tcp|udp|sctp)://", value) is not None
    return re.fullmatch(r"_SERVICE_(HOST|PORT(_\w+)?)|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?", rest) is not None


def _check_environment(kind: type[_Settings]) -> None:
    """Raises ConfigurationError if an environment variable with the prefix names no setting; pydantic ignores these."""
    prefix = str(kind.model_config["env_prefix"])
    known = {f"{prefix}{name}".upper() for name in kind.model_fields} | service_variables()
    for name in sorted(os.environ):
        if name.upper().startswith(prefix) and name.upper() not in known:  # pydantic ignores upper and lower case.
            advice = _instead(name[len(prefix) :], [each.upper() for each in kind.model_fields])
            raise ConfigurationError(f"the environment variable {name[:80]!r} is no setting{advice}")


def _instead(given: str, known: Collection[str]) -> str:
    """Returns the end of an error text, which names the setting that was meant, or says where all stand."""
    return f": {instead(given, known, 'docs/operations.md')}"


_Kind = TypeVar("_Kind", bound=_Settings)
