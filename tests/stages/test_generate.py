"""Speaking: what is found in a folder, where answers stop, what is kept of a conversation."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pippin.artifact import Origin, digest, writing
from pippin.engines import Sampling
from pippin.errors import DataError, ModelError, UsageError
from pippin.model.adapter import Base, save_adapter
from pippin.model.tokenizer import load_tokenizer
from pippin.recipe import Data, Deploy, Lora, Model, Qat, Recipe
from pippin.stages import loading
from pippin.stages.generate import Conversation, Speaker, load_speaker
from pippin.stages.newest import find

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ("<end>", "<user>", "<bot>", "<system>")
TEMPLATE = (
    "{% for m in messages %}"
    "{{ {'user': '<user>', 'assistant': '<bot>', 'system': '<system>'}[m.role] }}"
    "{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


@dataclass
class Script:
    """A scorer that says one text, the end token, then nonsense; it notes what it was asked."""

    ids: list[int]
    asked: list = field(default_factory=list)

    def generate(self, prompts, sampling):
        self.asked.append((prompts[0], sampling))
        for step, token in enumerate([*self.ids, 256, 0, 0]):
            if step == sampling.max_tokens or token in sampling.stop:
                return
            yield [token]


def write_model(folder: Path, template: str | None = TEMPLATE, context: int = 64) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"num_hidden_layers": 1, "hidden_size": 4, "num_attention_heads": 1}
    config = {"model_type": "llama", "vocab_size": 260, "max_position_embeddings": context, **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    vocab = {c: i for i, c in enumerate(ALPHABET)} | {s: 256 + i for i, s in enumerate(SPECIAL)}
    backend = Backend(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", additional_special_tokens=list(SPECIAL[1:])
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def make_speaker(tmp_path, says="Grüße 😀", context=None, **model):
    tokenizer = load_tokenizer(write_model(tmp_path / "m", **model))
    heard = []
    speaker = Speaker(
        title="the model",
        scorer=Script(tokenizer.encode(says)),
        tokenizer=tokenizer,
        data=Data(source=""),
        context=context,
        notify=lambda notice: heard.append(notice.text),
    )
    return speaker, heard


def prompt_text(speaker, call=-1):
    return speaker.tokenizer.decode(speaker.scorer.asked[call][0])


def test_an_answer_ends_at_the_models_own_stop_token(tmp_path):
    speaker, heard = make_speaker(tmp_path)
    pieces = list(speaker.say("hi", Sampling(max_tokens=50)))
    assert "".join(pieces) == "Grüße 😀"
    assert len(pieces) == 7
    assert heard == []
    assert prompt_text(speaker) == "<user>hi<end><bot>"


def test_fewer_bits_of_keys_and_values_where_there_are_none(tmp_path):
    speaker, _ = make_speaker(tmp_path)
    with pytest.raises(UsageError, match="the model keeps its keys and values whole"):
        speaker.quantize_cache(4)


def test_a_stop_of_the_callers_is_kept_beside_it(tmp_path):
    speaker, _ = make_speaker(tmp_path)
    stop = frozenset(speaker.tokenizer.encode("e"))
    assert "".join(speaker.say("hi", Sampling(max_tokens=50, stop=stop))) == "Grüß"


def test_an_answer_cut_in_a_character_ends_before_it(tmp_path):
    speaker, _ = make_speaker(tmp_path)
    assert "".join(speaker.say("hi", Sampling(max_tokens=10))) == "Grüße "


def test_a_conversation_is_rendered_by_the_template(tmp_path):
    speaker, _ = make_speaker(tmp_path, says="yes")
    system = {"role": "system", "content": "be brief"}
    talk = Conversation(speaker=speaker, sampling=Sampling(max_tokens=9), messages=[system])
    assert "".join(talk.ask("one?")) == "yes"
    assert "".join(talk.ask("two?")) == "yes"
    assert prompt_text(speaker) == (
        "<system>be brief<end><user>one?<end><bot>yes<end><user>two?<end><bot>"
    )
    assert [m["role"] for m in talk.messages] == ["system", *["user", "assistant"] * 2]


def test_a_history_that_does_not_fit_loses_its_oldest_exchange_and_says_so(tmp_path):
    speaker, heard = make_speaker(tmp_path, says="yes", context=24)
    talk = Conversation(speaker=speaker, sampling=Sampling(max_tokens=6), messages=[])
    for question in ("one?", "two?", "six?"):
        list(talk.ask(question))
    assert prompt_text(speaker).endswith("<user>six?<end><bot>")
    assert "one?" not in prompt_text(speaker)
    assert len(speaker.scorer.asked[-1][0]) + 6 <= 24
    assert heard[-1] == "left out, beyond 24 tokens: the 2 oldest messages"


def test_a_question_too_long_is_an_error_and_forgotten(tmp_path):
    speaker, _ = make_speaker(tmp_path, says="yes", context=24)
    talk = Conversation(speaker=speaker, sampling=Sampling(max_tokens=6), messages=[])
    with pytest.raises(DataError, match="is 43 tokens long, there is room for 18"):
        list(talk.ask("x" * 40))
    assert talk.messages == []
    assert "".join(talk.ask("ok?")) == "yes"


def test_an_answer_that_was_broken_off_is_remembered_as_far_as_it_was_heard(tmp_path):
    speaker, _ = make_speaker(tmp_path, says="a long story")
    talk = Conversation(speaker=speaker, sampling=Sampling(max_tokens=20), messages=[])
    answer = talk.ask("tell")
    heard = next(answer) + next(answer) + next(answer)
    answer.close()
    assert (
        talk.messages[-1]
        == {"role": "assistant", "content": heard}
        == {
            "role": "assistant",
            "content": "a l",
        }
    )


def test_a_prompt_that_fills_the_context_leaves_less_and_says_so(tmp_path):
    speaker, heard = make_speaker(tmp_path, context=10)
    list(speaker.say("1234", Sampling(max_tokens=50)))
    assert speaker.scorer.asked[-1][1].max_tokens == 3
    assert heard == ["the answer ends after 3 tokens: the model holds 10 in all"]
    with pytest.raises(DataError, match="the prompt is 13 tokens long, the model holds 10"):
        list(speaker.say("1234567890", Sampling(max_tokens=50)))


def test_a_model_without_a_template_takes_prompts_and_no_conversation(tmp_path):
    speaker, _ = make_speaker(tmp_path, template=None)
    list(speaker.say("plain", Sampling(max_tokens=5)))
    assert prompt_text(speaker) == "plain"
    with pytest.raises(ModelError, match="no chat template"):
        list(speaker.say([{"role": "user", "content": "hi"}], Sampling(max_tokens=5)))


def stage(folder: Path, files: dict[str, str], model: Path | None = None) -> Path:
    inputs = {"model": digest(model)} if model else {}
    origin = Origin(stage=folder.name, inputs=inputs, settings={}, versions={})
    with writing(folder, origin, {}) as partial:
        for name, text in files.items():
            (partial / name).write_text(text)
    return folder


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def test_the_furthest_stage_of_a_run_speaks(run, tmp_path):
    base = write_model(tmp_path / "base")
    assert find(run, base).inputs == {"model": base}
    adapter = stage(run / "train", {"adapter_config.json": "{}"})
    assert find(run, base).inputs == {"model": base, "adapter": adapter}
    merged = stage(run / "merge", {"config.json": "{}"})
    assert find(run, base).inputs == {"model": merged}
    quantized = stage(run / "quantize", {"config.json": "{}"})
    assert find(run, base).title == f"quantized model {quantized}"
    trained = stage(run / "qat", {"config.json": "{}"})
    assert find(run, base).inputs == {"model": trained}
    (run / "qat").rename(tmp_path / "qat")
    (run / "deploy-executorch").mkdir()
    assert find(run, base).inputs == {"model": quantized}
    (run / "deploy-executorch").rmdir()
    bundle = stage(run / "deploy-executorch", {"deploy.json": "{}"})
    assert find(run, base).inputs == {"bundle": bundle}


def test_what_a_run_has_moved_on_from_is_silent(run):
    """[qat] switched on and off again, weights made again, a target no longer asked for."""
    quantized = stage(run / "quantize", {"config.json": "{}"})
    trained = stage(run / "qat", {"config.json": "{ }"}, quantized)
    stage(run / "evaluate-quantized", {"scores.json": "{}"}, trained)
    bundle = stage(run / "deploy-gguf", {"deploy.json": "{}"}, trained)
    assert find(run).inputs == {"bundle": bundle}
    stage(run / "evaluate-quantized", {"scores.json": "{}"}, quantized)
    assert find(run).inputs == {"model": quantized}
    bundle = stage(run / "deploy-gguf", {"deploy.json": "{}"}, quantized)
    assert find(run).inputs == {"bundle": bundle}
    recipe = Recipe(model=Model(source="x"), data=Data(source="x"))
    assert find(run, recipe=recipe).inputs == {"model": quantized}
    tuned = find(run, recipe=replace(recipe, qat=Qat(steps=1), deploy=Deploy(targets=("gguf",))))
    assert tuned.inputs == {"model": trained}
    stage(run / "quantize", {"config.json": "{  }"})
    assert find(run).inputs == {"model": quantized}


def test_a_fetched_base_speaks_before_anything_is_made(run):
    model = stage(run / "model", {"config.json": "{}"})
    assert find(run).inputs == {"model": model}


def test_an_adapters_base_is_beside_it_or_named_or_given(tmp_path):
    base = write_model(tmp_path / "base")
    adapter = tmp_path / "elsewhere"
    adapter.mkdir()
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps({"base_model_name_or_path": str(base)}))
    assert find(adapter).inputs == {"model": base, "adapter": adapter}
    config.write_text(json.dumps({"base_model_name_or_path": "some/hub-id"}))
    with pytest.raises(ModelError, match="the base some/hub-id of adapter"):
        find(adapter)
    assert find(adapter, base).inputs["model"] == base
    beside = write_model(tmp_path / "model")
    assert find(adapter).inputs["model"] == beside


def test_a_folder_that_holds_nothing_is_an_error(tmp_path):
    with pytest.raises(ModelError, match="holds no model"):
        find(tmp_path)


def test_load_speaker_says_what_speaks_and_computes_as_the_recipe_wants(tmp_path, monkeypatch):
    loaded = []

    class Engine:
        def load(self, checkpoint, dtype, adapter=None):
            loaded.append((checkpoint, dtype, adapter))
            return Script([1])

    monkeypatch.setattr(
        loading, "load_engine", lambda name, device, *_: loaded.append(device) or Engine()
    )
    folder = write_model(tmp_path / "m", context=77)
    recipe = Recipe(
        model=Model(source="m", device="cpu", dtype="bfloat16"),
        data=Data(source="d", format="text"),
    )
    heard = []
    speaker = load_speaker(folder, heard.append, recipe=recipe)
    assert loaded == ["cpu", (folder, "bfloat16", None)]
    assert [notice.text for notice in heard] == [f"speaking: model {folder}"]
    assert speaker.context == 77
    list(speaker.say("go on", Sampling(max_tokens=3)))
    assert prompt_text(speaker) == "go on"  # text data is gone on with, not answered


def test_load_speaker_runs_a_bundle_in_its_own_runtime(tmp_path, monkeypatch):
    folder = write_model(tmp_path / "b")
    (folder / "deploy.json").write_text(json.dumps({"target": "executorch", "context": 12}))

    class Target:
        def load(self, bundle):
            assert bundle == folder
            return Script([1])

    monkeypatch.setattr(loading, "load_target", lambda name: Target())
    speaker = load_speaker(folder, lambda notice: None)
    assert speaker.context == 12
    assert isinstance(speaker.scorer.ids, list)


def test_prompts_are_int32(tmp_path):
    speaker, _ = make_speaker(tmp_path)
    list(speaker.say([{"role": "user", "content": "hi"}], Sampling(max_tokens=1)))
    assert speaker.scorer.asked[-1][0].dtype == np.int32


def test_a_short_context_has_room_for_a_question_whatever_the_longest_answer(tmp_path):
    speaker, heard = make_speaker(tmp_path, says="yes", context=24)
    talk = Conversation(speaker=speaker, sampling=Sampling(max_tokens=256), messages=[])
    assert "".join(talk.ask("one?")) == "yes"
    assert "the answer ends after" in heard[0]


def test_an_adapter_of_another_base_does_not_speak(tmp_path):
    base, adapter = write_model(tmp_path / "base"), tmp_path / "adapter"
    pair = {"l.lora_A.weight": np.ones((1, 2), np.float32), "l.lora_B.weight": np.ones((2, 1), "f")}
    adapter.mkdir()
    save_adapter(adapter, Lora(rank=1), pair, Base(name="another", digest="0" * 64))
    with pytest.raises(ModelError, match="trained on another"):
        load_speaker(adapter, print, base=base)


def test_prompts_are_rendered_as_in_training(run, tmp_path, monkeypatch):
    """A model tuned on plain completions answers a chat's wrapping as if it had learnt nothing."""
    engine = SimpleNamespace(load=lambda *_: None)
    monkeypatch.setattr(loading, "load_engine", lambda *_: engine)
    write_model(run / "quantize")
    assert load_speaker(run / "quantize", lambda _: None).data.chat_template
    settings = {"data.chat_template": False, "data.format": "auto"}
    origin = Origin(stage="train", inputs={}, settings=settings, versions={})
    with writing(run / "train", origin, {}) as folder:
        (folder / "adapter_config.json").write_text("{}")
    assert not load_speaker(run / "quantize", lambda _: None).data.chat_template


def test_an_adapters_broken_config_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"adapter_config\.json is no PEFT configuration"):
        find(tmp_path)


@pytest.mark.parametrize("source", ["builtin:smollm2", "model.gguf", "owner/name"])
def test_a_source_that_is_no_folder_is_sent_to_a_recipe(tmp_path, source):
    with pytest.raises(ModelError, match="is no folder") as caught:
        find(tmp_path / source)
    assert "model.source" in caught.value.hint
