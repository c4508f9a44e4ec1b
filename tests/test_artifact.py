"""A stage's folder is the old one or the new one, whatever happens; foreign things are refused."""

import errno
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pippin import artifact, disk
from pippin.artifact import Origin
from pippin.errors import PippinError

NOBODY = 65534


def origin(stage: str = "train", **settings: Any) -> Origin:
    return Origin(
        stage=stage, inputs={"model": "m1"}, settings=settings, versions={"pippin": "0.1.0"}
    )


def write(folder: Path, text: str, **settings: Any) -> None:
    with artifact.writing(folder, origin(**settings), {"loss": 1.5}) as partial:
        (partial / "inner").mkdir()
        (partial / "a.txt").write_text(text)
        (partial / "inner" / "b.txt").write_text(text * 2)


def contents(folder: Path) -> str:
    texts = (folder / "a.txt").read_text(), (folder / "inner" / "b.txt").read_text()
    assert texts[1] == 2 * texts[0]
    assert artifact.read_manifest(folder)
    return texts[0]


def leftovers(folder: Path) -> list[str]:
    return [p.name for p in folder.parent.iterdir() if p.name != folder.name]


def in_child(work: Callable[[], object]) -> int:
    """The exit status of `work` in a fork: 0 well, 3 a PippinError, -9 killed."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except PippinError as error:
            os.write(2, f"{error.message} | {error.hint}\n".encode())
            status = 3
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_an_artifact_describes_its_files(tmp_path: Path) -> None:
    write(tmp_path / "train", "x", rank=8)
    manifest = json.loads((tmp_path / "train" / "manifest.json").read_text())
    assert manifest["settings"] == {"rank": 8}
    assert manifest["scores"] == {"loss": 1.5}
    sha = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"  # of "x"
    assert manifest["files"]["a.txt"] == {"bytes": 1, "sha256": sha}
    assert set(manifest["files"]) == {"a.txt", "inner/b.txt"}
    assert not leftovers(tmp_path / "train")


def test_an_error_leaves_the_old_folder(tmp_path: Path) -> None:
    write(tmp_path / "train", "old")
    with pytest.raises(TypeError), artifact.writing(tmp_path / "train", origin(), {}) as partial:
        (partial / "a.txt").write_bytes("no bytes")  # ty: ignore[invalid-argument-type]
    assert contents(tmp_path / "train") == "old"
    assert not leftovers(tmp_path / "train")


def kill_at(call: int) -> None:
    """Kill this process at its n-th access to the file system."""
    count = 0

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal count
        if event.startswith(("os.", "shutil.", "open", "fcntl.")):
            count += 1
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.parametrize("replaces", [True, False])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new(tmp_path: Path, replaces: bool) -> None:
    def killed(call: int) -> int:
        kill_at(call)
        write(folder, "new")
        return 0

    seen = set()
    for call in range(1, 200):
        folder = tmp_path / str(call) / "train"
        folder.parent.mkdir()
        if replaces:
            write(folder, "old")
        status = in_child(lambda call=call: killed(call))
        found = artifact.differences(folder, origin())
        assert found == ([] if replaces or found is not None else None)
        seen.add(contents(folder) if folder.exists() else "nothing")
        assert not leftovers(folder)
        write(folder, "next")
        assert contents(folder) == "next"
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert status == 0
    assert call > 20, "the child must be killed at many points before it gets through"
    assert seen == ({"old", "new"} if replaces else {"nothing", "new"})


def test_an_interrupt_between_the_renames_keeps_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "train", "old")
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if path.name == ".train.partial":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "train", "new")
    assert contents(tmp_path / "train") == "old"
    assert not leftovers(tmp_path / "train")


def test_a_finished_replacement_is_taken_up(tmp_path: Path) -> None:
    write(tmp_path / "train", "old")
    write(tmp_path / "next", "new")
    (tmp_path / "train").rename(tmp_path / ".train.old")
    (tmp_path / "next").rename(tmp_path / ".train.partial")
    disk.recover(tmp_path / "train")
    assert contents(tmp_path / "train") == "new"
    assert not leftovers(tmp_path / "train")


@pytest.mark.parametrize("manifest", [None, "{}", "[1]", "{broken", '{"name": "a web page"}'])
def test_a_foreign_folder_is_refused(tmp_path: Path, manifest: str | None) -> None:
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    if manifest:
        (folder / "manifest.json").write_text(manifest)
    with pytest.raises(PippinError, match="was not made by pippin"):
        write(folder, "x")
    assert (folder / "thesis.txt").read_text() == "mine"
    assert not leftovers(folder)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("mine")
    with pytest.raises(PippinError, match="was not made by pippin"):
        write(tmp_path / "train", "x")
    with pytest.raises(PippinError, match="in the way"):
        write(tmp_path / "train" / "deeper", "x")
    assert (tmp_path / "train").read_text() == "mine"


def test_a_file_that_somebody_added_is_not_thrown_away(tmp_path: Path) -> None:
    write(tmp_path / "train", "old")
    (tmp_path / "train" / "notes.txt").write_text("mine")
    with pytest.raises(PippinError, match=r"notes\.txt, which pippin did not make"):
        write(tmp_path / "train", "new")
    assert contents(tmp_path / "train") == "old"


def test_an_empty_or_hidden_only_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / ".DS_Store").write_text("the Finder's")
    write(tmp_path / "train", "x")
    assert contents(tmp_path / "train") == "x"


def test_a_link_to_another_disk_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "run").mkdir()
    write(tmp_path / "big" / "train", "old")
    (tmp_path / "run" / "train").symlink_to(tmp_path / "big" / "train")
    write(tmp_path / "run" / "train", "new")
    assert (tmp_path / "run" / "train").is_symlink()
    assert contents(tmp_path / "big" / "train") == "new"
    assert not leftovers(tmp_path / "run" / "train")


def test_nested_manifests_and_links_count_hidden_files_do_not(tmp_path: Path) -> None:
    (tmp_path / "blob").write_text("x")
    folder = tmp_path / "model"
    (folder / "package.mlpackage").mkdir(parents=True)
    (folder / ".cache").mkdir()
    (folder / "package.mlpackage" / "manifest.json").write_text("{}")
    (folder / ".cache" / "download").write_text("?")
    (folder / "weights").symlink_to(tmp_path / "blob")
    (folder / "dangling").symlink_to(tmp_path / "gone")
    assert set(artifact.file_digests(folder)) == {"package.mlpackage/manifest.json", "weights"}


def test_the_digest_of_an_artifact_is_that_of_its_files(tmp_path: Path) -> None:
    write(tmp_path / "train", "x", rank=8)
    made = artifact.digest(tmp_path / "train")
    write(tmp_path / "other", "x", rank=16)
    assert artifact.digest(tmp_path / "other") == made
    (tmp_path / "train" / "manifest.json").unlink()
    assert artifact.digest(tmp_path / "train") == made
    (tmp_path / "train" / "a.txt").write_text("y")
    assert artifact.digest(tmp_path / "train") != made
    with pytest.raises(PippinError, match="does not exist"):
        artifact.digest(tmp_path / "nothing")


def test_another_folders_manifest_does_not_stand_for_its_files(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "weights").write_text("1")
    first = artifact.digest(tmp_path)
    (tmp_path / "weights").write_text("2")
    assert artifact.digest(tmp_path) != first


def test_differences_name_what_changed(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    assert artifact.differences(folder, origin(rank=8)) is None
    write(folder, "x", rank=8, lora={"alpha": 16, "targets": ("q",)})
    same: dict[str, Any] = {"rank": 8, "lora": {"alpha": 16, "targets": ["q"]}}
    assert artifact.differences(folder, origin(**same)) == []
    moved = Origin(stage="train", inputs={"model": "m2"}, settings=same, versions={"pippin": "9"})
    assert artifact.differences(folder, moved) == ["input model"]
    assert artifact.differences(folder, origin("merge", **same)) == ["stage train"]
    same["lora"] = {"alpha": 32, "targets": ("q",)}
    assert artifact.differences(folder, origin(**same)) == ["lora.alpha 16 -> 32"]


def test_a_damaged_artifact_is_not_done(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    write(folder, "four")
    (folder / "a.txt").write_text("fo")
    (folder / "inner" / "b.txt").unlink()
    assert artifact.differences(folder, origin()) == [
        "file inner/b.txt is missing",
        "file a.txt has 2 bytes, was written with 4",
    ]


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    with artifact.writing(tmp_path / "train", origin(), {}) as partial:
        (partial / "a.txt").write_text("first")
        assert in_child(lambda: write(tmp_path / "train", "second")) == 3
        assert artifact.differences(tmp_path / "train", origin()) is None
    assert (tmp_path / "train" / "a.txt").read_text() == "first"


SMALL_DISK = "256k"


def test_a_full_disk_loses_nothing(small_disk: Path) -> None:
    folder = small_disk / "run" / "train"
    write(folder, "old" * 10_000)
    for length in (20_000, 30_000, 50_000):
        with pytest.raises(PippinError, match="is full") as caught:
            write(folder, "new!" * length)
        assert "nothing finished was lost" in caught.value.hint
        assert contents(folder) == "old" * 10_000
        assert not leftovers(folder)
    write(folder, "new")
    assert contents(folder) == "new"


def test_a_disk_that_fills_up_at_any_write_loses_nothing(small_disk: Path) -> None:
    folder = small_disk / "run" / "train"
    write(folder, "old")
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    statuses = set()
    for room in range(0, 64 * 1024, 4096):
        (small_disk / "ballast").write_bytes(b"0" * (free - room))
        try:
            write(folder, "new" * 3000)
            statuses.add("written")
        except PippinError as error:
            statuses.add(error.message)
            assert contents(folder) in ("old", "new" * 3000)
        assert not leftovers(folder)
        (small_disk / "ballast").unlink()
    assert statuses == {"written", f"the disk of {folder} is full"}


def test_a_file_larger_than_allowed(tmp_path: Path) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(PippinError, match="no file that large"):
            write(tmp_path / "train", "new" * 1000)

    write(tmp_path / "train", "old")
    assert in_child(limited) == 0
    assert contents(tmp_path / "train") == "old"


def test_a_folder_closed_to_us(tmp_path: Path) -> None:
    def as_somebody_else() -> None:
        if os.getuid() == 0:
            os.setuid(NOBODY)
        with pytest.raises(PippinError, match=r"no permission for .*/closed/run") as caught:
            write(closed / "run" / "train", "x")
        assert "that you may write to" in caught.value.hint

    closed = tmp_path / "closed"
    closed.mkdir()
    for parent in (tmp_path, *tmp_path.parents):
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(0o755)
    closed.chmod(0o555)
    assert in_child(as_somebody_else) == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO])
def test_what_a_disk_refuses_becomes_an_error_for_people(tmp_path: Path, code: int) -> None:
    with pytest.raises(PippinError) as caught, disk.disk_errors(tmp_path):
        raise OSError(code, os.strerror(code))
    assert str(tmp_path) in caught.value.message


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), disk.disk_errors(tmp_path):
        (tmp_path / "missing").read_text()


def test_a_small_file_that_somebody_edited_is_no_longer_what_was_made(tmp_path: Path) -> None:
    write(tmp_path / "train", "x")
    (tmp_path / "train" / "a.txt").write_text("y")
    (found,) = artifact.differences(tmp_path / "train", origin()) or []
    assert found == "file a.txt has other contents than were written"
