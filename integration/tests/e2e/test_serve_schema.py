"""schemathesis makes requests from the server's own OpenAPI description, right and wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from integration_support.short_runs import tiny_run
from pcomm.integration.llm import LLM

schemathesis = pytest.importorskip("schemathesis")
httpx = pytest.importorskip("httpx2")
pytest.importorskip("uvicorn")

from integration_support.live_server import LiveServer  # noqa: E402


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    run = tiny_run(tmp_path_factory.mktemp("schema"), "M")
    # Texts are short whatever is asked for.
    with LLM(run, memory_bytes=2**21, max_model_len=24) as llm, LiveServer(llm) as found:
        yield found


@pytest.fixture(scope="module")
def schema(server: LiveServer) -> Any:
    content = httpx.get(f"{server.url}/openapi.json").json()
    found = schemathesis.openapi.from_dict(content)
    found.config.update(base_url=server.url)
    return found


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_answer_is_one_that_is_described(path, schema, server):
    operation = schema[path]["POST"]
    modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
    statuses: set[int] = set()

    def check(case: Any) -> None:
        if isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "tiny"
        answer = case.call(timeout=600)
        statuses.add(answer.status_code)
        # Never an exception of ours, and each error as the OpenAI API has it.
        assert answer.status_code in (200, 400, 404, 405, 413, 429), answer.text
        if answer.status_code >= 400:
            assert answer.json()["error"].keys() == {"message", "type", "param", "code"}

    quiet = list(hypothesis.HealthCheck)
    settings = hypothesis.settings(max_examples=6, derandomize=True, suppress_health_check=quiet)
    for mode in modes:
        cases = operation.as_strategy(generation_mode=mode)
        hypothesis.settings(settings)(hypothesis.given(cases)(check))()
    assert statuses >= {200, 400}
    stats = server.stats()
    assert (stats.running, stats.waiting) == (0, 0)
