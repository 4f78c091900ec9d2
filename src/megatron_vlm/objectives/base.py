"""A run's knowledge of its objective; no torch, so that a wrong setting is answered in a second."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any

from megatron_vlm.config import DataConfig, RunConfig


@dataclass(frozen=True)
class Objective:
    """An entry of `OBJECTIVES`. What computes is named as "module:name" and imported when it is needed.

    loss              a function (config, chunks) -> `training.losses.tokens.StepLoss`; the chunks have the
                      starting weights
    encoder           a class that takes the place of `data.encode.document.DocumentEncoder`, created with the
                      one that it replaces and a DataConfig; None: that one encodes
    documents         how many documents a sample has; they lie in one row, one after another
    figures           the names in `logs` of the loss's reports, and how the progress bar shows each; None:
                      not at all
    reference_passes  forward passes of each micro batch by the starting weights
    record_part       what every record must have, in words, in one of the fields `record_keys`
    problems          the lines about settings that do not go with it
    """

    loss: str
    encoder: str | None = None
    documents: int = 1
    figures: Mapping[str, str | None] = field(default_factory=dict)
    reference_passes: int = 0
    record_part: str = ""
    record_keys: tuple[str, ...] = ()
    problems: Callable[[RunConfig], Iterable[str]] = lambda config: ()

    def step_loss(self, config: RunConfig, chunks: list[Any]) -> Callable[..., Any]:
        """The function that makes the gradients of a run that begins with these chunks' weights."""
        return resolve_name(self.loss)(config, chunks)

    def sample_encoder(self, documents: Any, data: DataConfig) -> Any:
        """The encoder of samples; `documents` encodes one conversation."""
        return resolve_name(self.encoder)(documents, data) if self.encoder else documents
