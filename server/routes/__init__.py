"""The routes, by what they serve."""

from . import chat, completions, embeddings, messages, ops, responses, tokens

ROUTERS = (
    chat.router,
    completions.router,
    responses.router,
    embeddings.router,
    messages.router,
    tokens.router,
    ops.router,
)
