"""The model class of lmms-eval, which finds it by this package's entry point: `--model megatron_vlm`."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest
from tqdm import tqdm

from megatron_vlm.batch import Prompt
from megatron_vlm.commands import arguments
from megatron_vlm.commands.runs import open_run
from megatron_vlm.data.chatml.record import load_media, parse_record
from megatron_vlm.data.chatml.sample import make_sample
from megatron_vlm.data.encode.questions import QuestionEncoder
from megatron_vlm.data.media.files import image_file
from megatron_vlm.extras.evaluate.answering import AT_ONCE, of_any_length
from megatron_vlm.generation.generate import generate, reply_text
from megatron_vlm.generation.prompt import stop_tokens
from megatron_vlm.parallel import setup

MOST_TOKENS = 1024  # of an answer to a task that does not say
NO_END = ["\n\n"]  # what lmms-eval writes for a task without `until`; it would cut answers that think
HEEDED = ("max_new_tokens", "max_gen_toks", "temperature", "top_p", "do_sample", "seed", "until", "num_beams")
REPLY = {"role": "assistant", "content": "-"}  # questions are encoded up to a reply


def manifest() -> ModelManifest:
    """Return what the entry point tells lmms-eval."""
    return ModelManifest("megatron_vlm", chat_class_path=f"{__name__}.MegatronVLM")


class MegatronVLM(lmms):
    """A run folder or a Hugging Face checkpoint that answers tasks; `evaluate` takes the same settings.

    lmms-eval gives each process of torchrun a share of the documents. All of them answer together, in the
    layout of the settings. Raises ConfigError for what cannot run.
    """

    is_simple = False

    def __init__(self, pretrained: str, batch_size: int | str = AT_ONCE, **settings: Any) -> None:
        super().__init__()
        self._at_once = AT_ONCE if batch_size == "auto" else int(batch_size)
        words = [f"{name}={settings[name]}" for name in settings if name not in ("device", "max_batch_size")]
        config = arguments.config_of_model(pretrained, settings=words)
        arguments.prepare_cuda(config.parallel)
        if dist.is_initialized():  # Accelerate has, without what layouts need
            dist.destroy_process_group()
        self._chunks, self._source = open_run(config, raw_pixels=True)
        data = of_any_length(config.data)
        self._encoder = QuestionEncoder(self._source.processor, data, self._source.needs)
        self.device = setup.device()  # lmms-eval counts there

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The answers, in order. Raises ValueError, on every rank, for settings of a task that cannot be
        heeded, and for a document that cannot be asked."""
        ranks = dist.get_world_size()
        most_requests = max(setup.from_all_ranks(len(requests)))
        texts: dict[int, str] = {}
        for first in tqdm(range(0, most_requests, self._at_once), disable=not setup.is_first_rank()):
            prompts_here = [
                self._read_request(request) for request in requests[first : first + self._at_once]
            ]
            prompts: dict[str, dict[int, Prompt]] = {}  # by generation_kwargs as JSON, then by number
            for rank, share in enumerate(setup.from_all_ranks(prompts_here)):
                for n, (sampling, prompt) in enumerate(share, start=first):
                    if prompt is None:
                        raise ValueError(sampling)
                    prompts.setdefault(sampling, {})[n * ranks + rank] = prompt
            for sampling, of_task in sorted(prompts.items()):
                texts |= self._answers(json.loads(sampling), of_task)
        return [texts[n * ranks + dist.get_rank()] for n in range(len(requests))]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError("megatron_vlm generates; lmms-eval has no likelihoods for chat models.")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise NotImplementedError("megatron_vlm answers one round; choose another task.")

    def _read_request(self, request: Instance) -> tuple[str, Prompt | None]:
        """How a document is to be answered, as JSON, and its prompt; or why it has none, for all ranks."""
        _, messages_of, kwargs, number, task, split = request.args
        try:
            turns = [_with_files(turn) for turn in messages_of(self.task_dict[task][split][number])]
            conversation = parse_record([*turns, REPLY])
            images, videos = load_media(conversation, Path())
            sample = make_sample(conversation, images, videos, __key__="", __restore_key__=())
            return json.dumps(kwargs), self._encoder.question(sample).prompt
        except Exception as error:  # noqa: BLE001 - another rank would wait for this one
            return f"lmms-eval: {task}, document {number}: {error}", None

    def _answers(self, kwargs: dict[str, Any], prompts: dict[int, Prompt]) -> dict[int, str]:
        settings, until = generation_settings(kwargs)
        stop = stop_tokens(self._source.folder, self._source.description.hf_config)
        replies = generate(self._chunks, list(prompts.values()), numbers=list(prompts), stop=stop, **settings)
        tags = self._encoder.boxes.tokens
        texts = [reply_text(self._source.processor, reply.reply, tags, until) for [reply] in replies]
        return dict(zip(prompts, texts, strict=True))


def generation_settings(kwargs: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`generate`'s settings, and the texts that end an answer, by a task's `generation_kwargs`.

    They mean what Transformers takes them for: an answer is greedy without temperature, if `do_sample` is
    false, and if `top_p` is 0. Raises ValueError for beams.
    """
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    if kwargs.get("num_beams", 1) != 1:
        raise ValueError("lmms-eval: num_beams: answers have no beams; give --gen_kwargs num_beams=1.")
    if unused := [name for name in kwargs if name not in HEEDED]:
        warnings.warn(f"generation_kwargs without effect: {', '.join(unused)}", stacklevel=2)
    settings = {"max_new_tokens": kwargs.get("max_new_tokens", kwargs.get("max_gen_toks", MOST_TOKENS))}
    top_p = kwargs.get("top_p", 1.0)
    if kwargs.get("do_sample", True) and top_p:
        settings |= {"temperature": kwargs.get("temperature", 0.0), "top_p": top_p}
        settings |= {"seed": kwargs.get("seed", 0)}
    until = kwargs.get("until", NO_END)
    until = [until] if isinstance(until, str) else until
    return settings, [] if until == NO_END else [end for end in until if end]


def _with_files(turn: dict[str, Any]) -> dict[str, Any]:
    """The message with the bytes of its images and videos."""
    if not isinstance(turn["content"], list):
        return turn
    parts = []
    for part in turn["content"]:
        is_medium = part["type"] in ("image", "video") and not str(part["url"]).startswith("data:")
        parts.append(part | {"url": image_file(part["url"])} if is_medium else part)
    return turn | {"content": parts}
