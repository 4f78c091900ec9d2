"""Answer the held-out questions by generation, with a run's checkpoint or with an exported folder.

    torchrun --nproc_per_node 2 evaluate.py megatron runs/demo/run DATA/held_out.jsonl answers.json
    python evaluate.py transformers runs/demo/hf DATA/held_out.jsonl answers.json

Both write the list of answers in the order of the questions. The prompts are the processor's, so the two
see the same ids and pixels.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

from megatron_vlm.data.chatml.record import parse_record
from megatron_vlm.extras.grounding.objects import Words, read_objects, with_objects

MAX_NEW_TOKENS = 8  # GLM begins with four tokens of empty thoughts; a sum has two digits, then the turn ends
OF_BOX = 40  # a box has up to twelve digits, and what is around them
BATCH = 32
LABELS = Words(lambda shape: "", str, lambda objects: "")  # questions name their digits


def read_questions(path: Path) -> list[dict]:
    """Each record's prompt (HF messages without the answer), image files and expected answer."""
    questions = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        messages = parse_record(record).messages
        if "objects" in record:
            messages = with_objects(messages, read_objects(record["objects"], len(record["images"])), LABELS)
        answer = "".join(part["text"] for part in messages[-1]["content"])
        images = [path.parent / image for image in record["images"]]
        question = {"id": record["id"], "messages": messages[:-1], "images": images, "answer": answer}
        questions.append(question | {"objects": record.get("objects")})
    return questions


def most_tokens(questions: list[dict]) -> int:
    return OF_BOX if any(question["objects"] for question in questions) else MAX_NEW_TOKENS


def answers_of_run(run_dir: Path, questions: list[dict]) -> list[str]:
    """Answers of the Megatron model in the run's own layout; every rank takes part and gets the answers."""
    from megatron_vlm.commands.runs import answers
    from megatron_vlm.overrides import from_yaml

    config = from_yaml((run_dir / "config.yaml").read_text(encoding="utf-8"))
    found = answers(
        config,
        [question["messages"] for question in questions],
        [[image.read_bytes() for image in question["images"]] for question in questions],
        max_new_tokens=most_tokens(questions),
    )
    return [answer for [answer] in found]


def answers_of_folder(folder: Path, questions: list[dict]) -> list[str]:
    """Answers by plain Transformers, used as anyone uses an exported folder; one of adapters with peft."""
    from transformers.utils.logging import disable_progress_bar

    from megatron_vlm.models.hf import load_model, load_processor

    disable_progress_bar()  # reading the folder takes a moment only
    adapter, base = folder / "adapter_config.json", folder
    if adapter.exists():
        base = Path(json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"])
    processor, model = load_processor(base), load_model(base)
    if adapter.exists():
        from peft import PeftModel

        # peft 0.21 asks for it under its old name
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        model = PeftModel.from_pretrained(model, folder)
    answers = [""] * len(questions)
    for batch in batches(questions, BATCH):
        texts = answer_batch(model, processor, [questions[index] for index in batch])
        for index, text in zip(batch, texts, strict=True):
            answers[index] = text
    return answers


def without_thoughts(reply: str) -> str:
    return reply.rpartition("</think>")[2].strip()


def batches(questions: list[dict], size: int) -> list[list[int]]:
    """Indices of questions in batches with equally many images, so that little is padded."""
    order = sorted(range(len(questions)), key=lambda index: len(questions[index]["images"]))
    return [order[start : start + size] for start in range(0, len(order), size)]


def answer_batch(model, processor, questions: list[dict]) -> list[str]:
    import torch

    from megatron_vlm.data.media.images import decode_image

    prompts = [
        processor.apply_chat_template(question["messages"], tokenize=False, add_generation_prompt=True)
        for question in questions
    ]
    images = [[decode_image(image.read_bytes()) for image in question["images"]] for question in questions]
    inputs = processor(
        text=prompts,
        images=images,
        return_tensors="pt",
        text_kwargs={"padding": True, "padding_side": "left", "add_special_tokens": False},
    )
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=most_tokens(questions), do_sample=False)
    replies = ids[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in processor.batch_decode(replies, skip_special_tokens=True)]


def main() -> None:
    if len(sys.argv) != 5 or sys.argv[1] not in ("megatron", "transformers"):
        sys.exit(__doc__)
    source, model, data, output = sys.argv[1], *map(Path, sys.argv[2:])
    questions = read_questions(data)
    answer = answers_of_run if source == "megatron" else answers_of_folder
    answers = [without_thoughts(reply) for reply in answer(model, questions)]
    if os.environ.get("RANK", "0") == "0":
        output.write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
