"""device-probes: how many probes `pippin check` runs on this device, and in how many seconds."""

import collections
import time

from common import Row, arguments, report
from pippin.check import Finding
from pippin.check.runner import Begun, Checkup


def main() -> None:
    """Run them all; print the row."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--engine", default="torch")
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args()
    start = time.perf_counter()
    told = list(Checkup(engine=asked.engine, device=asked.device).run())
    seconds = time.perf_counter() - start
    where = next(each.where for each in told if isinstance(each, Begun))
    findings = [each for each in told if isinstance(each, Finding)]
    verdicts = collections.Counter(found.verdict for found in findings)
    slowest = max(findings, key=lambda found: found.seconds)
    notes = {"where": where, "seconds": round(seconds, 1), "verdicts": dict(verdicts)}
    notes["slowest"] = f"{slowest.probe}, {slowest.seconds} s"
    row = Row(
        name="device-probes", value=len(findings), unit="probes", better="higher", notes=notes
    )
    report([row], asked.save)


if __name__ == "__main__":
    main()
