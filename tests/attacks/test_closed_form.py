"""Tests that the adapter is recovered without a mask: closed forms on real adapters, for both styles of model and any
targets, and q and k from the probabilities of a softmax. This file also runs every control of the catalogue.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attacks.adversaries import attention, closed_form, mlp, prompt_inversion
from attacks.controls import Control, unmasked
from attacks.report.catalogue import CATALOGUE, adversaries
from attacks.report.table import Finding
from attacks.seen.adversary import Adversary, StolenDelta, StolenTokens
from attacks.seen.public_model import Block, Layer
from attacks.seen.view import View
from attacks.truth.judge import judge_deltas
from wire.errors import ConfigurationError

# ---- whole adapters -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("adversary", "control"), CATALOGUE, ids=[adversary.name for adversary, _ in CATALOGUE])
def test_every_control_wins(adversary: Adversary, control: Control) -> None:
    result = control()
    assert result.wins, result
    assert result.adversary == adversary.name


def stolen(traffic: unmasked.PromptTraffic) -> dict[str, torch.Tensor]:
    claims = closed_form.CLOSED_FORM.attack(traffic.view, traffic.public, None)
    return {claim.layer: claim.delta for claim in claims if isinstance(claim, StolenDelta)}


@pytest.mark.parametrize("targets", [["o_proj"], ["v_proj", "down_proj"], ["gate_proj"], ["up_proj", "o_proj"]])
def test_llama_with_an_adapter_on_some_modules(targets: list[str], tmp_path: Path) -> None:
    traffic = unmasked.prompt_traffic(tmp_path, "llama", targets)
    found = stolen(traffic)
    for layer, delta in traffic.deltas.items():
        if layer == "model.layers.1.mlp.down_proj":
            assert layer not in found  # the tenant keeps the head, so the layer's output is not seen
            continue
        assert float((found[layer] - delta).norm() / delta.norm()) < 1e-3, layer
    untouched = [layer for layer in found if layer not in traffic.deltas]
    assert untouched
    for layer in untouched:
        weight = traffic.public.layers()[layer].weight
        assert float(found[layer].norm() / weight.norm()) < 1e-4, layer


@pytest.mark.parametrize("targets", [["attn.c_proj"], ["mlp.c_fc", "mlp.c_proj"]])
def test_gpt2_with_biases_and_layer_norm(targets: list[str], tmp_path: Path) -> None:
    traffic = unmasked.prompt_traffic(tmp_path, "gpt2", targets)
    found = stolen(traffic)
    judged = 0
    for layer, delta in traffic.deltas.items():
        if layer not in found:
            assert layer == "transformer.h.1.mlp.c_proj"
            continue
        wanted = delta - delta.mean(1, keepdim=True) if layer.endswith("c_proj") else delta
        assert float((found[layer] - wanted).norm() / wanted.norm()) < 1e-3, layer
        judged += 1
    assert judged


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        ("llama", ["v_proj", "down_proj"]),
        ("llama", ["gate_proj", "o_proj"]),
        ("gpt2", ["attn.c_proj"]),
        ("gpt2", ["mlp.c_fc", "mlp.c_proj"]),
    ],
)
def test_ring_rows_up_to_a_secret_factor_each(kind: str, targets: list[str], tmp_path: Path) -> None:
    traffic = unmasked.prompt_traffic(tmp_path, kind, targets, arithmetic="ring")
    assert {message.arithmetic for message in traffic.view.messages} == {"ring"}
    found = stolen(traffic)
    judged = 0
    for layer, delta in traffic.deltas.items():
        if ".1.mlp" in layer:
            assert layer not in found  # no norm shows how large the rows before the last down_proj are
            continue
        wanted = delta - delta.mean(1, keepdim=True) if layer.endswith("c_proj") else delta
        # The rows are rounded to about 2^19 steps, and c_fc is fitted through an activation, so the error is 1.3e-3.
        assert float((found[layer] - wanted).norm() / wanted.norm()) < 1e-2, layer
        judged += 1
    assert judged


def test_gpt2_values_of_a_fused_layer(tmp_path: Path) -> None:
    traffic = unmasked.prompt_traffic(tmp_path, "gpt2", ["c_attn"])
    delta = traffic.deltas["transformer.h.0.attn.c_attn"][:, 64:]
    found = stolen(traffic)["transformer.h.0.attn.c_attn[v]"]
    assert float((found - delta).norm() / delta.norm()) < 1e-2


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_prompts_are_read_exactly(kind: str, tmp_path: Path) -> None:
    traffic = unmasked.prompt_traffic(tmp_path, kind)
    claims = prompt_inversion.LAYER0_LOOKUP.attack(traffic.view, traffic.public, None)
    got = {claim.prompt: list(claim.token_ids) for claim in claims if isinstance(claim, StolenTokens)}
    assert got == dict(enumerate(traffic.token_ids))


def test_too_few_tokens_end_the_recursion(tmp_path: Path) -> None:
    traffic = unmasked.prompt_traffic(tmp_path, "llama", ["o_proj"])
    few = View(traffic.view.manifest, traffic.view.messages[: 8 * 4])
    claims = closed_form.CLOSED_FORM.attack(few, traffic.public, None)
    assert not any(claim.layer.endswith("o_proj") for claim in claims if isinstance(claim, StolenDelta))


def test_a_few_rows_that_were_opened_wrongly_are_left_out(tmp_path: Path) -> None:
    """Some short prompts are unmasked wrongly, as `known-mask` sometimes does. All changed layers but one are still
    recovered, and no claim is wrong."""
    traffic = unmasked.prompt_traffic(tmp_path, "llama", ["v_proj", "o_proj", "up_proj", "down_proj"])
    opened = {message.seq: message.request().double() for message in traffic.view.messages}
    block = traffic.public.blocks[0]
    generator = torch.Generator().manual_seed(3)
    for group, prompts in ((block.o.group, (4, 30)), (block.down.group, (11, 17, 40))):
        messages = [one for one in traffic.view.messages if one.group == group]
        for prompt in prompts:
            rows = opened[messages[prompt].seq]
            rows += torch.randn(rows.shape, generator=generator, dtype=torch.float64) * rows.std()
    claims = closed_form.CLOSED_FORM.attack(traffic.view, traffic.public, opened)
    found = {claim.layer: claim.delta for claim in claims if isinstance(claim, StolenDelta)}
    missing = {layer for layer in traffic.deltas if layer not in found}
    assert missing == {"model.layers.1.mlp.down_proj"}
    for layer, delta in found.items():
        wanted = traffic.deltas.get(layer)
        if wanted is not None:
            assert float((delta - wanted).norm() / wanted.norm()) < 1e-3, layer


def test_what_nothing_fits_is_not_claimed_to_be_unchanged(tmp_path: Path) -> None:
    """The rows are uniform int32 numbers, as under one-time masks, so no weight explains them. The adversary must not
    claim that a layer is unchanged."""
    traffic = unmasked.prompt_traffic(tmp_path, "llama", ["o_proj"], arithmetic="ring")
    generator = torch.Generator().manual_seed(0)
    opened = {
        message.seq: torch.randint(-(2**31), 2**31, message.request().shape, generator=generator).double()
        for message in traffic.view.messages
    }
    claims = closed_form.CLOSED_FORM.attack(traffic.view, traffic.public, opened)
    assert [claim for claim in claims if isinstance(claim, StolenDelta) and not bool(claim.delta.any())] == []


def test_an_mlp_that_no_rows_fit_is_not_claimed() -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    layers = tuple(Layer(name, 0, slice(0, 6), normal(4, 6), None) for name in ("gate", "up"))
    assert mlp.fit_mlp(layers, "silu", normal(400, 4), 50 * normal(400, 6)) is None
    assert mlp.fit_mlp(layers, "unheard of", normal(400, 4), normal(400, 6)) is None


def test_the_catalogue_names_each_adversary_once() -> None:
    names = [one.name for one in adversaries()]
    assert len(set(names)) == len(names) == len(CATALOGUE)
    assert [one.name for one in adversaries("closed-form, layer-0 lookup")] == ["closed-form", "layer-0 lookup"]
    for wrong, expected in (
        ("", "--list lists them"),
        ("closed-form,closed", "adversary closed: the nearest is closed-f"),
    ):
        with pytest.raises(ConfigurationError, match=expected) as failure:
            adversaries(wrong)
        assert len(str(failure.value)) < 100


# ---- q and k from the probabilities of a softmax --------------------------------------------------------------------


def findings(traffic: unmasked.PromptTraffic) -> dict[str, Finding]:
    """Attacks the traffic by the closed form, and returns the judge's findings about relative errors, by kind of
    layer."""
    claims = closed_form.CLOSED_FORM.attack(traffic.view, traffic.public, None)
    truth = SimpleNamespace(public=traffic.public, deltas=known(traffic))
    deltas = [claim for claim in claims if isinstance(claim, StolenDelta)]
    return {one.module: one for one in judge_deltas(deltas, truth) if one.metric == "relative error"}


def known(traffic: unmasked.PromptTraffic) -> dict[str, torch.Tensor]:
    """Returns the true ΔW of every layer by name, zero for a layer without an adapter. Parts of a fused layer have
    their own entries."""
    found = {}
    for name, layer in traffic.public.layers().items():
        module, _, part = name.partition("[")
        delta, width = traffic.deltas.get(module, torch.zeros_like(layer.weight)), layer.weight.shape[1]
        start = "qkv".index(part[0]) * width if part and module in traffic.deltas else 0
        found[name] = delta[:, start : start + width]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        (["q_proj"], {"q·k"}),
        (["k_proj"], {"q·k"}),
        (["q_proj", "k_proj"], {"q·k"}),
        (["q_proj", "v_proj"], {"q·k", "v_proj"}),
        (["v_proj"], {"v_proj"}),
    ],
)
def test_llama_with_an_adapter_on_some_projections(targets: list[str], wanted: set[str], tmp_path: Path) -> None:
    found = findings(unmasked.prompt_traffic(tmp_path, "llama", targets))
    assert found.keys() == wanted
    for module, finding in found.items():
        assert finding.value < 1e-3, module


def test_q_alone_is_found_itself(tmp_path: Path) -> None:
    """If only q has an adapter, k is public. ΔW_q itself is then recovered, and not only the product of q and k."""
    traffic = unmasked.prompt_traffic(tmp_path, "llama", ["q_proj"])
    claims = closed_form.CLOSED_FORM.attack(traffic.view, traffic.public, None)
    for claim in claims:
        assert isinstance(claim, StolenDelta)
        if claim.layer in traffic.deltas:
            wanted = traffic.deltas[claim.layer]
            assert float((claim.delta - wanted).norm() / wanted.norm()) < 1e-3, claim.layer


def test_gpt2_with_an_adapter_on_the_fused_layer(tmp_path: Path) -> None:
    found = findings(unmasked.prompt_traffic(tmp_path, "gpt2", ["c_attn"]))
    assert found.keys() == {"q·k", "v_proj"}
    assert found["q·k"].value < 1e-3
    assert found["v_proj"].value < 1e-2


def softmax_of(num_keys: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(20, num_keys, 8, generator=generator, dtype=torch.float64)
    return values, torch.randn(20, num_keys, generator=generator, dtype=torch.float64).softmax(1)


@pytest.mark.parametrize("num_keys", [2, 8, 9])
def test_probabilities_of_up_to_head_dim_and_one_keys(num_keys: int) -> None:
    values, share = softmax_of(num_keys)
    found, stretched = attention.probabilities(values, (share[:, None] @ values)[:, 0])
    assert float((found - share).abs().max()) < 1e-9
    assert bool(stretched.isfinite().all())


def test_probabilities_of_a_token_that_comes_twice_are_open() -> None:
    values, share = softmax_of(5)
    values[3, 1] = values[3, 4]
    _, stretched = attention.probabilities(values, (share[:, None] @ values)[:, 0])
    assert bool(stretched[3].isinf().all())
    assert bool(stretched[[0, 1, 2, 4]].isfinite().all())


def test_probabilities_are_not_negative() -> None:
    """If an output is no mixture of the values, the nearest mixture is returned. In it, no change of a probability that
    keeps all of them at or above zero would bring the mixture nearer."""
    values, share = softmax_of(4)
    outputs = (share[:, None] @ values)[:, 0] * 3
    found, _ = attention.probabilities(values, outputs)
    assert float(found.min()) == 0.0
    size = values.norm(dim=(1, 2))
    missed = torch.cat([(found[:, None] @ values)[:, 0] - outputs, (size * (found.sum(1) - 1))[:, None]], dim=1)
    slopes = (torch.cat([values, size[:, None, None].expand(-1, 4, 1)], dim=2) @ missed[..., None])[..., 0]
    scale = size[:, None] * outputs.norm(dim=1, keepdim=True)
    assert float((slopes / scale)[found > 0].abs().max()) < 1e-6, "free ones are at a minimum"
    assert float((slopes / scale)[found == 0].min()) > -1e-6, "and the others would have to be negative"


def rows_of(traffic: unmasked.PromptTraffic, block: Block) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    given, outputs = (
        [one.request().to(torch.float64) for one in traffic.view.messages if one.group == group]
        for group in (block.q.group, block.o.group)
    )
    return given, outputs


@pytest.mark.slow
def test_outputs_that_no_attention_made_are_not_explained(tmp_path: Path) -> None:
    traffic = unmasked.prompt_traffic(tmp_path, "llama", ["q_proj", "k_proj"])
    block = traffic.public.blocks[0]
    given, outputs = rows_of(traffic, block)
    solved = attention.solve_scores(block, traffic.public, block.v.weight, given, outputs)
    assert solved is not None
    assert attention.tried(block, traffic.public, (*solved, block.v.weight), given, outputs).error < 1e-5
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in outputs]
    assert attention.solve_scores(block, traffic.public, block.v.weight, given, noise) is None, "too few are positive"
    others = [*outputs[1:], outputs[0]]
    solved = attention.solve_scores(block, traffic.public, block.v.weight, given, others)
    if solved is not None:
        assert attention.tried(block, traffic.public, (*solved, block.v.weight), given, others).error > 0.1


def test_too_few_prompts_give_nothing(tmp_path: Path) -> None:
    traffic = unmasked.prompt_traffic(tmp_path, "llama", ["q_proj", "k_proj"])
    block = traffic.public.blocks[0]
    given, outputs = rows_of(traffic, block)
    assert attention.solve_scores(block, traffic.public, block.v.weight, given[:20], outputs[:20]) is None


def test_the_judge_compares_what_a_softmax_sees_where_a_layer_norm_hides_the_rest(tmp_path: Path) -> None:
    """A claim may differ from the true weights and give the same attention. Here q and k are expressed in another
    basis, and a change of q is balanced by the layer norm's bias. The judge must find no error."""
    traffic = unmasked.prompt_traffic(tmp_path, "gpt2", ["c_attn"])
    deltas, claimed = known(traffic), {}
    for block in traffic.public.blocks:
        q, k = block.q.weight + deltas[block.q.name], block.k.weight + deltas[block.k.name]
        turned = torch.eye(8, dtype=torch.float64) + 0.2 * torch.randn(8, 8, dtype=torch.float64)
        turned = torch.block_diag(*[turned] * traffic.public.num_heads)
        norm = block.attention_norm
        assert norm.bias is not None
        assert block.q.bias is not None
        way = torch.nn.functional.normalize(1 / norm.weight, dim=0)
        place = (norm.bias * way).sum()
        other = q @ turned.inverse().T
        wanted = (place * (way @ q) + block.q.bias) @ turned.inverse().T - block.q.bias
        other += torch.outer(way, wanted / place - way @ other)
        rows = torch.randn(6, len(way), dtype=torch.float64)
        rows = torch.nn.functional.layer_norm(rows, way.shape, norm.weight, norm.bias)
        same = [attention.attention(block, traffic.public, (a, b, block.v.weight), rows[None])
                for a, b in ((q, k), (other, k @ turned))]  # fmt: skip
        torch.testing.assert_close(same[0], same[1])
        claimed |= {block.q.name: other - block.q.weight, block.k.name: k @ turned - block.k.weight}

    def error(claims: dict[str, torch.Tensor]) -> float:
        truth = SimpleNamespace(public=traffic.public, deltas=deltas)
        found = judge_deltas([StolenDelta(name, delta) for name, delta in claims.items()], truth)
        return next(one.value for one in found if (one.module, one.metric) == ("q·k", "relative error"))

    assert error(claimed) < 1e-9
    assert error({name: torch.zeros_like(delta) for name, delta in claimed.items()}) == pytest.approx(1.0)
