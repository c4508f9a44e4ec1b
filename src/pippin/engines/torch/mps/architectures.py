"""The most used architectures under MPS's rules: forward in two dtypes, training, generation."""

import gc
import tomllib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_map

from pippin.check.audits import Ask, Audited
from pippin.engines.torch.mps.apart import apart, chip_here, is_real
from pippin.engines.torch.mps.inputs import FORWARD_ONLY, GENERATING, MAKERS
from pippin.engines.torch.mps.rules import Rules, make_rules
from pippin.engines.torch.mps.tags import tensors
from pippin.engines.torch.mps.watched import watch

PROGRAMS = ("float32", "bfloat16", "training", "generation")


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One entry of architectures.toml."""

    name: str
    kind: str
    inputs: str
    settings: dict[str, Any]

    def network(self) -> Any:
        """A random model in float32."""
        kind = getattr(transformers, self.kind)
        return kind(kind.config_class(**self.settings))

    def programs(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """What is run, by name."""
        yield "float32", lambda: _forward(self, torch.float32)
        yield "bfloat16", lambda: _forward(self, torch.bfloat16)
        if self.inputs not in FORWARD_ONLY:
            yield "training", lambda: _training(self)
        if self.inputs in GENERATING:
            yield "generation", lambda: _generation(self)


def load_architectures() -> list[Architecture]:
    """Every entry, in the file's order."""
    text = resources.files("pippin.engines.torch.mps").joinpath("architectures.toml").read_text()
    tables = tomllib.loads(text)
    return [_entry(name, dict(entry), tables["shapes"]) for name, entry in tables["models"].items()]


def _entry(name: str, entry: dict[str, Any], shapes: dict[str, Any]) -> Architecture:
    kind, shape, inputs = (entry.pop(key) for key in ("class", "shape", "inputs"))
    settings = {**shapes[shape], **entry}
    return Architecture(name=name, kind=kind, inputs=inputs, settings=settings)


def audit_all(ask: Ask) -> Iterator[Audited]:
    """Every program of every architecture."""
    for architecture in load_architectures():
        if is_real(ask):
            yield from apart(architecture.name, "all programs", _programs, architecture, ask)
        else:
            yield from _programs(architecture, ask)


def _programs(architecture: Architecture, ask: Ask) -> list[Audited]:
    rules = make_rules(ask.version, ask.chip or chip_here())
    return list(audit_one(architecture, rules, ask))


def audit_one(architecture: Architecture, rules: Rules, ask: Ask) -> Iterator[Audited]:
    """Every program of one architecture."""
    for program, run in architecture.programs():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the libraries' own, on settings of toy size
            yield watch(architecture.name, program, rules, ask, run)
        gc.collect()


def _on_mps(architecture: Architecture, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    network = architecture.network().to(dtype).to("mps")

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return (x.to(dtype) if x.is_floating_point() else x).to("mps")

    return network, tree_map(move, MAKERS[architecture.inputs]())


@torch.no_grad()
def _forward(architecture: Architecture, dtype: torch.dtype) -> None:
    network, inputs = _on_mps(architecture, dtype)
    inputs.pop("labels", None)
    network.eval()(**inputs, **_decoded(architecture, dtype))


def _decoded(architecture: Architecture, dtype: torch.dtype) -> dict[str, Any]:
    """Without labels an encoder-decoder wants its decoder's inputs."""
    if architecture.inputs == "speakers":
        return {"decoder_input_values": torch.zeros(2, 5, 16, device="mps").to(dtype)}
    if architecture.inputs not in ("seq2seq", "spectrogram"):
        return {}
    return {"decoder_input_ids": torch.full((2, 4), 3, device="mps")}


def _training(architecture: Architecture) -> None:
    network, inputs = _on_mps(architecture, torch.float32)
    out = network.train()(**inputs)
    loss = getattr(out, "loss", None)
    if loss is None:
        floats = [x for x in tensors(dict(out)) if x.requires_grad and x.is_floating_point()]
        loss = torch.stack([x.float().mean() for x in floats]).sum()
    loss.backward()
    adam = torch.optim.AdamW(network.parameters(), lr=1e-4)
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    adam.step()
    loss.item()


@torch.no_grad()
def _generation(architecture: Architecture) -> None:
    network, inputs = _on_mps(architecture, torch.float32)
    inputs.pop("labels", None)
    network.eval().generate(**inputs, max_new_tokens=4, do_sample=True, pad_token_id=0)
