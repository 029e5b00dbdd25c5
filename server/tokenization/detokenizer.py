"""Incremental detokenization: token ids to text, without incomplete characters, up to a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from .stop_matcher import StopMatcher, StopString
from .tokenizer import Tokenizer


class Detokenizer:
    """Decodes token ids one by one.

    `context`: the ids of the prompt, or the last of them. The text is what decoding the prompt and the output together
    adds to decoding the prompt.
    `stops`: the first token that completes one of these ends the text; if it completes several, the one that begins
    first counts. None counts within the first `min_tokens` tokens.
    `may_resume`: hold stop strings, also those that belong to the text, because some of them may not count.
    `strip`: remove the space that some vocabularies put before every word from the beginning of a text without
    context. With a grammar every character counts, so it must stay.
    `hidden`: tokens without text; None: the special tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[StopString] = (),
        *,
        include_stop: bool = False,
        may_resume: bool = False,
        hidden: Collection[int] | None = None,
        context: Sequence[int] = (),
        min_tokens: int = 0,
        strip: bool = True,
    ) -> None:
        self.include_stop = include_stop
        self._holds = may_resume or not include_stop
        self.stopped = False
        self.stop: str | None = None  # the stop string that ended the text
        self.offset = 0  # characters decoded so far
        self.start = 0  # offset of the first character of the last token
        self._decoder = tokenizer.decoder
        self._hidden = tokenizer.special_ids if hidden is None else hidden
        self._stops = [StopMatcher(stop) for stop in stops]
        self._min_tokens = min_tokens
        self._strip = strip
        self._num_tokens = 0
        self._held = ""  # decoded text that may begin a stop string
        self._after: int | None  # the last token that has text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._half = self._read_context(last_with_text(tokenizer, context, self._hidden))

    def feed(self, token_id: int) -> str:
        """Return the text that one more token makes final; nothing after a stop string, which `included` returns if it
        was held."""
        if self.stopped:
            return ""
        self._num_tokens += 1
        self.start = self.offset
        after = self._after if self._strip or self._after is not None else token_id
        data = None if token_id in self._hidden else self._decoder.piece(token_id, after)
        if data is None:
            return ""
        self._after = token_id
        new = self._utf8.decode(data)
        if new and self._half:
            new = self._without_half(new)
        if not new:
            return ""
        if new[0] == "\ufffd":
            # It may be an earlier token's incomplete character, which this token has not completed.
            own = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
            self.start += max(0, len(new) - len(own))
        self.offset += len(new)
        if not self._stops:
            return new
        match = self._find(new)
        text = self._held + new
        if match is not None:
            start, end, self.stop = match
            self.stopped = True
            length = len(text) - len(new) + (start if self._holds else end)
            self._held = text[length:]
            return text[:length]
        keep = max(stop.matched for stop in self._stops) if self._holds else 0
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def included(self) -> str:
        """Return the stop string that has ended the text if it was held, and belongs to the text."""
        return (self.stop or "") if self._holds and self.include_stop else ""

    def resume(self) -> str:
        """Go on after a stop string that does not count; return it and the rest of the last token's text."""
        for stop in self._stops:
            stop.matched = 0
        self.stopped, self.stop = False, None
        held, self._held = self._held, ""
        return held

    def finish(self) -> str:
        """Return the withheld text, in which an incomplete character is U+FFFD."""
        if self.stopped:
            return ""
        rest = self._without_half(self._utf8.decode(b"", True))
        self.offset += len(rest)
        held, self._held = self._held + rest, ""
        return held

    def _find(self, new: str) -> tuple[int, int, str] | None:
        """Return the stop string that ends the text, with its start (negative: in the held text) and end in `new`."""
        found = [(end - len(stop.text), end, stop.text) for stop in self._stops for end in stop.feed(new)]
        return min(found, default=None) if self._num_tokens > self._min_tokens else None

    def _read_context(self, last: list[int]) -> str:
        """Start after the prompt, whose last tokens with text these are; returns its text for an incomplete character
        at its end, which may be completed."""
        end = b"".join(self._decoder.piece(token_id, token_id) or b"" for token_id in last)
        self._after = last[-1] if last else None
        for length in range(1, min(3, len(end)) + 1):
            if not self._utf8.decode(end[-length:]):
                return end[-length:].decode("utf-8", "replace")  # two U+FFFD for half a surrogate
        return ""

    def _without_half(self, text: str) -> str:
        """Remove the U+FFFD of the prompt's incomplete character, if the output has not completed it."""
        if self._half and text:
            half, self._half = self._half, ""
            return text.removeprefix(half)
        return text


def last_with_text(tokenizer: Tokenizer, ids: Sequence[int], hidden: Collection[int]) -> list[int]:
    """Return the last tokens that have text, as many as an incomplete character at their end can have.

    As the `context` of a Detokenizer they do for all ids, which can be many tokens without text.
    """
    last: list[int] = []
    for token_id in reversed(ids):
        if token_id not in hidden and tokenizer.decoder.piece(token_id, token_id):
            last.append(token_id)
            if len(last) == 3:  # an incomplete character has at most three bytes, a token at least one
                break
    return last[::-1]


def text_offsets(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool = False) -> list[int]:
    """Return the offset of each token in the text of them all, in characters."""
    stream = Detokenizer(tokenizer, hidden=tokenizer.special_ids if skip_special else ())
    offsets = []
    for token_id in ids:
        stream.feed(token_id)
        offsets.append(stream.start)
    return offsets
