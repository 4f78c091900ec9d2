"""`ChatMLSample`, the one sample type of all sources, and how it is made of a conversation and its media."""

from importlib import import_module
from itertools import chain
from types import ModuleType
from typing import Any

from megatron.energon import Sample, edataclass

from megatron_vlm.data.accounts.bad_sample import BadSample
from megatron_vlm.data.chatml.limits import limits_of_media
from megatron_vlm.data.chatml.placeholders import foreign_parts, foreign_placeholders, in_tools, stand_for
from megatron_vlm.data.chatml.record import Conversation, decoded
from megatron_vlm.data.chatml.turns import has_content, is_trained, join_texts


def grounding() -> ModuleType:
    """Return the extra for boxes: `objects_of` a record, and `Boxes`, which writes them as a family does.

    It is the one hook for boxes. Samples whose records have no `objects` do not enter the extra.
    """
    return import_module("megatron_vlm.extras.grounding")


@edataclass
class ChatMLSample(Sample):
    """A clean conversation with its media, still encoded: `make_sample` makes it.

    messages   as chat templates take them, with a part for each medium
    tools      as chat templates take them
    limits     by kind, those that the record names for each image and each video
    objects    what the placeholders for boxes in its text stand for, see `grounding`
    rejected   the messages with the other answer of a preference record, whose media are not placed yet, or
               why they cannot be read; only one objective reads it
    sizes      what the sizes of its images are drawn from, if they are
    problem    why the record cannot be trained on, so that the encoder counts it with all other drops
    """

    messages: list[dict] | None = None
    tools: list[dict] | None = None
    imgs: list[bytes] | None = None
    videos: list | None = None
    limits: dict[str, list[dict]] | None = None
    objects: Any = None
    rejected: list[dict] | BadSample | None = None
    sizes: str | None = None
    problem: BadSample | None = None


def make_sample(
    conversation: Conversation, images: list[bytes], videos: list[bytes | dict], **keys: Any
) -> ChatMLSample:
    """Return the sample of a conversation and its media; `keys` are fields of Energon's `Sample`.

    Raises BadSample for media without places, limits and objects that cannot be, and `no_trained_tokens` when
    no trained reply has content.
    """
    messages = place_media(conversation.messages, len(images), len(videos))
    limits = limits_of_media(messages, conversation.limits)
    replies = [message for message in messages if is_trained(message)]
    if not any(map(has_content, replies)):
        why = f"{len(replies)} replies, all without content" if replies else "no reply to train on"
        raise BadSample("no_trained_tokens", f"{why}; roles are {[m['role'] for m in messages]}")
    objects = None
    if conversation.objects is not None:
        written = decoded(conversation.objects or {})
        objects = grounding().objects_of(written, messages, len(images), conversation.rejected is not None)
    return ChatMLSample(
        messages=messages,
        tools=conversation.tools,
        imgs=images or None,
        videos=videos or None,
        limits=limits,
        objects=objects,
        rejected=conversation.rejected,
        **keys,
    )


def place_media(messages: list[dict], images: int = 0, videos: int = 0) -> list[dict]:
    """Return the messages with exactly one part per medium.

    If users' text holds the placeholder of another model exactly as often as there are media, it is theirs;
    so are placeholders in the text of tools, if all are as many. Many datasets hold images and no placeholder
    at all: these go before the first user's text. Raises BadSample `placeholder_mismatch` in any other case.
    """
    missing: list[dict] = []
    for kind, count in (("image", images), ("video", videos)):
        placeholders = sum(part["type"] == kind for message in messages for part in message["content"])
        if placeholders < count == placeholders + in_tools(messages, kind):
            messages = [_with_foreign(message, kind, "tool") for message in messages]
            placeholders = count
        foreign = foreign_placeholders(messages, kind) if count != placeholders else []
        if placeholders == 0 and stand_for(foreign, count):
            messages = [_with_foreign(message, kind) for message in messages]
        elif placeholders == 0:
            missing += [{"type": kind}] * count
        elif placeholders != count:
            besides = f", and {len(foreign)} {foreign[0]}, which is text beside them" if foreign else ""
            raise BadSample(
                "placeholder_mismatch", f"{placeholders} placeholders for {count} {kind}s{besides}"
            )
    if not missing:
        return messages
    first_user = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if first_user is None:
        raise BadSample("placeholder_mismatch", f"{len(missing)} media items and no user turn to hold them")
    message = messages[first_user]
    message = message | {"content": [*missing, *message["content"]]}
    return [*messages[:first_user], message, *messages[first_user + 1 :]]


def _with_foreign(message: dict, kind: str, role: str = "user") -> dict:
    """Return the message; one of this role with parts in place of other models' placeholders, or tools'."""
    if message["role"] != role:
        return message
    pieces = (foreign_parts(part, kind, role == "tool") for part in message["content"])
    return message | {"content": join_texts(list(chain.from_iterable(pieces)))}
