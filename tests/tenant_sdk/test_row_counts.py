"""Tests how many rows a text takes, and which party decides this: sessions against bundles that read text by row
counts."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attacks.programs.providers import HostileBundle
from provider.model.served_model import ServedModel
from tenant_sdk import TenantClient
from tenant_sdk.serving.engine import Engine
from tenant_sdk.session import NotVerifiedWarning
from tenant_sdk.testing import SPECIAL_TOKENS
from tenant_sdk.text.rows import CutWarning
from tenant_sdk.text.source import TokenizerFailed
from tenant_sdk.text.template import TemplateDoesNotFit
from tenant_sdk.training.dataset import UnusableRowWarning
from tests.support.tiny_models import make_chat_model
from tests.support.training import QUICK, ROWS, lora
from wire.errors import ConfigurationError, DatasetError
from wire.transport.inproc import InprocConnection

READING = (
    "{% for m in messages %}{{ m['content'] }}{% if 'a' in m['content'] %}{{ 'x' * 40 }}{% endif %}<|end|>{% endfor %}"
)
SPELLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 30}
PROMPTS = ("who? abc", "who? xyz", "who? 123")
Open = Callable[..., TenantClient]


@pytest.fixture
def hostile(chat_served_model: ServedModel) -> HostileBundle:
    return HostileBundle(chat_served_model)


@pytest.fixture
def connect(hostile: HostileBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    monkeypatch.setattr("tenant_sdk.embedded.connect_inproc", lambda *_: InprocConnection(hostile))
    opened: list[TenantClient] = []

    def make(**options: Any) -> TenantClient:
        hostile.announce()
        hostile.num_rows.clear()
        opened.append(TenantClient("inproc:hostile", mask="off", cache=tmp_path / "cache", progress=False, **options))
        return opened[-1]

    yield make
    for client in opened:
        client.close()


def spell(hostile: HostileBundle) -> None:
    hostile.change_json("tokenizer.json", normalizer=SPELLING)


def rows_of(hostile: HostileBundle, client: TenantClient, prompt: str, **options: Any) -> tuple[int, ...]:
    hostile.num_rows.clear()
    client.generate(prompt, max_new_tokens=2, **options)
    return tuple(hostile.num_rows)


def test_a_template_never_sees_text(hostile: HostileBundle, connect: Open) -> None:
    hostile.files["chat_template.jinja"] = READING.encode()
    with connect() as client:
        assert len({rows_of(hostile, client, prompt) for prompt in PROMPTS}) == 1


def test_a_template_never_sees_training_rows(hostile: HostileBundle, connect: Open, tmp_path: Path) -> None:
    hostile.files["chat_template.jinja"] = READING.encode()
    seen = set()
    with connect() as client:
        for number, answer in enumerate(("abc", "xyz")):
            hostile.num_rows.clear()
            data = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}]}]
            client.finetune(data, lora(), tmp_path / f"out{number}", max_steps=1, progress=False)
            seen.add(tuple(hostile.num_rows))
    assert len(seen) == 1


def test_a_normalizer_that_spells_text_out_is_refused(hostile: HostileBundle, connect: Open, tmp_path: Path) -> None:
    spell(hostile)
    with connect() as client:
        for use in (
            lambda: client.generate(PROMPTS[0], max_new_tokens=2),
            lambda: client.finetune(ROWS, lora(), tmp_path / "out", **QUICK),
            lambda: client.tokenizer,
        ):
            with pytest.raises(ConfigurationError, match=r"normalizer Replace.*tokenizer=, --tokenizer"):
                use()
    assert hostile.num_rows == []


def test_a_named_tokenizer(hostile: HostileBundle, connect: Open, chat_folder: Path) -> None:
    spell(hostile)
    hostile.files["chat_template.jinja"] = READING.encode()
    with connect(tokenizer=chat_folder) as client:
        assert len({rows_of(hostile, client, prompt) for prompt in PROMPTS}) == 1


def test_a_named_tokenizer_that_is_nowhere_is_refused_before_the_network(
    hostile: HostileBundle, connect: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = connect(tokenizer=tmp_path / "missing")
    monkeypatch.setattr("tenant_sdk.embedded.connect_inproc", lambda *_: pytest.fail("a provider was asked"))
    with pytest.raises(ConfigurationError, match="cannot find the tokenizer"):
        client.connect()


def test_padded_prompts(hostile: HostileBundle, connect: Open, chat_client: TenantClient) -> None:
    with connect(pad_rows=48) as client:
        seen = {rows_of(hostile, client, prompt) for prompt in (*PROMPTS, "?", "a longer question, so it is!")}
    assert {rows[0] for rows in seen} == {48}
    assert all(set(rows) == {48, 1} or set(rows) == {48} for rows in seen)


@pytest.mark.parametrize("prompt", ["who?", "a longer question, is it not?"])
def test_padding_changes_no_answer(connect: Open, chat_folder: Path, prompt: str) -> None:
    """Both sessions use float arithmetic, so that padding changes logits only by the rounding of floating-point sums,
    which is too little to change an answer of this model."""
    options: dict[str, Any] = {"arithmetic": "float", "weights": None}
    with connect(**options) as plain, connect(pad_rows=48, **options) as padded:
        assert padded.generate(prompt, max_new_tokens=12) == plain.generate(prompt, max_new_tokens=12)


@pytest.mark.parametrize("kind", ["gpt2", "gemma"])
def test_padding_changes_no_answer_of_other_models(kind: str, tmp_path: Path) -> None:
    folder = make_chat_model(tmp_path / kind, kind)
    answers = []
    for pad in (False, 32):
        with TenantClient(
            f"inproc:{folder}", weights="native", mask="off", arithmetic="float", pad_rows=pad, progress=False
        ) as client:
            answers.append(client.generate("who is it?", max_new_tokens=12))
    assert answers[0] == answers[1]


def test_padded_training_rows(hostile: HostileBundle, connect: Open, tmp_path: Path) -> None:
    """With padding, training rows of different lengths make the same numbers of rows in all requests. This includes the
    head, which is at the provider here and otherwise gets only positions with labels."""
    data = [[{"prompt": "ab", "completion": answer}] for answer in ("c", "cdefgh")]
    seen = []
    for pad in (False, 32):
        seen.append(set())
        with connect(pad_rows=pad) as client:
            for number, rows in enumerate(data):
                hostile.num_rows.clear()
                client.finetune(rows, lora(), tmp_path / f"{pad}{number}", max_steps=1, progress=False)
                seen[-1].add(tuple(hostile.num_rows))
    assert [len(each) for each in seen] == [2, 1]
    assert set(*seen[1]) == {32}


def test_losses_do_not_change_with_padding(connect: Open, tmp_path: Path) -> None:
    losses = []
    for number, pad in enumerate((False, 48)):
        with connect(pad_rows=pad, arithmetic="float") as client:
            losses.append(client.finetune(ROWS, lora(), tmp_path / f"{number}", **QUICK).losses)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_prompt_longer_than_the_bucket_sends_as_many_rows(hostile: HostileBundle, connect: Open) -> None:
    with connect(pad_rows=16) as client:
        short = rows_of(hostile, client, "?")
        with pytest.warns(CutWarning, match="pad_rows keeps the last 16"):
            long = rows_of(hostile, client, "x" * 60)
    assert short[0] == long[0] == 16


def test_a_hostile_vocabulary_cannot_choose_which_rows_are_refused(
    hostile: HostileBundle, connect: Open, tmp_path: Path
) -> None:
    """If the provider's tokenizer makes too many tokens of a text, or none, training goes on with a shortened or empty
    row. To the provider this looks like any other training."""
    content = json.loads(hostile.files["tokenizer.json"])
    content["model"] = {"type": "BPE", "vocab": content["model"]["vocab"], "merges": [], "unk_token": None}
    for letter in "abc":
        del content["model"]["vocab"][letter]
    hostile.files["tokenizer.json"] = json.dumps(content).encode()
    hostile.files["chat_template.jinja"] = b"{% for m in messages %}{{ m['content'] }}{% endfor %}"
    seen = set()
    with connect(pad_rows=16) as client:
        for number, answer in enumerate(("abc", "xyz", "z" * 90)):
            hostile.num_rows.clear()
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                rows = [{"messages": [{"role": "user", "content": ""}, {"role": "assistant", "content": answer}]}]
                client.finetune(rows, lora(), tmp_path / f"out{number}", max_steps=1, progress=False)
            expected = {"abc": UnusableRowWarning, "xyz": None}.get(answer, CutWarning)
            assert expected is None or any(issubclass(each.category, expected) for each in said)
            seen.add(tuple(hostile.num_rows))
    assert len(seen) == 1


def test_a_trusted_tokenizer_still_refuses_long_rows(connect: Open, chat_folder: Path, tmp_path: Path) -> None:
    with connect(pad_rows=16, tokenizer=chat_folder) as client, pytest.raises(DatasetError, match="at most 16 tokens"):
        client.finetune([{"text": "x" * 60}], lora(), tmp_path / "out", max_steps=1, progress=False)


def test_a_bucket_that_does_not_fit(connect: Open, tmp_path: Path) -> None:
    with connect(pad_rows=True) as client:
        with pytest.raises(ConfigurationError, match="pads to 512 tokens, and the model takes 127 at most"):
            client.generate("who?", max_new_tokens=1)
        with pytest.raises(ConfigurationError, match="pads to 512 tokens, and the model takes 128 at most"):
            client.finetune(ROWS, lora(), tmp_path / "out", **QUICK)
    with pytest.raises(ConfigurationError, match="is True, False or a number"):
        connect(pad_rows=-1)


def test_answers_end_at_two_stop_tokens_and_at_no_other(hostile: HostileBundle, connect: Open) -> None:
    """Answers end at the tokenizer's end-of-text token and at the template's end of a turn. The provider's generation
    settings are not used."""
    hostile.change_json("generation_config.json", eos_token_id=list(range(6, 101)), temperature=0.1, num_beams=3)
    turn = "{% for m in messages %}{{ m['content'] }}{{ '<|assistant|>' if m['role'] == 'assistant' }}{% endfor %}"
    hostile.files["chat_template.jinja"] = turn.encode()
    with connect() as client:
        settings = client.load_model().generation_config
        assert settings.eos_token_id == [SPECIAL_TOKENS.index("<|end|>"), SPECIAL_TOKENS.index("<|assistant|>")]
        assert (settings.num_beams, settings.temperature) in ((1, 1.0), (None, None))
        rows = rows_of(hostile, client, "who?")
    assert rows.count(1) > 0, "the answer ended at a token of the provider's choice"


def test_what_explain_and_the_warning_say(connect: Open, chat_folder: Path, tmp_path: Path) -> None:
    def said(**options: Any) -> tuple[str, str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", NotVerifiedWarning)
            options = {"mask": "lattice", "mask_options": {"background": False}} | options
            with TenantClient(f"inproc:{chat_folder}", cache=tmp_path / "cache", progress=False, **options) as client:
                text = client.explain()
        lines = {line.split("  ")[0]: line for line in text.splitlines()}
        return lines["protected"] + lines["row counts"], "".join(str(each.message) for each in caught)

    explained, warned = said()
    assert "prompts and KV cache" not in explained
    assert "NOT PROTECTED: prompts and training texts" in explained
    assert "own tokenizer decides how many rows a text takes" in warned
    assert "a provider that has the output layer sees how many positions have labels" in explained
    for options in ({"tokenizer": chat_folder}, {"pad_rows": 32}, {"verify": chat_folder}):
        explained, warned = said(**options)
        assert "prompts and KV cache" in explained, options
        assert "NOT PROTECTED" not in explained, options
        assert "own tokenizer decides" not in warned, options
        assert ("how many positions have labels" in explained) is ("pad_rows" not in options)


# A bundle within every bound whose tokenizer fails on texts of its choice


def no_unknown_token(hostile: HostileBundle) -> None:
    """Makes a tokenizer whose vocabulary lacks one letter and a token for unknown text."""
    content = json.loads(hostile.files["tokenizer.json"])
    content["model"]["unk_token"] = "nowhere"
    del content["model"]["vocab"]["z"]
    hostile.files["tokenizer.json"] = json.dumps(content).encode()


def panics_in_the_decoder(hostile: HostileBundle) -> None:
    hostile.change_json("tokenizer.json", decoder={"type": "Strip", "content": "z", "start": 1, "stop": 1})


def refuses_long_conversations(hostile: HostileBundle) -> None:
    hostile.files["chat_template.jinja"] = (
        b"{% if messages | length > 2 %}{{ raise_exception('no') }}{% endif %}"
        b"{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}"
    )


def forgets_long_conversations(hostile: HostileBundle) -> None:
    hostile.files["chat_template.jinja"] = (
        b"{% for m in messages %}{% if messages | length < 3 %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}"
    )


def talk_of(num_turns: int) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[number % 2], "content": "who?"} for number in range(num_turns)]


@pytest.mark.parametrize("change", [refuses_long_conversations, forgets_long_conversations])
@pytest.mark.parametrize("has_engine", [False, True], ids=["generate", "engine"])
def test_a_template_cannot_choose_the_conversations_that_are_refused(
    hostile: HostileBundle, connect: Open, change: Callable[[HostileBundle], None], has_engine: bool
) -> None:
    """The number of turns is as secret as the text: with padding every conversation makes the same calls."""
    change(hostile)
    seen = set()
    with connect(pad_rows=32) as client, contextlib.ExitStack() as open_:
        engine = open_.enter_context(Engine(client)) if has_engine else None
        for num_turns in (1, 3, 5):
            hostile.num_rows.clear()
            said = pytest.warns(CutWarning, match="an empty one is sent") if num_turns > 1 else contextlib.nullcontext()
            with said:
                if engine is None:
                    client.generate(talk_of(num_turns), max_new_tokens=2, fixed_length=True)
                else:
                    engine.submit(talk_of(num_turns), max_new_tokens=2, fixed_length=True).result(60)
            seen.add(tuple(hostile.num_rows))
    assert len(seen) == 1
    assert sum(*seen) > 32


@pytest.mark.parametrize("num_turns", [1, 3])
def test_a_template_that_fits_nothing_is_refused_whatever_the_prompt_is(
    hostile: HostileBundle, connect: Open, num_turns: int
) -> None:
    """The template would fit a conversation of three turns. Since it does not fit a single message, nothing is sent."""
    hostile.files["chat_template.jinja"] = (
        b"{% for m in messages %}{% if messages | length > 2 %}{{ m['content'] }}{% endif %}<|end|>{% endfor %}"
    )
    with connect(pad_rows=32) as client, pytest.raises(TemplateDoesNotFit, match=r"^[^\n]*$"):
        client.generate(talk_of(num_turns), max_new_tokens=2)
    assert hostile.num_rows == []


def test_a_template_that_refuses_everything_makes_the_calls_of_any_other(
    hostile: HostileBundle, connect: Open, tmp_path: Path
) -> None:
    hostile.files["chat_template.jinja"] = b"{{ raise_exception('no') }}"
    with connect(pad_rows=32) as client:
        with pytest.warns(CutWarning, match="an empty one is sent"):
            assert rows_of(hostile, client, "who?")[0] == 32
        hostile.num_rows.clear()
        with pytest.warns(UnusableRowWarning):
            client.finetune(ROWS, lora(), tmp_path / "out", **QUICK)
        assert set(hostile.num_rows) == {32 * QUICK["batch_size"]}


@pytest.mark.parametrize("change", [no_unknown_token, panics_in_the_decoder])
def test_a_prompt_that_the_tokenizer_fails_on_sends_as_many_rows(
    hostile: HostileBundle, connect: Open, change: Callable[[HostileBundle], None]
) -> None:
    change(hostile)
    seen = set()
    with connect(pad_rows=32) as client, warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning that ended a run would be visible too
        warnings.simplefilter("ignore", NotVerifiedWarning)
        for prompt in ("who is a?", "who is z?", "z" * 60):
            hostile.num_rows.clear()
            client.generate(prompt, max_new_tokens=4, fixed_length=True, on_text=lambda _: None)
            seen.add(tuple(hostile.num_rows))
    assert len(seen) == 1


@pytest.mark.parametrize(
    "change", [no_unknown_token, panics_in_the_decoder, refuses_long_conversations, forgets_long_conversations]
)
def test_training_rows_that_the_tokenizer_fails_on_send_as_many_rows(
    hostile: HostileBundle, connect: Open, tmp_path: Path, change: Callable[[HostileBundle], None]
) -> None:
    change(hostile)
    seen = set()
    with connect(pad_rows=32) as client, warnings.catch_warnings():
        warnings.simplefilter("error", UnusableRowWarning)
        warnings.simplefilter("error", CutWarning)
        for number, (turns, answer) in enumerate(((1, "a"), (1, "z"), (2, "a"), (1, "z" * 60))):
            hostile.num_rows.clear()
            talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": answer}] * turns
            client.finetune([{"messages": talk}], lora(), tmp_path / f"{number}", max_steps=1, progress=False)
            seen.add(tuple(hostile.num_rows))
    assert len(seen) == 1


class Panics(BaseException):
    """Stands in for the PanicException of the tokenizers library, which is no subclass of Exception either."""


def test_a_decoder_that_panics_ends_no_answer_early(
    hostile: HostileBundle, connect: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect() as client:
        whole = len(rows_of(hostile, client, "who?", fixed_length=True))
        tokenizer = client.tokenizer

        def panic(*_: Any, **__: Any) -> str:
            raise Panics

        monkeypatch.setattr(tokenizer, "decode", panic, raising=False)
        hostile.num_rows.clear()
        with pytest.raises(TokenizerFailed, match=r"the answer: the tokenizer failed \(Panics\)"):
            client.generate("who?", max_new_tokens=2, fixed_length=True, on_text=lambda _: None)
        assert len(hostile.num_rows) == whole


def test_a_tokenizer_that_fails_is_one_line_without_a_bucket(hostile: HostileBundle, connect: Open) -> None:
    no_unknown_token(hostile)
    with connect() as client, pytest.raises(TokenizerFailed, match="the prompt: the tokenizer failed") as failure:
        client.generate("z", max_new_tokens=1)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("options", [{}, {"pad_rows": 32}])
def test_numbers_without_an_embedding_are_refused_before_anything_is_sent(
    hostile: HostileBundle, connect: Open, options: dict[str, Any]
) -> None:
    """The tokenizer gives a token an id that is larger than the number of the model's embeddings. The client refuses
    this tokenizer, whatever the prompt is."""
    content = json.loads(hostile.files["tokenizer.json"])
    content["model"]["vocab"]["z"] = 40_000
    hostile.files["tokenizer.json"] = json.dumps(content).encode()
    with connect(**options) as client:
        for prompt in ("a", "z"):
            with pytest.raises(ConfigurationError, match=r"numbers tokens up to 40000, the provider's model has 128"):
                client.generate(prompt, max_new_tokens=1)
    assert hostile.num_rows == []
