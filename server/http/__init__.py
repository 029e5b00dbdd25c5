"""HTTP: uvicorn's server and connections, middleware, keys, admission, request bodies, errors, server-sent events."""
