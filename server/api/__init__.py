"""The APIs: one folder each, with its routes, requests and responses, and what they share beside them."""
