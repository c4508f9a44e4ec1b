"""The tokenizer under GGUF's keys, as llama.cpp rebuilds it.

llama.cpp knows two kinds: byte-level pairs (`gpt2`), whose regular expressions it has by name, and
pieces with scores (`llama`, SentencePiece). A tokenizer that is neither is an error.
"""

import json
from pathlib import Path
from typing import Any

import gguf

from pippin.errors import ModelError
from pippin.model.tokenizer import Tokenizer

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The steps that cut a text before pairs are merged -> llama.cpp's name for them.
_CUTS: dict[tuple[str, ...], str] = {
    ("ByteLevel with regex",): "gpt-2",
    ("Digits", "ByteLevel with regex"): "smollm",
    (_WORDS % "{1,3}", "ByteLevel"): "llama-bpe",
    (_WORDS % "", "ByteLevel"): "qwen2",
}


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Tokenizer, rows: int) -> None:
    """Tokens, merges or scores, special ids and the chat template; `rows` of the embedding.

    Raises ModelError for a tokenizer that llama.cpp cannot rebuild.
    """
    folder = tokenizer.folder
    found = _read_json(folder)
    model = found["model"]
    if model["type"] != "BPE":
        raise _strange(folder, f"is a {model['type']} model")
    added = {token["id"]: token for token in found["added_tokens"]}
    tokens = {i: text for text, i in model["vocab"].items()}
    tokens |= {i: token["content"] for i, token in added.items()}
    listed = [tokens.get(i, f"[PAD{i}]") for i in range(rows)]
    types = [_type(i, tokens, added) for i in range(rows)]
    pieces = bool(model["byte_fallback"])
    if pieces:
        _add_pieces(writer, found, listed, types)
    else:
        _add_pairs(writer, folder, found)
    writer.add_token_list(listed)
    writer.add_token_types(types)
    _add_special(writer, tokenizer)


def _add_pairs(writer: gguf.GGUFWriter, folder: Path, found: dict[str, Any]) -> None:
    steps = tuple(_cut(step) for step in _steps(found["pre_tokenizer"], "pretokenizers"))
    if steps not in _CUTS:
        raise _strange(folder, f"cuts text by {' and '.join(steps) or 'nothing'}")
    if not found["model"]["merges"]:
        raise _strange(folder, "merges no pairs")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_CUTS[steps])
    writer.add_token_merges([" ".join(_pair(merge)) for merge in found["model"]["merges"]])


def _add_pieces(
    writer: gguf.GGUFWriter, found: dict[str, Any], tokens: list[str], types: list[int]
) -> None:
    """Pieces merge in the order of their scores: the rank of the first merge that makes one."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(found["model"]["merges"]):
        ranks.setdefault("".join(_pair(merge)), rank)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([-float(ranks.get(token, len(ranks))) for token in tokens])
    writer.add_add_space_prefix(_prefixes_space(found))
    unknown = found["model"].get("unk_token")
    for i, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[i] = int(gguf.TokenType.BYTE)
        elif token == unknown:
            types[i] = int(gguf.TokenType.UNKNOWN)


def _prefixes_space(found: dict[str, Any]) -> bool:
    steps = _steps(found["normalizer"], "normalizers")
    cuts = _steps(found["pre_tokenizer"], "pretokenizers")
    return any(step["type"] == "Prepend" for step in steps) or any(
        step["type"] == "Metaspace" and step.get("prepend_scheme") != "never" for step in cuts
    )


def _add_special(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    if tokenizer.bos_id is not None:
        writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_pad_token_id(tokenizer.pad_id)
    if tokenizer.end_of_turn is not None:
        writer.add_eot_token_id(tokenizer.end_of_turn)
    writer.add_add_bos_token(tokenizer.prefix == [tokenizer.bos_id])
    writer.add_add_eos_token(False)
    if tokenizer.has_template:
        writer.add_chat_template(tokenizer.template())


def _read_json(folder: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    # Not the file: a SentencePiece model has none before it is converted.
    backend: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return json.loads(backend.backend_tokenizer.to_str())


def _type(token: int, tokens: dict[int, str], added: dict[int, Any]) -> int:
    if token not in tokens:
        return int(gguf.TokenType.UNUSED)
    if token not in added:
        return int(gguf.TokenType.NORMAL)
    special = added[token]["special"]
    return int(gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED)


def _steps(step: dict[str, Any] | None, parts: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    return step[parts] if step["type"] == "Sequence" else [step]


def _cut(step: dict[str, Any]) -> str:
    if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
        return "ByteLevel with regex" if step["use_regex"] else "ByteLevel"
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return step["pattern"].get("Regex", "a string")
    if step["type"] == "Digits" and step["individual_digits"]:
        return "Digits"
    return f"{step['type']} in another form"


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _strange(folder: Path, what: str) -> ModelError:
    return ModelError(
        f"gguf: the tokenizer in {folder} {what}, which llama.cpp has no name for",
        "deploy to another target",
    )
