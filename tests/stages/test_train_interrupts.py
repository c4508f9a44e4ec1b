"""Signals are noted inside the block, a later one stops at once; then all is as before."""

import os
import signal
import threading

import pytest

from pippin.errors import Interrupted
from pippin.stages import interrupts
from pippin.stages.interrupts import watching


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted(number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in interrupts.SIGNALS]
    with watching() as watch:
        assert not watch.asked
        os.kill(os.getpid(), number)
        assert watch.asked
        os.kill(os.getpid(), number)  # a double click
    assert [signal.getsignal(each) for each in interrupts.SIGNALS] == before


def test_a_second_one_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "GRACE", 0.0)
    before = signal.getsignal(signal.SIGINT)
    with watching():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted, match="stopped at once") as caught:
            os.kill(os.getpid(), signal.SIGINT)
    assert caught.value.exit_code == 130
    assert signal.getsignal(signal.SIGINT) == before


def test_a_thread_watches_nothing() -> None:
    found = []

    def work() -> None:
        with watching() as watch:
            found.append(watch.asked)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]
    assert signal.getsignal(signal.SIGINT) == before
