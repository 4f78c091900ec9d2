"""The model class of lmms-eval, which finds it by this package's entry point: `--model megatron_vlm`."""

import json
from itertools import groupby
from operator import itemgetter
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
from megatron_vlm.data.conversation.chatml import BadSample, clean_sample
from megatron_vlm.data.encode.questions import QuestionEncoder
from megatron_vlm.data.generation_prompt import reply_text, stop_tokens
from megatron_vlm.data.media.files import image_file
from megatron_vlm.data.records.normalise import read_record
from megatron_vlm.evaluation.questions import of_any_length
from megatron_vlm.generation.generate import generate
from megatron_vlm.parallel import setup

MOST_TOKENS = 1024  # of an answer to a task that does not say
REPLY = {"role": "assistant", "content": "-"}  # questions are encoded up to a reply


def manifest() -> ModelManifest:
    """Returns what the entry point tells lmms-eval."""
    return ModelManifest("megatron_vlm", chat_class_path=f"{__name__}.MegatronVLM")


class MegatronVLM(lmms):
    """A run folder or a Hugging Face checkpoint that answers tasks; `evaluate` takes the same settings.

    lmms-eval gives each process of torchrun a share of the documents. All of them answer together, in the
    layout of the settings. Raises ConfigError for what cannot run.
    """

    is_simple = False

    def __init__(self, pretrained: str, batch_size: int | str = 32, **settings: Any) -> None:
        super().__init__()
        own = {name: value for name, value in settings.items() if name not in ("device", "max_batch_size")}
        config = arguments.config_of_model(pretrained, settings=[f"{name}={own[name]}" for name in own])
        arguments.prepare_cuda(config.parallel)
        if dist.is_initialized():  # Accelerate has, without what layouts need
            dist.destroy_process_group()
        self._chunks, self._source = open_run(config, raw_pixels=True)
        data = of_any_length(config.data)
        self._encoder = QuestionEncoder(self._source.processor, data, self._source.needs)
        self._at_once = int(batch_size)
        self.device = setup.device()  # lmms-eval counts there

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The answers, in order. Raises ValueError, on every rank, for a document that cannot be asked."""
        texts: dict[int, str] = {}
        ranks = dist.get_world_size()
        most = max(setup.from_all_ranks(len(requests)))
        for first in tqdm(range(0, most, self._at_once), disable=not setup.is_first_rank()):
            shares = setup.from_all_ranks(list(map(self._asked, requests[first : first + self._at_once])))
            asked = [
                (how, (first + n) * ranks + rank, prompt)
                for rank, share in enumerate(shares)
                for n, (how, prompt) in enumerate(share)
            ]
            for how, some in groupby(sorted(asked, key=itemgetter(0, 1)), itemgetter(0)):
                texts |= self._answers(how, {number: prompt for _, number, prompt in some})
        return [texts[n * ranks + dist.get_rank()] for n in range(len(requests))]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise NotImplementedError("megatron_vlm generates; lmms-eval has no likelihoods for chat models.")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise NotImplementedError("megatron_vlm answers one round; choose another task.")

    def _asked(self, request: Instance) -> tuple[str, Prompt | None]:
        """How a prompt is to be answered, as JSON, and the prompt; or why there is none."""
        _, messages_of, how, number, task, split = request.args
        try:
            turns = messages_of(self.task_dict[task][split][number])
            for part in [part for turn in turns for part in turn["content"] if part["type"] != "text"]:
                part["url"] = image_file(part["url"])  # of videos, too
            record = {"messages": [*turns, REPLY]}
            sample = clean_sample(*read_record(record, Path()), __key__="", __restore_key__=())
            return json.dumps(how), self._encoder.question(sample).prompt
        except (BadSample, ValueError, OSError) as error:
            return f"lmms-eval: {task}, document {number}: {error}", None

    def _answers(self, how: str, prompts: dict[int, Prompt | None]) -> dict[int, str]:
        if None in prompts.values():
            raise ValueError(how)
        task = json.loads(how)
        if task.get("num_beams") not in (None, 1):
            raise ValueError(f"lmms-eval: num_beams={task['num_beams']}; answers have no beams, give 1.")
        drawn = {"temperature": task.get("temperature") or 0.0, "top_p": task.get("top_p") or 1.0}
        drawn = drawn if task.get("do_sample", True) else {}
        most = task.get("max_new_tokens", MOST_TOKENS)
        source = self._source
        stop = stop_tokens(source.folder, source.description.hf_config)
        asked = list(prompts.values())
        replies = generate(self._chunks, asked, most, numbers=list(prompts), stop=stop, **drawn)
        until = task.get("until") or []
        spoken = self._encoder.boxes.tokens
        texts = [reply_text(source.processor, reply.reply, spoken) for [reply] in replies]
        for end in filter(None, [until] if isinstance(until, str) else until):
            texts = [text.partition(end)[0].strip() for text in texts]
        return dict(zip(prompts, texts, strict=True))
