"""An HTML page of a model's answers, with the images that it saw."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image
from transformers import ProcessorMixin

from megatron_vlm.batch import GenericVisualInputs
from megatron_vlm.data.grounding.boxes import Boxes
from megatron_vlm.data.grounding.drawing import draw
from megatron_vlm.data.kinds import kind_of
from megatron_vlm.extras.evaluate.metrics import Parts, Score
from megatron_vlm.extras.preview.page import pictures_of, rendered, scaled

MOST_PICTURES = 8  # of an answer; a video has many frames


@dataclass(frozen=True)
class ShownAnswer:
    """A record of an answer, its own scores, and the pictures that the model saw."""

    record: Mapping[str, Any]
    parts: Parts
    pictures: Sequence[Image.Image]

    @property
    def scores(self) -> dict[str, float]:
        return {name: points / of for name, (points, of) in self.parts.items() if of}


def seen_pictures(visual: GenericVisualInputs | None, processor: ProcessorMixin) -> list[Image.Image]:
    """The images of a prompt whole as the model saw them, and of each video the frames."""
    kind = kind_of(processor)
    pictures: list[Image.Image] = []
    for item in visual.items() if visual is not None else ():
        parts = pictures_of(item, kind)
        pictures += [parts[kind.whole]] if item.pixel_values is not None else parts
    return pictures


def with_boxes(picture: Image.Image, record: Mapping[str, Any], boxes: Boxes) -> Image.Image:
    """The picture with the boxes of an answer and of its references, each named so."""
    texts = [("reference", text) for text in record["references"]] + [("answer", record["answer"])]
    shapes = [
        replace(scaled(shape, picture.size), label=name)
        for name, text in texts
        for shape in boxes.seen(text, picture.size)
    ]
    return draw(picture, shapes)


def answers_page(
    title: str,
    data: str,
    scores: Mapping[str, Score],
    unscored: Mapping[str, Sequence],
    worst: Sequence[ShownAnswer],
) -> str:
    """One HTML document without references to others: the scores with their intervals, what has none, with
    how many and an example's key, and the worst answers. All text of records is escaped."""
    return rendered(
        TEMPLATE, title=title, data=data, scores=scores, unscored=unscored, worst=worst, most=MOST_PICTURES
    )


TEMPLATE = """{% include "head" %}
<p>{{ data }}</p>
<table><tr><th>score</th><th>value</th><th>95 % interval</th><th>samples</th></tr>
{% for name, score in scores.items() %}
<tr><td>{{ name }}{% if not score.higher_is_better %} (less is better){% endif %}</td>
<td>{{ "%.4f" | format(score.score) }}</td>
<td>{{ "%.4f" | format(score.low) }} to {{ "%.4f" | format(score.high) }}</td>
<td>{{ score.samples }}</td></tr>
{% endfor %}</table>
{% if unscored %}
<h2>Without a score</h2>
<table><tr><th>why</th><th>samples</th><th>such as</th></tr>
{% for why, (count, key) in unscored.items() %}
<tr><td>{{ why }}</td><td>{{ count }}</td><td>{{ key }}</td></tr>
{% endfor %}</table>
{% endif %}
<h2>Worst answers</h2>
{% for answer in worst %}
<article><header>{{ answer.record.key }}:
{% for name, score in answer.scores.items() %}
{{ name }} {{ "%.3f" | format(score) }}
{% endfor %}</header>
<p>{% for picture in answer.pictures[:most] %}<img alt="as the model saw it" src="{{ picture | url }}">
{% endfor %}
{% if answer.pictures | length > most %}and {{ answer.pictures | length - most }} more{% endif %}</p>
<table><tr><th>question</th><td class="text">{{ answer.record.question }}</td></tr>
<tr><th>reference</th><td class="text">{{ answer.record.references | join("\\n") }}</td></tr>
<tr><th>answer</th><td class="text">{{ answer.record.answer }}
{%- if answer.record.finish_reason == "length" %} … (cut){% endif %}</td></tr></table>
</article>
{% else %}<p>No answer has a score.</p>
{% endfor %}
</body></html>
"""
