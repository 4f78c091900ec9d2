"""The tiny Qianfan-OCR: InternVL's images, without videos, for which its template writes another token."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from transformers import GotOcr2ImageProcessor, QianfanOCRConfig, QianfanOCRProcessor

from tiny import internvl, qwen
from tiny.family import TinyFamily

MARKERS = {name: token for name, token in internvl.MARKERS.items() if name != "video_token"}


def processor(
    corpus: Iterable[str],
    template: str,
    image_size: int = 56,
    image_tokens: int = 4,
    max_patches: int = 4,
    vocab_size: int = 512,
) -> QianfanOCRProcessor:
    """`image_size` is a tile's side, of which an image has up to `max_patches` and, if several, one more that
    shows it whole; each has `image_tokens`."""
    return QianfanOCRProcessor(
        image_processor=GotOcr2ImageProcessor(
            size={"height": image_size, "width": image_size},
            crop_to_patches=True,
            min_patches=1,
            max_patches=max_patches,
        ),
        tokenizer=qwen.tokenizer(corpus, vocab_size, MARKERS),
        image_seq_length=image_tokens,
        chat_template=template,
    )


FAMILY = TinyFamily(
    qwen.template(image="<image>\n", video=""),
    processor,
    partial(internvl.config, kind=QianfanOCRConfig),
    demo=internvl.FAMILY.demo,
    published=internvl.FAMILY.published,
)
