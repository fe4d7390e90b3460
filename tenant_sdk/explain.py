"""This module describes the privacy in force: it writes the text that `client.explain()` and `tenant explain` print.

The text states the assumption, the parameters and what is not protected, and claims nothing more (docs/masks.md, "What
`explain` prints").
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from noise.masks.off import READABLE
from noise.options import RING_ONLY
from noise.registry import readable
from noise.scheme import MaskScheme, number_bits
from noise.verify import FAILED, Verifier
from tenant_sdk.plan import Plan
from tenant_sdk.session import UNVERIFIED, Session
from tenant_sdk.session_protocol import TextSession
from tenant_sdk.text.rows import check_fits
from tenant_sdk.text.source import has_tokenizer
from wire.errors import VeilbaseError, printable
from wire.frame import ITEM_BYTES, Arithmetic, Direction
from wire.manifest import GroupInfo, Manifest
from wire.ring.widths import SHORT_REPLY_BITS, row_bytes

_LEAST_WORDS = 20
"""The fewest characters beside the names for which a text is wrapped."""
_HIDDEN = "contents of every message: activations and gradients, and so adapter, data, prompts and KV cache"
_HIDDEN_BUT_ROWS = "contents of every message: activations and gradients, and so adapter and KV cache"
_VISIBLE = (
    "token counts, lengths and timing; which layers are called in which direction (the depth of the backward pass "
    "shows the lowest adapted layer); who you are; whatever can be inferred from outputs you show the provider"
)
_DORA = (
    "an adapter with DoRA shows as one, with its rank in each layer group: the rows of its A go through a masked call "
    "in each answer, in an engine when it is loaded, and in training after each optimizer step"
)
_KINDS = (
    "HRA, OFT, BOFT and IA3 make the layers of a group ask one by one (in an engine every step does so, or none); HiRA "
    "and GLoRA send as many rows as their rank for each row; PEANuT sends as many as its rank in each pass; PiSSA, "
    "OLoRA, PSOFT, TinyLoRA, DeLoRA and DEFT ask when a training starts, by rows that hold nothing of yours and go "
    "without a mask"
)
_LABELS = (
    "of a batch the sum of lengths shows, since padding is not sent; in fine-tuning, a provider that has the output "
    "layer sees how many positions have labels, not which (pad_rows=, --pad-rows, hides it)"
)
_OUTSIDE = "a compromised tenant, restored snapshots of a virtual machine, denial of service, expert routing"
_TRAINING = (
    "an evaluation shows as forward passes of the same rows, at the steps that you set; a preference as two sequences, "
    "each sent forward twice; truncation='drop' by how many rows are left; cache_frozen_prefix by the blocks below the "
    "adapter, which are called in the first epoch only: so the first epoch shows, by the numbers of rows and steps, "
    "and nothing of what rows say, not even that two are alike"
)

_MEANINGS = {
    "pool": "masks made ahead, so that calls need not wait for them; a row of a mask hides what is sent of one token, "
    "once: ",
    "secrets": "one-time keys that masks are made from; a new seed begins when they are used up: ",
    "row counts": "a row is what is sent of one token, and a provider sees how many there are; ",
}
"""What a line is about, in front of its text."""
_DORA_LINE, _KINDS_LINE, _TRAINING_LINE = "DoRA", "other PEFT kinds", "fine-tuning"
_NOT_USED = "not used yet"
ONLY_IN_USE = (_DORA_LINE, _KINDS_LINE, _TRAINING_LINE)
"""The lines that matter only to a session with such adapters, or that fine-tunes."""


def explain(session: Session, plan: Plan, problem: str | None = None, leave_out: Collection[str] = ()) -> str:
    """Returns the description of the privacy in force, one line for each subject.

    Args:
        session: the open session, with the mask in force, the provider's manifest and the verifier.
        plan: the client's settings.
        problem: the error text with which this session will be refused when it is used; None if no error is known.
        leave_out: those of `ONLY_IN_USE` that the session has not used yet; a line names them.
    """
    scheme, manifest, verifier = session.scheme, session.asked, session.verifier
    shown = readable(scheme.name)
    lines = {**({} if shown is None else {READABLE: shown}), **scheme.describe()}
    hides = scheme.name in RING_ONLY
    provider_decides_rows = verifier is None and plan.tokenizer is None and plan.bucket is None
    protected = _HIDDEN_BUT_ROWS if provider_decides_rows else _HIDDEN
    lines["protected"] = protected if hides else "nothing"
    if hides:
        lines["row counts"] = _row_counts(verifier is not None, plan)
    lines["visible"] = _VISIBLE if hides else "everything that is sent"
    if hides:
        lines[_DORA_LINE] = _DORA
        lines[_KINDS_LINE] = _KINDS
        lines["outside the claim"] = _OUTSIDE
        lines[_TRAINING_LINE] = f"{_TRAINING}; {_loss_branches(plan)}"
    if hides:
        lines["precision"] = _precision(scheme, manifest)
    lines["bytes per token"] = _bytes_per_token(scheme, manifest)
    lines["weights"] = _weights(scheme, manifest)
    if session.kept.groups:
        lines["kept here"] = _kept(session, plan)
    if problem is not None:
        lines["NOT USABLE"] = problem
    lines["verification"] = _verification(hides, verifier, plan.verify)
    if manifest.recording:
        lines["recording"] = "this provider announces that it writes down what it receives"
    lines["status"] = "computational security with estimated parameters; this code has not been audited"
    left_out = [name for name in lines if name in leave_out]
    lines = {name: f"{_MEANINGS.get(name, '')}{text}" for name, text in lines.items() if name not in left_out}
    if left_out:
        lines[_NOT_USED] = _would_show(left_out, "--all")
    width = max(len(name) for name in lines)
    return "\n".join(f"{name:<{width}}  {printable(text, one_line=True)}" for name, text in lines.items())


def folded(text: str, leave_out: Collection[str]) -> str:
    """Returns a text of `explain` with one line in place of those of `ONLY_IN_USE` that are in `leave_out`."""
    lines = [(line.partition("  ")[0], line) for line in text.splitlines()]
    left_out = [name for name, _ in lines if name in leave_out]
    if not left_out:
        return text
    first = next(line for name, line in lines if name == left_out[0])
    width = len(first) - len(first.partition("  ")[2].lstrip())
    told = f"{_NOT_USED:<{width}}{_would_show(left_out, '`tenant explain --all`')}"
    kept = [line if name != left_out[0] else told for name, line in lines if name not in left_out[1:]]
    return "\n".join(kept)


def _would_show(left_out: list[str], told_by: str) -> str:
    return (
        f"what the provider would see besides, once this session uses {_either(left_out)} ({told_by}, in Python "
        "everything=True, tells it)"
    )


def _either(names: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def not_in_use(peft_configs: Iterable[Any]) -> set[str]:
    """Returns those of `ONLY_IN_USE` that do not apply to a session that answers with these adapters, by PEFT's
    settings (or objects with the same names), and does nothing else."""
    configs = list(peft_configs)
    in_use: set[str] = set()
    if any(getattr(config, "use_dora", False) for config in configs):
        in_use.add(_DORA_LINE)
    # PiSSA and OLoRA are LoRA that begins from the base weights
    if any(
        str(getattr(config.peft_type, "value", config.peft_type)) != "LORA"
        or getattr(config, "init_lora_weights", True) not in (True, False, "gaussian")
        for config in configs
    ):
        in_use.add(_KINDS_LINE)
    return set(ONLY_IN_USE) - in_use


def wrapped(text: str, width: int) -> str:
    """Returns a text of `explain` whose lines are at most `width` characters long: what does not fit goes on below,
    under the words and not under the name. A very narrow terminal gets the text as it is."""
    column = max((len(line) - len(line.partition("  ")[2].lstrip()) for line in text.splitlines()), default=0)
    if width < column + _LEAST_WORDS:
        return text
    return "\n".join(
        textwrap.fill(
            line, width, subsequent_indent=" " * column, break_long_words=False, break_on_hyphens=False,
            drop_whitespace=True, replace_whitespace=False,
        )
        for line in text.splitlines()
    )  # fmt: skip


def show(text: str) -> None:
    """Prints a text of `explain`: wrapped to the width of the terminal, or as it is where there is none, so that each
    subject stays one line of a file or a pipe."""
    print(wrapped(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text)


def problem_of_text(session: TextSession, plan: Plan, bundle: Callable[[], Path]) -> str | None:
    """Returns the error text with which a session will be refused when it is used with text; None if no such error is
    known.

    Args:
        session: the client.
        plan: the client's settings.
        bundle: returns the folder of the provider's bundle.
    """
    try:
        if plan.tokenizer is not None or has_tokenizer(bundle()):
            session.text  # noqa: B018 - raises if the tokenizer cannot be used
        if plan.bucket is not None:
            check_fits(plan.bucket, session.context_length, "")
    except VeilbaseError as exc:
        return str(exc)
    return None


def _row_counts(verified: bool, plan: Plan) -> str:
    """Returns the text that says whether the number of rows depends on a text, and which party decides this number."""
    if plan.bucket is not None:
        return (
            f"prompts and training rows take {plan.bucket} rows each, whatever they say; an answer's length shows "
            "unless fixed_length=True (--fixed-length)"
        )
    if plan.tokenizer is not None:
        return f"the tokenizer that you named decides how text becomes rows: {plan.tokenizer}; {_LABELS}"
    if verified:
        return f"the trusted checkpoint's tokenizer decides how text becomes rows; {_LABELS}"
    return (
        "NOT PROTECTED: prompts and training texts, as far as their number of rows tells. The provider's own tokenizer "
        "decides how many rows a text takes. Name one that you trust (tokenizer=, --tokenizer), pad (pad_rows=, "
        f"--pad-rows), or verify; {_LABELS}"
    )


def _bits(scheme: MaskScheme, group: GroupInfo, direction: Direction) -> tuple[int, int]:
    norm = group.max_column_norm if direction is Direction.FORWARD else group.max_row_norm
    return number_bits(group.widths(direction)[0], norm, scheme.precision)


def bit_range(scheme: MaskScheme, manifest: Manifest) -> tuple[int, int]:
    """Returns the fewest and the most bits that a number of a request has, of all groups and both directions."""
    found = [_bits(scheme, group, direction)[0] for group in manifest.groups for direction in Direction]
    return min(found), max(found)


def _precision(scheme: MaskScheme, manifest: Manifest) -> str:
    low, high = bit_range(scheme, manifest)
    sent = f"{low} bits" if low == high else f"{low} to {high} bits, by each layer's norms,"
    replies = {
        "exact": "as many of its product",
        "balanced": "as many of its product, which is exact for what was sent",
        "short": f"{SHORT_REPLY_BITS} of its product",
    }[scheme.precision]
    return f"{scheme.precision}: {sent} of each masked number cross, and {replies}; rounding comes after masking"


def _bytes_per_token(scheme: MaskScheme, manifest: Manifest) -> str:
    """Returns the text that says how many bytes are sent and received for a token in the forward and the backward pass.

    With `shares` both providers send replies, that of the second at 32 bits, and only one receives rows. The other
    receives 48 bytes a call, which are not counted.
    """
    told = []
    for direction in Direction:
        up = down = 0
        for group in manifest.groups:
            bits, reply_bits = _bits(scheme, group, direction)
            given, replied = group.widths(direction)
            up += row_bytes(given, bits)
            down += row_bytes(replied, reply_bits) + (ITEM_BYTES * replied if scheme.name == "shares" else 0)
        told.append(f"{direction.name.lower()} {_size(up)} up, {_size(down)} down")
    return "; ".join(told)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.1f} kB"


def _weights(scheme: MaskScheme, manifest: Manifest) -> str:
    if scheme.arithmetic is Arithmetic.RING:
        return "int8 per output channel; results differ from the checkpoint's own precision by that rounding"
    return f"{manifest.weights}, float32 arithmetic"


def _kept(session: Session, plan: Plan) -> str:
    """Returns the text about layers that the tenant computes itself."""
    weights = session.executor.kept
    also = f"; not kept: {session.kept.not_kept()}" if session.kept.shared else ""
    shows = "which they are shows, since they are never called"
    source = f"from {plan.verify}"
    if plan.verify is None:
        source = "from weights that the provider chose and gave away, which nothing checks"
        shows = "which they are shows, since their weights are asked for once and they are never called"
    return (
        f"{len(weights.groups)} of {len(session.manifest.groups)} layer groups ({', '.join(plan.keep)}) are computed "
        f"here {source}, by {_size(weights.num_bytes)} of {plan.keep_dtype} weights in memory: their rows are not "
        f"sent, and there are no masks, hints or checks of replies for them; {shows}, whatever the text, the data or "
        f"the adapter{also}"
    )


def _verification(hides: bool, verifier: Verifier | None, checkpoint: str | None) -> str:
    if verifier is not None and verifier.failed:
        return f"FAILED: {FAILED}"
    if verifier is not None:
        return (
            f"every reply and the bundle are checked against {checkpoint}; a forged reply passes with probability at "
            f"most 2^-{verifier.kappa}, and the first failure ends the session"
        )
    return UNVERIFIED if hides else "none"


def _loss_branches(plan: Plan) -> str:
    """Returns the text about `early_stopping_steps` and `keep_best` of `finetune`, with which losses decide when a run
    ends and which adapter is kept: whether they are refused, or what they show."""
    if plan.can_be_steered:
        return "early_stopping_steps and keep_best are refused, since a provider that lies could steer them"
    return "early_stopping_steps by when the evaluation's loss stopped falling"
