"""The settings that bring the names of a source to the names that are read, `data.on_disk.fields`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.on_disk.fields import (
    CHOSEN,
    EXCHANGE,
    FIELDS,
    GROUPS,
    REJECTED,
    REJECTED_TURNS,
    TAGS,
    TURNS,
    WHOLE,
)
from megatron_vlm.messages import suggestion

TAGGED = (*TURNS, CHOSEN, REJECTED, REJECTED_TURNS)


@dataclass(frozen=True)
class Columns:
    """Called with a record as it is stored: the record with the package's names.

    names     ours → the source's, such as {"conversations": "chat", "images": "pictures"}; if a column of one
              kind (turns, images, ...) is mapped, other columns of that kind are ignored
    tags      how turns are written, by LLaMA-Factory's names (`role_tag`, `content_tag`, `user_tag`, ...)

    Raises ValueError for a name that does not exist here.
    """

    names: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in FIELDS:
                raise ValueError(f"data.columns: {name} is no column that is read{suggestion(name, FIELDS)}")
        tag_names = ("role_tag", "content_tag", *TAGS)
        for name in self.tags:
            if name not in tag_names:
                raise ValueError(f"tags: {name} is no tag{suggestion(name, tag_names)}")

    def __call__(self, record: Any) -> dict:
        """The record. Raises BadSample if it is neither an object nor a list of turns."""
        if isinstance(record, list):
            record = {"messages": record}
        if not isinstance(record, dict):
            raise BadSample("bad_conversation", f"a record is a JSON object, this is {type(record).__name__}")
        record = self._renamed(record) if self.names else record
        tagged = [name for name in TAGGED if record.get(name)] if self.tags else ()
        return record | {name: self._tagged(record[name]) for name in tagged}

    def of_arrow(self, row: dict) -> dict:
        """The record of a row of `datasets`, without the keys that hold None: Arrow gives every struct all
        keys of its column. Raises BadSample."""
        return self(_without_nulls(row))

    def check(self, present: list[str], place: str) -> None:
        """Raises ValueError if a mapped column is not among those `present`."""
        for field_name, column in self.names.items():
            if column not in present:
                raise ValueError(
                    f"data.columns: {place} has no column {column} to read as {field_name}"
                    + suggestion(column, sorted(present))
                )

    def _renamed(self, record: dict) -> dict:
        hidden = {name for group in GROUPS if not self.names.keys().isdisjoint(group) for name in group}
        hidden.update(self.names.values())
        if not self.names.keys().isdisjoint(WHOLE):
            hidden.update(EXCHANGE)
        elif not self.names.keys().isdisjoint(EXCHANGE):
            hidden.update(WHOLE)
        mapped = {field_name: record[column] for field_name, column in self.names.items() if column in record}
        return {name: value for name, value in record.items() if name not in hidden} | mapped

    def _tagged(self, turns: Any) -> Any:
        """Turns, or one turn, with role and content; anything else as it is."""
        if isinstance(turns, list):
            return [self._tagged(turn) for turn in turns]
        role_tag, content_tag = self.tags.get("role_tag", "from"), self.tags.get("content_tag", "value")
        if not (isinstance(turns, dict) and role_tag in turns and content_tag in turns):
            return turns
        roles = {self.tags[tag]: role for tag, role in TAGS.items() if tag in self.tags}
        other_keys = {name: value for name, value in turns.items() if name not in (role_tag, content_tag)}
        name = turns[role_tag]
        role = roles.get(name, name) if isinstance(name, str) else name
        return other_keys | {"role": role, "content": turns[content_tag]}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
