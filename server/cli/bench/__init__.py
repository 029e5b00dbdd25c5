"""The measuring harness of `pequod bench`.

`session` starts a Pequod or connects to an OpenAI-compatible URL; `client` sends a request and records the time of each
token; `load` makes prompts and arrival times; `figures` computes percentiles and medians; `show` and `plots` print and
draw them. Each command is a module with `add_arguments` and `run`; `measure` returns its result for JSON, and `shown`
that result as text. Code that needs torch runs as `python -m engine.…`.
"""
