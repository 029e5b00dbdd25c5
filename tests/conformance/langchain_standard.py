"""langchain-tests' standard suites, bound to a running Pequod; tests.conformance.langchain runs this file with pytest.

PEQUOD_URL, PEQUOD_KEY and PEQUOD_MODEL say where the server is. Inputs that are images, audio or PDF files stay
switched off: the suite downloads them, and Pequod takes text only.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from typing import Any

import httpx
import pytest
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests, EmbeddingsUnitTests

URL, KEY, MODEL = os.environ["PEQUOD_URL"], os.environ["PEQUOD_KEY"], os.environ["PEQUOD_MODEL"]
OTHER_MODEL = os.environ["PEQUOD_OTHER_MODEL"]


def statuses() -> Counter[str]:
    """The number of responses that the server has sent to requests for a model, by status."""
    page = httpx.get(f"{URL}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=60).raise_for_status()
    counts: Counter[str] = Counter()
    for line in page.text.splitlines():
        if line.startswith("http_requests_total{") and 'method="POST"' in line:
            counts[re.search(r'status="(\w+)"', line)[1]] += int(float(line.rpartition(" ")[2]))
    return counts


@pytest.fixture(autouse=True)
def recorded_statuses(request, record_property):
    """Record which HTTP statuses a test saw: an expectation of a refusal or of a wrong answer depends on them."""
    if request.node.get_closest_marker("vcr"):  # It would answer our requests from its recordings.
        yield
        return
    before = statuses()
    yield
    record_property("statuses", " ".join(sorted((statuses() - before).keys())))


def token(character: str) -> int:
    """The id of the token that is this character."""
    body, headers = {"model": MODEL, "prompt": character}, {"Authorization": f"Bearer {KEY}"}
    [found] = httpx.post(f"{URL}/tokenize", json=body, headers=headers, timeout=60).raise_for_status().json()["tokens"]
    return found


class Helped:
    """A bias of the request stands in for what the built-in model cannot do: end strings and objects of JSON, and copy
    the 3 of the suite's question into the forced call."""

    @pytest.fixture
    def model(self, request):
        given = {**self.standard_chat_model_params, **self.chat_model_params, **(getattr(request, "param", None) or {})}
        if "structured_output" in request.node.name or "tool_calling" in request.node.name:
            # Where several may follow, a string ends before an object, and an object before a number goes on.
            given.update(self.with_fields({"logit_bias": {token('"'): 90, token("}"): 60, token("3"): 30}}))
        return self.chat_model_class(**given)


class Chat:
    def with_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The client's arguments for fields of the body that it does not know."""
        return {"extra_body": fields}

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY, "temperature": 0, "stream_usage": True}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        env = {"OPENAI_API_KEY": KEY, "OPENAI_API_BASE": f"{URL}/v1"}
        return env, {"model": MODEL}, {"openai_api_key": KEY, "openai_api_base": f"{URL}/v1"}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return OTHER_MODEL

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = self.chat_model_class(**{**self.standard_chat_model_params, **self.chat_model_params})
        if not stream:
            return model.invoke("Hello")
        whole: Any = None
        for chunk in model.stream("Hello"):
            whole = chunk if whole is None else whole + chunk
        return whole


class Responses(Chat):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}


class Messages(Chat):
    def with_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model_kwargs": {"extra_body": fields}}

    @property
    def chat_model_class(self) -> type[ChatAnthropic]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "base_url": URL, "api_key": KEY, "temperature": 0}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        env = {"ANTHROPIC_API_KEY": KEY, "ANTHROPIC_API_URL": URL}
        return env, {"model": MODEL}, {"anthropic_api_key": KEY, "anthropic_api_url": URL}

    @property
    def supports_json_mode(self) -> bool:
        return False  # LangChain has no such mode for Anthropic's API.


class TestChat(Helped, Chat, ChatModelIntegrationTests):
    pass


class TestResponses(Helped, Responses, ChatModelIntegrationTests):
    pass


class TestMessages(Helped, Messages, ChatModelIntegrationTests):
    pass


class TestChatUnit(Chat, ChatModelUnitTests):
    pass


class TestResponsesUnit(Responses, ChatModelUnitTests):
    pass


class TestMessagesUnit(Messages, ChatModelUnitTests):
    pass


class Vectors:
    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        # With the check LangChain downloads a tokenizer of OpenAI's and sends its token ids.
        return {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY, "check_embedding_ctx_length": False}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        env = {"OPENAI_API_KEY": KEY, "OPENAI_API_BASE": f"{URL}/v1"}
        return env, {"model": MODEL}, {"openai_api_key": KEY, "openai_api_base": f"{URL}/v1"}


class TestEmbeddings(Vectors, EmbeddingsIntegrationTests):
    pass


class TestEmbeddingsUnit(Vectors, EmbeddingsUnitTests):
    pass
