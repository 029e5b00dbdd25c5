"""The routes, by what they serve."""

from . import chat, completions, ops, tokens

ROUTERS = (chat.router, completions.router, tokens.router, ops.router)
