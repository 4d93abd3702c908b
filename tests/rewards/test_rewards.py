"""What each reward says about an answer, by hand."""

import re
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym

from grpo_megatron.batch import FinishReason, Prompt, RewardResult, RewardSpec, Rollout
from grpo_megatron.config.schema import RewardsSection
from grpo_megatron.rewards.build import build_reward
from grpo_megatron.rewards.math import last_box
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rewards.reasoning_gym import EVALUATING_DATASETS, FORMULA_DATASETS, is_plain_formula
from grpo_megatron.rewards.text import contains_number, find_numbers
from grpo_megatron.rewards.values import UnparsableInput

pytestmark = pytest.mark.unit

MALICE = "__import__('pathlib').Path('{path}').touch() or 1"


def make_prompt(name: str, gold: Any, arguments: dict[str, Any]) -> Prompt:
    return Prompt("p", (1,), "", RewardSpec(name, gold, arguments))


def score(name: str, gold: Any, text: str, finish: FinishReason = "stop", **arguments: Any) -> RewardResult:
    rollout = Rollout("p", 0, (1,), (0.0,), finish, (), text)
    return build_reward(name).score(make_prompt(name, gold, arguments), rollout)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("112", ["112"]),
        ("-3", ["-3"]),
        ("= -3.", ["-3"]),
        ("\u22123", ["-3"]),
        ("20-3=17", ["20", "3", "17"]),
        ("20 - 3", ["20", "3"]),
        ("(5)-3", ["5", "3"]),
        ("x2 and v1.2", []),
        ("1,000 or 12,345.5", ["1000", "12345.5"]),
        ("3, 4", ["3", "4"]),
        ("3.50.", ["3.50"]),
        ("**12** cm, 10cm", ["12", "10"]),
        ("", []),
    ],
)
def test_numbers_are_found_as_whole_tokens_with_their_sign(text: str, numbers: list[str]) -> None:
    assert find_numbers(text) == [Decimal(number) for number in numbers]


@pytest.mark.parametrize(
    ("text", "answer", "there"),
    [
        ("112", 12, False),
        ("It is 12, not 112.", 12, True),
        ("-3", 3, False),
        ("3", -3, False),
        ("7 - 3 = 4", -3, False),
        ("7 * 8 = 56, and more talk about 9", "56", True),
        ("1,000", 1000, True),
        ("3.5", 5, False),
        ("8.0", 8, True),
    ],
)
def test_the_right_number_anywhere_is_found_and_no_part_of_another(text: str, answer: Any, there: bool) -> None:
    assert contains_number(text, answer) is there


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("56", 56, 1.0),
        ("7 * 8 = 56", "56", 1.0),
        ("56 or 57", 56, 0.0),
        ("56.", 56, 1.0),
        ("no idea", 56, 0.0),
        ("-4", -4, 1.0),
        ("4", -4, 0.0),
    ],
)
def test_number_takes_the_last_number(text: str, gold: Any, right: float) -> None:
    assert score("number", gold, text).score == right


@pytest.mark.parametrize("name", ["number", "exact", "math"])
def test_an_answer_that_was_cut_off_earns_nothing_only_where_the_line_says_so(name: str) -> None:
    assert score(name, "8", "8", "length").score == 1.0
    assert score(name, "8", "8", "length", must_end=True).score == 0.0
    assert score(name, "8", "8", "stop", must_end=True).score == 1.0
    assert score(name, "8", "8", "length", must_end=True).parts["correct"] == 1.0
    assert score(name, "8", "8", "length").parts["ended"] == 0.0
    with pytest.raises(UnparsableInput, match="must_end is 'yes'; write true or false"):
        score(name, "8", "8", must_end="yes")


@pytest.mark.parametrize("gold", [None, True, "eight", "8 or 9", [8], ""])
def test_number_refuses_a_gold_answer_that_is_not_one_number(gold: Any) -> None:
    with pytest.raises(UnparsableInput, match="gold answer of a number reward"):
        score("number", gold, "8")


def test_exact_compares_text_and_forgives_white_space_at_the_ends_only() -> None:
    assert score("exact", "a b", " a b\n").score == 1.0
    assert score("exact", "a b", "a  b").score == 0.0
    assert score("exact", 8, "8").score == 1.0
    with pytest.raises(UnparsableInput, match="exact"):
        score("exact", None, "8")


MATH_PAIRS = [
    ("12", "12", 1.0),
    ("1/2", "0.5", 1.0),
    ("1000", "1,000", 1.0),
    (r"\frac{1}{2}", r"The answer is $\frac12$.", 1.0),
    ("5", "x=5", 1.0),
    ("x=5", "5", 1.0),
    ("{1,2}", r"$\{2,1\}$", 1.0),
    ("(1,2)", "$[1,2]$", 0.0),
    ("x^2+2x+1", "$(x+1)^2$", 1.0),
    (r"\sqrt{8}", r"$2\sqrt{2}$", 1.0),
    ("3", "-3", 0.0),
    ("12", r"\boxed{11}, no: \boxed{12}", 1.0),
    ("12", r"\boxed{12}, no: \boxed{11}", 0.0),
    ("12", r"\boxed{}", 0.0),
    ("12", "", 0.0),
    ("B", "The answer is B.", 1.0),
    ("B", r"\boxed{\text{B}}", 1.0),
    ("B", "A", 0.0),
    (0.5, "1/2", 1.0),
]


@pytest.mark.parametrize(("gold", "text", "right"), MATH_PAIRS)
def test_math_judges_by_value(gold: Any, text: str, right: float) -> None:
    assert score("math", gold, text).score == right


def test_math_in_strict_mode_wants_a_box() -> None:
    assert score("math", "12", "The answer is 12").score == 1.0
    assert score("math", "12", "The answer is 12", boxed="required").score == 0.0
    assert score("math", "12", r"So \boxed{12}", boxed="required").score == 1.0
    assert score("math", "12", "The answer is 12", boxed="required").parts["boxed"] == 0.0
    with pytest.raises(UnparsableInput, match='write "optional" or "required"'):
        score("math", "12", "12", boxed=True)


def test_the_last_complete_box_counts_with_its_braces() -> None:
    assert last_box(r"\boxed{1} \boxed{\frac{1}{2}} end") == r"\frac{1}{2}"
    assert last_box(r"\boxed{\{1,2\}}") == r"\{1,2\}"
    assert last_box(r"\boxed{1} \boxed{2") == "1"
    assert last_box("none") is None


def test_math_says_the_same_in_a_thread_and_in_a_pool() -> None:
    """Case: math-verify's alarm-based time-outs raise outside a main thread."""
    pairs = [(gold, text, right) for gold, text, right in MATH_PAIRS if isinstance(gold, str)][:8]
    in_thread: list[float | None] = []
    thread = threading.Thread(target=lambda: in_thread.extend(score("math", g, t).score for g, t, _ in pairs))
    thread.start()
    thread.join(30)
    with RewardPool(RewardsSection(default="math", timeout_seconds=20.0)) as pool:
        for index, (gold, text, _) in enumerate(pairs):
            pool.submit(make_prompt("math", gold, {}), Rollout("p", index, (1,), (0.0,), "stop", (), text))
        results = pool.collect(60)
    expected = [right for _, _, right in pairs]
    assert in_thread == expected
    assert [results["p", index].score for index in range(len(pairs))] == expected


@pytest.mark.parametrize("name", ["math", "number", "exact"])
def test_an_answer_that_is_code_is_never_evaluated(name: str, tmp_path: Path) -> None:
    for wrap in ("{}", "${}$", r"\boxed{{{}}}", "<answer>{}</answer>"):
        score(name, "12", wrap.format(MALICE.format(path=tmp_path / "evaluated")))
    assert not (tmp_path / "evaluated").exists()


def make_item(dataset: str) -> tuple[str, dict[str, Any]]:
    item = reasoning_gym.create_dataset(dataset, size=1, seed=3)[0]
    return str(item["answer"]), item


@pytest.mark.parametrize("dataset", sorted(EVALUATING_DATASETS | FORMULA_DATASETS))
def test_reasoning_gym_scores_its_own_answer_and_never_evaluates_another(dataset: str, tmp_path: Path) -> None:
    gold, item = make_item(dataset)
    assert score("reasoning_gym", None, gold, dataset=dataset, entry=item).score == 1.0
    malice = MALICE.format(path=tmp_path / "evaluated")
    for text in (malice, f"<answer>{malice}</answer>"):
        assert score("reasoning_gym", None, text, dataset=dataset, entry=item).score in (0.0, 0.01)
    assert not (tmp_path / "evaluated").exists()


def test_no_other_scorer_of_reasoning_gym_evaluates_answers() -> None:
    """Reads the package's sources: a version with another evaluating scorer fails here."""
    found = set()
    for file in Path(reasoning_gym.__file__).parent.rglob("*.py"):
        source = file.read_text(encoding="utf-8")
        if re.search(
            r"\beval\((?:user_)?answer|(?<!def )(?<!_)(?:sympy\.|sp\.)?parse_expr\(answer|sympify\(answer", source
        ):
            found.update(re.findall(r'DATASET_NAME = "(\w+)"', source))
    assert found == EVALUATING_DATASETS | FORMULA_DATASETS


def test_reasoning_gym_reads_the_answer_tag_and_gives_partial_credit() -> None:
    gold, item = make_item("leg_counting")
    assert (
        score("reasoning_gym", None, f"so <answer> {gold} </answer>", dataset="leg_counting", entry=item).score == 1.0
    )
    partial = score("reasoning_gym", None, f"it is {gold}", dataset="leg_counting", entry=item).score
    assert partial == pytest.approx(len(gold) / len(f"it is {gold}"))
    cut = score("reasoning_gym", None, gold, "length", dataset="leg_counting", entry=item, must_end=True)
    assert (cut.score, cut.parts["correct"]) == (0.0, 1.0)


def test_reasoning_gym_names_what_is_wrong_with_the_line() -> None:
    gold, item = make_item("leg_counting")
    with pytest.raises(UnparsableInput, match="did you mean 'leg_counting'"):
        score("reasoning_gym", None, gold, dataset="leg_count", entry=item)
    with pytest.raises(UnparsableInput, match="entry is missing"):
        score("reasoning_gym", None, gold, dataset="leg_counting")
    with pytest.raises(UnparsableInput, match="accepts every text"):
        score("reasoning_gym", None, gold, dataset="game_of_life_halting", entry=item)
    _, number = make_item("prime_factorization")
    with pytest.raises(UnparsableInput, match="cannot read the answer"):
        score("reasoning_gym", None, "two times three", dataset="prime_factorization", entry=number)


def test_a_plain_formula_has_no_names_that_could_mislead_an_evaluator() -> None:
    assert is_plain_formula("(3 + 4.5) * x**2 - sin(y)")
    for text in ("x.real", "open(1)", "a_b", "[1]", "'x'", "lambda: 1", "exec(1)"):
        assert not is_plain_formula(text), text


def test_an_unknown_reward_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean number"):
        build_reward("numbr")
