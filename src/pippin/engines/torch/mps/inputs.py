"""Inputs of the tiny architectures: one maker for each kind, two samples unless a model wants one.

Shape letters: B samples, T tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Inputs = dict[str, Any]
WORDS, IMAGE_WORD = 120, 122


def _tokens(length: int = 12, rows: int = 2) -> Tensor:
    return torch.randint(3, WORDS, (rows, length))


def _text(length: int = 12) -> Inputs:
    """Tokens, the second sample padded, every token a label."""
    tokens_BT = _tokens(length)
    mask_BT = torch.ones_like(tokens_BT)
    mask_BT[1, -3:] = 0
    return {"input_ids": tokens_BT, "attention_mask": mask_BT, "labels": tokens_BT.clone()}


def _classes() -> Inputs:
    return {**_text(), "labels": torch.tensor([0, 1])}


def _seq2seq() -> Inputs:
    return {**_text(), "attention_mask": torch.ones(2, 12, dtype=torch.long), "labels": _tokens(8)}


def _picture(size: int = 32, rows: int = 2) -> Inputs:
    return {"pixel_values": torch.randn(rows, 3, size, size)}


def _image(size: int = 32) -> Inputs:
    return {**_picture(size), "labels": torch.tensor([0, 1])}


def _segments() -> Inputs:
    return {**_picture(), "labels": torch.randint(0, 3, (2, 32, 32))}


def _boxes() -> Inputs:
    boxes = torch.tensor([[0.5, 0.5, 0.2, 0.2], [0.3, 0.3, 0.1, 0.2]])
    return {**_picture(64, 1), "labels": [{"class_labels": torch.tensor([1, 0]), "boxes": boxes}]}


def _pairs() -> Inputs:
    return {**_picture(), "input_ids": _tokens(), "return_loss": True}


def _captions() -> Inputs:
    return {**_picture(), "input_ids": _tokens(), "labels": _tokens()}


def _points() -> Inputs:
    return {**_picture(64, 1), "input_points": torch.tensor([[[[10.0, 20.0]]]])}


def _letters() -> Inputs:
    return {"input_values": torch.randn(2, 1000), "labels": torch.randint(1, 30, (2, 6))}


def _sounds() -> Inputs:
    return {"input_values": torch.randn(2, 1000), "labels": torch.tensor([0, 1])}


def _frames() -> Inputs:
    return {"input_features": torch.randn(2, 40, 16), "labels": torch.randint(1, 30, (2, 6))}


def _spectrogram() -> Inputs:
    return {"input_features": torch.randn(2, 16, 40), "labels": _tokens(8)}


def _speakers() -> Inputs:
    spoken = {"labels": torch.randn(2, 10, 16), "speaker_embeddings": torch.randn(2, 8)}
    return {"input_ids": _tokens(), "attention_mask": torch.ones(2, 12, dtype=torch.long), **spoken}


def _audio_pairs() -> Inputs:
    return {**_pairs_of_text(), "input_features": torch.randn(2, 1, 32, 32)}


def _pairs_of_text() -> Inputs:
    return {"input_ids": _tokens(), "return_loss": True}


def _layout() -> Inputs:
    boxes = torch.randint(0, 100, (2, 12, 4)).sort(-1).values
    labels = torch.randint(0, 2, (2, 12))
    return {**_picture(), "input_ids": _tokens(), "bbox": boxes, "labels": labels}


def _image_text(count: int = 4) -> Inputs:
    """Text with `count` tokens that stand for the picture."""
    tokens_BT = _tokens()
    tokens_BT[:, 1 : 1 + count] = IMAGE_WORD
    mask = torch.ones_like(tokens_BT)
    text = {"input_ids": tokens_BT, "attention_mask": mask, "labels": tokens_BT.clone()}
    return {**_picture(), **text}


def _typed_image_text() -> Inputs:
    return {**_image_text(), "token_type_ids": torch.ones(2, 12, dtype=torch.long)}


def _tiles() -> Inputs:
    return {**_image_text(), "pixel_values": torch.randn(2, 1, 3, 32, 32)}


def _patches() -> Inputs:
    """One picture of 4 x 4 patches, which four tokens stand for."""
    tokens_BT = _tokens(12, 1)
    tokens_BT[0, 1], tokens_BT[0, 2:6] = IMAGE_WORD + 1, IMAGE_WORD
    return {
        "input_ids": tokens_BT,
        "attention_mask": torch.ones_like(tokens_BT),
        "labels": tokens_BT.clone(),
        "pixel_values": torch.randn(16, 3 * 2 * 16),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (tokens_BT == IMAGE_WORD).int(),
    }


def _series() -> Inputs:
    return {"past_values": torch.randn(2, 16, 2), "future_values": torch.randn(2, 4, 2)}


MAKERS: dict[str, Callable[[], Inputs]] = {
    "audio-pairs": _audio_pairs,
    "boxes": _boxes,
    "captions": _captions,
    "classes": _classes,
    "frames": _frames,
    "generates": _text,
    "image": _image,
    "image-48": lambda: _image(48),
    "image-text-4": _image_text,
    "layout": _layout,
    "letters": _letters,
    "pairs": _pairs,
    "patches": _patches,
    "phonemes": lambda: {"input_ids": torch.randint(1, 38, (1, 9))},
    "picture": lambda: _picture(rows=1),
    "picture-48": lambda: _picture(48, 1),
    "points": _points,
    "segments": _segments,
    "seq2seq": _seq2seq,
    "series": _series,
    "sounds": _sounds,
    "speakers": _speakers,
    "spectrogram": _spectrogram,
    "text": _text,
    "text-128": lambda: _text(128),
    "text-16": lambda: _text(16),
    "tiles": _tiles,
    "typed-image-text-4": _typed_image_text,
}
GENERATING = ("generates", "seq2seq", "spectrogram")
FORWARD_ONLY = ("phonemes",)
