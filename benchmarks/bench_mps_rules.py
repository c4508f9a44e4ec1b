"""mps-rules-agreement: MPS's rules against what PyTorch's own tests of MPS expect.

Both are judged on the sample inputs of PyTorch's operator database. The expectations are lists in
torch/testing/_internal/common_mps.py, read as text since that file runs on a Mac only.
"""

import ast
import collections
import contextlib
import itertools
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.testing import _internal
from torch.utils._pytree import tree_leaves, tree_map

from common import Row, arguments, report
from pippin.engines.torch.mps.rules import Rules, make_rules
from pippin.engines.torch.mps.simulator import Simulator

LISTS = ("UNIMPLEMENTED_XFAILLIST", "UNDEFINED_XFAILLIST", "ON_MPS_XFAILLIST", "SKIPLIST")
SAMPLES = 80
# Operator, whether the tests expect it to fail, whether the rules do, and what they saw.
Judged = tuple[str, bool, bool, str]
ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)
# Operators on which the two differ, and why. Any other difference is a fault of the rules.
CPU = "runs on the CPU by itself: the tests compare numbers, the rules ask where"
EXPLAINED: dict[str, str] = {
    "linalg.pinv": f"{CPU}; its code in C++ makes a helper in float64 unless the device is MPS",
    "linalg.pinvsingular": f"{CPU}; its code in C++ makes a helper in float64 unless on MPS",
    "linalg.svd": CPU,
    "nn.functional.batch_norm": "a false alarm on an empty batch: a CPU sums it in float64",
    "nn.functional.embedding": f"{CPU} (embedding_renorm_, with max_norm)",
    "nn.functional.embedding_bag": f"{CPU} (embedding_renorm_, with max_norm)",
    "pinverse": f"{CPU}; its code in C++ makes a helper in float64 unless the device is MPS",
    "svd": CPU,
}


def main() -> None:
    """Print the row; the differences go to stderr."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--dtype", default="float32")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    counts: collections.Counter[str] = collections.Counter()
    unexplained = []
    for name, wanted, found, why in judge_all(getattr(torch, asked.dtype)):
        counts["agree" if wanted == found else "missed" if wanted else "extra"] += 1
        if wanted != found:
            reason = EXPLAINED.get(name)
            unexplained += [] if reason else [name]
            print(f"{name}: expected {wanted}, judged {found}: {reason or why}", file=sys.stderr)
    total = sum(counts.values())
    notes = {"dtype": asked.dtype, "operators": total, **counts, "unexplained": unexplained}
    share = counts["agree"] / total
    row = Row(name="mps-rules-agreement", value=share, unit="share", better="higher", notes=notes)
    report([row], asked.save)


def judge_all(
    dtype: torch.dtype, part: slice = slice(None)
) -> Iterator[tuple[str, bool, bool, str]]:
    """(operator, whether the tests expect it to fail, whether the rules do, what they saw)."""
    from torch.testing._internal.common_methods_invocations import op_db

    lists, rules = expectations(), make_rules()
    for operator in op_db[part]:
        key = operator.name + operator.variant_test_name
        if dtype not in operator.supported_dtypes("mps"):
            continue
        if any(listed(lists[name], key, dtype) for name in LISTS[1:]):
            continue  # fails for other reasons, or is not run
        if has_own(operator):
            continue
        wanted = listed(lists["UNIMPLEMENTED_XFAILLIST"], key, dtype)
        samples = list(usable(operator, dtype))
        if samples:
            seen = judge(operator, samples, rules)
            yield key, wanted, bool(seen), seen


def has_own(operator: Any) -> bool:
    """Whether its entry skips tests on MPS or expects their failure itself."""
    from torch.testing._internal.common_device_type import precisionOverride, toleranceOverride

    tolerances = (precisionOverride, toleranceOverride)
    own = [d for d in operator.decorators if getattr(d, "device_type", None) == "mps"]
    return any(not isinstance(each, tolerances) for d in own for each in d.decorators)


def usable(operator: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Its samples, but those that ask for a dtype MPS never has."""
    for sample in itertools.islice(operator.sample_inputs("cpu", dtype), SAMPLES):
        values = [v for v in tree_leaves((sample.args, sample.kwargs)) if not torch.is_tensor(v)]
        if not any(value in (torch.float64, torch.complex128) for value in values):
            yield sample


def judge(operator: Any, samples: list[Any], rules: Rules) -> str:
    """What the rules object to on the samples; empty for nothing."""
    seen: set[str] = set()
    for sample in samples:
        with Simulator(rules) as simulated:
            inputs = simulated.put((sample.input, list(sample.args), sample.kwargs))
            first, args, kwargs = tree_map(lambda x: "mps" if is_cpu(x) else x, inputs)
            # What goes wrong on the CPU is not MPS's; what was judged before counts.
            with contextlib.suppress(*ERRORS):
                operator(first, *args, **kwargs)
        seen |= {f"{o.verdict.kind} {o.operator}" for o in simulated.report.offences()}
    return ", ".join(sorted(seen))


def is_cpu(value: Any) -> bool:
    """Whether a sample asks for the CPU by name."""
    return isinstance(value, str | torch.device) and str(value) == "cpu"


def expectations() -> dict[str, dict[str, Any]]:
    """The lists of `mps_ops_modifier` by name: operator -> dtypes that fail, None for all."""
    source = (Path(next(iter(_internal.__path__))) / "common_mps.py").read_text()
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    body = next(f.body for f in functions if f.name == "mps_ops_modifier")
    found: dict[str, dict[str, Any]] = {}
    for node in body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        target = node.targets[0] if isinstance(node, ast.Assign) else target
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id in LISTS and isinstance(value, ast.Dict):
            code = compile(ast.Expression(value), "common_mps", "eval")
            found[target.id] = eval(code, {"torch": torch})
    return {name: found.get(name, {}) for name in LISTS}


def listed(entries: dict[str, Any], key: str, dtype: torch.dtype) -> bool:
    """Whether the list names the operator for this dtype."""
    return key in entries and (entries[key] is None or dtype in entries[key])


if __name__ == "__main__":
    main()
