"""The formulas of published benchmarks, from texts and boxes to numbers; each names its source.

`tests/core/test_scores.py` compares them with what lmms-eval and jiwer give for the same answers.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from string import ascii_uppercase

import numpy as np

ANLS_THRESHOLD = 0.5
RELAXED_CHANGE = 0.05
VQA_ENOUGH = 3  # annotators who gave the answer
MANY_WORDS = 5  # MMMU looks for an option's text in answers of more words
Box = Sequence[float]  # x and y of two corners


class NotScored(Exception):
    """An answer has no score by this formula, because of its reference; the text says why."""


def exact_match(answer: str, references: Sequence[str]) -> float:
    """1 if the answer is one of the references, character by character, without white space around it.

    The exact match of the Hugging Face metric `exact_match` with its default settings.
    """
    return float(answer.strip() in [reference.strip() for reference in references])


def contained(answer: str, references: Sequence[str]) -> float:
    """1 if the answer contains a reference, in lower case and with newlines as spaces.

    OCRBench, arXiv 2305.07895: all its tasks but handwritten formulas.
    """

    def plain(text: str) -> str:
        return text.lower().strip().replace("\n", " ")

    return float(any(plain(reference) in plain(answer) for reference in references))


def relaxed_match(answer: str, references: Sequence[str]) -> float:
    """1 if the answer is a number within 5 % of a reference's, or else the same text in lower case.

    Relaxed accuracy of ChartQA, arXiv 2203.10244, section 5.1; `%` divides by 100. A reference of 0 is
    compared as text, as in the code that is in use (Pix2Struct, Qwen-VL, lmms-eval).
    """
    return float(any(_relaxed(answer.strip(), reference.strip()) for reference in references))


def _relaxed(answer: str, reference: str) -> bool:
    number = _number(answer)
    wanted = _number(reference)
    if number is None or not wanted:
        return answer.lower() == reference.lower()
    return abs(number - wanted) / abs(wanted) <= RELAXED_CHANGE


def _number(text: str) -> float | None:
    try:
        return float(text.rstrip("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None


def anls(answer: str, references: Sequence[str]) -> float:
    """1 - edit distance / longer length for the nearest reference, 0 below 0.5.

    Average normalized Levenshtein similarity, arXiv 1905.13648, as DocVQA's own code computes it: distance in
    lower case with single spaces, lengths of the texts as they stand.
    """

    def plain(text: str) -> str:
        return " ".join(text.lower().split())

    def similarity(reference: str) -> float:
        longer = max(len(answer), len(reference))
        return 1 - edit_distance(plain(answer), plain(reference)) / longer if longer else 1.0

    best = max(map(similarity, references))
    return best if best >= ANLS_THRESHOLD else 0.0


def errors_and_length(answer: Sequence, references: Sequence[Sequence]) -> tuple[float, float]:
    """(edit distance, length) of the reference with the fewest errors for its length.

    Word and character error rates are sums of the first over sums of the second: Levenshtein distance as in
    Morris et al. 2004, the definition of jiwer.
    """
    pairs = [(edit_distance(answer, reference), len(reference)) for reference in references]
    return min(pairs, key=lambda pair: pair[0] / max(pair[1], 1))


def edit_distance(one: Sequence, other: Sequence) -> int:
    """The fewest insertions, deletions and replacements of items that make `other` of `one` (Levenshtein)."""
    numbers: dict = {}
    first, second = (
        np.array([numbers.setdefault(x, len(numbers)) for x in text], int) for text in (one, other)
    )
    steps = np.arange(len(second) + 1)
    distances = steps.copy()
    for row, item in enumerate(first, start=1):
        best = np.minimum(distances[1:] + 1, distances[:-1] + (second != item))
        # an insertion costs 1 for each place, so the best start of insertions is a running minimum
        distances = np.minimum.accumulate(np.concatenate([[row], best]) - steps) + steps
    return int(distances[-1])


# -- VQA


def vqa_accuracy(answer: str, references: Sequence[str]) -> float:
    """min(1, annotators who gave the answer / 3), the mean over all sets of all annotators but one.

    VQA accuracy, arXiv 1505.00468 and https://visualqa.org/evaluation.html, with its processing of texts,
    which is applied whether or not all annotators agree, as in lmms-eval. A single reference stands for
    annotators who all agree.
    """
    given = vqa_text(answer)
    same = [vqa_text(reference) == given for reference in references]
    if len(same) == 1:
        return float(same[0])
    others = [sum(same) - one for one in same]
    return float(np.mean([min(1.0, count / VQA_ENOUGH) for count in others]))


def vqa_text(text: str) -> str:
    """The text as VQA's evaluation compares it: without punctuation, articles, and capitals; small numbers as
    digits and contractions with their apostrophes."""
    text = re.sub(r"[\n\t]", " ", text).strip()
    within_number = re.search(r"(?<=\d),+(?=\d)", text)
    plain = text
    for mark in ';/[]"{}()=+\\_-><@`,?!':
        at_an_end = f"{mark} " in text or f" {mark}" in text
        plain = plain.replace(mark, "" if at_an_end or within_number else " ")
    plain = re.sub(r"\.(?!\d)", "", plain)
    words = [_VQA_DIGITS.get(word, word) for word in plain.lower().split()]
    return " ".join(_VQA_CONTRACTIONS.get(word, word) for word in words if word not in ("a", "an", "the"))


_VQA_DIGITS = {"none": "0"} | {
    word: str(number)
    for number, word in enumerate("zero one two three four five six seven eight nine ten".split())
}
# with each of its apostrophes left out, a word is corrected
_VQA_CONTRACTED = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd
he'd've he's how'd how'll how's i'd've isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't
must've needn't not've o'clock 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've
somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll
that's there'd there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've
we've weren't what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's
who've why'll why're why's won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've
you'll you're you've
"""
_VQA_CONTRACTIONS = (
    {"somebody'd": "somebodyd"}
    | {  # the first is so in VQA's code
        word[:place] + word[place + 1 :]: word
        for word in _VQA_CONTRACTED.split()
        if word != "i'd've"
        for place, letter in enumerate(word)
        if letter == "'"
    }
)


# -- multiple choice


def options_of(question: str) -> dict[str, str]:
    """The options that a question lists on lines of their own, as `A. text`, `A) text`, `A: text` or
    `(A) text`: their texts by letter, from A on without a gap."""
    listed = dict(re.findall(r"^\s*\(?([A-Z])[).:]\s*(.*?)\s*$", question, re.MULTILINE))
    return {letter: listed[letter] for letter in takewhile(listed.__contains__, ascii_uppercase)}


def letter_of(reference: str, options: Mapping[str, str]) -> str:
    """The letter of the right option, which a reference names: `B`, `(B)`, `B. text`, or its text.

    Raises NotScored if it names none.
    """
    if found := re.match(r"\s*\(?([A-Z])(?:[).:]|\s*$)", reference):
        return found[1]
    for letter, text in options.items():
        if text.lower() == reference.strip().lower():
            return letter
    raise NotScored("its reference names no letter of an option")


def chosen_option(answer: str, options: Mapping[str, str]) -> str | None:
    """The letter of the option that an answer chooses; None if it chooses none.

    MMMU's rules, arXiv 2311.16502, `parse_multi_choice_response` of its code, which draws an option where
    this returns None. It looks for `(A)`, then for `A ` and `A.`, then for the text of an option in an answer
    of more than five words; of several that are there, the one that comes last counts.
    """
    for mark in ",.!?;:'":
        answer = answer.strip(mark)
    answer = f" {answer} "
    for form in ("({})", "{} ", "{}."):
        if found := [letter for letter in options if form.format(letter) in answer]:
            place = "({})" if form == "({})" else " {} "
            return max(found, key=lambda letter: answer.rfind(place.format(letter)))
    if len(answer.split()) <= MANY_WORDS:
        return None
    lower = answer.lower()
    found = [letter for letter, text in options.items() if text and text.lower() in lower]
    return max(found, key=lambda letter: lower.rfind(options[letter].lower()), default=None)


def multiple_choice(answer: str, references: Sequence[str], question: str) -> float:
    """1 if the answer chooses the option that the first reference names, see `chosen_option`.

    A question without a list of options has A to D, and a text is then not looked for. Raises NotScored.
    """
    options = options_of(question) or dict.fromkeys("ABCD", "")
    right = letter_of(references[0], options)
    return float(chosen_option(answer, {**options, right: options.get(right, "")}) == right)


# -- boxes


def intersection_over_union(one: Box, other: Box) -> float:
    """The share of the area of two boxes together that both cover; 0 if neither has an area."""
    left, top, right, bottom = _ordered(one)
    x, y, to_x, to_y = _ordered(other)
    both = max(0.0, min(right, to_x) - max(left, x)) * max(0.0, min(bottom, to_y) - max(top, y))
    either = (right - left) * (bottom - top) + (to_x - x) * (to_y - y) - both
    return both / either if either else 0.0


def _ordered(box: Box) -> tuple[float, float, float, float]:
    x, y, to_x, to_y = box
    return min(x, to_x), min(y, to_y), max(x, to_x), max(y, to_y)


def overlaps(boxes: Sequence[Box], wanted: Sequence[Box]) -> list[float]:
    """The intersection over union of each pair of an answer's and a reference's box, 0 for a box left over.

    Each box is in one pair, and the pairs are as good as they can be. One box of each is RefCOCO's case
    (arXiv 1608.00272): its accuracy is the share of pairs with 0.5 or more.
    """
    from scipy.optimize import linear_sum_assignment

    table = np.array([[intersection_over_union(one, other) for other in wanted] for one in boxes])
    table = table.reshape(len(boxes), len(wanted))
    paired = table[linear_sum_assignment(table, maximize=True)].tolist()
    return paired + [0.0] * (max(table.shape) - len(paired))
