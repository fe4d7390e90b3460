"""This module defines the `provider` command: serve, enroll, revoke, tenants, status, usage,
export-server, export-registry."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from provider.config import GROUPS, NO_JOINING, STATE_HELP, ProviderSettings, load_settings, service_variables
from provider.flags import takes_settings
from runtime.command_line import Command, Commands, finite, show_version, to_stderr
from runtime.stopping import at_once, told_when_stopped
from wire.errors import ConfigurationError, VeilbaseError, printable
from wire.transport.event_engine import prefer_waiting_in_place

DEFAULT_ENDPOINT = "grpcs://127.0.0.1:8443"
"""The URL where `provider serve --tls` listens if no address or port is given."""

app = typer.Typer(
    cls=Commands,
    help="Serve a base model's linear layers to tenants that keep everything else, and let tenants in.",
    no_args_is_help=True,
    rich_markup_mode=None,  # a table would cut long names of options
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def _command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    pass


_State = Annotated[Path | None, typer.Option(help=STATE_HELP, show_default="~/.veilbase/provider")]


@app.command(cls=Command)
@takes_settings(ProviderSettings, GROUPS)
def serve(flags: dict[str, Any], config: Path | None) -> None:
    """Serve a model; print `ready URL` once requests are accepted."""
    _prepare_libraries()
    with at_once("provider"):
        from provider.operations.logs import configure
        from provider.serve import serve as run

    settings = load_settings(flags, config)
    configure(settings.log_format)
    ignored = service_variables()
    if ignored:
        logging.getLogger(__name__).info("%d variables of Kubernetes' Services are not settings: ignored", len(ignored))
    run(settings)


@app.command(cls=Command, hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def shard() -> None:
    """Say what has taken this command's place."""
    raise ConfigurationError(NO_JOINING)


@app.command(cls=Command)
def enroll(
    name: Annotated[str, typer.Argument(help="Tenant: a-z 0-9 . _ -")],
    out: Annotated[Path, typer.Option(help="Folder for the identity: key, certificate, CA, endpoint.")],
    state: _State = None,
    days: Annotated[int, typer.Option(help="Lifetime of the certificate.")] = 365,
    shard: Annotated[bool, typer.Option("--shard", hidden=True)] = False,
    endpoint: Annotated[
        str | None,
        typer.Option(help="This provider's URL; without a port 8443.", show_default="that of the last serve"),
    ] = None,
) -> None:
    """Issue a tenant's identity."""
    from provider.identity.authority import StateDir
    from provider.identity.registry import enroll as issue
    from provider.serve import ENDPOINT_FILE

    if shard:
        raise ConfigurationError(NO_JOINING)
    path = _state_path(state)
    if (path / ENDPOINT_FILE).exists() and not (path / "ca_key.pem").exists():
        raise ConfigurationError(f"the provider of {str(path)!r} holds no CA key: enrol where the key is (docs/ray.md)")
    opened = StateDir(path)
    served = _last_endpoint(opened.path)
    if endpoint is None and served is not None and served.endswith(":0"):
        raise ConfigurationError(
            f"the provider of {str(path)!r} has no port yet, as --port 0 picks one: enrol once `provider serve` says "
            "ready, or give --endpoint"
        )
    url = endpoint if endpoint is not None else served or DEFAULT_ENDPOINT
    record = issue(opened, name, out, url, days)
    typer.echo(f"enrolled {record.name} until {record.not_after:%Y-%m-%d}: {out}")
    whence = "that of the last serve" if served else "a guess, as nothing was served yet"
    if endpoint is not None:
        whence = "as given"
    typer.echo(f"endpoint {url} ({whence}); to change it, edit {out / 'endpoint'}")


@app.command(cls=Command)
def revoke(name: Annotated[str, typer.Argument(help="Tenant.")], state: _State = None) -> None:
    """Refuse all requests of a tenant from now on, also on streams that are open."""
    from provider.identity.authority import StateDir
    from provider.identity.registry import revoke as withdraw
    from provider.identity.registry import tenants as registered

    opened = StateDir(_state_path(state), create=False)
    num_revoked = withdraw(opened, name)
    if num_revoked:
        typer.echo(f"revoked {num_revoked} certificate{'' if num_revoked == 1 else 's'} of {name}")
        return
    last = [record for record in registered(opened) if record.name == name][-1]
    if last.revoked_at is None:
        typer.echo(f"nothing to revoke: the last certificate of {name} expired on {last.not_after:%Y-%m-%d}")
    else:
        typer.echo(f"{name} is already revoked, since {last.revoked_at:%Y-%m-%d}")


@app.command(cls=Command)
def tenants(state: _State = None) -> None:
    """List every certificate issued: name, status, expiry, serial number."""
    from provider.identity.authority import StateDir
    from provider.identity.registry import tenants as registered

    now = datetime.now(UTC)
    for record in registered(StateDir(_state_path(state), create=False)):
        status = "revoked" if record.revoked_at else "active" if record.is_live(now) else "expired"
        role = " (shard)" if record.role == "shard" else ""
        typer.echo(f"{record.name:<24} {status:<8} {record.not_after:%Y-%m-%d} {record.serial}{role}")


@app.command(cls=Command)
def export_server(
    out: Annotated[Path, typer.Option(help="Folder for server_cert.pem and server_key.pem.")],
    host: Annotated[str, typer.Option(help="Address or name under which tenants reach the provider.")],
    state: _State = None,
    names: Annotated[str, typer.Option(help="Further names, comma-separated.")] = "",
) -> None:
    """Issue a certificate for a provider on a host that holds no CA key."""
    from provider.identity.authority import StateDir
    from provider.identity.front import export_server_identity

    opened = StateDir(_state_path(state), create=False)
    export_server_identity(opened, out, host, [name for name in names.split(",") if name])
    typer.echo(f"wrote {out / 'server_cert.pem'} and {out / 'server_key.pem'}")


@app.command(cls=Command)
def export_registry(
    out: Annotated[Path, typer.Option(help="File of the copy; an older copy is replaced.")], state: _State = None
) -> None:
    """Write a signed copy of the registry for a provider that holds no CA key."""
    from provider.identity.authority import StateDir
    from provider.identity.front import export_registry as export

    num_certificates = export(StateDir(_state_path(state), create=False), out)
    typer.echo(f"wrote {num_certificates} certificate{'' if num_certificates == 1 else 's'} to {out}")


@app.command(cls=Command)
def status(
    state: _State = None,
    watch: Annotated[
        float | None, typer.Option(help="Show it again every so many seconds.", min=0.1, callback=finite)
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Print nothing; exit 0 where a provider answers.")] = False,
) -> None:
    """Show the present state of the provider that runs with this state directory."""
    from provider.operations import status as table

    path = _state_path(state)
    if check:
        table.check(path)
    else:
        with contextlib.suppress(KeyboardInterrupt):
            table.show(path, watch)


@app.command(cls=Command)
def usage(
    name: Annotated[str | None, typer.Argument(help="Tenant.", show_default="all of them")] = None,
    state: _State = None,
    by: Annotated[str, typer.Option(help="A line for each day, month, or in total.", metavar="day|month|total")] = (
        "total"
    ),
    since: Annotated[str | None, typer.Option(help="First UTC day, such as 2026-07-01.", metavar="DATE")] = None,
    until: Annotated[str | None, typer.Option(help="Last UTC day.", metavar="DATE")] = None,
    tenant: Annotated[str | None, typer.Option(help="The same as NAME.", metavar="NAME")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, also by class of work.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with errors by their names.")] = False,
    prices: Annotated[Path | None, typer.Option(help="Price list, YAML: adds what usage costs.")] = None,
) -> None:
    """Print what each tenant used, up to a minute ago: requests, rows, tokens, bytes, seconds, errors."""
    from provider.identity.registry import check_known
    from provider.operations.usage import FILE_NAME, PriceList, given_day, given_period, report
    from provider.serve import ENDPOINT_FILE
    from wire.usage import read_usage_file

    if name is not None and tenant is not None and name != tenant:
        raise ConfigurationError(f"expected one tenant, got {name!r} and --tenant {tenant!r}")
    if as_csv and as_json:
        raise ConfigurationError("expected one of --csv and --json, got both")
    name, first, last = name or tenant, given_day("--since", since), given_day("--until", until)
    if first is not None and last is not None and first > last:
        raise ConfigurationError(f"expected --since before --until, got {first} and {last}")
    by, price_list = given_period(by), None if prices is None else PriceList.read(prices)
    path = _state_path(state)
    if not any((path / name).exists() for name in (FILE_NAME, ENDPOINT_FILE, "ca_key.pem")):
        raise ConfigurationError(
            f"expected --state to be a provider's state directory, found no provider at {str(path)!r}: name that of "
            "`provider serve --tls`"
        )
    file = read_usage_file(path / FILE_NAME)
    if name is not None:
        check_known(name, {*file.tenants, *_enrolled(path)})
    made = report(file, by, first, last, name)
    made.prices = price_list
    for note in made.notes:
        to_stderr(f"provider: {note}")
    if not made.periods:
        whose = "" if name is None else f" of {name}"
        when = (f" since {first}" if first else "") + (f" until {last}" if last else "")
        to_stderr(f"provider: no requests{whose} are counted here{when or ' yet'}; counts are saved once a minute")
    typer.echo(made.csv() if as_csv else made.json() if as_json else made.table(), nl=False)


def _enrolled(state: Path) -> set[str]:
    """Returns the names of all tenants that were ever enrolled here; none where the CA's key is elsewhere."""
    from provider.identity.authority import StateDir
    from provider.identity.registry import tenants as registered

    if not (state / "ca_key.pem").exists():
        return set()
    return {record.name for record in registered(StateDir(state, create=False))}


def _prepare_libraries() -> None:
    """Sets the environment variables that gRPC, OpenMP and huggingface_hub read when they are loaded.

    Callers must call this before grpc, torch or huggingface_hub is imported.
    """
    # As with `tenant`: nothing is downloaded unless the operator says so, and without a network a name that is not
    # cached is refused at once, while the hub's client would try again for a minute.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own log lines name peers' addresses.
    # libgomp's idle threads spin by default. With a tenant on the same cores, quantising SmolLM2 took 30 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    prefer_waiting_in_place()


def _state_path(state: Path | None) -> Path:
    return load_settings({"state": state}).state


def _last_endpoint(state: Path) -> str | None:
    """Returns the URL of the last `serve --tls` from this state directory, or None if there was none."""
    from provider.serve import ENDPOINT_FILE

    try:
        return (state / ENDPOINT_FILE).read_text().strip()
    except OSError:
        return None


def main() -> None:
    """Runs the command line.

    A VeilbaseError is printed as one line on stderr, with exit code 1. For an error in the usage, typer prints the
    usage and exits with code 2. Ctrl-C gives exit code 130, with one line; see `provider.serve.serve` for a provider
    that is ready.
    """
    try:
        with told_when_stopped("provider"):
            app()
    except VeilbaseError as exc:
        print(f"provider: {printable(str(exc), one_line=True)}", file=sys.stderr)
        sys.exit(1)
