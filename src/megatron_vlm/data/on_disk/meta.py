"""Tell a meta file in LLaMA-Factory's format from a file of records."""

import json
from pathlib import Path

from megatron_vlm.files import read_file

META_SOURCES = ("file_name", "hf_hub_url")
NUMBERS = ("sample_ratio", "num_samples")
FIELDS = {
    **dict.fromkeys((*META_SOURCES, "media_dir", "split", "subset"), str),
    **dict.fromkeys(("columns", "tags"), dict),
}
META_KEYS = {*FIELDS, *NUMBERS, "formatting", "ranking"}  # the last two are not read: records tell
LARGEST_META = 1 << 24  # bytes


def read_meta(path: Path) -> dict[str, dict] | None:
    """Return the entries of a meta file, or None for a file that is something else."""
    try:
        content = json.loads(read_file(path, LARGEST_META))
    except (ValueError, RecursionError):  # JSON Lines, or damaged: who reads it line by line will see
        return None
    is_meta = isinstance(content, dict) and content and all(isinstance(e, dict) for e in content.values())
    entries = content.values() if is_meta else ()  # or {id: record}
    named = any({*META_SOURCES} & entry.keys() or entry.keys() <= META_KEYS for entry in entries)
    return content if named else None
