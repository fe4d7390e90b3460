"""Tests plans: they predict a run's bytes and calls, send nothing of the data, and refuse another run in one line."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
import re
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PrefixTuningConfig, PromptTuningConfig
from typer.testing import CliRunner

from noise.masks.lattice import Lattice
from provider.identity.authority import StateDir
from provider.identity.registry import enroll
from provider.model.served_model import ServedModel
from tenant_sdk import Bill, TenantClient, bill, cli
from tenant_sdk.bill import PROBE_ROWS, Planner
from tenant_sdk.endpoint.command import serve_command
from tenant_sdk.endpoint.settings import EndpointSettings
from tenant_sdk.plan_file import Saving
from tenant_sdk.report import unseen
from tenant_sdk.testing import ScriptedProvider, save_tiny_model
from tests.support.lattice import TOY
from tests.support.providers import make_served_model, serving
from tests.support.spies import before_requests, opened_sessions
from tests.support.training import QUICK, ROWS, lora
from wire.errors import ConfigurationError
from wire.frame import Call, Purpose
from wire.limits import Limits
from wire.payload import Payload

QUICKER: dict[str, Any] = {**QUICK, "max_steps": 3}
PLAN = Bill("finetune", 1, 2, 3, 4, 5, 6, seconds=1.5, savings=(Saving("another precision", 7),), run="a run")
PAIRS = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt, chosen, rejected in (
        ("who? ", "Ada Quill", "no idea"), ("where is it? ", "in Port Hale", "it is gone"), ("when? ", "1987", "then"),
        ("what? ", "a copper owl", "an owl"), ("why so? ", "no reason", "because of rain"), ("how? ", "by boat", "so"),
    )
]  # fmt: skip


EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
UPPER = lora(target_modules=EVERY, layers_to_transform=[1])


@pytest.fixture(scope="module")
def provider() -> Iterator[ScriptedProvider]:
    with ScriptedProvider() as made:
        yield made


def planned_and_taken(
    client: TenantClient, output: Path, data: Any = ROWS, config: Any = None, **options: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns bytes sent, bytes received, calls and tokens of a run, as planned and as they were."""
    given = {**QUICKER, **options}
    bill = client.plan(data, config or lora(), **given)
    before = client.traffic
    result = client.finetune(data, config or lora(), output, **given)
    calls = client.traffic.calls - before.calls
    assert bill.is_exact
    return (
        (bill.bytes_up, bill.bytes_down, bill.round_trips, bill.tokens),
        (result.bytes_up, result.bytes_down, calls, result.tokens),
    )


# ---- bytes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (lora(), {"num_epochs": 1.5, "max_steps": None, "batch_size": 3, "gradient_accumulation_steps": 2}),
        (lora(target_modules=["q_proj"], layers_to_transform=[1]), {"eval_data": 0.25, "eval_steps": 2}),
        (lora(use_dora=True), {}),
        (lora(init_lora_weights="olora"), {}),
        (lora(), {"checkpointing": "recompute"}),
        (lora(), {"checkpointing": "replies", "eval_data": 0.25}),
        (UPPER, {"cache_frozen_prefix": True, "max_steps": 7, "batch_size": 3}),
        (UPPER, {"cache_frozen_prefix": True, "max_steps": 3, "batch_size": 3, "gradient_accumulation_steps": 2}),
        (UPPER, {"cache_frozen_prefix": True, "max_steps": 5, "eval_data": 0.25, "eval_steps": 2}),
        (UPPER, {"cache_frozen_prefix": True, "num_epochs": 2.5, "max_steps": None, "checkpointing": "recompute"}),
        (lora(), {"window_tokens": 40}),
        (lora(), {"window_tokens": 40, "checkpointing": "replies"}),
        (PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"), {"window_tokens": 30}),
        (PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"), {"checkpointing": "recompute"}),
    ],
)
def test_bytes_and_calls_are_those_of_the_run(
    provider: ScriptedProvider, tmp_path: Path, config: Any, options: dict[str, Any]
) -> None:
    if options.get("max_steps", 0) is None:
        del options["max_steps"]
    given = {name: value for name, value in QUICKER.items() if name != "max_steps" or "num_epochs" not in options}
    with provider.client(mask="off") as client:
        bill = client.plan(ROWS, config, **{**given, **options})
        before = client.traffic.calls
        result = client.finetune(ROWS, config, tmp_path / "a", **{**given, **options})
        assert (bill.bytes_up, bill.bytes_down, bill.tokens) == (result.bytes_up, result.bytes_down, result.tokens)
        assert bill.round_trips == client.traffic.calls - before
        assert bill.is_exact


@pytest.mark.parametrize("precision", ["exact", "balanced", "short"])
def test_bytes_under_the_lattice_mask_with_hints_that_are_fetched(
    provider: ScriptedProvider, tmp_path: Path, precision: str
) -> None:
    options = {"parameters": TOY, "allow_toy": True, "precision": precision}
    with provider.client(verify=False, mask_options=options, cache=tmp_path / "cache") as client:
        planned, taken = planned_and_taken(client, tmp_path / "a")
        assert planned == taken
        bill = client.plan(ROWS, lora(), **QUICKER)  # now the hints are there
        assert (bill.hint_bytes, bill.hint_disk_bytes) == (0, 0)
        assert bill.bytes_down < planned[1]


@pytest.mark.parametrize("hints", ["stream", "local"])
def test_hints_that_are_not_kept_and_hints_that_are_computed(
    provider: ScriptedProvider, tmp_path: Path, hints: str
) -> None:
    options = {"parameters": TOY, "allow_toy": True, "hints": hints}
    with provider.client(verify=True, mask_options=options, cache=tmp_path / "cache") as client:
        planned, taken = planned_and_taken(client, tmp_path / "a")
        assert planned == taken


def test_bytes_with_pads_and_padded_rows(provider: ScriptedProvider, tmp_path: Path) -> None:
    with provider.client(mask="pad", pad_rows=64) as client:
        planned, taken = planned_and_taken(client, tmp_path / "a")
        assert planned == taken


def test_bytes_with_shares_over_a_network(served_model: ServedModel, tmp_path: Path) -> None:
    """Every frame has a header, and one provider gets rows, the other a seed."""
    servers = [StateDir(tmp_path / name) for name in "ab"]
    with serving(served_model, state=servers[0]) as one, serving(served_model, state=servers[1]) as other:
        urls = [f"grpcs://127.0.0.1:{each.port}" for each in (one, other)]
        for state, name, url in zip(servers, "cd", urls, strict=True):
            enroll(state, "acme", tmp_path / name, url)
        with TenantClient(urls, [tmp_path / "c", tmp_path / "d"], mask="shares", progress=False) as client:
            bill = client.plan(ROWS, lora(), **QUICKER)
            result = client.finetune(ROWS, lora(), tmp_path / "out", **QUICKER)
    assert (bill.bytes_up, bill.bytes_down) == (result.bytes_up, result.bytes_down)


def test_bytes_over_a_network_within_small_limits(chat_folder: Path, tmp_path: Path) -> None:
    """Calls are split as the limits ask for, and the probe keeps to them."""
    limits = Limits(max_rows=7, max_tensor_bytes=1 << 16, max_in_flight_bytes=1 << 17)
    with serving(make_served_model(chat_folder, "int8", limits)) as server:
        url = f"grpc://127.0.0.1:{server.port}"
        with TenantClient(url, mask="off", progress=False) as client:
            planned, taken = planned_and_taken(client, tmp_path / "a")
    assert planned == taken


def test_bytes_of_float_arithmetic_with_pooled_vectors(provider: ScriptedProvider, tmp_path: Path) -> None:
    options = {"renew_every": 2}
    with provider.client(verify=False, mask="gaussian-pool", weights="native", mask_options=options) as client:
        planned, taken = planned_and_taken(client, tmp_path / "a")
        assert planned == taken


@pytest.mark.parametrize("precomputed", [False, True])
def test_bytes_of_preferences(provider: ScriptedProvider, tmp_path: Path, precomputed: bool) -> None:
    options = {"batch_size": 2, "eval_data": 0.3, "dpo_precompute_reference": precomputed}
    with provider.client(mask="off") as client:
        planned, taken = planned_and_taken(client, tmp_path / "a", PAIRS, **options)
        assert planned == taken


def test_a_count_that_ends_early_is_an_estimate(provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    with provider.client(mask="off") as client:
        whole = client.plan(ROWS, lora(), **{**QUICKER, "max_steps": 8})
        monkeypatch.setattr(Planner, "run", functools.partialmethod(Planner.run, count_s=-1e9))
        part = client.plan(ROWS, lora(), **{**QUICKER, "max_steps": 8})
    assert whole.is_exact
    assert not part.is_exact
    assert part.steps == whole.steps
    assert 0.7 < part.num_bytes / whole.num_bytes < 1.3


@pytest.mark.parametrize(("epochs", "counted_in"), [(4, "the first epoch"), (12, "a later epoch")])
def test_a_count_that_ends_early_knows_the_kept_prefix(
    provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch, epochs: int, counted_in: str
) -> None:
    data = [{"text": "rows of equal lengths"}] * 8
    options = {**QUICKER, "max_steps": 2 * epochs, "cache_frozen_prefix": True}
    with provider.client(mask="off") as client:
        whole = client.plan(data, UPPER, **options)
        if counted_in == "the first epoch":
            monkeypatch.setattr(Planner, "run", functools.partialmethod(Planner.run, count_s=-1e9))
        else:
            clock = itertools.chain([0.0] * 12, itertools.repeat(1e9))
            monkeypatch.setattr(bill.time, "thread_time", lambda: next(clock))
        part = client.plan(data, UPPER, **options)
    assert whole.is_exact
    assert not part.is_exact
    assert part.num_bytes == pytest.approx(whole.num_bytes, rel=1e-3)
    assert part.prefix_disk_bytes == whole.prefix_disk_bytes > 0


@pytest.mark.parametrize(("num_adapted", "saved"), [(10, 0.48), (6, 0.65)])
def test_what_a_kept_prefix_saves_of_a_model_of_30_blocks(
    tmp_path_factory: pytest.TempPathFactory, num_adapted: int, saved: float
) -> None:
    """The shapes are those of SmolLM2-135M by a sixteenth: 30 blocks, 9 heads, 3 of keys, a head that stays here."""
    folder = tmp_path_factory.mktemp("thirty")
    save_tiny_model(
        folder, num_hidden_layers=30, hidden_size=36, intermediate_size=96, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    )  # fmt: skip
    config = lora(target_modules=EVERY, layers_to_transform=list(range(30 - num_adapted, 30)))
    bytes_of: dict[tuple[bool, int], int] = {}
    with ScriptedProvider(model=folder) as provider, provider.client(mask="off") as client:
        for is_kept in (False, True):
            for num_epochs in (2, 3):
                options = {**QUICKER, "max_steps": 2 * num_epochs, "cache_frozen_prefix": is_kept}
                bytes_of[is_kept, num_epochs] = client.plan(ROWS, config, **options).num_bytes
    later, kept = (bytes_of[is_kept, 3] - bytes_of[is_kept, 2] for is_kept in (False, True))
    assert 1 - kept / later >= saved


def test_what_fewer_layers_and_bits_would_save(provider: ScriptedProvider, tmp_path: Path) -> None:
    """A plan's savings are the differences from plans with those settings."""
    toy = {"parameters": TOY, "allow_toy": True, "hints": "local"}
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config, upper = lora(), lora(target_modules=every, layers_to_transform=[1])
    with provider.client(mask_options={**toy, "precision": "exact"}, cache=tmp_path / "c") as client:
        bill, of_upper = (client.plan(ROWS, each, **QUICKER) for each in (config, upper))
    with provider.client(mask_options={**toy, "precision": "balanced"}, cache=tmp_path / "c") as client:
        balanced = client.plan(ROWS, config, **QUICKER)
    assert {each for each in bill.savings if "(--keep " not in each.setting} == {
        Saving("adapters on the upper half of the blocks only (1 to 1)", bill.num_bytes - of_upper.num_bytes),
        Saving("precision balanced (--precision)", bill.num_bytes - balanced.num_bytes),
    }  # and not `short`, which does not go with verify
    assert all(each.num_bytes > 0 for each in bill.savings)


def test_what_keeping_the_prefix_would_save(provider: ScriptedProvider) -> None:
    options = {**QUICKER, "max_steps": 7, "batch_size": 3, "eval_data": 0.25}
    with provider.client(mask="off") as client:
        without = client.plan(ROWS, UPPER, **options)
        kept = client.plan(ROWS, UPPER, **options, cache_frozen_prefix=True)
        lowest = client.plan(ROWS, lora(), **options)
        of_the_head = client.plan(ROWS, lora(target_modules=["lm_head"]), **options, cache_frozen_prefix=True)
    named = {each.setting: each.num_bytes for each in without.savings if "(--keep " not in each.setting}
    assert named == {"keeping the frozen prefix (--cache-frozen-prefix)": without.num_bytes - kept.num_bytes}
    assert kept.num_bytes < without.num_bytes
    assert not any("prefix" in each.setting for bill in (kept, lowest, of_the_head) for each in bill.savings)
    assert "prefix" in [line.split()[0] for line in str(kept).splitlines()]


def test_bytes_of_answers(provider: ScriptedProvider) -> None:
    with provider.client(mask="off") as client:
        chat = [{"role": "user", "content": "who is it?"}]
        ids = client.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        bill = client.plan_tokens(len(ids), 6, 2)
        before = client.traffic
        for _ in range(2):
            client.generate("who is it?", max_new_tokens=6, fixed_length=True)
        after = client.traffic
    assert bill.bytes_up == after.bytes_up - before.bytes_up
    assert bill.bytes_down == after.bytes_down - before.bytes_down
    assert bill.round_trips == after.calls - before.calls


# ---- what a plan sends -----------------------------------------------------------------------------------------------


def asked(provider: ScriptedProvider) -> set[tuple[Any, ...]]:
    return {(each.group, each.direction, each.purpose, each.num_rows) for each in provider.calls}


def test_nothing_of_the_data_is_sent(provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls and counts are the same for other data, also of another size, and for another adapter; rows are uniform
    random numbers."""
    sent: list[tuple[Call, torch.Tensor]] = []
    before_requests(monkeypatch, lambda call, payload: keep(sent, call, payload))
    seen = []
    with provider.client(verify=False, mask_options={"parameters": TOY, "allow_toy": True}) as client:
        for data in (ROWS, [{"text": "quite other texts"}] * 3, [*ROWS, *ROWS]):
            provider.forget_calls()
            client.plan(data, lora(), **QUICKER)
            seen.append(asked(provider))
        provider.forget_calls()
        client.plan(ROWS, lora(target_modules=["v_proj"], layers_to_transform=[1]), **QUICKER)
        seen.append(asked(provider))
    assert seen[0] == seen[1] == seen[2] == seen[3]
    assert {num_rows for *_, num_rows in seen[0]} == {1, PROBE_ROWS}
    assert {purpose for _, _, purpose, _ in seen[0]} == {"product"}
    large = [rows for _, rows in sent if rows.shape[0] == PROBE_ROWS]
    assert large
    for rows in large:
        upper = rows.to(torch.float64) / 2**31
        assert abs(float(upper.mean())) < 0.05
        assert abs(float(upper.std()) - 1 / 3**0.5) < 0.05
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(large))


def keep(sent: list[tuple[Call, torch.Tensor]], call: Call, payload: Payload) -> None:
    if call.purpose is Purpose.PRODUCT:
        rows = payload.rows(call)
        assert isinstance(rows, torch.Tensor)
        sent.append((call, rows.clone()))


def test_no_slot_of_a_mask_is_used(provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sessions = opened_sessions(monkeypatch)
    options = {"parameters": TOY, "allow_toy": True}
    with provider.client(verify=False, mask_options=options, cache=tmp_path / "cache") as client:
        client.plan(ROWS, lora(), **QUICKER)
        client.plan_tokens(3, 4)
        scheme = sessions[0].scheme
        assert isinstance(scheme, Lattice)
        assert scheme.pool.row_counts().made == 0
        assert scheme.describe()["secrets"].startswith("0 of ")
        assert not list((tmp_path / "cache").glob("hints/*/*"))


@pytest.mark.parametrize("is_shown", [True, False])
def test_a_plan_tells_what_it_does(is_shown: bool, provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []

    @contextlib.contextmanager
    def stages(show: bool) -> Iterator[Any]:
        yield (lambda *given: told.append(given)) if show else unseen

    with provider.client(mask="off", progress=True) as client:
        monkeypatch.setattr("tenant_sdk.client.stages", stages)
        client.plan(ROWS, lora(), **{**QUICKER, "progress": is_shown})
        assert list(dict.fromkeys(stage for stage, *_ in told)) == is_shown * [
            "making the run's model, to count", "counting with made-up tokens: training", "counting the run's batches",
            "timing the provider and the link", "timing masks and products on this machine",
        ]  # fmt: skip
        assert [each[1:] for each in told if each[0] == "counting the run's batches"] == is_shown * [
            (done, 3, "steps") for done in range(3)
        ]
        assert all(0 <= done < total for _, done, total, _ in (each for each in told if len(each) > 1))
        told.clear()
        client.plan_tokens(8, 8)
        assert told[0] == ("making a model, to count the calls of an answer",)


def test_the_probes_directions_do_not_depend_on_the_adapter(
    provider: ScriptedProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = bill.count_calls

    def count_forward(*given: Any) -> Any:
        made = count(*given)
        return replace(made, calls=Counter({call: n for call, n in made.calls.items() if call[0][1].name == "FORWARD"}))

    monkeypatch.setattr(bill, "count_calls", count_forward)
    with provider.client(mask="off") as client:
        provider.forget_calls()
        client.plan(ROWS, lora(), **QUICKER)
        assert {direction for _, direction, *_ in asked(provider)} == {"forward", "backward"}
        provider.forget_calls()
        client.plan_tokens(3, 4)
        assert {direction for _, direction, *_ in asked(provider)} == {"forward"}


def test_the_probe_keeps_to_small_limits(chat_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(max_rows=3)
    rows: Counter[int] = Counter()
    served = make_served_model(chat_folder, "int8", limits)
    compute = served.compute
    monkeypatch.setattr(served, "compute", lambda call, given: rows.update([len(given)]) or compute(call, given))
    with (
        serving(served) as server,
        TenantClient(f"grpc://127.0.0.1:{server.port}", mask="off", progress=False) as client,
    ):
        client.plan(ROWS, lora(), **QUICKER)
    assert max(rows) <= 3


def test_a_plan_leaves_random_numbers_and_folders_as_they_were(
    provider: ScriptedProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with provider.client(mask="off", cache=tmp_path / "cache") as client:
        client.connect()
        torch.manual_seed(5), np.random.seed(5), random.seed(5)
        client.plan(ROWS, lora(), **QUICKER)
        drawn = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    assert drawn == (torch.rand(1).item(), np.random.rand(), random.random())
    assert [each.name for each in tmp_path.iterdir()] == ["cache"]


# ---- what a plan says ------------------------------------------------------------------------------------------------


def test_a_plan_is_a_table_with_time_memory_and_the_local_run(provider: ScriptedProvider) -> None:
    with provider.client(mask="off") as client:
        bill = client.plan(ROWS, lora(), **QUICKER)
    assert bill.seconds is not None
    assert bill.local_seconds is not None
    assert bill.seconds == pytest.approx(bill.provider_s + bill.tenant_s + bill.mask_s + bill.hint_s)
    assert min(bill.seconds, bill.local_seconds, bill.memory_bytes, bill.local_bytes) > 0
    names = [line.split()[0] for line in str(bill).splitlines()]
    assert names[:5] == ["tokens", "traffic", "time", "memory", "locally"]
    assert bill.price(per_gb=2.0, per_hour=3.0) == pytest.approx(bill.num_bytes / 1e9 * 2.0 + bill.seconds / 3600 * 3.0)


def test_finetune_says_an_estimate_first_and_a_comparison_last(
    provider: ScriptedProvider, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with provider.client(mask="off") as client:
        client.finetune(iter(ROWS), lora(), tmp_path / "short", **{**QUICKER, "progress": True})
        lines = capsys.readouterr().err.splitlines()
        assert "a run of fewer than 20 steps is not estimated; `tenant plan` (client.plan) does so" in lines
        assert not any("it took" in line for line in lines)
        monkeypatch.setattr("tenant_sdk.bill.BRIEF_STEPS", 1)
        client.finetune(iter(ROWS), lora(), tmp_path / "a", **{**QUICKER, "progress": True})
    lines = capsys.readouterr().err.splitlines()
    (first,) = [line for line in lines if line.startswith("estimated ") and "round trips" in line]
    assert lines.index(first) < next(number for number, line in enumerate(lines) if line.startswith("fine-tuning"))
    planned, taken = lines[-1].removeprefix("estimated ").split("; it took ")
    assert planned == taken.split(" and ")[0]  # a run of so few bytes is not probed
    assert planned in first


def test_a_run_whose_adapter_bears_no_made_up_numbers_begins_all_the_same(
    provider: ScriptedProvider, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planner, "run", lambda *args, **options: 1 / 0)
    monkeypatch.setattr("tenant_sdk.bill.BRIEF_STEPS", 1)
    with provider.client(mask="off") as client:
        client.finetune(ROWS, lora(), tmp_path / "a", **{**QUICKER, "progress": True})
    assert "no estimate for this adapter (ZeroDivisionError)" in capsys.readouterr().err.splitlines()


def test_a_server_says_what_tokens_cost(
    provider: ScriptedProvider, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tenant_sdk.endpoint.server import Endpoint

    monkeypatch.setattr(Endpoint, "run", lambda self: None)
    with provider.client(mask="off") as client:
        serve_command(client, None, EndpointSettings(port=0, key="k" * 32), print)
        bill = client.plan_tokens(1, 1000, probe_s=0.0)
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "1,000 tokens" in each]
    assert f"{bill.round_trips:,} round trips" in line


# ---- a plan that is kept ---------------------------------------------------------------------------------------------


def test_a_saved_plan_holds_for_its_run_alone(provider: ScriptedProvider, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with provider.client(mask="off") as client:
        bill = client.plan(ROWS, lora(), **QUICKER)
        bill.save(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert Bill.load(path) == bill
        assert "Ada" not in path.read_text()
        client.finetune(ROWS, lora(), tmp_path / "a", plan=path, **QUICKER)
        client.finetune(ROWS, lora(), tmp_path / "b", plan=bill, **QUICKER)
        provider.forget_calls()
        for data, config, options, expected in (
            (ROWS[1:], lora(), {}, "changed since: the data; nothing was sent"),
            (ROWS, lora(r=2), {}, "changed since: r of peft_config is 2, the plan's is 4; nothing was sent"),
            (ROWS, lora(), {"max_steps": 4}, "since: max_steps (--max-steps) is 4, the plan's is 3; nothing was sent"),
            (ROWS, lora(), {"truncation": "truncate"}, "truncation (--truncation) is truncate, the plan's is refuse;"),
            (ROWS[1:], lora(r=2), {}, "changed since: the data, r of peft_config is 2, the plan's is 4; nothing"),
        ):
            with pytest.raises(ConfigurationError, match=re.escape(expected)):
                client.finetune(data, config, tmp_path / "c", plan=path, **{**QUICKER, **options})
        with pytest.raises(ConfigurationError, match="provider has changed since"):
            client.finetune(ROWS, lora(), tmp_path / "c", plan=replace(bill, manifest="0" * 64), **QUICKER)
        assert provider.calls == []
        assert not (tmp_path / "c").exists()
    with (
        provider.client(mask="pad") as client,
        pytest.raises(ConfigurationError, match=r"the mask \(--mask\) is pad, the plan's is off"),
    ):
        client.finetune(ROWS, lora(), tmp_path / "c", plan=path, **QUICKER)


def test_a_plan_of_a_provider_that_changed_since(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with ScriptedProvider(seed=1) as provider, provider.client(mask="off") as client:
        client.plan(ROWS, lora(), **QUICKER).save(path)
    with ScriptedProvider(seed=2) as provider, provider.client(mask="off") as client:
        with pytest.raises(ConfigurationError, match="the provider has changed since") as caught:
            client.finetune(ROWS, lora(), tmp_path / "a", plan=path, **QUICKER)
        assert "\n" not in str(caught.value)
        assert provider.calls == []


@pytest.mark.parametrize(
    "content",
    ids=range(9),
    argvalues=[
        "",
        "[]",
        "{}",
        '{"savings": []}',
        '{"savings": 3}',
        "\x00",
        "[" * 100_000,
        '{"run":' * 100_000,
        PLAN.to_json() + " " * 10**6,
    ],
)
def test_a_file_that_is_no_plan(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(ConfigurationError, match=r"is no plan: expected a file of `tenant plan --out`"):
        Bill.load(path)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        Bill.load(tmp_path / "none.json")


def test_a_plan_with_a_number_that_is_none(provider: ScriptedProvider, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with provider.client(mask="off") as client:
        client.plan(ROWS, lora(), **QUICKER).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "bytes_up": "many"}))
    with pytest.raises(ConfigurationError, match="is no plan"):
        Bill.load(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"bytes_up": 10**400}, {"bytes_up": 2**63}, {"steps": -1}, {"steps": True}, {"steps": 1.5}, {"steps": "1"},
        {"steps": None}, {"seconds": float("nan")}, {"seconds": float("inf")}, {"seconds": -1.0}, {"seconds": 10**400},
        {"provider_s": None}, {"mask": "\x1b[2J"}, {"mask": "a\nb"}, {"mask": 3}, {"mask": "m" * 1001}, {"run": ""},
        {"is_exact": 1}, {"other": 1}, {"savings": [{"setting": "\x1b", "num_bytes": 1}]},
        {"savings": [{"setting": "s", "num_bytes": -1}]}, {"savings": [{"setting": "s", "num_bytes": 1, "more": 1}]},
        {"savings": {}}, {"parts": []}, {"parts": {"data": "\x1b"}}, {"parts": {"data": 1}},
    ],
    ids=lambda changed: str(changed)[:20].encode("unicode_escape").decode(),
)  # fmt: skip
def test_a_hostile_plan_is_told_in_one_line(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(json.loads(PLAN.to_json())))
    assert Bill.load(path) == PLAN
    path.write_text(json.dumps({**json.loads(PLAN.to_json()), **changed}))
    with pytest.raises(ConfigurationError, match=r"is no plan: expected a file of `tenant plan --out`") as caught:
        Bill.load(path)
    assert str(caught.value).isprintable()


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command(provider: ScriptedProvider, tmp_path: Path) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "plan.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    common = [str(data), "--url", f"inproc:{provider.model}", "--mask", "off", "--max-steps", "2", "--rank", "2"]
    table = CliRunner().invoke(
        cli.app, ["plan", *common, "--out", str(out), "--price-per-gb", "5", "--price-per-hour", "7"],
        catch_exceptions=False,
    )  # fmt: skip
    assert table.exit_code == 0, table.output
    bill = Bill.load(out)
    assert str(bill) in table.stdout
    assert f"price    {bill.price(5, 7):.4g} (" in table.stdout
    as_json = CliRunner().invoke(cli.app, ["plan", *common, "--json", "--price-per-gb", "5"], catch_exceptions=False)
    found = json.loads(as_json.stdout)
    assert (found["bytes_up"], found["run"], found["price"]) == (
        bill.bytes_up, bill.run, pytest.approx(bill.num_bytes / 1e9 * 5),
    )  # fmt: skip
    run = ["finetune", *common, "--output", str(tmp_path / "a"), "--plan", str(out)]  # its estimate is the plan
    done = CliRunner().invoke(cli.app, run, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "estimated " in done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["plan"], "name a data set: tenant plan DATA"),
        (["plan", "none.jsonl"], "none.jsonl"),
        (["plan", "d.jsonl", "--out", "none/plan.json"], "there is no folder"),
        (["plan", "d.jsonl", "--batch-size", "0"], "batch_size must be positive"),
        (["finetune", "d.jsonl", "--output", "a", "--plan", "none.json"], "there is no plan none.json"),
    ],
)
def test_mistakes_are_told_at_once(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text('{"text": "owl"}\n')
    done = CliRunner().invoke(cli.app, [*words, "--url", "inproc:none"])
    assert isinstance(done.exception, Exception)
    assert expected in str(done.exception)
    assert "\n" not in str(done.exception)


def test_answers_that_cannot_be(provider: ScriptedProvider) -> None:
    with provider.client(mask="off") as client:
        for numbers in ((0, 1), (1, 0), (1, 1, 0), (1000, 1000)):
            with pytest.raises(ConfigurationError):
                client.plan_tokens(*numbers)
