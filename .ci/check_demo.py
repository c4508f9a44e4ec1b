"""Fail when a finished demo does not show what the README claims of it."""

import json
import sys
from pathlib import Path


def scores(run: Path, subject: str) -> dict:
    return json.loads((run / f"evaluate-{subject}" / "scores.json").read_text())


def check_sql(run: Path) -> list[str]:
    base, adapter, merged, quantized = (
        scores(run, s) for s in ("base", "adapter", "merged", "quantized")
    )
    files = [scores(run, f"deployed-{target}") for target in ("executorch", "gguf", "coreai")]
    claims = {
        "the base answers nothing": base["exact_match"] <= 0.05,
        "the tuned model answers": adapter["exact_match"] >= 0.15,
        "tuning lowers the loss": adapter["loss"] < 0.6 * base["loss"],
        "merged equals the adapter": merged["kl"] < 0.01 and merged["top1"] > 0.97,
        "4 bits keep the gain": quantized["gain_kept"] > 0.8,
        "each file equals the quantized model": all(
            file["kl"] < 0.1 and file["top1"] > 0.9 for file in files
        ),
        "each file answers": all(file["answered"] > 0 and file["answers"] for file in files),
        "each file is small": all(file["size_bytes"] < 0.55 * base["size_bytes"] for file in files),
        "the report is there": (run / "report.html").stat().st_size > 10_000,
    }
    return [claim for claim, holds in claims.items() if not holds]


def check_shakespeare(run: Path) -> list[str]:
    base, adapter, quantized = (scores(run, s) for s in ("base", "adapter", "quantized"))
    claims = {
        "tuning lowers the loss": adapter["loss"] < base["loss"] - 0.2,
        "8 bits keep the gain": quantized["gain_kept"] > 0.95,
        "the answer changed": base["answers"] != adapter["answers"],
    }
    return [claim for claim, holds in claims.items() if not holds]


def main() -> int:
    broken = check_sql(Path(sys.argv[1])) + check_shakespeare(Path(sys.argv[2]))
    for claim in broken:
        print(f"demo: not true: {claim}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
