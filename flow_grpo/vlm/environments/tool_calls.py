"""Parse tool calls in the format of Hermes and Qwen; base class of environments with a tool.

A response calls the tool with one JSON object in tags, and the next user turn contains the result:

    <tool_call>
    {"name": "python", "arguments": {"code": "print(7 + 8)"}}
    </tool_call>

    <tool_response>
    15
    </tool_response>

A response without a call is the final answer and ends the episode. Invalid calls are answered with
an error, so that the model can correct itself.
"""

import json
from collections.abc import Mapping
from typing import Any

from PIL import Image

from flow_grpo.data.chats import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER
from flow_grpo.errors import UserError, first_line

OPENING, CLOSING, END_OF_THOUGHT = "<tool_call>", "</tool_call>", "</think>"
RESPONSE_OPENING, RESPONSE_CLOSING = "<tool_response>\n", "\n</tool_response>"
MAX_CALL_CHARACTERS = 100_000

ToolResult = str | tuple[str, list[Image.Image]]


class ToolError(Exception):
    """A failed call; the message is shown to the model."""


def parse_tool_call(response: str, name: str) -> dict[str, Any] | None:
    """Return the arguments of a response's call to the tool `name`; None if there is no call.

    Raises:
        ToolError: If the call is malformed, too long, or names another tool.
    """
    start = response.find(OPENING, max(response.rfind(END_OF_THOUGHT), 0))
    if start < 0:
        return None
    text = response[start + len(OPENING) :].lstrip()
    if len(text) > MAX_CALL_CHARACTERS:
        raise ToolError(f"the call has more than {MAX_CALL_CHARACTERS:,} characters")
    try:
        call, end = json.JSONDecoder(strict=False).raw_decode(text)  # strings may have line breaks
    except (ValueError, RecursionError) as error:
        raise ToolError(f"the call is not valid JSON ({first_line(error)})") from error
    if OPENING in text[end:]:
        raise ToolError("call the tool once per turn")
    if not text[end:].lstrip().startswith(CLOSING):
        raise ToolError(f"the call does not end with {CLOSING}")
    if not isinstance(call, dict) or call.get("name") != name:
        raise ToolError(f'the call must be a JSON object with the name "{name}"')
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ToolError('"arguments" must be a JSON object')
    return arguments


def text_argument(arguments: Mapping[str, Any], name: str, most: int = MAX_CALL_CHARACTERS) -> str:
    """Return an argument that must be a string of at most `most` characters."""
    value = arguments.get(name)
    if not isinstance(value, str):
        raise ToolError(f'the argument "{name}" must be a text')
    if len(value) > most:
        raise ToolError(f'the argument "{name}" has more than {most:,} characters')
    return value


def shorten(text: str, most: int) -> str:
    """Return the text, with its middle omitted if it has more than `most` characters."""
    if len(text) <= most:
        return text
    mark = f"\n[... {len(text) - most:,} characters omitted ...]\n"
    kept = max(most - len(mark), 0)
    return (text[: kept - kept // 2] + mark + text[len(text) - kept // 2 :])[:most]


class ToolEnvironment:
    """Environment with one tool; subclasses set `name` and implement `call`.

    A result with too many tokens or a special token is replaced with `fallback_observation`. It
    must not end the episode, because a model could then avoid its reward.

    Args:
        error_reward: Reward of a turn whose call fails, for example -0.1.
    """

    name: str
    fallback_observation = (
        f"{RESPONSE_OPENING}Error: the result is too long or has characters that cannot be shown"
        f"{RESPONSE_CLOSING}"
    )

    def __init__(self, error_reward: float = 0.0) -> None:
        self.error_reward = check_option("error_reward", error_reward, -1e6, 1e6)

    def reset(self, row: dict[str, Any]) -> None:
        """Start an episode for a row of the dataset."""

    def call(self, arguments: dict[str, Any]) -> ToolResult:
        """Run the tool and return a text, or a text and images.

        Raises:
            ToolError: If the call fails.
        """
        raise NotImplementedError

    def step(self, answer: str) -> tuple[ToolResult, float, bool]:
        """Answer the call in a response; end the episode if there is none."""
        images: list[Image.Image] = []
        reward = 0.0
        try:
            arguments = parse_tool_call(answer, self.name)
            if arguments is None:
                return "", 0.0, True
            result = self.call(arguments)
            text, images = (result, []) if isinstance(result, str) else result
        except ToolError as error:
            text, reward = f"Error: {error}", self.error_reward
        # a placeholder in a tool's output would refer to an image that does not exist
        for placeholder in (IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER):
            text = text.replace(placeholder, f"({placeholder[1:-1]})")
        text = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
        text = IMAGE_PLACEHOLDER * len(images) + text
        return (f"{RESPONSE_OPENING}{text}{RESPONSE_CLOSING}", images), reward, False


def check_option(name: str, value: Any, least: float, most: float, *, whole: bool = False) -> Any:
    """Return an option of an environment that must be a number from `least` to `most`."""
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise UserError(
            f"must be {'a whole' if whole else 'a'} number from {least:g} to {most:g}",
            field=f"environment_options.{name}",
            value=value,
        )
    return value
