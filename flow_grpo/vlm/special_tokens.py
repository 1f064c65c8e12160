"""Escape special tokens in the text of questions and observations.

A chat template mixes that text with its own special tokens, such as <|im_end|>, and the tokenizer
cannot distinguish them: text from a data set or a tool could end a turn, open another role or stand
for an image. `LiteralText.escape_special_tokens` therefore replaces special tokens in the text with
private-use characters before the template is rendered, and `LiteralText.encode` encodes these as
the original characters. The encoding of text without special tokens does not change.
"""

import re

from transformers import PreTrainedTokenizerBase

from flow_grpo.data.chats import IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER
from flow_grpo.errors import UserError

ESCAPE, REJECT = "escape", "reject"  # choices of the `special_tokens` setting
FIRST_PRIVATE_USE = 0x100000  # of Supplementary Private Use Area-B
NO_MATCH = "(?!)"  # a pattern that matches nothing


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
        longest_first = sorted({*special.values()} - {""}, key=lambda text: (-len(text), text))
        others = [x for x in longest_first if x not in (IMAGE_PLACEHOLDER, VIDEO_PLACEHOLDER)]
        marks = {text: chr(FIRST_PRIVATE_USE + i) for i, text in enumerate(longest_first)}
        self._ids, self._marks = {*special}, marks
        self._texts = {mark: text for text, mark in marks.items()}
        self._find_text, self._find_other = (
            re.compile("|".join(map(re.escape, texts)) or NO_MATCH)
            for texts in (longest_first, others)
        )
        self._find_mark = re.compile(f"([{''.join(marks.values())}])" if marks else NO_MATCH)

    def escape_special_tokens(
        self, text: str, where: str, *, keep_placeholders: bool = True
    ) -> str:
        """Replace each special token with a private-use character.

        Args:
            text: The text.
            where: What to call it in error messages.
            keep_placeholders: Leave `<image>` and `<video>` unescaped, because they stand for
                images and videos; some models have special tokens with these names.

        Raises:
            UserError: For reserved characters, and with `reject` for a special token.
        """
        if found := self._find_mark.search(text):
            raise UserError(
                f"contains the private-use character {found[0]!a}, which is reserved",
                field=where,
                hint="remove it",
            )
        find = self._find_other if keep_placeholders else self._find_text
        if self.reject and (found := find.search(text)):
            raise UserError(
                f"contains {found[0]}, a special token of the model",
                field=where,
                hint=f"remove it, or set --config.special_tokens={ESCAPE}",
            )
        return find.sub(lambda match: self._marks[match[0]], text)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered template that contains escaped text."""
        ids = []
        for part in self._find_mark.split(text):
            if part in self._texts:
                ids += self._encode_literally(self._texts[part])
            elif part:
                ids += self.tokenizer(part, add_special_tokens=False)["input_ids"]
        return ids

    def _encode_literally(self, token: str) -> list[int]:
        """Return token ids of a special token as plain text; reject it if that is impossible."""
        options = {"add_special_tokens": False, "split_special_tokens": True}
        ids = self.tokenizer(token, **options)["input_ids"]
        if self._ids.intersection(ids):
            raise UserError(
                f"cannot encode {token} as text",
                field=f"tokenizer of {self.tokenizer.name_or_path}",
                hint="remove it from the data",
            )
        return ids
