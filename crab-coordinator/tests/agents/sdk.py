"""A small agent on the official SDKs, with their own defaults: python -c … API whole|stream PORT"""

import json
import subprocess
import sys

api, how, port = sys.argv[1:]
stream = how == "stream"
base = f"http://127.0.0.1:{port}"


def run(command):
    return subprocess.run(command, shell=True, capture_output=True, text=True).stdout


def messages():
    import anthropic

    client = anthropic.Anthropic(base_url=base, api_key="dummy")
    tools = [{"name": "Bash", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}]
    history = [{"role": "user", "content": "do the work"}]
    while True:
        ask = dict(model="scripted", max_tokens=1000, tools=tools, messages=history)
        if stream:
            with client.messages.stream(**ask) as answer:
                said = answer.get_final_message()
        else:
            said = client.messages.create(**ask)
        calls = [block for block in said.content if block.type == "tool_use"]
        if not calls:
            return said.content[0].text
        history.append({"role": "assistant", "content": [block.model_dump() for block in said.content]})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": run(call.input["command"])} for call in calls
        ]
        history.append({"role": "user", "content": results})


def chat():
    import openai

    client = openai.OpenAI(base_url=base + "/v1", api_key="dummy")
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "sdk", "parameters": parameters}}]
    history = [{"role": "user", "content": "do the work"}]
    while True:
        ask = dict(model="scripted", tools=tools, messages=history)
        if stream:
            with client.chat.completions.stream(**ask) as answer:
                for _ in answer:
                    pass
                said = answer.get_final_completion().choices[0].message
        else:
            said = client.chat.completions.create(**ask).choices[0].message
        if not said.tool_calls:
            return said.content
        calls = [
            {"id": call.id, "type": "function", "function": {"name": "sdk", "arguments": call.function.arguments}}
            for call in said.tool_calls
        ]
        history.append({"role": "assistant", "content": said.content, "tool_calls": calls})
        for call in said.tool_calls:
            result = run(json.loads(call.function.arguments)["command"])
            history.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses():
    import openai

    client = openai.OpenAI(base_url=base + "/v1", api_key="dummy")
    parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
    tools = [{"type": "function", "name": "sdk", "parameters": parameters, "strict": False}]
    history = [{"role": "user", "content": "do the work"}]
    while True:
        ask = dict(model="scripted", tools=tools, input=history)
        if stream:
            with client.responses.stream(**ask) as answer:
                said = answer.get_final_response()
        else:
            said = client.responses.create(**ask)
        calls = [item for item in said.output if item.type == "function_call"]
        if not calls:
            return said.output_text
        for call in calls:
            history.append(
                {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
            )
            result = run(json.loads(call.arguments)["command"])
            history.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


print({"messages": messages, "chat": chat, "responses": responses}[api]())
