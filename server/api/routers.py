"""The routers of all APIs, in the order of the API page."""

from .anthropic import routes as messages
from .chat import routes as chat
from .completions import routes as completions
from .embeddings import routes as embeddings
from .ops import routes as ops
from .rerank import routes as rerank
from .responses import routes as responses
from .tokenize import routes as tokens
from .webui import routes as webui

ROUTERS = (
    chat.router,
    completions.router,
    responses.router,
    embeddings.router,
    rerank.router,
    messages.router,
    tokens.router,
    ops.router,
    webui.router,
)
