"""Runs an engine's probes in a process of its own, as a broken backend may end its process.

`python -m pippin.check.child REQUEST` with a JSON request; prints one JSON object a line.
"""

import importlib
import json
import os
import sys
from typing import Any, TextIO, cast

from pippin.check import Shapes, Suite
from pippin.check.judge import finding, judge
from pippin.errors import PippinError


def main() -> None:
    """Send each probe as failed before it runs, then its finding: the parent sees who ended us."""
    request, out = json.loads(sys.argv[1]), _own_stdout()
    suite = cast("Suite", importlib.import_module(request["module"]))
    try:
        probes = suite.probes(request["device"], Shapes(**request["shapes"]))
        where = suite.describe(request["device"])
    except PippinError as error:
        _say(out, {"error": [error.message, error.hint]})
        return
    _say(out, {"count": len(probes), "where": where})
    for probe in probes[request["first"] :]:
        _say(out, {"started": finding(probe, "wrong").as_json()})
        _say(out, {"finding": judge(probe).as_json()})


def _own_stdout() -> TextIO:
    """Our answers go to the real stdout; what libraries print there joins stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _say(out: TextIO, message: dict[str, Any]) -> None:
    out.write(json.dumps(message) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
