"""What the sizes of an Energon dataset's images are drawn from, if they are."""

from collections.abc import Iterator
from typing import Any

from megatron.energon import SavableDataset, WorkerConfig
from megatron.energon.flavors.base_dataset import add_sample_restore_key
from megatron.energon.wrappers.base import BaseWrapperDataset

from megatron_vlm.data.shard_format import SIZES


class InSizes(BaseWrapperDataset[dict, dict]):
    """The records of an Energon dataset, whose images have `count` sizes, a new one each epoch.

    A record's epoch is how often this worker had read the dataset before. It is part of the record's restore
    key and of the dataset's state, so a resumed run and a replay have the same sizes. `seed` decides which.
    """

    _savable_fields = ("_epoch",)

    def __init__(self, dataset: SavableDataset[dict], count: int, seed: int, worker_config: WorkerConfig):
        super().__init__(dataset, worker_config=worker_config)
        self._count, self._seed = count, seed
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self._epoch = 0

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def __iter__(self) -> Iterator[dict]:
        for record in self.dataset:
            yield self._sized(record, self._epoch)
        self._epoch += 1

    def restore_sample(self, restore_key: tuple) -> dict:
        _, epoch, *inner = restore_key
        return self._sized(self.dataset.restore_sample(tuple(inner)), epoch)

    def _sized(self, record: dict, epoch: int) -> dict:
        record[SIZES] = f"{self._seed} {epoch % self._count}"
        return add_sample_restore_key(record, epoch, src=self)

    def config(self) -> dict[str, Any]:
        return {
            "type": type(self).__qualname__,
            "dataset": self.dataset.config(),
            "count": self._count,
            "seed": self._seed,
            "worker_config": self.worker_config.config(),
        }
