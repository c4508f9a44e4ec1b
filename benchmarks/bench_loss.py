"""The loss layer on one CUDA device: memory and time beside full logits, forward and gradient.

8,192 tokens, 151,936 classes, 4,096 hidden channels, bfloat16, the head frozen. As in training, our
gradient takes the place of the hidden states.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import common

TOKENS, CLASSES, HIDDEN, REPEATS = 8192, 151936, 4096, 20


def main() -> None:
    """Measure ours, full logits, and the two products alone, which is the limit."""
    import torch

    options = common.arguments(__doc__ or "").parse_args()
    torch.manual_seed(0)
    fresh, ways = setting()
    wanted = ways["full logits"](fresh()).float()
    error = float((ways["ours"](fresh()) - wanted).norm() / wanted.norm())
    peaks = {name: gib(peak(ways[name], fresh())) for name in ("ours", "full logits")}
    times = dict(zip(ways, milliseconds(list(ways.values()), fresh), strict=True))
    memory = round(torch.cuda.get_device_properties(0).total_memory / 1e9)
    common.report(rows(peaks, times, error), options.save, (torch.cuda.get_device_name(), memory))


def setting() -> tuple[Callable[[], Any], dict[str, Callable[[Any], Any]]]:
    """What gives fresh hidden states, and what is done with them, by name."""
    import torch
    from torch.nn import functional

    from pippin.engines.torch.loss import Head, head_loss

    make = {"device": "cuda", "dtype": torch.bfloat16}
    given_SD = torch.randn(TOKENS, HIDDEN, **make)
    weight_VD = torch.randn(CLASSES, HIDDEN, **make) / HIDDEN**0.5
    targets_S = torch.randint(0, CLASSES, (TOKENS,), device="cuda")

    def fresh() -> Any:
        return given_SD.clone().requires_grad_()

    def ours(hidden_SD: Any) -> Any:
        loss = head_loss(hidden_SD, targets_S, Head(weight_VD=weight_VD), consume=True)
        return torch.autograd.grad(loss, hidden_SD)[0]

    def full(hidden_SD: Any) -> Any:
        logits_SV = hidden_SD @ weight_VD.T
        loss = functional.cross_entropy(logits_SV, targets_S, reduction="sum")
        return torch.autograd.grad(loss, hidden_SD)[0]

    def products(hidden_SD: Any) -> Any:
        with torch.no_grad():
            return (hidden_SD @ weight_VD.T) @ weight_VD

    return fresh, {"ours": ours, "full logits": full, "products alone": products}


def rows(peaks: dict[str, float], times: dict[str, float], error: float) -> list[common.Row]:
    """Memory and time; `error` is our gradient's, beside the full logits'."""
    limit = times["products alone"]
    return [
        common.Row(
            name="loss-layer-memory",
            value=peaks["ours"],
            unit="GiB beyond the inputs",
            better="lower",
            peers={"full logits": peaks["full logits"]},
            notes={"gradient differs by": round(error, 5)},
        ),
        common.Row(
            name="loss-layer-time",
            value=round(times["ours"], 2),
            unit="ms, forward and gradient",
            better="lower",
            limit=round(limit, 2),
            share_of_limit=round(limit / times["ours"], 3),
            peers={"full logits": round(times["full logits"], 2)},
        ),
    ]


def gib(count: int) -> float:
    """Bytes in GiB."""
    return round(count / 2**30, 3)


def peak(run: Callable[[Any], Any], hidden_SD: Any) -> int:
    """Bytes allocated at the most, beyond what was there before."""
    import torch

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(hidden_SD)
    return torch.cuda.max_memory_allocated() - before


def milliseconds(ways: Sequence[Callable[[Any], Any]], fresh: Callable[[], Any]) -> list[float]:
    """Medians. The ways take turns: each meets the card as warm, and as slow, as the others."""
    import torch

    times: list[list[float]] = []
    for _ in range(REPEATS + 2):
        times.append([])
        for run in ways:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            hidden_SD = fresh()
            start.record()
            run(hidden_SD)
            stop.record()
            torch.cuda.synchronize()
            times[-1].append(start.elapsed_time(stop))
    return [float(median) for median in np.median(times[2:], 0)]


if __name__ == "__main__":
    main()
