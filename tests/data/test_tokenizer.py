"""The tokenizer of a model's folder."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pippin.errors import DataError, ModelError
from pippin.model.tokenizer import Tokenizer, load_tokenizer

CHAT = [
    {"role": "user", "content": "say this and that"},
    {"role": "assistant", "content": "this, that  \n"},
    {"role": "user", "content": "ünï 🙂 again"},
]
Make = Callable[..., Tokenizer]


def test_renders_as_transformers_does(tokenizer: Tokenizer) -> None:
    peer = AutoTokenizer.from_pretrained(tokenizer.folder)
    for prompt in (True, False):
        theirs = peer.apply_chat_template(CHAT, add_generation_prompt=prompt, return_dict=False)
        assert tokenizer.render(CHAT, generation_prompt=prompt) == theirs


def test_decode_inverts_encode(tokenizer: Tokenizer) -> None:
    text = "  spaces , and . marks\r\n\tünï 🙂 <|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text), skip_special=True) == text[:-10]


def test_many_texts_give_the_ids_of_each(tokenizer: Tokenizer) -> None:
    texts = ["this", "", "that again"]
    assert tokenizer.encode_many(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_many([]) == []


def test_bos_only_where_the_tokenizer_adds_it(make_tokenizer: Make) -> None:
    plain, adding = make_tokenizer(), make_tokenizer(adds_bos=True)
    assert plain.bos_id == adding.bos_id
    assert (plain.prefix, adding.prefix) == ([], [adding.bos_id])
    assert adding.encode("this", special_tokens=True) == [adding.bos_id, *adding.encode("this")]
    assert adding.encode("this") == plain.encode("this")


def test_stop_ids_hold_every_end(model_folder: Path) -> None:
    (model_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5]}))
    tokenizer = load_tokenizer(model_folder)
    assert tokenizer.stop_ids == {0, 5, tokenizer.eos_id}
    assert tokenizer.pad_id == tokenizer.eos_id


def test_end_of_turn_is_the_templates(make_tokenizer: Make) -> None:
    for name in ("chatml", "tools", "trimmed", "thinking", "strict"):
        tokenizer = make_tokenizer(name)
        assert tokenizer.tokens([tokenizer.end_of_turn or 0]) == ["<|im_end|>"]
    assert make_tokenizer("endless").end_of_turn is None
    assert make_tokenizer("none").end_of_turn is None


def test_refused_conversation_says_why(make_tokenizer: Make) -> None:
    with pytest.raises(DataError, match="System role not supported"):
        make_tokenizer("strict").render([{"role": "system", "content": "x"}])
    with pytest.raises(ModelError, match="no chat template"):
        make_tokenizer("none").render(CHAT)


def test_folder_without_tokenizer(model_folder: Path) -> None:
    (model_folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer") as caught:
        load_tokenizer(model_folder)
    assert "tokenizer.json" in caught.value.hint


def test_truncated_tokenizer(model_folder: Path) -> None:
    path = model_folder / "tokenizer.json"
    path.write_text(path.read_text()[:500])
    with pytest.raises(ModelError, match=r"tokenizer\.json is not JSON"):
        load_tokenizer(model_folder)


def test_tokenizer_of_another_kind_of_json(model_folder: Path) -> None:
    (model_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError):
        load_tokenizer(model_folder)


def test_more_tokens_than_embedding_rows(model_folder: Path) -> None:
    (model_folder / "config.json").write_text(json.dumps({"vocab_size": 100}))
    with pytest.raises(ModelError, match=r"needs \d+ embedding rows.*has 100"):
        load_tokenizer(model_folder)


@pytest.mark.model
def test_smollm2(smollm2: Tokenizer) -> None:
    assert smollm2.tokens(sorted(smollm2.stop_ids)) == ["<|im_end|>"]
    assert smollm2.pad_id == smollm2.eos_id
    assert smollm2.vocab_size == 49152
    text = smollm2.decode(smollm2.render(CHAT, generation_prompt=True))
    assert text.endswith("again<|im_end|>\n<|im_start|>assistant\n")
