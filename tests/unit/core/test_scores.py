"""Scores of answers: the numbers of lmms-eval for the same answers, and a user's metric."""

import json

import pytest
from places import ROOT

from megatron_vlm.config import ConfigError
from megatron_vlm.extras.evaluate.answering import scored
from megatron_vlm.extras.evaluate.metrics import METRICS, Judged, metric_of, overlaps

TABLE = json.loads((ROOT / "tests" / "published_scores.json").read_text())


def score_of(name: str, answer: str, *references: str, boxes=lambda text: []) -> float | dict:
    return METRICS[name](Judged("", answer, references, boxes))


def test_anls_is_lmms_evals():
    assert len({row[2] for row in TABLE["texts"]}) > 40
    for answer, reference, published in TABLE["texts"]:
        assert score_of("anls", answer, reference) == pytest.approx(published, abs=1e-12), answer


def test_overlaps_of_boxes_are_lmms_evals():
    assert sum(share > 0 for *_, share in TABLE["boxes"]) > 20
    for box, other, published in TABLE["boxes"]:
        assert overlaps([box], [other]) == pytest.approx([published], abs=1e-12)


def record(key: str, answer: str, reference: str) -> dict:
    return {"key": key, "question": "", "answer": answer, "references": [reference]}


def test_a_score_is_over_the_samples_that_have_one():
    records = [record("a", "<think>b</think>a", "a"), record("b", "c", "a")]
    records.append({"key": "c", "problem": "missing_media: none.png"})
    result = scored(records, {"exact_match": METRICS["exact_match"]}, None)
    assert list(result.lines()) == [
        "exact_match 0.5000 (2 samples)",
        "without a score: 1, missing_media; such as c",
    ]
    assert result.of_records == [{"exact_match": 1}, {"exact_match": 0}, {}]


def test_a_users_function_is_a_metric(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def longer(answer, references, question):\n    return len(answer) > len(references[0])\n"
        "def both(answer, references, question):\n    return {'n': len(answer), 'q': len(question)}\n"
        "both.higher_is_better = False\ndef nan(*given):\n    return float('nan')\n"
    )
    metrics = {name: metric_of(f"{file}:{name}") for name in ("longer", "both")}
    result = scored([record("a", "because", "so")], metrics, None)
    assert result.of_records == [{"longer": 1, "n": 7, "q": 0}]
    assert [score.higher_is_better for score in result.scores.values()] == [True, False, False]
    with pytest.raises(ConfigError, match="nan: it returned nan; return finite numbers"):
        scored([record("a", "because", "so")], {"nan": metric_of(f"{file}:nan")}, None)
