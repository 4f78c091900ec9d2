"""Records of your own: a parser of rows, a cooker of Energon samples.

Both give a record of docs/reference/records.md.

megatron-vlm train … --dataset_type hf data.parser=examples/extend/records.py:scene
megatron-vlm train … data.cooker=examples/extend/records.py:page
"""


def scene(row: dict) -> dict | None:
    """A row such as {"picture": "a.jpg", "facts": ["a cat", "a sofa"]} as a question and its answer."""
    if not row["facts"]:
        return None  # left out, and counted
    question = {"role": "user", "content": "<image>What is there?"}
    answer = {"role": "assistant", "content": ", ".join(row["facts"])}
    return {"images": [row["picture"]], "messages": [question, answer]}


def page(parts: dict) -> dict:
    """A sample with the parts `scan.png` and `lines.json`; media are their files."""
    text = "\n".join(line["text"] for line in parts["lines.json"])
    return {"images": ["scan.png"], "question": "Read the page.", "answer": text}
