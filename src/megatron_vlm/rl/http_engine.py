"""Answers from a server of vLLM or SGLang, by the OpenAI-style requests that both understand, as samples.

Token ids go both ways, nothing is tokenised again. A prompt of text goes to /v1/completions as token ids. One
with images goes to /v1/chat/completions as a conversation, as neither server takes images beside token ids
there; the server then says what it made of it, which has to be our prompt. Read in vLLM's
`entrypoints/openai/*/protocol.py` and SGLang's `srt/entrypoints/openai/protocol.py`, August 2026.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import torch
from torch import distributed as dist

from megatron_vlm.data.generation_prompt import stop_tokens
from megatron_vlm.data.media.images import decode_image
from megatron_vlm.job.alarm import alarm
from megatron_vlm.messages import printable
from megatron_vlm.rl.policy import Policy
from megatron_vlm.rl.rollouts import Answered, RolloutPrompt, Sample, samples_of

SHOWN = 300  # characters of a refusal that are shown
BYTES_PER_TOKEN = 1024  # of an answer: its id, text and log-probability take 100 to 300
# A server's defaults come from the checkpoint's generation_config.json, and would be another distribution.
ALL_TOKENS = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class EngineError(ValueError):
    """The server did not answer, or not with what a sample needs; the same error on every rank."""


@dataclass(frozen=True)
class HttpEngine:
    """A server at `url` (such as http://10.0.0.5:8000) that serves the policy's weights as `model`.

    Its weights are the caller's matter: `Policy.hf_weights`, or an export. The first rank asks, with up to
    `at_once` requests under way. A request is repeated up to `retries` times if the server refuses the
    connection, is busy (429) or fails (5xx), after `pause`, 2 * `pause`, … seconds. Each time it has
    `timeout` seconds from the connection to the last byte. An answer may have 1 KiB for each token asked for.

    SGLang's log-probabilities are those at the temperature. vLLM's are those at temperature 1, unless it is
    started with `--logprobs-mode processed_logprobs`.
    """

    url: str
    model: str
    answers: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    headers: Mapping[str, str] = field(default_factory=dict)
    at_once: int = 64
    timeout: float = 600.0
    retries: int = 3
    pause: float = 1.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {printable(self.url)}; give one that begins with http:// or https://.")

    def __call__(self, policy: Policy, prompts: Sequence[RolloutPrompt]) -> list[Sample]:
        """Raises EngineError on every rank."""
        said: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                said = [self._ask_all(policy, prompts)]
            except Exception as error:  # noqa: BLE001 - the other ranks wait for what is said
                said = [str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"]
        with alarm():
            dist.broadcast_object_list(said, src=0)
        if isinstance(said[0], str):
            raise EngineError(said[0])
        return samples_of(policy, prompts, said[0])

    def _ask_all(self, policy: Policy, prompts: Sequence[RolloutPrompt]) -> list[list[Answered]]:
        source, reading = policy.source, threading.Lock()  # JSON may take 30 times its size
        stop = stop_tokens(source.folder, source.description.hf_config)
        size = source.description.text.vocab_size
        kinds = source.description.visual_kinds

        def text_of(tokens: list[int]) -> list[int]:
            """Without placeholders, and what a server may put in their place."""
            known = [token for token in tokens if 0 <= token < size]
            kind = torch.as_tensor(kinds(torch.tensor(known, dtype=torch.long))).tolist()
            return [token for token, each in zip(known, kind, strict=True) if each == 0]

        def ask(prompt: RolloutPrompt) -> list[Answered]:
            address, request = self._request(prompt, stop)
            per_answer = BYTES_PER_TOKEN * self.max_new_tokens + 16 * len(prompt.inputs["input_ids"])
            said = self._post(address, json.dumps(request).encode(), 2**16 + self.answers * per_answer)
            try:
                with reading:
                    return self._read(json.loads(said), address, prompt, size, text_of)
            except EngineError:
                raise
            except (
                AttributeError,
                LookupError,
                OverflowError,
                RecursionError,
                TypeError,
                ValueError,
            ) as error:
                raise EngineError(
                    f"{address}: the answer is not in the form of vLLM's or SGLang's "
                    f"({type(error).__name__}: {printable(error)}); look at it with curl."
                ) from error

        with ThreadPoolExecutor(self.at_once) as pool:
            asked = [pool.submit(ask, prompt) for prompt in prompts]
            try:
                return [one.result() for one in asked]
            finally:
                for one in asked:
                    one.cancel()

    def _request(self, prompt: RolloutPrompt, stop: list[int]) -> tuple[str, dict[str, Any]]:
        """The address, and what is sent there."""
        request = {
            "model": self.model,
            "n": self.answers,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            **ALL_TOKENS,
            "stop_token_ids": stop,
            "no_stop_trim": True,  # SGLang: the stop token is part of the answer, as it always is in vLLM
            "return_token_ids": True,
        }
        base = self.url.rstrip("/")
        if not any(part["type"] != "text" for turn in prompt.messages for part in turn["content"]):
            tokens = prompt.inputs["input_ids"].tolist()
            return f"{base}/v1/completions", request | {"prompt": tokens, "logprobs": 1}
        # by which an SGLang that does not know return_token_ids gives them
        request |= {"logprobs": True, "return_prompt_token_ids": True, "return_meta_info": True}
        return f"{base}/v1/chat/completions", request | {"messages": _with_images(prompt)}

    def _post(self, address: str, body: bytes, most_bytes: int) -> bytes:
        for attempt in range(self.retries + 1):
            try:
                status, said = asyncio.run(self._attempt(address, body, most_bytes))
                if 200 <= status < 300:
                    return said
                problem = f"status {status}: {printable(said.decode('utf-8', 'replace'), SHOWN)}"
                final = status < 500 and status != 429
            except TimeoutError:
                problem, final = f"no whole answer in {self.timeout:g} s", True
            except (aiohttp.ClientError, OSError) as error:
                problem, final = printable(error), False
            if final or attempt == self.retries:
                raise EngineError(
                    f"{address}: {problem} (try {attempt + 1} of {self.retries + 1}); "
                    "see that the server runs and what it logs."
                )
            time.sleep(self.pause * 2**attempt)
        raise AssertionError("a last attempt returns or raises")

    async def _attempt(self, address: str, body: bytes, most_bytes: int) -> tuple[int, bytes]:
        """Status and body. Follows no redirect, as it would lose the request's body, and unpacks nothing."""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **self.headers}
        limit, said = aiohttp.ClientTimeout(total=self.timeout), bytearray()
        async with (
            aiohttp.ClientSession(timeout=limit, auto_decompress=False) as session,
            session.post(address, data=body, headers=headers, allow_redirects=False) as response,
        ):
            async for part in response.content.iter_any():
                said += part
                if response.status >= 300 and len(said) >= SHOWN:
                    break
                if len(said) > most_bytes:
                    raise EngineError(
                        f"{address}: the answer has more than the {most_bytes} bytes that {self.answers} "
                        f"answers of {self.max_new_tokens} tokens take; see what the server sends."
                    )
            return response.status, bytes(said)

    def _read(
        self,
        found: dict[str, Any],
        address: str,
        prompt: RolloutPrompt,
        vocabulary: int,
        text_of: Callable[[list[int]], list[int]],
    ) -> list[Answered]:
        choices = sorted(found["choices"], key=lambda choice: choice["index"])
        if len(choices) != self.answers:
            raise EngineError(
                f"{address}: {len(choices)} answers, not {self.answers}; see what the server logs."
            )
        if address.endswith("/chat/completions"):
            theirs = found.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
            if theirs is None:
                raise EngineError(
                    f"{address}: the answer does not say which prompt_token_ids it is for; serve with a "
                    "version that knows return_token_ids."
                )
            ours, count = prompt.inputs["input_ids"].tolist(), (found.get("usage") or {}).get("prompt_tokens")
            # a server may name one placeholder an image, and still count all that it sees
            if theirs != ours and (text_of(theirs) != text_of(ours) or count != len(ours)):
                raise EngineError(
                    f"{address}: the server's prompt has {count or len(theirs)} tokens and ours {len(ours)}, "
                    f"or they differ: {_first_difference(theirs, ours)}; serve a folder with the policy's "
                    "chat template and processor."
                )
        for answer in (answers := [_answered(choice, address, vocabulary) for choice in choices]):
            if len(answer.tokens) > self.max_new_tokens:
                raise EngineError(
                    f"{address}: an answer has {len(answer.tokens)} tokens, max_new_tokens is "
                    f"{self.max_new_tokens}; see that the server heeds what it is asked."
                )
        return answers


def _with_images(prompt: RolloutPrompt) -> list[dict]:
    """The conversation with its images as PNG, so that the server sees the pixels that we see."""
    images, turns = iter(prompt.images), []
    for turn in prompt.messages:
        parts = []
        for part in turn["content"]:
            if part["type"] == "image":
                png = io.BytesIO()
                decode_image(next(images)).save(png, "PNG", compress_level=1)
                data = base64.b64encode(png.getvalue()).decode()
                part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
            elif part["type"] != "text":
                raise EngineError(
                    f"a prompt has a {printable(part['type'])}; servers are given text and images."
                )
            parts.append(part)
        turns.append(turn | {"content": parts})
    return turns


def _answered(choice: dict[str, Any], address: str, vocabulary: int) -> Answered:
    """From vLLM's and SGLang's `token_ids` and `logprobs`, or SGLang's `meta_info`."""
    logprobs = choice.get("logprobs") or {}
    tokens, values = choice.get("token_ids"), logprobs.get("token_logprobs")
    if values is None:
        values = [each["logprob"] for each in logprobs.get("content") or []]
    meta = (choice.get("meta_info") or {}).get("output_token_logprobs")
    if tokens is None and meta is not None:
        tokens, values = [each[1] for each in meta], [each[0] for each in meta]
    if tokens is None:
        raise EngineError(
            f"{address}: the answer has no token_ids, and its text is not tokenised again; serve with a "
            "version that knows return_token_ids."
        )
    if len(values) != len(tokens) or not all(math.isfinite(value) for value in values):
        raise EngineError(
            f"{address}: {len(values)} log-probabilities for {len(tokens)} tokens, or one is no number; "
            "let the server return log-probabilities."
        )
    if wrong := [token for token in tokens if not (isinstance(token, int) and 0 <= token < vocabulary)]:
        raise EngineError(
            f"{address}: token {printable(wrong[0])} is none of the model's {vocabulary}; "
            "serve the policy's model."
        )
    ended_by = choice.get("matched_stop", choice.get("stop_reason"))
    if isinstance(ended_by, int) and tokens[-1:] != [ended_by]:  # SGLang before no_stop_trim
        raise EngineError(
            f"{address}: an answer lacks the token {ended_by} that ended it and is to be trained; serve with "
            "a version that knows no_stop_trim."
        )
    if choice["finish_reason"] not in ("stop", "length"):
        raise EngineError(
            f"{address}: an answer ended by {printable(choice['finish_reason'])}; see what the server logs."
        )
    return Answered(tokens, [float(value) for value in values], choice["finish_reason"] == "stop")


def _first_difference(theirs: list[int], ours: list[int]) -> str:
    for place, (their, our) in enumerate(zip(theirs, ours, strict=False)):
        if their != our:
            return f"token {place} is {printable(their)} there and {our} here"
    return "one begins with the other"
