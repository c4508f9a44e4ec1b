"""Runs every probe of an engine in child processes; a crash or a hang becomes a finding."""

import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import IO, Any

from pippin.check import PROBES, Finding, Shapes
from pippin.errors import PippinError, UsageError

PATIENCE = 120.0  # seconds that one probe, or the start of a child, may take


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """The probes are known: how many, and on what."""

    where: str
    count: int


@dataclass(kw_only=True)
class Checkup:
    """One device under test."""

    engine: str
    device: str = "auto"
    shapes: Shapes = field(default_factory=Shapes)
    patience: float = field(default_factory=lambda: PATIENCE)

    def run(self) -> Iterator[Begun | Finding]:
        """Begun, then one finding a probe; UsageError for an engine or device that is not here."""
        if self.engine not in PROBES:
            raise UsageError(
                f"engine {self.engine} has no probes", f"engines with probes: {', '.join(PROBES)}"
            )
        done, count = 0, 1
        while done < count:
            for message in self._child(done):
                if isinstance(message, Begun):
                    count = message.count
                    if done == 0:
                        yield message
                else:
                    done += 1
                    yield message

    def _child(self, first: int) -> Iterator[Begun | Finding]:
        """What one child tells until it is done, dies, or says nothing for too long."""
        with tempfile.TemporaryFile("w+", errors="replace") as noise:
            child = self._start(first, noise)
            started: dict[str, Any] | None = None
            begun = False
            try:
                for message in _messages(child, self.patience):
                    if "error" in message:
                        raise UsageError(*message["error"])
                    if "count" in message:
                        begun = True
                        yield Begun(where=message["where"], count=message["count"])
                    started = message.get("started")
                    if "finding" in message:
                        yield _finding(message["finding"])
            finally:
                code = _stop(child)
            if started:
                yield replace(_finding(started), detail=_end(code, self.patience))
            elif not begun:
                raise _no_start(self.engine, _end(code, self.patience), noise)

    def _start(self, first: int, noise: IO[str]) -> subprocess.Popen[str]:
        request = {
            "module": PROBES[self.engine],
            "device": self.device,
            "shapes": asdict(self.shapes),
            "first": first,
        }
        command = [sys.executable, "-m", "pippin.check.child", json.dumps(request)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=noise, text=True)


def _messages(child: "subprocess.Popen[str]", patience: float) -> Iterator[dict[str, Any]]:
    """The child's lines; ends when it closes its output, or is silent for too long."""
    lines: queue.Queue[str] = queue.Queue()
    stdout = child.stdout
    assert stdout is not None

    def read() -> None:
        with stdout:
            for line in stdout:
                lines.put(line)
        lines.put("")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while line := lines.get(timeout=patience):
            yield json.loads(line)
    except queue.Empty:
        child.kill()
    finally:
        _stop(child)
        reader.join()


def _stop(child: "subprocess.Popen[str]") -> int:
    """Its exit code; one that is not about to leave is killed."""
    try:
        return child.wait(timeout=1)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _end(code: int, patience: float) -> str:
    if code == -signal.SIGKILL:
        return f"no answer in {patience:.0f} s, or out of memory; it was ended"
    if code < 0:
        return f"ended the process: {signal.Signals(-code).name}"
    return f"ended the process with code {code}"


def _finding(fields: dict[str, Any]) -> Finding:
    """What `Finding.as_json` wrote."""
    if isinstance(fields["figure"], str):
        fields["figure"] = float(fields["figure"])
    return Finding(**fields)


def _no_start(engine: str, end: str, noise: IO[str]) -> PippinError:
    noise.seek(0)
    last = next((line for line in reversed(noise.read().splitlines()) if line.strip()), end)
    return PippinError(
        f"engine {engine} does not start: {last.strip()}",
        f"install it anew: pip install --force-reinstall {engine}",
    )
