"""Health, version, models, metrics, and the page about the API."""
