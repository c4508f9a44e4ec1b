"""Tokens and loss masks against transformers' own templates."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pippin.data.batches import Sample
from pippin.data.chat import examples, render_prompt, tokenize
from pippin.data.shapes import Row
from pippin.errors import DataError, ModelError
from pippin.model.tokenizer import Tokenizer
from pippin.recipe import Data

Make = Callable[..., Tokenizer]
DATA = Data(source="x")


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def chat(*contents: str, system: str | None = None) -> tuple[dict[str, Any], ...]:
    first = [turn("system", system)] if system is not None else []
    return (*first, *(turn(("user", "assistant")[i % 2], c) for i, c in enumerate(contents)))


def one(row: Row, tokenizer: Tokenizer, **keys: Any) -> Sample:
    return tokenize([row], tokenizer, dataclasses.replace(DATA, **keys)).samples[0]


def trained(sample: Sample, tokenizer: Tokenizer) -> list[str]:
    """The trained stretches of a sample as text."""
    edges = np.flatnonzero(np.diff(np.r_[False, sample.scored, False]))
    runs = edges.reshape(-1, 2).tolist()
    return [tokenizer.decode(sample.tokens[start:stop].tolist()) for start, stop in runs]


words = st.text(st.sampled_from("abc thé,.\n🙂"), max_size=12).map(lambda text: f"x{text}")


@settings(max_examples=60, deadline=None)
@given(
    contents=st.lists(words, min_size=2, max_size=8).map(lambda c: c[: len(c) // 2 * 2]),
    system=st.none() | words,
)
def test_tokens_and_mask_equal_transformers(
    tokenizer: Tokenizer, contents: list[str], system: str | None
) -> None:
    messages = chat(*contents, system=system)
    sample = one(Row(messages=messages, where="t:1"), tokenizer)
    peer = AutoTokenizer.from_pretrained(tokenizer.folder)
    theirs = peer.apply_chat_template(
        list(messages), return_dict=True, return_assistant_tokens_mask=True
    )
    assert sample.tokens.tolist() == theirs["input_ids"]
    assert sample.scored.tolist() == [bool(m) for m in theirs["assistant_masks"]]


@settings(max_examples=40, deadline=None)
@given(contents=st.lists(words, min_size=2, max_size=6).map(lambda c: c[: len(c) // 2 * 2]))
def test_mask_starts_where_the_generation_prompt_ends(
    tokenizer: Tokenizer, contents: list[str]
) -> None:
    messages = chat(*contents)
    sample = one(Row(messages=messages, where="t:1"), tokenizer)
    starts = np.flatnonzero(np.diff(sample.scored.astype(int)) == 1) + 1
    prompts = [
        tokenizer.render(messages[:i], generation_prompt=True)
        for i, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    assert starts.tolist() == [len(prompt) for prompt in prompts]
    for prompt in prompts:
        assert sample.tokens[: len(prompt)].tolist() == prompt


def test_every_turn_and_its_end_token_is_trained(tokenizer: Tokenizer) -> None:
    assert tokenizer.pad_id == tokenizer.eos_id
    row = Row(messages=chat("hi", "one", "and", "two", system="be"), where="t:1")
    sample = one(row, tokenizer)
    assert trained(sample, tokenizer) == ["one<|im_end|>", "two<|im_end|>"]
    ends = sample.tokens == tokenizer.eos_id
    assert (ends.sum(), (ends & sample.scored).sum()) == (5, 2)


def test_train_on(tokenizer: Tokenizer) -> None:
    row = Row(messages=chat("hi", "one", "and", "two"), where="t:1")
    last = one(row, tokenizer, train_on="last")
    assert trained(last, tokenizer) == ["two<|im_end|>"]
    everything = one(row, tokenizer, train_on="all")
    assert not everything.scored[0]
    assert everything.scored[1:].all()


def test_last_answer_need_not_be_the_last_turn(tokenizer: Tokenizer) -> None:
    row = Row(messages=chat("hi", "one", "thanks"), where="t:1")
    assert trained(one(row, tokenizer, train_on="last"), tokenizer) == ["one<|im_end|>"]


def test_turns_of_weight_0_are_context(tokenizer: Tokenizer) -> None:
    messages = list(chat("hi", "one", "and", "two"))
    messages[1]["weight"] = 0
    sample = one(Row(messages=tuple(messages), where="t:1"), tokenizer)
    assert trained(sample, tokenizer) == ["two<|im_end|>"]


def test_conversation_that_opens_with_the_assistant(tokenizer: Tokenizer) -> None:
    messages = (turn("assistant", "welcome"), *chat("hi", "one"))
    sample = one(Row(messages=messages, where="t:1"), tokenizer)
    assert trained(sample, tokenizer) == ["welcome<|im_end|>", "one<|im_end|>"]
    assert sample.tokens.tolist() == tokenizer.render(messages)


@pytest.mark.parametrize("as_text", [False, True])
def test_tools(make_tokenizer: Make, as_text: bool) -> None:
    tokenizer = make_tokenizer("tools")
    city = {"city": "Lyon"}
    call = {"type": "function", "function": {"name": "mayor", "arguments": city}}
    if as_text:
        call["function"] = {"name": "mayor", "arguments": json.dumps(city)}
    messages = (
        turn("user", "who?"),
        turn("assistant", "", tool_calls=[call]),
        turn("tool", "Doucet"),
        turn("assistant", "It is Doucet."),
    )
    tools = [{"type": "function", "function": {"name": "mayor"}}]
    row = Row(messages=messages, tools=tools, where="t:1")
    done = tokenize([row], tokenizer, DATA)
    said = '<tool_call>{"city": "Lyon"}</tool_call>'
    assert trained(done.samples[0], tokenizer) == [f"{said}<|im_end|>", "It is Doucet.<|im_end|>"]
    assert bool(done.notices) == as_text
    first = Row(messages=messages[:2], tools=tools, where="t:1")
    assert examples([first], tokenizer, DATA)[0].answer == said


def test_template_that_leaves_tool_calls_out(tokenizer: Tokenizer) -> None:
    messages = (turn("user", "who?"), turn("assistant", "", tool_calls=[{"function": {}}]))
    with pytest.raises(DataError, match=r"t:7.*leaves tool_calls out"):
        one(Row(messages=messages, where="t:7"), tokenizer)
    row = Row(messages=chat("hi", "one"), tools=[{"function": {}}], where="t:1")
    assert "leaves `tools` out" in tokenize([row], tokenizer, DATA).notices[0]


def test_template_that_trims(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer("trimmed")
    messages = chat("  hi ", "  one \n", "and", "two ")
    sample = one(Row(messages=messages, where="t:1"), tokenizer)
    assert sample.tokens.tolist() == tokenizer.render(messages)
    assert trained(sample, tokenizer) == ["one<|im_end|>", "two<|im_end|>"]


def test_template_that_writes_the_last_answer_differently(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer("thinking")
    messages = chat("hi", "one", "and", "two")
    sample = one(Row(messages=messages, where="t:1"), tokenizer)
    assert sample.tokens.tolist() == tokenizer.render(messages)
    opening = "<think>\n\n</think>\n\n"
    assert trained(sample, tokenizer) == ["one<|im_end|>", f"{opening}two<|im_end|>"]


def test_template_that_strips_an_earlier_answer(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer("thinking")
    row = Row(messages=chat("hi", "<think>hm</think>one", "and", "two"), where="f.jsonl:3")
    with pytest.raises(DataError, match=r"f.jsonl:3: turn 2 .*cannot be located") as caught:
        one(row, tokenizer)
    assert "train_on" in caught.value.hint
    assert trained(one(row, tokenizer, train_on="last"), tokenizer)[0].endswith("two<|im_end|>")


def test_template_whose_generation_prompt_is_not_in_the_conversation(make_tokenizer: Make) -> None:
    row = Row(messages=chat("hi", "one"), where="f.jsonl:3")
    with pytest.raises(DataError, match=r"f.jsonl:3: turn 2 .*cannot be located"):
        one(row, make_tokenizer("forced"))


def test_template_without_end_token_trains_the_line_break(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer("endless")
    sample = one(Row(messages=chat("hi", "one", "and", "two"), where="t:1"), tokenizer)
    assert trained(sample, tokenizer) == ["one\n", "two\n"]


def test_template_that_refuses_names_the_row(make_tokenizer: Make) -> None:
    row = Row(messages=chat("hi", "one", system="be"), where="f.jsonl:3")
    with pytest.raises(DataError, match=r"f.jsonl:3: .*System role not supported"):
        one(row, make_tokenizer("strict"))


def test_token_across_the_edge_is_context_and_said(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("\n\n")) == 1, "the tiny vocabulary must hold this token"
    messages = chat("hi", "\n\nthis")
    done = tokenize([Row(messages=messages, where="t:1")], tokenizer, DATA)
    assert done.samples[0].tokens.tolist() == tokenizer.render(messages)
    assert trained(done.samples[0], tokenizer) == ["\nthis<|im_end|>"]
    assert "across the edge" in done.notices[0]


def test_joined_pair_is_exact(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(adds_bos=True)
    row = Row(messages=chat("ab", "cd"), pair=("ab ", " cd"), where="t:1")
    sample = one(row, tokenizer, chat_template=False)
    prompt, completion = tokenizer.encode("ab "), tokenizer.encode(" cd")
    ids = [tokenizer.bos_id, *prompt, *completion, tokenizer.eos_id]
    assert sample.tokens.tolist() == ids
    assert np.flatnonzero(sample.scored).tolist() == list(range(1 + len(prompt), len(ids)))


def test_pair_without_template_is_joined_and_said(make_tokenizer: Make) -> None:
    row = Row(messages=chat("ab", "cd"), pair=("ab", "cd"), where="t:1")
    done = tokenize([row], make_tokenizer("none"), DATA)
    assert "no chat template" in done.notices[0]
    with pytest.raises(ModelError, match="no chat template"):
        tokenize([dataclasses.replace(row, pair=None)], make_tokenizer("none"), DATA)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_text(make_tokenizer: Make, adds_bos: bool) -> None:
    tokenizer = make_tokenizer(adds_bos=adds_bos)
    sample = one(Row(text="this and that", where="t:1"), tokenizer)
    start = [tokenizer.bos_id] if adds_bos else []
    assert sample.tokens.tolist() == [
        *start,
        *tokenizer.encode("this and that"),
        tokenizer.eos_id,
    ]
    assert not sample.scored[0]
    assert sample.scored[1:].all()


def test_document_in_blocks_trains_every_token_once(tokenizer: Tokenizer) -> None:
    text = "this and that again " * 40
    row = Row(text=text, where="t.txt:1", document=True)
    done = tokenize([row], tokenizer, dataclasses.replace(DATA, max_seq_len=16))
    scored = [t for s in done.samples for t in s.tokens[s.scored].tolist()]
    assert scored == [*tokenizer.encode(text), tokenizer.eos_id][1:]
    assert {len(s.tokens) for s in done.samples[:-1]} == {16}
    assert all(s.scored.any() and not s.scored[0] for s in done.samples)
    assert (done.cut, done.dropped) == (0, 0)
    assert "blocks of 16" in done.notices[0]


LONG = [
    Row(messages=chat("hi", "this " * 60), where="t:1"),
    Row(messages=chat("hi " * 90, "one"), where="t:2"),
    Row(messages=chat("hi", "one"), where="t:3"),
]


def test_too_long_is_an_error_with_the_number(tokenizer: Tokenizer) -> None:
    longest = len(tokenizer.render(LONG[1].messages or ()))
    with pytest.raises(DataError, match=rf"2 of 3 rows; .*t:2, has {longest} tokens") as caught:
        tokenize(LONG, tokenizer, dataclasses.replace(DATA, max_seq_len=80))
    assert f"data.max_seq_len = {longest}" in caught.value.hint


def test_cut_keeps_the_beginning_and_drops_what_trains_nothing(tokenizer: Tokenizer) -> None:
    done = tokenize(LONG, tokenizer, dataclasses.replace(DATA, max_seq_len=80, too_long="cut"))
    assert (done.cut, done.dropped, [s.row for s in done.samples]) == (1, 1, [0, 2])
    whole = tokenizer.render(LONG[0].messages or ())
    assert done.samples[0].tokens.tolist() == whole[:80]
    assert done.lengths.tolist() == [len(tokenizer.render(row.messages or ())) for row in LONG]
    assert [n.split(" ")[0] for n in done.notices] == ["1", "1"]


def test_drop_is_counted(tokenizer: Tokenizer) -> None:
    keys = {"max_seq_len": 80, "too_long": "drop"}
    done = tokenize(LONG, tokenizer, dataclasses.replace(DATA, **keys))
    assert (done.cut, done.dropped, [s.row for s in done.samples]) == (0, 2, [2])
    with pytest.raises(DataError, match="none is left"):
        tokenize(LONG[:2], tokenizer, dataclasses.replace(DATA, **keys))


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        (Row(messages=(turn("user", "hi"),), where="f:4"), {}),
        (Row(messages=chat("hi", " "), where="f:4"), {}),
        (Row(messages=chat("hi", ""), pair=("hi", ""), where="f:4"), {"chat_template": False}),
        (Row(text=" \n", where="f:4"), {}),
    ],
)
def test_row_with_nothing_to_train(tokenizer: Tokenizer, row: Row, keys: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="f:4: no trainable token"):
        one(row, tokenizer, **keys)


def test_rows_of_all_kinds_keep_their_order(tokenizer: Tokenizer) -> None:
    rows = [
        Row(text="this", where="t:1"),
        Row(messages=chat("hi", "one"), where="t:2"),
        Row(text="that", where="t:3"),
        Row(messages=chat("hi", "two"), pair=("hi", "two"), where="t:4"),
    ]
    samples = tokenize(rows, tokenizer, DATA).samples
    assert [s.row for s in samples] == [0, 1, 2, 3]
    ends = [tokenizer.decode(s.tokens.tolist()).strip() for s in samples]
    for text, end in zip(ends, ("this", "one", "that", "two"), strict=True):
        assert text.endswith(f"{end}<|im_end|>")


def test_examples(tokenizer: Tokenizer) -> None:
    rows = [Row(messages=chat("hi", "one", "and", " two"), where="t:1"), Row(text="x", where="t:2")]
    (found,) = examples(rows, tokenizer, DATA)
    assert (found.answer, found.where) == (" two", "t:1")
    assert found.prompt_T.dtype == np.int32
    wanted = tokenizer.render(chat("hi", "one", "and"), generation_prompt=True)
    assert found.prompt_T.tolist() == wanted


def test_examples_of_joined_pairs(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(adds_bos=True)
    rows = [Row(messages=chat("ab", "cd"), pair=("ab", "cd"), where="t:1")]
    (found,) = examples(rows, tokenizer, dataclasses.replace(DATA, chat_template=False))
    assert found.prompt_T.tolist() == [tokenizer.bos_id, *tokenizer.encode("ab")]
    assert found.answer == "cd"


@pytest.mark.parametrize(
    ("keys", "plain"),
    [
        ({}, False),
        ({"format": "text"}, True),
        ({"source": "book.txt"}, True),
        ({"chat_template": False}, True),
    ],
)
def test_render_prompt(tokenizer: Tokenizer, keys: dict[str, Any], plain: bool) -> None:
    ids = render_prompt("this", tokenizer, dataclasses.replace(DATA, **keys)).tolist()
    chatted = tokenizer.render([turn("user", "this")], generation_prompt=True)
    assert ids == (tokenizer.encode("this") if plain else chatted)


@pytest.mark.model
@pytest.mark.parametrize(
    "contents",
    [
        ("What is 2 + 2?", "4", "And 3 + 3?", "It is 6.\n\nSure."),
        ("héllo 🙂", " leading", "x", "\ttab and ünï"),
        ("a", "code:\n\n```python\nprint('<|im_end|>')\n```"),
    ],
)
def test_smollm2(smollm2: Tokenizer, contents: Sequence[str]) -> None:
    messages = chat(*contents)
    done = tokenize([Row(messages=messages, where="t:1")], smollm2, DATA)
    sample = done.samples[0]
    assert sample.tokens.tolist() == smollm2.render(messages)
    answers = [m["content"] for m in messages if m["role"] == "assistant"]
    assert trained(sample, smollm2) == [f"{answer}<|im_end|>" for answer in answers]
    assert done.notices == []


@pytest.mark.model
def test_smollm2_white_space_that_merges_with_the_prompt_is_said(smollm2: Tokenizer) -> None:
    messages = chat("x", "  two spaces")
    done = tokenize([Row(messages=messages, where="t:1")], smollm2, DATA)
    assert done.samples[0].tokens.tolist() == smollm2.render(messages)
    assert trained(done.samples[0], smollm2) == [" two spaces<|im_end|>"]
    assert "across the edge" in done.notices[0]
