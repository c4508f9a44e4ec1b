"""The README of a bundle: how a phone developer runs the file."""

from typing import Any

_GUIDE = """\
# A language model for ExecuTorch

`model.pte` runs on a phone's CPU (Android and iOS, XNNPACK). It holds {context} tokens: prompt and
answer together. It was checked against its quantized parent in PyTorch: KL divergence
{mean_kl:.2g} nats a token, the likeliest token the same at {top1:.1%} of positions.

| file | what it is |
|---|---|
| model.pte | weights and program, {megabytes:.0f} MB |
| tokenizer.json | the tokenizer; the runner reads it as it is |
| chat_template.jinja | how a conversation becomes text, where the model has one |
| deploy.json | stop ids, digests, versions, what runs in XNNPACK, the check's figures |

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
`ExecuTorchLLM`; both take the two paths. Render a conversation with the chat template first: the
runner takes text. It stops at the ids {stop_ids} and hands out their text: strip it.
"""


def guide(description: dict[str, Any]) -> str:
    """The text, from what deploy.json says."""
    return _GUIDE.format(
        context=description["context"],
        megabytes=description["size_bytes"] / 1e6,
        version=description["versions"]["executorch"],
        stop_ids=description["stop_ids"],
        mean_kl=description["check"]["mean_kl"],
        top1=description["check"]["top1"],
    )
