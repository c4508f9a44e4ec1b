"""The README of an ExecuTorch bundle, and what other delegates' say alike."""

from typing import Any

from pippin.targets.guide import Guide


def guide(description: dict[str, Any]) -> Guide:
    """How to run the .pte on a desk and in an app."""
    check, version = description["check"], description["versions"]["executorch"]
    return Guide(
        title="A language model for ExecuTorch",
        about="`model.pte` runs on a phone's CPU (Android and iOS, XNNPACK). In ExecuTorch's own "
        f"runtime it {differs(check)} XNNPACK rounds what goes into a matrix to 8 bits: from the "
        "input that the file gives a layer, PyTorch, rounding alike, gets the file's results to "
        f"{check['layers']['max_difference']:.2g} of a token's largest, in every layer "
        f"({check['layers']['explained']:.1%} of tokens and layers; the others are a code apart).",
        run=f"""
## On your desk

```sh
pip install executorch=={version}
```

```python
import executorch.extension.llm.custom_ops.custom_ops
import executorch.kernels.quantized
from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

runner = TextLLMRunner("model.pte", "tokenizer.json")
config = GenerationConfig(max_new_tokens=64, temperature=0.0, echo=False, num_bos=0)
runner.generate("The capital of France is", config, token_callback=print)
```

## In an app

Build ExecuTorch {version} with `EXECUTORCH_BUILD_XNNPACK`, `EXECUTORCH_BUILD_KERNELS_LLM`,
`EXECUTORCH_BUILD_KERNELS_QUANTIZED` and `EXECUTORCH_BUILD_EXTENSION_LLM_RUNNER` on, then run its
text model runner:

```sh
llama_main --model_path=model.pte --tokenizer_path=tokenizer.json --temperature=0 \\
    --prompt="The capital of France is"
```

On Android use `org.pytorch.executorch.extension.llm.LlmModule`, in Swift the `TextRunner` of
`ExecuTorchLLM`; both take the two paths. The runner hands out the text of the token that ends an
answer: strip it.
""",
    )


def differs(check: dict[str, Any]) -> str:
    """The end of a sentence: how far a file is from the quantized model."""
    return (
        f"differs from the quantized model by a KL divergence of {check['mean_kl']:.2g} nats a "
        f"token, the likeliest token the same at {check['top1']:.1%} of positions."
    )


def on_apple(version: str, delegate: str) -> str:
    """Sections: the program, step by step, in the wheel's own runtime, and in an app."""
    return f"""\
## On a Mac

```sh
pip install executorch=={version}
```

```python
import torch
from executorch.runtime import Runtime

forward = Runtime.get().load_program("model.pte").load_method("forward")
ids, position = [1, 2, 3], 0
for _ in range(16):
    (logits,) = forward.execute((torch.tensor([ids]), torch.tensor([position])))
    ids, position = [int(logits.argmax())], position + len(ids)
    print(ids[0])
```

## In an app

Build ExecuTorch {version} with `EXECUTORCH_BUILD_{delegate}` and
`EXECUTORCH_BUILD_EXTENSION_LLM_RUNNER` on, and give `TextRunner` of `ExecuTorchLLM` the paths of
`model.pte` and `tokenizer.json`. The runner hands out the text of the token that ends an answer:
strip it.
"""
