"""The data that ships with the recipes: small, and held-out rows that training never sees."""

from pathlib import Path

from pippin.data.dataset import SPLITS, load_split
from pippin.recipe import Data

FOLDER = Path(__file__).parents[2] / "recipes" / "data"


def test_files_are_small() -> None:
    sizes = {p: p.stat().st_size for p in FOLDER.rglob("*") if p.is_file()}
    assert len(sizes) >= 7
    assert max(sizes.values()) < 300_000


def test_sql_splits_share_no_question() -> None:
    asked = {}
    for split in SPLITS:
        rows = load_split(Data(source="sql"), FOLDER, split)
        prompts = [row.pair[0] for row in rows if row.pair]
        assert len(prompts) == len(rows)
        asked[split] = {prompt.split("\nQ: ")[1].lower() for prompt in prompts}
    assert not asked["train"] & (asked["valid"] | asked["test"])
    assert not asked["valid"] & asked["test"]


def test_shakespeare_splits_share_no_speech() -> None:
    speeches = {}
    for split in SPLITS:
        (row,) = load_split(Data(source="shakespeare", format="text"), FOLDER, split)
        long = [s for s in (row.text or "").split("\n\n") if len(s) > 80]
        assert len(long) > 10
        speeches[split] = set(long)
    assert not speeches["train"] & (speeches["valid"] | speeches["test"])
