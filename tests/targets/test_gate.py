"""The gate's prompts, and what it says of a file that differs from its parent."""

import numpy as np
import pytest
from tests.targets.tiny_quantized import CHANNEL, write_folder

from pippin.engines import Sampling
from pippin.errors import PippinError
from pippin.figures import check_text
from pippin.model.tokenizer import load_tokenizer
from pippin.targets import Bundle
from pippin.targets.agreement import Greedy, compare, load_parent
from pippin.targets.gate import Limits, gate
from pippin.targets.prompts import FEW, gate_prompts

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
    prompts, left_out = gate_prompts(tokenizer, 512, None)
    assert len(prompts) + sum(int(text.split()[0]) for text in left_out) == 32
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
        "2 chats are not among the check's prompts: the template refuses them, or they do not fit"
    ]
    assert all(len(ids) <= 63 for ids in prompts)
    assert len(prompts) == 4


def test_scoring_a_draft_tells_the_greedy_answer(parent, tmp_path):
    """The same count of equal tokens as decoding gives, from one pass."""
    other = load_parent(write_folder(tmp_path, "llama", lambda module: CHANNEL))
    prompts = [[5, 6, 7], [9, 250, 30, 31], [40], [77, 3, 3]]
    scored = compare(other, parent, prompts, 64, Greedy(tokens=6, stepped=0))
    decoded = compare(other, parent, prompts, 64, Greedy(tokens=6))
    assert scored.greedy_equal == decoded.greedy_equal < decoded.greedy_tokens == 24
    assert scored.mean_kl == decoded.mean_kl > 1e-3
    assert scored.decode_speed is None
    assert decoded.decode_speed > 0
    answer = [int(step[0]) for step in parent.generate([np.array([40])], Sampling(max_tokens=6))]
    alone = compare(parent, parent, [[40]], 64, Greedy(tokens=6))
    assert (alone.greedy_equal, alone.top1, len(answer)) == (6, 1.0, 6)


def test_the_full_gate_takes_every_prompt(folder, parent, tmp_path):
    limits = Limits(target="x", max_kl=1e-6, min_top1=1.0, prompts=1, tokens=8)
    found = []
    for full in (False, True):
        bundle = Bundle(quantized=folder, folder=tmp_path, context=64, full_gate=full)
        found.append(result(gate(bundle, load_tokenizer(folder), limits, lambda: parent)))
    few, many = found
    assert (few["prompts"], few["greedy_tokens"]) == (1, 8)
    assert (few["of_prompts"], few["cut_to"]) == (many["prompts"], 8)
    assert many["prompts"] > 20
    assert many["load_seconds"] >= 0
    assert "judged on 1 of" in check_text(few)
    assert check_text({"prompts": 4, "mean_kl": 0.1}) == "judged on 4 prompts"
    assert "the first 8 tokens of each; loaded in" in check_text(few)
    assert "answers" in check_text(many)


def test_a_minute_is_used_and_then_said(folder, parent, tmp_path, monkeypatch):
    limits = Limits(target="x", max_kl=1e-6, min_top1=1.0, tokens=8, greedy=Greedy(tokens=1))
    bundle = Bundle(quantized=folder, folder=tmp_path, context=64)
    events = []
    few = result(gate(bundle, load_tokenizer(folder), limits, lambda: parent), events)
    assert few["prompts"] == FEW
    assert f"x: judged on {FEW} of " in events[-1].text
    monkeypatch.setattr("pippin.targets.gate.SECONDS", 60)
    all_of_them = result(gate(bundle, load_tokenizer(folder), limits, lambda: parent))
    assert all_of_them["prompts"] == all_of_them["of_prompts"] == few["of_prompts"]


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
