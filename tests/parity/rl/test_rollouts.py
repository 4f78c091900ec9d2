"""Samples of engines are what the policy scores: its own answers, and those of a server over HTTP."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import resource
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import policy_in_ranks
import pytest
import torch
from engine_server import Answerer, serving

from examples.rl.http_rollouts import EngineError, HttpEngine
from megatron_vlm.config import ParallelConfig
from megatron_vlm.data.accounts.drops import BadSample
from megatron_vlm.models.hf import open_source
from megatron_vlm.rl.rollouts import RolloutPrompt
from tiny.checkpoints import build_tiny_checkpoint
from tiny.distributed import run_distributed

# ---- servers that never come to an end

OK, CHUNKED = b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
TRICKS = {  # what is sent first, and then again and again
    "silence": (b"", b""),
    "bytes of a status": (b"HTTP/1.1 ", b"2"),
    "bytes of a header": (OK + b"X: ", b"y"),
    "header lines": (OK, b"X: y\r\n"),
    "100 Continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "103 with headers": (b"", b"HTTP/1.1 103 Early Hints\r\n" + b"X: y\r\n" * 50 + b"\r\n"),
    "bytes of a body": (OK + b"Content-Length: 1000000000000\r\n\r\n", b"["),
    "a body of no length": (OK + b"\r\n", b"[],"),
    "bytes of a chunk's size": (CHUNKED, b"0"),
    "bytes of a chunk's extension": (CHUNKED + b"1;", b"x"),
    "chunks": (CHUNKED, b"1\r\n[\r\n"),
    "trailers": (CHUNKED + b"2\r\n{}\r\n0\r\n", b"X: y\r\n"),
    "the body of an error": (b"HTTP/1.1 500 No\r\nContent-Length: 1000000000000\r\n\r\n", b"x"),
    "the body of a redirect": (b"HTTP/1.1 302 No\r\nLocation: /\r\nContent-Length: 100000\r\n\r\n", b"x"),
}


@contextlib.contextmanager
def hostile(trick: str, pause: float, at_once: int) -> Iterator[str]:
    """The URL of a server that never comes to an end: it sends `at_once` repetitions, and waits `pause`."""

    def send(connection: socket.socket) -> None:
        first, again = TRICKS[trick]
        with contextlib.suppress(OSError), connection:
            connection.recv(1 << 16)
            connection.sendall(first)
            for _ in itertools.count():
                connection.sendall(again * at_once)
                time.sleep(pause)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=send, args=server.accept()[:1], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


# ---- in the ranks


TEMPERATURE, ANSWERS, NEW_TOKENS, STEPS = 0.8, 4, 6, 30
LEARNS = "gemma3"  # the loop knows no family


def measure(asked: dict[str, tuple[str, dict[str, str]]], dead: str) -> dict[str, Any]:
    """By family, what two processes find; with the URLs of servers by style, and one without a server."""
    return {family: _family(path, urls, dead, family == LEARNS) for family, (path, urls) in asked.items()}


def _family(path: str, urls: dict[str, str], dead: str, learns: bool) -> dict[str, Any]:
    from examples.rl.http_rollouts import EngineError, HttpEngine
    from megatron_vlm.rl.rollouts import OwnEngine

    policy = policy_in_ranks.policy_of(path, ParallelConfig(tp=2), 300)
    prompts = policy_in_ranks.prompts_of(policy.source)
    engine = OwnEngine(ANSWERS, NEW_TOKENS, TEMPERATURE)
    found = {"own": looked_at(policy, engine(policy, prompts), TEMPERATURE)}
    found["again"] = looked_at(policy, engine(policy, prompts), TEMPERATURE)
    for style, url in urls.items():
        engine = HttpEngine(url, "tiny", ANSWERS, NEW_TOKENS, TEMPERATURE)
        found[style] = looked_at(policy, engine(policy, prompts), 1.0 if style == "vllm" else TEMPERATURE)
    try:
        HttpEngine(dead, "tiny", ANSWERS, NEW_TOKENS, retries=1, pause=0.01)(policy, prompts)
    except EngineError as error:
        found["dead"] = str(error)
    found["cut"] = cut(policy, prompts)
    found |= {"loop": learnt(policy, prompts[1])} if learns else {}
    policy = policy_in_ranks.policy_of(path, ParallelConfig(), 300)  # two ranks of data parallelism
    found["shares"] = shares(policy, prompts)
    return found


def looked_at(policy, samples: list[dict], temperature: float) -> dict[str, Any]:
    """The answers, and how far the engine's log-probabilities are from the policy's."""
    from megatron_vlm.rl.rollouts import own_share

    differences = policy.compare(
        own_share(samples), [one["rollout_log_probs"] for one in own_share(samples)], temperature
    )
    return {
        "answers": [one["input_ids"][one["loss_mask"]].tolist() for one in samples],
        "prompts": [one["prompt"] for one in samples],
        "ended": [one["ended"] for one in samples],
        "images": [len(one.get("pixel_values", ())) for one in samples],
        "differences": {name: dataclasses.asdict(each) for name, each in differences.items()},
    }


def cut(policy, prompts: list) -> list[tuple]:
    """Answers that hold a placeholder, as samples: their tokens, log-probabilities and end."""
    from megatron_vlm.rl.rollouts import Answered, samples_of

    ids = prompts[1].inputs["input_ids"]
    kinds = torch.as_tensor(policy.source.description.visual_kinds(ids))
    placeholder = ids[kinds != 0][0].item()
    answered = [
        Answered([5, 6, placeholder, 7], [-1.0, -2.0, -3.0, -4.0], True),
        Answered([placeholder], [-1.0], True),
    ]
    samples = samples_of(policy, prompts[1:2], [answered])
    policy.logprobs(samples)
    return [
        (one["input_ids"][one["loss_mask"]].tolist(), one["rollout_log_probs"].tolist(), one["ended"])
        for one in samples
    ]


def learnt(policy, prompt) -> dict[str, Any]:
    """GRPO where the lower half of all tokens is rewarded: the rewards of the steps, and the ratios."""
    from megatron_vlm.rl import losses
    from megatron_vlm.rl.rollouts import OwnEngine, own_share

    half = policy.source.description.text.vocab_size // 2
    engine, rewards_of, ratios = OwnEngine(32, 1), [], []

    def grpo(log_probs, _, fields):
        return losses.ppo_clip(log_probs, fields["old"], fields["advantage"])

    for _ in range(STEPS):
        samples = engine(policy, [prompt])
        rewards = [float(one["input_ids"][-1] < half) for one in samples]
        rewards_of.append(sum(rewards) / len(rewards))
        advantages = losses.grpo_advantages(rewards, [one["prompt"] for one in samples])
        own = own_share([one | {"advantage": a} for one, a in zip(samples, advantages, strict=True)])
        old = policy.logprobs(own).log_probs
        own = [one | {"old": each} for one, each in zip(own, old, strict=True)]
        logs = policy.forward_backward(own, grpo, len(samples), fields=["old", "advantage"])
        ratios.append(logs["ratio"])
        policy.step()
    return {"rewards": rewards_of, "ratios": ratios}


def shares(policy, prompts: list) -> dict[str, Any]:
    """Which of five samples this rank has, and what the policy answers as two data-parallel ranks."""
    from megatron_vlm.rl.rollouts import OwnEngine, own_share

    samples = OwnEngine(ANSWERS, NEW_TOKENS, TEMPERATURE)(policy, prompts)
    return {
        "own": [one["number"] for one in own_share([{"number": number} for number in range(5)])],
        "answers": looked_at(policy, samples, TEMPERATURE)["answers"],
    }


# ---- the tests


FAMILIES = ("gemma3", "qwen3_vl")
STYLES = ("vllm", "sglang", "sglang before")


@contextlib.contextmanager
def refusing():
    """An address that refuses every connection: its port is held here, and nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """By rank and family; one launch of two processes, and servers in this one."""
    asked = {}
    with contextlib.ExitStack() as servers:
        for family in FAMILIES:
            text = {} if family == "gemma3" else {"initializer_range": 0.2}
            folder = tmp_path_factory.mktemp(family) / "checkpoint"
            path = str(build_tiny_checkpoint(family, folder, text=text))
            urls = {style: servers.enter_context(serving(Answerer(path, style))) for style in STYLES}
            asked[family] = path, urls
        dead = servers.enter_context(refusing())
        return run_distributed(2, measure, asked, dead, timeout=900)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ("own", *STYLES))
def test_an_engines_log_probabilities_are_those_of_the_policy(measured, family, engine):
    first, second = (rank[family][engine] for rank in measured)
    assert first == second
    assert first["prompts"] == [0] * 4 + [1] * 4 + [2] * 4 and len(set(map(tuple, first["answers"]))) > 6
    assert sum(first["images"][:4]) == 0 and min(first["images"][4:]) > 0
    for difference in first["differences"].values():
        assert difference["tokens"] > 0 and difference["max"] < 2e-5


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_each_call_draws_anew_and_layouts_draw_alike(measured, family):
    found = measured[0][family]
    assert found["own"]["answers"] != found["again"]["answers"]
    same = [a == b for a, b in zip(found["own"]["answers"], found["shares"]["answers"], strict=True)]
    assert sum(same) >= len(same) - 1  # a draw may lie within rounding of the bound between two tokens


@pytest.mark.long
def test_a_loop_learns_and_its_ratios_are_one(measured):
    for rank in measured:
        loop = rank[LEARNS]["loop"]
        assert loop["ratios"] == [1.0] * STEPS
        assert loop["rewards"][0] < 0.8 and min(loop["rewards"][-3:]) > 0.9


@pytest.mark.soak
def test_an_answer_is_cut_before_a_placeholder(measured):
    for found in measured[0].values():
        assert found["cut"] == [([5, 6], [-1.0, -2.0], False), ([], [], False)]


@pytest.mark.long
def test_every_sample_is_of_one_rank(measured):
    assert [rank["gemma3"]["shares"]["own"] for rank in measured] == [[0, 2, 4], [1, 3]]


# ---- the server's answers, without a model ----------------------------------------------------------------


@pytest.fixture(scope="module")
def asked(tiny_gemma3):
    """What an engine looks at of a policy, and its prompts."""
    source = open_source(tiny_gemma3)
    return SimpleNamespace(source=source), policy_in_ranks.prompts_of(source)


def test_a_prompt_is_a_conversation_in_any_form(asked):
    source, image = asked[0].source, policy_in_ranks.jpeg(1)
    forms = [
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}],
        [{"role": "user", "content": "<image>What?"}],
        [{"from": "human", "value": "What?"}],
    ]
    first, *others = [RolloutPrompt.of(source, form, [image]) for form in forms]
    for other in others:
        assert other.messages == first.messages
        assert torch.equal(other.inputs["input_ids"], first.inputs["input_ids"])
    asked = RolloutPrompt.of(source, "What?", [image])
    assert asked.messages == first.messages and asked.images == [image]
    with pytest.raises(BadSample, match="the last turn is a reply; a prompt ends with the user's"):
        RolloutPrompt.of(source, [*forms[1], {"role": "assistant", "content": "A cat."}], [image])
    with pytest.raises(BadSample, match="1 placeholders for 0 images"):
        RolloutPrompt.of(source, [{"role": "user", "content": [{"type": "image"}]}], [])
    with pytest.raises(BadSample, match="turn 0 has role user_tag"):
        RolloutPrompt.of(source, [{"role": "user_tag", "content": "What?"}])


def choice(tokens=(5, 6), values=(-0.5, -1.5), finish="stop", **other) -> dict:
    return {
        "index": 0,
        "token_ids": list(tokens),
        "logprobs": {"token_logprobs": list(values)},
        "finish_reason": finish,
    } | other


def ask(url: str, asked: tuple, prompts: slice, **settings) -> list:
    engine = HttpEngine(url, "tiny", 1, 4, **{"pause": 0.01, "timeout": 5.0} | settings)
    return engine._ask_all(asked[0], asked[1][prompts])


TEXT, IMAGE = slice(0, 1), slice(1, 2)


def test_what_a_server_saw_has_to_be_the_prompt(asked):
    ours = asked[1][1].inputs["input_ids"].tolist()
    content = {"logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.5}]}}
    seen, said = [], {}

    def answer(path: str, request: dict) -> dict:
        seen.append((path, request))
        return {"choices": [choice(**content)]} | said

    with serving(answer) as url:
        said |= {"prompt_token_ids": ours}
        assert ask(url, asked, IMAGE) == [[([5, 6], [-0.5, -1.5], True)]]
        for given, count, expected in (
            (None, None, "the answer has no prompt_token_ids; serve with a version"),
            (
                ours[:-1],
                None,
                f"prompt has {len(ours) - 1} tokens and ours {len(ours)}, of which the first",
            ),
            ([*ours[:-1], ours[-1] + 1], len(ours), f"of which the first {len(ours) - 1} are the same"),
            ([10**20, *ours], len(ours) + 1, "serve a folder with the policy's chat template"),
        ):
            said |= {"prompt_token_ids": given, "usage": {"prompt_tokens": count}}
            with pytest.raises(EngineError) as raised:
                ask(url, asked, IMAGE)
            assert expected in str(raised.value)
    assert {path for path, _ in seen} == {"/v1/chat/completions"}
    parts = seen[0][1]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image_url", "text"]


@pytest.mark.parametrize("pause, at_once", [(0.02, 1), (0.01, 5_000)], ids=["slowly", "in a flood"])
def test_an_attempt_has_one_deadline_and_one_size_whatever_a_server_does(asked, pause, at_once):
    """The server would go on without end. All tricks are tried beside each other."""

    def attempt(trick: str) -> tuple[str, float]:
        with hostile(trick, pause, at_once) as url:
            start = time.monotonic()
            with pytest.raises(EngineError) as raised:
                ask(url, asked, TEXT, timeout=1.0, retries=0)
            assert str(raised.value).startswith(f"{url}/v1/completions: ")
            return str(raised.value), time.monotonic() - start

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with ThreadPoolExecutor(len(TRICKS)) as pool:
        found = dict(zip(TRICKS, pool.map(attempt, TRICKS), strict=True))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert max(seconds for _, seconds in found.values()) < 10, found  # on a busy machine
    assert grown < 200_000, f"{grown} KB more"
