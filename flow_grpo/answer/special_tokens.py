"""Special tokens that are written in the text of a question or an observation.

A chat template mixes that text with its own special tokens, such as <|im_end|>, and the tokenizer
cannot tell them apart: text from a data set or a tool could end a turn, open another role or stand
for an image. `LiteralText.protect` therefore replaces special tokens in the text with private-use
characters before the template is rendered, and `LiteralText.encode` encodes these as the original
characters. The encoding of text without special tokens does not change.
"""

import re

from transformers import PreTrainedTokenizerBase

from flow_grpo.data.questions import MARK, VIDEO_MARK
from flow_grpo.errors import UserError

ESCAPE, REJECT = "escape", "reject"  # the choices of the setting special_tokens
FIRST = 0x100000  # of Supplementary Private Use Area-B
NEVER = "(?!)"  # a pattern that matches nothing


class LiteralText:
    """Encodes text in which special tokens are plain characters.

    Args:
        tokenizer: The tokenizer of the model. Only added tokens that are marked as special are
            escaped; others, such as <think> and <tool_call>, may be part of a text.
        reject: Raise a UserError for a text with a special token instead.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, reject: bool = False) -> None:
        self.tokenizer, self.reject = tokenizer, reject
        special = {i: t.content for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        texts = {*special.values()} - {MARK, VIDEO_MARK, ""}
        longest_first = sorted(texts, key=lambda text: (-len(text), text))
        marks = {text: chr(FIRST + i) for i, text in enumerate(longest_first)}
        self._ids, self._marks = {*special}, marks
        self._texts = {mark: text for text, mark in marks.items()}
        self._find_text = re.compile("|".join(map(re.escape, longest_first)) or NEVER)
        self._find_mark = re.compile(f"([{''.join(marks.values())}])" if marks else NEVER)

    def protect(self, text: str, where: str) -> str:
        """Replace each special token with a private-use character."""
        if found := self._find_mark.search(text):
            raise UserError(
                f"{where}: the text contains the private-use character {found[0]!a}, which is "
                "reserved; remove it"
            )
        if self.reject and (found := self._find_text.search(text)):
            raise UserError(
                f"{where}: the text contains {found[0]}, a special token of the model; remove it, "
                f"or set --config.special_tokens={ESCAPE}"
            )
        return self._find_text.sub(lambda match: self._marks[match[0]], text)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered template that contains protected text."""
        ids = []
        for part in self._find_mark.split(text):
            if part in self._texts:
                ids += self._encode_literally(self._texts[part])
            elif part:
                ids += self.tokenizer(part, add_special_tokens=False)["input_ids"]
        return ids

    def _encode_literally(self, token: str) -> list[int]:
        options = {"add_special_tokens": False, "split_special_tokens": True}
        ids = self.tokenizer(token, **options)["input_ids"]
        if self._ids.intersection(ids):
            raise UserError(
                f"the tokenizer of {self.tokenizer.name_or_path} cannot encode {token} as text; "
                "remove it from the data"
            )
        return ids
