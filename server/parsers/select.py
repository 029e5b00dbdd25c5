"""The table of scanners by format."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .deepseek import DeepSeek
from .formats import BLOCKS, Formats, answer, in_messages
from .gemma import Gemma
from .glm import Glm
from .glm4 import Glm4
from .harmony import Harmony
from .json_objects import Hermes, Hunyuan, Llama, Mistral, Nemotron, Objects
from .kimi import Kimi
from .minimax import MiniMax
from .parts import MessageParser, Plain, Schema
from .qwen_coder import Coder
from .scanner import Scanner
from .seed_oss import SeedOss
from .solar import Solar

SCANNERS: dict[str, type[Scanner]] = {
    "hermes": Hermes,
    "llama3_json": Llama,
    "mistral": Mistral,
    "mistral_v11": Mistral,
    "qwen3_coder": Coder,
    "glm4": Glm4,
    "glm45": Glm,
    "seed_oss": SeedOss,
    "minimax_m2": MiniMax,
    "nemotron_json": Nemotron,
    "hunyuan": Hunyuan,
    "hunyuan_a13b": Hunyuan,
    "deepseek_v3": DeepSeek,
    "deepseek_v31": DeepSeek,
    "kimi_k2": Kimi,
    "solar_open": Solar,
    "gpt_oss": Harmony,
    "gemma4": Gemma,
    "json": Objects,
}


def message_parser(
    formats: Formats,
    *,
    tools: Mapping[str, Schema],
    opened: bool,
    new_id: Callable[[], str],
    closes_reasoning: bool = False,
) -> MessageParser:
    """Return a parser of one choice's text, in which the tokens of `delimiters(formats)` must be visible.

    `tools`: the functions that may be called, with the schemas of their arguments; if there are none, the delimiters
    of calls are text. `opened`: the prompt ends inside of a block of reasoning. `new_id` makes the ids of calls.
    `closes_reasoning`: a grammar ensures that calls come after the reasoning.
    """
    if (shared := in_messages(formats)) is not None:
        return SCANNERS[shared](tools, BLOCKS[shared], opened=opened, new_id=new_id)
    block = BLOCKS[formats.reasoning] if formats.reasoning else None
    scanner = SCANNERS[formats.tools] if formats.tools and tools else Scanner
    if scanner is Scanner and block is None:
        return Plain()
    return scanner(
        tools, block, opened=opened, new_id=new_id, closes_reasoning=closes_reasoning, answer=answer(formats)
    )
