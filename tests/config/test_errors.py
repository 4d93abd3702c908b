"""Every kind of mistake in a file or on the command line: its line, its key, what is said and what is advised."""

from pathlib import Path

import pytest

from grpo_megatron.config.loader import load_config
from grpo_megatron.config.problems import COMMAND_LINE, ConfigError
from tests.config.writing import NAME, only_problem, problems_of

pytestmark = pytest.mark.unit

IN_FILE = [
    # text, line, key, part of the message, part of the fix
    ("run:\n  stepz: 5\n", 2, "run.stepz", "unknown key", "did you mean run.steps?"),
    ("modules:\n  rollout:\n    learning_rate: 1e-6\n", 3, "modules.rollout.learning_rate", "unknown key",
     "did you mean modules.training.learning_rate?"),
    ("rollout: {}\n", 1, "rollout", "unknown key", "did you mean modules.rollout?"),
    ("run:\n  lr: 1\n", 2, "run.lr", "unknown key", "did you mean modules.training.learning_rate?"),
    ("run: {}\nzebra: 1\n", 2, "zebra", "unknown key", "known at the top level: run, model, parallel"),
    ("parallel:\n  zebra: 1\n", 2, "parallel.zebra", "unknown key", "known in parallel: tensor, pipeline"),
    ("modules.rollout.engine: megatron\n", 1, "modules.rollout.engine", "a key with dots", "nest the names"),
    ("run:\n  steps: ten\n", 2, "run.steps", "expected a whole number of at least 1, got the text 'ten'", ""),
    ("run:\n  steps: '5'\n", 2, "run.steps", "got the text '5'", "write  steps: 5  without quotes"),
    ("run:\n  steps: 5.0\n", 2, "run.steps", "got 5.0", "write  steps: 5"),
    ("run:\n  steps: true\n", 2, "run.steps", "got true", ""),
    ("run:\n  steps:\n", 2, "run.steps", "no value", "remove the line to take the default"),
    ("run:\n  name: 2024\n", 2, "run.name", "expected text, got 2024", 'name: "2024"'),
    ("run:\n  name: {a: b}\n", 2, "run.name", "expected text, got a section", "in quotes"),
    ("run:\n  resume: newest\n", 2, "run.resume", "expected one of: auto, never, or a whole number", ""),
    ("run:\n  resume: -3\n", 2, "run.resume", "-3", ""),
    ("data:\n  shuffle: yes\n", 2, "data.shuffle", "expected true or false, got the text 'yes'", "shuffle: true"),
    ("data:\n  shuffle: 'false'\n", 2, "data.shuffle", "got the text 'false'", "shuffle: false  without quotes"),
    ("data:\n  shuffle: 1\n", 2, "data.shuffle", "expected true or false, got 1", ""),
    ("data:\n  prompts: 3\n", 2, "data.prompts", "expected a list, each entry text, got 3", "prompts: [3]"),
    ("data:\n  prompts:\n  - a.jsonl\n  - 3\n", 4, "data.prompts", "expected text, got 3", "in quotes"),
    ("modules:\n  rewards:\n    timeout_seconds: 10s\n", 3, "modules.rewards.timeout_seconds", "the text '10s'",
     "timeout_seconds: 10"),
    ("modules:\n  rollout:\n    temperature: 0\n", 3, "modules.rollout.temperature", "0 is out of range",
     ""),
    ("modules:\n  rollout:\n    group_size: 1\n", 3, "modules.rollout.group_size",
     "1 is out of range; expected a whole number of at least 2", ""),
    ("modules:\n  rollout:\n    top_p: 1.5\n", 3, "modules.rollout.top_p",
     "1.5 is out of range; expected a number above 0 and at most 1", ""),
    ("modules:\n  training:\n    learning_rate: -1e-6\n", 3, "modules.training.learning_rate",
     "-1e-06 is out of range; expected a number not below 0", ""),
    ("modules:\n  rollout:\n    engine: vlm\n", 3, "modules.rollout.engine",
     "'vlm' is not known; expected one of: megatron, sglang, vllm", "did you mean vllm?"),
    ("modules:\n  inference:\n    models: [reference]\n", 3, "modules.inference.models", "'reference' is not known",
     "did you mean reference_model?"),
    ("modules:\n  training:\n    update_strategy: ppo\n", 3, "modules.training.update_strategy", "expected grpo", ""),
    ("modules:\n  training:\n    clip: 0.2\n", 3, "modules.training.clip", "is a section, but holds 0.2", "low, high"),
    ("modules:\n  rollout:\n    batch_size:16\n", 2, "modules.rollout", "is a section, but holds 'batch_size:16'",
     "batch_size: 16  with a space"),
    ("run:\n  steps: 1\n  seed: 2\n  steps: 3\n", 4, "run.steps", "twice, first in line 2", "keep one"),
    ("run:\n  steps: 1\nmodel: {}\nrun:\n  seed: 1\n", 4, "run", "twice, first in line 1", "keep one"),
    ("run:\n\tsteps: 1\n", 2, "run.steps", "indented with a tab", "two for a level"),
    ("run:\n  steps:\t1\n", 2, "run.steps", "a tab between the words", "use spaces"),
    ("model:\n  policy: \u201c/m\u201d\n", 2, "model.policy", "typographic quotes (U+201C left double", 'policy: "/m"'),
    ("model:\n  policy: \u2018/m\u2019\n", 2, "model.policy", "typographic quotes (U+2018", "policy: '/m'"),
    ('model:\n  policy: "/m\u201d\n', 2, "model.policy", "typographic quotes (U+201D right", 'policy: "/m"'),
    ("run:\n  seed:\u00a01\n", 2, "run.seed", "a wide space (U+00A0 no-break space)", "seed: 1"),
    ("modules:\n  training:\n    learning_rate: 1e\u20136\n", 3, "modules.training.learning_rate",
     "a dash that is no minus (U+2013 en dash)", "learning_rate: 1e-6"),
    ("run:\n  seed\uff1a 1\n", 2, "run.seed", "U+FF1A fullwidth colon", "seed: 1"),
    ("run:\n  se\u200bed: 1\n", 2, "run.seed", "U+200B zero width space", "seed: 1"),
    ("", None, "", "the file is empty", "model:"),
    ("# only a comment\n", None, "", "the file is empty", "model:"),
    ("- run\n", 1, "", "the file holds a list", "key: value"),
    ("hello\n", 1, "", "the file holds 'hello'", "key: value"),
    ("run:\n  steps:5\n  seed: 1\n", 2, "steps", "no space after the colon", "steps: 5"),
    ("run:\n  steps: 5\nmodel:\n  policy=/m\n  dtype: float32\n", 4, "policy", "'='", "policy: /m"),
    ("data:\n  prompts: [\n", 2, "", "a bracket is opened here", "close it"),
    ('run:\n  name: "abc\n  steps: 1\n', 2, "", "a quote is opened here", "close it"),
    ("data:\n  prompts: [a.jsonl\nrun:\n  steps: 1\n", 2, "", "a bracket is opened here", "close it"),
    ("run:\n  name: abc\n   steps: 1\n", 3, "", "starts in column 4, the one before it in column 3", "same column"),
    ("run:\n    name: abc\n  steps: 1\n", 3, "", "starts in column 3, the one before it in column 5", "same column"),
    ("run:\n  name: a: b\n", 2, "", "a second key on the line", "in quotes"),
    ("model:\n  policy: @home\n", 2, "", "a value cannot start with @", "in quotes"),
    ("model:\n  policy: *.x\n", 2, "", "a value that starts with *", "in quotes"),
    ('model:\n  policy: "C:\\models"\n', 2, "", "a backslash inside double quotes", "single quotes"),
    ("run:\n  steps: 1\n---\nrun: {}\n", 3, "", "a second document", "keep one"),
    ("run:\n  name: !!python/name:os.system x\n", 2, "run.name", "the tag !!python/name:os.system", "without it"),
    ("run:\n  steps: !!int abc\n", 2, "run.steps", "'abc' is not a number", ""),
    ("model: &m\n  policy: *m\n", 2, "model.policy", "contains itself", "write the value out"),
    ("data:\n  <<: {shuffle: true}\n", 2, "data", "merge keys", "write the keys out"),
    ("modules:\n  training:\n    learning_rate: .nan\n", 3, "modules.training.learning_rate", "not a finite", "number"),
    ("modules:\n  training:\n    learning_rate: 1e999\n", 3, "modules.training.learning_rate", "a finite", "number"),
    ("run:\n  name: a\x00b\n", 2, "", "the control character U+0000", "text file"),
]  # fmt: skip

ON_THE_COMMAND_LINE = [
    # override, key, part of the message, part of the fix
    ("run.steps", "run.steps", "no '=' in it", "run.steps=100"),
    ("=5", "=5", "'' is not a dotted key", "run.steps=100"),
    ("run..steps=5", "run..steps=5", "is not a dotted key", "run.steps=100"),
    ("--run.steps=5", "--run.steps=5", "without dashes", "write  run.steps=5"),
    ("other.yaml", "other.yaml", "this is a second", "key=value"),
    ("run.stepz=5", "run.stepz", "unknown key", "did you mean run.steps?"),
    ("run.steps=five", "run.steps", "expected a whole number of at least 1, got the text 'five'", ""),
    ("run.steps=", "run.steps", "no value", ""),
    ("run.steps.more=1", "run.steps", "expected a whole number of at least 1, got a section", ""),
    ("data.prompts.0=b.jsonl", "data.prompts", "expected a list, each entry text, got a section", ""),
    ("run.name=a: b", "run.name", "expected text, got a section", "in quotes"),
    ("data.prompts=[a.jsonl", "data.prompts", "a bracket is opened here", "close it"),
    ("run.name=\u201cx\u201d", "run.name", "typographic quotes", 'run.name="x"'),
    ("run.na\u00admxe=x", "run.na\u00admxe=x", "is not a dotted key", "run.steps=100"),
    ("run=5", "run", "is a section, but holds 5", "write  run.KEY=VALUE  with one of its keys: name, folder, steps"),
]


@pytest.mark.parametrize(("text", "line", "key", "message", "fix"), IN_FILE)
def test_a_mistake_in_the_file_is_named_with_line_and_key(
    tmp_path: Path, text: str, line: int | None, key: str, message: str, fix: str
) -> None:
    problem = only_problem(tmp_path, text)
    assert (problem.file, problem.line, problem.key) == (str(tmp_path / NAME), line, key)
    assert message in problem.message
    assert fix in problem.fix


@pytest.mark.parametrize(("override", "key", "message", "fix"), ON_THE_COMMAND_LINE)
def test_a_mistake_on_the_command_line_is_named_with_its_key(
    tmp_path: Path, override: str, key: str, message: str, fix: str
) -> None:
    problem = only_problem(tmp_path, "data:\n  prompts: [a.jsonl]\nrun:\n  seed: 1\n", override)
    assert (problem.file, problem.line, problem.key) == (COMMAND_LINE, None, key)
    assert message in problem.message
    assert fix in problem.fix


def _error_of(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    return str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert _error_of(tmp_path / "no.yaml").startswith(f"{tmp_path / 'no.yaml'}: there is no such file")


def test_a_folder_is_not_taken_for_a_file(tmp_path: Path) -> None:
    assert _error_of(tmp_path).startswith(f"{tmp_path}: is a folder")


def test_a_file_in_another_encoding_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes("run:\n  seed: 1\n  name: caf\u00e9\n".encode("latin-1"))
    assert _error_of(tmp_path / NAME).startswith(f"{tmp_path / NAME}:3: the file is not UTF-8 text")


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / NAME).open("wb") as file:
        file.truncate(10**9)
    assert "is too large for a configuration file" in _error_of(tmp_path / NAME)


def test_all_mistakes_show_at_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    text = (
        "runs:\n"  # 1: misspelt, and what is below it is read all the same
        "  seed: -1\n"
        "model:\n"
        "\tpolicy: \u201c/m\u201d\n"  # 4: a tab and quotes
        "modules:\n"
        "  rollout:\n"
        "    group_size: 1\n"
        "    engine: vllm_engin\n"
        "  training:\n"
        "    learning_rte: 1e-6\n"
        "    minimum_learning_rate: 1\n"
        "    decay: linear\n"
        "    num_mini_batches: 0\n"
        "monitor:\n"
        "  gap_warn: 0.5\n"
        "checkpoint:\n"
        "  keep: 1\n"
        "  keep: 2\n"
        "megatron:\n"
        "  hidden_size: 4\n"
    )
    problems = problems_of(tmp_path, text, "run.stepz=4", "nonsense")
    assert [(problem.line, problem.key) for problem in problems] == [
        (1, "runs"),
        (2, "run.seed"),
        (4, "model.policy"),
        (4, "model.policy"),
        (7, "modules.rollout.group_size"),
        (8, "modules.rollout.engine"),
        (10, "modules.training.learning_rte"),
        (13, "modules.training.num_mini_batches"),
        (15, "monitor.gap_warn"),
        (18, "checkpoint.keep"),
        (20, "megatron.hidden_size"),
        (None, "nonsense"),
        (None, "run.stepz"),
    ]


def test_a_rule_waits_while_a_key_it_looks_at_is_misspelt(tmp_path: Path) -> None:
    text = "modules:\n  inference:\n    model: [reference_model]\n  training:\n    kl: {coefficient: 0.1}\n"
    assert only_problem(tmp_path, text).key == "modules.inference.model"


def test_tabs_and_quotes_are_found_on_all_lines_when_the_file_is_broken_otherwise(tmp_path: Path) -> None:
    text = "run:\n\tname: \u201cx\u201d\nmodel: [\ndata:\n\tshuffle: \u2018true\u2019\n"
    assert [problem.line for problem in problems_of(tmp_path, text)] == [2, 2, 5, 5]


def test_a_problem_reads_as_place_key_message_and_fix(tmp_path: Path) -> None:
    file = tmp_path / NAME
    file.write_text("run:\n  stepz: 5\n")
    assert _error_of(file) == f"{file}:2: run.stepz: unknown key\n  fix: did you mean run.steps?"
