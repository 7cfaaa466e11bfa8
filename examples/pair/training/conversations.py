"""Conversations for the pair: the chat format, what is held out, and the ones that are built from BFCL's data.

The format is the one that the tokenizer's chat template writes. Never imports a model or a tokenizer.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

Row = dict[str, Any]  # one line of a JSON file

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = (PAD, BEGIN, END, *(f"<|{role}|>" for role in ROLES), "<|reserved|>")

HELD_OUT_PREFIXES = ("tau-retail", "GorillaFileSystem", "TradingBot")
API_FILES = {
    "MessageAPI": "message_api",
    "VehicleControlAPI": "vehicle_control",
    "TicketAPI": "ticket_api",
    "TravelAPI": "travel_booking",
    "MathAPI": "math_api",
    "TwitterAPI": "posting_api",
}
SINGLE_TURN = (
    "simple_python",
    "simple_java",
    "simple_javascript",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "irrelevance",
    "live_irrelevance",
)
MULTI_TURN = ("multi_turn_base", "multi_turn_long_context", "multi_turn_miss_param")
OPENING = "You are an agent that calls functions to carry out the user's requests.\n\n# Functions\n\n"
NO_FUNCTION = "None of the functions can do this."
LONGEST_STATE = 6000  # characters; longer initial states are directory dumps

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for m in messages %}"
    "{%- set role = m['role'] if m['role'] in ['system', 'user', 'assistant', 'tool'] else 'user' %}"
    "{{- '<|' + role + '|>' }}"
    "{%- if m['content'] is string %}{{- m['content'] }}"
    "{%- elif m['content'] %}{%- for part in m['content'] %}{{- part['text'] }}{%- endfor %}{%- endif %}"
    "{%- if loop.first and tools %}{{- '\\n\\n# Functions\\n' }}"
    "{%- for tool in tools %}{{- '\\n' + ((tool['function'] if 'function' in tool else tool) | tojson) }}{%- endfor %}"
    "{%- endif %}"
    "{%- for call in m['tool_calls'] or [] %}{%- set f = call['function'] if 'function' in call else call %}"
    "{%- set a = f['arguments'] %}"
    "{{- '\\n' if m['content'] or not loop.first }}"
    "{{- '{\"name\": \"' + f['name'] + '\", \"arguments\": ' + (a if a is string else a | tojson) + '}' }}"
    "{%- endfor %}"
    "{{- eos_token }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def render(messages: list[dict[str, str]]) -> str:
    """Text of a conversation without its first token, as the chat template writes it for plain string contents."""
    return "".join(f"<|{message['role']}|>{message['content']}{END}" for message in messages)


def is_held_out(chat: Row) -> bool:
    """Whether a conversation's shared prefix belongs to the held-out half."""
    return any(part in str(chat.get("prefix_id", "")) for part in HELD_OUT_PREFIXES)


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.open(encoding="utf-8")]


def call_text(call: dict[str, dict[str, list[Any]]]) -> str:
    """One ground-truth call: the first accepted value of each argument."""
    ((name, arguments),) = call.items()
    chosen = {key: values[0] for key, values in arguments.items() if values and values[0] != ""}
    return json.dumps({"name": name, "arguments": chosen})


def system_prompt(functions: list[Row], state: Row | None, rng: random.Random) -> str:
    """Functions in random order, so that finding one has to be learned and its place can't be."""
    shuffled = rng.sample(functions, len(functions))
    text = OPENING + "\n".join(json.dumps(function) for function in shuffled)
    return text + (f"\n\n# Initial state\n\n{json.dumps(state)}" if state else "")


def bfcl_conversations(root: Path, licence: str) -> list[Row]:
    """Training conversations from BFCL: single-turn ones, and multi-turn ones that use no held-out API.

    root: the unpacked wheel of bfcl-eval. Returns rows of (id, source, licence, messages).
    """
    data = root / "bfcl_eval" / "data"
    rng = random.Random(7)
    chats: list[Row] = []

    def add(name: str, messages: list[dict[str, str]]) -> None:
        chats.append({"id": f"bfcl/{name}", "source": "bfcl-eval", "licence": licence, "messages": messages})

    for kind in SINGLE_TURN:
        answers_file = data / "possible_answer" / f"BFCL_v4_{kind}.json"
        answers = {r["id"]: r["ground_truth"] for r in read_rows(answers_file)} if answers_file.exists() else {}
        for row in read_rows(data / f"BFCL_v4_{kind}.json"):
            answer = "\n".join(map(call_text, answers[row["id"]])) if row["id"] in answers else NO_FUNCTION
            asked = [m for m in row["question"][0] if m["role"] in ROLES]
            system = {"role": "system", "content": system_prompt(row["function"], None, rng)}
            add(str(row["id"]), [system, *asked, {"role": "assistant", "content": answer}])

    docs = {api: read_rows(data / "multi_turn_func_doc" / f"{file}.json") for api, file in API_FILES.items()}
    for kind in MULTI_TURN:
        answers = {r["id"]: r["ground_truth"] for r in read_rows(data / "possible_answer" / f"BFCL_v4_{kind}.json")}
        for row in read_rows(data / f"BFCL_v4_{kind}.json"):
            state = {api: row["initial_config"][api] for api in row["involved_classes"] if api in row["initial_config"]}
            if not all(api in docs for api in row["involved_classes"]) or len(json.dumps(state)) > LONGEST_STATE:
                continue
            functions = [function for api in row["involved_classes"] for function in docs[api]]
            messages = [{"role": "system", "content": system_prompt(functions, state, rng)}]
            for asked, calls in zip(row["question"], answers[row["id"]], strict=False):
                messages += [*asked, {"role": "assistant", "content": "[" + ", ".join(calls) + "]"}]
            add(str(row["id"]), messages)
    return chats
