"""The README of a Hugging Face bundle."""

from typing import Any

from pippin.targets.guide import Guide


def guide(description: dict[str, Any]) -> Guide:
    """How to run the folder with transformers and vLLM."""
    check, packed = description["check"], description["packed"]
    needs = "transformers compressed-tensors" if packed else "transformers"
    form = (
        f"{packed} linears are packed as compressed-tensors, {description['expanded']} quantized "
        "tensors are dense."
        if packed
        else "All weights are dense, with the values the quantized model has, rounded to its dtype."
    )
    return Guide(
        title="A language model in Hugging Face's format",
        about=f"{form} Loaded by transformers and compared with its quantized parent: KL "
        f"divergence {check['mean_kl']:.2g} nats a token, the likeliest token the same at "
        f"{check['top1']:.1%} of positions.",
        run=f"""
## Run it

```sh
pip install {needs}
```

```python
from transformers import pipeline

chat = pipeline("text-generation", model=".")
print(chat([{{"role": "user", "content": "What is gravity?"}}], max_new_tokens=64))
```

On a GPU, vLLM multiplies the packed codes as they are: `vllm serve .`
""",
    )
