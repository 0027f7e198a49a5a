"""Refuse at the server's door what would end the engine for everybody: its loop takes a request as it comes."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Sequence
from typing import Any, Final

INT64: Final = 2**63
WHOLE: Final = ("max_new_tokens", "min_new_tokens", "repetition_ngram_size", "repetition_ngram_threshold")


def wrong_with(input_ids: Sequence[int], config: Any, vocabulary: int) -> str | None:
    """Return what a request has that the engine's process cannot take, or None.

    Args:
        input_ids: its prompt, tokenized or as it was given.
        config: LMDeploy's GenerationConfig.
        vocabulary: rows of the embedding; token ids are 0 … vocabulary - 1.
    """
    if not len(input_ids):
        return "The prompt is empty: it has no token; wanted one at least."
    named = (
        ("input_ids", input_ids),
        ("stop_token_ids", config.stop_token_ids),
        ("bad_token_ids", config.bad_token_ids),
    )
    for name, ids in named:
        odd = next((i for i in ids or () if not 0 <= i < vocabulary), None)
        if odd is not None:
            return f"{name} holds {odd}; wanted token ids from 0 to {vocabulary - 1}."
    for name in WHOLE:
        value = getattr(config, name)
        if value is not None and not -INT64 <= value < INT64:
            return f"{name} is {value}; wanted a number of 64 bits."
    if not math.isfinite(config.repetition_penalty):
        return f"repetition_penalty is {config.repetition_penalty}; wanted a finite number."
    if config.logits_processors:
        try:
            pickle.dumps(config.logits_processors)
        except (pickle.PicklingError, AttributeError, TypeError):
            return "logit_bias cannot be handed to the engine's process in this LMDeploy; leave it out."
    return None


def patch_preprocess(module: Any) -> str:
    """Give a request that would end the engine the answer of a malformed one: status 400, and what is wrong.

    A token id out of the vocabulary, an empty prompt, a number of more than 64 bits or a top_k above the vocabulary
    raises in the engine's loop, which ends it: every answer under way and every later one is an error. A top_k above
    the vocabulary has a meaning, all tokens, and gets it.
    """
    original = module.AsyncEngine.preprocess

    @functools.wraps(original)
    async def preprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = await original(self, *args, **kwargs)
        vocabulary = self.hf_cfg.get_text_config().vocab_size
        wrong = wrong_with(request.inputs["input_ids"], request.gen_config, vocabulary)
        if wrong is not None:
            module.metrics_processor.increase_total_requests()
            module.metrics_processor.increase_failed_requests("error")
            self.session_mgr.remove(request.session)
            raise module.RequestError(module.ErrorCode.INVALID_REQUEST, wrong)
        request.gen_config.top_k = min(request.gen_config.top_k, vocabulary)  # more are not there to be sorted
        return request

    module.AsyncEngine.preprocess = preprocess
    return "AsyncEngine.preprocess refuses what would end the engine"


def patch_settings(module: Any) -> str:
    """Answer a setting that LMDeploy asserts about with what is wrong, instead of status 500 without a word."""
    from fastapi.exceptions import RequestValidationError

    original = module.build_serving_generation_config

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except (AssertionError, ValueError) as error:
            wrong = str(error) or "a sampling setting is out of its range"
            raise RequestValidationError([{"loc": (), "msg": wrong}]) from None

    module.build_serving_generation_config = build
    return "build_serving_generation_config says what is wrong with a setting"
