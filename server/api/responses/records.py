"""A stored response as the store holds it, and its JSON."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

ROW_BYTES = 512  # of a row besides its texts


class Record(NamedTuple):
    """A stored response, and the conversation that led to it."""

    id: str
    owner: str  # the only one who may see it: a hash of the API key
    is_open: bool  # it is still being generated
    answer: bytes  # the response as JSON
    items: bytes  # the conversation before it as JSON
    payer: str = ""  # whose share it counts against; "": the owner's, as always where there are keys

    @property
    def share(self) -> str:
        return self.payer or self.owner

    @property
    def num_bytes(self) -> int:
        return len(self.answer) + len(self.items) + ROW_BYTES


def unpacked(data: bytes | msgspec.Raw) -> Any:
    """Decode a record's JSON."""
    return msgspec.json.decode(data)


def elements(data: bytes) -> list[msgspec.Raw]:
    """Return the elements of a record's JSON array, not decoded.

    Decoding them one by one lets other threads run in between; msgspec holds the interpreter's lock during a call.
    """
    return msgspec.json.decode(data, type=list[msgspec.Raw])
