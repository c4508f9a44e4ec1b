"""The README of a Core AI bundle."""

from typing import Any

from pippin.targets.guide import Guide


def guide(description: dict[str, Any]) -> Guide:
    """How to run the .aimodel on a desk and in an app."""
    check, versions = description["check"], description["versions"]
    return Guide(
        title="A language model for Core AI",
        about="`model.aimodel` runs on iOS and macOS 27 and newer, its KV cache a state of the "
        "model. Run in Core AI's own runtime and compared with its quantized parent in PyTorch: KL "
        f"divergence {check['mean_kl']:.2g} nats a token, the likeliest token the same at "
        f"{check['top1']:.1%} of positions, {check['greedy_equal']} of {check['greedy_tokens']} "
        "greedy tokens equal.",
        run=f"""
The function `main` takes int32 `tokens` (1, T), `input_pos` (1) and `wanted` (N), and gives
`logits` (1, N, vocabulary). `input_pos` is the position of the first token given: 0 for a prompt,
then one more with each token. `wanted` says after which of the given tokens logits are asked for:
[T - 1] for the last alone. Its states are the key and value caches of every layer.

## On your desk

```sh
pip install coreai-core=={versions.get("coreai-core", "1.0.0b3")}
```

```python
import asyncio
import numpy as np
from coreai.authoring.asset import AIModelAsset
from coreai.runtime import NDArray

async def answer(prompt_ids, count):
    async with AIModelAsset.load("model.aimodel").executable() as model:
        main = model.load_function("main")
        shapes = {{name: main.desc.state_descriptor(name).shape for name in main.desc.state_names}}
        state = {{name: NDArray(np.zeros(tuple(s), np.float32)) for name, s in shapes.items()}}
        ids, position = prompt_ids, 0
        for _ in range(count):
            inputs = {{"tokens": NDArray(np.array([ids], np.int32)),
                      "input_pos": NDArray(np.array([position], np.int32)),
                      "wanted": NDArray(np.array([len(ids) - 1], np.int32))}}
            logits = (await main(inputs=inputs, state=state))["logits"].numpy()
            ids, position = [int(logits.argmax())], position + len(ids)
            yield ids[0]
```

On Linux loading compiles the model for the CPU, which can take a minute; a phone does it once.

## In an app

Put `model.aimodel` into the app's resources and load it with the Core AI framework; keep the states
of `main` for as long as a conversation lasts, and start a new one at `input_pos` 0. Use the
Swift package https://github.com/huggingface/swift-transformers for the tokenizer and the template.
""",
    )
