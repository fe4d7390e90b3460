"""This module implements the command `tenant`, which runs the tenant's SDK from a shell."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.command_line import Command, Commands, finite, show_version, to_stderr, told_if_slow
from runtime.stopping import STOPPED, at_once, say_when_stopped, told_when_stopped
from tenant_sdk import tune
from tenant_sdk.adapter_checks import check_adapter_files
from tenant_sdk.endpoint.settings import OPTION_KINDS, options_given
from tenant_sdk.options import flag_of, takes_flags
from tenant_sdk.plain_values import WrongOption, positive
from tenant_sdk.serving.settings import StoreOptions, check_store_early
from tenant_sdk.training.checkpoints import check_writable_file
from tenant_sdk.training.recipe import check_offer, check_recipe_early, takes_recipe
from tenant_sdk.trust.bundle import kept_beginning
from wire.errors import ConfigurationError, VeilbaseError, printable

if TYPE_CHECKING:
    from tenant_sdk import TenantClient
    from wire.manifest import Manifest

app = typer.Typer(
    cls=Commands,
    help="Fine-tune and use adapters on a base model that a provider holds; data, text and adapters stay here.",
    no_args_is_help=True,
    rich_markup_mode=None,  # a table would cut long names of options
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def _command(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    pass


_PROGRAM = "tenant"
_PROVIDER, _PRIVACY, _OVER_HTTP = "Provider", "Privacy", "Address and access"
"""Headings under which the help lists options."""

Url = Annotated[
    list[str] | None,
    typer.Option(
        help="grpcs://host:port (without a port 8443), ipc:DIR or inproc:MODEL; default: the identity's endpoint.",
        rich_help_panel=_PROVIDER,
    ),
]
Identity = Annotated[
    list[Path] | None,
    typer.Option(help="Folder made by `provider enroll`; one for each provider.", rich_help_panel=_PROVIDER),
]
Mask = Annotated[
    str,
    typer.Option(
        help="lattice, pad, shares (two providers); gaussian-pool or off: rows go readable.",
        show_default="lattice",
        rich_help_panel=_PRIVACY,
    ),
]
Verify = Annotated[
    str | None,
    typer.Option(
        help="Checkpoint you trust (folder, GGUF, hub id, smollm2-135m): checks every reply.", rich_help_panel=_PRIVACY
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="Tokenizer you trust (folder, GGUF, hub id, smollm2-135m): it makes rows of text.",
        rich_help_panel=_PRIVACY,
    ),
]
PadRows = Annotated[
    int | None,
    typer.Option(
        help="Pad prompts and rows to so many tokens; costs as many.", metavar="TOKENS", rich_help_panel=_PRIVACY
    ),
]
AcceptChange = Annotated[
    list[str] | None,
    typer.Option(
        help="Accept that model, tokenizer, template, config or weights changed since first use; may be repeated.",
        rich_help_panel=_PRIVACY,
    ),
]
PeerUid = Annotated[
    int | None,
    typer.Option(
        help="For ipc: the provider's user id; default: that of DIR's owner.", metavar="UID", rich_help_panel=_PROVIDER
    ),
]
Parameters = Annotated[
    str | None, typer.Option(help="Of the lattice mask: default, conservative or lean.", rich_help_panel=_PRIVACY)
]
Pool = Annotated[
    str | None,
    typer.Option(
        help="Where ready masks wait: memory (at most 2147 MB), or disk: encrypted, in a file of at most 17180 MB in "
        "the cache, with at most 134 MB in memory.",
        show_default="memory",
        metavar="memory|disk",
        rich_help_panel=_PRIVACY,
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        help="How many bits of a masked number cross: balanced, 24 to 32 by each layer's norms; exact, 32; short, as "
        "balanced and 16 of a reply, without --verify.",
        show_default="balanced; tenant serve: exact",
        metavar="exact|balanced|short",
        rich_help_panel=_PRIVACY,
    ),
]
Hints = Annotated[
    str | None,
    typer.Option(
        help="Of the lattice mask: local (computed here; needs --verify), fetched or stream.",
        show_default="what is estimated faster",
        rich_help_panel=_PRIVACY,
    ),
]

Keep = Annotated[
    list[str] | None,
    typer.Option(
        help="Layers computed here, not sent: attention, lower:N (blocks) or names with *; may be repeated. From "
        "--verify's checkpoint, or else fetched from the provider.",
        rich_help_panel=_PROVIDER,
    ),
]
KeepDtype = Annotated[
    str | None,
    typer.Option(
        help="How kept weights are held: int8, or bf16: the checkpoint's own, twice the memory.",
        show_default="int8",
        metavar="int8|bf16",
        rich_help_panel=_PROVIDER,
    ),
]


@at_once(_PROGRAM)
def _client(
    *,
    url: list[str] | None,
    identity: list[Path] | None,
    mask: str,
    verify: str | None,
    parameters: str | None,
    hints: str | None,
    pool: str | None,
    precision: str | None,
    tokenizer: str | None,
    pad_rows: int | None,
    accept_change: list[str] | None,
    peer_uid: int | None,
    keep: list[str] | None,
    keep_dtype: str | None,
    check: Callable[[], None] = lambda: None,
    check_offer: Callable[[_Offer], None] = lambda offer: None,
    before_waiting: Callable[[], None] = lambda: None,
) -> TenantClient:
    """Returns a client, not connected yet, for the options that all commands share. Waits until its provider answers.

    Args:
        check: called before the provider is asked, for what else may be wrong with the command.
        check_offer: called with what the provider offers, where that is known before transformers is loaded: not of a
            provider in this process.
        before_waiting: called before the wait for a provider that does not answer at once.
    """
    tune()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # otherwise gRPC prints two lines before our error
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no hub is needed, since the bundle has every file
    from noise.options import DEFAULT_MASK
    from tenant_sdk.identity import endpoints_of
    from tenant_sdk.keep import KEEP_DTYPES, choose_kept, read_keep
    from tenant_sdk.plan import check_early, mask_options

    if not url and not identity:
        raise ConfigurationError("give --url, or --identity with a folder made by `provider enroll`")
    folders = identity or []
    _check_identities(folders)
    urls = url or endpoints_of(folders)
    if len(folders) > 1 and len(folders) != len(urls):
        raise ConfigurationError(f"expected one identity for each of {len(urls)} URLs, got {len(folders)}")
    identities = folders if len(folders) > 1 else [next(iter(folders), None)] * len(urls)
    check_early(
        urls=urls, identities=identities,
        mask=mask or DEFAULT_MASK, parameters=parameters, hints=hints, pool=pool,
        precision=precision, verify=verify, tokenizer=tokenizer, pad_rows=pad_rows,
        accept_changes=accept_change or (), peer_uid=peer_uid, keep=keep,
        keep_dtype=KEEP_DTYPES[0] if keep_dtype is None else keep_dtype,
    )  # fmt: skip
    check()
    for each, own in zip(urls, identities, strict=True):
        offer = _offer_of(each, own, peer_uid, before_waiting)
        if offer is not None:
            choose_kept(read_keep(keep, can_be_had=True), offer.manifest)  # check_early has asked whether
            check_offer(offer)

    # imported after the checks above, because torch and transformers take seconds to load
    with told_if_slow("tenant: loading torch and transformers", to_stderr):
        from tenant_sdk import TenantClient

    return TenantClient(
        urls if len(urls) > 1 else urls[0],
        identity=folders if len(folders) > 1 else next(iter(folders), None),
        mask=mask or DEFAULT_MASK,
        verify=verify,
        mask_options=mask_options(parameters, hints, pool, precision),
        tokenizer=tokenizer,
        pad_rows=False if pad_rows is None else pad_rows,
        accept_changes=accept_change or (),
        peer_uid=peer_uid,
        keep=keep,
        keep_dtype=KEEP_DTYPES[0] if keep_dtype is None else keep_dtype,
    )


def _check_identities(folders: Sequence[Path]) -> None:
    """Raises ConfigurationError or Unauthenticated if a folder is no identity, or its count of usage is damaged."""
    from tenant_sdk.usage import account_of
    from wire.transport.identity import load_identity
    from wire.usage import FILE_NAME, read_usage_file

    for folder in folders:
        account_of(load_identity(folder))
        read_usage_file(folder / FILE_NAME)


@dataclass(frozen=True)
class _Offer:
    """Holds what a provider offers, as far as it is asked before torch and transformers are loaded.

    Attributes:
        manifest: its manifest. The session asks again, and uses what it then gets.
        beginning: returns the beginning of a file of its bundle; no bytes if it does not come soon.
    """

    manifest: Manifest
    beginning: Callable[[str], bytes]

    def kept_or_asked(self, name: str) -> bytes:
        """Returns the beginning of a file of the bundle, of which a copy may be kept here."""
        return kept_beginning(self.manifest, name) or self.beginning(name)


def _offer_of(
    url: str, identity: Path | None, peer_uid: int | None, before_waiting: Callable[[], None]
) -> _Offer | None:
    """Waits until a provider answers, says so, and returns what it offers: what keeps it from this tenant, or does not
    go with what it offers, is then told before torch is loaded.

    Args:
        before_waiting: called first if the provider does not answer at once.

    Returns:
        What it offers. None for a provider in this process, and for one that did not send its whole manifest soon.
    """
    from tenant_sdk.plan import INPROC
    from wire.transport.identity import load_identity
    from wire.transport.ipc import folder as ipc

    if url.startswith(INPROC):
        return None
    known = None if identity is None else load_identity(identity)
    if url.startswith(ipc.SCHEME):
        ipc.check_listens(ipc.folder_of(url), peer_uid)
        from wire.transport.ipc.connection import IpcConnection  # loads torch, and neither gRPC nor transformers

        connection = IpcConnection(url, known, peer_uid)
        return _Offer(connection.manifest(), lambda name: next(connection.fetch(name), b""))
    from wire.transport.grpc_channel import first_chunk, offered_at_once, wait_for_provider

    manifest = offered_at_once(url, known)
    if manifest is None:
        before_waiting()
        manifest = wait_for_provider(url, known, lambda line: typer.echo(printable(f"tenant: {line}"), err=True))
    return None if manifest is None else _Offer(manifest, partial(first_chunk, url, known))


_CONNECTION: dict[str, Any] = {
    "url": Url, "identity": Identity, "mask": Mask, "verify": Verify, "parameters": Parameters, "hints": Hints,
    "pool": Pool, "precision": Precision, "tokenizer": Tokenizer, "pad_rows": PadRows, "accept_change": AcceptChange,
    "peer_uid": PeerUid, "keep": Keep, "keep_dtype": KeepDtype,
}  # fmt: skip
"""The types of the options of `_client`, by name."""


def _takes_connection(run: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of `_client`, in place of its parameter `connection`, in which it gets them."""
    own = inspect.signature(run, eval_str=True).parameters
    options = {
        name: inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default="" if kind is Mask else None, annotation=kind
        )
        for name, kind in _CONNECTION.items()
    }

    def command(**given: Any) -> None:
        connection = {name: given.pop(name) for name in _CONNECTION}
        run(**given, connection=connection)

    parameters = [
        shown.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, each in own.items()
        for shown in (options.values() if name == "connection" else (each,))
    ]
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


@app.command(cls=Command)
@takes_recipe(_CONNECTION)
def finetune(recipe: Any) -> None:
    """Train an adapter on a data set."""
    say_when_stopped(f"{STOPPED}; the same command goes on from the last checkpoint, if there is one")
    not_connected = _checked_client(recipe)
    with at_once(_PROGRAM):
        from tenant_sdk.training.command import finetune_command

    with _connected(not_connected, recipe) as client:
        finetune_command(recipe, client, _show)


@app.command(cls=Command)
@takes_recipe(_CONNECTION, is_run=False)
def plan(
    recipe: Any,
    *,
    out: Annotated[Path | None, typer.Option(help="File to write the plan to, for `tenant finetune --plan`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    price_per_gb: Annotated[
        float,
        typer.Option(help="Price of 10^9 bytes sent or received.", min=0, show_default=False, callback=finite),
    ] = 0.0,
    price_per_hour: Annotated[
        float, typer.Option(help="Price of an hour of the whole run.", min=0, show_default=False, callback=finite)
    ] = 0.0,
) -> None:
    """Tell what `tenant finetune` would cost, before anything of the data is sent."""
    if out is not None:
        check_writable_file(out, "the plan (--out)")
    not_connected = _checked_client(recipe, is_run=False)
    with at_once(_PROGRAM):
        from tenant_sdk.training.command import plan_command

    with _connected(not_connected, recipe) as client:
        plan_command(recipe, client, _show, out=out, as_json=as_json, per_gb=price_per_gb, per_hour=price_per_hour)


@contextlib.contextmanager
def _connected(not_connected: TenantClient, recipe: Any) -> Iterator[TenantClient]:
    """Connects a client for a recipe, which is compared with what the provider offers before a trusted checkpoint is,
    and closes it at the end."""
    with contextlib.closing(not_connected) as client:
        client.connect(partial(check_offer, recipe))
        yield client


@at_once(_PROGRAM)
def _checked_client(recipe: Any, is_run: bool = True) -> TenantClient:
    """Checks a recipe, and returns a client for it as `_client` does."""
    connection = {name: getattr(recipe, name) for name in _CONNECTION}
    check_recipe_early(recipe, is_run)
    check_with_torch = cache(partial(_check_with_torch, recipe, is_run))
    not_connected = _client(
        **{**connection, "mask": connection["mask"] or ""},
        check=partial(_check_before_asking, recipe),
        check_offer=lambda offer: check_offer(recipe, offer.manifest, offer.kept_or_asked),
        # PEFT checks the recipe's own settings, which is not left until after a wait
        before_waiting=check_with_torch if recipe.peft_config is not None else lambda: None,
    )
    check_with_torch()
    return not_connected


def _check_before_asking(recipe: Any) -> None:
    """Checks what a provider need not be asked about: the options that let losses decide."""
    from noise.options import DEFAULT_MASK
    from tenant_sdk.plan import may_be_steered

    options = recipe.options()
    # an identity's own URL is never that of a provider in this process
    steered = may_be_steered(recipe.url or [""], recipe.mask or DEFAULT_MASK, recipe.verify)
    options.check_loss_branches(options.eval_data is not None, steered)


def _check_with_torch(recipe: Any, is_run: bool) -> None:
    with told_if_slow("tenant: loading what trains, and checking the data", to_stderr):
        from tenant_sdk.training.command import check_recipe

        check_recipe(recipe, is_run)


def _show(text: str, nl: bool = True) -> None:
    """Prints a text on stdout. A terminal gets no control characters, which a model's answer may hold; a file or a pipe
    gets the text as it is."""
    typer.echo(printable(text) if sys.stdout.isatty() else text, nl=nl)


@app.command(cls=Command)
@_takes_connection
def generate(
    prompt: Annotated[str, typer.Argument(help="The question; - reads standard input.")],
    connection: dict[str, Any],
    adapter: Annotated[Path | None, typer.Option(help="Adapter folder; default: the base model.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Length limit.", show_default="128, or what the context leaves")
    ] = None,
    fixed_length: Annotated[
        bool,
        typer.Option(
            "--fixed-length",
            help="Send the calls of the longest answer, whatever the text is.",
            rich_help_panel=_PRIVACY,
        ),
    ] = False,
) -> None:
    """Answer a prompt, and print the answer piece by piece."""
    text = sys.stdin.read() if prompt == "-" else prompt
    if adapter is not None:
        check_adapter_files(adapter)
    if max_new_tokens is not None:
        positive("max_new_tokens", max_new_tokens)
    client = _client(**connection)
    with client:
        client.generate(
            text, adapter, max_new_tokens, on_text=lambda piece: _show(piece, nl=False), fixed_length=fixed_length
        )
    typer.echo()


@app.command(cls=Command)
@takes_flags(StoreOptions)
@_takes_connection
def chat(
    *,
    options: dict[str, Any],
    connection: dict[str, Any],
    adapters: Annotated[Path | None, typer.Option(help="Folder of adapters, a subfolder each.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Length limit of an answer.", show_default="128, or what the context leaves")
    ] = None,
) -> None:
    """Talk to the base model or an adapter; /adapter NAME switches."""
    _check_options(adapters, options, check_store_early)
    if max_new_tokens is not None:
        positive("max_new_tokens", max_new_tokens)
    client = _client(**connection)
    with at_once(_PROGRAM):
        from tenant_sdk.terminal import talk

    with client:
        talk(client, adapters, _typed_lines(), lambda text: _show(text, nl=False), max_new_tokens, options)


def _check_options(
    adapters: Path | None, options: dict[str, Any], check: Callable[[Path | None, dict[str, Any]], object]
) -> None:  # fmt: skip
    """Checks the folder of adapters, and options by `check`, before anything is loaded. Errors name the flag."""
    if adapters is not None and not adapters.is_dir():
        raise ConfigurationError(f"--adapters: {adapters} is not a folder")
    if adapters is not None and not os.access(adapters, os.R_OK | os.X_OK):
        raise ConfigurationError(f"--adapters: {adapters} cannot be read: permission denied")
    try:
        check(adapters, options)
    except WrongOption as exc:
        flags = {each.name: flag_of(each) for kind in OPTION_KINDS for each in fields(kind)}
        raise ConfigurationError(
            re.sub(rf"\b{exc.option}\b(?= was| must| is | has)", flags[exc.option], str(exc))
        ) from None


def _typed_lines() -> Iterator[str]:
    """Yields the lines of standard input, and shows a prompt before each if standard input is a terminal."""
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line:
            return
        yield line


@app.command(cls=Command)
@takes_flags(*OPTION_KINDS)
@_takes_connection
def serve(
    *,
    options: dict[str, Any],
    connection: dict[str, Any],
    adapters: Annotated[Path | None, typer.Option(help="Folder of adapters, a subfolder each.")] = None,
    host: Annotated[
        str,
        typer.Option(help="Address; beyond this machine it needs TLS, a key and --verify.", rich_help_panel=_OVER_HTTP),
    ] = ("127.0.0.1"),
    port: Annotated[
        int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535, rich_help_panel=_OVER_HTTP)
    ] = 8000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the key of clients; without one, a key is made and printed.", rich_help_panel=_OVER_HTTP
        ),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain, PEM.", rich_help_panel=_OVER_HTTP)] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.", rich_help_panel=_OVER_HTTP)] = None,
    unverified: Annotated[
        bool,
        typer.Option(
            "--unverified", help="Serve on this machine although replies are not verified.", rich_help_panel=_PRIVACY
        ),
    ] = False,
    release_values: Annotated[
        float | None,
        typer.Option(
            help="Give logprobs, rounded to this step, and embeddings, to four times it, also under the lattice mask.",
            metavar="STEP",
            rich_help_panel=_PRIVACY,
        ),
    ] = None,
) -> None:
    """Serve adapters and the base model over HTTP, with OpenAI's interface."""
    with at_once(_PROGRAM):
        from tenant_sdk.endpoint.command import check_port, serve_command, serving_settings

    if connection["precision"] is None and connection["mask"] in ("", "lattice"):
        connection["precision"] = "exact"  # Rounded rows would make all numbers that may be shown coarser.
    settings = serving_settings(
        host=host, port=port, api_key_file=api_key_file, tls_cert=tls_cert, tls_key=tls_key, unverified=unverified,
        release_values=release_values, is_verified=connection["verify"] is not None,
        error_sigma=_error_sigma(connection),
    )  # fmt: skip
    check_port(settings)
    _check_options(adapters, options, options_given)
    client = _client(**connection)
    with client:
        serve_command(client, adapters, settings, _show, **options)


def _error_sigma(connection: dict[str, Any]) -> float | None:
    """Returns the standard deviation of the error that a session's mask will leave, or None if the provider's layers
    decide it."""
    from noise.options import DEFAULT_MASK
    from noise.params import PARAMETERS

    if (connection["mask"] or DEFAULT_MASK) != "lattice":
        return 0.0
    if connection["precision"] != "exact":
        return None
    named = connection["parameters"] or "default"
    return float(PARAMETERS[named].sigma) if named in PARAMETERS else None  # a wrong name is refused in its place


@app.command(cls=Command)
@_takes_connection
def explain(
    connection: dict[str, Any],
    everything: Annotated[
        bool, typer.Option("--all", help="Tell also what DoRA, other kinds of adapters and fine-tuning show.")
    ] = False,
) -> None:
    """Print the privacy in force: scheme, assumption, parameters, what stays visible, costs."""
    with _client(**connection) as client:
        client.explain(everything)


@app.command(cls=Command)
def status(
    identity: Annotated[
        list[Path] | None, typer.Option(help="Folder made by `provider enroll`; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, also by kind of request.")] = False,
) -> None:
    """Print your provider, and your own count of what you used of it; sends nothing."""
    from tenant_sdk.usage import status_of, status_text

    if not identity:
        raise ConfigurationError("give --identity with a folder made by `provider enroll`: usage is counted in it")
    typer.echo(printable(status_text([status_of(folder) for folder in identity], as_json)), nl=False)


def main() -> None:
    """Runs the command line. An error of this project is printed as one line on stderr, with exit code 1.

    For errors in the command line itself, typer prints its usage, with exit code 2. Ctrl-C gives exit code 130, and
    SIGTERM 143, with one line (runtime/stopping.py).
    """
    warnings.showwarning = lambda message, *_, **__: typer.echo(printable(f"tenant: warning: {message}"), err=True)
    try:
        with told_when_stopped(_PROGRAM):
            app()
    except VeilbaseError as exc:
        typer.echo(f"tenant: {printable(str(exc), one_line=True)}", err=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
