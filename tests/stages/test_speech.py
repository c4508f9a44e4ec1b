"""Streamed text is whole characters and, joined, the decoded answer; histories fit their room."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from pippin.errors import DataError
from pippin.stages.speech import Detokenizer, fit_messages

TEXTS = [
    "plain words, and  two spaces",
    "naïve café — “quotes”",
    "你好,世界!这是一个测试。",
    "مرحبا بالعالم",
    "😀👩‍👩‍👧‍👦🇫🇷 flags and families",
    "नमस्ते e\u0301 \u200b end",
    "a\ufffdb",
]


class Words:
    """A tokenizer as pippin's are, over one of the tokenizers library."""

    def __init__(self, backend):
        self.backend = backend

    def decode(self, ids, skip_special=False):
        return self.backend.decode(list(ids), skip_special_tokens=skip_special)


def byte_level():
    """Every byte a token: the hardest splits there are, as GPT-2's family may give them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def sentence_piece():
    """Llama's way: spaces as marks, unknown characters as bytes, the first space dropped."""
    pieces = ["<unk>", *[f"<0x{b:02X}>" for b in range(256)], "▁", "a", "e", "n", "s", "▁a", "an"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "n")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return backend


BACKENDS = {"byte_level": byte_level(), "sentence_piece": sentence_piece()}


def stream(backend, ids):
    pieces = Detokenizer(Words(backend))
    return [*(pieces.add(token) for token in ids), pieces.end()]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_never_break_a_character(name, text):
    backend = BACKENDS[name]
    pieces = stream(backend, backend.encode(text).ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("name", BACKENDS)
def test_text_comes_as_it_is_made(name):
    backend = BACKENDS[name]
    pieces = stream(backend, backend.encode("你好 sense").ids)
    assert sum(bool(piece) for piece in pieces) > 4
    assert pieces[2].strip() in ("你", "")


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text(name, text):
    backend = BACKENDS[name]
    ids = backend.encode(text).ids
    assert "".join(stream(backend, ids)) == backend.decode(ids).rstrip("\ufffd")


def test_a_character_cut_off_at_the_end_is_left_out():
    ids = byte_level().encode("ok 😀").ids
    assert "".join(stream(byte_level(), ids[:-1])) == "ok "


def test_broken_bytes_in_the_middle_are_shown_not_held_back():
    backend = byte_level()
    ids = [*backend.encode("a😀").ids[:-1], *backend.encode("bc").ids]
    assert "".join(stream(backend, ids)) == backend.decode(ids)


def turns(*roles):
    return [{"role": role, "content": f"{role}{i}"} for i, role in enumerate(roles)]


def ten_each(messages):
    return 10 * len(messages)


def test_oldest_exchanges_go_first_and_the_system_turn_stays():
    messages = turns("system", "user", "assistant", "user", "assistant", "user")
    assert fit_messages(messages, ten_each, 60) == messages
    assert fit_messages(messages, ten_each, 59) == [messages[0], *messages[3:]]
    assert fit_messages(messages, ten_each, 25) == [messages[0], messages[5]]


def test_what_is_kept_begins_with_a_user_even_after_tool_turns():
    messages = turns("user", "assistant", "tool", "assistant", "user")
    assert fit_messages(messages, ten_each, 40) == messages[4:]


def test_a_last_turn_that_does_not_fit_is_an_error_with_both_numbers():
    with pytest.raises(DataError, match="20 tokens long, there is room for 15"):
        fit_messages(turns("system", "user", "assistant", "user"), ten_each, 15)
