"""mlx-lm's code for an architecture compared with transformers' in float32, once per config.

A model of the same config with few layers, a small vocabulary and random weights goes through both.
What differs would compute other numbers without a word (a rope base that is not read, an attention
window that is left out), so it is refused, or limited to the lengths at which the two agree. What
was found is kept: the next run needs neither the time nor PyTorch. Where that is not installed and
nothing was kept, a run is told so, and a window is taken to be left out.
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import math
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pippin.caching import cache_folder, write_cached
from pippin.engines.mlx import load
from pippin.errors import ModelError
from pippin.model import config as configs
from pippin.model.config import read_raw, without_quantization

TOKENS = 24
WINDOW = 8
TOLERANCE = 1e-3  # of the largest logit; where the code agrees it is 2e-6, a wrong rope gives 1
LABELS = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures")
PACKAGES = ("mlx", "mlx-lm", "transformers")


def check(folder: Path) -> int | None:
    """The longest row that is computed as transformers computes it; None for any length.

    Raises ModelError where the two differ, or cannot be compared.
    """
    return _limit(_question(folder))[0]


def notice(folder: Path) -> str | None:
    """What a run is told where `check` had nothing to compare with."""
    window, compared = _limit(_question(folder))
    if compared:
        return None
    limit = f"; until then no row is longer than its attention window of {window} tokens"
    return (
        "mlx-lm's code for this model was not compared with transformers': PyTorch is not installed"
        " (pip install torch: a run then compares once, and the answer is kept)"
        + (limit if window else "")
    )


def _question(folder: Path) -> str:
    raw = without_quantization(read_raw(folder))
    if "text_config" in raw:  # whose sizes `shrunk` does not know
        raise ModelError(
            f"{folder}: the MLX engine takes text models, {raw.get('model_type')} has other towers",
            "set model.engine = torch",
        )
    plain = {key: value for key, value in raw.items() if key not in LABELS}
    return json.dumps(plain, sort_keys=True)


@functools.cache
def _limit(config: str) -> tuple[int | None, bool]:
    """The longest row, and whether there was something to compare with."""
    raw = json.loads(config)
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    if window and _difference(raw | {"sliding_window": WINDOW}, TOKENS) <= TOLERANCE:
        return None, True
    difference = _difference(raw, min(TOKENS, window or TOKENS))
    if difference > TOLERANCE:
        raise ModelError(
            f"mlx-lm computes {raw.get('model_type')} with this config.json differently than "
            f"transformers: logits off by {difference:.1%} of the largest",
            "set model.engine = torch",
        )
    return window, not math.isnan(difference)


def _difference(raw: dict[str, Any], tokens: int) -> float:
    """The largest difference of a logit, as a share of the largest logit; kept from run to run.

    Not a number where PyTorch is missing.
    """
    kept = _kept(json.dumps([raw, tokens], sort_keys=True))
    with contextlib.suppress(OSError, ValueError, KeyError):
        return json.loads(kept.read_text())["difference"]
    if importlib.util.find_spec("torch") is None:
        return math.nan
    from pippin.engines.mlx.parity_reference import difference

    found = difference(raw, tokens)
    write_cached(kept, json.dumps({"difference": found}))
    return found


def _kept(question: str) -> Path:
    """Where the answer lies: another answer may come of other versions, or other code of ours."""
    files = load.__file__, configs.__file__, Path(__file__).with_name("parity_reference.py")
    code = [Path(file).read_text() for file in files]
    text = json.dumps([question, *(version(name) for name in PACKAGES), *code])
    return cache_folder() / "mlx-parity" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
