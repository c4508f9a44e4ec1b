"""The report is one page that holds every figure, escapes every text, and needs no network."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pippin import artifact
from pippin.artifact import Origin
from pippin.recipe import Data, Gate, Gates, Model, Qat, Recipe
from pippin.report import COLUMNS, answers_table, summary_table, write_report
from pippin.report.charts import line_chart

PROMPT = "table: t1\ncolumns: Player, No.\nQ: Who wears <b>5</b> & 6?"
SUBJECTS = ("base", "adapter", "merged", "quantized", "deployed-executorch")
RECIPE = Recipe(
    model=Model(source="builtin:smollm2"),
    data=Data(source="data/<sql>"),
    gates=Gates(quantized=Gate(max_kl=0.1, min_top1=0.9), deployed=Gate(max_kl=0.01)),
    name="sql",
)
FIGURES = {
    "base": (1.8312, None, None, 0.0, 269_060_000, 16.0, None),
    "adapter": (0.2104, 0.9120, 0.701, 0.72, 288_400_000, 17.15, None),
    "merged": (0.2105, 0.00004, 0.998, 0.72, 269_060_000, 16.0, 0.9999),
    "quantized": (0.2391, 0.0312, 0.951, 0.66, 91_300_000, 5.43, 0.9823),
    "deployed-executorch": (0.2393, 0.0006, 0.994, 0.66, 92_100_000, 5.48, 0.9821),
}


def scores(subject: str, questions: int = 7) -> dict:
    names = ("loss", "kl", "top1", "exact_match", "size_bytes", "bits_per_weight", "gain_kept")
    found = dict(zip(names, FIGURES[subject], strict=True))
    right = subject != "base"
    return {
        "subject": subject,
        "perplexity": 2.718281828 ** found["loss"],
        "topk": 64,
        "rows": 80,
        **found,
        "gates": {"max_kl": 0.1} if subject == "quantized" else {},
        "answers": [{"prompt": PROMPT, "answer": f"answer of {subject} <i>"}],
        "samples": [
            {
                "where": f"test.jsonl:{i + 1}",
                "prompt": PROMPT,
                "answer": "SELECT Player FROM t1 WHERE No. = 5" if right else "The table <shows>",
                "reference": "SELECT Player FROM t1 WHERE No. = 5",
                "equal": right,
            }
            for i in range(questions)
        ],
    }


def make_run(run: Path, subjects=SUBJECTS) -> Path:
    """A run's folder as the stages leave it, without weights."""
    last = "none"
    for name in ("train", "merge", "quantize", "deploy-executorch"):
        _stage(run / name, {"model": last}, _files(name))
        last = artifact.digest(run / name)
    for subject in subjects:
        files = {"scores.json": json.dumps(scores(subject))}
        _stage(run / f"evaluate-{subject}", {"model": last}, files)
    return run


def _files(name: str) -> dict[str, str]:
    if name == "train":
        rows = [
            {
                "step": s,
                "loss": 2.5 * 0.97**s + 0.2,
                "learning_rate": 2e-4 * (1 - s / 100),
                "memory_bytes": 1.1e9 + 4e6 * s,
                "tokens_per_second": 900 + s % 7,
            }
            for s in range(1, 101)
        ]
        rows += [{"step": s, "valid_loss": 2.4 * 0.97**s + 0.25} for s in (25, 50, 75, 100)]
        return {"metrics.jsonl": "\n".join(map(json.dumps, rows)) + '\n{"step": 101, "lo'}
    if name.startswith("deploy"):
        said = {
            "target": "executorch",
            "context": 512,
            "delegation": {
                "delegate": "xnnpack",
                "subgraphs": 61,
                "flops_share": 0.9712,
                "operators": [
                    _operator("aten.linear", 211, 0, 0.9712, ""),
                    _operator("llama.custom_sdpa", 0, 30, 0.0288, "its own"),
                    _operator("aten.mul.Tensor", 90, 0, 0.0, ""),
                ],
            },
            "check": {"max_difference": 0.0123456, "top1": 1.0, "tokens": 64, "cut_to": None}
            | {"load_seconds": 0.2123, "prefill_speed": 638.21}
            | {"layers": {"stretches": 31, "determined": 0.99312}},
        }
        texts = {"deploy.json": json.dumps(said), "chat_template.jinja": "{{ messages }}"}
        return texts | {"model.pte": "x" * 1000}
    return {}


def _operator(name: str, delegated: int, left: int, share: float, why: str) -> dict[str, object]:
    return {
        "operator": name,
        "delegated": delegated,
        "left": left,
        "share": share,
        "why": why,
    }


def _stage(folder: Path, inputs: dict[str, str], files: dict[str, str]) -> None:
    origin = Origin(
        stage=folder.name, inputs=inputs, settings={}, versions={"torch": "2.13.0", "numpy": "2.1"}
    )
    with artifact.writing(folder, origin, {}) as partial:
        for name, text in files.items():
            (partial / name).write_text(text)


def test_table_holds_every_figure_as_text(tmp_path):
    rows = summary_table(make_run(tmp_path), RECIPE.gates)
    assert [row["stage"] for row in rows] == list(SUBJECTS)
    assert all(set(row) == set(COLUMNS) for row in rows)
    quantized = rows[3]
    assert quantized == {
        "stage": "quantized",
        "rows": "80",
        "loss": "0.239",
        "perplexity": "1.27",
        "kl": "0.0312",
        "top1": "95.1%",
        "exact_match": "66%",
        "size_bytes": "91 MB",
        "bits_per_weight": "5.43",
        "gain_kept": "98.2%",
        "gates": "passed",
    }
    assert rows[0]["kl"] == rows[0]["gates"] == "\u2013"


def test_a_missed_gate_shows_and_unknown_gates_come_from_the_scores(tmp_path):
    run = make_run(tmp_path)
    strict = Gates(quantized=Gate(max_kl=0.01))
    assert summary_table(run, strict)[3]["gates"] == "missed"
    assert summary_table(run)[3]["gates"] == "passed"
    assert summary_table(run)[2]["gates"] == "\u2013"


def test_answers_to_a_prompt_stand_by_stage(tmp_path):
    ((prompt, answers),) = answers_table(make_run(tmp_path))
    assert prompt == PROMPT
    assert list(answers) == list(SUBJECTS)
    assert answers["merged"] == "answer of merged <i>"


class Page(HTMLParser):
    """The text of a page, and every attribute that could reach out of it."""

    VOID = ("meta", "link", "br", "img", "input", "hr")

    def __init__(self, html):
        super().__init__()
        self.text, self.open, self.references = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        names = ("src", "href", "xlink:href", "action", "srcset", "data")
        self.references += [value for name, value in attrs if name in names]
        assert tag not in ("script", "iframe", "link", "img", "object")

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read_page(run, recipe=RECIPE):
    html = write_report(run, "sql <&> run", recipe).read_text()
    return html, Page(html)


def test_page_is_well_formed_and_reaches_for_nothing(tmp_path):
    html, page = read_page(make_run(tmp_path))
    assert page.open == []
    assert page.references == []
    assert "http" not in html
    assert "url(" not in html
    assert "@import" not in html


def test_every_text_from_elsewhere_is_escaped(tmp_path):
    html, page = read_page(make_run(tmp_path))
    for raw in ("<b>5</b>", "<i>", "The table <shows>", "data/<sql>", "sql <&> run"):
        assert raw not in html
        assert raw in "".join(page.text)


def test_page_holds_every_figure_of_the_table(tmp_path):
    run = make_run(tmp_path)
    _, page = read_page(run)
    text = "".join(page.text)
    for row in summary_table(run, RECIPE.gates):
        assert all(value in text for value in row.values())


def test_verdicts_of_a_good_run(tmp_path):
    text = "".join(read_page(make_run(tmp_path))[1].text)
    for title in (
        "Every gate was kept",
        "Tuned beats base",
        "Merged equals adapter",
        "Quantized within its gates",
        "executorch equals quantized",
        "loss 1.831 → 0.210",
    ):
        assert title in text


def test_verdicts_of_a_run_that_lost_something(tmp_path):
    run = make_run(tmp_path, SUBJECTS[:4])
    recipe = Recipe(
        model=RECIPE.model, data=RECIPE.data, gates=Gates(quantized=Gate(min_top1=0.99))
    )
    text = "".join(read_page(run, recipe)[1].text)
    assert "One hand-off lost something" in text
    assert "Quantized misses its gates" in text
    assert "top-1 agreement 0.951 < min_top1 0.99" in text
    assert "not measured yet" in text


@pytest.mark.parametrize("subjects", [(), SUBJECTS[:1], SUBJECTS[:2]])
def test_a_run_that_has_begun_has_a_page(tmp_path, subjects):
    text = "".join(read_page(make_run(tmp_path, subjects))[1].text)
    assert "On its way" in text


def test_an_empty_folder_has_a_page(tmp_path):
    _, page = read_page(tmp_path)
    assert "0 of 4 hand-offs measured so far" in "".join(page.text)


def test_wrong_answers_are_marked_wrong(tmp_path):
    html, _ = read_page(make_run(tmp_path))
    assert html.count('class="tag">wrong') == 7
    assert html.count('class="tag">right') == 28


def test_chain_names_the_stage_behind_a_digest(tmp_path):
    run = make_run(tmp_path)
    html, _ = read_page(run)
    digest = artifact.digest(run / "train")[:12]
    assert re.search(rf"model: train\s*<code>{digest}", html)


def test_curves_are_drawn_and_a_cut_off_line_is_none(tmp_path):
    html, page = read_page(make_run(tmp_path))
    assert html.count("<figure>") == 4
    assert html.count('class="dot k2"') == 4
    assert "Loss, nats a token" in "".join(page.text)


def test_scales_that_another_recipe_trained_are_left_out(tmp_path):
    run = make_run(tmp_path)
    _stage(run / "qat", {}, {"metrics.jsonl": '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}'})
    html, _ = read_page(run)
    assert "qat" not in _made(html)
    assert "Training of the scales" not in html
    on = replace(RECIPE, qat=Qat(steps=2))
    html, _ = read_page(run, on)
    assert "qat" in _made(html)
    assert "Training of the scales" in html


def _made(html: str) -> str:
    """The page's chain of stages."""
    return html.partition("How it was made")[2].partition("Settings")[0]


def test_the_place_on_a_budget_s_curve_is_drawn(tmp_path):
    run = make_run(tmp_path / "run")
    curve = [[80_000_000, 9.0], [90_000_000, 0.1], [100_000_000, 0.05], [200_000_000, 0.0]]
    budget = {"size_bytes": 100_000_000, "expected_kl": 0.05, "curve": curve}
    (run / "quantize" / "quantize.json").write_text(json.dumps({"budget": budget}))
    page, _ = read_page(run)
    section = re.search(r"<h2>Bits shared out</h2>.*?</section>", page, re.S)
    assert section
    assert "chosen <b>0.05</b>" in section[0]
    assert section[0].count("<circle") == 3  # neither far away nor for nothing
    budget["expected_kl"] = 0.0  # every linear as it was
    (run / "quantize" / "quantize.json").write_text(json.dumps({"budget": budget}))
    assert "chosen <b>0</b>" in read_page(run)[0]


def test_ticks_are_round_and_inside():
    chart = line_chart("t", "x", {"a": [(1, 0.31), (50, 2.4), (97, 0.2)]})
    assert [label for _, label in chart.y_ticks] == ["0", "1", "2", "3"]
    frame = chart.frame
    assert all(frame["top"] <= y <= frame["bottom"] for y, _ in chart.y_ticks)
    assert all(frame["left"] <= x <= frame["right"] for x, _ in chart.x_ticks)
    assert [label for _, label in chart.x_ticks] == ["50"]


@pytest.mark.parametrize("value", [0.0, 3.0, 2e-4, -1.0])
def test_a_level_curve_has_a_scale(value):
    chart = line_chart("t", "x", {"a": [(1, value), (2, value)]})
    assert len(chart.y_ticks) >= 2
    assert all(0 < y < chart.height for _, y in chart.lines[0].dots)


def test_a_curve_of_nothing_is_no_chart():
    assert line_chart("t", "x", {"a": [], "b": [(1, float("nan"))]}) is None


def test_long_curves_are_thinned_by_means():
    chart = line_chart("t", "x", {"a": [(x, float(x % 2)) for x in range(10_000)]})
    points = re.findall(r"[ML]", chart.lines[0].path)
    assert len(points) <= 240


def test_small_figures_are_not_rounded_to_nothing(tmp_path):
    assert summary_table(make_run(tmp_path))[2]["kl"] == "4e-05"


def test_a_bundle_is_described(tmp_path):
    text = re.sub(r"\s+", " ", "|".join(read_page(make_run(tmp_path))[1].text))
    assert "xnnpack computes 97.1% of the arithmetic, in 61 pieces" in text
    assert "aten.linear|211|0|97.1%" in text
    assert "llama.custom_sdpa|0|30|2.9%|its own" in text
    assert "aten.mul.Tensor|90|0|\u2013" in text
    assert "max difference|0.01235" in text
    assert "load seconds|0.2s" in text
    assert "prefill speed|638 tokens/s" in text
    assert "cut to" not in text
    assert "Every layer against PyTorch|stretches|31|determined|0.9931" in text
    assert "model.pte|1 kB" in text
    assert "chat_template.jinja|14 B" in text
