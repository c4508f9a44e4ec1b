"""The README of an MLX bundle."""

from typing import Any

from pippin.targets.guide import Guide


def guide(description: dict[str, Any]) -> Guide:
    """How to run the folder with mlx-lm and in an app."""
    check = description["check"]
    return Guide(
        title="A language model for MLX",
        about="This folder runs on Apple silicon with mlx-lm. Loaded by mlx-lm and compared with "
        f"its quantized parent in PyTorch: KL divergence {check['mean_kl']:.2g} nats a token, the "
        f"likeliest token the same at {check['top1']:.1%} of positions, "
        f"{check['greedy_equal']} of {check['greedy_tokens']} greedy tokens equal.",
        run="""
## On your desk

```sh
pip install mlx-lm
mlx_lm.generate --model . --temp 0 --prompt "What is gravity?"
mlx_lm.server --model .
```

## In an app

Add the Swift package https://github.com/ml-explore/mlx-swift-lm, put this folder into the app's
resources and open it by path:

```swift
let folder = Bundle.main.resourceURL!.appending(path: "model")
let container = try await LLMModelFactory.shared.loadContainer(
    configuration: ModelConfiguration(directory: folder))
```
""",
    )
