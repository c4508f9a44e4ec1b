"""The README of a GGUF bundle."""

from typing import Any

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
        "them, into the same tokens.",
        run=f"""
## On your desk

```sh
llama-cli -m model.gguf -c {context} --temp 0 --jinja -p "What is gravity?"
```

The file has the chat template, `--jinja` uses it. For Ollama, put this into a `Modelfile`:

```
FROM ./model.gguf
PARAMETER num_ctx {context}
PARAMETER temperature 0
```

```sh
ollama create mine -f Modelfile && ollama run mine "What is gravity?"
```

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
