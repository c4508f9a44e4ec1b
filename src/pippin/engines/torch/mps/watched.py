"""One program under the rules: what it did, as plain data; its own errors are told, not raised."""

from collections.abc import Callable

import torch

from pippin.check.audits import Ask, Audited, Trouble
from pippin.check.judge import REFUSALS
from pippin.engines.torch.mps.apart import is_real
from pippin.engines.torch.mps.observer import Observer
from pippin.engines.torch.mps.rules import Rules
from pippin.engines.torch.mps.simulator import Simulator
from pippin.engines.torch.mps.verdicts import MpsOffence, Offence
from pippin.errors import PippinError


def watch(subject: str, program: str, rules: Rules, ask: Ask, run: Callable[[], object]) -> Audited:
    """Run it on the device, or a simulated one. Raises MpsOffence where `ask.strict`."""
    device, error = (Observer if is_real(ask) else Simulator)(rules, strict=ask.strict), ""
    with torch.random.fork_rng([]), device:
        torch.manual_seed(0)
        try:
            run()
        except MpsOffence:
            raise
        except (*REFUSALS, PippinError) as fault:
            error = f"{type(fault).__name__}: {str(fault).strip().partition(chr(10))[0]}"
    report = device.report
    return Audited(
        subject=subject,
        program=program,
        operators=len(report.operators),
        calls=report.calls,
        fails=tuple(map(_trouble, report.offences())),
        known_wrong=tuple(map(_trouble, report.known_wrong())),
        error=error,
    )


def _trouble(offence: Offence) -> Trouble:
    return Trouble(
        kind=offence.verdict.kind,
        operator=offence.operator,
        dtypes=offence.dtypes,
        where=offence.where,
        count=offence.count,
        why=offence.verdict.why,
        remedy=offence.verdict.remedy,
    )
