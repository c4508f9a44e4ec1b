"""How much memory PyTorch may take on MPS, set before it is imported: both limits, and consistent.

By itself PyTorch allows 1.7 times what Metal recommends, which is more than most machines have:
they swap or freeze before it stops. The ratios are of Metal's recommendation.
"""

from collections.abc import MutableMapping

from pippin.errors import UsageError

HIGH, LOW = "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO"
FALLBACK = "PYTORCH_ENABLE_MPS_FALLBACK"
# Up to Metal's own recommendation; from the lower mark on caches are given back.
HIGH_RATIO, LOW_RATIO = 1.0, 0.8
MOST = 1.3  # of the recommendation, at least 2/3 of memory: above lies what is not there


def set_watermarks(device: str, environment: MutableMapping[str, str]) -> tuple[str, ...]:
    """Set what is not set where `device` is mps; what was done, in words, to be printed.

    Raises UsageError for values that are no numbers, or of which PyTorch would refuse the pair.
    """
    if device != "mps":
        return ()
    high, low = _ratio(environment, HIGH), _ratio(environment, LOW)
    if high and low is not None and low > high:
        raise UsageError(
            f"{LOW}={low:g} is above {HIGH}={high:g}", "unset both: pippin sets them together"
        )
    if high is None:
        high = max(HIGH_RATIO, low or 0.0)
    if low is None:
        low = LOW_RATIO * high
    told = f"{HIGH}={high:g}, {LOW}={low:g}: of the GPU's recommended memory"
    environment[HIGH], environment[LOW] = f"{high:g}", f"{low:g}"
    if high == 0 or high > MOST:
        told += f"; nothing stops PyTorch before this machine swaps, unset {HIGH}"
    if environment.get(FALLBACK, "0") != "0":
        return (
            told,
            f"{FALLBACK} is set: what MPS lacks runs on the CPU, slowly; unset it to be told",
        )
    return (told,)


def _ratio(environment: MutableMapping[str, str], name: str) -> float | None:
    text = environment.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"{name}={text} is no ratio", f"unset {name}: pippin sets it")
    return value
