"""A model under MPS's rules: the engine's own LoRA step, generation and evaluation at full width.

Random numbers stand for the weights, and one layer of each kind for all: the operators, dtypes and
shapes are those of the whole model. Shape letters: B rows, T tokens, N outputs, K inputs.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pippin.check.audits import Ask, Audited
from pippin.data.batches import Batch
from pippin.engines import Sampling
from pippin.engines.torch.engine import TorchModel
from pippin.engines.torch.mps.apart import apart, chip_here, is_real
from pippin.engines.torch.mps.rules import make_rules
from pippin.engines.torch.mps.watched import watch
from pippin.errors import ModelError
from pippin.model.adapter import new_adapter
from pippin.recipe import Lora, Train

GROUP = 32
PROMPTS = (5, 11)


def audit_model(folder: Path, ask: Ask) -> Iterator[Audited]:
    """Every program of the model in `folder`, whose config.json alone is read."""
    config = _few_layers(folder)
    for name in PROGRAMS:
        if is_real(ask):
            yield from apart(folder.resolve().name, name, _program, folder, name, config, ask)
        else:
            yield from _program(folder, name, config, ask)


def _program(folder: Path, name: str, config: Any, ask: Ask) -> list[Audited]:
    rules = make_rules(ask.version, ask.chip or chip_here())
    subject = folder.resolve().name
    return [watch(subject, name, rules, ask, lambda: PROGRAMS[name](config, ask))]


def _few_layers(folder: Path) -> Any:
    """The config with one layer of each kind."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(
            f"{folder}: transformers cannot read its config.json", "give a model folder"
        ) from error
    text = config.get_text_config()
    kinds = list(dict.fromkeys(getattr(text, "layer_types", None) or ()))
    if kinds:
        text.layer_types = kinds
    text.num_hidden_layers = max(len(kinds), 1)
    for name in ("quantization", "quantization_config"):
        config.__dict__.pop(name, None)
    return config


def _network(config: Any) -> PreTrainedModel:
    network = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.bfloat16)
    return network.to("mps").eval().requires_grad_(False)


def _lora_step(config: Any, ask: Ask) -> None:
    """Two updates: the second adds no operator to the first but the optimizer's state."""
    network = _network(config)
    head = network.get_output_embeddings()
    linears = {
        name: (module.in_features, module.out_features)
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    lora = Lora(rank=8, dropout=0.05)
    train = Train(row_tokens=ask.tokens, gradient_checkpointing=True)
    first = new_adapter(linears, lora, 0)
    trainer = TorchModel(network, Path()).trainer(train, lora, first, 0)
    for _ in range(2):
        trainer.step([_batch(config, ask.tokens)], 1e-3)
    trainer.state()


def _generation(config: Any, ask: Ask) -> None:
    served = TorchModel(_network(config), Path())
    prompts = [_tokens(config, count)[0] for count in PROMPTS]
    for temperature in (0.0, 0.8):
        sampling = Sampling(max_tokens=4, temperature=temperature, top_p=0.9)
        list(served.generate(prompts, sampling))


def _evaluation(config: Any, ask: Ask) -> None:
    """Scores, and distributions against a parent's."""
    scored = TorchModel(_network(config), Path())
    tokens_BT = _tokens(config, 48)
    scored.logprobs(tokens_BT)
    parent = scored.topk(tokens_BT, 16)
    scored.topk(tokens_BT, 16, parent.ids_BTK)


def _quantized(config: Any, ask: Ask) -> None:
    """Products with int4 and int8 weights in the sizes of the model's linears."""
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)
    sizes = {tuple(m.weight.shape) for m in network.modules() if isinstance(m, nn.Linear)}
    for n, k in sorted(sizes):
        x = torch.zeros(3, k, dtype=torch.bfloat16, device="mps")
        codes = torch.zeros(n, k, dtype=torch.int8, device="mps")
        scales = torch.ones(n, dtype=torch.bfloat16, device="mps")
        torch._weight_int8pack_mm(x, codes, scales)
        if k % GROUP == 0:
            nibbles = torch.zeros(n, k // 2, dtype=torch.uint8, device="mps")
            packed = torch._convert_weight_to_int4pack(nibbles, 8)
            pairs = torch.zeros(k // GROUP, n, 2, dtype=torch.bfloat16, device="mps")
            torch._weight_int4pack_mm(x, packed, GROUP, pairs)


PROGRAMS: dict[str, Callable[[Any, Ask], None]] = {
    "LoRA step": _lora_step,
    "generation": _generation,
    "evaluation": _evaluation,
    "quantized products": _quantized,
}


def _tokens(config: Any, count: int) -> np.ndarray:
    vocab = config.get_text_config().vocab_size
    return np.random.default_rng(0).integers(0, vocab, (1, count)).astype(np.int32)


def _batch(config: Any, count: int) -> Batch:
    """One row of two samples."""
    cut = count // 3
    positions = np.concatenate([np.arange(cut), np.arange(count - cut)])[None].astype(np.int32)
    return Batch(
        tokens_BT=_tokens(config, count),
        positions_BT=positions,
        segments_BT=np.repeat([1, 2], [cut, count - cut])[None].astype(np.int32),
        scored_BT=positions > 0,
    )
