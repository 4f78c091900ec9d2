"""Reads tools and calls of them, as people write them, into the form that chat templates take."""

import json
from typing import Any

from megatron_vlm.data.accounts.bad_sample import BadSample


def read_tools(name: str, tools: Any) -> list[dict] | None:
    """Return the tools that a record has under a name: objects, JSON text of them, or a list of JSON texts.

    `functions` are OpenAI's older `tools`, and come out in the form of these. Raises BadSample.
    """
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise BadSample("bad_json", f"{name}: {error}") from error
    tools = [_decode(tool) for tool in (tools if isinstance(tools, list) else [tools] if tools else [])]
    if not all(isinstance(tool, dict) for tool in tools):
        raise BadSample("bad_conversation", f"{name} is not a list of objects")
    if name == "functions":
        tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
    return tools or None


def read_call_turn(content: Any, place: str) -> list[dict]:
    """Return the calls of a turn whose text is one call, or a list of them. Raises BadSample."""
    calls = _decode(content)
    calls = [_decode(call) for call in (calls if isinstance(calls, list) else [calls])]
    for call in calls:
        if not (isinstance(call, dict) and isinstance(call.get("function", call), dict)):
            raise BadSample("bad_conversation", f"{place}a call is no JSON object; write name and arguments")
        if not isinstance(call.get("function", call).get("name"), str):
            raise BadSample("bad_conversation", f"{place}a call has no name; write name and arguments")
    calls = [call if "function" in call else {"type": "function", "function": call} for call in calls]
    return [_with_arguments(call) for call in calls]


def read_calls(turn: dict, place: str) -> Any:
    """Return the `tool_calls` of a turn, or its `function_call` as such; None if it has neither.

    Arguments that are JSON text of an object come out as the object, since templates write text in quotes.
    Raises BadSample for two that differ.
    """
    calls = _decode(turn.get("tool_calls"))
    if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise BadSample("bad_conversation", f"{place}tool_calls is no list of objects")
    calls = [_with_arguments(call) for call in calls] if calls else calls
    if turn.get("function_call"):
        older = read_call_turn(turn["function_call"], place)
        if calls and calls != older:
            raise BadSample("bad_conversation", f"{place}tool_calls and function_call differ; leave one out")
        calls = older
    return calls


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
    arguments = _decode(function.get("arguments")) if isinstance(function, dict) else None
    arguments = {} if arguments == "" else arguments  # of a call without any
    if not isinstance(arguments, dict):
        return call
    function = function | {"arguments": arguments}
    return call | {"function": function} if "function" in call else function


def _decode(value: Any) -> Any:
    """Return what JSON text of an object or a list holds; anything else as it is."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
