"""Measures one stage's model on held-out rows, against its parent, and checks its gate."""

import json
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pippin import artifact
from pippin.engines import Sampling, Scorer
from pippin.errors import PippinError
from pippin.events import Event, Finished, Notice, Progress, Started
from pippin.job import Job
from pippin.model.adapter import load_adapter
from pippin.model.tokenizer import Tokenizer, load_tokenizer
from pippin.stages import distribution, pace
from pippin.stages.answering import answer_all, compare, confirm_all, exact_match
from pippin.stages.belonging import check_base
from pippin.stages.exam import Asked, Exam, read_exam, shorten, within
from pippin.stages.gates import check_gates, gate_of, let_pass, limits
from pippin.stages.loading import check_of, context_of, load_scorer, runtime_of
from pippin.stages.scoring import Scored, Sheet, groups
from pippin.stages.shipped import measure_shipped

SCORES = "scores.json"
ANSWERS = "answers.jsonl"
SAMPLES_KEPT = 20


def evaluate(job: Job) -> Iterator[Event]:
    """Measure `job.subject`; write scores.json and the distribution its children are held to.

    Raises GateError, when everything is on disk, where a figure misses its gate.
    """
    tokenizer = load_tokenizer(job.inputs.get("model", job.inputs.get("bundle", Path())))
    exam, notices = _exam(job, tokenizer), _check_adapter(job)
    scorer = load_scorer(job.inputs, job.recipe.model, job.recipe.evaluate.dtype)
    if "bundle" in job.inputs:
        exam = pace.fit(exam, scorer, job.recipe.evaluate.slow_seconds, _parent_scores(job))
    yield Started(stage=job.stage, title=f"evaluate {job.subject}", total=exam.total, unit="rows")
    for text in (*exam.notices, *notices):
        yield Notice(stage=job.stage, text=text)
    if runtime := runtime_of(job.inputs):
        yield Notice(stage=job.stage, text=f"the deployed file, run as {runtime}")
    sitting = _Sitting(job=job, exam=exam, tokenizer=tokenizer, scorer=scorer)
    headline: dict[str, Any] = {}
    with artifact.writing(job.folder, job.origin, headline) as folder:
        yield from sitting.score(folder)
        yield from sitting.answer(folder)
        (folder / SCORES).write_text(json.dumps(sitting.scores, indent=2) + "\n")
        headline.update({k: v for k, v in sitting.scores.items() if not isinstance(v, list | dict)})
    for text in let_pass(sitting.scores, gate_of(job.subject, job.recipe.gates)):
        yield Notice(stage=job.stage, text=text)
    yield Finished(stage=job.stage, folder=str(job.folder), summary=headline)
    check_gates(job.subject, sitting.scores, job.recipe.gates)


def _check_adapter(job: Job) -> list[str]:
    if "adapter" not in job.inputs:
        return []
    adapter = load_adapter(job.inputs["adapter"])
    model, digest = job.inputs["model"], job.origin.inputs["model"]
    return check_base(adapter, model, digest, job.inputs.get("trained_on"))


def _parent_scores(job: Job) -> dict[str, Any]:
    folder = job.inputs.get("parent")
    return {} if folder is None else read_scores(folder) or {}


def read_scores(folder: Path) -> dict[str, Any] | None:
    """The scores of an evaluation, or None where there are none."""
    try:
        return json.loads((folder / SCORES).read_text())
    except (OSError, ValueError):
        return None


def _exam(job: Job, tokenizer: Tokenizer) -> Exam:
    exam = read_exam(job.recipe, tokenizer)
    if job.subject != "base":
        exam = replace(exam, notices=[])  # every stage takes the same exam: told with the base
    if "bundle" not in job.inputs:
        return within(exam, job.recipe, context_of(job.inputs))
    return shorten(exam, job.recipe)


@dataclass(kw_only=True, slots=True)
class _Sitting:
    """One model takes the exam; `scores` fills up."""

    job: Job
    exam: Exam
    tokenizer: Tokenizer
    scorer: Scorer
    done: int = 0
    scores: dict[str, Any] = field(default_factory=dict)

    def score(self, folder: Path) -> Iterator[Event]:
        """Loss, divergence and size; the own distribution goes into `folder`."""
        sheet = Sheet(self.exam.samples, self._parent(), self._topk())
        lengths = [len(sample.tokens) for sample in self.exam.samples]
        # A slow runtime runs a batch's padding too.
        rows = 1 if self.exam.is_cut else self.job.recipe.evaluate.batch_rows
        for group in groups(lengths, rows):
            sheet.fill(self.scorer, group)
            yield self._progress(len(group))
        scored = sheet.scored()
        distribution.save(folder, scored.distribution)
        self._note(scored)
        yield from self._note_gain(scored.distribution)

    def _parent(self) -> distribution.Distribution | None:
        parent, k = self._stored("parent"), self._topk()
        if parent is not None and parent.ids_NK.shape[1] != k:
            raise PippinError(
                f"{self.job.inputs['parent'].name} kept {parent.ids_NK.shape[1]} tokens, not {k}",
                "`evaluate.topk` changed since: --redo evaluate",
            )
        return parent

    def _stored(self, role: str) -> distribution.Distribution | None:
        folder = self.job.inputs.get(role)
        return None if folder is None else distribution.load_for(folder, self.exam.samples)

    def _topk(self) -> int:
        return min(self.job.recipe.evaluate.topk, self.tokenizer.vocab_size)

    def _progress(self, rows: int) -> Progress:
        self.done += rows
        return Progress(stage=self.job.stage, done=self.done, values={})

    def _note(self, scored: Scored) -> None:
        loss = scored.distribution.loss
        if not math.isfinite(loss):
            raise PippinError(
                f"{self.job.subject}: the held-out loss is {loss}",
                'the model overflows: set evaluate.dtype = "float32", or check its weights',
            )
        shipped = measure_shipped(self.job.inputs, _parent_scores(self.job))
        self.scores |= {
            "subject": self.job.subject,
            "rows": len(self.exam.samples),
            "tokens": int(scored.distribution.counts_S.sum()),
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),  # beyond is beyond a float
            "kl": scored.kl,
            "top1": scored.top1,
            "topk": scored.distribution.ids_NK.shape[1],
            "size_bytes": shipped.size_bytes,
            "bits_per_weight": shipped.bits_per_weight,
            "weights": shipped.weights,
            "gates": limits(gate_of(self.job.subject, self.job.recipe.gates)),
        }
        if check := check_of(self.job.inputs):
            self.scores["check"] = check

    def _note_gain(self, found: distribution.Distribution) -> Iterator[Event]:
        base, tuned = self._stored("base"), self._stored("tuned")
        self.scores["gain_kept"] = None
        if self.exam.is_cut:
            self.scores["same_rows"] = {}
        if base is None or tuned is None:
            return
        gain, error = distribution.gain(base, tuned)
        if gain <= error:
            text = (
                f"the adapter gained {gain:.4f} nats a token, with a standard error of "
                f"{error:.4f}: there is no gain to keep"
            )
            yield Notice(stage=self.job.stage, text=text)
            self.scores["no_gain"] = True
            return
        kept, error = distribution.gain_kept(base, tuned, found)
        self.scores |= {"gain_kept": kept, "gain_kept_error": error}
        if self.exam.is_cut and (parent := self._stored("parent")) is not None:
            self.scores["same_rows"]["gain_kept"] = (base.loss - parent.loss) / gain

    def answer(self, folder: Path) -> Iterator[Event]:
        """Greedy answers to the held-out questions, and to the recipe's prompts.

        All of the first go into `folder`, the scores keep some.
        """
        settings, exam = self.job.recipe.evaluate, self.exam
        samples = yield from self._greedy(exam.questions, settings.max_tokens)
        answers = yield from self._greedy(exam.prompts, settings.prompt_tokens)
        lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples]
        (folder / ANSWERS).write_text("".join(lines), "utf-8")
        self.scores |= {
            "exact_match": exact_match(samples),
            "answered": len(samples),
            "answers": [{key: one[key] for key in ("prompt", "answer", "ids")} for one in answers],
            "samples": samples[:SAMPLES_KEPT],
        }
        if exam.is_cut:
            asked = {question.where for question in exam.questions}
            kept = [one for one in _parent_scores(self.job)["samples"] if one["where"] in asked]
            self.scores["same_rows"]["exact_match"] = exact_match(kept)

    def _greedy(self, asked: Sequence[Asked], limit: int) -> Generator[Event, None, list[Any]]:
        """A sample of scores.json for each."""
        prompts, samples = [one.prompt_T for one in asked], [{}] * len(asked)
        context = context_of(self.job.inputs)
        if context is not None and prompts:
            limit = min(limit, context - max(map(len, prompts)))
        sampling = Sampling(max_tokens=limit, stop=self.tokenizer.stop_ids)
        rows = self.job.recipe.evaluate.batch_rows
        answering = (
            confirm_all(self.scorer, asked, sampling)
            if self.exam.is_cut
            else answer_all(self.scorer, prompts, sampling, rows)
        )
        for answers in answering:
            for index, ids in answers.items():
                text = self.tokenizer.decode(ids, skip_special=True)
                samples[index] = compare(asked[index], text, ids)
            yield self._progress(len(answers))
        return samples
