"""What ExecuTorch's C++ side says is passed on, but for one line."""

import io
import logging
import os
import sys

from pippin.targets.native_log import without_harmless_lines


def test_only_the_harmless_line_is_dropped(capfd):
    with without_harmless_lines():
        os.write(2, b"[x.h:91] No temp allocator provided\nsomething broke\nhalf a line")
    os.write(2, b" after\n")
    assert capfd.readouterr().err == "something broke\nhalf a line after\n"


def test_an_error_inside_keeps_its_words(capfd):
    try:
        with without_harmless_lines():
            os.write(2, b"why\n")
            raise RuntimeError
    except RuntimeError:
        pass
    assert capfd.readouterr().err == "why\n"


def test_what_libraries_say_while_they_load_is_dropped(capfd):
    with without_harmless_lines():
        os.write(
            2, b"Failed to load x/torchao/_C_mxfp8.so: no\n[cpuinfo_utils.cpp:71] Reading\nkept\n"
        )
    assert capfd.readouterr().err == "kept\n"


def test_words_sent_through_python_are_held_too(capfd, monkeypatch):
    bar = io.StringIO()
    monkeypatch.setattr(sys, "stderr", bar)
    with without_harmless_lines():
        kept = logging.StreamHandler().stream  # a handler keeps the sys.stderr of this moment
        sys.stderr.write("[cpuinfo_utils.cpp:71]")
        sys.stderr.write(" Reading\nkept\n")
    assert sys.stderr is bar
    assert bar.getvalue() == ""
    assert capfd.readouterr().err == "kept\n"
    kept.write("later")
    assert bar.getvalue() == "later"
