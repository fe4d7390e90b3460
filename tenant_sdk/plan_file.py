"""This module holds what a plan of a run or of answers says (`Bill`), and reads and writes it as a file.
tenant_sdk/bill.py makes plans.

Guarantees: a file that is no plan, or is damaged or hostile, is refused in one line that quotes nothing of it. A plan
holds no contents of the data, but fingerprints: SHA-256 of the data, the tokenizer, the adapter's settings and the
options. Importing this module does not load torch, so that a command refuses a wrong file at once.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model

from noise.disk.private_files import write_private
from tenant_sdk.training.run_identity import RunIdentity
from tenant_sdk.training.settings import FinetuneResult
from wire.errors import ConfigurationError


@dataclass(frozen=True)
class Saving:
    """Says what another setting would save.

    Attributes:
        setting: the setting, for the user.
        num_bytes: the bytes that would be sent and received less.
    """

    setting: str
    num_bytes: int


@dataclass(frozen=True)
class Bill:
    """Holds what a run will cost. `str` gives it as a table.

    Attributes:
        what: what was planned: `finetune` or `tokens`.
        steps: optimizer steps; for tokens, the steps of decoding.
        tokens: tokens trained on, without padding, as in `FinetuneResult`; or tokens of prompts and answers.
        positions: tokens that go through the model, with padding and evaluations.
        bytes_up, bytes_down: what is sent and received, hints included, as in `FinetuneResult`.
        round_trips: how often the tenant waits for the provider.
        hint_bytes: the part of `bytes_down` that is for hints of the lattice mask.
        hint_disk_bytes: the disk that these hints take, whether they are fetched or computed.
        prefix_disk_bytes: the disk that `cache_frozen_prefix` takes during the run.
        seconds: the time in all; None if nothing was measured.
        provider_s, tenant_s, mask_s, hint_s: its parts: the provider and the link; this machine's own layers and
            encoding; masks; hints.
        memory_bytes: the tenant's memory at its peak, beside the libraries.
        local_seconds, local_bytes: time and memory of the same run on this machine alone, in float32.
        savings: what other settings would save.
        is_exact: whether every call of the run is known from its shape; if not, bytes are an estimate.
        manifest: the digest of the provider's manifest.
        run: the fingerprint of data, adapter and options; empty for tokens.
        parts: the fingerprints of the parts of the run, by name; empty for tokens.
        options, adapter: the options that identify the run, and the adapter's settings, as texts; empty for tokens.
        mask, precision: the session's.
        keep: what names the layers that are computed here, separated by commas; their calls are not in the plan.
    """

    what: str
    steps: int
    tokens: int
    positions: int
    bytes_up: int
    bytes_down: int
    round_trips: int
    hint_bytes: int = 0
    hint_disk_bytes: int = 0
    prefix_disk_bytes: int = 0
    seconds: float | None = None
    provider_s: float = 0.0
    tenant_s: float = 0.0
    mask_s: float = 0.0
    hint_s: float = 0.0
    memory_bytes: int = 0
    local_seconds: float | None = None
    local_bytes: int = 0
    savings: tuple[Saving, ...] = ()
    is_exact: bool = True
    manifest: str = ""
    run: str = field(default="", repr=False)
    parts: dict[str, str] = field(default_factory=dict, repr=False)
    options: dict[str, str] = field(default_factory=dict, repr=False)
    adapter: dict[str, str] = field(default_factory=dict, repr=False)
    mask: str = ""
    precision: str = ""
    keep: str = ""

    @property
    def num_bytes(self) -> int:
        """Returns the bytes in both directions."""
        return self.bytes_up + self.bytes_down

    def price(self, per_gb: float = 0.0, per_hour: float = 0.0) -> float:
        """Returns the price of the run, by its bytes in GB (10^9 bytes) in both directions and by its hours."""
        return self.num_bytes / 1e9 * per_gb + (self.seconds or 0.0) / 3600 * per_hour

    def __str__(self) -> str:
        rows = [("tokens", self._tokens()), ("traffic", self._traffic())]
        if self.keep:
            rows.append(("kept here", f"{self.keep}: computed on this machine, not sent"))
        if self.hint_disk_bytes:
            fetched = f"{size(self.hint_bytes)} to fetch" if self.hint_bytes else "computed here"
            rows.append(("hints", f"{fetched}, {size(self.hint_disk_bytes)} on disk"))
        elif self.hint_bytes:
            rows.append(("hints", f"{size(self.hint_bytes)} to fetch, not kept"))
        if self.prefix_disk_bytes:
            rows.append(("prefix", f"{size(self.prefix_disk_bytes)} on disk, encrypted, until the run ends"))
        if self.seconds is not None:
            rows.append(("time", self._time()))
        if self.memory_bytes:
            rows.append(("memory", f"about {size(self.memory_bytes)} here, beside the libraries"))
        if self.local_seconds is not None:
            rows.append(("locally", self.locally()))
        rows += [("saving", f"{each.setting}: {self._less(each)}") for each in self.savings]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    def _tokens(self) -> str:
        steps = "step" if self.steps == 1 else "steps"
        return f"{self.tokens:,} in {self.steps:,} {steps} ({self.positions:,} with padding and evaluations)"

    def _traffic(self) -> str:
        about = "" if self.is_exact else "about "
        return f"{about}{size(self.bytes_up)} sent, {size(self.bytes_down)} received, {self.round_trips:,} round trips"

    def _time(self) -> str:
        parts = [("provider and link", self.provider_s), ("this machine", self.tenant_s)]
        parts += [(name, took) for name, took in (("masks", self.mask_s), ("hints", self.hint_s)) if took]
        return f"about {duration(self.seconds or 0.0)}: " + ", ".join(
            f"{name} {duration(took)}" for name, took in parts
        )

    def locally(self) -> str:
        """Returns one line on the same run on this machine alone."""
        took, here = self.local_seconds or 0.0, self.seconds
        verdict = "" if here is None else "; that is faster" if took < here else "; that is slower"
        return f"in float32 about {duration(took)} in {size(self.local_bytes)}{verdict}"

    def _less(self, saving: Saving) -> str:
        return f"{size(saving.num_bytes)} less ({saving.num_bytes / max(self.num_bytes, 1):.0%})"

    def line(self) -> str:
        """Returns the plan as one line."""
        took = "" if self.seconds is None else f" and about {duration(self.seconds)}"
        return f"estimated {size(self.num_bytes)}, {self.round_trips:,} round trips{took}"

    def compared(self, result: FinetuneResult) -> str:
        """Returns one line that compares the plan with what a run took."""
        planned = size(self.num_bytes) + ("" if self.seconds is None else f" and {duration(self.seconds)}")
        resumed = f", from step {result.resumed_from_step} on" if result.resumed_from_step else ""
        took = f"{size(result.bytes_up + result.bytes_down)} and {duration(result.seconds)}"
        return f"estimated {planned}; it took {took}{resumed}"

    def to_json(self) -> str:
        """Returns the plan as JSON; it holds no contents of the data, but a fingerprint of it."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON into a file of mode 0600.

        Raises:
            ConfigurationError: the file cannot be written.
        """
        try:
            write_private(Path(path), self.to_json() + "\n")
        except OSError as exc:
            raise ConfigurationError(f"the plan {path} cannot be written: {exc.strerror}") from exc

    @classmethod
    def load(cls, path: str | Path) -> Bill:
        """Returns a plan that `save` wrote.

        Raises:
            ConfigurationError: there is no such file, or it holds no plan.
        """
        try:
            with Path(path).open("rb") as file:
                data = file.read(_MOST_PLAN_BYTES + 1)
            if len(data) > _MOST_PLAN_BYTES:
                raise ValueError
            found = dict(_plan_file().model_validate_json(data))
            found["savings"] = tuple(Saving(**dict(each)) for each in found["savings"])
            return cls(**found)
        except OSError as exc:
            raise ConfigurationError(f"the plan {path} cannot be read: {exc.strerror}") from exc
        except ValueError:  # pydantic's too; `from None`: its text quotes the file
            raise ConfigurationError(f"{path} is no plan: expected a file of `tenant plan --out`") from None

    def check(
        self, manifest: str, run: str, identity: RunIdentity, mask: str, precision: str, keep: str = ""
    ) -> None:  # fmt: skip
        """Checks that a run is the one that was planned.

        Raises:
            ConfigurationError: it is another; the text says in what.
        """
        self.check_known(identity, manifest=manifest, mask=mask, precision=precision, keep=keep)
        if self.run != run:
            raise _another_run("the weights have changed since")

    def check_known(
        self, identity: RunIdentity, *, manifest: str | None = None, mask: str | None = None,
        precision: str | None = None, keep: str | None = None,
    ) -> None:  # fmt: skip
        """Checks that a run is the one that was planned, as far as it is known what the run is.

        Args:
            identity: what is known of the run.
            manifest, mask, precision, keep: as the attributes of these names; None for what is not known.

        Raises:
            ConfigurationError: it is another; the text says in what.
        """
        if manifest is not None and self.manifest != manifest:
            raise _another_run("the provider has changed since (its manifest is another)")
        planned = RunIdentity(self.parts, self.options, self.adapter)
        if differences := planned.differences(identity, "the plan's"):
            raise _another_run(f"changed since: {differences}")
        for name, old, new in (
            ("the mask (--mask)", self.mask, mask), ("its precision (--precision)", self.precision, precision),
            ("keep (--keep)", self.keep, keep),
        ):  # fmt: skip
            if new is not None and new != old:
                raise _another_run(f"{name} is {new or 'nothing'}, the plan's is {old or 'nothing'}")


def _another_run(what: str) -> ConfigurationError:
    return ConfigurationError(f"this is not the run of the plan: {what}; nothing was sent: plan it anew")


_MOST_PLAN_BYTES = 1_000_000


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("expected text that can be printed")
    return text


_Text = Annotated[str, Field(max_length=1000), AfterValidator(_printable)]
_PlanCount = Annotated[int, Field(ge=0, lt=2**63)]
_Time = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]


class _SavingFile(BaseModel):
    """Is a `Saving` in a file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    setting: _Text
    num_bytes: _PlanCount


@functools.cache
def _plan_file() -> type[BaseModel]:
    """Returns the form of a plan's file: the fields of `Bill`, each within its bounds."""
    forms: dict[Any, Any] = {
        "int": _PlanCount, "float": _Time, "float | None": _Time | None, "str": _Text, "bool": bool,
        "tuple[Saving, ...]": tuple[_SavingFile, ...], "dict[str, str]": dict[_Text, _Text],
    }  # fmt: skip
    fields: dict[str, Any] = {each.name: (forms[each.type], ...) for each in dataclasses.fields(Bill)}
    fields["options"] = fields["adapter"] = dict[_Text, _Text], {}  # which plans of earlier releases lack
    fields["run"] = Annotated[_Text, Field(min_length=1)], ...
    made: type[BaseModel] = create_model("_PlanFile", __config__=ConfigDict(strict=True, extra="forbid"), **fields)
    return made


def size(num_bytes: float) -> str:
    """Returns a number of bytes for people."""
    for unit_bytes, unit in ((1e9, "GB"), (1e6, "MB")):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:,.1f} {unit}"
    return f"{num_bytes / 1e3:.1f} kB"


def duration(seconds: float) -> str:
    """Returns a time for people."""
    if seconds < 120:
        return f"{seconds:.{1 if seconds < 10 else 0}f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
