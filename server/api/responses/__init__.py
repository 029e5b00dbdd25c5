"""POST /v1/responses, stored responses and background work."""
