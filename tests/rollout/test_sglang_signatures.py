"""Every call of ours to SGLang against what its installed source declares: routes, fields, arguments, names.

Finds the calls by itself, so that a new one without a counterpart fails. Does not test what the calls do.
"""

import ast
import base64
import importlib.util
import io
import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_megatron.config.field_types import allowed_types, fits
from grpo_megatron.config.schema import Config, ModelSection, ModulesSection, RolloutSection
from grpo_megatron.config.sglang_fields import what_to_set_instead
from grpo_megatron.config.sglang_package import read_sglang_fields
from grpo_megatron.rollout.sglang.arguments import RECEIVER, server_arguments
from grpo_megatron.rollout.sglang.weight_session import serialize_message
from tests.rollout.sglang_calls import GUESTS, ROOT, SPEAKERS, HttpCall, OurSource, Unreadable
from tests.rollout.sglang_source import SERVER, SGLANG, Fields, definition, fields_of, routes, tree_of, words

pytestmark = [pytest.mark.unit, pytest.mark.skipif(SGLANG is None, reason="SGLang is not installed")]

REPLACEABLE = {
    "attention_backend",
    "disable_cuda_graph",
    "grammar_backend",
    "log_level",
    "log_level_http",
    "schedule_policy",
    "sleep_on_idle",
}
"""Arguments that we set and that the section `sglang:` may set otherwise; all others that we set are refused there."""
OUR_OWN_WORDS = {"success", "message"}


def http_calls() -> list[HttpCall]:
    return [call for path in SPEAKERS for call in OurSource(path).http_calls()]


def misfits(call: HttpCall, fields: Fields) -> Iterator[str]:
    """Entries that the server would not understand, or would miss."""
    yield from (f"{call.place}: {call.path} knows no {name}" for name in sorted(call.body.keys() - fields.known))
    yield from (f"{call.place}: {call.path} needs {name}" for name in sorted(fields.required - call.body.keys()))


def test_the_calls_are_found() -> None:
    paths = {call.path for call in http_calls()}
    assert {"/generate", "/abort_request", "/health_generate", "/model_info", "/update_weight_version"} <= paths
    (generate,) = (call for call in http_calls() if call.path == "/generate")
    assert {"input_ids", "sampling_params", "return_logprob", "stream", "rid"} <= generate.body.keys()


def test_the_routes_are_found() -> None:
    found = routes()
    assert found["/generate"].methods == {"POST", "PUT"}
    assert found["/health_generate"].methods == {"GET"}
    assert found["/flush_cache"].query == {"timeout"} and found["/flush_cache"].body is None
    begin = found["/begin_weight_update"].body
    assert begin is not None and {"selector", "rid"} <= begin.known


def test_every_address_is_one_of_sglangs_with_this_method() -> None:
    problems = []
    for call in http_calls():
        route = routes().get(call.path)
        if route is None:
            problems.append(f"{call.place}: SGLang has no {call.path}")
        elif call.method not in route.methods:
            problems.append(f"{call.place}: {call.path} wants {' or '.join(route.methods)}, not {call.method}")
        elif not call.query <= route.query:
            problems.append(f"{call.place}: {call.path} knows no {', '.join(call.query - route.query)}")
    assert not problems, "\n".join(problems)


def test_every_field_that_is_sent_is_one_of_the_request() -> None:
    problems = []
    for call in http_calls():
        fields = routes()[call.path].body
        if fields is not None:
            problems += misfits(call, fields)
        elif call.body:
            problems.append(f"{call.place}: {call.path} looks at no body, and {', '.join(call.body)} is sent")
    assert not problems, "\n".join(problems)


def test_every_sampling_parameter_is_one_of_sglangs() -> None:
    known = fields_of("SamplingParams", "srt/sampling/sampling_params.py").known
    sent = 0
    for path in SPEAKERS:
        source = OurSource(path)
        for call in source.http_calls():
            if "sampling_params" in call.body:
                names = source.entries(call.body["sampling_params"], None)
                assert sorted(names.keys() - known) == []
                sent += len(names)
    assert sent >= 6


def test_every_word_that_is_read_from_an_answer_is_one_of_sglangs() -> None:
    known = words() | fields_of("GenerateReqInput").known | OUR_OWN_WORDS
    client = OurSource(ROOT / "grpo_megatron" / "rollout" / "client.py")
    problems = [f"{place}: {word}" for place, word in client.words_read() if word not in known]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_every_server_argument_is_a_field_of_its_type(on_cpu: bool) -> None:
    assert SGLANG is not None
    fields = read_sglang_fields(SGLANG)
    config = replace(Config(), model=ModelSection(policy="/model"))
    given = _arguments(config, on_cpu=on_cpu)
    assert {"model_path", "tp_size", "max_total_tokens"} <= given.keys()
    for name, value in given.items():
        assert name in fields, f"SGLang's ServerArgs has no field {name}"
        allowed = list(allowed_types(fields[name].annotation))
        assert any(fits(value, kind) for kind in allowed), f"{name}: {value!r} is not {' or '.join(allowed)}"
        choices = fields[name].choices
        assert choices is None or value in choices, f"{name}: {value!r} is not among {choices}"


def _arguments(config: Config, *, on_cpu: bool) -> dict[str, Any]:
    return server_arguments(
        config, model_path="/model", on_cpu=on_cpu, tensor=2, first_device=0, seed=1, cache_tokens=100
    )


def test_what_we_set_cannot_be_set_in_the_section_sglang_but_for_a_few_defaults() -> None:
    assert SGLANG is not None
    fields = read_sglang_fields(SGLANG)
    given = {**_arguments(Config(), on_cpu=True), **_arguments(Config(), on_cpu=False)}
    written = [name for path in SPEAKERS for _, name in OurSource(path).server_arguments()]
    assert {"host", "port", "api_key"} <= set(written)
    passed = {name for name in {*given, *written} if what_to_set_instead(name, fields[name].group) is None}
    assert passed == REPLACEABLE


def test_the_keys_of_the_configuration_arrive_as_arguments() -> None:
    section = RolloutSection(share_prompt_prefix=False, max_concurrent_rollouts=7)
    model = ModelSection(dtype="float32", output_head_dtype="model")
    changed = _arguments(Config(model=model, modules=ModulesSection(rollout=section)), on_cpu=True)
    defaults = _arguments(Config(), on_cpu=True)
    expected = {
        "disable_radix_cache": (False, True),
        "max_running_requests": (64, 7),
        "dtype": ("bfloat16", "float32"),
        "enable_fp32_lm_head": (True, False),
    }
    assert {name: (defaults[name], changed[name]) for name in changed if changed[name] != defaults[name]} == expected
    replaced = _arguments(Config(sglang={"attention_backend": "triton", "page_size": 8}), on_cpu=True)
    assert (replaced["attention_backend"], replaced["page_size"]) == ("triton", 8)


def test_every_name_that_is_taken_from_sglang_is_there() -> None:
    used = [found for path in GUESTS for found in OurSource(path).used()]
    assert len(used) >= 4
    problems = [f"{place}: {name}" for place, name in used if definition(name) is None]
    assert not problems, "\n".join(problems)


def test_every_function_of_sglang_takes_the_arguments_that_it_is_given() -> None:
    judged = 0
    for path in GUESTS:
        for place, name, call in OurSource(path).calls():
            function = definition(name)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                problem = _refuses(function, call)
                assert problem is None, f"{place}: {name} {problem}"
                judged += 1
    assert judged >= 3


def _refuses(function: ast.FunctionDef | ast.AsyncFunctionDef, call: ast.Call) -> str | None:
    """Why this call does not fit; a method's first argument is given by the instance or class."""
    arguments = function.args
    if any(isinstance(value, ast.Starred) for value in call.args) or any(word.arg is None for word in call.keywords):
        return None
    names = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args]]
    names = names[1:] if names[:1] in (["self"], ["cls"]) else names
    by_keyword = {*names, *(argument.arg for argument in arguments.kwonlyargs)}
    given = {word.arg for word in call.keywords}
    if len(call.args) > len(names) and arguments.vararg is None:
        return f"takes {len(names)} arguments, not {len(call.args)}"
    if arguments.kwarg is None and given - by_keyword:
        return f"knows no {', '.join(sorted(str(name) for name in given - by_keyword))}"
    needed = names[: len(names) - len(arguments.defaults)]
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    needed += [argument.arg for argument, default in pairs if default is None]
    missing = set(needed) - set(names[: len(call.args)]) - given
    return f"needs {', '.join(sorted(missing))}" if missing else None


def test_every_environment_variable_of_sglang_is_one_that_it_reads() -> None:
    assert SGLANG is not None
    pattern = re.compile(r"SGLANG_[A-Z_]+")
    ours = {name for path in SPEAKERS for name in pattern.findall(path.read_text())}
    assert ours
    read = "".join(
        (SGLANG / "srt" / name).read_text() for name in ("environ.py", "platforms/__init__.py", "utils/numa_utils.py")
    )
    assert sorted(ours - set(pattern.findall(read))) == []


def test_the_message_with_weights_holds_only_what_sglangs_reader_allows() -> None:
    """Its reader of pickles takes a fixed list of names and refuses everything else."""
    reader = definition("sglang.srt.utils.common.SafeUnpickler.ALLOWED_GLOBALS")
    assert isinstance(reader, ast.Assign)
    allowed = ast.literal_eval(reader.value)
    named = set()

    class Recorder(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            named.add((module, name))
            return super().find_class(module, name)

    ((text, tensor),) = Recorder(io.BytesIO(base64.b64decode(serialize_message("what to do")))).load()
    assert (text, tensor.numel()) == ("what to do", 0)
    assert named and sorted(named - allowed) == []


def test_the_custom_loader_is_called_with_the_model_and_the_tensors() -> None:
    place = "srt/model_executor/model_runner_components/weight_updater.py"
    calls = {
        ast.unparse(node)
        for node in ast.walk(tree_of(place))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("custom_loader", "dynamic_import")
    }
    assert "custom_loader(self.get_model(), named_tensors)" in calls
    assert "dynamic_import(load_format)" in calls
    module, _, name = RECEIVER.rpartition(".")
    file = ROOT / (module.replace(".", "/") + ".py")
    (function,) = (node for node in ast.parse(file.read_text()).body if getattr(node, "name", "") == name)
    assert isinstance(function, ast.FunctionDef)
    assert [argument.arg for argument in function.args.args] == ["model", "named_tensors"]
    assert not function.args.kwonlyargs


def test_uvicorn_runs_sglangs_server_on_sockets_that_are_open_already() -> None:
    """Our patch gives `sockets` to `uvicorn.Server.run`: it has to take them, and SGLang must not give its own."""
    found = importlib.util.find_spec("uvicorn")
    assert found is not None and found.origin is not None
    tree = ast.parse((Path(found.origin).parent / "server.py").read_text())
    (server,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Server")
    (run,) = (node for node in server.body if isinstance(node, ast.FunctionDef) and node.name == "run")
    assert "sockets" in [argument.arg for argument in run.args.args]
    runs = [
        node
        for node in ast.walk(tree_of(SERVER))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "server.run" and not node.args and not node.keywords
    ]
    assert runs, "SGLang does not run uvicorn's Server any more"


def judge(tmp_path: Path, text: str) -> list[HttpCall]:
    (tmp_path / "ours.py").write_text(text)
    return list(OurSource(tmp_path / "ours.py").http_calls())


def test_a_body_is_followed_through_variables_parameters_and_functions(tmp_path: Path) -> None:
    text = (
        "def send(control, extra):\n"
        "    body = {'a': 1} | more()\n"
        "    body['b'] = 2\n"
        "    control.post(f'/generate?x={extra}', body)\n"
        "def more():\n"
        "    return {'c': 3} if True else {**{'d': 4}}\n"
        "def ask(control, what):\n"
        "    control.post('/abort_request', json=what)\n"
        "def start(control):\n"
        "    ask(control, {'rid': 'x'})\n"
        "    control.get('/health')\n"
    )
    calls = judge(tmp_path, text)
    assert [(call.method, call.path, set(call.query), set(call.body)) for call in calls] == [
        ("POST", "/generate", {"x"}, {"a", "b", "c", "d"}),
        ("POST", "/abort_request", set(), {"rid"}),
        ("GET", "/health", set(), set()),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "path = '/generate'",
        "send('/generate', {})",
        "control.post('/generate', make())",
        "control.post('/generate', {key: 1})",
        "def ask(what):\n    control.post('/generate', what)",
    ],
)
def test_a_call_that_cannot_be_judged_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(Unreadable, match=r"ours\.py:\d"):
        judge(tmp_path, text)


def test_a_wrong_field_and_a_missing_one_are_found() -> None:
    call = HttpCall("ours.py:1", "POST", "/x", frozenset(), {"a": ast.Constant(1)})
    found = list(misfits(call, Fields(frozenset({"b", "c"}), frozenset({"b"}))))
    assert found == ["ours.py:1: /x knows no a", "ours.py:1: /x needs b"]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        ("f(1)", None),
        ("f(1, b=2, c=3)", None),
        ("f()", "needs a"),
        ("f(1, 2, 3)", "takes 2 arguments, not 3"),
        ("f(1, d=1)", "knows no d"),
        ("f(*x)", None),
    ],
)
def test_a_call_is_held_against_a_signature(call: str, problem: str | None) -> None:
    function = ast.parse("def f(a, b=1, *, c=2): ...").body[0]
    parsed = ast.parse(call, mode="eval").body
    assert isinstance(function, ast.FunctionDef) and isinstance(parsed, ast.Call)
    assert _refuses(function, parsed) == problem
