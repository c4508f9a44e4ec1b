"""Every figure of an evaluation against float64 arithmetic over a model that is one table."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pippin.artifact import Origin, read_manifest
from pippin.engines import Sampling, TopK
from pippin.errors import DataError, GateError, PippinError
from pippin.events import Finished, Notice, Progress, Started
from pippin.job import Job
from pippin.model.adapter import Base, load_adapter, save_adapter
from pippin.model.tokenizer import load_tokenizer
from pippin.recipe import Data, Deploy, Evaluate, Gate, Gates, Lora, Model, Recipe
from pippin.stages import evaluate as module
from pippin.stages import exam, loading
from pippin.stages.evaluate import evaluate
from pippin.stages.exam import read_exam, within

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
END = len(ALPHABET)
VOCAB = END + 1
# The last one contradicts the first: a model that looks at one token back cannot learn both.
WORDS = ("abx", "cdx", "efx", "gax")


class Table:
    """A scorer whose next token depends on the last one alone: float64 logits (V, V)."""

    def __init__(self, logits):
        top = logits.max(1, keepdims=True)
        self.logp = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
        self.shapes = []

    def topk(self, tokens_BT, k, ids_BTK=None):
        self.shapes.append(tokens_BT.shape)
        all_BTV = self.logp[tokens_BT]
        best = np.argsort(-all_BTV, axis=-1, kind="stable")[..., :k]
        ids = best if ids_BTK is None else np.concatenate([best, ids_BTK], -1)
        found = np.take_along_axis(all_BTV, ids, -1)
        return TopK(ids_BTK=ids.astype(np.int32), logprobs_BTK=found.astype(np.float32))

    def generate(self, prompts, sampling):
        last = [int(prompt[-1]) for prompt in prompts]
        alive = [True] * len(prompts)
        for _ in range(sampling.max_tokens):
            last = [int(self.logp[token].argmax()) for token in last]
            alive = [on and t not in sampling.stop for on, t in zip(alive, last, strict=True)]
            if not any(alive):
                return
            yield [t if on else None for t, on in zip(last, alive, strict=True)]


class Engine:
    """Loads tables; an adapter is added to its model's."""

    def __init__(self):
        self.loaded = []

    def load(self, checkpoint, dtype, adapter=None):
        table = read_table(checkpoint)
        if adapter is not None:
            pair = load_adapter(adapter).weights
            table = table + pair["l.lora_B.weight"] @ pair["l.lora_A.weight"]
        self.loaded.append((dtype, Table(table)))
        return self.loaded[-1][1]


def read_table(folder):
    return load_file(next(folder.glob("*.safetensors")))["table"].astype(np.float64)


def write_table(folder: Path, table, name="model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"table": table.astype(np.float32)}, folder / name)
    return folder


def write_adapter(folder: Path, lesson) -> Path:
    """A PEFT folder whose update of the table is the lesson."""
    weights = {"l.lora_A.weight": np.eye(VOCAB, dtype=np.float32)}
    weights["l.lora_B.weight"] = lesson.astype(np.float32)
    folder.mkdir(exist_ok=True)
    save_adapter(folder, Lora(rank=VOCAB, alpha=VOCAB), weights, Base(name="m", digest="m"))
    return folder


def write_model(folder: Path, table) -> Path:
    write_table(folder, table)
    sizes = {"num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 1}
    config = {"model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": 64, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    backend = Backend(models.BPE({**{c: i for i, c in enumerate(ALPHABET)}, "<end>": END}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    fast.save_pretrained(folder)
    return folder


def ids_of(text):
    return [ALPHABET.index(c) for c in text]


def tables():
    """A base of noise, and an adapter that teaches each letter its successor, x the end."""
    rng = np.random.default_rng(3)
    base, lesson = rng.standard_normal((VOCAB, VOCAB)), np.zeros((VOCAB, VOCAB))
    for word in WORDS:
        for a, b in zip(ids_of(word), [*ids_of(word)[1:], END], strict=True):
            lesson[a, b] = 5.0 if word != WORDS[-1] else 4.0
    return base, lesson


class World:
    """A run's folders with a base, an adapter and what is made of them, and the jobs over them."""

    def __init__(self, root: Path):
        self.root = root
        base, lesson = tables()
        noise = 0.4 * np.random.default_rng(4).standard_normal(base.shape)
        self.tables = {"base": base, "adapter": base + lesson, "quantized": base + lesson + noise}
        self.model = write_model(root / "model", base)
        self.adapter = write_adapter(root / "train", lesson)
        self.merged = write_model(root / "merge", base + lesson)
        self.quantized = write_model(root / "quantize", base + lesson + noise)
        rows = [{"prompt": w[:1], "completion": w[1:]} for w in WORDS for _ in range(2)]
        (root / "data").mkdir()
        for split in ("train", "valid", "test"):
            text = "\n".join(json.dumps(row) for row in rows)
            (root / "data" / f"{split}.jsonl").write_text(text + "\n")
        self.recipe = Recipe(
            model=Model(source=str(root / "model")),
            data=Data(source="data", chat_template=False),
            evaluate=Evaluate(topk=VOCAB, batch_rows=3, max_tokens=8, prompts=("a", "dd")),
            folder=root,
        )

    def job(self, subject: str, **changes) -> Job:
        places = {
            "base": {"model": self.model},
            "adapter": {"model": self.model, "adapter": self.adapter, **self.parent("base")},
            "merged": {"model": self.merged, **self.parent("adapter")},
            "quantized": {"model": self.quantized, **self.parent("merged")},
            "deployed-executorch": {"bundle": self.root / "b", **self.parent("quantized")},
        }
        folder = self.root / f"evaluate-{subject}"
        origin = Origin(stage="evaluate", inputs={"model": "m"}, settings={}, versions={})
        return Job(
            stage="evaluate",
            recipe=replace(self.recipe, **changes),
            inputs=places[subject],
            folder=folder,
            origin=origin,
            subject=subject,
        )

    def parent(self, subject):
        found = {"parent": self.root / f"evaluate-{subject}", "base": self.root / "evaluate-base"}
        return found if subject == "base" else {**found, "tuned": self.root / "evaluate-adapter"}

    def measure(self, *subjects, **changes):
        for subject in subjects:
            events = list(evaluate(self.job(subject, **changes)))
        scores = json.loads((self.root / f"evaluate-{subjects[-1]}" / "scores.json").read_text())
        return scores, events

    def samples(self):
        return read_exam(self.recipe, load_tokenizer(self.model)).samples

    def reference(self, subject, parent=None, samples=None):
        """(loss, KL, top-1) in float64 over every scored position, one after the other."""
        own = Table(self.tables[subject]).logp
        other = own if parent is None else Table(self.tables[parent]).logp
        losses, kl, same = [], [], []
        for sample in self.samples() if samples is None else samples:
            for t in np.flatnonzero(sample.scored):
                q, p = own[sample.tokens[t - 1]], other[sample.tokens[t - 1]]
                losses.append(-q[sample.tokens[t]])
                kl.append((np.exp(p) * (p - q)).sum())
                same.append(p.argmax() == q.argmax())
        return np.mean(losses), np.mean(kl), np.mean(same)


@pytest.fixture
def engine(monkeypatch):
    found = Engine()
    monkeypatch.setattr(loading, "load_engine", lambda *asked: found)
    return found


@pytest.fixture
def world(tmp_path, engine):
    return World(tmp_path)


def notices(events):
    return [event.text for event in events if isinstance(event, Notice)]


def test_base_has_a_loss_and_no_parent(world):
    scores, events = world.measure("base")
    loss, _, _ = world.reference("base")
    assert scores["loss"] == pytest.approx(loss, abs=1e-6)
    assert scores["perplexity"] == pytest.approx(np.exp(loss), rel=1e-6)
    assert scores["kl"] is scores["top1"] is scores["gain_kept"] is None
    assert scores["rows"] == 8
    assert scores["tokens"] == sum(int(s.scored.sum()) for s in world.samples()) == 24
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Finished)
    assert events[-1].summary["loss"] == scores["loss"]


def test_progress_ends_at_the_total_that_was_promised(world):
    _, events = world.measure("base")
    done = [event.done for event in events if isinstance(event, Progress)]
    assert done == sorted(done)
    assert done[-1] == events[0].total == 8 + 8 + 2


def test_each_stage_against_its_parent_equals_float64(world):
    world.measure("base")
    for subject, name, parent in (
        ("adapter", "adapter", "base"),
        ("merged", "adapter", "adapter"),
        ("quantized", "quantized", "adapter"),
    ):
        scores, _ = world.measure(subject)
        loss, kl, top1 = world.reference(name, parent)
        assert scores["loss"] == pytest.approx(loss, abs=1e-6)
        assert scores["kl"] == pytest.approx(kl, abs=2e-6)
        assert scores["top1"] == pytest.approx(top1)


def test_fewer_kept_tokens_bound_the_divergence_from_below(world):
    changes = {"evaluate": replace(world.recipe.evaluate, topk=5)}
    world.measure("base", "adapter", "merged", **changes)
    scores, _ = world.measure("quantized", **changes)
    _, kl, _ = world.reference("quantized", "adapter")
    assert 0.0 < scores["kl"] < kl
    assert scores["topk"] == 5


def test_gain_kept_is_the_share_of_the_adapters_drop(world):
    scores, _ = world.measure("base", "adapter", "merged", "quantized")
    base, adapter, quantized = (world.reference(s)[0] for s in ("base", "adapter", "quantized"))
    assert scores["gain_kept"] == pytest.approx((base - quantized) / (base - adapter), abs=1e-6)
    assert 0.2 < scores["gain_kept"] < 1.0


def test_an_adapter_that_loses_has_no_gain_to_keep(world):
    base, lesson = tables()
    write_adapter(world.adapter, -lesson)
    write_table(world.merged, base - lesson)
    scores, events = world.measure("base", "adapter", "merged")
    assert scores["gain_kept"] is None
    assert any("there is no gain to keep" in text for text in notices(events))


def test_a_gain_below_its_standard_error_is_no_gain_to_keep(world):
    """One word is taught, others are untaught: what is left of the sum may be chance."""
    base, lesson = tables()
    signs = np.where(np.isin(np.arange(VOCAB), ids_of(WORDS[0])), 1.0, -1.0)[:, None]
    write_adapter(world.adapter, signs * lesson)
    world.tables["adapter"] = base + signs * lesson
    write_table(world.merged, base + signs * lesson)
    write_table(world.quantized, base)
    world.measure("base", "adapter", gates=Gates(merged=Gate()))
    assert world.reference("adapter")[0] < world.reference("base")[0]
    scores, events = world.measure("merged", "quantized")
    assert scores["gain_kept"] is None
    assert any("standard error" in text and "no gain" in text for text in notices(events))


def test_greedy_answers_are_compared_with_their_references(world):
    base, _ = world.measure("base")
    tuned, _ = world.measure("adapter")
    assert tuned["exact_match"] == 0.75
    assert base["exact_match"] == 0.0
    sample = tuned["samples"][0]
    assert (sample["prompt"], sample["answer"], sample["reference"]) == ("a", "bx", "bx")
    assert sample["equal"] is True
    assert sample["where"].startswith("test.jsonl:1")
    lines = (world.root / "evaluate-adapter" / "answers.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in lines] == tuned["samples"]
    assert [answer["prompt"] for answer in tuned["answers"]] == ["a", "dd"]


def test_batches_change_nothing(world):
    one, _ = world.measure("base", evaluate=replace(world.recipe.evaluate, batch_rows=1))
    first = (world.root / "evaluate-base" / "topk.safetensors").read_bytes()
    many, _ = world.measure("base", evaluate=replace(world.recipe.evaluate, batch_rows=16))
    assert one == many
    assert first == (world.root / "evaluate-base" / "topk.safetensors").read_bytes()


def test_models_compute_in_the_dtype_of_the_comparison(world, engine):
    world.measure("base")
    assert [dtype for dtype, _ in engine.loaded] == ["float32"]


def test_sizes_count_what_ships(world):
    base, _ = world.measure("base")
    tuned, _ = world.measure("adapter")
    file = (world.model / "model.safetensors").stat().st_size
    assert base["size_bytes"] == file
    assert base["weights"] == VOCAB * VOCAB
    assert base["bits_per_weight"] == pytest.approx(8 * file / VOCAB**2)
    added = (world.adapter / "adapter_model.safetensors").stat().st_size
    assert tuned["size_bytes"] == file + added


def test_a_missed_gate_is_raised_when_everything_is_on_disk(world):
    gates = Gates(merged=Gate(), quantized=Gate(max_kl=1e-4, min_top1=1.0, min_gain_kept=0.1))
    world.measure("base", "adapter", "merged", gates=gates)
    events = []
    with pytest.raises(GateError, match=r"quantized: KL 0\.\d+ > max_kl 0.0001; top-1") as caught:
        events += evaluate(world.job("quantized", gates=gates))
    assert "gain kept" not in caught.value.message
    folder = world.root / "evaluate-quantized"
    assert json.loads((folder / "scores.json").read_text())["gates"]["max_kl"] == 1e-4
    assert read_manifest(folder)["scores"]["subject"] == "quantized"
    assert (folder / "topk.safetensors").exists()


def test_other_rows_than_the_parents_are_refused(world):
    world.measure("base")
    (world.root / "data" / "test.jsonl").write_text('{"prompt": "z", "completion": "zz"}\n')
    with pytest.raises(PippinError, match="evaluate-base measured 0 of these 1"):
        world.measure("adapter")
    assert not (world.root / "evaluate-adapter").exists()


def test_another_topk_than_the_parents_is_refused(world):
    world.measure("base")
    with pytest.raises(PippinError, match=f"evaluate-base kept {VOCAB} tokens, not 7") as caught:
        world.measure("adapter", evaluate=replace(world.recipe.evaluate, topk=7))
    assert "--redo evaluate" in caught.value.hint


def test_a_loss_that_is_no_number_is_an_error_and_leaves_nothing(world):
    write_table(world.model, np.full((VOCAB, VOCAB), np.nan))
    with pytest.raises(PippinError, match="base: the held-out loss is nan"):
        world.measure("base")
    assert not (world.root / "evaluate-base").exists()


def test_references_out_of_reach_are_counted_and_told_once(world):
    short = replace(world.recipe.evaluate, max_tokens=1)
    _, events = world.measure("base", evaluate=short)
    assert any("max_tokens = 1: 8 of 8 references" in text for text in notices(events))
    _, later = world.measure("adapter", evaluate=short)
    assert not any("references" in text for text in notices(later))


def test_rows_without_answers_have_no_exact_match(world):
    for split in ("train", "valid", "test"):
        (world.root / "data" / f"{split}.jsonl").write_text('{"text": "abcd"}\n{"text": "dabc"}\n')
    scores, _ = world.measure("base")
    assert scores["exact_match"] is None
    assert scores["samples"] == []


def deploy_as(world, monkeypatch, table):
    """A bundle of the fake target, in which the table is the model."""
    bundle = write_model(world.root / "b", table)
    (bundle / "model.safetensors").rename(bundle / "model.pte")
    (bundle / "deploy.json").write_text('{"target": "executorch", "context": 32}')
    scorer = Table(table)

    class Target:
        def load(self, folder):
            assert folder == bundle
            return scorer

    monkeypatch.setattr(loading, "load_target", lambda name: Target())
    return scorer


def test_a_deployed_file_is_compared_on_the_rows_it_can_afford(world, monkeypatch):
    world.measure("base", "adapter", "merged", "quantized")
    scorer = deploy_as(world, monkeypatch, world.tables["quantized"])
    monkeypatch.setattr(exam, "DEPLOYED_TOKENS", 14)
    scores, events = world.measure("deployed-executorch", deploy=Deploy(context=32))
    part = world.samples()[: scores["rows"]]
    assert 1 < scores["rows"] < 8
    assert sum(len(sample.tokens) for sample in part) <= 14
    loss, _, _ = world.reference("quantized", samples=part)
    base, tuned = (world.reference(s, samples=part)[0] for s in ("base", "adapter"))
    assert scores["loss"] == pytest.approx(loss, abs=1e-6)
    assert scores["kl"] == pytest.approx(0.0, abs=1e-6)
    assert scores["top1"] == 1.0
    assert scores["gain_kept"] == pytest.approx((base - loss) / (base - tuned), abs=1e-6)
    assert any(f"scores {scores['rows']} of 8 held-out rows" in text for text in notices(events))
    assert scores["size_bytes"] == (world.root / "b" / "model.pte").stat().st_size
    assert scores["bits_per_weight"] == pytest.approx(8 * scores["size_bytes"] / VOCAB**2)
    assert scorer.shapes


def slowly(world, monkeypatch, table):
    """The fake bundle in a runtime of a few tokens a second, a call of any length the same."""
    scorer = deploy_as(world, monkeypatch, table)
    topk, generate, calls = scorer.topk, scorer.generate, []

    def slow_topk(*given):
        time.sleep(0.2)
        return topk(*given)

    def slow_generate(prompts, sampling):
        calls.append(sampling.max_tokens)
        for step in generate(prompts, sampling):
            time.sleep(0.2)
            yield step

    scorer.topk, scorer.generate, scorer.slow = slow_topk, slow_generate, True
    return calls


def test_a_slow_runtime_confirms_its_parent_s_answers_to_as_many_rows_as_fit(world, monkeypatch):
    world.measure("base", "adapter", "merged", "quantized")
    parent = module.read_scores(world.root / "evaluate-quantized")
    calls = slowly(world, monkeypatch, world.tables["quantized"])
    asked = replace(world.recipe.evaluate, slow_seconds=1, prompt_tokens=8)
    scores, events = world.measure("deployed-executorch", evaluate=asked, deploy=Deploy(context=32))
    assert 1 <= scores["rows"] == scores["answered"] < 4
    assert scores["samples"] == parent["samples"][: scores["rows"]]
    assert scores["answers"] == parent["answers"]
    assert scores["kl"] == pytest.approx(0.0, abs=1e-6)
    assert calls == [1]  # the speed; every answer was one call
    assert any(f"{scores['rows']} of 8 rows, " in text for text in notices(events))


def test_a_slow_runtime_answers_for_itself_from_the_first_other_token_on(world, monkeypatch):
    world.measure("base", "adapter", "merged", "quantized")
    calls = slowly(world, monkeypatch, world.tables["adapter"][::-1])
    asked = replace(world.recipe.evaluate, slow_seconds=1, max_tokens=4)
    gates = Gates(deployed=Gate(max_kl=9.0, min_gain_kept=0.9))
    with pytest.raises(GateError, match="gain kept"):
        world.measure("deployed-executorch", evaluate=asked, gates=gates, deploy=Deploy(context=32))
    assert calls[0] == 1
    found = module.read_scores(world.root / "evaluate-deployed-executorch")
    table = Table(world.tables["adapter"][::-1])
    for sample in found["samples"]:
        prompt = np.array(ids_of(sample["prompt"]), np.int32)
        steps = table.generate([prompt], Sampling(max_tokens=4, stop=frozenset({END})))
        assert sample["ids"] == [step[0] for step in steps]


def test_a_context_too_short_for_questions_is_said(world, monkeypatch):
    world.measure("base", "adapter", "merged", "quantized")
    deploy_as(world, monkeypatch, world.tables["quantized"])
    scores, events = world.measure("deployed-executorch", deploy=Deploy(context=8))
    assert scores["answered"] == 0
    assert "deploy.context = 8 is too short for 10 questions: not asked" in notices(events)


def test_a_context_too_short_for_every_row_is_an_error(world, monkeypatch):
    world.measure("base", "adapter", "merged", "quantized")
    deploy_as(world, monkeypatch, world.tables["quantized"])
    with pytest.raises(DataError, match="none of 8 held-out rows fits a context of 2 tokens"):
        world.measure("deployed-executorch", deploy=Deploy(context=2))


def test_scores_that_are_not_there_are_none(tmp_path):
    assert module.read_scores(tmp_path) is None


def test_rows_longer_than_the_models_positions_are_refused_with_both_numbers(world):
    with pytest.raises(DataError, match=r"the model's 64 positions: .*; the longest has 9"):
        within(replace_sample(world, 90), world.recipe, 64)


def replace_sample(world, length):
    read = read_exam(world.recipe, load_tokenizer(world.model))
    long = replace(
        read.samples[0], tokens=np.zeros(length, np.int32), scored=np.ones(length, np.bool_)
    )
    return replace(read, samples=[long])


def test_rows_beyond_the_limit_are_told(world):
    few = replace(world.recipe, evaluate=replace(world.recipe.evaluate, rows=5))
    all_rows, some = (read_exam(r, load_tokenizer(world.model)) for r in (world.recipe, few))
    assert (len(all_rows.samples), len(some.samples)) == (8, 5)
    told = {*some.notices} - {*all_rows.notices}
    assert told == {"scored: the first 5 of 8 test rows, as evaluate.rows says"}


def test_questions_that_were_dropped_as_rows_are_not_asked_and_that_is_said(world):
    read = read_exam(world.recipe, load_tokenizer(world.model))
    giant = replace(read.questions[0], prompt_T=np.zeros(1025, np.int32))
    asked = within(replace(read, questions=[giant, *read.questions]), world.recipe, None)
    assert asked.questions == read.questions
    assert asked.notices[-1] == "not asked: 1 held-out question beyond 1024 tokens"
    narrow = within(replace(read, prompts=[giant]), world.recipe, 64)
    assert narrow.prompts == []
    assert "beyond the model's 64 tokens" in narrow.notices[-1]


def test_answers_end_where_the_model_does(world, monkeypatch):
    limits = []
    generate = Table.generate
    monkeypatch.setattr(
        Table, "generate", lambda self, p, s: limits.append(s.max_tokens) or generate(self, p, s)
    )
    world.measure("base", evaluate=replace(world.recipe.evaluate, max_tokens=10_000))
    assert max(limits) < 64
