"""Reads tools and calls of them, as people write them, into the form that chat templates take."""

import json
from typing import Any

from megatron_vlm.data.accounts.bad_sample import BadSample

CALL_KEYS = {"id", "type", "index", "function", "name", "arguments", "parameters", "tool_call_id"}
BLOCKS = {  # of Anthropic's: what is read of each
    "tool_use": ("type", "id", "name", "input"),
    "tool_result": ("type", "tool_use_id", "content"),
    "thinking": ("type", "thinking", "signature"),
}


def read_tools(name: str, tools: Any) -> list[dict] | None:
    """Return the tools that a record has under a name: objects, JSON text of them, or a list of JSON texts.

    `functions` are OpenAI's older `tools`, and come out in the form of these. Raises BadSample.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise BadSample("bad_json", f"{name}: {error}") from error
    tools = [decode_json(tool) for tool in (tools if isinstance(tools, list) else [tools] if tools else [])]
    if not all(isinstance(tool, dict) for tool in tools):
        raise BadSample("bad_conversation", f"{name} is not a list of objects")
    for number, tool in enumerate(tools):
        if "input_schema" in tool:  # Anthropic's
            function = {key: value for key, value in tool.items() if key not in ("input_schema", "type")}
            tools[number] = {"type": "function", "function": function | {"parameters": tool["input_schema"]}}
        elif name == "functions" and "function" not in tool:
            tools[number] = {"type": "function", "function": tool}
    return tools or None


def read_call_turn(content: Any, place: str, unread: set[tuple[str, str]]) -> list[dict]:
    """Return the calls of a turn whose text is one call, or a list of them, as OpenAI writes them.

    Raises BadSample.
    """
    return [_wrap(call) for call in _checked_calls(content, place, unread)]


def _checked_calls(content: Any, place: str, unread: set[tuple[str, str]]) -> list[dict]:
    """Return calls as they are written, but with objects for arguments that are JSON text of an object.

    Templates would write that text in quotes. Keys that they do not write are added to `unread`.
    """
    calls = decode_json(content)
    calls = [decode_json(call) for call in (calls if isinstance(calls, list) else [calls])]
    for call in calls:
        if not (isinstance(call, dict) and isinstance(call.get("function", call), dict)):
            raise BadSample("bad_conversation", f"{place}a call is no JSON object; write name and arguments")
        if not isinstance(call.get("function", call).get("name"), str):
            raise BadSample("bad_conversation", f"{place}a call has no name; write name and arguments")
        keys = {*call, *call.get("function", ())}
        unread |= {("tool call", str(key)) for key in keys - CALL_KEYS}
    return [_with_arguments(call) for call in calls]


def _wrap(call: dict) -> dict:
    return call if "function" in call else {"type": "function", "function": call}


def read_calls(turn: dict, place: str, unread: set[tuple[str, str]]) -> list[dict] | None:
    """Return the `tool_calls` of a turn, or its `function_call` as such; None if it has neither.

    Raises BadSample for two that differ.
    """
    newer, older = decode_json(turn.get("tool_calls")), turn.get("function_call")
    if newer and not (isinstance(newer, list) and all(isinstance(call, dict) for call in newer)):
        raise BadSample("bad_conversation", f"{place}tool_calls is no list of objects")
    calls = _checked_calls(newer, place, unread) if newer else newer
    if not older:
        return calls
    older = read_call_turn(older, place, unread)
    if calls and list(map(_wrap, calls)) != older:
        raise BadSample("bad_conversation", f"{place}tool_calls and function_call differ; leave one out")
    return older


def expand_blocks(turns: list, unread: set[tuple[str, str]]) -> list:
    """Return the turns with Anthropic's blocks as OpenAI writes them.

    `tool_use` becomes a call of its turn, `thinking` its reasoning, and `tool_result` a tool turn before it.
    """
    expanded: list = []
    names: dict[Any, Any] = {}  # of the tools that were called, by the id of the call
    block_types = tuple(BLOCKS)
    for turn in turns:
        content = turn.get("content") if isinstance(turn, dict) else None
        parts = content if isinstance(content, list) else []
        blocks = [part for part in parts if isinstance(part, dict) and part.get("type") in block_types]
        if not blocks:
            expanded.append(turn)
            continue
        other_parts = [part for part in parts if part not in blocks]
        calls, thoughts = [], []
        for block in blocks:
            kind = block["type"]
            unread |= {("part", str(key)) for key in block if key not in BLOCKS[kind]}
            if kind == "tool_use":
                names[str(block.get("id"))] = block.get("name")
                function = {"name": block.get("name"), "arguments": block.get("input")}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            elif kind == "thinking":
                thoughts.append(block.get("thinking"))
            else:
                called = block.get("tool_use_id")
                result = {"role": "tool", "tool_call_id": called, "content": block.get("content")}
                expanded.append(result | ({"name": names[str(called)]} if str(called) in names else {}))
        if calls or thoughts or other_parts:
            beside = {"tool_calls": calls} if calls else {}
            beside |= {"reasoning_content": "\n".join(map(str, thoughts))} if thoughts else {}
            expanded.append(turn | {"content": other_parts} | beside)
        else:
            unread |= {("turn", str(key)) for key in turn if key not in ("role", "content")}
    return expanded


def join_calls(messages: list[dict], are_calls: list[bool]) -> list[dict]:
    """Return the messages; a turn of calls joins the reply before it. Raises BadSample for other weights."""
    joined: list[dict] = []
    for index, (message, is_call) in enumerate(zip(messages, are_calls, strict=True)):
        if not (is_call and joined and joined[-1]["role"] == "assistant"):
            joined.append(message)
            continue
        reply = joined[-1]
        for key in message.keys() & reply.keys() - {"role", "content", "tool_calls"}:
            if message[key] != reply[key]:
                text = (
                    f"its {key} {message[key]!r} differs from {reply[key]!r} of the reply that it is part of"
                )
                raise BadSample("bad_conversation", f"turn {index}: {text}")
        calls = [*(reply.get("tool_calls") or []), *message["tool_calls"]]
        content = reply["content"] if any(part["text"] for part in reply["content"]) else []
        joined[-1] = message | reply | {"content": content, "tool_calls": calls}
    return joined


def _with_arguments(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, dict) else None
    arguments = decode_json(function.get("arguments")) if isinstance(function, dict) else None
    arguments = {} if arguments == "" else arguments  # of a call without any
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        detail = f"the arguments of a call begin like an object and are no JSON: {arguments[:80]!r}"
        raise BadSample("bad_conversation", detail)
    if not isinstance(arguments, dict):
        return call
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def decode_json(value: Any) -> Any:
    """Return what JSON text of an object or a list holds; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
