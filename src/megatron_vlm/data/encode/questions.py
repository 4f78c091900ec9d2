"""`ChatMLSample` → its conversation up to the last reply, as a question to a model, and that reply."""

from dataclasses import dataclass, replace

import torch

from megatron_vlm.batch import Prompt
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import is_blank
from megatron_vlm.data.chatml.sample import ChatMLSample
from megatron_vlm.data.encode.chat_template import text_of
from megatron_vlm.data.encode.encoder import DocumentEncoder, without_thinking
from megatron_vlm.data.media.images import call_with_timeout
from megatron_vlm.data.media.videos import decode_video
from megatron_vlm.data.on_disk.fields import REFERENCES


@dataclass
class Question:
    """A conversation up to its last reply: `text` is the last user's turn, and `references` are the right
    answers, that reply among them."""

    key: str
    text: str
    references: list[str]
    prompt: Prompt


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
        # the prompt has the turns before that reply, with the media that lie in them
        prompt_sample = _first_turns(sample, messages[:last])
        seconds = self._data.decode_seconds
        videos = [
            call_with_timeout(seconds, decode_video, video, rules)
            for video, rules in self._videos(prompt_sample)
        ]
        chat = self.chat.prompt(
            prompt_sample.messages, prompt_sample.tools, len(prompt_sample.imgs), len(videos)
        )
        text, visual = self.processing(chat, self._images(prompt_sample), videos)
        if misfit := self._needs.misfit(text.input_ids, visual):
            raise BadSample("model_refuses", misfit)
        ids = torch.from_numpy(text.input_ids)
        positions = self._needs.position_ids(ids, visual)
        prompt: Prompt = {"input_ids": ids, "position_ids": positions, "visual_inputs": visual}
        users = [turn for turn in prompt_sample.messages if turn["role"] == "user"]
        return Question(sample.__key__, text_of(users[-1]) if users else "", references, prompt)


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
