"""Sends requests that differ from a plain one in what a test is about, and reads what the answers tell."""

import concurrent.futures
import json

from tests.live import eventually
from tests.server.wire import CHAT, COMPLETIONS, EMBEDDINGS, RERANK, RESPONSES, SCORE, chunks

TOKENIZE, DETOKENIZE, TEMPLATE = "/tokenize", "/detokenize", "/apply-template"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
QUESTION = [{"role": "user", "content": "What is continuous batching?"}]
BASE = {
    CHAT: {"messages": QUESTION, "max_tokens": 12, "temperature": 0},
    COMPLETIONS: {"prompt": "The captain", "max_tokens": 12, "temperature": 0},
    EMBEDDINGS: {"input": "The captain"},
    RERANK: {"query": "a", "documents": ["b"]},
    SCORE: {"text_1": "a", "text_2": "b"},
    TOKENIZE: {},
    DETOKENIZE: {},
    TEMPLATE: {"messages": QUESTION},
    RESPONSES: {"input": QUESTION, "max_output_tokens": 12, "temperature": 0},
    MESSAGES: {"messages": QUESTION, "max_tokens": 12, "temperature": 0},
    COUNT_TOKENS: {"messages": QUESTION},
}
# With reason="capacity": those that the scheduler has; others are counted before their prompts are encoded.
WAITING = "vllm:num_requests_waiting_by_reason"
END = 2  # <|im_end|> of the built-in model


def begun(server):
    """The engine's requests, in the order of their first steps. Their ids count up as they come."""
    text = server.steps.read_text()
    steps = [json.loads(line) for line in text[: text.rfind("\n")].splitlines()]
    return [*dict.fromkeys(id for step in steps for id, _ in step["rows"])]


def ask_out_of_turn(e, **more):
    """Send two requests while another one runs, and see that the second to come is served first."""
    body = {"prompt": "The captain", "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with concurrent.futures.ThreadPoolExecutor(2) as pool, e.server.paced():
        with e.client.stream("POST", COMPLETIONS, json=body) as answer:
            lines = answer.iter_lines()  # held: an iterator that nobody has closes the connection
            next(lines)
            sent = []
            for priority in (5, 4):
                sent.append(pool.submit(e.ask, **more, priority=priority))
                eventually(lambda: e.server.metric(WAITING, reason="capacity") == len(sent))
        for each in sent:
            each.result()
    eventually(lambda: begun(e.server)[-2:] == sorted(begun(e.server))[:-3:-1])


class Endpoint:
    """One path of a running server."""

    def __init__(self, server, path):
        self.server, self.path, self.client = server, path, server.client

    def post(self, **more):
        return self.client.post(self.path, json={**BASE[self.path], **more})

    def ask(self, **more):
        response = self.post(**more)
        assert response.status_code == 200, response.text
        return response.json()

    def choices(self, **more):
        return self.ask(**more, return_token_ids=True)["choices"]

    def tokens(self, **more):
        return self.choices(**more)[0]["token_ids"]

    def text(self, **more):
        [choice] = self.choices(**more)
        return choice["message"]["content"] if self.path == CHAT else choice["text"]

    def prompt(self, **more):
        """The prompt's ids."""
        answer = self.ask(**more, return_token_ids=True)
        return (answer if self.path == CHAT else answer["choices"][0])["prompt_token_ids"]

    def shown(self, **more):
        """The prompt as text, or what of it the endpoint tells."""
        if self.path == TEMPLATE:
            return self.ask(**more)["prompt"]
        return self.decode(self.ask(**more)["tokens"] if self.path == TOKENIZE else self.prompt(**more))

    def logprobs(self, **more):
        """Per token its log-probability and how many likely ones are beside it."""
        told = self.choices(**more)[0]["logprobs"]
        if self.path == CHAT:
            return [(entry["logprob"], len(entry["top_logprobs"])) for entry in told["content"]]
        return list(zip(told["token_logprobs"], map(len, told["top_logprobs"]), strict=True))

    def stream(self, **more):
        response = self.post(**more, stream=True)
        assert response.headers["content-type"].startswith("text/event-stream"), response.text
        return chunks(response.text)

    def decode(self, ids):
        return self.client.post(DETOKENIZE, json={"tokens": ids}).json()["prompt"]
