"""Probes of a small network of the planned head width: logits, gradients, decoding, one update.

Shape letters: B rows, T tokens, V vocabulary.
"""

import copy
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from pippin.check import Case
from pippin.check.families import Family, Single
from pippin.data.batches import Batch
from pippin.engines import Sampling
from pippin.engines.torch.body import cache_argument
from pippin.engines.torch.generate import generate
from pippin.engines.torch.names import lora_parameters
from pippin.engines.torch.probes.attention import AROUND
from pippin.engines.torch.probes.bench import Bench, gap
from pippin.engines.torch.recomputed import checkpoint_activations
from pippin.engines.torch.trainer import TorchTrainer
from pippin.recipe import Lora, Train

VOCAB, TOKENS = 199, 48


def logits(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """The network's logits."""
    network, reference = _pair(bench, dtype)
    with torch.no_grad():
        out = network(input_ids=_tokens(bench), use_cache=False).logits
        wanted = reference(input_ids=_tokens(), use_cache=False).logits
    yield f"{TOKENS} tokens", gap(out, wanted)


def gradients(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """The gradient of every weight, plain and with checkpointed activations."""
    network, reference = _pair(bench, dtype)
    wanted = _gradients(reference, _tokens())
    for name, ours in _gradients(network, _tokens(bench)).items():
        yield name, gap(ours, wanted[name])
    checkpoint_activations(network)
    for name, ours in _gradients(network.train(), _tokens(bench)).items():
        yield f"{name}, checkpointed", gap(ours, wanted[name])


def decoding(bench: Bench, dtype: torch.dtype) -> Iterator[Case]:
    """Logits token by token through a KV cache are those of all tokens at once."""
    network, reference = _pair(bench, dtype)
    tokens_BT, cache, name = _tokens(bench), None, cache_argument(network)
    with torch.no_grad():
        wanted = reference(input_ids=_tokens(), use_cache=False).logits
        for place in range(TOKENS):
            part = tokens_BT[:, place : place + 1]
            extra = {} if cache is None else {name: cache}
            out = network(input_ids=part, use_cache=True, **extra)
            cache = out[name]
            yield f"token {place}", gap(out.logits[:, 0], wanted[:, place])


def greedy(bench: Bench) -> Iterator[Case]:
    """Prompts of different lengths decoded together give the tokens that each gives alone."""
    network, reference = _pair(bench, torch.float32)
    prompts = [_tokens()[0, :n].numpy().astype(np.int32) for n in (3, 17, 9)]
    sampling = Sampling(max_tokens=6)
    ours = list(generate(network, prompts, sampling))
    for row, prompt in enumerate(prompts):
        wanted = [step[0] for step in generate(reference, [prompt], sampling)]
        same = [step[row] for step in ours] == wanted
        yield f"prompt of {len(prompt)} tokens", 0.0 if same else float("inf")


def update(bench: Bench) -> Iterator[Case]:
    """Two of the engine's own LoRA updates: each tensor as in float64 on the CPU."""
    network, reference = _pair(bench, torch.float32)
    ours, wanted = (_trained(each) for each in (network, reference))
    for name, tensor in ours.items():
        yield name, gap(torch.from_numpy(tensor), torch.from_numpy(wanted[name]))


def _trained(network: PreTrainedModel) -> dict[str, np.ndarray]:
    lora = Lora(rank=2, alpha=4.0, targets=("q_proj", "v_proj", "down_proj"))
    train = Train(row_tokens=TOKENS, batch_rows=1, packing=True)
    trainer = TorchTrainer(
        network, lora_parameters(network, lora, _adapter(network, lora)), train, 0
    )
    for _ in range(2):
        trainer.step([_batch()], 1e-2)
    return trainer.weights()


def _adapter(network: PreTrainedModel, lora: Lora) -> dict[str, np.ndarray]:
    rng, weights = np.random.default_rng(0), {}
    for name, module in network.named_modules():
        if name.rpartition(".")[2] in lora.targets:
            rows, columns = module.weight.shape
            a, b = rng.standard_normal((2, columns)), rng.standard_normal((rows, 2))
            weights[f"{name}.lora_A.weight"] = a.astype(np.float32) * 0.1
            weights[f"{name}.lora_B.weight"] = b.astype(np.float32) * 0.1
    return weights


def _batch() -> Batch:
    """One row of two samples."""
    cut = TOKENS // 3
    positions = np.concatenate([np.arange(cut), np.arange(TOKENS - cut)])
    return Batch(
        tokens_BT=_tokens()[:1].numpy().astype(np.int32),
        positions_BT=positions[None].astype(np.int32),
        segments_BT=np.repeat([1, 2], [cut, TOKENS - cut])[None].astype(np.int32),
        scored_BT=(positions > 0)[None],
    )


def _pair(bench: Bench, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The network on the device, and the same weights in float64 on the CPU."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=bench.shapes.head_dim,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        network = LlamaForCausalLM(config).to(dtype).eval()
    reference = copy.deepcopy(network).to(torch.float64)
    return network.to(bench.device), reference


def _tokens(bench: Bench | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(0, VOCAB, (2, TOKENS), generator=generator)
    return tokens_BT if bench is None else bench.put(tokens_BT)


def _gradients(network: PreTrainedModel, tokens_BT: Tensor) -> dict[str, Tensor]:
    network.zero_grad()
    out = network(input_ids=tokens_BT, use_cache=False).logits
    weights = torch.linspace(-1, 1, out.shape[-1], device=out.device, dtype=out.dtype)
    (out * weights).mean().backward()
    return {n: p.grad for n, p in network.named_parameters() if p.grad is not None}


FAMILIES = (
    Family(name="network.logits", measure=logits),
    Family(name="network.gradients", measure=gradients, dtypes=("float32", "bfloat16")),
    Family(name="network.decoding", measure=decoding, remedy=AROUND, avoid="attention"),
    Single(name="network.greedy", measure=greedy, remedy=AROUND, avoid="attention"),
    Single(name="network.update", measure=update, tolerance=1e-3),
)
