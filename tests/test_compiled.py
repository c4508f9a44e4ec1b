"""Functions in C++: compiled once, kept whole or not at all."""

from pathlib import Path

import pytest

from pippin import compiled
from pippin.compiled import Compiled


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """One function, and a cache of its own."""
    path = tmp_path / "one.cpp"
    path.write_text('extern "C" int one() { return 1; }')
    monkeypatch.setenv("PIPPIN_CACHE", str(tmp_path / "cache"))
    made = Compiled(source=path, flags="", signatures={})
    if made.missing:
        pytest.skip(made.missing)
    return Compiled(source=path, flags="-g0", signatures={})


def _kept(program: Compiled) -> list[Path]:
    return list((program.source.parent / "cache").iterdir())


def test_a_library_is_kept_where_that_can_be_written(program: Compiled) -> None:
    before = _kept(program)
    assert program.library.one() == 1
    assert len(_kept(program)) == len(before) + 1
    assert program.compile(program.source / "closed.so").one() == 1
    assert len(_kept(program)) == len(before) + 1


def test_a_library_has_its_name_only_when_it_is_on_the_disk(
    program: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _kept(program)

    def refused(path: Path) -> None:
        assert path.read_bytes()
        assert path.name not in [kept.name for kept in _kept(program)]
        raise OSError("the disk has gone")

    monkeypatch.setattr(compiled.disk, "sync_path", refused)
    assert program.library.one() == 1
    assert _kept(program) == before


def test_a_failed_compilation_is_told_and_leaves_nothing(program: Compiled) -> None:
    before = _kept(program)
    program.source.write_text("no program")
    assert "g++ does not compile them" in str(program.missing)
    assert _kept(program) == before
