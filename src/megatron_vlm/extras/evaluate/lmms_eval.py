"""The model class of lmms-eval, which finds it by this package's entry point: `--model megatron_vlm`."""

import json
import re
from collections.abc import Mapping
from itertools import groupby
from operator import index, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest
from loguru import logger
from tqdm import tqdm

from megatron_vlm.batch import Prompt
from megatron_vlm.commands import arguments
from megatron_vlm.commands.runs import open_run
from megatron_vlm.config import ConfigError
from megatron_vlm.data.accounts.bad_sample import BadSample
from megatron_vlm.data.chatml.record import load_media, parse_record
from megatron_vlm.data.chatml.sample import make_sample
from megatron_vlm.data.encode.questions import QuestionEncoder
from megatron_vlm.data.generation_prompt import stop_tokens
from megatron_vlm.data.media.files import image_file
from megatron_vlm.data.media.images import DECODE_ERRORS
from megatron_vlm.data.on_disk.named import is_base64
from megatron_vlm.extras.evaluate.questions import of_any_length
from megatron_vlm.files import calling
from megatron_vlm.generation.generate import check_settings, generate, reply_text
from megatron_vlm.messages import check_number, printable
from megatron_vlm.parallel import setup

AT_ONCE = 32  # documents of a rank; `generate` takes as many of them at a time as its caches have room for
MOST_TOKENS = 1024  # of an answer to a task that does not say
NO_END = ["\n\n"]  # what lmms-eval writes for a task without `until`; it would cut answers that think
HEEDED = ("max_new_tokens", "max_gen_toks", "temperature", "top_p", "do_sample", "seed", "until", "num_beams")
REPLY = {"role": "assistant", "content": "-"}  # questions are encoded up to a reply


def manifest() -> ModelManifest:
    """Returns what the entry point tells lmms-eval."""
    return ModelManifest("megatron_vlm", chat_class_path=f"{__name__}.MegatronVLM")


class Way(NamedTuple):
    """How the documents of a task are answered: `generate`'s settings, the texts that end an answer, and the
    names of settings that have no effect."""

    settings: dict[str, Any]
    until: list[str]
    idle: list[str]


class MegatronVLM(lmms):
    """A run folder or a Hugging Face checkpoint that answers tasks; `evaluate` takes the same settings.

    lmms-eval gives each process of torchrun a share of the documents. All of them answer together, in the
    layout of the settings. Raises ConfigError for what cannot run.
    """

    is_simple = False

    def __init__(self, pretrained: str, batch_size: int | str | None = AT_ONCE, **settings: Any) -> None:
        super().__init__()
        self._at_once = _documents_at_once(batch_size, settings.pop("max_batch_size", None))
        own = {name: value for name, value in settings.items() if name != "device"}
        config = arguments.config_of_model(pretrained, settings=[f"{name}={own[name]}" for name in own])
        arguments.prepare_cuda(config.parallel)
        if dist.is_initialized():  # Accelerate has, without what layouts need
            dist.destroy_process_group()
        self._chunks, self._source = open_run(config, raw_pixels=True)
        data = of_any_length(config.data)
        self._encoder = QuestionEncoder(self._source.processor, data, self._source.needs)
        self._ways: dict[str, Way] = {}  # by generation_kwargs in JSON
        self.device = setup.device()  # lmms-eval counts there

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """The answers, in order. Raises ValueError, on every rank: before the first answer for settings of a
        task that cannot be heeded, and for a document that cannot be asked."""
        given = {json.dumps(request.args[2]): request.args[4] for request in requests}
        for how, task in [pair for of_rank in setup.from_all_ranks(given) for pair in of_rank.items()]:
            if how not in self._ways:
                self._ways[how] = way = _way(task, json.loads(how) or {})
                if way.idle and setup.is_first_rank():
                    logger.warning(f"{task}: no effect have {', '.join(way.idle)} of its generation_kwargs")
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
        _, messages_of, given, number, task, split = request.args
        how = json.dumps(given)
        place = f"lmms-eval: {task}, document {number}"
        try:
            with calling(f"{place}, in the code of the task", Path()):
                turns = messages_of(self.task_dict[task][split][number])
            return how, self._prompt(turns, self._ways[how].settings["max_new_tokens"])
        except ConfigError as error:
            return str(error), None
        except (BadSample, *DECODE_ERRORS) as error:
            return f"{place}: {printable(error)}", None

    def _prompt(self, turns: Any, most_tokens: int) -> Prompt:
        if not isinstance(turns, list) or not turns:
            raise ValueError(f"its messages are {printable(repr(turns))}, not a list of some")
        conversation = parse_record([*map(_with_files, turns), REPLY])
        images, videos = load_media(conversation, Path())
        sample = make_sample(conversation, images, videos, __key__="", __restore_key__=())
        prompt = self._encoder.question(sample).prompt
        length = int(prompt["position_ids"].max()) + 1
        known = self._source.description.architecture.get("most_positions")
        if known is not None and length + most_tokens - 1 > known:
            raise ValueError(
                f"{length} positions of the question and {most_tokens} tokens of the answer are more than "
                f"the {known} that the model knows; give --gen_kwargs max_new_tokens=N for fewer tokens"
            )
        return prompt

    def _answers(self, how: str, prompts: dict[int, Prompt | None]) -> dict[int, str]:
        if None in prompts.values():
            raise ValueError(how)
        way = self._ways[how]
        source = self._source
        stop = stop_tokens(source.folder, source.description.hf_config)
        asked = list(prompts.values())
        replies = generate(self._chunks, asked, numbers=list(prompts), stop=stop, **way.settings)
        spoken = self._encoder.boxes.tokens
        texts = [reply_text(source.processor, reply.reply, spoken, way.until) for [reply] in replies]
        return dict(zip(prompts, texts, strict=True))


def _documents_at_once(batch_size: int | str | None, most: int | None) -> int:
    """The number of --batch_size; AT_ONCE for `auto` and `auto:4`, as more would not be quicker."""
    if batch_size is None or re.fullmatch(r"auto(:\d+)?", str(batch_size)):
        return min(AT_ONCE, most or AT_ONCE)
    if not re.fullmatch(r"[1-9]\d*", str(batch_size)):
        raise ConfigError(
            f"--batch_size: {printable(batch_size)} is no number of documents; give 32, or auto."
        )
    return int(batch_size)


def _way(task: str, given: Mapping[str, Any]) -> Way:
    """How a task's `generation_kwargs` are heeded.

    They mean what Transformers takes them for: an answer is greedy without temperature, if `do_sample` is
    false, and if `top_p` is 0. Raises ValueError for what cannot be.
    """
    given = {name: value for name, value in given.items() if value is not None}
    most = given.get("max_new_tokens", given.get("max_gen_toks", MOST_TOKENS))
    temperature = given.get("temperature", 0.0)
    top_p = given.get("top_p", 1.0)
    until = given.get("until", [])
    until = [until] if isinstance(until, str) else until
    idle = [name for name in given if name not in HEEDED]
    if not given.get("do_sample", True):
        idle += ["temperature"] if temperature else []
        temperature = 0.0
    elif "do_sample" in given and not temperature:
        idle += ["do_sample"]
    if top_p == 0:
        temperature = 0.0
        top_p = 1.0
    try:
        check_number("num_beams", given.get("num_beams", 1), lambda n: n == 1, "1, as answers have no beams")
        check_number("seed", given.get("seed", 0), lambda n: index(n) >= 0, "a whole number, 0 or more")
        check_settings(most, temperature, top_p)
        if not isinstance(until, list) or not all(isinstance(end, str) for end in until):
            raise ValueError(f"until is {printable(repr(until))}; give a text or a list of texts.")
    except ValueError as error:
        raise ValueError(f"lmms-eval: {task}: {error}") from error
    settings = {"max_new_tokens": most, "temperature": temperature, "top_p": top_p}
    ends = [] if until == NO_END else [end for end in until if end]
    return Way(settings | {"seed": given.get("seed", 0)}, ends, idle)


def _with_files(turn: Any) -> Any:
    """The message with the bytes of its images and videos; `read_record` judges the rest."""
    content = turn.get("content") if isinstance(turn, dict) else None
    if not isinstance(content, list):
        return turn
    return turn | {"content": [part | _file(part) if isinstance(part, dict) else part for part in content]}


def _file(part: dict[str, Any]) -> dict[str, Any]:
    medium = part.get("url")
    if part.get("type") not in ("image", "video"):
        return {}
    if isinstance(medium, str) and (medium.startswith("data:") or is_base64(medium)):
        return {}
    return {"url": image_file(medium)}  # of videos, too
