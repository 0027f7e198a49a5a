"""Ask a running LMDeploy server for many requests that arrive over time, some of which go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import aiohttp


async def _ask(http: aiohttp.ClientSession, url: str, request: dict[str, Any]) -> dict[str, Any]:
    """Send one request at its time; hang up after `cancel_after` tokens or `give_up_after` seconds."""
    await asyncio.sleep(request.get("wait", 0.0))
    if "post" in request:
        return await _post(http, url, *request["post"])
    result: dict[str, Any] = {"tokens": [], "finish": None, "error": None, "cached_tokens": 0, "prompt_tokens": 0}
    result["top_logits"] = []
    limit = request.get("give_up_after")
    try:
        async with asyncio.timeout(limit):
            await _stream(http, url, request, result)
    except TimeoutError:
        if limit is None:
            result["error"] = "TimeoutError"
        else:
            result["finish"] = "abort"
    return result


async def _post(http: aiohttp.ClientSession, url: str, path: str, text: str) -> dict[str, Any]:
    """Send a body as it is and return the reply's status and text; the status is 0 where there was none."""
    result: dict[str, Any] = {"status": 0, "text": "", "error": None}
    try:
        async with http.post(url + path, data=text, headers={"Content-Type": "application/json"}) as reply:
            result |= {"status": reply.status, "text": await reply.text()}
    except (aiohttp.ClientError, TimeoutError) as error:
        result["error"] = f"{type(error).__name__}: {error}"
    return result


async def _stream(http: aiohttp.ClientSession, url: str, request: dict[str, Any], result: dict[str, Any]) -> None:
    """Stream a request from /generate, which gives token ids, into `result`."""
    body = {
        "prompt": request["text"],
        "max_tokens": request["new"],
        "temperature": request.get("temperature", 1.0),
        "top_k": request.get("top_k", 1),
        "ignore_eos": not request.get("stop_token_ids"),
        "stop_token_ids": request.get("stop_token_ids") or None,
        "stream": True,
    }
    if request.get("top_logits"):
        body |= {"return_logprob": True, "top_logprobs_num": request["top_logits"]}
    limit = request.get("cancel_after")
    try:
        async with http.post(f"{url}/generate", json=body) as reply:
            if reply.status != 200:
                result["error"] = f"HTTP {reply.status}: {(await reply.text())[:300]}"
                return
            async for line in reply.content:
                text = line.decode().strip()
                if not text.startswith("data:") or text.endswith("[DONE]"):
                    continue
                part = json.loads(text.removeprefix("data:"))
                if "error" in part:  # the reply had begun, so its status was 200
                    result["error"] = f"error in mid-stream: {json.dumps(part['error'])[:300]}"
                    return
                result["tokens"] += part.get("output_ids") or []
                info = part.get("meta_info") or {}
                for place in info.get("output_top_logprobs") or []:
                    result["top_logits"].append({str(token): value for value, token in place})
                result["prompt_tokens"] = info.get("prompt_tokens") or result["prompt_tokens"]
                reason = info.get("finish_reason")
                if reason:
                    result["finish"] = reason.get("type") if isinstance(reason, dict) else reason
                if limit and len(result["tokens"]) >= limit:
                    result["finish"] = "abort"
                    reply.close()
                    return
        if result["finish"] is None:
            result["error"] = f"the stream ended after {len(result['tokens'])} tokens without a reason"
    except aiohttp.ClientError as error:
        result["error"] = f"{type(error).__name__}: {error}"


def ask_all(url: str, requests: Sequence[dict[str, Any]], timeout_s: float) -> list[dict[str, Any]]:
    """Send every request at its own time and return the outputs in the order given.

    Args:
        url: of the server.
        requests: {"post": (path, body)}, sent as it is, whose output is {"status", "text", "error"}; or "text", "new",
            and optionally "wait" (seconds), "cancel_after", "give_up_after" (seconds), "stop_token_ids", "top_k" and
            "top_logits", how many of the largest to return (the server must run with raw_logits).
        timeout_s: for each request; one that takes longer has an error.
    """

    async def everything() -> list[dict[str, Any]]:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            return await asyncio.gather(*(_ask(http, url, r) for r in requests))

    return asyncio.run(everything())
