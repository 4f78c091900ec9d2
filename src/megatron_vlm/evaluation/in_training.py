"""Scores of answers while a run trains (`train.score_every`).

<run_dir>/scores/step_00000100.jsonl   the questions of that step, with answers and references
"""

import json
from dataclasses import replace
from pathlib import Path

from torch.nn import Module

from megatron_vlm.config import ConfigError, RunConfig
from megatron_vlm.data.on_disk.paths import items_of
from megatron_vlm.evaluation.answering import Asking, Record, answers, scored
from megatron_vlm.evaluation.questions import open_questions
from megatron_vlm.files import write_whole
from megatron_vlm.job import watchdog
from megatron_vlm.job.best import SCORE
from megatron_vlm.models.hf import Source
from megatron_vlm.parallel import setup
from megatron_vlm.scoring.metrics import Score, metric_of


def scoring_of(config: RunConfig, source: Source) -> "Scoring | None":
    """The scoring of a run; None for one that is not scored."""
    train = config.train
    asks = train.score_every or (train.keep_best and train.best_is_score)
    return Scoring(config, source) if asks else None


class Scoring:
    """Answers the same questions each time, greedily, and scores the answers. Every rank has one.

    Raises ConfigError if there are no conversations to answer, or no such metric.
    """

    def __init__(self, config: RunConfig, source: Source):
        self._config = config
        self._source = source
        self._metrics = {name: metric_of(name) for name in items_of(config.train.score_metric)}
        data = config.data
        if data.score_path is not None:
            own = {"validation_share": 0.0, "streaming": False, "datasets": []}
            data = replace(data, dataset_type="hf", valid_data_path=data.score_path, **own)
        train = config.train
        self._questions = open_questions(data, source, train.score_tokens, train.score_samples, train.seed)

    def scores(self, model: list[Module], step: int) -> dict[str, Score]:
        """The score of each figure after a step, by its name among the run's figures. Collective.

        Raises ConfigError if there is none, though `train.best_by` asks for one.
        """
        watchdog.beat(f"scoring answers after step {step}")
        how = Asking(self._config.train.score_tokens)
        workers = self._config.data.num_workers
        asked = answers(model, self._source, self._questions, how, num_workers=workers)
        records: list[Record] = [record for some in asked for record in some]
        return setup.on_first_rank(self._judged, records, step)  # a user's metric may differ by process

    def _judged(self, records: list[Record], step: int) -> dict[str, Score]:
        folder = Path(self._config.run_dir, "scores")
        folder.mkdir(exist_ok=True)
        lines = [json.dumps(record) + "\n" for record in records]
        write_whole(folder / f"step_{step:08d}.jsonl", "".join(lines))
        result = scored(records, self._metrics, self._questions.boxes)
        if self._config.train.best_is_score and not result.scores:
            told = "; ".join(result.lines()) or "no question was asked"
            raise ConfigError(f"train.best_by: there is no score: {told}.")
        return {f"{SCORE}{name}": score for name, score in result.scores.items()}
