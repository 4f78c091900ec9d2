"""Answers from a server of vLLM or SGLang, by the OpenAI-style requests that both understand, as samples.

engine = HttpEngine("http://10.0.0.5:8000", model, answers=8, max_new_tokens=256)  # in place of OwnEngine

A run of GRPO takes `grpo.engine=examples/rl/http_rollouts.py:engine`: a server of SGLang at ENGINE_URL, which
loads each step's weights from the folder ENGINE_WEIGHTS, that it and the run see.

Token ids go both ways, nothing is tokenised again. A prompt of text goes to /v1/completions as token ids. One
with images goes to /v1/chat/completions as a conversation, as neither server takes images beside token ids
there; the server then says what it made of it, which has to be our prompt. Read in vLLM's
`entrypoints/openai/*/protocol.py` and SGLang's `srt/entrypoints/openai/protocol.py`, August 2026.
"""

import asyncio
import base64
import io
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
from safetensors.torch import save_file

from megatron_vlm.config import GRPOConfig
from megatron_vlm.data.media.images import decode_image
from megatron_vlm.generation.prompt import stop_tokens
from megatron_vlm.messages import shorten
from megatron_vlm.models.hf import Source
from megatron_vlm.models.weights.exporting import copy_side_files
from megatron_vlm.parallel import setup
from megatron_vlm.rl.policy import Scorer
from megatron_vlm.rl.rollouts import Answered, RolloutPrompt, Sample, samples_of

SHOWN = 300  # characters of a refusal that are shown
NEWER = "serve with a version that knows return_token_ids and no_stop_trim."
BYTES_PER_TOKEN = 1024  # of an answer: its id, text and log-probability take 100 to 300
# A server's defaults come from the checkpoint's generation_config.json, and would be another distribution.
ALL_TOKENS = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
# what it raises to read an answer of another form
OF_ANOTHER_FORM = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError


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
            raise ValueError(f"url is {self.url}; give one that begins with http:// or https://.")

    def __call__(self, policy: Scorer, prompts: Sequence[RolloutPrompt]) -> list[Sample]:
        """Raises EngineError on every rank."""

        def answers_or_problem() -> list[list[Answered]] | str:
            try:
                return self._ask_all(policy, prompts)
            except EngineError as error:
                return str(error)

        said = setup.on_first_rank(answers_or_problem)
        if isinstance(said, str):
            raise EngineError(said)
        return samples_of(policy, prompts, said)

    def _ask_all(self, policy: Scorer, prompts: Sequence[RolloutPrompt]) -> list[list[Answered]]:
        source, free = policy.source, asyncio.Semaphore(self.at_once)
        stop = stop_tokens(source.folder, source.description.hf_config)

        async def ask(prompt: RolloutPrompt) -> list[Answered]:
            async with free:
                address, request = await asyncio.to_thread(self._request, prompt, stop)
                per_answer = BYTES_PER_TOKEN * self.max_new_tokens + 16 * len(prompt.inputs["input_ids"])
                most_bytes = 2**16 + self.answers * per_answer
                said = await self._post(address, json.dumps(request).encode(), most_bytes)
            try:
                return self._read(json.loads(said), prompt, source)
            except OF_ANOTHER_FORM as error:
                problem = (
                    "the answer is not in the form of vLLM's or SGLang's "
                    f"({type(error).__name__}: {error}); look at it with curl."
                )
                problem = str(error) if isinstance(error, EngineError) else problem
                raise EngineError(f"{address}: {problem}") from error

        async def ask_each() -> list[list[Answered]]:
            return await asyncio.gather(*map(ask, prompts))

        with ThreadPoolExecutor(1) as thread:  # the caller's may run a loop already, as a notebook's does
            return thread.submit(asyncio.run, ask_each()).result()

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

    async def _post(self, address: str, body: bytes, most_bytes: int) -> bytes:
        for attempt in itertools.count():
            final = attempt == self.retries
            try:
                status, said = await self._attempt(address, body, most_bytes)
                if 200 <= status < 300 and len(said) <= most_bytes:
                    break
                problem = f"status {status}: {shorten(said.decode('utf-8', 'replace'), SHOWN)}"
                if status < 300:
                    problem = f"the answer has more than the {most_bytes} bytes that its tokens may take"
                final = final or (status < 500 and status != 429)
            except TimeoutError:
                problem, final = f"no whole answer in {self.timeout:g} s", True
            except (aiohttp.ClientError, OSError) as error:
                problem = str(error)
            if final:
                raise EngineError(
                    f"{address}: {problem} (try {attempt + 1} of {self.retries + 1}); "
                    "see that the server runs and what it logs."
                )
            await asyncio.sleep(self.pause * 2**attempt)
        return said

    async def _attempt(self, address: str, body: bytes, most_bytes: int) -> tuple[int, bytes]:
        """Status and body. Follows no redirect, as it would lose the request's body, and unpacks nothing."""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **self.headers}
        limit, said = aiohttp.ClientTimeout(total=self.timeout), bytearray()
        async with (
            aiohttp.ClientSession(timeout=limit, auto_decompress=False) as session,
            session.post(address, data=body, headers=headers, allow_redirects=False) as response,
        ):
            most = SHOWN if response.status >= 300 else most_bytes
            async for piece in response.content.iter_any():
                said += piece
                if len(said) > most:
                    break
            return response.status, bytes(said)

    def _read(self, said: dict[str, Any], prompt: RolloutPrompt, source: Source) -> list[Answered]:
        choices = sorted(said["choices"], key=lambda choice: choice["index"])
        _need(
            len(choices) == self.answers,
            f"{len(choices)} answers, not {self.answers}; see what the server logs.",
        )
        if prompt.images:
            theirs = said.get("prompt_token_ids") or choices[0].get("prompt_token_ids")
            _need(theirs is not None, f"the answer has no prompt_token_ids; {NEWER}")
            ours = prompt.inputs["input_ids"].tolist()
            count = (said.get("usage") or {}).get("prompt_tokens")
            # a server may name one placeholder an image, and still count all that it sees
            same_text = count == len(ours) and _text(theirs, source) == _text(ours, source)
            _need(
                theirs == ours or same_text,
                f"the server's prompt has {count or len(theirs)} tokens and ours {len(ours)}, of which the "
                f"first {len(os.path.commonprefix([theirs, ours]))} are the same; serve a folder with the "
                "policy's chat template and processor.",
            )
        answers = [_answered(choice, source.description.text.vocab_size) for choice in choices]
        most = max(len(answer.tokens) for answer in answers)
        _need(
            most <= self.max_new_tokens,
            f"an answer has {most} tokens, max_new_tokens is {self.max_new_tokens}; see that the server "
            "heeds what it is asked.",
        )
        return answers


@dataclass(frozen=True)
class ReloadingEngine(HttpEngine):
    """A server of SGLang that loads the weights from `folder` before it answers (`/update_weights_from_disk`
    in SGLang's `srt/entrypoints/http_server.py`, August 2026). vLLM has no such request."""

    folder: str = "weights"

    def __call__(self, policy: Scorer, prompts: Sequence[RolloutPrompt]) -> list[Sample]:
        """Raises EngineError on every rank."""
        weights = {}
        for name, weight in policy.hf_weights():  # adapters are merged into them
            if setup.is_first_rank():
                weights[name] = weight.cpu().contiguous()
        setup.on_first_rank(self._reload, weights, policy.source.folder)
        return super().__call__(policy, prompts)

    def _reload(self, weights: dict[str, torch.Tensor], source: Path) -> None:
        if not Path(self.folder).exists():
            Path(self.folder).mkdir(parents=True)
            copy_side_files(source, Path(self.folder))
        save_file(weights, Path(self.folder, "model.safetensors"), {"format": "pt"})
        address = f"{self.url.rstrip('/')}/update_weights_from_disk"
        body = json.dumps({"model_path": os.path.abspath(self.folder)}).encode()
        said = json.loads(asyncio.run(self._post(address, body, 2**16)))
        _need(said.get("success"), f"{address}: {said.get('message')}; see what the server logs.")


def engine(grpo: GRPOConfig) -> ReloadingEngine:
    """The engine of a run with `grpo.engine`."""
    return ReloadingEngine(
        url=os.environ["ENGINE_URL"],
        model=os.environ.get("ENGINE_MODEL", "default"),
        answers=grpo.num_generations,
        max_new_tokens=grpo.max_completion_length,
        temperature=grpo.temperature,
        top_p=grpo.top_p,
        folder=os.environ["ENGINE_WEIGHTS"],
    )


def _need(holds: bool, problem: str) -> None:
    """Raises EngineError that says the problem, unless this holds."""
    if not holds:
        raise EngineError(problem)


def _text(tokens: list[int], source: Source) -> list[int]:
    """Without placeholders, and what a server may put in their place."""
    size = source.description.text.vocab_size
    ids = torch.tensor([token for token in tokens if 0 <= token < size], dtype=torch.long)
    return ids[torch.as_tensor(source.description.visual_kinds(ids)) == 0].tolist()


def _with_images(prompt: RolloutPrompt) -> list[dict]:
    """The conversation with its images as PNG, so that the server sees the pixels that we see."""
    images = iter(prompt.images)

    def sent(part: dict) -> dict:
        kind = part["type"]
        _need(kind in ("text", "image"), f"a prompt has a {kind}; servers are given text and images.")
        if kind == "text":
            return part
        png = io.BytesIO()
        decode_image(next(images)).save(png, "PNG", compress_level=1)
        data = base64.b64encode(png.getvalue()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    return [turn | {"content": [sent(part) for part in turn["content"]]} for turn in prompt.messages]


def _answered(choice: dict[str, Any], vocabulary: int) -> Answered:
    """From vLLM's and SGLang's `token_ids` and `logprobs`, or SGLang's `meta_info`."""
    logprobs = choice.get("logprobs") or {}
    tokens, values = choice.get("token_ids"), logprobs.get("token_logprobs")
    if values is None:
        values = [each["logprob"] for each in logprobs.get("content") or []]
    meta = (choice.get("meta_info") or {}).get("output_token_logprobs")
    if tokens is None and meta is not None:
        tokens = [token for _, token, *_ in meta]
        values = [value for value, *_ in meta]
    _need(tokens is not None, f"the answer has no token_ids, and its text is not tokenised again; {NEWER}")
    _need(
        len(values) == len(tokens) and all(map(math.isfinite, values)),
        f"{len(values)} log-probabilities for {len(tokens)} tokens, or one is no number; let the server "
        "return log-probabilities.",
    )
    wrong = [token for token in tokens if not (isinstance(token, int) and 0 <= token < vocabulary)]
    shown = wrong[0] if wrong else ""
    _need(not wrong, f"token {shown} is none of the model's {vocabulary}; serve the policy's model.")
    reason = choice["finish_reason"]
    ended_by = choice.get("matched_stop", choice.get("stop_reason"))
    trimmed = isinstance(ended_by, int) and tokens[-1:] != [ended_by]  # SGLang before no_stop_trim
    _need(not trimmed, f"an answer lacks the token {ended_by} that ended it and is to be trained; {NEWER}")
    _need(reason in ("stop", "length"), f"an answer ended by {reason}; see what the server logs.")
    return Answered(tokens, [float(value) for value in values], reason == "stop")
