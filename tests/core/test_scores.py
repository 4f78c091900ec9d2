"""Scores of answers: the numbers of lmms-eval and jiwer for the same answers, intervals, a user's metric."""

import json
from pathlib import Path

import numpy as np
import pytest
from places import ROOT

from megatron_vlm.config import ConfigError
from megatron_vlm.extras.evaluate import formulas
from megatron_vlm.extras.evaluate.metrics import METRICS, Judged, metric_of, parts_of, scores_of

TABLE = json.loads((ROOT / "tests" / "published_scores.json").read_text())


def judged(name: str, answer: str, *references: str, question: str = "", boxes=lambda text: []) -> dict:
    return METRICS[name].parts(Judged(question, answer, references, boxes))


def differing(rows: list, score, expected) -> list:
    found = [(row, score(row)) for row in rows]
    return [pair for pair in found if pair[1] != pytest.approx(expected(pair[0]), abs=1e-12)]


def test_relaxed_accuracy_is_lmms_evals():
    # its code compares white space, too
    rows = [row for row in TABLE["texts"] if row[0] == row[0].strip() and row[1] == row[1].strip()]
    assert len([row for row in rows if row[2]]) > 60 and len([row for row in rows if not row[2]]) > 200
    assert (
        differing(rows, lambda row: formulas.relaxed_match(row[0], [row[1]]), lambda row: float(row[2])) == []
    )


def test_anls_is_lmms_evals():
    assert len({row[3] for row in TABLE["texts"]}) > 40
    score = differing(TABLE["texts"], lambda row: formulas.anls(row[0], [row[1]]), lambda row: row[3])
    assert score == []


@pytest.mark.parametrize(("name", "place"), [("wer", 4), ("cer", 5)])
def test_error_rates_are_jiwers(name, place):
    # jiwer parts words at spaces alone
    rows = [row for row in TABLE["texts"] if row[place] and "\n" not in row[0] + row[1]]
    assert len(rows) > 300

    def parts(row: list) -> list:
        return list(judged(name, row[0], row[1])[name])

    assert differing(rows, parts, lambda row: row[place]) == []


def test_vqa_accuracy_is_lmms_evals():
    assert len({score for *_, score in TABLE["vqa"]}) > 4
    score = differing(TABLE["vqa"], lambda row: formulas.vqa_accuracy(row[0], row[1]), lambda row: row[2])
    assert score == []
    assert formulas.vqa_accuracy("Two cats.", ["2 cats"]) == 1


def test_the_option_of_an_answer_is_lmms_evals():
    options = TABLE["options"]
    assert {letter for _, letter in TABLE["choices"]} == {*options, None}
    assert (
        differing(TABLE["choices"], lambda row: formulas.chosen_option(row[0], options), lambda row: row[1])
        == []
    )


def test_overlaps_of_boxes_are_lmms_evals():
    assert sum(share > 0 for *_, share in TABLE["boxes"]) > 20
    score = differing(
        TABLE["boxes"], lambda row: formulas.intersection_over_union(*row[:2]), lambda row: row[2]
    )
    assert score == []


def test_an_answer_contains_a_reference_in_any_case():
    """OCRBench's rule: lower case, newlines as spaces."""
    assert judged("contained", "It says STOP\nhere", "stop here") == {"contained": (1, 1)}
    assert judged("contained", "stop", "stop here", "Stop") == {"contained": (1, 1)}
    assert judged("contained", "stop", "stop here") == {"contained": (0, 1)}
    assert judged("exact_match", "stop\n", "Stop", " stop") == {"exact_match": (1, 1)}
    assert judged("exact_match", "stop", "Stop") == {"exact_match": (0, 1)}


def test_options_are_read_from_the_question():
    question = "Which?\nA. a red car\n(B) a blue car\nC: two\nE. not one, as D is missing"
    assert formulas.options_of(question) == {"A": "a red car", "B": "a blue car", "C": "two"}
    assert judged("multiple_choice", "I would say it is a blue car", "B. a blue car", question=question)
    for reference in ("B", "(B)", "B. a blue car", "A blue car"):
        found = judged("multiple_choice", "I would say it is a blue car", reference, question=question)
        assert found == {"multiple_choice": (1, 1)}
    assert judged("multiple_choice", "(A)", "B", question=question) == {"multiple_choice": (0, 1)}
    with pytest.raises(formulas.NotScored, match="names no letter"):
        judged("multiple_choice", "A", "a green car", question=question)


def test_several_boxes_are_paired_as_well_as_they_can_be():
    """Greedily, the first would take the second's only partner."""
    texts = {"two": [[0, 0, 10, 10], [0, 0, 10, 8]], "wanted": [[0, 0, 10, 8], [0, 0, 10, 12]], "none": []}
    found = judged("boxes", "two", "wanted", boxes=texts.get)
    assert found["iou"][0] == pytest.approx((1 + 10 / 12) / 2)
    assert found["iou_at_0.5"] == (1, 1)
    assert judged("boxes", "none", "wanted", boxes=texts.get)["iou"] == (0, 1)
    three = {"three": [*texts["wanted"], [50, 50, 60, 60]], **texts}
    assert judged("boxes", "three", "wanted", boxes=three.get)["iou_at_0.5"] == (pytest.approx(2 / 3), 1)
    with pytest.raises(formulas.NotScored, match="no box"):
        judged("boxes", "two", "none", boxes=texts.get)


def test_the_interval_holds_the_truth_as_often_as_it_says():
    """Means of 50 samples of a known distribution; and rates, whose samples have different lengths."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 20, (200, 50))
    right = rng.random((200, 50)) < 0.3
    errors = rng.binomial(lengths, 0.3)

    def holds(points, of) -> float:
        scores = [
            scores_of([{"x": pair} for pair in zip(*one, strict=True)], {"x": True}, seed=1)["x"]
            for one in zip(points, of, strict=True)
        ]
        return np.mean([score.low <= 0.3 <= score.high for score in scores])

    assert 0.89 <= holds(right, np.ones_like(lengths)) <= 0.99
    assert 0.89 <= holds(errors, lengths) <= 0.99


def test_a_score_is_over_the_samples_that_have_it():
    samples = [{"a": (1, 1), "b": (1, 4)}, {"b": (2, 8)}, {}]
    scores = scores_of(samples, {"a": True, "b": False, "c": True})
    assert {name: (s.score, s.samples, s.higher_is_better) for name, s in scores.items()} == {
        "a": (1, 1, True),
        "b": (0.25, 2, False),
    }
    assert scores == scores_of(samples, {"a": True, "b": False, "c": True})


def test_a_users_function_is_a_metric(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def longer(answer, references, question):\n    return len(answer) > len(references[0])\n"
        "def both(answer, references, question):\n    return {'n': len(answer), 'q': len(question)}\n"
        "both.higher_is_better = False\ndef bad(*given):\n    return 'good'\n"
        "def nan(*given):\n    return float('nan')\n"
    )
    metrics = {name: metric_of(f"{file}:{name}") for name in ("longer", "both")}
    given = Judged("why?", "because", ["so"], lambda text: [])
    parts, missing, higher = parts_of(metrics | {"boxes": METRICS["boxes"]}, given)
    assert parts == {"longer": (1, 1), "n": (7, 1), "q": (4, 1)}
    assert missing == {"boxes": "its reference has no box"}
    assert higher == {"longer": True, "n": False, "q": False}
    for name, said in {"bad": "'good'", "nan": "nan"}.items():
        told = f"{name}: it returned {said} for the answer 'because'; return a finite number, or a dict"
        with pytest.raises(ConfigError, match=told):
            parts_of({name: metric_of(f"{file}:{name}")}, given)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f(:", r"SyntaxError: invalid syntax \(odd.py, line 1\)"),
        ("\nimport nothing_of_this_name", "ModuleNotFoundError: .* in line 2"),
        ("raise SystemExit(0)", "SystemExit: 0 in line 1"),
        ("def f(answer): return 1", "TypeError: .* 3 were given"),
        ("def f(*given):\n    return {}['a']", "KeyError: 'a' in line 2"),
    ],
)
def test_what_fails_in_a_users_file_is_told_as_theirs(tmp_path, text, said):
    (tmp_path / "odd.py").write_text(text)
    name = f"{tmp_path}/odd.py:f"
    with pytest.raises(ConfigError, match=rf"metric \S*/odd.py:f: {said}; correct the file.$"):
        parts_of({"f": metric_of(name)}, Judged("", "", [""], lambda text: []))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exact", "did you mean exact_match"),
        ("no.py:f", "no such file"),
        (f"{Path(__file__)}:absent", "no function of this name"),
    ],
)
def test_a_metric_that_is_not_there_is_refused(name, said):
    with pytest.raises(ConfigError, match=said):
        metric_of(name)
