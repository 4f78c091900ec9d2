"""Published chat templates, which TRL has copies of, and conversations to render with them."""

from __future__ import annotations

from importlib.resources import files

FOLDER = files("trl") / "chat_templates"
# of each template the tiny family whose control tokens it writes; `_training` ones mark replies with tags
PUBLISHED = {
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_5_think": "qwen3_vl",
    "qwen3_5_nothink": "qwen3_vl",
    "qwen3_6": "qwen3_vl",
    "qwen3_8": "qwen3_vl",
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "gemma4_v2": "gemma4",
    "gemma4_v3": "gemma4",
    "gemma4_v4": "gemma4",
    "gemma4_v5": "gemma4",
    "glm4moe": "glm4v_moe",
    "lfm2_2_5_vl": "lfm2_vl",
    "smolvlm": "smolvlm",
    "idefics3": "smolvlm",
    "llava_next": "llava",
}
TEXT_ALONE = "a language model alone: no tiny family's tokenizer has its control tokens"
UNTRIED = {  # the other templates, each with the reason
    "diffusion_gemma": "a diffusion model, which is not trained token by token",
    "muse_glimmer": "no family here has its control tokens",
    **dict.fromkeys(("cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma"), TEXT_ALONE),
    **dict.fromkeys(("gptoss", "lfm2", "lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2"), TEXT_ALONE),
    **dict.fromkeys(("llama3", "llama3_1", "llama3_2", "phi3", "phi3_5"), TEXT_ALONE),
    **dict.fromkeys(("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super"), TEXT_ALONE),
    **dict.fromkeys(("nemotron_3_ultra", "qwen2_5", "qwen3_instruct_2507"), TEXT_ALONE),
    "qwen3": "a language model alone: it is tried for thinking, with the tokens of Qwen3-VL",
}
USER = {"role": "user", "content": "What is 3 + 4?"}
REPLY = {"role": "assistant", "content": "It is 7."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
THINKS = REPLY | {"reasoning_content": "Three and four."}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SEES = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And this?"}]}
CONVERSATIONS = {
    "one turn": [USER, REPLY],
    "three turns": [USER, REPLY] * 3,
    "system": [{"role": "system", "content": "Be brief."}, USER, REPLY],
    "system, three turns": [{"role": "system", "content": "Be brief."}, *[USER, REPLY] * 3],
    "reasoning": [USER, THINKS],
    "reasoning in the middle": [USER, THINKS, USER, REPLY],
    "a call": [USER, CALLS, {"role": "tool", "name": "add", "content": "7"}, REPLY],
    "a call, reasoning": [USER, CALLS, {"role": "tool", "name": "add", "content": "7"}, THINKS],
    "lines": [USER | {"content": "a\n\nb"}, REPLY | {"content": "1\n\n2 "}],
    "an image": [SEES, REPLY],
    "an image, system": [{"role": "system", "content": "Be brief."}, SEES, REPLY],
    "an image later": [USER, REPLY, SEES, REPLY],
}
