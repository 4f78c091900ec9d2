"""A run's data on every rank: one rank of each model-parallel group reads, and the others receive.

While a step is trained, a thread on every rank reads or receives the micro batches of the next.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch.profiler import record_function
from transformers import ProcessorMixin

from megatron_vlm.batch import Batch
from megatron_vlm.config import RunConfig, derived
from megatron_vlm.data.run_data import RunData
from megatron_vlm.files import atomic_write
from megatron_vlm.job import watchdog
from megatron_vlm.job.step_schedule import (
    Epochs,
    StepSchedule,
    check_validation,
    milestones,
    validation_notes,
)
from megatron_vlm.messages import listed
from megatron_vlm.models.hf import Source
from megatron_vlm.parallel import setup
from megatron_vlm.parallel.broadcast import BatchBroadcaster
from megatron_vlm.training.checkpoint import CheckpointInfo

HELD_OUT = "held_out.jsonl"  # in a run folder: the keys of the rows that `data.validation_share` holds out
MOST_TOKENS = 5  # that a message names


class Feed:
    """The micro batches of a run. Every rank creates one, and all ranks call its methods together.

    `saved` says how much of the data the run's last checkpoint has trained. `resume` must come before the
    first `train`.
    """

    def __init__(self, config: RunConfig, source: Source, saved: CheckpointInfo):
        self._config, self._train = config, config.train
        self._begun = saved.step, 0 if config.data.restart else saved.extra.get("rows", 0)
        # no thread without workers: encoding draws from generators of this process, which a step may be using
        self._reader = ThreadPool(1, setup.use_device, [setup.device()]) if config.data.num_workers else None
        self._coming: Callable[[], list[Batch]] | None = None  # the next step's micro batches
        self._dropped_before, self._dropped = Counter(saved.extra.get("dropped", {})), 0
        self._count = derived(config, dist.get_world_size())["micro_batches_per_step"]
        self._broadcaster = BatchBroadcaster()
        self._data: RunData | None = None  # None on a rank that only receives
        self._batches: Iterator[Batch] | None = None
        if self._broadcaster.reads:
            self._submit(partial(self._open, source))()
        rows_in = self._data.train_loader.rows_in if setup.is_first_rank() else None
        self._epochs = Epochs(rows_in) if rows_in and rows_in(1) else None  # None also where it is not known
        # of which the log says what was trained, and validated; none unless there are several
        self.sources, self.valid_sources = setup.on_first_rank(lambda: self._data.sources)

    def _open(self, source: Source) -> None:
        rank, ranks = setup.data_parallel_place()
        data = self._data = RunData(self._config, source.processor, source.needs, rank, ranks)
        data.notes += vocabulary_notes(source.processor, source.description.text.vocab_size)
        watchdog.count_as_progress(self._data.drops.summary)
        if data.valid_loader and setup.is_first_rank() and (self._train.eval_every or self._train.keep_best):
            data.valid_loader.probe_sources()  # or the run would end at its first validation
        if self._config.data.validation_share and setup.is_first_rank():
            lines = [json.dumps({"key": key}) + "\n" for key in self._data.valid_loader.keys()]
            atomic_write(Path(self._config.run_dir, HELD_OUT), "".join(lines))

    @property
    def reads(self) -> bool:
        """Whether this rank reads data, and does not only receive it."""
        return self._data is not None

    def milestones(self) -> StepSchedule:
        """The steps of the run, counted by its data; on the first rank alone."""
        has_questions = self._config.data.score_path is not None
        check_validation(
            self._train, self._data.valid_loader is not None, self._data.sources[1], has_questions
        )
        return milestones(self._train, self._epochs, *self._begun)

    def resume(self, resumed: CheckpointInfo | None) -> None:
        """Begin to read: where `resumed` was saved, unless the data is to begin again (`data.restart`)."""
        watchdog.beat("finding the place in the data")
        self._resumed = resumed
        if self._data:
            self._submit(partial(self._begin, resumed))()

    def _begin(self, resumed: CheckpointInfo | None) -> None:
        if resumed and resumed.step and not self._config.data.restart:  # an import, step 0, has read no data
            self._data.train_loader.load_states(resumed.loader_states)
        self._batches = iter(self._data.train_loader)

    @record_function("data")
    def train(self, step: int, read_ahead: bool) -> list[Batch]:
        """The micro batches of a step; with `read_ahead`, the next step's are read meanwhile.

        Raises ReadFailed on every rank if any rank could not read.
        """
        watchdog.beat(f"waiting for the data of step {step}")
        take = partial(self._broadcaster.take, self._batches, self._count, self._data and self._data.drops)
        coming = self._coming or self._submit(take)
        micro_batches, self._coming = coming(), None
        if self._data:
            self._dropped = self._data.drops.total_arrived()
        if self._reader is not None and read_ahead:
            self._coming = self._submit(take)
        return micro_batches

    def _submit(self, do: Callable[[], Any]) -> Callable[[], Any]:
        """Begin `do`; returns a function that waits for its result. All reading is the reader's: there, a
        data worker's death is an error like others; torch would let it interrupt a step."""
        return do if self._reader is None else self._reader.apply_async(do).get

    def rows_after(self, step: int) -> int:
        """How many rows of the data were trained when `step` ends, on all ranks together."""
        done, rows = self._begun
        return rows + (step - done) * self._train.global_batch_size

    def epoch_after(self, step: int) -> dict[str, float]:
        """{"epoch": how many epochs of the data were trained when `step` ends}; empty if that is not known,
        and on all ranks but the first."""
        return {"epoch": self._epochs.at(self.rows_after(step))} if self._epochs else {}

    def notes(self, milestones: StepSchedule) -> Iterator[str]:
        """Lines that a user should know about where the run begins, and its data, before the first step."""
        if self._resumed:
            yield f"resumed after step {self._resumed.step} from {self._resumed.path}"
        if self._begun[0] and self._config.data.restart:
            yield "data.restart: the data begins again from here"
        if self._data:
            yield from (*self._data.notes, *self._data.train_loader.notes)
            yield from validation_notes(self._train, self._data.valid_loader is not None)
        last = milestones.steps
        if self._epochs:
            yield from self._epochs.notes(self._config, last, self.rows_after(last))
        yield from milestones.notes(self._begun[0])

    def valid(self, step: int) -> Callable[[int], list[Batch]]:
        """One pass over the validation split after a step: a function (count) -> the next batches, fewer at
        the end."""
        watchdog.beat(f"evaluating after step {step}")
        batches = self._data and iter(self._data.valid_loader or ())
        return lambda count: self._submit(partial(self._broadcaster.take, batches, count))()

    def state(self) -> Any:
        """The loader state of a reading rank, for a checkpoint; None on the others."""
        return self._data and self._data.train_loader.state_dict()

    def dropped_everywhere(self) -> int:
        """The number of samples that all ranks dropped up to the last step; on the first rank alone."""
        return self._dropped_before.total() + self._dropped

    def progress(self, step: int) -> dict[str, Any]:
        """Rows trained and samples dropped, for a checkpoint of `step`. Every rank calls it."""
        return {"rows": self.rows_after(step), "dropped": self.dropped_by_reason()}

    def dropped_by_reason(self) -> dict[str, int]:
        """The same until now by reason. Every rank calls it; a checkpoint holds it as `dropped`."""
        arrived = self._data.drops.arrived if self._data else {}
        return dict(sum(map(Counter, setup.from_all_ranks(arrived)), self._dropped_before))

    def close(self) -> None:
        """End the data workers at once."""
        if self._data:
            self._data.close()
        if self._reader is not None:
            self._reader.close()  # after the workers, which it began


def vocabulary_notes(processor: ProcessorMixin, size: int) -> list[str]:
    """A line about the tokens of the tokenizer, without media's, that are none of the model's `size`."""
    beyond_model = ((token, name) for name, token in processor.tokenizer.get_vocab().items() if token >= size)
    media = [getattr(processor, f"{kind}_token_id", None) for kind in ("image", "video")]
    tokens = sorted(pair for pair in beyond_model if pair[0] not in media)
    if not tokens:
        return []
    names = listed([f"{name} ({token})" for token, name in tokens], MOST_TOKENS)
    count = f"{len(tokens)} {'tokens' if len(tokens) > 1 else 'token'}"
    return [
        f"model.hf_path: its tokenizer has {count}, {names}, and the model has {size} "
        "(vocab_size in its config.json, the rows of its embedding); a sample with one of them would end the "
        "run. Give the model rows for them with Transformers (resize_token_embeddings) and save it in the "
        "folder model.hf_path"
    ]
