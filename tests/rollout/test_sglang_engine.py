"""The conformance suite on a real SGLang server of the tiny Llama, in float32."""

from collections.abc import Iterator

import pytest

pytest.importorskip("sglang", reason="bash tools/install_sglang.sh")

from tests.rollout.conformance import EngineConformance, Subject
from tests.rollout.sglang_server import start_sglang
from tests.tiny import make_tiny_llama

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    folder = make_tiny_llama(tmp_path_factory.mktemp("model"))
    engine = start_sglang(folder, tmp_path_factory.mktemp("logs"))
    try:
        engine.set_version(0)
        yield Subject(engine, folder, max_concurrent_rollouts=32, max_sequence_tokens=128)
    finally:
        engine.close()


class TestSglangEngine(EngineConformance):
    pass
