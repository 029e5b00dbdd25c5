"""StopMatcher: where a stop string is in a stream of text."""

from __future__ import annotations


class StopMatcher:
    """Finds a stop string in a stream of text, in linear time (Knuth, Morris, Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # length of the longest prefix of the stop string that the text ends with
        self._shorter = [0]  # of each prefix: its longest proper prefix that is also its suffix
        for character in text[1:]:
            length = self._shorter[-1]
            while length and text[length] != character:
                length = self._shorter[length - 1]
            self._shorter.append(length + (text[length] == character))

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
