"""The routes, by what they serve."""

from . import chat, completions, embeddings, ops, tokens

ROUTERS = (chat.router, completions.router, embeddings.router, tokens.router, ops.router)
