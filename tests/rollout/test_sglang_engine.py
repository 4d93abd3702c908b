"""The conformance suite on a real SGLang server of the tiny Llama, in float32."""

import os
import signal
from collections.abc import Iterator

import pytest

from grpo_megatron.rollout.base import EngineRestarted
from tests.rollout.conformance import ProcessEngineConformance, Subject
from tests.rollout.requests import make_prompt, make_request, run
from tests.rollout.sglang_server import NEEDS_SGLANG, start_sglang
from tests.tiny import make_tiny_llama

pytestmark = [pytest.mark.engines, NEEDS_SGLANG]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    folder = make_tiny_llama(tmp_path_factory.mktemp("model"))
    engine = start_sglang(folder, tmp_path_factory.mktemp("logs"))
    try:
        engine.set_version(0)
        yield Subject(engine, folder, max_concurrent_rollouts=32, max_sequence_tokens=128)
    finally:
        engine.close()


class TestSglangEngine(ProcessEngineConformance):
    def kill(self, subject: Subject) -> None:
        os.kill(subject.engine.life.process.process_id, signal.SIGKILL)

    def test_nothing_is_generated_before_a_version_was_published(self, subject: Subject) -> None:
        subject.engine.life.version = -1
        with pytest.raises(EngineRestarted, match="no version"):
            run(subject.engine, [make_request(make_prompt("early", (5, 6)), max_new_tokens=2)])
        subject.engine.set_version(0)

    def test_a_group_shares_the_cache_of_its_prompt(self, subject: Subject) -> None:
        """Of 8 answers to a prompt of 90 tokens 7 find it cached: by the server's own count of prompt tokens."""
        life = subject.engine.life
        life.control.post("/flush_cache")
        prompt = make_prompt("shared", [3 + place % 140 for place in range(90)])
        rollouts = run(subject.engine, [make_request(prompt, 8, max_new_tokens=4)])
        assert len({rollout.token_ids for rollout in rollouts}) > 1
        log = life.process._settings.log_file.read_text().split("Cache flushed")[-1]
        computed = sum(
            int(line.split("#new-token: ")[1].split(",")[0]) for line in log.splitlines() if "Prefill" in line
        )
        assert computed <= 90 + 2 * 8
