"""`ChatMLSample` → its conversation up to the last reply, as a question to a model, and that reply."""

import base64
import io
from dataclasses import dataclass, replace

import torch

from megatron_vlm.batch import IGNORE_INDEX, GenericVisualInputs, Prompt
from megatron_vlm.config import RunConfig
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import is_blank
from megatron_vlm.data.chatml.sample import ChatMLSample
from megatron_vlm.data.encode.chat_template import text_of
from megatron_vlm.data.encode.encoder import DocumentEncoder, HFEncoderTaskSample, without_thinking
from megatron_vlm.data.media.images import Scaling, call_with_timeout, decode_image
from megatron_vlm.data.media.videos import decode_video
from megatron_vlm.data.on_disk.fields import REFERENCES

MOST_PICTURES, PICTURE_PIXELS = 4, 128 * 128  # of a prompt, in the log of answers


@dataclass
class Question:
    """A conversation up to its last reply: `text` is the last user's turn, and `references` are the right
    answers, that reply among them."""

    key: str
    text: str
    references: list[str]
    prompt: Prompt
    record_id: str | None = None


class QuestionEncoder(DocumentEncoder):
    """Encodes samples as questions, with the sizes of images and frames of videos that documents have."""

    def question(self, sample: ChatMLSample) -> Question:
        """The question that the sample's last reply answers. Media after that are left out.

        Raises BadSample also if there is no reply, or one that says nothing.
        """
        messages = self._messages_with_boxes(sample)
        last = max((n for n, turn in enumerate(messages) if turn["role"] == "assistant"), default=None)
        references = [] if last is None else references_of(messages[last])
        if not references:
            raise BadSample(
                "no_reference", f"no answer to compare with; roles are {[m['role'] for m in messages]}"
            )
        prompt_sample = _first_turns(sample, messages[:last])
        users = [turn for turn in prompt_sample.messages if turn["role"] == "user"]
        text = text_of(users[-1]) if users else ""
        return Question(sample.__key__, text, references, self._encoded(prompt_sample), sample.record_id)

    def _encoded(self, sample: ChatMLSample) -> Prompt:
        """The conversation with the template's generation prompt at its end."""
        seconds = self._data.decode_seconds
        videos = [
            call_with_timeout(seconds, decode_video, video, rules) for video, rules in self._videos(sample)
        ]
        chat = self.chat.prompt(sample.messages, sample.tools, len(sample.imgs), len(videos))
        text, visual = self.processing(chat, self._images(sample), videos)
        if misfit := self.needs.misfit(text.input_ids, visual):
            raise BadSample("model_refuses", misfit)
        ids = torch.from_numpy(text.input_ids)
        positions = self.needs.position_ids(ids, visual)
        return {"input_ids": ids, "position_ids": positions, "visual_inputs": visual}


class PromptEncoder(QuestionEncoder):
    """Encodes samples as prompts alone, for answers that get rewards; no token of such a row is trained.

    A sample's `asked` has its prompt as messages and the number of their media, the text of the reply that it
    ends with and all right answers (`reference`, `references`; None without), the record's other columns, and
    small pictures of its images; for an engine, their files, too.
    """

    needs_reply = False

    def __init__(self, plain: DocumentEncoder, config: RunConfig):
        super().__init__(plain.processor, config.data, plain.needs)
        self._longest = config.data.seq_length - config.grpo.max_completion_length
        self._with_images = config.grpo.engine is not None

    def encode(self, sample: ChatMLSample) -> HFEncoderTaskSample:
        """The sample as a prompt. Raises BadSample also if it leaves no room for an answer."""
        messages = self._messages_with_boxes(sample)
        ends_with_reply = messages[-1]["role"] == "assistant"
        turns = messages[:-1] if ends_with_reply else messages
        if not turns:
            raise BadSample("bad_conversation", "a reply without a prompt")
        # an answer must have room in a row behind the prompt
        prompt_sample = _first_turns(sample, turns)
        prompt = self._encoded(prompt_sample)
        length = len(prompt["input_ids"])
        if length > self._longest:
            detail = f"a prompt of {length} tokens; data.seq_length leaves {self._longest} beside an answer"
            raise BadSample("over_length", detail)
        return HFEncoderTaskSample.derive_from(
            sample,
            **prompt,
            labels=torch.full((length,), IGNORE_INDEX),
            loss_mask=torch.zeros(length),
            attention_mask=torch.ones(length, dtype=torch.int32),
            document_keys=[sample.__key__],
            asked={
                "prompt": turns,
                "items": _items(prompt["visual_inputs"]),
                "reference": text_of(without_thinking(messages[-1])) if ends_with_reply else None,
                "references": references_of(messages[-1]) if ends_with_reply else None,
                "columns": sample.columns or {},
                "images": prompt_sample.imgs if self._with_images else [],
                "pictures": [_thumbnail(image) for image in prompt_sample.imgs[:MOST_PICTURES]],
            },
        )


def _thumbnail(image: bytes) -> str:
    """A small JPEG of the image in base64, as logs of answers hold it."""
    picture = decode_image(image, Scaling(max_pixels=PICTURE_PIXELS))
    file = io.BytesIO()
    picture.save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


def _items(visual: GenericVisualInputs | None) -> tuple[int, int]:
    """How many images and videos the model sees, as `GenericVisualInputs.items` counts them."""
    items = visual.items() if visual is not None else []
    videos = sum(item.pixel_values_videos is not None for item in items)
    return len(items) - videos, videos


def references_of(reply: dict) -> list[str]:
    """The answers of a clean reply: its text without thinking, or its list of `references`.

    Raises BadSample if these are no list of texts.
    """
    if (listed := reply.get(REFERENCES)) is not None:
        if not (isinstance(listed, list) and listed and all(isinstance(text, str) for text in listed)):
            raise BadSample("bad_conversation", f"references are {listed!r:.100}, not a list of texts")
        return listed
    text = text_of(without_thinking(reply)).strip()
    return [] if is_blank(text) else [text]


def _first_turns(sample: ChatMLSample, messages: list[dict]) -> ChatMLSample:
    """The sample with its first turns alone, and the media that these have."""
    kinds = [part["type"] for message in messages for part in message["content"]]
    images = kinds.count("image")
    videos = kinds.count("video")
    limits = {"image": sample.limits["image"][:images], "video": sample.limits["video"][:videos]}
    imgs = (sample.imgs or [])[:images]
    films = (sample.videos or [])[:videos]
    return replace(sample, messages=messages, imgs=imgs, videos=films, limits=limits)
