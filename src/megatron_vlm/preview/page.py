"""An HTML page that shows rows of a run's data."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin

from megatron_vlm.batch import Batch, GenericVisualInputs, document_spans, is_raw

BINS = 16
SHOWN_EDGE = 360  # pixels of the longer side of a picture on the page
READ, TRAINED, VISUAL = "read", "trained", "visual"


@dataclass
class TokenRun:
    """Adjacent tokens of one kind: READ or TRAINED text, or the placeholders of one VISUAL item."""

    kind: str
    tokens: int
    text: str = ""
    pictures: tuple[str, ...] = ()  # data URLs of an image, or of a video's frames


@dataclass
class Document:
    key: str
    tokens: int
    positions: str
    runs: list[TokenRun]


@dataclass
class Row:
    documents: list[Document]
    tokens: int  # without padding
    trained: int
    length: int


class RowReader:
    """Batches → what the page shows of their rows.

    `visual_kinds` and `visual_tokens` are of the checkpoint's `Description`.
    """

    def __init__(
        self,
        processor: ProcessorMixin,
        visual_kinds: Callable[[Tensor], Tensor],
        visual_tokens: Callable[[GenericVisualInputs], list[int]],
    ):
        self._tokenizer, self._image_processor = processor.tokenizer, processor.image_processor
        self._visual_kinds, self._visual_tokens = visual_kinds, visual_tokens

    def __call__(self, batch: Batch) -> Row:
        """The row of the page that shows a batch's only row."""
        (row,) = self.rows(batch)
        return row

    def rows(self, batch: Batch) -> list[Row]:
        items, found = self._items(batch) if batch["visual_inputs"] is not None else [], []
        rows, length = batch["input_ids"].shape
        for row in range(rows):
            here = [(start - row * length, stop - row * length, pictures) for start, stop, pictures in items]
            found.append(self._row(batch, row, here))
        return found

    def _row(self, batch: Batch, row: int, items: list[tuple[int, int, tuple[str, ...]]]) -> Row:
        numbers_S, ids_S = batch["attention_mask"][row], batch["input_ids"][row]
        documents = []
        for number, key in enumerate(batch["__key__"][row], start=1):
            places = (numbers_S == number).nonzero().flatten()
            first, stop = int(places[0]), int(places[-1]) + 1
            # the mask of a label belongs to the token after it
            trained_S = torch.nn.functional.pad(batch["loss_mask"][row] > 0, (1, 0))
            inside = [item for item in items if first <= item[0] < stop]
            runs = list(self._runs(ids_S, trained_S, inside, first, stop))
            positions = _positions(batch["position_ids"][..., row, first:stop])
            documents.append(Document(key, stop - first, positions, runs))
        tokens, trained = int((numbers_S > 0).sum()), int((batch["loss_mask"][row] > 0).sum())
        return Row(documents, tokens, trained, len(ids_S))

    def _items(self, batch: Batch) -> list[tuple[int, int, tuple[str, ...]]]:
        """(first token, stop, pictures) of every image and video, in text order; tokens of all rows."""
        ids, visual, found = batch["input_ids"].flatten(), batch["visual_inputs"], []
        kinds = torch.zeros_like(ids)
        for span in document_spans(batch["attention_mask"]):
            kinds[span] = self._visual_kinds(ids[span])
        places = {kind: iter((kinds == kind).nonzero().flatten().tolist()) for kind in (1, 2)}
        for item, count in zip(visual.items(), self._visual_tokens(visual), strict=True):
            kind = 1 if item.pixel_values is not None else 2
            taken = [next(places[kind]) for _ in range(count)]
            pictures = tuple(map(data_url, pictures_of(item, self._image_processor)))
            found.append((taken[0], taken[-1] + 1, pictures))
        return sorted(found)

    def _runs(
        self, ids_S: Tensor, trained_S: Tensor, items: list, first: int, stop: int
    ) -> Iterator[TokenRun]:
        for start, end, pictures in [*items, (stop, stop, ())]:
            yield from self._text_runs(ids_S[first:start], trained_S[first:start])
            if end > start:
                yield TokenRun(VISUAL, end - start, pictures=pictures)
            first = end

    def _text_runs(self, ids_T: Tensor, trained_T: Tensor) -> Iterator[TokenRun]:
        cuts = (trained_T[1:] != trained_T[:-1]).nonzero().flatten() + 1
        for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(ids_T)], strict=True):
            if stop > start:
                kind = TRAINED if trained_T[start] else READ
                yield TokenRun(kind, stop - start, self._tokenizer.decode(ids_T[start:stop]))


def _positions(position_ids: Tensor) -> str:
    """The range of positions: `0–41`, or with three axes `t 0–41 · h 0–49 · w 0–49`."""
    axes = position_ids if position_ids.dim() == 2 else position_ids[None]
    ranges = [f"{int(axis.min())}–{int(axis.max())}" for axis in axes]
    return (
        " · ".join(f"{name} {r}" for name, r in zip("thw", ranges, strict=True))
        if axes[1:].any()
        else ranges[0]
    )


# --- pictures --------------------------------------------------------------------------------------------


def pictures_of(item: GenericVisualInputs, image_processor: Any) -> list[Image.Image]:
    """The image, or every frame of the video, as the model sees it."""
    grid = item.image_grid_thw if item.image_grid_thw is not None else item.video_grid_thw
    pixels = item.pixel_values if item.pixel_values is not None else item.pixel_values_videos
    if is_raw(pixels) or hasattr(image_processor, "encoder_patch_size"):  # LFM2-VL's keeps them last
        pixels = _colours_first(pixels)
    if grid is not None:
        frames_TCHW = _unpatched(pixels, grid[0].tolist(), image_processor)
        if item.image_grid_thw is not None:  # repeated over the moments that the tower joins
            frames_TCHW = frames_TCHW[:1]
    elif item.image_sizes is not None and item.image_tiles is None:
        height, width = item.image_sizes[0].tolist()
        frames_TCHW = pixels[..., :height, :width]
    else:
        frames_TCHW = pixels
    return [
        Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in _as_bytes(frames_TCHW, image_processor)
    ]


def _colours_first(raw: Tensor) -> Tensor:
    """Pixels with colours last, such as raw ones, in the axis order of most ready ones."""
    return (
        raw.permute(0, 3, 1, 2) if raw.dim() == 4 else raw.unflatten(-1, (-1, 3)).transpose(1, 2).flatten(1)
    )


def _unpatched(patches_PF: Tensor, grid: list[int], image_processor: Any) -> Tensor:
    """Images (T, C, H, W) from patches: in merged squares, as Qwen2-VL's image processor orders them, or in
    rows, as LFM2-VL's does."""
    merge = getattr(image_processor, "merge_size", 1)
    patch = getattr(image_processor, "patch_size", None) or image_processor.encoder_patch_size
    times, height, width = grid[0], grid[1] // merge, grid[2] // merge
    folded = patches_PF.view(times, height, width, merge, merge, 3, -1, patch, patch)
    return folded.permute(0, 6, 5, 1, 3, 7, 2, 4, 8).reshape(-1, 3, grid[1] * patch, grid[2] * patch)


def _as_bytes(frames_TCHW: Tensor, image_processor: Any) -> Tensor:
    if is_raw(frames_TCHW):
        return frames_TCHW
    mean, std = (
        torch.tensor(x).view(-1, 1, 1) for x in (image_processor.image_mean, image_processor.image_std)
    )
    return ((frames_TCHW.float() * std + mean) * 255).round().clamp(0, 255).byte()


def data_url(picture: Image.Image) -> str:
    """A data URL of the picture as JPEG, at most SHOWN_EDGE pixels wide and high."""
    picture = picture.copy()
    picture.thumbnail((SHOWN_EDGE, SHOWN_EDGE))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


# --- the page --------------------------------------------------------------------------------------------


@dataclass
class Histogram:
    title: str
    bars: list[tuple[str, int, float]]  # label, count, height in percent
    lowest: str
    highest: str


def histogram(title: str, values: Iterable[float]) -> Histogram:
    counts, edges = np.histogram(list(values), bins=BINS)
    labels = [f"{low:,.0f} to {high:,.0f}" for low, high in zip(edges[:-1], edges[1:], strict=True)]
    highest = max(1, counts.max())
    bars = [(label, int(n), 100 * n / highest) for label, n in zip(labels, counts, strict=True)]
    return Histogram(title, bars, f"{edges[0]:,.0f}", f"{edges[-1]:,.0f}")


def page(title: str, settings: str, rows: list[Row], shown: int, drops: list[dict]) -> str:
    """One HTML document without references to others: statistics of all rows, and the first `shown` of them.

    `drops` have `key`, `reason` and `detail` each. All text of records is escaped.
    """
    documents = [document for row in rows for document in row.documents]
    histograms = [
        histogram("tokens of a document", (document.tokens for document in documents)),
        histogram("documents in a row", (len(row.documents) for row in rows)),
        histogram(
            "% of a row's tokens that are not padding", (100 * row.tokens / row.length for row in rows)
        ),
        histogram("% of a row's tokens that are trained", (100 * row.trained / row.length for row in rows)),
    ]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE).render(
        title=title,
        settings=settings,
        rows=rows[:shown],
        totals={
            "rows": len(rows),
            "documents": len(documents),
            "tokens": sum(row.tokens for row in rows),
            "trained tokens": sum(row.trained for row in rows),
            "padding": sum(row.length - row.tokens for row in rows),
        },
        histograms=histograms,
        drops=drops,
        reasons=Counter(drop["reason"] for drop in drops),
    )


TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
:root { color-scheme: light dark; --line: #8885; --trained: #2a9d4a44; --visual: #4a6ad033; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
.totals, .histograms { display: flex; flex-wrap: wrap; gap: 1rem 2rem; }
.totals b { display: block; font-size: 1.4rem; }
figure { margin: 0; } figcaption { font-size: .85rem; }
.bars { display: flex; align-items: flex-end; gap: 2px; height: 7rem; width: 15rem;
  border-bottom: 1px solid var(--line); }
.bars div { flex: 1; background: #4a6ad0; min-height: 1px; }
article { border: 1px solid var(--line); border-radius: 8px; margin: 1.5rem 0; }
article > header { padding: .5rem 1rem; border-bottom: 1px solid var(--line); font-weight: 600; }
section { padding: .5rem 1rem 1rem; } section + section { border-top: 3px double var(--line); }
section > header { font-size: .85rem; opacity: .75; margin-bottom: .3rem; overflow-wrap: anywhere; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; }
.trained { background: var(--trained); border-radius: 3px; }
.visual { display: inline-block; background: var(--visual); border-radius: 6px; padding: 4px; margin: 2px;
  white-space: normal; }
.visual img { display: inline-block; max-width: 100%; vertical-align: top; }
.visual small { display: block; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; border: 1px solid var(--line);
  text-align: left; overflow-wrap: anywhere; }
summary { cursor: pointer; } pre { overflow-x: auto; }
</style></head><body>
<h1>{{ title }}</h1>
<p class="totals">{% for name, count in totals.items() %}
<span><b>{{ "{:,}".format(count) }}</b>{{ name }}</span>
{% endfor %}</p>
<div class="histograms">
{% for h in histograms %}
<figure><div class="bars">{% for label, count, height in h.bars %}
<div style="height: {{ height }}%" title="{{ label }}: {{ count }}"></div>{% endfor %}</div>
<figcaption>{{ h.title }}: {{ h.lowest }} to {{ h.highest }}</figcaption>
</figure>
{% endfor %}
</div>
{% if drops %}
<h2>Dropped</h2>
<table><tr><th>reason</th><th>samples</th></tr>
{% for reason, count in reasons.items() %}<tr><td>{{ reason }}</td><td>{{ count }}</td></tr>
{% endfor %}</table>
<details><summary>which</summary><table><tr><th>sample</th><th>reason</th><th>detail</th></tr>
{% for drop in drops %}<tr><td>{{ drop.key }}</td><td>{{ drop.reason }}</td><td>{{ drop.detail }}</td></tr>
{% endfor %}</table></details>
{% else %}<p>No sample was dropped.</p>{% endif %}
<h2>Rows</h2>
<p><span class="text"><span class="trained">trained</span></span> tokens count in the loss; the others are
only read. A double line parts documents, which do not see each other.</p>
{% for row in rows %}
<article><header>row {{ loop.index }}: {{ row.tokens }} of {{ row.length }} tokens, {{ row.trained }} trained
</header>
{% for document in row.documents %}
<section><header>{{ document.key }}: {{ document.tokens }} tokens, positions {{ document.positions }}</header>
<div class="text">{% for run in document.runs %}{% if run.kind == "visual" %}<span class="visual">
{%- for picture in run.pictures %}<img alt="as processed" src="{{ picture }}">{% endfor -%}
<small>{{ run.tokens }} tokens</small></span>{% else %}<span class="{{ run.kind }}">{{ run.text }}</span>
{%- endif %}{% endfor %}</div></section>
{% endfor %}
</article>
{% endfor %}
<details><summary>settings</summary><pre>{{ settings }}</pre></details>
</body></html>
"""
