"""The few calls that the demo makes to a vLLM OpenAI server. Token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

_TTFT = re.compile(r"^vllm:time_to_first_token_seconds_(sum|count)\{[^}]*\} ([0-9.e+-]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer.

    Attributes:
        logprobs: token id -> log-probability of the first generated token, over the whole vocabulary; empty unless
            asked for.
        report: what the connector says was reused, empty without one.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    logprobs: dict[int, float] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)


class Server:
    """One server."""

    def __init__(self, url: str, model: str, timeout_s: float = 120.0) -> None:
        self._http = httpx.Client(base_url=url, timeout=timeout_s)
        self.url = url
        self.model = model

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def tokenize(self, messages: Sequence[dict[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of messages under the server's chat template."""
        body = {"model": self.model, "messages": list(messages), "add_generation_prompt": add_generation_prompt}
        tokens: list[int] = self._post("/tokenize", body)["tokens"]
        return tokens

    def tokenize_text(self, text: str) -> list[int]:
        """Token ids of plain text."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        tokens: list[int] = self._post("/tokenize", body)["tokens"]
        return tokens

    def complete(
        self, prompt: Sequence[int], *, max_tokens: int, mapflow: dict[str, Any] | None = None, logprobs: bool = False
    ) -> Completion:
        """Continue a prompt greedily.

        Args:
            prompt: token ids.
            max_tokens: tokens to generate.
            mapflow: the request's `kv_transfer_params["mapflow"]`.
            logprobs: return the first token's whole distribution.
        """
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": {"mapflow": mapflow or {}},
        }
        if logprobs:
            body |= {"logprobs": -1, "return_tokens_as_token_ids": True}
        answer = self._post("/v1/completions", body)
        choice, usage = answer["choices"][0], answer["usage"]
        top = choice["logprobs"]["top_logprobs"][0] if logprobs else {}
        return Completion(
            text=choice["text"],
            token_ids=tuple(choice["token_ids"]),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            logprobs={int(name.removeprefix("token_id:")): value for name, value in top.items()},
            report=(answer.get("kv_transfer_params") or {}).get("mapflow", {}),
        )

    def ttft_sum(self) -> float:
        """Seconds to first token added up over all requests so far, by vLLM's own metric."""
        found = dict(_TTFT.findall(self._http.get("/metrics").text))
        return float(found.get("sum", 0.0))

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self._http.post(path, json=body)
        if response.status_code != httpx.codes.OK:
            raise RuntimeError(f"{self.model} answered {response.status_code} to {path}: {response.text[:300]}")
        answer: dict[str, Any] = response.json()
        return answer
