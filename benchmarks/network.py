"""Measures masked against unmasked runs over a network: decode and fine-tuning, as in Symbiosis, figure 21.

Provider and tenant are two hosts, joined by a link of 1 Gbit/s each way with a round trip of 1 ms or 20 ms
(benchmarks/link.py). In this benchmark a delay is always the whole round trip, and the table shows the measured round
trip. Both hosts share this machine's cores. With `lattice`, hints are fetched and masks and effects are made before the
clock starts: once with rows of 32 bits (`precision="exact"`), and once as by default. With `off`, rows of 32 bits are
sent without a mask. The runs take turns. The benchmark needs permission to make network namespaces (root).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.common import Worker, interleaved, provider, ratios, serve_worker
from benchmarks.link import ADDRESSES, Hosts, NoNamespaces

PROMPT_TOKENS, NEW_TOKENS = 16, 8
SHAPE = (2, 64)
ROUND_TRIPS_MS = (1.0, 20.0)
UNMASKED, EXACT, SHORT = "off", "lattice, 32 bits", "lattice"
OPTIONS: dict[str, dict[str, Any]] = {
    UNMASKED: {"mask": "off"},
    EXACT: {"mask": "lattice", "mask_options": {"background": False, "precision": "exact"}},
    SHORT: {"mask": "lattice", "mask_options": {"background": False}},
}
"""The options of the tenants, by the name of the run."""
WORK = {"decode": f"decode of {NEW_TOKENS} tokens", "step": f"fine-tuning step {SHAPE[0]}×{SHAPE[1]}"}


def _decode_of(client: Any) -> Callable[[], Any]:
    """Returns a function that generates exactly NEW_TOKENS tokens after a fixed prompt, with one call for each layer
    group and token."""
    import torch

    model = client.load_model()
    ids = torch.arange(100, 100 + PROMPT_TOKENS)[None]
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options)


def step_of(client: Any) -> Callable[[], Any]:
    """Returns a function that takes one fine-tuning step, with a LoRA adapter on every linear layer."""
    import torch
    from peft import get_peft_model

    from tenant_sdk.training.finetune import default_peft_config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(client.load_model(), default_peft_config())
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)
    ids = torch.arange(100, 100 + SHAPE[0] * SHAPE[1]).view(SHAPE)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    return step


def tenant(url: str, folder: str, run: str, work: str) -> None:
    """Runs one tenant that decodes or fine-tunes, as a `Worker` process; `run` is a key of OPTIONS."""
    import tenant_sdk

    tenant_sdk.tune()

    backward = work == "step"
    num_tokens = SHAPE[0] * SHAPE[1] if backward else PROMPT_TOKENS + NEW_TOKENS
    with tenant_sdk.TenantClient(
        url, identity=Path(folder) / "bench", arithmetic="ring", cache=folder, **OPTIONS[run]
    ) as client:
        client.fetch_hints(backward)
        unit = step_of(client) if backward else _decode_of(client)
        serve_worker(unit, lambda: client.prepare(num_tokens, backward))


def run(
    round_trips_ms: tuple[float, ...] = ROUND_TRIPS_MS, rounds: int = 3, options: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """Measures every kind of work at every delay.

    Args:
        round_trips_ms: the round-trip times of the link, in milliseconds.
        rounds: the number of measured rounds; one round before them warms up.
        options: options of `provider serve`.

    Returns:
        One entry for each delay and kind of work: the round trip that was set, the measured one, the median seconds of
        each run, and the medians over the rounds of the ratios masked / unmasked and by default / with 32 bits.

    Raises:
        NoNamespaces: this user or kernel cannot make two hosts.
    """
    found = []
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        with hosts.inside(0):
            url, _ = stack.enter_context(provider(Path(folder), "--host", ADDRESSES[0], *options))
        workers = {}
        with hosts.inside(1):  # the hints are fetched while there is no delay
            for work in WORK:
                for name in OPTIONS:
                    workers[work, name] = stack.enter_context(Worker(__name__, "tenant", url, folder, name, work))
        for delay in round_trips_ms:
            hosts.set_round_trip(delay)
            measured = hosts.measured_round_trip_ms(urlsplit(url).port or 0)
            for work in WORK:
                each = {name: workers[work, name] for name in OPTIONS}
                seconds = interleaved(
                    {name: worker.run for name, worker in each.items()}, rounds,
                    before={name: worker.prepare for name, worker in each.items()},
                )  # fmt: skip
                found.append({
                    "delay_ms": delay, "measured_ms": measured, "work": work,
                    "seconds": {name: statistics.median(values) for name, values in seconds.items()},
                    "ratio": ratios(seconds, UNMASKED)[SHORT],
                    "saved": ratios(seconds, EXACT)[SHORT],
                })  # fmt: skip
    return found


def report(found: list[dict[str, Any]]) -> None:
    """Prints the results as a table."""
    print(f"| round trip, ms (measured) | 1 Gbit/s each way | {', s | '.join(OPTIONS)}, s | tokens/s, {SHORT} "
          f"| {SHORT} / {UNMASKED} | {SHORT} / {EXACT} |\n|" + "---|" * 8)  # fmt: skip
    for each in found:
        tokens = NEW_TOKENS if each["work"] == "decode" else SHAPE[0] * SHAPE[1]
        seconds = [each["seconds"][name] for name in OPTIONS]
        cells = [f"{value:.2f}" for value in seconds] + [f"{tokens / seconds[-1]:.2f}"]
        print(f"| {each['delay_ms']:g} ({each['measured_ms']:.1f}) | {WORK[each['work']]} | {' | '.join(cells)} "
              f"| {each['ratio']:.2f} | {each['saved']:.2f} |")  # fmt: skip


def main() -> None:
    """Prints the table, or exits with code 2 if network namespaces cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network")
    parser.add_argument("--round-trip-ms", type=float, nargs="+", default=list(ROUND_TRIPS_MS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--base-layers", help="serve these layers only, for a quick trial")
    given, _ = parser.parse_known_args()
    options = ("--base-layers", given.base_layers) if given.base_layers else ()
    try:
        report(run(tuple(given.round_trip_ms), given.rounds, options))
    except NoNamespaces as exc:
        print(f"{exc}: run it as root on Linux with iproute2", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    if sys.argv[1:2] == ["tenant"]:
        tenant(*sys.argv[2:])
    else:
        main()
