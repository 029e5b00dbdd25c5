"""POST /v1/rerank and POST /v1/score."""
