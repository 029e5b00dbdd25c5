"""The routes, by what they serve."""

from . import chat, completions, embeddings, messages, ops, tokens

ROUTERS = (chat.router, completions.router, embeddings.router, messages.router, tokens.router, ops.router)
