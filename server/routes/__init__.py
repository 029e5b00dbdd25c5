"""The routes, by what they serve."""

from . import chat, completions, messages, ops, tokens

ROUTERS = (chat.router, completions.router, messages.router, tokens.router, ops.router)
