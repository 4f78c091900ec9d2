"""Scores of answers while a run trains (`train.score_every`).

<run_dir>/scores/step_00000100.jsonl   the questions of that step, with answers and references
"""

import json
from dataclasses import replace
from pathlib import Path

from torch.nn import Module

from megatron_vlm.callbacks import Callback, Run
from megatron_vlm.callbacks.validation import SCORE, Best
from megatron_vlm.config import ConfigError
from megatron_vlm.data.encode.questions import Question
from megatron_vlm.data.on_disk.paths import items_of
from megatron_vlm.extras.evaluate.answering import Record, answers, open_questions, record_of, scored
from megatron_vlm.extras.evaluate.metrics import Score, metric_of
from megatron_vlm.files import atomic_write
from megatron_vlm.job import watchdog
from megatron_vlm.parallel import setup


class Scoring(Callback):
    """Answers the same questions each time, greedily, and scores the answers.

    Raises ConfigError at the start if there are no conversations to answer, or no such metric.
    """

    def on_train_begin(self, run: Run) -> None:
        self._config = config = run.config
        self._source = run.source
        self._metrics = {name: metric_of(name) for name in items_of(config.train.score_metric)}
        data, train = config.data, config.train
        if data.score_path is not None:
            overrides = {"validation_share": 0.0, "streaming": False, "datasets": []}
            data = replace(data, dataset_type="hf", valid_data_path=data.score_path, **overrides)
        self._questions = open_questions(
            data, run.source, train.score_tokens, train.score_samples, train.seed
        )
        setup.on_first_rank(self._look)

    def on_step_end(self, run: Run, metrics: dict[str, float]) -> None:
        if run.milestones.scores_after(run.step):
            scores = self.scores(run.model, run.step)
            run.higher_is_better |= {name for name, score in scores.items() if score.higher_is_better}
            if scores:
                run.callbacks.on_validation_end(run, {name: score.score for name, score in scores.items()})

    def _look(self) -> None:
        """Score references as answers, until each metric has scored one.

        Raises:
            ConfigError: A metric scores none, fails, or no figure is `train.best_by`.
        """
        figures: dict[str, float] = {}
        for name, metric in self._metrics.items():
            records: list[Record] = []
            scores: dict[str, Score] = {}
            while not scores and len(records) < len(self._questions):
                watchdog.beat(f"looking at question {len(records)} to be scored")
                question = self._questions[len(records)]
                is_question = isinstance(question, Question)
                records.append(record_of(question, question.references[0]) if is_question else question)
                scores = scored(records[-1:], {name: metric}, self._questions.boxes).scores
            if not scores:
                reasons = "; ".join(scored(records, {name: metric}, self._questions.boxes).lines())
                raise ConfigError(
                    f"train.score_metric: {name} scores none of the {len(records)} questions of "
                    f"{self._questions.name}: {reasons}; correct them, or change it."
                )
            figures |= {f"{SCORE}{figure}": 0.0 for figure in scores}
        if self._config.train.best_is_score:
            Best(self._config.train).rate(0, figures)  # which says what figures there are

    def scores(self, model: list[Module], step: int) -> dict[str, Score]:
        """The score of each figure after a step, by its name among the run's figures. Collective."""
        watchdog.beat(f"scoring answers after step {step}")
        longest = self._config.train.score_tokens
        workers = self._config.data.num_workers
        answered = answers(model, self._source, self._questions, longest, num_workers=workers)
        records: list[Record] = [record for some in answered for record in some]
        return setup.on_first_rank(self._judged, records, step)  # a user's metric may differ by process

    def _judged(self, records: list[Record], step: int) -> dict[str, Score]:
        folder = Path(self._config.run_dir, "scores")
        folder.mkdir(exist_ok=True)
        lines = [json.dumps(record) + "\n" for record in records]
        atomic_write(folder / f"step_{step:08d}.jsonl", "".join(lines))
        result = scored(records, self._metrics, self._questions.boxes)
        return {f"{SCORE}{name}": score for name, score in result.scores.items()}
