"""Measures how fast an answer that copies from its prompt is generated, with and without speculation, over a network.

With `--drafts none kept kept-lookup` it measures what keeping the attention's layers (docs/keep.md) adds. Then all
engines verify, since layers can be kept from a checkpoint only.

Provider and tenant are two hosts, joined by a link of 1 Gbit/s each way (benchmarks/link.py), and both use this
machine's cores. One request at a time runs in an engine over SmolLM2-135M. The clock starts when the first token is
chosen, so the prompt is not in the figures. Hints are fetched, and with `lattice` masks are made, before the clock
starts. Engines take turns, and all give the same text, or the benchmark fails. The benchmark needs permission to make
network namespaces (root).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.common import Worker, interleaved, local_model, provider, ratios
from benchmarks.link import ADDRESSES, Hosts, NoNamespaces

PROMPT = (
    "Repeat this text word for word, and nothing else:\n\nThe harbour master keeps a ledger of every vessel that "
    "enters the bay. Each line gives the name of the ship, her flag, her draught in metres and the hour at which the "
    "pilot went aboard. In winter the entries are few."
)
PROMPT_TOKENS = 96
"""Masks are made for a prompt of this many tokens, and PROMPT has fewer tokens."""
NEW_TOKENS = 32
NUM_DRAFTED = 7
ROUND_TRIP_MS = 20.0
NONE, LOOKUP, DRAFT = "none", "lookup", "draft"
KEPT, KEPT_LOOKUP = "kept", "kept-lookup"
DRAFTS = {
    NONE: "without speculation", LOOKUP: "prompt lookup", DRAFT: "draft model (the model itself)",
    KEPT: "attention kept", KEPT_LOOKUP: "attention kept, prompt lookup",
}  # fmt: skip
"""Maps each engine's name to the way in which the engine drafts tokens, in words."""
CHECKPOINT = "smollm2-135m"
"""What all engines verify against, and keep layers of, if one of them keeps layers."""
BAR = 4.0
"""The target: tokens per second with prompt lookup are at least this many times those without speculation."""
KEPT_BAR = 1.8
"""The target of keeping the attention's layers alone."""


class _FirstToken:
    """Stops the engine before it chooses the first token of an answer, until `go` is set. It is a logits processor that
    changes no logits."""

    def __init__(self) -> None:
        self.reached, self.go = threading.Event(), threading.Event()

    def __call__(self, token_ids: Any, logits: Any) -> Any:
        self.reached.set()
        self.go.wait()
        return logits


class _Decoding:
    """Decodes one answer: `prepare` computes the prompt, and `run` the rest."""

    def __init__(self, client: Any, engine: Any, num_new: int, num_rows: int, record: Path) -> None:
        """Keeps the arguments; nothing is computed before `prepare`.

        Args:
            client, engine: the tenant's session, and its engine.
            num_new: the number of tokens of an answer.
            num_rows: the number of rows for which masks are made before an answer.
            record: the file to which the answer's text and its number of passes are written.
        """
        self._client, self._engine, self._num_new, self._num_rows, self._record = (
            client, engine, num_new, num_rows, record,
        )  # fmt: skip

    def prepare(self) -> None:
        """Makes masks and waits until the prompt has been computed."""
        self._client.prepare(self._num_rows)
        self._held = _FirstToken()
        self._answer = self._engine.submit(
            PROMPT, max_new_tokens=self._num_new, eos_token_id=[], logits_processor=[self._held]
        )
        self._held.reached.wait()

    def run(self) -> None:
        """Lets the engine compute the rest of the answer, waits for its end, and writes the record."""
        from tenant_sdk.keep import choose_kept

        before = self._client.traffic.calls
        self._held.go.set()
        text = self._answer.result()
        manifest = self._client.connect()
        num_groups = len(choose_kept(self._client.keep, manifest).asked(manifest).groups)
        num_passes = (self._client.traffic.calls - before) // num_groups
        self._record.write_text(json.dumps({"text": text, "passes": num_passes}))


def tenant(url: str, folder: str, mask: str, draft: str, num_drafted: str, num_new: str, verify: str) -> None:
    """Runs one tenant with an engine, as a worker; `verify` is a checkpoint, or empty."""
    import tenant_sdk

    tenant_sdk.tune()

    from benchmarks.common import serve_worker

    drafted = 0 if draft in (NONE, KEPT) else int(num_drafted)
    keep = "attention" if draft in (KEPT, KEPT_LOOKUP) else None
    options = {"background": False} if mask == "lattice" else {}
    with tenant_sdk.TenantClient(
        url, identity=Path(folder) / "bench", mask=mask, arithmetic="ring", mask_options=options, cache=folder,
        verify=verify or None, keep=keep,
    ) as client:  # fmt: skip
        local = {"draft": local_model(), "draft_tokenizer": client.tokenizer} if draft == DRAFT else {}
        speculation = tenant_sdk.Speculation(drafted, **local) if drafted else None
        with tenant_sdk.Engine(client, speculation=speculation) as engine:
            num_rows = PROMPT_TOKENS + int(num_new) + int(num_new) * drafted // 2
            decoding = _Decoding(client, engine, int(num_new), num_rows, Path(folder) / f"{draft}.json")
            serve_worker(decoding.run, decoding.prepare)


def run(
    drafts: Sequence[str], mask: str, num_drafted: int, num_new: int, round_trip_ms: float, rounds: int
) -> tuple[float, dict[str, dict[str, Any]]]:
    """Measures engines in turns.

    Args:
        drafts: names of DRAFTS.
        mask: the mask of all engines.
        num_drafted: the tokens that are drafted before a pass.
        num_new: the number of tokens of an answer.
        round_trip_ms: the round-trip time of the link, in milliseconds.
        rounds: the number of measured rounds.

    Returns:
        The measured round trip in milliseconds; and for each engine its text, its number of passes, the median seconds,
        the number of new tokens and, as `ratio`, its tokens per second divided by those of the first engine, as the
        median over the rounds.

    Raises:
        NoNamespaces: this user or kernel cannot make two hosts.
        SystemExit: the engines gave different texts.
    """
    verify = CHECKPOINT if {KEPT, KEPT_LOOKUP} & set(drafts) else ""
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with hosts.inside(0):
            url, _ = stack.enter_context(provider(folder, "--host", ADDRESSES[0]))
        with hosts.inside(1):  # hints are fetched before there is a delay
            workers = {
                draft: stack.enter_context(
                    Worker(__name__, "tenant", url, str(folder), mask, draft, str(num_drafted), str(num_new), verify)
                )
                for draft in drafts
            }
        hosts.set_round_trip(round_trip_ms)
        measured = hosts.measured_round_trip_ms(urlsplit(url).port or 0)
        seconds = interleaved(
            {draft: worker.run for draft, worker in workers.items()}, rounds, warmup=0,
            before={draft: worker.prepare for draft, worker in workers.items()},
        )  # fmt: skip
        found = {draft: json.loads((folder / f"{draft}.json").read_text()) for draft in drafts}
    if len({each["text"] for each in found.values()}) > 1:
        raise SystemExit("the engines gave different texts")
    for draft, ratio in ratios(seconds, drafts[0]).items():
        found[draft] |= {"seconds": statistics.median(seconds[draft]), "ratio": 1 / ratio, "num_new": num_new}
    return measured, found


def report(measured_ms: float, mask: str, num_drafted: int, found: dict[str, dict[str, Any]]) -> None:
    """Prints the results as a table, and the ratio of prompt lookup to no speculation beside its target, if both were
    measured."""
    print(f"| mask {mask}, round trip {measured_ms:.1f} ms | rows a pass | passes | s | tokens/s | ratio |\n"
          "|---|---|---|---|---|---|")  # fmt: skip
    for draft, each in found.items():
        num_rows, seconds = 1 if draft in (NONE, KEPT) else 1 + num_drafted, each["seconds"]
        rate = (each["num_new"] - 1) / seconds
        print(f"| {DRAFTS[draft]} | {num_rows} | {each['passes']} | {seconds:.1f} | {rate:.2f} "
              f"| {each['ratio']:.2f} |")  # fmt: skip
    if next(iter(found)) == NONE and LOOKUP in found:
        print(f"\nprompt lookup: {found[LOOKUP]['ratio']:.2f} times the tokens per second, at least {BAR:g} wanted")
    for draft, bar in ((KEPT, KEPT_BAR), (KEPT_LOOKUP, BAR)):
        if next(iter(found)) == NONE and draft in found:
            print(
                f"\n{DRAFTS[draft]}: {found[draft]['ratio']:.2f} times the tokens per second, at least {bar:g} wanted"
            )


def main() -> None:
    """Prints the table, or exits with code 2 if network namespaces cannot be made."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculation")
    parser.add_argument("--drafts", nargs="+", choices=DRAFTS, default=[NONE, LOOKUP])
    parser.add_argument("--mask", default="lattice")
    parser.add_argument("--num-drafted", type=int, default=NUM_DRAFTED)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--round-trip-ms", type=float, default=ROUND_TRIP_MS)
    parser.add_argument("--rounds", type=int, default=3)
    given, _ = parser.parse_known_args()
    try:
        measured, found = run(
            given.drafts, given.mask, given.num_drafted, given.new_tokens, given.round_trip_ms, given.rounds
        )
    except NoNamespaces as exc:
        print(f"{exc}: run it as root on Linux with iproute2", file=sys.stderr)
        sys.exit(2)
    report(measured, given.mask, given.num_drafted, found)


if __name__ == "__main__":
    if sys.argv[1:2] == ["tenant"]:
        tenant(*sys.argv[2:])
    else:
        main()
