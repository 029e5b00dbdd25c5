"""Token ids to text, a piece at a time: no half characters, no text beyond a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import NamedTuple

from .tokenizer import Tokenizer


class Piece(NamedTuple):
    """What a feed made certain."""

    text: str = ""
    stopped: bool = False  # a stop string is complete: the text ends here
    num_tokens: int = 0  # fed tokens that count, up to and including the one that completed a stop string
    offsets: tuple[int, ...] = ()  # per token that counts: where its text begins in the whole output, in characters


class Stop:
    """Finds one stop string in text that comes in pieces, in time linear in the text (Knuth, Morris, Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # length of the longest beginning of the stop string that the text so far ends with
        self._shorter = [0]  # per beginning of the stop string: its longest proper beginning that is also its end
        for letter in text[1:]:
            length = self._shorter[-1]
            while length and text[length] != letter:
                length = self._shorter[length - 1]
            self._shorter.append(length + (text[length] == letter))

    def feed(self, piece: str) -> list[int]:
        """Ends, counted from the beginning of `piece`, of all occurrences that end in it."""
        stop, shorter, matched = self.text, self._shorter, self.matched
        ends: list[int] = []
        if matched == 0 and stop[0] not in piece:
            return ends
        for position, letter in enumerate(piece, 1):
            while matched and stop[matched] != letter:
                matched = shorter[matched - 1]
            if stop[matched] == letter:
                matched += 1
            if matched == len(stop):
                ends.append(position)
                matched = shorter[-1]
        self.matched = matched
        return ends


class TextStream:
    """The text of one growing list of token ids.

    `context` is the prompt's ids (or their end): with it, the pieces joined are what decoding prompt and output
    together adds to decoding the prompt. The first token at which a stop string is complete ends the text; of
    several that one token completes, the one that begins first. A stop string that is complete within the first
    `min_tokens` tokens does not count. `strip`: a text that nothing comes before loses the space that some
    vocabularies put before every word; where a grammar counts each letter it must not. The pieces joined do not
    depend on how the ids were cut into feeds. Tokens that are `hidden` have no
    text; None: the special ones.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        hidden: Collection[int] | None = None,
        context: Sequence[int] = (),
        min_tokens: int = 0,
        strip: bool = True,
    ) -> None:
        self.stopped = False
        self.stop: str | None = None  # the stop string that ended the text
        self.offset = 0  # characters decoded so far: where the next token's text begins
        self._decoder = tokenizer.decoder
        self._hidden = tokenizer.special_ids if hidden is None else hidden
        self._stops = [Stop(stop) for stop in stops if stop]
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._strip = strip
        self._num_tokens = 0
        self._held = ""  # decoded, and perhaps the beginning of a stop string
        self._after: int | None  # the last token that has text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._half = self._read_context(context)

    def feed(self, token_ids: Sequence[int]) -> Piece:
        """Append tokens; after a stop string nothing counts any more."""
        ready: list[str] = []
        offsets: list[int] = []
        for token_id in token_ids:
            if self.stopped:
                break
            offsets.append(self.offset)
            ready.append(self._append(token_id))
        return Piece("".join(ready), self.stopped, len(offsets), tuple(offsets))

    def finish(self) -> Piece:
        """The text held back; half a character becomes U+FFFD, in which no stop string is looked for."""
        if self.stopped:
            return Piece(stopped=True)
        rest = self._without_half(self._utf8.decode(b"", True))
        self.offset += len(rest)
        held, self._held = self._held + rest, ""
        return Piece(held)

    def _append(self, token_id: int) -> str:
        """Text that one more token makes certain."""
        self._num_tokens += 1
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
        self.offset += len(new)
        if not self._stops:
            return new
        match = self._find(new)
        text = self._held + new
        if match is not None:
            start, end, self.stop = match
            self.stopped = True
            self._held = ""
            return text[: len(text) - len(new) + (end if self._include_stop else start)]
        keep = 0 if self._include_stop else max(stop.matched for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _find(self, new: str) -> tuple[int, int, str] | None:
        """Start (negative: in the held text), end in `new` and stop string of the occurrence that ends the text."""
        found = [(end - len(stop.text), end, stop.text) for stop in self._stops for end in stop.feed(new)]
        return min(found, default=None) if self._num_tokens > self._min_tokens else None

    def _read_context(self, context: Sequence[int]) -> str:
        """Begin behind the prompt; returns what it shows for half a character at its end, which output may complete."""
        last: list[int] = []
        for token_id in reversed(context):
            if token_id not in self._hidden and self._decoder.piece(token_id, token_id):
                last.append(token_id)
                if len(last) == 3:  # half a character has at most three bytes, a token at least one
                    break
        end = b"".join(self._decoder.piece(token_id, token_id) or b"" for token_id in reversed(last))
        self._after = last[0] if last else None
        for length in range(1, min(3, len(end)) + 1):
            if not self._utf8.decode(end[-length:]):
                return end[-length:].decode("utf-8", "replace")  # two U+FFFD where it is half a surrogate
        return ""

    def _without_half(self, text: str) -> str:
        """If the prompt's half character was never completed, its U+FFFD is the prompt's."""
        if self._half and text:
            half, self._half = self._half, ""
            return text.removeprefix(half)
        return text


def text_offsets(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool = False) -> list[int]:
    """Where each token's text begins in the text of them all, in characters."""
    return list(TextStream(tokenizer, hidden=tokenizer.special_ids if skip_special else ()).feed(ids).offsets)
