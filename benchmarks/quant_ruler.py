"""The reference model of the quantization benchmarks, and how far any weights are from it."""

import functools
import math
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pippin.engines import load_engine
from pippin.model import names
from pippin.model.config import read_config
from pippin.model.source import copy_side_files
from pippin.model.tokenizer import load_tokenizer
from pippin.model.weights import Checkpoint, Writer
from pippin.recipe import DeviceName
from quant_peers import Peer

LENGTH, SCORED = 256, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Nats a token, share of equal likeliest tokens, bits of all weights, CPU-seconds."""

    kl: float
    top1: float
    bits: float = 0.0
    seconds: float = 0.0
    notes: dict[str, Any] = field(default_factory=dict)


class Ruler:
    """The reference's distributions over the scored text; any weights are held against them."""

    def __init__(self, reference: Path, text: str, device: DeviceName) -> None:
        self.checkpoint, self.config = Checkpoint(reference), read_config(reference)
        self.network = load_engine("torch", device).load(reference, "bfloat16").network
        ids = load_tokenizer(reference).encode(text)
        starts = np.linspace(0, len(ids) - LENGTH, SCORED).astype(int)
        rows = [ids[start : start + LENGTH] for start in starts]
        self.rows = torch.tensor(rows, device=self.network.device)
        self.tokens = self.rows.numel()
        self.parent = [self.logprobs(row).half() for row in self.rows]
        said = [
            lp[:-1].float().gather(1, row[1:, None]).mean()
            for lp, row in zip(self.parent, self.rows, strict=True)
        ]
        self.perplexity = math.exp(-float(torch.stack(said).mean()))

    @torch.inference_mode()
    def logprobs(self, row: torch.Tensor) -> torch.Tensor:
        """(T, V) float32 of one sequence."""
        return self.network(row[None]).logits[0].float().log_softmax(-1)

    def measure(self, tensors: dict[str, np.ndarray]) -> Score:
        """KL and agreement of the network with these weights."""
        parameters = dict(self.network.named_parameters())
        for name, tensor in tensors.items():
            value = torch.from_numpy(np.asarray(tensor, np.float32))
            parameters[name].data.copy_(value)
        divergence, equal = 0.0, 0
        for row, parent in zip(self.rows, self.parent, strict=True):
            child, parent_TV = self.logprobs(row), parent.float()
            divergence += float((parent_TV.exp() * (parent_TV - child)).sum())
            equal += int((parent_TV.argmax(-1) == child.argmax(-1)).sum())
        return Score(kl=divergence / self.tokens, top1=equal / self.tokens)

    def peer(self, peer: Peer, moments: Path) -> Score:
        """Every matrix through another program's quantizer and back; X^T X by linear in a file."""
        file = np.load(moments)
        tensors, start = {}, time.process_time()
        for name, info in self.checkpoint.tensors.items():
            tensors[name] = self.checkpoint.read(name).astype(np.float32)
            if len(info.shape) == 2:
                embedding = names.is_embedding(names.module(name))
                module = "lm_head" if embedding else names.module(name)
                moment = functools.partial(file.__getitem__, module)
                tensors[name] = peer(tensors[name], 8 if embedding else 4, moment)
        return replace(self.measure(tensors), seconds=time.process_time() - start)


def dither(source: Path, target: Path) -> None:
    """Move every weight of a matrix by up to half a step of the 4-bit groups of 32 it lies on."""
    checkpoint, rng = Checkpoint(source), np.random.default_rng(0)
    target.mkdir()
    copy_side_files(source, target)
    shutil.copy(source / names.CONFIG, target)
    with Writer(target, checkpoint.tensors) as writer:
        for name, info in checkpoint.tensors.items():
            tensor = checkpoint.read(name)
            if len(info.shape) == 2:
                groups = tensor.astype(np.float32).reshape(info.shape[0], -1, 32)
                step = (groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)) / 15
                groups += (rng.random(groups.shape, np.float32) - 0.5) * step
                tensor = groups.reshape(info.shape).astype(info.dtype)
            writer.write(name, tensor)
