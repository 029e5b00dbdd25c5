"""StopString and StopMatcher: where a stop string is in a stream of text."""

from __future__ import annotations


class StopString:
    """A stop string with its table for the search in linear time (Knuth, Morris, Pratt); all choices share it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.shorter = [0]  # of each prefix: the length of its longest proper prefix that is also its suffix
        for character in text[1:]:
            length = self.shorter[-1]
            while length and text[length] != character:
                length = self.shorter[length - 1]
            self.shorter.append(length + (text[length] == character))


class StopMatcher:
    """Finds a stop string in one stream of text."""

    def __init__(self, stop: StopString) -> None:
        self.text = stop.text
        self.matched = 0  # length of the longest prefix of the stop string that the text ends with
        self._shorter = stop.shorter

    def feed(self, piece: str) -> list[int]:
        """Return the ends of all occurrences that end in `piece`, as offsets in it."""
        stop, shorter, matched = self.text, self._shorter, self.matched
        ends: list[int] = []
        if matched == 0 and stop[0] not in piece:
            return ends
        for end, character in enumerate(piece, 1):
            while matched and stop[matched] != character:
                matched = shorter[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                ends.append(end)
                matched = shorter[-1]
        self.matched = matched
        return ends
