"""Breaks promises of the code on purpose, one at a time, and tells whether the tests notice: `python -m
tests.support.mutants`, or with numbers for some of them only.

A mutant is one plausible slip in one file: a lock of a door left out, a bound that is off by one, a sync that was
forgotten. A line of code may be run by a hundred tests and still be checked by none. Each mutant here names a promise,
and the tests that must fail once the promise is broken. A mutant that survives is a hole in the tests: mend it with a
test, not by taking the mutant out.

The tree (files that git tracks or would add, and the compiled kernels) is copied to a temporary folder, where the tests
of all mutants must first pass. Then each mutant is applied there, its tests run in a process of their own, and the file
is restored. The exit status is 1 if any mutant survives or cannot be tried. tests/repository/test_mutants.py checks the
list without running it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.repository import ROOT

LIMIT_S = 300.0
"""The seconds after which the tests of one mutant are ended. Tests that do not end have failed."""
_PASSED, _FAILED = 0, 1
"""Exit statuses of pytest. All others mean that the tests could not be run."""


@dataclass(frozen=True)
class Mutant:
    """Describes one slip, and the tests that must notice it.

    Attributes:
        path: the file that is changed, relative to the repository's root.
        old: a text that occurs exactly once in the file.
        new: the text in its place, with which the file still compiles.
        tests: the one or two tests that must fail, as files or as node ids of pytest. They take seconds.
        why: the promise that the change breaks.
    """

    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str

    @property
    def area(self) -> str:
        """Returns the area of `AREAS` that the file belongs to.

        Raises:
            LookupError: the file belongs to none.
        """
        for area, prefixes in AREAS.items():
            if self.path.startswith(prefixes):
                return area
        raise LookupError(f"{self.path} is in no area of mutants: {', '.join(AREAS)}")

    def applied(self, text: str) -> str:
        """Returns a file's text with the slip in it.

        Raises:
            ValueError: `old` does not occur exactly once.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.path}: expected exactly one place to change, found {count}: {self.old!r}")
        return text.replace(self.old, self.new)


AREAS = {
    "masks": ("noise/",),
    "scheduler": ("provider/schedule/", "tenant_sdk/serving/scheduler.py"),
    "identity": ("tenant_sdk/session.py", "tenant_sdk/trust/", "provider/identity/"),
    "wire": ("wire/",),
    "adapters": ("tenant_sdk/serving/adapters/", "tenant_sdk/kinds/"),
}
"""Maps the name of an area to the beginnings of its files' paths."""


MUTANTS = (
    # ---- masks ------------------------------------------------------------------------------------------------------
    Mutant(
        "noise/blocks/slots.py",
        "            self._next = rows.stop  # The rows are burnt before the caller sees them.",
        "            self._next = max(self._next, rows.stop - 1)",
        ("tests/noise/blocks/test_slots.py::test_rows_are_handed_out_once_and_in_order",),
        "a mask row is handed out at most once",
    ),
    Mutant(
        "noise/blocks/slots.py",
        "if self._num_forks != _num_forks or self._pid != os.getpid():",
        "if self._num_forks != _num_forks and self._pid != os.getpid():",
        (
            "tests/noise/blocks/test_slots.py::test_a_child_is_known_by_its_process_id_alone",
            "tests/noise/blocks/test_slots.py::test_a_child_is_known_by_the_fork_alone",
        ),
        "a child is refused by its process id alone, and by the count of forks alone",
    ),
    Mutant(
        "noise/blocks/pool.py",
        "        pool._drop()\n",
        "",
        ("tests/noise/blocks/test_pool.py::test_a_forked_child_gets_nothing_and_the_parent_goes_on",),
        "a forked child has none of its parent's masks",
    ),
    Mutant(
        "noise/blocks/arena.py",
        "weakref.finalize(part, self._returned.append,",
        "weakref.finalize(made, self._returned.append,",
        (
            "tests/noise/blocks/test_arena.py::test_memory_is_used_again_when_the_last_reference_is_gone",
            "tests/noise/blocks/test_arena.py::test_what_autograd_keeps_is_not_used_again",
        ),
        "memory of masks is not used again while a view of it lives",
    ),
    Mutant(
        "noise/masks/lattice.py",
        "                masks += sampling.error(self._rng, masks.shape, self.parameters)",
        "                masks = masks + 0",
        ("tests/noise/masks/test_lattice_slots.py::test_pieces_of_a_block_are_rows_of_one_sample",),
        "rows that are made in pieces have an error, without which they are linear equations in the secret",
    ),
    Mutant(
        "noise/masks/lattice.py",
        "        self._error_bound = sampling.error_bound(parameters)",
        "        self._error_bound = sampling.error_bound(parameters) / 2",
        ("tests/noise/masks/test_lattice.py::test_the_largest_error_and_secret_along_the_largest_column_do_not_wrap",),
        "scales leave room for the largest error, so that no result wraps",
    ),
    Mutant(
        "noise/scheme.py",
        "if known is None or known[0] is not group:",
        "if known is None:",
        ("tests/noise/masks/test_lattice.py::test_a_group_of_another_session_has_a_codec_of_its_own",),
        "a row is scaled by the norms of its own session's weight",
    ),
    Mutant(
        "noise/masks/pad.py",
        "            pad = SeededRows(self._fresh_seed(), 0, count)",
        '            pad = SeededRows(self.__dict__.setdefault("_seed", self._fresh_seed()), 0, count)',
        (
            "tests/noise/masks/test_one_time_masks.py::test_messages_are_uniform_and_never_repeat",
            "tests/noise/masks/test_one_time_masks.py::test_pads_are_counted_before_use",
        ),
        "every block of pads has a key of its own",
    ),
    Mutant(
        "noise/polynomial/negacyclic.py",
        "    if not error < _LARGEST_ERROR:",
        "    if error >= _LARGEST_ERROR:",
        ("tests/noise/polynomial/test_negacyclic.py::test_not_a_number_is_noticed",),
        "a product that is not a number is no mask",
    ),
    Mutant(
        "noise/verify.py",
        "        if not _all_fit(projection, fold, rows.cpu(), reply.cpu()):",
        "        if direction is Direction.FORWARD and not _all_fit(projection, fold, rows.cpu(), reply.cpu()):",
        ("tests/noise/test_verify.py::test_forged_replies_fail",),
        "replies are checked in both directions",
    ),
    Mutant(
        "noise/verify.py",
        "_project(quantised.t(), self.kappa + 1)",
        "_project(quantised.t(), 1)",
        ("tests/noise/test_verify.py::test_secrets_differ_between_groups_directions_and_verifiers",),
        "a forgery of gradients passes as seldom as one of activations",
    ),
    Mutant(
        "noise/ledger/ledger.py",
        "    os.fsync(fd)\n",
        "",
        ("tests/noise/ledger/test_ledger.py::test_the_record_is_written_and_synced_before_reserve_returns",),
        "a block is on record, durably, before it is used",
    ),
    Mutant(
        "noise/ledger/ledger.py",
        "            if seed.used + num_blocks > budget:",
        "            if seed.used + num_blocks > budget + 1:",
        ("tests/noise/ledger/test_ledger.py::test_budget_exhaustion_and_renewal",),
        "a seed serves no more secrets than its budget",
    ),
    Mutant(
        "noise/ledger/ledger.py",
        "os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW)",
        "os.O_RDWR | os.O_APPEND)",
        ("tests/noise/ledger/test_ledger.py::test_a_link_in_place_of_the_file_is_not_followed",),
        "a ledger is not opened through a link, which compaction would replace",
    ),
    Mutant(
        "noise/ledger/ledger.py",
        "            os.fchmod(fd, 0o600)",
        "            os.fchmod(fd, 0o644)",
        ("tests/noise/ledger/test_ledger.py::test_the_file_is_private_and_must_stay_so",),
        "nobody but its owner reads a ledger",
    ),
    Mutant(
        "noise/hints/store.py",
        "        if found is not None and (found.verified or source.verify is None):",
        "        if found is not None:",
        ("tests/noise/hints/test_store.py::test_an_unchecked_hint_is_not_trusted_by_a_checking_session",),
        "a session that verifies uses no hint that was stored unchecked",
    ),
    Mutant(
        "noise/masks/lattice.py",
        'name = self.parameters.name + (_OF_LOCAL_HINTS if self.computes_hints else "")\n                seed',
        "name = self.parameters.name\n                seed",
        ("tests/tenant_sdk/masks/test_seeds_and_hints.py::test_no_seed_of_a_computed_hint_is_shown_to_a_provider",),
        "hints that the tenant computes have a seed that no provider sees",
    ),
    Mutant(
        "tenant_sdk/trust/checkpoint.py",
        "if digest(weight, found.alpha) != group.digest:",
        "if False:",
        (
            "tests/tenant_sdk/masks/test_seeds_and_hints.py"
            "::test_prepared_weights_that_change_under_a_session_make_no_hint",
        ),
        "no hint is computed from prepared weights that have changed",
    ),
    # ---- scheduler --------------------------------------------------------------------------------------------------
    Mutant(
        "provider/schedule/quota.py",
        "        self._room.give_back(num_bytes)\n",
        "",
        ("tests/provider/schedule/test_quota.py::test_no_tenant_holds_more_than_is_free",),
        "a request that has ended gives its bytes in flight back to all tenants",
    ),
    Mutant(
        "provider/schedule/quota.py",
        "        self._level = min(self._rate, self._level + (now_s - self._filled_s) * self._rate)",
        "        self._level = self._level + (now_s - self._filled_s) * self._rate",
        ("tests/provider/schedule/test_quota.py::test_a_quiet_hour_saves_up_no_more_than_a_second",),
        "a quiet hour does not save up an hour's rows",
    ),
    Mutant(
        "provider/schedule/fairness.py",
        "        self._deficits[ticket.tenant] = max(left, -_MOST_DEBT * self.quantum)",
        "        self._deficits[ticket.tenant] = left",
        ("tests/provider/schedule/test_fairness.py::test_a_debt_is_bounded",),
        "a tenant's debt is bounded, so that its turn comes again",
    ),
    Mutant(
        "provider/schedule/scheduler.py",
        'if self._policy.name != "none" and head.call.purpose is not Purpose.HINT:',
        'if self._policy.name != "none":',
        ("tests/provider/schedule/test_scheduler.py::test_a_hint_shares_its_product_with_nobody_and_runs_whole",),
        "a hint shares its product with nobody",
    ),
    Mutant(
        "provider/schedule/scheduler.py",
        "        if ticket in self._queues.get(ticket.call, {}):\n            self._drop(ticket)\n",
        "",
        ("tests/provider/schedule/test_scheduler.py::test_what_was_cancelled_is_not_computed",),
        "what was cancelled is not computed",
    ),
    Mutant(
        "tenant_sdk/serving/scheduler.py",
        "                free -= entry.kv_bytes\n",
        "",
        ("tests/tenant_sdk/serving/test_scheduler.py::test_requests_wait_for_a_place_and_for_memory",),
        "running requests reserve no more memory than there is",
    ),
    Mutant(
        "tenant_sdk/serving/scheduler.py",
        "        in_order = sorted((entry, *self._waiting.values()), key=lambda each: each.place)",
        "        in_order = [*self._waiting.values(), entry]",
        ("tests/tenant_sdk/serving/test_scheduler.py::test_who_gave_way_is_before_those_who_waited_already",),
        "a preempted request begins again before those that came later",
    ),
    # ---- session and identity ---------------------------------------------------------------------------------------
    Mutant(
        "provider/identity/revocations.py",
        "        return record is not None and record.is_live(self._clock())",
        "        return record is not None and record.revoked_at is None",
        ("tests/provider/identity/test_enrolment.py::test_expiry_is_seen_inside_a_long_connection",),
        "a certificate that expires on an open stream is refused",
    ),
    Mutant(
        "provider/identity/revocations.py",
        "            read = self._snapshot = _NOTHING_READ  # Records read",
        "            read = self._snapshot  # Records read",
        ("tests/provider/identity/test_enrolment.py::test_a_damaged_registry_admits_nobody",),
        "a registry that is gone admits nobody",
    ),
    Mutant(
        "provider/identity/front.py",
        "        if self._newest is None or copy.made_at >= self._newest.made_at:",
        "        if self._newest is None or copy.made_at:",
        ("tests/provider/identity/test_front.py::test_an_older_copy_does_not_take_back_a_revocation",),
        "an older copy of the registry does not undo a revocation",
    ),
    Mutant(
        "provider/identity/authority.py",
        "    if usages != [ExtendedKeyUsageOID.CLIENT_AUTH] or",
        "    if ExtendedKeyUsageOID.CLIENT_AUTH not in usages or",
        ("tests/provider/identity/test_authority.py::test_a_certificate_that_names_no_tenant_is_refused",),
        "a certificate that may also be a server's names no tenant",
    ),
    Mutant(
        "tenant_sdk/trust/pins.py",
        "        refused = [part for part in changed if part not in accepted]",
        "        refused = [] if accepted else changed",
        ("tests/tenant_sdk/trust/test_pins.py::test_a_change_is_refused_until_it_is_accepted_by_name",),
        "a change is accepted for the part that the tenant named, and for no other",
    ),
    Mutant(
        "tenant_sdk/trust/bundle.py",
        "    if received != file.size_bytes or sha.hexdigest() != file.sha256:",
        "    if received != file.size_bytes:",
        ("tests/tenant_sdk/trust/test_bundle.py::test_a_file_other_than_announced",),
        "a file of the bundle has the digest that the manifest announced",
    ),
    Mutant(
        "tenant_sdk/session.py",
        "    if len(set(networked)) < len(networked) or len(set(authorities)) < len(authorities):",
        "    if len(set(networked)) < len(networked):",
        ("tests/tenant_sdk/masks/test_pad_and_shares.py::test_one_provider_is_not_two_providers_of_shares",),
        "one provider under two addresses does not get both shares of a row",
    ),
    # ---- wire -------------------------------------------------------------------------------------------------------
    Mutant(
        "wire/frame.py",
        "    if offset + len(payload) > total:",
        "    if len(payload) > total:",
        ("tests/wire/test_frame.py::test_refuses_an_offset_that_would_overflow",),
        "a frame's payload stays within its tensor",
    ),
    Mutant(
        "wire/frame.py",
        "    if header.rows * header.cols * ITEM_BYTES > max_tensor_bytes:",
        "    if header.rows > max_tensor_bytes:",
        ("tests/wire/test_frame.py::test_a_hint_counts_as_the_rows_it_stands_for",),
        "a seed of 48 bytes does not make the provider expand more than a tensor may hold",
    ),
    Mutant(
        "wire/payload.py",
        "        return self._rows if self._is_masked and self._rows.dtype == torch.int32 else None",
        "        return self._rows if self._rows.dtype == torch.int32 else None",
        ("tests/wire/test_payload.py::test_rows_are_masked_only_if_their_mask_says_so",),
        "rows that no mask hides are not written to memory that the provider shares",
    ),
    Mutant(
        "wire/transport/message_socket.py",
        "            if length > MAX_FRAME_BYTES:",
        "            if length > MAX_FRAME_BYTES << 8:",
        ("tests/wire/test_message_socket.py::test_a_length_above_the_limit_takes_no_memory",),
        "a length that no message may have takes no memory",
    ),
    Mutant(
        "wire/transport/tls.py",
        "    context.verify_mode = ssl.CERT_REQUIRED",
        "    context.verify_mode = ssl.CERT_OPTIONAL",
        ("tests/wire/test_tls_socket.py::test_no_certificate_is_refused",),
        "a peer without a certificate is refused",
    ),
    Mutant(
        "wire/ring/coding.py",
        "* _ROUND_OFF - 0.5 * math.sqrt(d)",
        "* _ROUND_OFF - 0.25 * math.sqrt(d)",
        ("tests/wire/test_ring_scale.py::test_rounding_every_number_up_stays_within_the_bound",),
        "the scale leaves room for the rounding of every coordinate, so that no product wraps",
    ),
    # ---- adapters ---------------------------------------------------------------------------------------------------
    Mutant(
        "tenant_sdk/serving/adapters/reader.py",
        "            return _open_files(name, folder, os.O_NOFOLLOW)",
        "            return _open_files(name, folder, 0)",
        ("tests/tenant_sdk/serving/adapters/test_reader.py::test_links_are_not_followed",),
        "no link in the folder of adapters leads out of it",
    ),
    Mutant(
        "tenant_sdk/serving/adapters/catalogue.py",
        "        if found != entry.sha256:",
        "        if not found:",
        ("tests/tenant_sdk/serving/adapters/test_catalogue.py::test_another_digest_is_not_kept",),
        "an adapter is the one that the catalogue pins",
    ),
    Mutant(
        "tenant_sdk/serving/adapters/lora.py",
        "        self.places[place].zero_()\n",
        "",
        (
            "tests/tenant_sdk/serving/adapters/test_lora.py::test_a_place_keeps_nothing_beside_an_adapter_of_more_layers",
        ),
        "a place keeps nothing of the adapter that it held before",
    ),
    Mutant(
        "tenant_sdk/serving/adapters/adapted_layer.py",
        "        if rows.shape[0] != step.num_rows:",
        "        if rows.shape[0] > step.num_rows:",
        ("tests/tenant_sdk/serving/adapters/test_lora.py::test_a_pass_with_other_rows_than_announced_is_refused",),
        "a row whose adapter is not known is not computed",
    ),
    Mutant(
        "tenant_sdk/kinds/started_lora.py",
        "(self.scaling[name] * start)",
        "(start)",
        ("tests/tenant_sdk/kinds/test_started_adapters.py::test_a_started_adapter_is_saved_as_lora_of_twice_the_rank",),
        "what an adapter started from is taken off with the adapter's own scale",
    ),
    Mutant(
        "tenant_sdk/kinds/elementwise.py",
        "        values = self.shira_weight[name] * self.scaling[name]",
        "        values = self.shira_weight[name] * 1",
        ("tests/tenant_sdk/kinds/test_products.py::test_the_scale_of_shira_counts",),
        "an adapter's scale counts",
    ),
)
"""The mutants, whose numbers on the command line begin with 1."""


def copy_tree(to: Path) -> None:
    """Copies to a folder the files that git tracks or would add, and the compiled kernels, which git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True,
    ).stdout.decode()  # fmt: skip
    kernels = {package: (ROOT / package).rglob("_kernels*.so") for package in ("noise", "tenant_sdk", "wire")}
    paths = {ROOT / name for name in listed.split("\0") if name}.union(*kernels.values())
    for path in sorted(paths):
        if path.is_file():  # A file that was deleted without telling git is in the list, too.
            target = to / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)


def run_tests(tree: Path, tests: Iterable[str]) -> tuple[int | None, str]:
    """Runs tests in a copy of the repository, until the first one fails.

    Returns:
        The exit status of pytest, or None if the tests did not end within `LIMIT_S` seconds; and their output.
    """
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line", *tests]
    alone = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        done = subprocess.run(
            command, cwd=tree, env=alone, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return None, ""
    return done.returncode, done.stdout


def verdict(mutant: Mutant, tree: Path) -> tuple[str, str]:
    """Applies a mutant to a copy of the repository, runs its tests, and restores the file.

    Returns:
        `caught`, `SURVIVED` or `NOT RUN`; and the test that failed, or the last line of output.
    """
    path = tree / mutant.path
    before, changed_at = path.read_text(encoding="utf-8"), int(path.stat().st_mtime)
    path.write_text(mutant.applied(before), encoding="utf-8")
    # Python takes bytecode of the same second and size for that of the source, so each text gets a second of its own.
    own_at = changed_at + 1 + MUTANTS.index(mutant)
    os.utime(path, (own_at, own_at))
    try:
        status, output = run_tests(tree, mutant.tests)
    finally:
        path.write_text(before, encoding="utf-8")
        os.utime(path, (changed_at, changed_at))
    if status is None:
        return "caught", f"no end within {LIMIT_S:.0f} s"
    lines = output.strip().splitlines() or [""]
    failed = next((line.split(" - ")[0] for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])
    return {_PASSED: "SURVIVED", _FAILED: "caught"}.get(status, "NOT RUN"), failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Tries the mutants of the given numbers, or all; returns the exit status."""
    parser = argparse.ArgumentParser(description="break promises of the code, and see whether the tests notice")
    parser.add_argument("numbers", nargs="*", type=int, help=f"which mutants, 1 to {len(MUTANTS)} (default: all)")
    numbers = parser.parse_args(arguments).numbers or range(1, len(MUTANTS) + 1)
    unknown = [number for number in numbers if not 1 <= number <= len(MUTANTS)]
    if unknown:
        parser.error(f"expected numbers from 1 to {len(MUTANTS)}, got {unknown[0]}")
    started_s, missed = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="veilbase-mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        status, output = run_tests(
            tree, dict.fromkeys(test for number in numbers for test in MUTANTS[number - 1].tests)
        )
        if status != _PASSED:
            print(output, "expected the tests to pass without any mutant: mend them first", sep="\n")
            return 1
        print(f"without a mutant the tests pass ({time.monotonic() - started_s:.0f} s)", flush=True)
        for number in numbers:
            mutant, began_s = MUTANTS[number - 1], time.monotonic()
            found, by = verdict(mutant, tree)
            missed += found != "caught"
            seconds = time.monotonic() - began_s
            print(f"{number:2d} {found:8} {seconds:5.1f} s  {mutant.path}: {mutant.why} [{by}]", flush=True)
    print(f"{len(numbers) - missed} of {len(numbers)} caught in {time.monotonic() - started_s:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
