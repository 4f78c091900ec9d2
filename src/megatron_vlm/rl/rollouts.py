"""Answers to prompts as samples for a policy: what an engine is, and the one that is the policy itself.

engine = OwnEngine(answers=8, max_new_tokens=256)
samples = engine(policy, prompts)  # the same on every rank, in the order of the prompts
mine = own_share(samples)  # of this data-parallel rank, for `policy.logprobs` and `forward_backward`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from megatron.core import parallel_state

from megatron_vlm.batch import Prompt
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.data.chatml.record import parse_turns
from megatron_vlm.data.chatml.sample import place_media
from megatron_vlm.data.media.files import image_file
from megatron_vlm.generation.generate import generate
from megatron_vlm.generation.prompt import encode_prompt, stop_tokens
from megatron_vlm.models.hf import Source
from megatron_vlm.rl.containers import TensorBatch
from megatron_vlm.rl.memory import MODEL
from megatron_vlm.rl.policy import Scorer

Sample = dict[str, Any]


@dataclass(frozen=True)
class RolloutPrompt:
    """A conversation that ends with the user's turn: as HF messages and image files, and as the model sees
    it. Engines that are the policy itself need `inputs` alone."""

    messages: list[dict]
    images: list[bytes]
    inputs: Prompt

    @classmethod
    def of(cls, source: Source, messages: list[dict] | str, images: Sequence[Any] = ()) -> RolloutPrompt:
        """Encoded by the checkpoint's processor; a text is the user's only turn, an image what `image_file`
        takes. `chatml` says what messages may look like, and raises BadSample for others, and for more
        or fewer images than places for them."""
        turns = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        messages, files = place_media(parse_turns(turns), len(images)), [*map(image_file, images)]
        if messages[-1]["role"] == "assistant":
            raise BadSample("bad_conversation", "the last turn is a reply; a prompt ends with the user's")
        return cls(messages, files, encode_prompt(source.processor, messages, files, source.needs))


class Rollout(Protocol):
    """An engine. Every rank calls it with the same prompts and gets all samples, in the order of the prompts;
    the answers to a prompt follow each other. A sample is what `Policy` takes, with these fields:

    input_ids, loss_mask  (T,) the prompt and the answer; the mask is True for the answer's tokens
    rollout_log_probs     (n,) fp32, the engine's for each token of the answer, at the temperature of sampling
    prompt                the number of the prompt
    ended                 whether the model ended the answer; False if it was cut

    and the prompt's visual fields.
    """

    def __call__(self, policy: Scorer, prompts: Sequence[RolloutPrompt]) -> list[Sample]: ...


class Answered(NamedTuple):
    """The tokens of an engine's answer, with the stop token if that ended it."""

    tokens: list[int]
    log_probs: list[float]
    ended: bool


@dataclass
class OwnEngine:
    """The policy answers itself, in its layout, with a key/value cache beside its weights.

    Losses that compare `rollout_log_probs` with the policy's take top_p 1: the policy scores tokens among
    all. Each call takes the next seed, so an engine made again repeats its answers.
    """

    answers: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    cache_bytes: int = 2**32

    def __call__(self, policy: Scorer, prompts: Sequence[RolloutPrompt]) -> list[Sample]:
        policy.need("OwnEngine", MODEL)
        samples = own_answers(
            policy,
            prompts,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            answers=self.answers,
            seed=self.seed,
            stop=stop_tokens(policy.source.folder, policy.source.description.hf_config),
            cache_bytes=self.cache_bytes,
        )
        self.seed += 1
        return samples


def own_answers(policy: Scorer, prompts: Sequence[RolloutPrompt], **settings: Any) -> list[Sample]:
    """The answers of the policy itself as samples; `generate` takes the `settings`."""
    generated = generate(policy.chunks, [prompt.inputs for prompt in prompts], **settings)
    answered = [
        [Answered(answer.tokens, answer.logprobs, answer.finish_reason == "stop") for answer in of_prompt]
        for of_prompt in generated
    ]
    return samples_of(policy, prompts, answered)


def samples_of(
    policy: Scorer, prompts: Sequence[RolloutPrompt], answered: Sequence[Sequence[Answered]]
) -> list[Sample]:
    """The answers as samples.

    An answer is cut before the first placeholder of an image that it holds: there is no image for it. Without
    any token left, none of the sample is trained.
    """
    kinds = policy.source.description.visual_kinds
    samples = []
    for number, (prompt, answers) in enumerate(zip(prompts, answered, strict=True)):
        prompt_ids = prompt.inputs["input_ids"]
        visual = prompt.inputs["visual_inputs"]
        for tokens, log_probs, ended in answers:
            answer = torch.tensor(tokens, dtype=torch.long)
            # an image token in an answer has no image: the answer ends before it
            placeholders = (torch.as_tensor(kinds(answer)) != 0).nonzero()
            length = int(placeholders[0]) if len(placeholders) else len(answer)
            ids = torch.cat([prompt_ids, answer[:length]])
            samples.append(
                {
                    "input_ids": ids,
                    "loss_mask": torch.arange(len(ids)) >= len(prompt_ids),
                    "rollout_log_probs": torch.tensor(log_probs[:length], dtype=torch.float32),
                    "prompt": number,
                    "ended": ended and length == len(answer),
                    **(visual.as_model_kwargs() if visual is not None else {}),
                }
            )
    return samples


def reply(policy: Scorer, sample: Sample) -> str:
    """The text of the answer, without special tokens."""
    tokens = sample["input_ids"][sample["loss_mask"]]
    return policy.source.processor.tokenizer.decode(tokens, skip_special_tokens=True)


def own_share(samples: Sequence[Sample] | TensorBatch) -> list[Sample]:
    """The samples of this data-parallel rank: each goes to one, and their numbers differ by at most one."""
    samples = samples.samples() if isinstance(samples, TensorBatch) else samples
    rank = parallel_state.get_data_parallel_rank()
    return [*samples[rank :: parallel_state.get_data_parallel_world_size()]]
