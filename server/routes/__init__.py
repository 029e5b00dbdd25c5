"""The routes, by what they serve."""

from . import chat, completions, embeddings, ops, responses, tokens

ROUTERS = (chat.router, completions.router, responses.router, embeddings.router, tokens.router, ops.router)
