"""The routes, by what they serve."""

from . import chat, completions, ops, responses, tokens

ROUTERS = (chat.router, completions.router, responses.router, tokens.router, ops.router)
