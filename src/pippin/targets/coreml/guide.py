"""The README of a Core ML bundle."""

from typing import Any

from pippin.targets.guide import Guide


def guide(description: dict[str, Any]) -> Guide:
    """How to run the package in an app and on a Mac."""
    check = description["check"]
    return Guide(
        title="A language model for Core ML",
        about="`model.mlpackage` runs on iOS 18 and macOS 15 and newer, its KV cache as state. "
        f"Read back, its {description['stored']} quantized matrices have the quantized "
        "model's values; its program, run operator by operator in float16, differs from PyTorch by "
        f"a KL divergence of {check['mean_kl']:.2g} nats a token, the likeliest token the same at "
        f"{check['top1']:.1%} of positions. Core ML itself was not run: it needs a Mac or a phone.",
        run="""
The model takes `tokens` (1, T) and `input_pos` (1), int32, and gives the logits of the last token.
`input_pos` is the position of the first token given: 0 for a prompt, then one more with each token.

## On a Mac

```python
import coremltools
import numpy as np

model = coremltools.models.MLModel("model.mlpackage")
state, ids, position = model.make_state(), [1, 2, 3], 0
for _ in range(16):
    given = {"tokens": np.array([ids], np.int32), "input_pos": np.array([position], np.int32)}
    (logits,) = model.predict(given, state=state).values()
    ids, position = [int(logits.argmax())], position + len(ids)
    print(ids[0])
```

## In an app

Drag `model.mlpackage` into Xcode, which compiles it:

```swift
let model = try await MLModel.load(contentsOf: url, configuration: MLModelConfiguration())
let state = model.makeState()
let output = try await model.prediction(from: inputs, using: state)
```

Keep the state for as long as a conversation lasts. Use the Swift package
https://github.com/huggingface/swift-transformers for the tokenizer and the template.
""",
    )
