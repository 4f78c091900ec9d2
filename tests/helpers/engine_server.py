"""A server that answers prompts by HTTP as vLLM and SGLang do, with Transformers."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch


class Answerer:
    """Samples with Transformers' `generate`; `style` is "vllm", "sglang", or "sglang before", which has token
    ids in `meta_info` alone."""

    def __init__(self, folder: Path, style: str):
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.style, self.lock = style, threading.Lock()
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()

    def __call__(self, path: str, request: dict[str, Any]) -> dict[str, Any]:
        assert request["top_k"] == -1 and request["repetition_penalty"] == 1
        chat = path == "/v1/chat/completions"
        inputs = self._conversation(request["messages"]) if chat else {}
        inputs = inputs or {"input_ids": torch.tensor([request["prompt"]])}
        with self.lock, torch.inference_mode():
            torch.manual_seed(len(inputs["input_ids"][0]))
            out = self.model.generate(
                **inputs,
                do_sample=True,
                temperature=request["temperature"],
                top_p=request["top_p"],
                top_k=0,
                num_return_sequences=request["n"],
                max_new_tokens=request["max_tokens"],
                eos_token_id=request["stop_token_ids"],
                output_logits=True,
                return_dict_in_generate=True,
            )
        length = inputs["input_ids"].shape[1]
        logits = torch.stack(out.logits, dim=1)
        if self.style != "vllm":  # which gives those at temperature 1
            logits = logits / request["temperature"]
        answers = zip(out.sequences[:, length:], logits.log_softmax(-1), strict=True)
        prompt, stop = inputs["input_ids"][0].tolist(), request["stop_token_ids"]
        choices = [self._choice(*each, stop, chat) | {"index": i} for i, each in enumerate(answers)]
        found = {"usage": {"prompt_tokens": length}}
        if self.style == "vllm":
            return found | {"choices": choices, "prompt_token_ids": prompt}
        for choice in choices:
            choice["prompt_token_ids"] = [t for t in prompt if t != self.model.config.image_token_id]
        return found | {"choices": choices[::-1]}

    def _conversation(self, messages: list[dict]) -> dict[str, torch.Tensor]:
        from megatron_vlm.generation.prompt import processor_outputs

        images = []
        for part in (part for turn in messages for part in turn["content"]):
            if part["type"] == "image_url":
                head, _, data = part.pop("image_url")["url"].partition(",")
                assert head == "data:image/png;base64"
                images.append(base64.b64decode(data))
                part["type"] = "image"
        return dict(processor_outputs(self.processor, messages, images))

    def _choice(self, tokens, log_p, stop: list[int], chat: bool) -> dict[str, Any]:
        tokens = tokens.tolist()
        ends = [place for place, token in enumerate(tokens) if token in stop]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        values = [log_p[place, token].item() for place, token in enumerate(tokens)]
        choice = {"finish_reason": "stop" if ends else "length", "token_ids": tokens}
        content = [{"token": "", "logprob": value} for value in values]
        choice["logprobs"] = {"content": content} if chat else {"token_logprobs": values}
        if self.style == "sglang before" and chat:
            del choice["token_ids"]
            pairs = [[value, token, None] for value, token in zip(values, tokens, strict=True)]
            choice["meta_info"] = {"output_token_logprobs": pairs}
        return choice


@contextlib.contextmanager
def serving(answer) -> Iterator[str]:
    """The URL of a server; `answer(path, request)` returns what is sent as JSON, or (status, bytes)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            said = answer(self.path, request)
            status, body = said if isinstance(said, tuple) else (200, json.dumps(said).encode())
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if status == 302:
                self.send_header("Location", "http://127.0.0.1:9/")
            self.end_headers()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(body)

        def log_message(self, *_) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
