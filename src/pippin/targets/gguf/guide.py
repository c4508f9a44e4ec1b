"""The README of a GGUF bundle."""

from typing import Any

from pippin.targets.gguf import ollama
from pippin.targets.guide import Guide


def guide(description: dict[str, Any]) -> Guide:
    """How to run the file with llama.cpp, Ollama and in an app."""
    check, context = description["check"], description["context"]
    kinds = ", ".join(f"{count} {kind}" for kind, count in check["types"].items())
    return Guide(
        title="A language model for llama.cpp",
        about=f"`model.gguf` holds {kinds} tensors. Read back with the gguf package, every one of "
        f"its {check['equal_tensors']} tensors equals the quantized model's bit for bit, and "
        f"{check['tokenizer']} reads {check['equal_texts']} texts from it, special tokens among "
        f"them, into the same tokens.{_ran(check)}",
        run=f"""
## On your desk

```sh
llama-cli -m model.gguf -c {context} --temp 0 --jinja -p "What is gravity?"
```

The file has the chat template, `--jinja` uses it. {_ollama(description)}

LM Studio, Jan and koboldcpp open the file as it is.

## In an app

Add llama.cpp's `llama.xcframework` (its releases carry one) to an iOS project, or its Android
library; `examples/llama.swiftui` and `examples/llama.android` there load a file by path:

```swift
let path = Bundle.main.path(forResource: "model", ofType: "gguf")!
let context = try LlamaContext.create_context(path: path)
```
""",
    )


def _ran(check: dict[str, Any]) -> str:
    if "mean_kl" not in check:
        return ""
    return (
        " Run in llama.cpp, which rounds what goes into every matrix to 8 bits, its KL divergence "
        f"from the quantized model in PyTorch is {check['mean_kl']:.2g} nats a token, the "
        f"likeliest token the same at {check['top1']:.1%} of positions."
    )


def _ollama(description: dict[str, Any]) -> str:
    if ollama.FILE not in description["digests"]:
        return "Ollama runs no Jinja, and this template is beyond its own language."
    return """For Ollama the same template, the stop texts and the context are in `Modelfile`:

```sh
ollama create mine -f Modelfile && ollama run mine "What is gravity?"
```"""
