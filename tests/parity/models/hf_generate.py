"""What Transformers answers: `python hf_generate.py PICTURE FOLDER...` prints version and token ids as JSON.

A program of its own, so that it can run with another version of Transformers on PYTHONPATH.
"""

import json
import sys

import torch
import transformers
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

QUESTION = "What is in this picture?"
NEW_TOKENS = 8


def answer(folder: str, picture: str) -> list[int]:
    processor = AutoProcessor.from_pretrained(folder)
    model, info = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
    text = processor.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
    bos = processor.tokenizer.bos_token
    special = not (bos and text.startswith(bos))
    inputs = processor(
        text=[text], images=[Image.open(picture)], return_tensors="pt", add_special_tokens=special
    )
    output = model.generate(**inputs, do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


if __name__ == "__main__":
    picture, *folders = sys.argv[1:]
    answers = [answer(folder, picture) for folder in folders]
    print(json.dumps({"version": transformers.__version__, "answers": answers}))
