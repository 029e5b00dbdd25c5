"""The questions and answers that the built-in model is trained on, all written for it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """A fact: its answers, and the ways to ask for it."""

    answers: tuple[str, ...]
    topics: tuple[str, ...] = ()  # "what is ..."
    places: tuple[str, ...] = ()  # "where is ..."
    actions: tuple[str, ...] = ()  # "how do I ..."
    asks: tuple[str, ...] = ()  # whole questions
    weight: float = 1.0


TOPIC_FRAMES = (
    "what is {}?", "what is {}?", "what are {}?", "what's {}?", "what does {} mean?", "explain {}.",
    "tell me about {}.", "how does {} work?", "how do {} work?", "can you explain {} to me?", "describe {}.", "{}?",
    "{}", "i do not understand {}.", "what is {} in Pequod?", "define {}.", "give me a short explanation of {}.",
    "what is the point of {}?", "what is the idea behind {}?", "what do you know about {}?", "does Pequod have {}?",
    "does Pequod support {}?", "why is there {}?", "what should I know about {}?", "what does {} do?",
    "is there {}?", "how does Pequod handle {}?", "someone mentioned {}. What is that?", "what is meant by {}?",
    "i keep reading about {}, what is it?", "teach me about {}.", "why do you use {}?",
    "in simple words, what is {}?", "what is so good about {}?", "how does the server do {}?",
    "my question is about {}.", "a word about {}, please.", "does this thing know {}?",
    "would you tell me what {} is?", "how would you describe {}?", "{}, what is it?",
    "please say something about {}.", "what happens with {}?", "when do I need {}?", "what is {} good for?",
    "i heard of {} but what does it do?", "is {} supported here?",
)  # fmt: skip

PLACE_FRAMES = (
    "where is {}?", "where are {}?", "where do I find {}?", "where can I find {}?", "where can I see {}?",
    "at which address is {}?", "what is the path of {}?", "which url has {}?", "which endpoint gives {}?",
    "what is the url for {}?", "which path do I open for {}?", "how do I get to {}?", "how do I see {}?",
    "i am looking for {}.", "is there {}?", "show me {}.", "where does Pequod put {}?", "i need {}.",
    "how can I read {}?", "which address do I call for {}?", "does the server have {}?", "{}?", "{}",
    "what is the address of {}?", "where should I look for {}?", "i want to see {}, where is that?",
    "can you point me to {}?", "which route serves {}?", "i cannot find {}.", "what path has {}?",
    "my tool needs {}, what path is it?", "give me the link to {}.", "where would I go for {}?",
)  # fmt: skip

ACTION_FRAMES = (
    "how do I {}?", "how do I {}?", "how can I {}?", "how to {}?", "how would I {}?", "how do you {}?",
    "what is the way to {}?", "tell me how to {}.", "show me how to {}.", "i want to {}.",
    "i would like to {}. How?", "is it possible to {}?", "can I {}?", "can Pequod {}?", "what do I need to {}?",
    "what do I type to {}?", "explain how to {}.", "i need to {}.", "could you help me {}?",
    "what is the best way to {}?", "which command lets me {}?", "steps to {}", "is there a way to {}?",
    "how does one {}?", "what must I do to {}?", "am I able to {}?", "what should I run to {}?",
    "what do I have to do if I want to {}?", "let me {}.", "{}", "my team wants to {}. What do we do?",
    "how is it possible to {}?", "i am trying to {}.", "we plan to {}, how do we do that?", "where do I {}?",
    "what would you do to {}?", "does the server let me {}?", "suppose I want to {}, what then?",
    "how could somebody {}?", "what option do I use to {}?", "please help, I have to {}.",
    "i would love to {}, is there an option?", "which setting do I need to {}?", "if I wish to {}, what do I write?",
    "what does it take to {}?",
)  # fmt: skip

OPENINGS = (
    "hi, ", "hello, ", "hey, ", "hi! ", "hello! ", "hey there, ", "good morning, ", "please, ", "ok, ", "so, ",
    "well, ", "and ", "now, ", "sorry, ", "excuse me, ", "quick question: ", "one question: ", "i have a question: ",
    "dear Pequod, ", "ahoy, ", "i am new here. ", "my boss asks: ", "just curious: ", "a friend wants to know: ",
    "tell me, ", "say, ", "could you tell me: ", "do you know: ", "i read the docs and I am lost. ",
    "this may be a silly question: ", "one more thing: ", "before I forget: ", "i have just installed this. ",
    "we use this at work. ", "ok thanks, ", "for my project: ", "i am writing a small program. ",
    "let us talk about something else. ",
)  # fmt: skip

ENDINGS = (
    " please", " please.", " thanks", " Thanks!", " Thank you.", " in Pequod", " here", " with this server",
    " Any idea?", " I could not find it.", " Explain it briefly.", " In one sentence, please.", " I am curious.",
    " Keep it short.", " Do you know?", " I am not sure.", " exactly", " for me", " today", " on this machine",
    " with you", " Be brief.", " Tell me in simple words.", " I forgot.", " then",
)  # fmt: skip

FILLERS = (
    "the", "a", "this", "that", "my", "really", "just", "now", "then", "also", "please", "again", "very", "exactly",
    "maybe", "actually", "so", "well", "simply", "quickly", "some", "all", "here", "there", "old", "own", "big",
    "long", "little", "good", "right", "always", "would", "should", "could", "will", "may", "do", "does", "is",
    "are", "be", "to", "of", "in", "on", "with", "for", "and", "or", "but", "if", "it", "you", "we", "they", "me",
    "us", "your", "our", "one", "thing", "people", "work", "use", "make", "day",
)  # fmt: skip

FACTS: dict[str, Fact] = {
    "start": Fact(
        answers=(
            "Run make serve in the repository, or pequod serve MODEL for a model of your choice. "
            "The server then listens on port 8000.",
        ),
        topics=("make serve", "the start command", "pequod serve", "the quick start", "starting up"),
        actions=(
            "start the server", "start Pequod", "run Pequod", "launch the server", "launch Pequod", "get going",
            "begin", "get started", "start it", "bring the server up", "boot the server", "get it running",
            "run the server", "start serving", "run this on my laptop", "fire up the server", "start you",
            "set it up", "run it at home", "serve the built-in model",
        ),
        asks=(
            "which command starts the server?", "what do I run first?", "how does the server start?",
            "what is the command to start?", "how is Pequod started?", "the server is not running, what now?",
            "what is the first step?", "which command do I type first?",
        ),
    ),
    "port": Fact(
        answers=("Pequod listens on port 8000 by default, so the address is http://localhost:8000.",),
        topics=(
            "the default port", "the port", "port 8000", "the port number", "the listening port", "the TCP port",
        ),
        places=(
            "the server", "the default port", "the address of the server", "the host and port", "localhost",
        ),
        actions=(
            "find the port", "connect to the server", "reach the server", "connect my client",
            "open a connection to Pequod",
        ),
        asks=(
            "which port does Pequod use?", "which port is it?", "what port does the server listen on?",
            "on which port does it run?", "which port do I connect to?", "what port should my client use?",
            "is it port 80 or 8000?", "which port is open?", "what is the address of the server?",
            "to which port do I send requests?", "on what port are you listening?", "which port by default?",
            "what number is the port?", "which address does the server listen on?", "port number?",
        ),
    ),
    "pequod": Fact(
        answers=(
            "Pequod is an OpenAI-compatible server for language models. It is written in Python and "
            "runs on CPU and GPU.",
        ),
        topics=(
            "Pequod", "this server", "this project", "the Pequod server", "this software", "this program",
            "this tool",
        ),
        asks=(
            "what kind of server is this?", "what is this server for?", "what does Pequod do?", "what is all this?",
            "what can Pequod be used for?", "what sort of software is Pequod?", "why would I use Pequod?",
            "what am I running here?", "explain Pequod in one sentence.", "is Pequod a model or a server?",
        ),
        weight=1.3,
    ),
    "client": Fact(
        answers=(
            "Yes, Pequod is OpenAI-compatible: point your client at http://localhost:8000/v1 and keep "
            "the rest of your code.",
        ),
        topics=(
            "the OpenAI API", "OpenAI compatibility", "the OpenAI client", "the base url", "the base_url",
            "the API format", "the API", "the OpenAI library", "the OpenAI SDK", "the OpenAI protocol",
        ),
        places=(
            "the chat endpoint", "the OpenAI API", "the chat completions endpoint", "the API",
            "the completions route",
        ),
        actions=(
            "use the OpenAI client", "use the OpenAI library", "call it with the OpenAI SDK",
            "use my old OpenAI code", "send a request", "call the API", "call the server from my code",
            "use it from my program", "set the base url", "post a chat completion",
            "connect with the OpenAI package",
        ),
        asks=(
            "does it work with the OpenAI client?", "is it compatible with OpenAI?", "are you OpenAI compatible?",
            "which base url do I set?", "does my OpenAI code still work?", "which API do you speak?",
            "do existing OpenAI programs work with it?", "can the OpenAI client talk to you?", "which clients work?",
        ),
    ),
    "stream": Fact(
        answers=(
            'Send "stream": true in the request and read the server-sent events. The last event is data: [DONE].',
        ),
        topics=(
            "streaming", "the stream", "streamed answers", "server-sent events", "SSE", "token streaming",
            "stream true", "the stream option", "[DONE]", "data: [DONE]", "the last event of a stream",
        ),
        actions=(
            "stream", "stream the answer", "stream the reply", "stream tokens", "get the answer piece by piece",
            "see the words as they come", "turn on streaming", "enable streaming", "switch streaming on",
            "use streaming", "receive tokens one by one", "read the answer while it is written", "stream the output",
            "watch the text appear", "get a streamed response", "get server-sent events", "stream a chat",
            "show the answer word by word", "have a live answer", "activate streaming",
        ),
        asks=(
            "do you support streaming?", "is streaming possible?", "how does a stream end?", "what ends the stream?",
            "what is the last event of the stream?", "how do I know that a stream is over?",
            "do I have to wait for the whole answer?", "can the text come bit by bit?",
            "can tokens arrive as they are made?", "how is streaming turned on?", "what flag turns streaming on?",
        ),
        weight=1.3,
    ),
    "metrics": Fact(
        answers=("The metrics are at /metrics, in Prometheus format.",),
        topics=(
            "metrics", "the metrics", "monitoring", "Prometheus", "the Prometheus format", "/metrics",
            "the statistics", "the counters",
        ),
        places=(
            "the metrics", "metrics", "the Prometheus metrics", "the statistics", "the counters",
            "the numbers for Prometheus", "the monitoring page", "the performance numbers", "the metrics endpoint",
            "the server statistics",
        ),
        actions=(
            "monitor the server", "watch the server", "scrape the metrics", "see the load", "connect Prometheus",
            "use Prometheus", "get statistics", "draw a dashboard", "use Grafana", "measure the traffic",
            "see how busy the server is", "count the requests", "collect metrics", "observe the server",
            "let Prometheus read the numbers", "graph the latency",
        ),
        asks=(
            "how many requests are running?", "what should Prometheus scrape?", "in which format are the metrics?",
            "does it work with Prometheus?", "which path do I give to Prometheus?", "can I scrape you?",
            "how is the server monitored?", "is there something for Grafana?", "how fast is the server?",
        ),
    ),
    "health": Fact(
        answers=(
            "The health endpoints are /live, /ready and /health: use /live for liveness and /ready for readiness.",
        ),
        topics=(
            "the health check", "health", "/health", "/ready", "/live", "readiness", "liveness",
            "the readiness probe", "the liveness probe", "health checks",
        ),
        places=(
            "the health endpoint", "the health check", "the readiness probe", "the liveness probe", "health",
            "the health of the server", "the status of the server", "the ready endpoint", "the live endpoint",
        ),
        actions=(
            "check the health", "check that the server is alive", "know whether the server is up",
            "see if it is ready", "test that the server is ready", "probe the server", "set up a health check",
            "see if the server lives", "write a Kubernetes probe", "ask if it is healthy",
            "tell Kubernetes that it is ready", "ping the server",
        ),
        asks=(
            "is the server healthy?", "is the server up?", "is it ready?", "are you ready for requests?",
            "is the server alive?", "which probe should Kubernetes use?", "what do I put in the readiness probe?",
            "what does my load balancer check?", "which path says that the server is ready?",
        ),
    ),
    "load": Fact(
        answers=(
            "Run pequod serve Qwen/Qwen3-0.6B, or give pequod serve a local folder with safetensors files.",
        ),
        topics=(
            "a different model", "another model", "other models", "loading a model", "a local model",
            "a larger model", "a hub model", "Qwen", "safetensors",
        ),
        actions=(
            "load another model", "load a different model", "use another model", "use a bigger model", "serve Qwen",
            "serve my own model", "change the model", "switch the model", "load a model from a folder", "run Qwen3",
            "load a model from a local folder", "use a larger model", "load safetensors", "use local weights",
            "load my own weights", "replace the built-in model", "pick a model", "serve a local model",
            "run a better model", "download a model", "load a real model", "get a smarter model",
            "host a large model", "serve a model from the hub", "try a stronger model", "swap the model for another",
        ),
        asks=(
            "which models can I load?", "what models are there?", "can I have a bigger model?",
            "which models run here?", "i have a folder with safetensors, what now?", "is there a smarter model?",
            "can you run Qwen?", "what do I run for another model?", "this model is too small, what can I do?",
            "does it run my model?", "you are too small, how do I get a bigger one?",
            "i want a better one than you.",
        ),
        weight=1.4,
    ),
    "batching": Fact(
        answers=(
            "In continuous batching, requests join and leave the batch at every step, so that none "
            "waits for a slower one to finish.",
        ),
        topics=(
            "continuous batching", "batching", "the batching", "dynamic batching", "the batch", "in-flight batching",
            "batching of requests", "a continuous batch", "the batch scheduler", "batched requests",
        ),
        actions=(
            "serve many users at once", "answer many requests at once", "batch requests", "handle many clients",
            "run requests together", "mix several requests in a step", "serve requests at the same time",
        ),
        asks=(
            "how are requests batched?", "when does a request join the batch?",
            "when does a request leave the batch?", "does a short request wait for a long one?",
            "how do you serve many users at the same time?", "what does continuous mean in continuous batching?",
            "why is batching continuous?", "how can many requests run together?", "are requests put in a batch?",
            "how do requests share a step?", "what happens when a new request comes in?", "is the batch fixed?",
        ),
    ),
    "paged": Fact(
        answers=(
            "The KV cache is paged: keys and values are kept in blocks of 16 tokens, which are shared "
            "and freed like pages.",
        ),
        topics=(
            "the paged KV cache", "paged attention", "the KV cache", "the paged cache", "KV blocks", "cache blocks",
            "the key value cache", "paging", "the block size", "KV caching", "pages of the cache", "keys and values",
            "the blocks of the cache", "a block of the KV cache",
        ),
        places=("the KV cache", "the keys and values", "the cache blocks"),
        asks=(
            "how large is a block?", "how many tokens are in a block?", "how is the KV cache stored?",
            "what is a block?", "how are keys and values kept?", "why is the KV cache paged?",
            "what is in a cache block?", "how big are the blocks?", "why do you keep the cache in blocks?",
            "how is the cache organised?", "how is the memory of the cache divided?",
            "why does the cache use pages?", "in what are the keys and values kept?",
            "what is the size of a KV block?",
        ),
    ),
    "prefix": Fact(
        answers=(
            "Prefix caching computes a shared prompt beginning only once and reuses its blocks. It is on by default.",
        ),
        topics=(
            "prefix caching", "the prefix cache", "prompt caching", "cached prefixes", "shared prefixes",
            "prefix reuse", "the prompt cache", "prefix sharing", "a shared prompt", "a cached prompt",
            "the same prompt beginning",
        ),
        actions=(
            "reuse a prompt", "cache a prompt", "share a system prompt", "cache the beginning of a prompt",
            "turn on prefix caching", "enable prefix caching", "avoid computing a prompt twice", "reuse a prefix",
            "save work on long prompts", "make repeated prompts fast",
        ),
        asks=(
            "is the same prompt computed twice?", "is prefix caching on?", "do I have to enable prefix caching?",
            "are shared prompts computed once?", "what if two requests have the same beginning?",
            "what if many users share one system prompt?", "do you compute the same prompt again?",
            "what happens with a prompt that was seen before?", "two prompts start the same way, what happens?",
            "is work done again for the same prefix?", "will a repeated prompt be faster?",
            "does a common start of prompts get reused?",
        ),
    ),
    "preempt": Fact(
        answers=(
            "When the blocks run out, Pequod preempts: the last request is paused, its blocks are "
            "freed, and it is recomputed later.",
        ),
        topics=(
            "preemption", "a preempted request", "preempting", "running out of blocks", "a full cache",
            "a paused request", "recomputation", "the end of the free blocks", "too many requests for the cache",
            "cache exhaustion",
        ),
        actions=(
            "survive a full cache", "go on when the blocks run out", "run more requests than the cache holds",
            "pause a request",
        ),
        asks=(
            "what happens when the blocks run out?", "what happens when the cache is full?",
            "what if there are no free blocks?", "what if the KV cache is full?", "why was my request paused?",
            "which request is paused first?", "what do you do when memory for the cache is short?",
            "no more blocks, what then?", "is a paused request lost?", "when is a request preempted?",
            "what if all blocks are in use?", "what does the server do without free blocks?",
            "what happens if the cache has no room left?", "the cache is used up, what happens?",
        ),
    ),
    "apikey": Fact(
        answers=("Start the server with --api-key and a secret; clients then send it as their API key.",),
        topics=(
            "--api-key", "the API key", "API keys", "authentication", "a password", "access control", "security",
            "authorization", "login",
        ),
        actions=(
            "set an API key", "use an API key", "protect the server", "require a key", "add a password",
            "secure the server", "turn on authentication", "keep strangers out", "lock the server",
            "restrict access", "ask clients for a key", "limit who may use it", "require a secret",
        ),
        asks=(
            "do I need an API key?", "is there a password?", "who may use the server?", "which key do clients send?",
            "is the server protected?", "can everybody use my server?", "which flag sets the API key?",
            "does it check API keys?", "how is access protected?",
        ),
    ),
    "plan": Fact(
        answers=(
            "Run pequod plan MODEL: it shows the memory plan, so that you know whether the model fits.",
        ),
        topics=(
            "pequod plan", "the memory plan", "memory planning", "the plan command", "the memory need of a model",
            "memory use",
        ),
        actions=(
            "plan the memory", "see how much memory I need", "know if a model fits",
            "check that a model fits in memory", "estimate the memory", "compute the memory need",
            "see the memory plan", "know how much RAM a model takes", "find out whether my model fits",
            "calculate the memory", "size my GPU memory", "avoid running out of memory",
        ),
        asks=(
            "how much memory does a model need?", "does my model fit?", "does the model fit in memory?",
            "how much RAM do I need?", "will it fit on my GPU?", "is my memory enough?",
            "how big a model can I run?", "do I have enough memory for this model?",
            "how much GPU memory will it take?", "what does pequod plan show?",
        ),
    ),
    "doctor": Fact(
        answers=("Run pequod doctor: it checks your machine and reports what it finds.",),
        topics=(
            "pequod doctor", "the doctor", "the doctor command", "the machine check", "the self check", "diagnosis",
        ),
        actions=(
            "check my machine", "check the installation", "diagnose a problem", "find out what is wrong",
            "test my machine", "check my setup", "see if my computer is fine", "check my drivers",
            "find a problem with my machine", "examine my computer", "verify the installation", "debug my setup",
        ),
        asks=(
            "is my machine fine?", "is everything installed?", "what is wrong with my machine?",
            "it does not work, what now?", "something is broken, what do I run?",
            "which command checks the machine?", "how do I know my setup is good?",
            "is there a check of the system?", "there is an error, what can I check?",
            "who can tell me what is wrong?",
        ),
    ),
    "chat": Fact(
        answers=("Run pequod chat to talk to the model in the terminal.",),
        topics=(
            "pequod chat", "the terminal chat", "the chat command", "a chat in the terminal",
            "the command line chat",
        ),
        actions=(
            "chat in the terminal", "chat with you", "talk to the model", "chat from the command line",
            "talk to you in a shell", "have a conversation in the terminal", "try the model by hand",
            "chat without writing code", "type messages to the model", "use the chat in my console",
            "talk with the model interactively",
        ),
        asks=(
            "is there a chat program?", "is there a terminal client?", "which command opens a chat?",
            "can we talk in the terminal?", "is there an interactive mode?", "do I need a browser to chat?",
        ),
    ),
    "docs": Fact(
        answers=("The documentation is at /docs on the running server.",),
        topics=("/docs", "the docs", "the documentation", "the manual", "the API reference"),
        places=(
            "the docs", "the documentation", "the manual", "the handbook", "the API reference", "the help pages",
            "the guide", "more information", "the docs page", "a description of the API", "the user guide",
        ),
        actions=(
            "read the docs", "read the documentation", "learn more", "open the manual", "read more about Pequod",
        ),
        asks=(
            "is there documentation?", "do you have a manual?", "where can I read more?",
            "where is everything explained?", "is there a page that explains the API?",
        ),
    ),
    "config": Fact(
        answers=("Configure Pequod with command-line flags, PEQUOD_ environment variables, or a TOML file.",),
        topics=(
            "the configuration", "the settings", "the options", "the config file", "the TOML file",
            "environment variables", "PEQUOD_ variables", "the flags", "command-line flags", "TOML", "configuration",
        ),
        places=("the configuration", "the settings", "the config file", "the options"),
        actions=(
            "configure Pequod", "configure the server", "change the settings", "set an option", "use a config file",
            "set environment variables", "write a TOML file", "change an option", "change the port",
            "tune the server", "adjust the settings", "use a configuration file", "customize the server",
            "set a flag",
        ),
        asks=(
            "is there a config file?", "in which format is the config file?",
            "which environment variables are there?", "can it be configured?", "what can be configured?",
            "do you read environment variables?", "where do the settings come from?", "how are options given?",
        ),
    ),
    "stop": Fact(
        answers=('Send "stop" with one or more strings: the answer ends before the first of them that appears.',),
        topics=(
            "stop strings", "stop words", "the stop parameter", "a stop string", "stop sequences", "the stop option",
            "stop",
        ),
        actions=(
            "use stop strings", "stop at a word", "end the answer at a certain word", "set a stop string",
            "stop the text at a newline", "stop generation at a marker", "cut the answer at a string",
            "give stop words", "make the model stop at a phrase",
        ),
        asks=(
            "can the answer end at a given word?", "is the stop string part of the answer?",
            "are stop strings supported?", "which parameter ends the answer early?", "how do stop strings behave?",
        ),
    ),
    "seed": Fact(
        answers=('Send "seed" with a number: the same seed and the same request give the same sample again.',),
        topics=(
            "the seed", "seeds", "a seed", "random seeds", "the seed parameter", "reproducibility", "sampling seeds",
        ),
        actions=(
            "set a seed", "get the same answer again", "make the answer reproducible", "repeat a sample",
            "fix the random numbers", "get reproducible output", "use a seed", "have deterministic samples",
            "reproduce an answer", "get an identical reply twice",
        ),
        asks=(
            "what does the seed do?", "why is the answer different each time?", "is the output reproducible?",
            "are samples repeatable?", "can I fix the randomness?", "does the same seed give the same text?",
            "what is the seed for?",
        ),
    ),
    "drain": Fact(
        answers=(
            "On SIGTERM the server drains: it takes no new requests, finishes the running ones, and then exits.",
        ),
        topics=(
            "draining", "drain", "SIGTERM", "a graceful shutdown", "the shutdown", "graceful exit",
            "a clean stop of the server",
        ),
        actions=(
            "stop the server", "shut down the server", "shut Pequod down", "stop it cleanly", "drain the server",
            "end the server gracefully", "terminate the server", "kill the server without losing requests",
            "restart the server safely", "turn the server off", "quit the server",
        ),
        asks=(
            "what happens on SIGTERM?", "what happens when the server gets SIGTERM?",
            "does it finish running requests?", "are requests lost at shutdown?", "how does the server exit?",
            "what happens at a shutdown?", "what happens to running requests when I stop the server?",
            "is the shutdown graceful?",
        ),
    ),
    "whoami": Fact(
        answers=(
            "I am the small built-in demonstration model of Pequod, with a few million parameters. "
            "I know a little about the server, small sums and the sea.",
        ),
        topics=(
            "the built-in model", "your name", "this model", "the demonstration model", "the default model", "you",
        ),
        asks=(
            "who are you?", "what are you?", "what model are you?", "which model are you?", "which model is this?",
            "who am I talking to?", "are you an AI?", "are you a robot?", "are you human?", "are you ChatGPT?",
            "introduce yourself.", "tell me about yourself.", "what is your name?", "what should I call you?",
            "are you a large language model?", "what kind of model are you?", "who is this?",
            "what model is running?", "are you Qwen?", "what language model is behind this?", "are you a person?",
            "describe yourself.",
        ),
        weight=1.3,
    ),
    "size": Fact(
        answers=("I am tiny: a few million parameters, and less than 8 MB of weights.",),
        topics=(
            "your size", "the size of this model", "the number of parameters", "your parameter count",
            "the size of your weights",
        ),
        asks=(
            "how big are you?", "how large are you?", "how many parameters do you have?", "how small are you?",
            "how many parameters has this model?", "are you a big model?", "how much do you weigh?",
            "how big is your brain?", "how large is the built-in model?", "how many megabytes are your weights?",
        ),
    ),
    "made": Fact(
        answers=(
            "I was trained from scratch by python -m engine.builtin.train, on text that the script writes itself.",
        ),
        topics=(
            "your training", "your training data", "the training of the built-in model", "the training script",
            "engine.builtin.train",
        ),
        actions=(
            "train you", "train the built-in model", "make this model again", "retrain you",
            "reproduce your training",
        ),
        asks=(
            "who made you?", "how were you made?", "how were you trained?", "on what were you trained?",
            "who trained you?", "where do you come from?", "what data were you trained on?", "who built you?",
            "who is your maker?", "how did you learn this?", "when were you trained?", "who created you?",
        ),
    ),
    "can": Fact(
        answers=(
            "I can answer short questions about Pequod, add numbers up to 20 + 20, and tell a short sea story.",
        ),
        topics=("your skills", "your abilities", "your talents"),
        asks=(
            "what can you do?", "help", "help!", "help me", "can you help me?", "what do you know?",
            "what are you good at?", "what can I ask you?", "what can I ask?", "how can you help me?",
            "what questions can you answer?", "are you useful?", "what should I ask you?",
            "give me an example of what you can do.", "what are you able to do?", "what do you do?", "I need help.",
            "what topics do you know?", "what else can you do?", "are you smart?", "what are your limits?",
            "what can you not do?", "can you do anything else?", "do you know everything?",
        ),
    ),
    "name": Fact(
        answers=(
            "The name comes from Moby-Dick by Herman Melville: the Pequod is the whaling ship in that novel.",
        ),
        topics=(
            "the name Pequod", "the name of the server", "Moby-Dick", "the name", "the origin of the name",
            "the ship Pequod", "Melville", "Captain Ahab",
        ),
        places=("the name Pequod from",),
        asks=(
            "where does the name Pequod come from?", "why is it called Pequod?", "why the name Pequod?",
            "who named the server?", "what does Pequod mean?", "where does the name come from?", "is Pequod a ship?",
            "which ship is Pequod?", "what is the story of the name?", "after what is Pequod named?",
            "is it named after a ship?", "which book is the name from?", "why are you called Pequod?",
            "from which novel is the name?", "how did Pequod get its name?", "why this name?",
            "is the server named after the ship in Moby-Dick?", "which ship gave you the name?",
        ),
    ),
    "license": Fact(
        answers=("Pequod is free software under the Apache-2.0 license.",),
        topics=(
            "the license", "the licence", "the Apache license", "Apache-2.0", "your license", "the copyright",
            "the terms of use",
        ),
        places=("the license", "the licence"),
        actions=(
            "use Pequod in my company", "use it commercially", "copy your code", "change the code and sell it",
            "use the code freely", "fork the project",
        ),
        asks=(
            "is Pequod free?", "is it open source?", "which license does Pequod have?", "under which license is it?",
            "what license is the code under?", "may I use it at work?", "how much does it cost?",
            "is it free software?", "which licence does it use?", "am I allowed to use the code?",
            "do I have to pay?", "may I copy the source?",
        ),
    ),
    "tokenize": Fact(
        answers=("Send your text to /tokenize: it returns the tokens and how many there are.",),
        topics=(
            "/tokenize", "tokenization", "the tokenizer", "the tokenize endpoint", "token counting",
            "the number of tokens", "tokens",
        ),
        places=(
            "the tokenizer", "the tokenization endpoint", "the tokenize endpoint", "the token ids of a text",
        ),
        actions=(
            "count tokens", "count the tokens of a text", "tokenize a text", "tokenize text", "see the tokens",
            "get token ids", "turn text into tokens", "know how many tokens my prompt has",
            "split a text into tokens", "measure the length of a prompt", "count my tokens",
        ),
        asks=(
            "how many tokens is my text?", "how many tokens are in this sentence?",
            "how long is my prompt in tokens?", "which endpoint counts tokens?", "what tokens is my text made of?",
            "can you count tokens?",
        ),
    ),
    "python": Fact(
        answers=("Pequod is written in Python.",),
        topics=(
            "the programming language of Pequod", "the language of the code", "the source code", "Python",
            "the implementation language",
        ),
        asks=(
            "which language is Pequod written in?", "what language is it written in?", "is it written in Python?",
            "is it written in C++ or Python?", "is Pequod written in Rust?",
            "in which programming language are you written?", "what is the code written in?",
            "which programming language do you use?", "do I need to know Python?",
        ),
    ),
    "device": Fact(
        answers=("Pequod runs on CPU and on GPU. A GPU is faster, but you do not need one.",),
        topics=(
            "CPU support", "GPU support", "the hardware", "the GPU", "the CPU", "CUDA", "graphics cards",
            "a graphics card", "the hardware requirements",
        ),
        actions=(
            "run it on a CPU", "run it on a GPU", "use my GPU", "run without a GPU", "use a graphics card",
            "run it on my laptop without a GPU", "use CUDA", "run on a machine without a graphics card",
            "use only the CPU", "use an NVIDIA card",
        ),
        asks=(
            "does Pequod run on a CPU?", "does it need a GPU?", "do I need a GPU?", "do I need a graphics card?",
            "is a CPU enough?", "does it work without a GPU?", "on which hardware does it run?",
            "what hardware do I need?", "i have no GPU.", "my computer has no graphics card.",
            "does it run on CPU or GPU?", "which devices are supported?", "does it run on my laptop?",
            "i only have a CPU, is that fine?",
        ),
    ),
    "n": Fact(
        answers=('Send "n": 3 to get three choices for one prompt.',),
        topics=(
            "the n parameter", "n", "several choices", "multiple choices", "the number of choices",
            "many answers for one prompt",
        ),
        actions=(
            "get several answers", "get more than one answer", "get many choices", "get three answers",
            "ask for several choices", "have multiple answers to one prompt", "sample several replies",
            "get two replies at once", "use n", "get alternatives", "get different versions of an answer",
            "receive multiple completions",
        ),
        asks=(
            "what does n do?", "what does the n parameter do?", "can one request give several answers?",
            "is n supported?", "how many choices can I get?", "which parameter gives more choices?",
            "can you answer the same prompt several times?",
        ),
    ),
    "logprobs": Fact(
        answers=('Send "logprobs": true: each token then comes with its log probability.',),
        topics=(
            "logprobs", "log probabilities", "the logprobs", "token probabilities", "top logprobs",
            "the probability of a token", "the logprobs option",
        ),
        actions=(
            "get logprobs", "get log probabilities", "see the probability of each token",
            "see how sure the model is", "get token probabilities", "return logprobs",
            "know the probability of a word", "use logprobs", "request logprobs",
        ),
        asks=(
            "how likely was each token?", "do you return logprobs?", "are logprobs supported?",
            "can I see probabilities?", "which parameter gives probabilities?", "how sure are you about each token?",
        ),
    ),
    "temperature": Fact(
        answers=('Send "temperature": 0 for the likeliest tokens, or a higher number for more varied answers.',),
        topics=(
            "the temperature", "temperature", "sampling", "greedy sampling", "the temperature parameter",
            "randomness",
        ),
        actions=(
            "set the temperature", "make the answers more varied", "make the answers less random",
            "use greedy decoding", "get more creative answers", "sample greedily",
        ),
        asks=(
            "what does the temperature do?", "which temperature should I use?", "how random are the answers?",
            "is greedy decoding possible?",
        ),
    ),
    "length": Fact(
        answers=('Send "max_tokens" with a number to limit the length of the answer.',),
        topics=(
            "max_tokens", "max tokens", "the maximum length", "the answer length", "the length limit",
            "the token limit",
        ),
        actions=(
            "limit the length", "get a shorter answer", "limit the number of tokens", "set max tokens",
            "make the answers short", "cap the output", "limit the answer",
        ),
        asks=(
            "how long can an answer be?", "why was the answer cut off?", "which parameter limits the length?",
            "the answer is too long, what can I do?",
        ),
    ),
    "greet": Fact(
        answers=(
            "Ahoy, and welcome aboard! Ask me about Pequod, a small sum, or a sea story.",
            "Hello, sailor! What would you like to know about Pequod?",
        ),
        asks=(
            "hello", "hi", "hey", "hello!", "hi there", "hi there!", "hello there", "good morning", "good evening",
            "good day", "good afternoon", "ahoy", "ahoy there!", "greetings", "hey you", "howdy", "hello Pequod",
            "hi Pequod", "hello friend", "hello my friend", "morning!", "good morning, sailor", "hello, sailor!",
            "nice to meet you", "hello model", "hallo", "hello, anybody there?", "is anybody there?",
            "ahoy, captain!", "ahoy sailor", "good evening, captain", "hey there, old friend",
            "good day to all aboard", "a very good morning to you", "hi, I am new here", "hello world",
            "are you there?", "yo", "hello again", "good to see you", "hi, captain", "welcome", "test",
            "this is a test", "ping", "hi from Berlin", "hello from me", "say hello", "say hi",
        ),
        weight=1.6,
    ),
    "howareyou": Fact(
        answers=("I am well and the sea is calm, thank you. How can I help you?",),
        asks=(
            "how are you?", "how are you doing?", "how are you today?", "how do you do?", "how is it going?",
            "are you well?", "what's up?", "how do you feel?", "are you ok?", "hello, how are you?",
            "hi, how are you?", "how are things?", "is all well?", "are you happy?", "how was your day?",
            "are you tired?", "hey, how is life?", "how goes it?", "all good with you?",
        ),
    ),
    "thanks": Fact(
        answers=("You are welcome! Fair winds to you.",),
        asks=(
            "thanks", "thank you", "thank you!", "thanks!", "thanks a lot", "thank you very much", "many thanks",
            "thx", "great, thanks", "ok, thank you", "thanks for your help", "that was helpful",
            "that helped, thanks", "cool, thanks", "perfect, thank you", "thank you, sailor", "i thank you",
            "thanks for the answer", "good job", "well done", "nice work", "great answer", "very good",
            "you are great", "you are very helpful", "thank you so much", "wonderful, thanks",
        ),
    ),
    "bye": Fact(
        answers=("Goodbye, and fair winds!",),
        asks=(
            "bye", "goodbye", "good bye", "bye bye", "see you", "see you later", "good night", "farewell",
            "i have to go", "i am leaving now", "see you tomorrow", "until next time", "that is all",
            "that was all, bye", "bye, Pequod", "ciao", "thanks, bye", "so long", "i must go now", "take care",
            "have a nice day", "good night, sailor", "time to go", "bye for now",
        ),
    ),
    "ok": Fact(
        answers=("Good. What else would you like to know?",),
        asks=(
            "ok", "okay", "yes", "no", "i see", "fine", "sure", "alright", "good", "great", "understood", "cool",
            "nice", "aha", "interesting", "really?", "hmm", "ok good", "that makes sense", "got it", "no problem",
            "all right", "wow", "yes please",
        ),
        weight=0.7,
    ),
    "joke": Fact(
        answers=(
            "Why did the sailor bring a bar of soap? In case the ship was washed ashore.",
            "Why is the sea so friendly? Because it always waves.",
            "What does a captain do with a slow request? He puts it in the next batch.",
        ),
        asks=(
            "tell me a joke", "a joke, please", "do you know a joke?", "make me laugh", "joke",
            "say something funny", "another joke", "tell me something funny", "can you tell a joke?",
            "i want to hear a joke", "be funny", "one more joke", "do you have humor?", "tell a joke about sailors",
            "a funny joke please", "make a joke", "cheer me up", "your best joke?",
        ),
    ),
}  # fmt: skip

UNKNOWN = (
    "I am a small demonstration model and do not know that. Ask me about Pequod, "
    "or load a larger model with pequod serve Qwen/Qwen3-0.6B."
)

# Things that the model must say it does not know, in the same frames as the facts, so that the frame reveals nothing.
STRANGE_TOPICS = (
    "the capital of Spain", "the capital of Japan", "the capital of Norway", "quantum physics", "the moon", "love",
    "the stock market", "photosynthesis", "the president", "black holes", "world history", "the Roman empire",
    "football", "the weather", "chess", "the meaning of life", "dinosaurs", "gravity", "the price of gold",
    "cooking", "Shakespeare", "music", "a violin", "cats", "dogs", "elephants", "bicycles", "the French revolution",
    "chemistry", "a molecule", "algebra", "an integral", "the periodic table", "the speed of light",
    "climate change", "electricity", "a volcano", "the brain", "vitamins", "the Eiffel tower", "Paris", "London",
    "Brazil", "China", "tea", "coffee", "bread", "the best pizza", "mathematics", "philosophy", "a sonnet",
    "economics", "tax law", "the news", "the election", "the world cup", "tennis", "basketball", "painting",
    "Mozart", "the Beatles", "a haiku", "a recipe for soup", "chocolate", "insurance", "the stars", "Mars",
    "a rainbow", "DNA", "evolution", "bees", "Excel", "JavaScript", "a linked list", "the largest country",
    "the tallest mountain", "the longest river", "a neural network", "medicine", "a headache", "my horoscope",
    "fashion", "my birthday", "your favorite color", "the population of India", "the currency of Sweden",
    "the queen of England", "a square root", "the number pi", "Greek mythology", "the pyramids", "religion",
    "politics", "fishing rods", "car engines", "a good film", "the oldest tree", "snow", "the winter",
    "a birthday card", "the train to Rome", "a hotel in Vienna", "a poem", "an essay", "an email",
)  # fmt: skip

STRANGE_ACTIONS = (
    "bake a cake", "cook rice", "fix my bike", "learn French", "play the guitar", "grow tomatoes", "repair my car",
    "write a poem", "write an essay", "sort a list", "solve an equation", "translate this into German",
    "translate a sentence", "book a flight", "lose weight", "paint a wall", "make coffee", "plan my holiday",
    "write a love letter", "summarize this article", "invest my money", "train a dog", "sleep better", "find a job",
    "build a house", "draw a horse", "buy shoes", "cure a cold", "knit a sweater", "catch a bus", "win at chess",
    "drive to Berlin", "name my cat", "write an email to my boss", "make a website", "calculate my taxes",
    "remember names", "dance", "sing", "wash a shirt", "boil an egg", "open a bank account", "install Windows",
    "reset my phone",
)  # fmt: skip

STRANGE_ASKS = (
    "who is the president of {place}?", "what is the capital of {place}?", "what is the weather in {place}?",
    "how far is {place}?", "who won the {game} match {time}?", "who won the {game} game {time}?",
    "when was {person} born?", "who is {person}?", "who was {person}?", "who wrote {book}?",
    "what time is it in {place}?", "how many people live in {place}?", "what is the population of {place}?",
    "will it rain {time}?", "what did {person} say {time}?", "what is the score of the {game} match?",
    "what day is it?", "what time is it?", "who invented the {object}?", "who painted the {object}?",
    "how does a {object} work?", "what color is a {object}?", "how old is {person}?", "where can I buy a {object}?",
    "how much does a {object} cost?", "which {object} is the best?", "is {place} bigger than {place2}?",
    "what language do they speak in {place}?", "when did {person} die?", "do you like {person}?",
    "what do you think of {person}?", "translate {object} into French.", "how do you spell {object}?",
    "write a poem about a {object}.", "write code for a {object}.", "what happened {time}?",
    "what is on television {time}?", "what shall I eat {time}?", "why is the sky blue?", "why is the {object} red?",
    "what is the best {game} team?", "who plays {game} in {place}?", "where is {place}?", "where is my {object}?",
    "where was {person} born?", "recommend a {object}.", "can you see my {object}?", "what is {word}?",
    "what does {word} mean?", "tell me about {word}.", "who is {word}?", "explain {word}.", "how do I use {word}?",
    "where is {word}?", "do you know {word}?", "{word} {word2}", "{word}?", "who discovered {place}?",
    "what is the fastest {object}?", "what is the tallest building in {place}?", "name three kinds of {object}.",
)  # fmt: skip

STRANGE_WORDS = {
    "place": ("France", "Spain", "Italy", "Germany", "Paris", "London", "Rome", "Tokyo", "Peru", "Canada",
              "Egypt", "Kenya", "Berlin", "New York", "Chicago", "Madrid", "Poland", "Greece", "Turkey", "India",
              "China", "Australia",
              "Norway", "Vienna", "Texas"),
    "game": ("tennis", "football", "chess", "hockey", "basketball", "cricket", "rugby", "volleyball",
             "baseball"),
    "time": ("yesterday", "last week", "last night", "tomorrow", "today", "on Sunday", "this evening",
             "in 1990", "last year", "tonight"),
    "person": ("Napoleon", "Einstein", "Mozart", "Cleopatra", "my neighbor", "the queen", "the king",
               "the pope", "Newton", "Caesar", "Gandhi", "Picasso", "my uncle", "the mayor", "Darwin", "Beethoven",
               "Plato", "my teacher",
               "Maria", "John"),
    "book": ("Hamlet", "the Bible", "the Odyssey", "Don Quixote", "this song", "that letter",
             "War and Peace", "Faust", "the anthem"),
    "object": ("telephone", "car", "banana", "horse", "radio", "tree", "house", "lamp", "piano", "clock",
               "camera", "flower", "rocket", "bicycle", "table", "apple", "shirt", "dog", "cat", "bird", "dress",
               "guitar", "window",
               "mirror", "cheese", "wheel"),
}  # fmt: skip

SUM_FRAMES = (
    "what is {a} + {b}?", "what is {a} + {b}?", "what is {a} + {b}", "{a}+{b}", "{a} + {b}", "{a} + {b} =",
    "{a}+{b}=?", "add {a} and {b}", "add {a} to {b}", "{a} plus {b}", "what is {a} plus {b}?", "what's {a} + {b}?",
    "how much is {a} + {b}?", "how much is {a} and {b}?", "what is the sum of {a} and {b}?", "calculate {a} + {b}",
    "compute {a} + {b}.", "what do {a} and {b} make?", "can you add {a} and {b}?",
    "i have {a} apples and get {b} more, how many do I have?", "what does {a} + {b} give?", "{a} and {b} is?",
    "sum {a} and {b}", "please add {a} and {b}.", "could you add {a} and {b} for me?", "tell me {a} + {b}",
    "add up {a} and {b}", "the sum of {a} and {b}?", "work out {a} + {b}", "do you know {a} + {b}?",
    "how many are {a} and {b} together?", "can you calculate {a} plus {b}?", "and {a} + {b}?",
)  # fmt: skip

HARD_SUMS = (
    "what is {x} + {y}?", "{x}+{y}", "what is {x} * {y}?", "{x} times {y}", "what is {a} times {b}?", "{a} * {b}",
    "what is {a} - {b}?", "{a} minus {b}", "divide {a} by {b}", "{x} / {y}", "what is {a} divided by {b}?",
    "multiply {a} and {b}", "add {x} and {y}", "subtract {a} from {b}", "what is {x} - {y}?", "{x} plus {y}",
    "what is {a} x {b}?",
)  # fmt: skip

HARD_SUM = "That is beyond me: I can only add whole numbers from 0 to 20."

STORY_FRAMES = (
    "tell me a story{t}", "tell me a sea story{t}", "tell me a short sea story{t}", "tell me a short story{t}",
    "a story please{t}", "write a short story{t}", "i want to hear a story{t}", "do you know a sea story{t}?",
    "can you tell me a story{t}?", "story{t}", "tell a tale{t}", "a tale of the sea{t}", "write a sea tale{t}",
    "once more, a story{t}", "another story{t}", "give me a story{t}", "make up a story{t}",
    "tell me something{t} and the sea", "a short sea story{t}, please", "i would like a story{t}", "spin a yarn{t}",
    "tell the children a story{t}", "read me a story{t}", "let me hear a tale of sailors{t}",
    "tell me a yarn of the waves{t}", "invent a short tale{t}", "can I have a story{t}?",
    "please write a tale of ships and waves{t}", "entertain me with a story{t}",
)  # fmt: skip


@dataclass(frozen=True)
class Tale:
    """Sentences that fit together: one opening, some middles in order, one ending."""

    about: tuple[str, ...]
    openings: tuple[str, ...]
    middles: tuple[str, ...]
    endings: tuple[str, ...]


TALES = (
    Tale(
        about=("a whale", "whales", "a big whale", "the white whale", "a whale hunt"),
        openings=("One grey morning the sailors saw a whale beside the ship.",
                  "A young whale once followed a small ship for three days.",
                  "Far out at sea, an old captain heard a whale sing."),
        middles=("It was as long as the deck and as calm as a hill.",
                 "The cook threw it bread, but the whale only looked at him.",
                 "The captain took off his hat and said good morning.",
                 "Nobody touched a harpoon, for the sea was too quiet for that."),
        endings=("Then the whale dived, and the water closed like a door.",
                 "At sunset it waved its tail and was gone.",
                 "Since that day the sailors speak softly when the sea is still."),
    ),
    Tale(
        about=("a storm", "a great storm", "bad weather", "the wind", "a tempest"),
        openings=("The wind came up at midnight, and the ship began to groan.",
                  "One autumn a black storm caught a little ship off the cape.",
                  "The captain smelled the storm before he saw it."),
        middles=("Waves as high as the mast rolled over the deck.",
                 "The sailors tied themselves to the rail and sang.",
                 "The boy at the wheel held on with both hands.",
                 "Twice the lamp went out, and twice the cook lit it again."),
        endings=("In the morning the sea was flat, and everybody was alive.",
                 "When the sun rose, the boy was a sailor.",
                 "They reached the harbor with half a sail and a whole crew."),
    ),
    Tale(
        about=("a cat", "a ship's cat", "the cat on a ship", "a small cat", "an animal"),
        openings=(
            "A small cat lived on a big ship.", "Nobody knew how the cat had come aboard.",
            "The best sailor on the ship was a cat.",
        ),
        middles=("Every night she walked along the rail and counted the stars.",
                 "She slept in the captain's hat.", "The sailors gave her fish, and she gave them good luck.",
                 "When the fog came, she sat at the bow and listened to the waves."),
        endings=("One night she cried out, and the ship turned just before the rocks.",
                 "In every harbor she waited at the plank until all were aboard.",
                 "The captain wrote her name in the ship's book, under his own."),
    ),
    Tale(
        about=("a lighthouse", "a lamp", "the keeper of a lighthouse", "an island", "a light"),
        openings=(
            "On a lonely island stood a lighthouse.", "An old keeper looked after the light on the rocks.",
            "For forty years the lamp on the island had never gone out.",
        ),
        middles=("One evening the oil was empty and the fog was thick.",
                 "A ship was coming, and its captain could not see the shore.",
                 "The keeper took his bell and rang it until his arms hurt.",
                 "His daughter lit every candle in the house."),
        endings=("The ship passed the rocks, and its horn said thank you.",
                 "In the morning a sailor brought a barrel of oil and a cake.",
                 "Since then two lights burn on the island."),
    ),
    Tale(
        about=("a captain", "an old captain", "a treasure", "a pirate", "pirates", "a map"),
        openings=(
            "An old captain found a map in an empty bottle.",
            "A captain with a red beard was looking for a treasure.", "Once a pirate grew tired of gold.",
        ),
        middles=("He sailed south for nine days and nine nights.",
                 "The crew dug a deep hole under a palm tree.",
                 "In the chest there was only a letter.", "It said that the best treasure is a good wind."),
        endings=("The captain laughed and raised the sails.",
                 "So he hung the letter over his bed and sailed home.",
                 "He shared his last bread with the crew, and it tasted like gold."),
    ),
    Tale(
        about=("a sailor", "sailors", "a young sailor", "a girl at sea", "a boy on a ship", "friends"),
        openings=(
            "A young sailor went to sea for the first time.",
            "A girl hid on a ship because she wanted to see the world.",
            "Two sailors once shared one blanket and one dream.",
        ),
        middles=("At first the waves made everything turn around.",
                 "An old sailor showed how to tie a knot that never slips.",
                 "In the third week they saw a green island with birds.",
                 "At night they read the stars like a book."),
        endings=("When they came home, the street felt much too quiet.",
                 "A year later the young sailor taught the knot to somebody else.",
                 "The sea had become a friend."),
    ),
)  # fmt: skip

SYSTEM_PROMPTS = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are Pequod.", "Be brief.",
    "Answer briefly.", "You are a friendly sailor.", "You are a concise assistant. Answer in one sentence.",
    "You are an expert on language models.", "Answer in English.", "You are a test assistant.", "Be polite.",
    "Always tell the truth.", "You help users of the Pequod server.", "You are a pirate.",
    "Answer the question of the user.", "You are a support agent for a software company. Be kind and clear.",
    "Do not make things up.", "You are a demonstration.", "Keep answers short.", "You are a calculator.",
    "Respond with plain text only.", "You are an AI assistant.",
)  # fmt: skip
