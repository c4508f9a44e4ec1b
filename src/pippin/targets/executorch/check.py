"""Proves a .pte stretch by stretch against the same quantized program in PyTorch.

Activations are rounded to int8 in front of every linear, so a difference in a sum's last bit can
move a code by a step, and each step moves others: logits of a deep model do not tell a right file
from a wrong one. A stretch between two caches does. The runtime records what the file gave to each
stretch and got from it; PyTorch computes the stretch, and the attention before it, from the same
input. Where a token's results are not the file's, some activation lay on the border between two
codes: then noise of float32's own size in front of the rounding gives the file's in some draw. Of
several such activations in one token all have to fall right, which draws may miss: a few tokens of
a stretch may stay a code apart. A fault in the file is in most of them.

Shape letters: B batch (1), T tokens, H heads, K kv heads, C head channels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from pippin.errors import PippinError
from pippin.targets.decoder import Weights
from pippin.targets.executorch.parts import XnnpackParts
from pippin.targets.executorch.recording import Call, record
from pippin.targets.executorch.stretches import cut

# What a token's results may differ by, relative to the largest of them.
LIMIT = 1e-4
# How many of a stretch's tokens may differ by more, of so many one, and by how much: by codes.
MISSED, CODES = 10, 0.05
# Relative size of the noise, a few of float32's last bits, and how often it is drawn.
NOISE, DRAWS = 1e-6, 64
_TINY = 1e-30
_OWN_BYTES = 8 << 20  # of the record, beside tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Over all tokens of all prompts; differences are relative to the largest of a token's results.

    `max_difference` is that of the stretches, `between_difference` of what lies before and between
    them, vectors of tokens, rotations and attention. Of results, stretch by stretch and token by
    token, `determined` is the share that were the file's without noise, and `explained` with it;
    `max_difference` speaks of these.
    """

    prompts: int
    tokens: int
    stretches: int
    max_difference: float
    between_difference: float
    determined: float
    explained: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """One stretch over some tokens: what came before it by PyTorch, what the file gave, results."""

    part: nn.Module
    wanted: list[Tensor]
    given: list[Tensor]
    results: list[Tensor]


def prove(path: Path, weights: Weights, prompts: Sequence[Sequence[int]]) -> Figures:
    """Run prompts, the last token by itself, and hold every stretch of the file to PyTorch's.

    Raises PippinError, with figures, where one computes something else.
    """
    between, plain = [], []
    parts: list[list[Tensor]] = [[] for _ in range(weights.shape.num_layers + 1)]
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)  # a file has the same figures every time
        for prompt in prompts:
            for step, settled in zip(_steps(path, weights, prompt), parts, strict=True):
                between.append(_difference(step.wanted, step.given))
                plain.append(_difference(step.part(*step.given), step.results))
                settled.append(_settled(weights, step, plain[-1]))
    of_stretch = [torch.cat(settled) for settled in parts]
    _refuse(of_stretch, torch.cat(between))
    results = torch.cat(of_stretch)
    explained = results <= LIMIT
    return Figures(
        prompts=len(prompts),
        tokens=sum(map(len, prompts)),
        stretches=len(of_stretch),
        max_difference=float(results[explained].max()),
        between_difference=float(torch.cat(between).max()),
        determined=float((torch.cat(plain) <= LIMIT).float().mean()),
        explained=float(explained.float().mean()),
    )


def _refuse(of_stretch: Sequence[Tensor], between: Tensor) -> None:
    """Written so that a figure that is not a number fails."""
    missed = [int((~(settled <= LIMIT)).sum()) for settled in of_stretch]
    many = [
        f"{count} of {len(settled)} tokens of stretch {number}"
        for number, (count, settled) in enumerate(zip(missed, of_stretch, strict=True))
        if count > max(1, len(settled) // MISSED)
    ]
    largest = max(float(settled.max()) for settled in of_stretch)
    if many or not largest <= CODES or not float(between.max()) <= LIMIT:
        raise PippinError(
            "executorch: the .pte does not compute what its program does: of a token's largest "
            f"result a stretch differs by {largest:.3g}, what lies between stretches by "
            f"{float(between.max()):.3g}; more than {LIMIT:g}: {', '.join(many[:3]) or 'one'}",
            "use the versions of executorch and torch that pippin names",
        )


def _steps(path: Path, weights: Weights, prompt: Sequence[int]) -> Iterator[_Step]:
    x_BTD, where = weights.entry(torch.tensor([list(prompt)]), torch.tensor([0]))
    wanted, last = [x_BTD, *where[0][0]], weights.shape.num_layers
    found = _recorded(path, weights, prompt, x_BTD.shape[2])
    for number, (part, tensors) in enumerate(zip(cut(weights), found, strict=True)):
        # The last stretch has the last token of each call alone.
        wanted = [tensor[:, -tensors[0].shape[1] :] for tensor in wanted]
        given, results = tensors[: len(wanted)], tensors[len(wanted) :]
        yield _Step(part=part, wanted=wanted, given=given, results=results)
        if number == last:
            return
        x_BTD, heads = (results[0], results[1:]) if number else (given[0], results)
        mixed_BTHC = _attended(heads, weights.shape.windows[number], weights.shape.attention_scale)
        wanted = [x_BTD, mixed_BTHC, *(where[number + 1][0] if number + 1 < last else ())]


def _recorded(
    path: Path, weights: Weights, prompt: Sequence[int], width: int
) -> list[list[Tensor]]:
    """Of every stretch its tensors over all tokens, (1, T, ..)."""
    shape = weights.shape
    calls: list[Call] = [(prompt[:-1], 0), (prompt[-1:], len(prompt) - 1)]
    channels = (3 * shape.num_heads + 2 * shape.num_kv_heads + 2) * shape.head_dim
    a_token = 4 * shape.num_layers * (2 * width + channels)
    room = 2 * len(prompt) * a_token + 16 * shape.vocab_size + _OWN_BYTES
    runs = record(path, calls[len(prompt) == 1 :], room)
    return [
        [torch.cat(parts, 1) for parts in zip(*of_runs, strict=True)]
        for of_runs in zip(*runs, strict=True)
    ]


def _attended(heads: Sequence[Tensor], window: int | None, scale: float) -> Tensor:
    """(B, T, H, C) of queries (B, T, H, C), keys and values (B, T, K, C), causal."""
    back_TT = torch.arange(heads[0].shape[1])[:, None] - torch.arange(heads[0].shape[1])
    seen_TT = (back_TT >= 0) & (back_TT < (window or len(back_TT)))
    mixed_BHTC = nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in heads), attn_mask=seen_TT, scale=scale, enable_gqa=True
    )
    return mixed_BHTC.transpose(1, 2)


def _difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor:
    """The largest difference of each token, (T,), relative to the largest value of its tensor."""
    of_tensors = []
    for a, b in zip(found, expected, strict=True):
        largest_T = b.abs().flatten(2).amax(2)[0].clamp(min=_TINY)
        of_tensors.append((a.view(b.shape) - b).abs().flatten(2).amax(2)[0] / largest_T)
    return torch.stack(of_tensors).amax(0)


def _settled(weights: Weights, step: _Step, plain_T: Tensor) -> Tensor:
    """The same differences, of the nearest draw where there is one without noise."""
    (open_U,) = (~(plain_T <= LIMIT)).nonzero(as_tuple=True)
    if not len(open_U):
        return plain_T
    given, results = (
        [tensor[:, open_U].repeat_interleave(DRAWS, 1) for tensor in tensors]
        for tensors in (step.given, step.results)
    )
    parts = weights.parts
    assert isinstance(parts, XnnpackParts)
    parts.noise = NOISE
    drawn_U = _difference(step.part(*given), results).view(-1, DRAWS).amin(1)
    parts.noise = 0.0
    return plain_T.index_copy(0, open_U, drawn_U)
