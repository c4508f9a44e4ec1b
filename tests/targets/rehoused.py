"""Makes other real models of a Llama: its weights in the houses of other architectures.

    python -m tests.targets.rehoused qwen2 LLAMA_FOLDER NEW_FOLDER

A house computes what the Llama computes, since what it has beside it is neutral: `qwen2` biases of
0 on queries, keys and values, `mistral` a sliding window longer than the text, `untied` a head of
its own. `tune` then trains Qwen 2's biases and all norms on Shakespeare (recipes/data), so that no
bias is 0 and the predictions are the new model's own; the matrices stay as they are.

Shape letters: B batch (1), T tokens.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

TEXT = Path(__file__).parents[2] / "recipes/data/shakespeare/train.txt"
STEPS, LENGTH, LEARNING_RATE = 24, 256, 2e-3
WINDOW = 128
# The architecture of each house, and what its config says beside the Llama's.
HOUSES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "untied": ("llama", {"tie_word_embeddings": False}),
}
# Settings that a house takes over from the Llama.
_KEPT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def rehouse(llama: PreTrainedModel, house: str) -> PreTrainedModel:
    """A new network of the house, in float32, that computes what the Llama does."""
    kind, extra = HOUSES[house]
    kept = {name: getattr(llama.config, name) for name in _KEPT}
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **kept | extra)).float()
    state = llama.state_dict()
    added = {n: torch.zeros_like(p) for n, p in network.state_dict().items() if n not in state}
    network.load_state_dict(state | added)
    return network.eval()


def tune(network: PreTrainedModel, ids: list[int], steps: int = STEPS) -> list[float]:
    """Train every bias and norm on rows of LENGTH tokens in turn; the losses, in nats a token."""
    trained = [
        p.requires_grad_() for p in network.requires_grad_(False).parameters() if p.dim() < 2
    ]
    optimizer, losses = torch.optim.Adam(trained, LEARNING_RATE), []
    for step in range(steps):
        row_BT = torch.tensor([ids[step * LENGTH : (step + 1) * LENGTH]])
        loss = network(row_BT, labels=row_BT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(house: str, source: str, folder: str) -> None:
    """Write the house's model in bfloat16, with the Llama's tokenizer; Qwen 2 is tuned."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    network = rehouse(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), house)
    if house == "qwen2":
        losses = tune(network, tokenizer(TEXT.read_text()[:40_000]).input_ids)
        print("losses", " ".join(f"{loss:.3f}" for loss in losses))
    network.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
