"""Marks with which clients say what is worth caching: accepted, since cached prefixes are found without them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..http.fields import LABEL, Wire
from . import notes

CacheMark = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=64)]], Field(max_length=8)
]
CacheLabel = Annotated[CacheMark | None, LABEL, Field(exclude=True), notes.CACHE]


class Marked(Wire):
    """A message, a part of one or a tool, which may have a mark in Anthropic's form."""

    cache_control: CacheLabel = None
