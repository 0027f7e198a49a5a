"""What the engine's loop cannot take is refused before, by name; what it can take is left as it is."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from lmdeploy.messages import GenerationConfig

from dlinfer_ext.framework.lmdeploy import requests

pytestmark = pytest.mark.lmdeploy
VOCABULARY = 512


def bias(scores: Any) -> Any:
    return scores


def closure() -> Any:
    return lambda scores: scores


@pytest.mark.parametrize(
    ("ids", "settings", "told"),
    [
        ([0, 511], {}, None),
        ([5], {"stop_token_ids": [0, 511], "bad_token_ids": [7]}, None),
        ([5], {"random_seed": -1}, None),  # LMDeploy takes 32 bits of it
        ([5], {"repetition_penalty": 0.0}, None),  # LMDeploy takes 1 for it
        ([5], {"max_new_tokens": 2**63 - 1, "min_new_tokens": None}, None),
        ([5], {"logits_processors": [partial(bias)]}, None),
        ([], {}, "The prompt is empty"),
        ([5, -1], {}, "input_ids holds -1; wanted token ids from 0 to 511"),
        ([512], {}, "input_ids holds 512; wanted token ids from 0 to 511"),
        ([2**70], {}, f"input_ids holds {2**70}"),
        ([5], {"stop_token_ids": [3, 512]}, "stop_token_ids holds 512"),
        ([5], {"bad_token_ids": [-1]}, "bad_token_ids holds -1"),
        ([5], {"max_new_tokens": 2**63}, f"max_new_tokens is {2**63}; wanted a number of 64 bits"),
        ([5], {"min_new_tokens": 2**70}, f"min_new_tokens is {2**70}; wanted a number of 64 bits"),
        ([5], {"repetition_penalty": float("nan")}, "repetition_penalty is nan; wanted a finite number"),
        ([5], {"logits_processors": [closure()]}, "logit_bias cannot be handed to the engine's process"),
    ],
)
def test_what_the_engine_cannot_take_is_named(ids: list[int], settings: dict[str, Any], told: str | None) -> None:
    wrong = requests.wrong_with(ids, GenerationConfig(**settings), VOCABULARY)
    assert (wrong is None) == (told is None), wrong
    assert told is None or told in str(wrong)


class Metrics:
    def __init__(self) -> None:
        self.total, self.failed = 0, 0

    def increase_total_requests(self) -> None:
        self.total += 1

    def increase_failed_requests(self, why: str) -> None:
        assert why == "error"
        self.failed += 1


class RequestError(Exception):
    pass


class Engine:
    """Stands in for AsyncEngine: preprocesses everything."""

    def __init__(self) -> None:
        self.hf_cfg = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=VOCABULARY))
        self.removed: list[str] = []
        self.session_mgr = SimpleNamespace(remove=self.removed.append)

    async def preprocess(self, ids: list[int], **settings: Any) -> Any:
        config = GenerationConfig(**settings)
        return SimpleNamespace(session="seven", inputs={"input_ids": ids}, gen_config=config)


def patched() -> tuple[Any, Metrics]:
    metrics = Metrics()
    engine = type("AsyncEngine", (Engine,), {})
    module = SimpleNamespace(
        AsyncEngine=engine,
        metrics_processor=metrics,
        RequestError=lambda code, message: RequestError(f"{code}: {message}"),
        ErrorCode=SimpleNamespace(INVALID_REQUEST="invalid"),
    )
    requests.patch_preprocess(module)
    return engine(), metrics


def test_a_refused_request_leaves_no_session_and_is_counted() -> None:
    engine, metrics = patched()
    with pytest.raises(RequestError, match="invalid: input_ids holds 512"):
        asyncio.run(engine.preprocess([512]))
    assert engine.removed == ["seven"]
    assert (metrics.total, metrics.failed) == (1, 1)


def test_another_request_is_handed_on_and_a_top_k_above_the_vocabulary_is_all_tokens() -> None:
    engine, metrics = patched()
    request = asyncio.run(engine.preprocess([5], top_k=1_000_000))
    assert request.gen_config.top_k == VOCABULARY
    assert asyncio.run(engine.preprocess([5], top_k=3)).gen_config.top_k == 3
    assert not engine.removed
    assert (metrics.total, metrics.failed) == (0, 0)


def test_a_setting_that_is_asserted_about_is_a_clients_error() -> None:
    module = SimpleNamespace(build_serving_generation_config=lambda **settings: GenerationConfig(**settings))
    requests.patch_settings(module)
    assert module.build_serving_generation_config(min_p=0.5).min_p == 0.5
    with pytest.raises(RequestValidationError) as caught:
        module.build_serving_generation_config(min_p=7.0)
    (error,) = caught.value.errors()
    assert "min_p should be in range [0, 1], but found 7.0" in error["msg"]
    with pytest.raises(RequestValidationError) as caught:
        module.build_serving_generation_config(top_p=7.0)  # asserted without a word
    assert caught.value.errors()[0]["msg"] == "a sampling setting is out of its range"
