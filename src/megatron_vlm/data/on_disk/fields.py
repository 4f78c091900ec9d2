"""The table of what is read of a record: the names of its fields, of its turns' keys, roles and parts.

`data.chatml` reads records by it. What a limit of a medium is called stands in `data.chatml.record`.
"""

# -- a record
TURNS = ("conversations", "messages")  # also `conversation`, if it is a list and not a text beside the turns
PROMPTS, QUERIES = ("question", "prompt", "instruction"), ("query", "input")
ANSWERS = "answers"  # several right ones
REPLIES = ("answer", "response", "completion", "output", ANSWERS)
EXCHANGE = ("history", *PROMPTS, *QUERIES, *REPLIES)
PLAIN = ("texts", "caption", "text", *EXCHANGE)
REWARD = "reward_model"  # verl: an object with the reference answer, `ground_truth`
LABELS = ("label", "kto_tag")  # TRL and LLaMA-Factory: false for an answer that is not to be learned
CHOSEN, REJECTED = "chosen", "rejected"
REJECTED_REPLY, REJECTED_TURNS = "rejected_response", "rejected_messages"
REJECTIONS = (REJECTED, REJECTED_REPLY, REJECTED_TURNS)
MEDIA = {"image": ("images", "image"), "video": ("videos", "video")}
MAY_BE_TURNS = {*TURNS, "conversation", *PROMPTS, *REPLIES, CHOSEN, *REJECTIONS}  # also in JSON text
AUDIO = ("audios", "audio")  # no model is trained on it
TOOLS = ("tools", "functions")  # OpenAI's name, and its older one
# What rewards do not get of a record: they get prompts and answers, and all its other fields
NO_COLUMNS = {*TURNS, "conversation", "prompt", "completion", "history", "texts", "system", *TOOLS, "objects"}
NO_COLUMNS |= {CHOSEN, *REJECTIONS, *MEDIA["image"], *MEDIA["video"], *AUDIO}
IDS = ("id", "uid", "sample_id", "question_id")  # of a record, the first one that it has
COLUMNS = "_columns"  # in our shards: an object of these other fields
# Names of one kind; a column that is mapped to one of them hides the others
WHOLE = (*TURNS, "texts", "caption", "text")  # each is a conversation without any of EXCHANGE
GROUPS = (WHOLE, ("history",), PROMPTS, QUERIES, REPLIES, *MEDIA.values(), ("system",), TOOLS, ("objects",))
GROUPS += ((CHOSEN,), REJECTIONS)
FIELDS = tuple(name for group in GROUPS for name in group)

# -- a turn
ROLE, CONTENT = ("role", "from"), ("content", "value")  # and `text`, in a turn that has neither
WEIGHTS = ("loss", "weight", "train")  # OpenAI's weight, axolotl's train
REFERENCES = "references"  # of a reply: all right answers, which evaluation compares with
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")  # beside a reply's content
CALLS = ("tool_calls", "function_call")  # OpenAI's name, and its older one
DOCUMENT = "document"  # the role of a conversation's only turn: interleaved text and images, all text trained
TRAINED = ("assistant", DOCUMENT)
CALL = "tool_call"  # the role of a turn whose text is a call, or a list of calls; it becomes a reply's
ROLES = {  # as people name it, in any case -> the role
    DOCUMENT: DOCUMENT,
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "ai"), "assistant"),
    **dict.fromkeys((CALL, "function_call"), CALL),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "function_response"), "tool"),
    **dict.fromkeys(("ipython", "environment"), "tool"),
}
TAGS = {  # LLaMA-Factory's names of roles -> the role
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": CALL,
    "system_tag": "system",
}

# -- a part of a turn
PARTS = {"text": "text", "image": "image", "image_url": "image", "video": "video", "video_url": "video"}
PARTS |= {"input_text": "text", "output_text": "text", "input_image": "image"}  # OpenAI's Responses
AUDIO_PARTS = ("audio", "audio_url", "input_audio")
# Where a part of type image or video names its medium, after its type's name and `image_url` or `video_url`
MEDIUM = ("source", "url", "path")
TIMES = ("fps", "timestamps")  # of a video's frames
