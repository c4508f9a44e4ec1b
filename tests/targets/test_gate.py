"""The gate's prompts, and what it says of a file that differs from its parent."""

from dataclasses import replace

import numpy as np
import pytest
from tests.targets.tiny_quantized import CHANNEL, write_folder

from pippin.engines import Sampling
from pippin.errors import PippinError
from pippin.figures import check_text
from pippin.model.tokenizer import load_tokenizer
from pippin.targets import PROMPTS, Bundle
from pippin.targets.agreement import Effort, compare, load_parent, require
from pippin.targets.gate import Limits, gate
from pippin.targets.prompts import gate_prompts
from pippin.targets.stepping import SteppingModel

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("quantized"))


@pytest.fixture(scope="module")
def parent(folder):
    return load_parent(folder)


def test_the_prompts_are_many_kinds_and_fit(folder):
    tokenizer = load_tokenizer(folder)
    prompts, left_out = gate_prompts(tokenizer, 512, PROMPTS)
    assert len(prompts) + sum(int(text.split()[0]) for text in left_out) == PROMPTS
    assert max(map(len, prompts)) == 511
    assert min(map(len, prompts)) < 5
    chats = [ids for ids in prompts if tokenizer.decode(ids).startswith("<|im_start|>user\n")]
    assert any(tokenizer.decode(ids).count("<|im_start|>user") == 3 for ids in chats)
    specials = [tokenizer.encode(text)[0] for text in tokenizer.special_texts]
    assert all(any(special in ids for ids in prompts) for special in specials[:2])
    text = "".join(tokenizer.decode(ids) for ids in prompts)
    assert all(word in text for word in ("人人生", "разум", "أحرار", "मनुष्य", "SELECT", "🙂"))


def test_chats_that_do_not_fit_are_said(folder):
    prompts, left_out = gate_prompts(load_tokenizer(folder), 64, 6)
    assert left_out == [
        "2 chats left out of the check's prompts: the template refuses them, or they do not fit"
    ]
    assert all(len(ids) <= 63 for ids in prompts)
    assert len(prompts) == 4


def test_scoring_a_draft_tells_the_greedy_answer(parent, tmp_path):
    """The same count of equal tokens as decoding gives, from one pass."""
    other = load_parent(write_folder(tmp_path, "llama", lambda module: CHANNEL))
    prompts = [[5, 6, 7], [9, 250, 30, 31], [40], [77, 3, 3]]
    scored = compare(other, parent, prompts, 64, Effort(greedy=6, stepped=0))
    decoded = compare(other, parent, prompts, 64, Effort(greedy=6))
    assert scored.greedy_equal == decoded.greedy_equal < decoded.greedy_tokens == 24
    assert scored.mean_kl == decoded.mean_kl > 1e-3
    assert scored.decode_speed is None
    assert decoded.decode_speed > 0
    answer = [int(step[0]) for step in parent.generate([np.array([40])], Sampling(max_tokens=6))]
    alone = compare(parent, parent, [[40]], 64, Effort(greedy=6))
    assert (alone.greedy_equal, alone.top1, len(answer)) == (6, 1.0, 6)


def test_every_prompt_is_taken_unless_fewer_are_asked(folder, parent, tmp_path, monkeypatch):
    monkeypatch.setattr("pippin.targets.gate.gate_prompts", gate_prompts)
    limits, found, said = Limits(target="x", max_kl=1e-6, min_top1=1.0), [], []
    for asked in ({}, {"gate_prompts": 3}):
        bundle = Bundle(quantized=folder, folder=tmp_path, context=64, **asked)
        found.append(result(gate(bundle, load_tokenizer(folder), limits, lambda: parent), said))
    every, few = found
    prompts, left_out = gate_prompts(load_tokenizer(folder), 64, PROMPTS)
    assert every["prompts"] == len(prompts) == PROMPTS - int(left_out[0].split()[0]) > 20
    # Answers end where the context does.
    tokens = sum(min(len(prompt) + 8, 64) for prompt in prompts)
    assert (every["tokens"], every["of_prompts"]) == (tokens, PROMPTS)
    assert every["load_seconds"] >= 0
    assert (few["prompts"], few["greedy_tokens"]) == (2, 1 + 8)
    assert (
        f"x: judged on {len(prompts)} of 32 prompts, {tokens:,} tokens; loaded in" in said[1].text
    )
    assert "answers" in check_text(every)
    assert check_text({"prompts": 4, "mean_kl": 0.1}) == "judged on 4 prompts"


class Slow(SteppingModel):
    """A model as a runtime that gives the last logits of a call alone."""

    def __init__(self, model):
        super().__init__(64)
        self.model, self.tokens, self.calls = model, [], 0

    def last_logits(self, tokens, start):
        self.tokens, self.calls = [*self.tokens[:start], *tokens], self.calls + 1
        found, logits_V = self.model.topk(np.array([self.tokens]), 320), np.empty(320, np.float32)
        logits_V[found.ids_BTK[0, -1]] = found.logprobs_BTK[0, -1]
        return logits_V


def test_slow_runtimes_are_judged_where_an_answer_begins(parent):
    prompts, calls = [[5, 6, 7], list(range(20, 32))], []
    for whole in (True, False):
        slow = Slow(parent)
        found = compare(slow, parent, prompts, 64, Effort(greedy=4, stepped=0, whole=whole))
        assert found.tokens == 3 + 4 + (12 if whole else 8) + 4
        assert found.greedy_equal == 8
        assert (found.top1, found.greedy_tokens) == (1, 8)
        assert found.max_difference < 1e-4
        calls.append(slow.calls)
    assert calls == [23, 19]


def result(events, said=None):
    while True:
        try:
            event = next(events)
            if said is not None:
                said.append(event)
        except StopIteration as end:
            return end.value


def test_another_model_is_stopped_with_figures(folder, tmp_path):
    other = load_parent(write_folder(tmp_path, "llama", lambda module: CHANNEL))
    bundle = Bundle(quantized=folder, folder=tmp_path, context=64)
    limits = Limits(target="x", max_kl=1e-4, min_top1=0.98)
    with pytest.raises(PippinError, match=r"x: the file does not compute .*mean_kl"):
        list(gate(bundle, load_tokenizer(folder), limits, lambda: other))


@pytest.mark.parametrize(
    ("tokens", "top1", "mean_kl", "passes"),
    [
        (100, 0.98, 0.0, True),
        (100, 0.97, 0.0, False),
        (10, 0.9, 0.0, True),  # one likeliest token may always be another
        (10, 0.8, 0.0, False),
        (100, 1.0, 0.02, False),
        (100, 1.0, float("nan"), False),
    ],
)
def test_either_limit_stops_a_file(parent, tokens, top1, mean_kl, passes):
    same = compare(parent, parent, [[40]], 64, Effort(greedy=1))
    found = replace(same, tokens=tokens, top1=top1, mean_kl=mean_kl)
    if passes:
        assert require("x", found, 0.01, 0.98)["top1"] == top1
        return
    with pytest.raises(PippinError, match=f"x: the file does not compute .* mean_kl {mean_kl:g}"):
        require("x", found, 0.01, 0.98)
