"""Tests the quick profile from end to end: what must be broken is broken, what must hold holds, and bad input gives one
line.
"""

from __future__ import annotations

import importlib.util
import json
import math
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from attacks import extract_lora, recover_prompts
from attacks.report import command_line, plots, verdict
from attacks.report.catalogue import CATALOGUE, NOT_IN_QUICK, controls, quick
from attacks.report.exit_status import exit_status
from attacks.report.table import FAILED, SHARE_TRIED, Finding, Result, unclaimed
from attacks.victim import draws, models
from attacks.victim.draws import Check
from noise import sampling
from noise.masks import lattice
from noise.masks.off import Off
from wire.frame import Arithmetic, Direction


def read(folder: Path) -> list[Result]:
    """Returns the results in the report.json of a folder. A value of null in this file stands for infinity."""
    results = json.loads((folder / "report.json").read_text())["results"]
    return [
        Result(
            one["mask"], one["arithmetic"], one["adversary"],
            Finding(
                one["module"], one["metric"], float("inf") if one["value"] is None else one["value"],
                one["baseline"], tuple(one["interval"]), one["verdict"],
            ),
        )
        for one in results
    ]  # fmt: skip


# ---- the quick profile ----------------------------------------------------------------------------------------------


CONTROLS = "layer-0 lookup,closed-form"
"""The adversaries whose controls run beside the quick profile."""


def check_files(folder: Path) -> None:
    """Checks that all files of a report exist and are complete, and that they show in words what was stolen."""
    report = json.loads((folder / "report.json").read_text())
    assert report["results"]
    assert all(one["wins"] for one in report["controls"])
    assert [one["adversary"] for one in report["controls"]] == CONTROLS.split(",")
    told = (folder / "report.md").read_text()
    assert told.count("\n| ") > len(report["results"])
    for plot in ("recovered_adapters.svg", "recovered_prompts.svg"):
        bars = [one for one in ElementTree.parse(folder / plot).iter() if one.tag.endswith("}path")]  # noqa: S314
        assert len(bars) > 10, plot
    answer = str(models.FACTS[0]["completion"]).strip()
    stolen = folder / "stolen" / "off-float-closed-form"
    assert (stolen / "adapter_model.safetensors").stat().st_size > 0
    assert json.loads((stolen / "answers.json").read_text())[0]["stolen"].strip() == answer
    quoted = f"closed-form, adapter: stolen “{answer}”, victim “{answer}”, base “"
    (line,) = [one for one in told.splitlines() if one.startswith(f"- {quoted}")]
    assert "off, float" in line
    assert f"base “{answer}”" not in line
    assert "lattice" not in line


@pytest.mark.slow
def test_the_quick_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One run serves all checks, because tests of a module may run in several processes and so share nothing. It asks
    for the controls of all its adversaries. Of these, two run beside it, and `test_closed_form.py` runs each one."""
    asked, beside = [], command_line._controls_beside
    monkeypatch.setattr(command_line, "_controls_beside", lambda names: asked.append(names) or beside(CONTROLS))
    assert extract_lora.main(["--out", str(tmp_path)]) == 0
    assert asked == [quick()]
    assert len(controls(quick())) == len(CATALOGUE) - len(NOT_IN_QUICK)
    check_files(tmp_path)
    results = read(tmp_path)
    assert {(one.mask, one.arithmetic) for one in results} == {
        ("off", "float"), ("off", "ring"), ("gaussian-pool", "float"), ("lattice", "ring"),
        ("lattice-rounded", "ring"),
    }  # fmt: skip
    assert verdict.standing(results) == []
    assert verdict.weakened(results) == []
    read_labels = {
        (one.mask, one.arithmetic, one.adversary): one.finding.value
        for one in results
        if one.finding.module == "training labels"
    }
    assert read_labels == {
        ("off", "float", "gradient-view"): 1.0,
        ("off", "ring", "gradient-view"): 1.0,
        ("gaussian-pool", "float", "known-mask + gradient-view"): 1.0,
    }
    errors = {
        one.finding.module: one.finding.value
        for one in results
        if (one.mask, one.arithmetic, one.adversary) == ("off", "float", "closed-form")
        and one.finding.metric == "relative error"
    }
    for module in ("o_proj", "down_proj", "v_proj"):
        assert errors[module] <= 1e-3
    gains = {
        (one.mask, one.arithmetic, one.adversary): one.finding.value
        for one in results
        if one.finding.metric == "stolen task gain"
    }
    for arithmetic in ("float", "ring"):
        for thief in ("closed-form", "substitute"):
            assert gains["off", arithmetic, thief] >= 0.9
    shown = capsys.readouterr()
    assert "| lattice | ring |" in shown.out
    for stage in ("records the traffic of a victim", "victim: sends traffic 1/", "reads the recording", "attacks "):
        assert stage in shown.err
    metadata = {
        (one["module"], one["value"], one["said"])
        for one in json.loads((tmp_path / "report.json").read_text())["results"]
        if one["adversary"] == verdict.METADATA and one["module"] not in ("prompt tokens", "answer tokens")
    }
    first = "model.layers.0.self_attn"
    assert metadata >= {
        ("PEFT kind", 1.0, "one of LoRA, IA3, OFT, BOFT"),
        ("lowest adapted layer", 1.0, f"one of {first}.q_proj, {first}.o_proj"),
    }
    assert {module for module, _, _ in metadata} == {"PEFT kind", "lowest adapted layer", "training rows per step"}


@pytest.mark.slow
def test_prompts_of_a_gpt2_model(tmp_path: Path, in_process: Any, no_controls: None) -> None:
    options = ["--model", "tiny-gpt2", "--masks", "off,lattice", "--out", str(tmp_path)]
    assert recover_prompts.main(options) == 0
    rates = {(one.mask, one.adversary): one.finding for one in read(tmp_path) if one.finding.metric == "recovery rate"}
    assert rates["off", "layer-0 lookup"].value == 1.0
    deep = rates["off", "deep-state inversion"]  # the adapter is strong and unknown, so most tokens are missed
    assert deep.value > 3 * deep.interval[1]
    assert rates["lattice", "layer-0 lookup"].value < 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--masks", "nonsense"], "no mask"),
        (["--adversaries", "nonsense"], "no adversary"),
        (["--adapter", "/nowhere"], "expected a PEFT adapter folder"),
        (["--view", "/nowhere", "--model", "smollm2-135m"], "is not a recording"),
        (["--view", "/nowhere"], "needs --model"),
        (["--out", "/proc/nowhere"], "cannot read or write"),
        (["--model", "/nowhere"], "cannot find the model"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], no_controls: None
) -> None:
    assert extract_lora.main(options) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_what_libraries_say_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Saving a model shows a progress bar, and PEFT uses a name that transformers is about to drop."""

    def work() -> int:
        model = AutoModelForCausalLM.from_pretrained(models.make("tiny-llama", tmp_path / "model"))
        get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
        return 7

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert exit_status("attacks.game", None, work) == 7
    assert [str(each.message) for each in seen] == []
    assert capsys.readouterr().err == ""


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert extract_lora.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert "closed-form" in listed
    for program in ("attacks.active", "attacks.game", "attacks.weakenings", "attacks.overflow", "attacks.growth"):
        assert f"python -m {program} " in listed
        assert importlib.util.find_spec(program) is not None


NEAR = Result("lattice", "ring", "known-mask", Finding("rows", "row cosine", 0.02, 0.0, (-0.01, 0.01), ""))


@pytest.mark.parametrize(
    ("finding", "alarm"),
    [
        (NEAR.finding, False),
        (replace(NEAR.finding, value=0.03), True),
        (replace(NEAR.finding, metric="relative error", value=0.95), False),
        (replace(NEAR.finding, metric="relative error", value=0.5), True),
        (replace(NEAR.finding, value=float("inf")), False),
        (replace(NEAR.finding, value=-0.03), True),
        (replace(NEAR.finding, metric="recovery rate", value=1.0, baseline=0.3, interval=(0.0, 0.6)), True),
        (replace(NEAR.finding, metric="claimed", value=9.0, interval=(0.0, 0.0)), False),
        (replace(NEAR.finding, metric=SHARE_TRIED, value=1.0, interval=(0.0, 0.0)), False),
        (replace(NEAR.finding, metric="recovery rate", value=1.0, verdict="wins where tried"), True),
        (replace(NEAR.finding, metric="certain claims", value=1.0, interval=(0.0, 0.0)), True),
        (Finding("training tokens", "recovery rate", 0.02, 0.01, (0.0, 0.027), ""), False),
        (Finding("training tokens", "recovery rate", 0.1, 0.01, (0.0, 0.027), ""), True),
        (Finding("training labels", "recovery rate", 0.4, 0.4, (0.4, 0.4), ""), False),
        (Finding("training labels", "recovery rate", 0.6, 0.27, (0.21, 0.32), ""), True),
        (Finding("adapter", "stolen task gain", 0.05, 0.0, (0.0, 0.0), ""), False),
        (Finding("adapter", "stolen task gain", 0.5, 0.0, (0.0, 0.0), ""), True),
    ],
)
def test_the_gate_notices_a_mask_that_weakens(finding: Finding, alarm: bool) -> None:
    assert bool(verdict.weakened([replace(NEAR, finding=finding)])) is alarm
    assert verdict.weakened([replace(NEAR, finding=finding, mask="off")]) == []
    assert verdict.weakened([replace(NEAR, finding=finding, adversary="traffic-shape")]) == []


@pytest.mark.parametrize(
    ("gain", "agreement", "alarm"), [(0.5, 0.1, False), (0.5, 0.55, False), (0.5, 0.7, True), (0.95, 0.1, True)]
)
def test_a_gain_that_answers_contradict_is_luck(gain: float, agreement: float, alarm: bool) -> None:
    said = "wins" if gain > 0.9 else "above baseline"
    findings = (
        Finding("adapter", "stolen task gain", gain, 0.0, (-0.1, 0.1), said),
        Finding("adapter", "agreement of answers", agreement, 0.5, (0.4, 0.6), ""),
    )
    assert bool(verdict.weakened([replace(NEAR, finding=finding) for finding in findings])) is alarm


STOLEN = Result("off", "ring", "closed-form", Finding("o_proj", "relative error", 1e-6, 1.0, (1.0, 1.0), "wins"))
GUESSED = replace(STOLEN, mask="lattice", finding=replace(STOLEN.finding, value=54.0, verdict="at baseline"))
SILENT = Result("lattice", "ring", "substitute", unclaimed("–", "–"))
SIZES = Result("lattice", "ring", "traffic-shape", Finding("prompt tokens", "recovery rate", 1.0, 0, (0, 0), "wins"))


def test_the_verdict_in_three_lines() -> None:
    assert verdict.in_three_lines([GUESSED, SILENT, SIZES, STOLEN], 3, 0, 0) == [
        "lattice: contents: 0 of 2 attacks; sizes and order show, as documented",
        "off, not private: contents: 1 of 1 attacks",
        "no alarm; 3 of 3 controls win where they should",
    ]


def test_the_verdict_tells_a_mask_that_failed_and_an_attack_that_did() -> None:
    read_here = replace(STOLEN, mask="lattice", adversary="known-mask")
    broken = replace(STOLEN, mask="lattice", adversary="no-error", finding=replace(STOLEN.finding, metric=FAILED))
    first, second, third = verdict.in_three_lines([GUESSED, read_here, broken], 2, 1, 3)
    assert first.startswith("lattice: contents: 1 of 2 attacks, and 1 failed;")
    assert "no mask without privacy" in second
    assert third == "3 alarms; 1 of 2 controls win where they should"
    assert len(verdict.weakened([GUESSED, read_here, broken])) == 2, "the alarms count as the verdict does"


def test_the_verdict_calls_nothing_safe_that_nobody_could_judge() -> None:
    claimed = Finding("layers", "claimed", 3.0, 0.0, (0.0, 0.0), "not judged")
    first, *_ = verdict.in_three_lines([Result("unknown", "ring", "closed-form", claimed, "anna")], 0, 0, 0)
    assert "0 of 1 attacks (1 of them made claims that nobody here can judge)" in first
    assert "contents: no attack ran" in verdict.in_three_lines([SIZES], 0, 0, 0)[0]


def test_a_run_ends_with_its_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [NEAR, SIZES]
    monkeypatch.setattr(command_line, "make_cases", lambda *_: ([], []))
    monkeypatch.setattr(command_line, "attack_all", lambda *_: results)
    options = command_line.make_parser("x", "y").parse_args(["--out", str(tmp_path)])
    said = verdict.in_three_lines(results, 0, 0, 0)
    assert command_line.attack_and_report(options, [], SimpleNamespace(recv=list)) == 0  # type: ignore[arg-type]
    printed = capsys.readouterr().out.splitlines()
    assert printed[-3:] == said
    assert printed[:3] == [f"- {line}" for line in said], "before the table, too"
    assert (tmp_path / "report.md").read_text().splitlines()[2:5] == [f"- {line}" for line in said]
    assert len(json.loads((tmp_path / "report.json").read_text())["results"]) == len(results)


def test_the_plots_show_every_mask_and_a_theft_as_a_full_bar() -> None:
    found = plots.panels([STOLEN, GUESSED, SILENT, replace(SILENT, mask="pad")], plots.ERROR)
    assert list(found) == ["off, ring, not private", "lattice, ring, private", "pad, ring, private"]
    (theft,), (guess,), (silence,) = found.values()
    assert theft.length > 0.99
    assert theft.kind == "theft"
    assert (guess.length, guess.kind) == (0.0, "no better than guessing")
    assert (silence.length, silence.said) == (0.0, "claim nothing")


def test_an_attack_that_is_silent_under_one_mask_has_an_empty_bar_there() -> None:
    quiet = replace(GUESSED, finding=unclaimed("–", "–"))
    ((_,), (silence,)) = plots.panels([STOLEN, quiet], plots.ERROR).values()
    assert (silence.label, silence.length, silence.said) == ("closed-form", 0.0, "claims nothing")


def test_a_few_tokens_that_were_tried_are_no_full_bar() -> None:
    rate = replace(STOLEN, finding=Finding("tokens", "recovery rate", 1.0, 0.1, (0, 0.2), "wins where tried"))
    tried = replace(STOLEN, finding=Finding("tokens", SHARE_TRIED, 0.05, 0.0, (0.0, 0.0), "2 of 40"))
    ((bar,),) = plots.panels([rate, tried], plots.RATE).values()
    assert bar.length == pytest.approx(0.05)
    assert bar.said == "100% of the 5% that were tried"


def test_each_panel_of_a_plot_has_a_title(tmp_path: Path) -> None:
    (file,) = plots.draw(tmp_path, [STOLEN, GUESSED])
    comments = file.read_text()  # the SVG's glyphs are paths; matplotlib puts the text into comments
    for title in ("Share of the adapter", "off, ring, not private", "lattice, ring, private"):
        assert f"<!-- {title}" in comments


def test_the_gate_notices_an_adversary_that_no_longer_wins() -> None:
    weak = Result("off", "ring", "layer-0 lookup", Finding("tokens", "recovery rate", 0.5, 0.0, (0.0, 0.0), ""))
    tokens = replace(weak, finding=replace(weak.finding, value=1.0))
    tried = replace(tokens, finding=replace(tokens.finding, metric=SHARE_TRIED))
    batch = replace(tokens, adversary="gradient-view", finding=replace(tokens.finding, module="training tokens"))
    assert verdict.standing([tokens, tried, batch]) == []
    assert verdict.standing([weak, tried, batch])
    assert verdict.standing([replace(tokens, adversary="closed-form"), tried, batch])
    few = replace(tried, finding=replace(tried.finding, value=0.2))
    assert verdict.standing([tokens, few, batch]), "a few tokens are not the prompts"


def test_the_gate_asks_less_of_rows_that_were_opened_on_a_real_model() -> None:
    def asked(mask: str, error: float, is_tiny: bool) -> bool:
        found = Finding("o_proj", "relative error", error, 1.0, (1.0, 1.0), "")
        name = "known-mask + closed-form" if mask == "gaussian-pool" else "closed-form"
        alarms = verdict.standing([Result(mask, "float", name, found)], is_tiny)
        return any("o_proj" in alarm for alarm in alarms)

    assert asked("gaussian-pool", 4e-3, True)
    assert not asked("gaussian-pool", 4e-3, False)
    assert asked("gaussian-pool", 0.06, False)
    assert asked("off", 4e-3, False)


@pytest.mark.parametrize("arithmetic", ["float", "ring"])
def test_the_gate_asks_for_the_tokens_of_a_training_step(arithmetic: str) -> None:
    found = Finding("training tokens", "recovery rate", 0.98, 0.1, (0.05, 0.15), "wins")
    read = Result("off", arithmetic, "gradient-view", found)

    def asked(results: list[Result]) -> bool:
        return any("training tokens" in alarm for alarm in verdict.standing(results))

    assert asked([read])
    assert not asked([replace(read, finding=replace(found, value=0.99))])
    assert asked([replace(read, adversary="layer-0 lookup")])


@pytest.mark.parametrize("metric", ["relative error", "largest error"])
def test_an_error_that_is_large_is_no_leak(metric: str) -> None:
    for value, alarms in ((200.0, 0), (0.95, 0), (0.5, 1)):
        found = Finding("o_proj", metric, value, 1.0, (1.0, 1.0), "at baseline")
        assert len(verdict.weakened([Result("lattice", "ring", "closed-form", found)])) == alarms


def test_the_gate_asks_for_every_metric() -> None:
    found = Finding("o_proj", "relative error", 50.0, 1.0, (1.0, 1.0), "at baseline")
    lost = verdict.standing([Result("off", "float", "closed-form", found)])
    # o, v, down_proj, gain; in how many layers o and v; tokens of prompts and how many were tried; tokens of a step
    assert len(lost) == 9
    assert verdict.standing([Result("off", "float", "closed-form", found)], ran={"traffic-shape"}) == []


def forgetful(patch: pytest.MonkeyPatch) -> None:
    """Leaves the backward direction unmasked."""
    mask = lattice.Lattice.mask

    def mask_forward(self: Any, group: Any, direction: Direction, rows: Any) -> Any:
        if direction is Direction.BACKWARD:
            return Off(Arithmetic.RING).mask(group, direction, rows)
        return mask(self, group, direction, rows)

    patch.setattr(lattice.Lattice, "mask", mask_forward)


def errorless(patch: pytest.MonkeyPatch) -> None:
    """Gives the masks no error."""
    patch.setattr(sampling, "error", lambda rng, shape, parameters: torch.zeros(tuple(shape), dtype=torch.int8))


def sharing(patch: pytest.MonkeyPatch) -> None:
    """Gives all groups the same secrets."""
    lock, where, counts, secrets = threading.Lock(), threading.local(), Counter[Any](), list[torch.Tensor]()
    make, ternary = lattice.Lattice._make_blocks, sampling.ternary

    def make_blocks(self: Any, group: Any, direction: Direction, *arguments: Any) -> Any:
        where.stream = group.id, direction
        return make(self, group, direction, *arguments)

    def shared(rng: Any, shape: Any) -> torch.Tensor:
        with lock:
            first = counts[where.stream]
            counts[where.stream] += shape[0]
            while len(secrets) < first + shape[0]:
                secrets.append(ternary(rng, (1, *shape[1:]))[0])
            return torch.stack(secrets[first : first + shape[0]])

    patch.setattr(lattice.Lattice, "_make_blocks", make_blocks)
    patch.setattr(sampling, "ternary", shared)


def seeded(patch: pytest.MonkeyPatch) -> None:
    """Draws the secrets from small seeds."""
    seeds = iter(range(1, 4000))

    def draw(rng: Any, shape: Any) -> torch.Tensor:
        generators = [torch.Generator().manual_seed(next(seeds)) for _ in range(shape[0])]
        return torch.stack([torch.randint(-1, 2, shape[1:], generator=one) for one in generators]).to(torch.int8)

    patch.setattr(sampling, "ternary", draw)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutation", "noticed_by"),
    [
        (forgetful, ("gradient-view", "byte-statistics")),
        (errorless, ("no-error",)),
        (sharing, ("slot-reuse",)),
        (seeded, ("seed-search",)),
    ],
    ids=["plain gradients", "no error", "a secret for all layers", "seeded secrets"],
)
def test_a_victim_whose_mask_is_broken_is_noticed(
    mutation: Callable[[pytest.MonkeyPatch], None], noticed_by: tuple[str, ...], tmp_path: Path, in_process: Any,
    no_controls: None,
) -> None:  # fmt: skip
    """The victim's lattice mask leaves one direction unmasked, has no error, or draws weak secrets (docs/masks.md,
    "lattice"). The report must raise an alarm."""
    in_process.change = mutation
    options = ["--masks", "lattice", "--adversaries", ",".join(noticed_by), "--out", str(tmp_path / "out")]
    assert extract_lora.main(options) == 1
    alarms = verdict.weakened(read(tmp_path / "out"))
    assert [name for name in noticed_by if not any(name in alarm for alarm in alarms)] == []


def tiny_errors(patch: pytest.MonkeyPatch) -> None:
    """Makes all errors 0 or 1."""
    error = sampling.error
    patch.setattr(sampling, "error", lambda rng, shape, parameters: error(rng, shape, parameters).remainder(2))


@pytest.mark.slow
def test_a_victim_is_looked_into_where_no_recording_tells(
    tmp_path: Path, in_process: Any, no_controls: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The errors are 0 and 1 at the shipped dimension. No adversary notices this, but the test of the victim's draws
    does."""
    in_process.change = tiny_errors
    adversaries = "no-error,slot-reuse,tiny-error,sparse-secret,shared-error,byte-statistics"
    options = ["--masks", "lattice", "--adversaries", adversaries, "--draws", "--out", str(tmp_path / "out")]
    assert extract_lora.main(options) == 1
    assert verdict.weakened(read(tmp_path / "out")) == []
    assert "ALARM: lattice, from inside: mean square of a block's errors" in capsys.readouterr().err


def test_the_gate_says_what_was_drawn_wrongly() -> None:
    fine = Check("weight of a secret", 20, 1.01, "of what is expected", -0.4, False)
    light = replace(fine, value=0.01, log10_chance=-400.0, is_alarm=True)
    outside = Check("errors outside of their support", 1, 3.0, "times", -math.inf, True)
    assert verdict.drawn("lattice", [fine]) == []
    said = verdict.drawn("lattice", [fine, light, outside])
    assert said == [
        "lattice, from inside: errors outside of their support: 3 times, which cannot be",
        "lattice, from inside: weight of a secret: 0.01 of what is expected, chance below 10^-400",
    ]
    assert draws.checks_from_json(json.loads(json.dumps(draws.checks_to_json([fine, outside])))) == [fine, outside]


# ---- --peft: each kind is stolen without a mask, and not through the lattice mask -----------------------------------


def values(results: list[Result], mask: str, arithmetic: str, metric: str) -> dict[str, float]:
    here = [one for one in results if (one.mask, one.arithmetic, one.finding.metric) == (mask, arithmetic, metric)]
    return {one.finding.module: one.finding.value for one in here}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ia3", "oft", "boft"])
def test_it_falls_without_a_mask_and_holds_with_one(
    kind: str, tmp_path: Path, in_process: Any, no_controls: None
) -> None:
    """All three adapters change v and either q or k. IA3's change of the input of down_proj is found as an equal change
    of up_proj."""
    options = ["--peft", kind, "--masks", "off,lattice", "--adversaries", "closed-form", "--out", str(tmp_path)]
    assert extract_lora.main(options) == 0
    results = read(tmp_path)
    errors = values(results, "off", "float", "relative error")
    assert errors["v_proj"] < 1e-5
    assert errors["q·k"] < 0.02
    assert values(results, "off", "ring", "relative error")["v_proj"] < 0.1
    for arithmetic in ("float", "ring"):
        assert values(results, "off", arithmetic, "stolen task gain")["adapter"] > 0.95
    base = {one.finding.baseline for one in results if one.finding.metric == "agreement of answers"}
    assert values(results, "lattice", "ring", "agreement of answers").get("adapter", 0.0) < max(base) + 0.1
    assert all(error > 0.9 for error in values(results, "lattice", "ring", "relative error").values())
    assert verdict.weakened(results) == []


# ---- a model whose output head stays with the tenant ----------------------------------------------------------------


@pytest.mark.slow
def test_the_adapter_of_a_gpt2_model_is_stolen_whole(tmp_path: Path, in_process: Any, no_controls: None) -> None:
    thieves = "closed-form,gradient-equations"
    options = ["--model", "tiny-gpt2", "--masks", "off", "--adversaries", thieves, "--out", str(tmp_path)]
    assert extract_lora.main(options) == 0
    found = {
        (one["adversary"], one["arithmetic"], one["module"], one["metric"]): one
        for one in json.loads((tmp_path / "report.json").read_text())["results"]
    }

    def value(adversary: str, module: str, metric: str, arithmetic: str = "float") -> float:
        return float(found[adversary, arithmetic, module, metric]["value"])

    for module in ("o_proj", "down_proj", "v_proj", "up_proj", "q·k"):
        assert value("closed-form", module, "relative error") <= 1e-3, module
        assert ("closed-form", "float", f"{module} (1 of 2 layers)", "relative error") not in found
    assert value("closed-form", "adapter", "stolen task gain") >= 0.9
    assert value("gradient-equations", "down_proj", "relative error") <= 1e-3
    assert 0.1 < value("gradient-equations", "adapter", "stolen task gain") < 0.9, "down_proj is not all of it"
    low, high = found["closed-form", "float", "adapter", "stolen task gain"]["spread"]
    assert 0.9 <= low <= high
    # In ring arithmetic the last down_proj stays hidden, and the table must say so.
    assert found["closed-form", "ring", "down_proj (1 of 2 layers)", "relative error"]["verdict"] == "no claim"
    assert found["gradient-equations", "ring", "–", "–"]["verdict"] == "no claim"
