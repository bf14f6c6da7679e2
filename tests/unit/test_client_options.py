"""Each option of a generation reaches its field; what contradicts another one is refused."""

from typing import Any, get_type_hints

import pytest

from kvatlas.client.errors import RequestError
from kvatlas.client.request import Message, Options, build_spec
from kvatlas.v1 import generation_pb2 as pb

TOOL = {"name": "look", "description": "né"}
CHAT = [Message("user", "hi")]
SEEN = '{"name": "look", "description": "né"}'  # as it is written, not as escapes
FIELDS: dict[str, tuple[Any, dict[str, Any]]] = {
    # option: value, what is set
    "model": ("m", {"model": "m"}),
    "request_id": ("r", {"request_id": "r"}),
    "temperature": (0.0, {"sampling": {"temperature": 0.0}}),
    "top_p": (0.5, {"sampling": {"top_p": 0.5}}),
    "top_k": (7, {"sampling": {"top_k": 7}}),
    "min_p": (0.25, {"sampling": {"min_p": 0.25}}),
    "repetition_penalty": (1.5, {"sampling": {"repetition_penalty": 1.5}}),
    "frequency_penalty": (-0.5, {"sampling": {"frequency_penalty": -0.5}}),
    "presence_penalty": (0.75, {"sampling": {"presence_penalty": 0.75}}),
    "seed": (0, {"sampling": {"seed": 0}}),
    "logit_bias": ({5: -2.0}, {"sampling": {"logit_bias": {5: -2.0}}}),
    "n": (3, {"sampling": {"n": 3}}),
    "max_tokens": (9, {"stop": {"max_tokens": 9}}),
    "min_tokens": (2, {"stop": {"min_tokens": 2}}),
    "stop_strings": (["a", "b"], {"stop": {"stop_strings": ["a", "b"]}}),
    "stop_token_ids": ([4, 5], {"stop": {"stop_token_ids": [4, 5]}}),
    "ignore_eos": (True, {"stop": {"ignore_eos": True}}),
    "include_stop_in_output": (True, {"stop": {"include_stop_in_output": True}}),
    "max_duration_seconds": (1.5, {"stop": {"max_duration": {"seconds": 1, "nanos": 500_000_000}}}),
    "output": ("both", {"output": {"format": pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS}}),
    "logprobs": (0, {"output": {"logprobs": 0}}),
    "prompt_logprobs": (4, {"output": {"prompt_logprobs": 4}}),
    "skip_special_tokens": (False, {"output": {"skip_special_tokens": False}}),
    "json_schema": (TOOL, {"json_schema": SEEN}),
    "regex": ("[ab]", {"regex": "[ab]"}),
    "grammar": ("root ::= 'a'", {"grammar": "root ::= 'a'"}),
    "choices": (["x", "y"], {"choices": {"choices": ["x", "y"]}}),
    "tools": ([TOOL, "{}"], {"chat": {"tools_json": [SEEN, "{}"]}}),
    "template_args": ({"think": False}, {"chat": {"template_args_json": '{"think": false}'}}),
    "add_generation_prompt": (False, {"chat": {"add_generation_prompt": False}}),
    "continue_final_message": (True, {"chat": {"continue_final_message": True}}),
    "priority": (-3, {"scheduling": {"priority": -3}}),
    "queue_timeout_seconds": (2.0, {"scheduling": {"queue_timeout": {"seconds": 2}}}),
    "cache_read": (False, {"cache": {"read": False}}),
    "cache_write": (False, {"cache": {"write": False}}),
    "cache_salt": ("s", {"cache": {"salt": "s"}}),
    "adapter": ("l", {"adapter": "l"}),
    "labels": ({"team": "x"}, {"labels": {"team": "x"}}),
}


def test_every_option_is_in_the_table() -> None:
    assert FIELDS.keys() == get_type_hints(Options).keys()


@pytest.mark.parametrize("name", FIELDS)
def test_an_option_reaches_its_field_and_no_other(name: str) -> None:
    """Also where the value is the one that an unset field has."""
    value, fields = FIELDS[name]
    wanted = build_spec(CHAT, {})
    wanted.MergeFrom(pb.GenerationSpec(**fields))
    assert build_spec(CHAT, {name: value}) == wanted  # type: ignore[misc]


@pytest.mark.parametrize("name", [name for name, (_, fields) in FIELDS.items() if "chat" in fields])
def test_options_of_a_chat_are_refused_for_other_prompts(name: str) -> None:
    for prompt in ("text", [1, 2]):
        with pytest.raises(RequestError, match=f"^{name} is for chat prompts only$"):
            build_spec(prompt, {name: FIELDS[name][0]})  # type: ignore[misc]


def test_an_answer_has_one_constraint_and_ones_that_are_none_are_not_said() -> None:
    with pytest.raises(RequestError, match=r"^json_schema and grammar: an answer can have one constraint$"):
        build_spec("x", {"grammar": "g", "json_schema": "{}"})
    spec = build_spec("x", {"regex": "a", "grammar": None, "choices": None})  # type: ignore[typeddict-item]
    assert spec.WhichOneof("constraint") == "regex"
    assert build_spec("x", {"choices": []}).WhichOneof("constraint") == "choices"


def test_prompts_are_of_one_kind() -> None:
    assert build_spec([], {}).WhichOneof("prompt") == "token_ids"
    assert list(build_spec([3, 4], {}).token_ids.ids) == [3, 4]
    for mixed in ([1, "a"], [1, CHAT[0]], [CHAT[0], 1]):
        with pytest.raises(RequestError, match=r"^a prompt is a text, a list of token ids, or a list of"):
            build_spec(mixed, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown option 'max_token'; known: adapter, "):
        build_spec("x", {"max_token": 1})  # type: ignore[typeddict-unknown-key]
