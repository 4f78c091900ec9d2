"""The names under which a record may have its fields."""

TURNS = ("conversations", "messages")
PROMPTS, QUERIES = ("question", "prompt", "instruction"), ("query", "input")
REPLIES = ("answer", "response", "completion", "output")
PLAIN = ("texts", "caption", "history", *PROMPTS, *QUERIES, *REPLIES)
CHOSEN, REJECTED = "chosen", "rejected"
REJECTED_REPLY, REJECTED_TURNS = "rejected_response", "rejected_messages"
REJECTIONS = (REJECTED, REJECTED_REPLY, REJECTED_TURNS)
MEDIA = {"image": ("images", "image"), "video": ("videos", "video")}
AUDIO = ("audios", "audio")  # no model is trained on it
BOXES = ("bbox", "bbox_xyxy", "bbox_xywh")  # what the numbers of the first are, `records.grounded` finds out
EXPRESSIONS = ("sentences", "sentence", "sents", "sent", "expressions", "expression", "phrase")
# Names of one kind; a column that is mapped to one of them hides the others
GROUPS = (
    TURNS + PLAIN,
    *MEDIA.values(),
    ("system",),
    ("tools", "functions"),
    ("objects",),
    BOXES,
    EXPRESSIONS,
)
GROUPS += ((CHOSEN,), REJECTIONS)
FIELDS = tuple(name for group in GROUPS for name in group)
