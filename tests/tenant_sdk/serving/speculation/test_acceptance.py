"""Tests which drafted tokens are kept: those that the request itself chooses, so that the distribution of its tokens is
the same as without speculation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from transformers import GenerationConfig

from tenant_sdk.serving.sampling import Sampler, Sampling
from tenant_sdk.serving.speculation.acceptance import take_accepted

CPU = torch.device("cpu")
VOCAB = 5
DRAWS = 800
LEAST_P = 1e-3
"""The smallest p-value that passes. The seeds are fixed, so a test that passes once does not fail by chance later."""
NUMBERS = torch.Generator().manual_seed(5)
TARGET = torch.randn(VOCAB, VOCAB, generator=NUMBERS)
"""The model's logits for the next token: one row for each last token."""
DRAFT = TARGET + torch.randn(VOCAB, VOCAB, generator=NUMBERS)
"""The draft's logits for the next token: one row for each last token."""
COINS = torch.Generator().manual_seed(6)
SETTINGS = {"do_sample": True, "temperature": 0.8, "top_k": 4, "top_p": 0.95}


def sampler(seed: int) -> Sampler:
    return Sampler(Sampling(**SETTINGS, seed=seed), GenerationConfig(), CPU)  # type: ignore[arg-type]


def probabilities(logits: torch.Tensor) -> torch.Tensor:
    """Returns the probabilities that `SETTINGS` give to tokens: the least likely of the five tokens is left out, and of
    the others those that come after a total probability of 0.95."""
    kept = torch.softmax(torch.where(logits >= logits.sort().values[1], logits / 0.8, -torch.inf), dim=-1)
    order = kept.argsort(descending=True)
    before = kept[order].cumsum(dim=-1) - kept[order]
    kept[order[before >= 0.95]] = 0.0
    return kept / kept.sum()


def take_all(own: Sampler, drafted: list[int], logits: torch.Tensor) -> list[int]:
    taken: list[int] = []

    def take(row: torch.Tensor) -> int:
        taken.append(own.next_token([0, *taken], row))
        return taken[-1]

    assert take_accepted(drafted, logits, take) == len(taken)
    return taken


Pass = Callable[[Sampler, int, int], list[int]]
"""A function that maps (sampler, last token, number of tokens to draft) to the tokens that one pass gives."""


def coupled(own: Sampler, last: int, num_drafted: int) -> list[int]:
    """Returns the tokens of a pass as the engine makes it: the draft draws with the request's own random numbers."""
    fork, drafted = own.fork(), [last]
    for _ in range(num_drafted):
        drafted.append(fork.next_token(drafted, DRAFT[drafted[-1]]))
    return take_all(own, drafted[1:], TARGET[drafted])


def looked_up(own: Sampler, last: int, num_drafted: int) -> list[int]:
    """Returns the tokens of a pass whose drafted tokens are fixed, as in prompt lookup, and not drawn."""
    drafted = [last, *((last + 1 + number) % VOCAB for number in range(num_drafted))]
    return take_all(own, drafted[1:], TARGET[drafted])


def not_from_the_rest(own: Sampler, last: int, num_drafted: int) -> list[int]:
    """Returns the tokens of a pass that is wrong on purpose: a drafted token is accepted with probability p / q, but a
    rejected one is replaced by a draw from all of p, and not from the rest that rejection sampling leaves."""
    taken = [last]
    for _ in range(num_drafted):
        p, q = probabilities(TARGET[taken[-1]]), probabilities(DRAFT[taken[-1]])
        guess = own.next_token(taken, DRAFT[taken[-1]])
        if float(torch.rand((), generator=COINS)) * q[guess] < p[guess]:
            taken.append(guess)
        else:
            return [*taken[1:], own.next_token(taken, TARGET[taken[-1]])]
    return [*taken[1:], own.next_token(taken, TARGET[taken[-1]])]


def trusting(own: Sampler, last: int, num_drafted: int) -> list[int]:
    """Returns the tokens of a pass that is wrong on purpose: every drafted token is kept."""
    return [own.next_token([last], DRAFT[last])]


def answer(seed: int, one_pass: Pass, num_drafted: int, num_tokens: int = 3) -> list[int]:
    own, tokens = sampler(seed), [0]
    while len(tokens) <= num_tokens:
        tokens += one_pass(own, tokens[-1], min(num_drafted, num_tokens - len(tokens)))
    assert len(tokens) == num_tokens + 1
    return tokens[1:]


def p_value(one_pass: Pass) -> float:
    """Returns the p-value of Pearson's chi-squared test that the three tokens of an answer have the right distribution;
    0 if an answer has a token that the settings leave out."""
    seen = Counter(tuple(answer(seed, one_pass, 2)) for seed in range(DRAWS))
    steps = torch.stack([probabilities(row) for row in TARGET])
    expected = {
        (a, b, c): DRAWS * float(steps[0, a] * steps[a, b] * steps[b, c])
        for a in range(VOCAB)
        for b in range(VOCAB)
        for c in range(VOCAB)
    }
    if any(not expected[tokens] for tokens in seen):
        return 0.0
    cells = {tokens: number for tokens, number in expected.items() if number >= 5}
    rest = DRAWS - sum(cells.values())
    distance = sum((seen[tokens] - number) ** 2 / number for tokens, number in cells.items())
    distance += (DRAWS - sum(seen[tokens] for tokens in cells) - rest) ** 2 / max(rest, 1e-9)
    return float(torch.special.gammaincc(torch.tensor(len(cells) / 2), torch.tensor(distance / 2)))


@pytest.mark.parametrize("one_pass", [coupled, looked_up])
def test_drawn_tokens_have_the_requests_own_distribution(one_pass: Pass) -> None:
    assert p_value(one_pass) > LEAST_P


@pytest.mark.parametrize("one_pass", [not_from_the_rest, trusting])
def test_ways_that_change_the_distribution_would_show(one_pass: Pass) -> None:
    assert p_value(one_pass) < LEAST_P


@pytest.mark.parametrize("one_pass", [coupled, looked_up])
@pytest.mark.parametrize("num_drafted", [1, 4])
def test_with_a_seed_the_tokens_are_those_without_speculation(one_pass: Pass, num_drafted: int) -> None:
    for seed in range(20):
        assert answer(seed, one_pass, num_drafted, 12) == answer(seed, one_pass, 0, 12)


def test_a_draft_that_draws_with_the_same_numbers_agrees_more_often() -> None:
    """The share of equal tokens is compared with its lower bound (acceptance.py), and with that of a draft that has
    random numbers of its own."""
    p, q = probabilities(TARGET[0]), probabilities(DRAFT[0])
    distance = float((p - q).abs().sum() / 2)
    assert 0.1 < distance < 0.9, "the two differ, but not beyond all measure"
    same = own = 0
    for seed in range(500):
        made = sampler(seed)
        fork, chosen = made.fork(), made.next_token([0], TARGET[0])
        same += fork.next_token([0], DRAFT[0]) == chosen
        own += sampler(seed + 10_000).next_token([0], DRAFT[0]) == chosen
    assert same / 500 > (1 - distance) / (1 + distance) - 0.05
    assert own < 0.8 * same


def test_a_draft_that_is_the_request_itself_is_always_accepted() -> None:
    made, drafted = sampler(3), [0]
    fork = made.fork()
    for _ in range(6):
        drafted.append(fork.next_token(drafted, TARGET[drafted[-1]]))
    assert take_all(made, drafted[1:], TARGET[drafted])[:-1] == drafted[1:]


def test_a_fork_calls_no_hook_and_changes_no_draw() -> None:
    calls: list[int] = []

    def hook(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(token_ids.shape[1])
        return scores

    made = Sampler(Sampling(do_sample=True, seed=2, logits_processor=(hook,)), GenerationConfig(), CPU)
    fork = made.fork()
    drawn = [fork.next_token([0], torch.zeros(50)) for _ in range(8)]
    assert calls == []
    assert [made.next_token([0], torch.zeros(50)) for _ in range(8)] == drawn
    assert len(set(drawn)) > 4


@pytest.mark.parametrize(
    ("drafted", "chosen", "num_taken"),
    [([], [4], 1), ([4, 5], [4, 5, 6], 3), ([4, 5], [4, 7], 2), ([4, 5], [7], 1), ([4, 5], [4, None], 2)],
)
def test_tokens_are_taken_up_to_the_first_that_differs_or_the_end(
    drafted: list[int], chosen: list[int | None], num_taken: int
) -> None:
    given, rows = iter(chosen), list[int]()

    def take(row: torch.Tensor) -> int | None:
        rows.append(int(row[0]))
        return next(given)

    logits = torch.arange(len(drafted) + 1)[:, None].expand(-1, VOCAB)
    assert take_accepted(drafted, logits, take) == num_taken
    assert rows == list(range(num_taken))
