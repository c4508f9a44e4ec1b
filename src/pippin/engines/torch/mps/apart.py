"""Whether the device itself is here to ask; a process for each program, as a kernel may end it."""

import multiprocessing
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from pippin.check.audits import Ask, Audited
from pippin.machine import chip_name


def is_real(ask: Ask) -> bool:
    """On a Mac its own GPU answers, unless another chip or another PyTorch was asked for."""
    return torch.backends.mps.is_available() and ask.version is None and ask.chip is None


def chip_here() -> str | None:
    """`m2` of `Apple M2 Pro`; None for another name."""
    found = re.match(r"apple (m\d+)", chip_name().lower())
    return found[1] if found else None


def apart(
    subject: str, program: str, run: Callable[..., list[Audited]], *args: Any
) -> list[Audited]:
    """What `run(*args)` returns in a process of its own; one that dies is an error in the report.

    Raises what `run` raises: MpsOffence in strict mode.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        try:
            return pool.submit(run, *args).result()
        except BrokenProcessPool:
            died = "it ended its process: a kernel of the GPU aborted, or memory ran out"
            return [Audited.failed(subject, program, died)]
