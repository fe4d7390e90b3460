"""Tests how q and k are recovered from the probabilities of a softmax, and when nothing can be recovered."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attacks.adversaries import attention, closed_form
from attacks.controls import unmasked
from attacks.report.table import Finding
from attacks.seen.adversary import StolenDelta
from attacks.seen.public_model import Block
from attacks.truth.judge import judge_deltas


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
