"""What `pippin data` shows."""

import dataclasses
import io
import json
from pathlib import Path

import numpy as np
from rich.console import Console

from pippin.data.batches import BatchPlan
from pippin.data.chat import tokenize
from pippin.data.dataset import load_split
from pippin.data.show import Look, as_json, as_lines, as_rich, look
from pippin.model.tokenizer import Tokenizer
from pippin.recipe import Data, Model, Recipe, Train


def make_recipe(folder: Path, count: int = 60) -> Recipe:
    rows = [{"prompt": f"q{'x' * i}", "completion": f"a{i}"} for i in range(count)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(source="rows.jsonl", max_seq_len=80, too_long="drop")
    train = Train(row_tokens=200)
    return Recipe(model=Model(source="x"), data=data, train=train, folder=folder)


def test_counts_are_those_of_training(tokenizer: Tokenizer, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    seen = look(recipe, tokenizer, rows=2)
    rows = load_split(recipe.data, tmp_path, "train")
    done = tokenize(rows, tokenizer, recipe.data)
    counts = seen.splits["train"]
    assert (counts.rows, counts.samples) == (len(rows), len(done.samples))
    assert counts.dropped == done.dropped > 0
    assert counts.trained == sum(int(s.scored.sum()) for s in done.samples)
    assert sum(one.samples for one in seen.histogram) == len(done.lengths)
    for one in seen.histogram:
        inside = (done.lengths >= one.low) & (done.lengths <= one.high)
        assert one.samples == int(np.sum(inside))
    plan = BatchPlan(done.samples, recipe.train, recipe.seed)
    assert (seen.packing.fill, seen.packing.rows) == (plan.fill, plan.rows)
    assert any("dropped" in notice for notice in seen.notices)


def test_marks_are_the_mask(tokenizer: Tokenizer, tmp_path: Path) -> None:
    seen = look(make_recipe(tmp_path), tokenizer, rows=1)
    (row,) = seen.rows
    assert row.where == "rows.jsonl:1"
    assert [p.text for p in row.pieces if p.trained] == ["a0<|im_end|>"]
    lines = as_lines(seen)
    assert "[[a0<|im_end|>]]" in lines
    assert lines[0] == f"rows.jsonl:1: {row.trained} of {row.tokens} tokens trained"
    assert any(line.startswith("note: train: ") for line in lines)


def test_terminal_and_json_hold_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    seen = look(make_recipe(tmp_path), tokenizer, rows=1)
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    console.print(as_rich(seen))
    drawn = console.file.getvalue()  # type: ignore
    assert "\x1b[7;32ma0<|im_end|>" in drawn
    assert json.loads(json.dumps(as_json(seen)))["splits"]["train"]["rows"] == 54


def test_control_characters_are_shown_not_sent(tokenizer: Tokenizer, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    rows = [{"prompt": "\x1b[2J\x07", "completion": "a\x1b]0;x\x07"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))
    seen = look(recipe, tokenizer)
    text = "\n".join(as_lines(seen))
    assert "\x1b" not in text
    assert "\\x1b[2J\\x07" in text


def test_split_that_cannot_be_set_aside_is_a_note(tokenizer: Tokenizer, tmp_path: Path) -> None:
    seen: Look = look(make_recipe(tmp_path, count=2), tokenizer)
    assert list(seen.splits) == ["train"]
    assert any("too few rows" in notice for notice in seen.notices)


def test_look_does_not_need_all_rows_short(tokenizer: Tokenizer, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path)
    data = dataclasses.replace(recipe.data, too_long="cut")
    seen = look(dataclasses.replace(recipe, data=data), tokenizer)
    assert seen.splits["train"].cut > 0
