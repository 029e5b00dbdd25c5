// The chat page. Everything is put in as text and elements of our own, never as markup: no answer can act in the page.
import { events } from "./events.js";
import { markdown } from "./markdown.js";

const API = new URL("../v1/", import.meta.url); // a proxy may publish the server under a prefix
const NAMES = ["model", "system", "temperature", "max-tokens"]; // of the fields whose values are kept
const NEAR = 60; // pixels from the end of the conversation, within which the page follows a growing answer
const element = (id) => document.getElementById(id);
const main = document.querySelector("main");
const [log, form, prompt, send] = ["log", "form", "prompt", "send"].map(element);

const make = (tag, properties = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
};

// The state: what has been said, {prompt, answer, reasoning, note, error} each, and the request that runs.
const kept = recall("chat") ?? {};
let exchanges = kept.exchanges ?? [];
let running = null; // an AbortController
let key = recall("key") ?? "";
let areModelsKnown = false;

// A browser that keeps nothing, or a conversation that is too long to be kept, must not stop the page.
function recall(name) {
  try {
    return JSON.parse(sessionStorage.getItem(name));
  } catch {
    return null;
  }
}

function keep(name, value) {
  try {
    sessionStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

// Keeps the whole conversation, else what fits of it: without messages that have no answer, then without the oldest.
function save() {
  const values = Object.fromEntries(NAMES.map((name) => [name, element(name).value]));
  values.model ||= kept.model; // while the models are not known
  let isKept = keep("chat", { exchanges, ...values });
  let rest = isKept ? exchanges : exchanges.filter(({ answer }) => answer);
  while (!isKept && !(isKept = keep("chat", { exchanges: rest, ...values })) && rest.length) {
    rest = rest.slice(Math.ceil(rest.length / 10)); // a tenth, as each attempt may write megabytes
  }
  const lost = rest.length ? "a part of it" : "it";
  const message = `This browser cannot keep the whole conversation: when the page is reloaded, ${lost} is lost.`;
  element("storage-message").textContent = rest.length < exchanges.length ? message : "";
}

// Requests

async function call(path, options = {}) {
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${octets(key)}` } : {}) };
  const response = await fetch(new URL(path, API), { ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => null); // a proxy's error may be a page
  const message = body?.error?.message ?? `The server responded with ${response.status} ${response.statusText}.`;
  if (response.status === 401) askForKey(key ? message : "This server requires a key. It is kept in this tab alone.");
  throw new Error(message);
}

// A header has bytes, and fetch takes a string with a character for each.
const octets = (text) => String.fromCharCode(...new TextEncoder().encode(text));

const explained = (error) => (error instanceof TypeError ? "The connection to the server failed." : error.message);

function askForKey(message) {
  element("key-message").textContent = message;
  element("key-form").hidden = false;
  element("key").focus();
}

async function listModels(signal) {
  const { data } = await (await call("models", { signal })).json();
  const chosen = element("model").value || kept.model;
  const options = data.map(({ id }) => make("option", { textContent: id, selected: id === chosen }));
  element("model").replaceChildren(...options);
  element("key-form").hidden = true;
  areModelsKnown = true;
}

// The body of the request for the last exchange. Exchanges without an answer are left out: roles must alternate.
function body() {
  const said = (role, content) => ({ role, content });
  const system = element("system").value.trim();
  const earlier = exchanges.slice(0, -1).filter(({ answer }) => answer);
  const number = (name) => (element(name).value === "" ? undefined : Number(element(name).value));
  return {
    model: element("model").value || undefined,
    messages: [
      ...(system ? [said("system", system)] : []),
      ...earlier.flatMap((one) => [said("user", one.prompt), said("assistant", one.answer)]),
      said("user", exchanges.at(-1).prompt),
    ],
    temperature: number("temperature"),
    max_tokens: number("max-tokens"),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true }, // the count of a stopped answer, too
  };
}

// Requests the answer of the last exchange and shows it while it arrives.
async function run() {
  const exchange = Object.assign(exchanges.at(-1), { answer: "", reasoning: "", note: "", error: "" });
  const draw = show(exchange);
  const start = performance.now();
  const first = { time: 0, tokens: 0 }, last = { time: 0, tokens: 0 };
  let tokens = 0, ending = "", frame = 0;
  const request = new AbortController();
  setRunning(request);
  scrollToEnd();
  try {
    if (!areModelsKnown) await listModels(request.signal);
    const options = { method: "POST", body: JSON.stringify(body()), signal: request.signal };
    const response = await call("chat/completions", options);
    let done = false;
    for await (const data of events(response.body)) {
      if ((done = data === "[DONE]")) continue; // to the end of the response, so that the connection can be used again
      const { error, choices: [choice] = [], usage } = JSON.parse(data);
      if (error) throw new Error(error.message);
      tokens = usage?.completion_tokens ?? tokens;
      const { content, reasoning_content: reasoning } = choice?.delta ?? {};
      if (content || reasoning) {
        Object.assign(last, { time: performance.now(), tokens });
        if (!first.time) Object.assign(first, last);
        exchange.answer += content ?? "";
        exchange.reasoning += reasoning ?? "";
        frame ||= requestAnimationFrame(() => { frame = 0; following(draw); });
      }
      if (choice?.finish_reason === "length") ending = "ended at the maximum of tokens";
    }
    if (!done) throw new Error("The connection ended before the answer was complete.");
    if (!first.time) ending = ending || "ended without text";
  } catch (error) {
    if (request.signal.aborted) ending = "stopped";
    else exchange.error = explained(error);
    areModelsKnown &&= request.signal.aborted; // the server may have been started again, with another model
  }
  cancelAnimationFrame(frame);
  exchange.note = [...(first.time ? measured(tokens, start, first, last) : []), ending].filter(Boolean).join(" · ");
  following(draw);
  setRunning(null);
  save();
}

// The speed is that of the tokens after the first ones, as the time to the first is given by itself.
function measured(tokens, start, first, last) {
  const seconds = (last.time - first.time) / 1000;
  return [
    `${tokens} ${tokens === 1 ? "token" : "tokens"}`,
    seconds ? `${((last.tokens - first.tokens) / seconds).toFixed(1)} tokens/s` : "",
    `first token after ${((first.time - start) / 1000).toFixed(2)} s`,
  ];
}

// What is shown

// Appends an exchange to the conversation and returns a function that shows its present state.
function show(exchange) {
  const [reasoning, answer, note] = ["reasoning", "text", "note"].map((name) => make("div", { className: name }));
  reasoning.dir = "auto";
  const details = make("details", {}, make("summary", { textContent: "Reasoning" }), reasoning);
  const error = make("p", { className: "error", role: "alert" });
  const action = (textContent, onclick) => make("button", { type: "button", textContent, onclick });
  const actions = make("div", { className: "actions" }, action("Retry", retry), action("Edit message", edit));
  const asked = make("article", { className: "prompt", ariaLabel: "You", textContent: exchange.prompt, dir: "auto" });
  const answered = make("article", { className: "answer", ariaLabel: "Model" }, details, answer, error, note, actions);
  log.append(make("section", {}, asked, answered));
  let isThinking = false;
  const draw = () => {
    // Opened and closed once each, so that a reader can decide otherwise.
    const thinks = Boolean(running && exchange.reasoning && !exchange.answer);
    if (thinks !== isThinking) details.open = isThinking = thinks;
    details.hidden = !exchange.reasoning;
    reasoning.textContent = exchange.reasoning.trim();
    fill(answer, markdown(exchange.answer));
    error.textContent = exchange.error;
    note.textContent = exchange.note;
  };
  draw();
  return draw;
}

// Makes blocks the children of an element. Those that have not changed stay, with what is selected in them.
function fill(target, blocks) {
  blocks.forEach((block, i) => {
    const old = target.children[i];
    const source = JSON.stringify(block);
    if (old?.source === source) return;
    if (block.tag === "pre" && old?.tagName === "PRE") { // keeps what is scrolled
      old.textContent = block.children[0];
      old.source = source;
      return;
    }
    const dir = block.tag === "pre" ? "ltr" : "auto"; // of code, whatever its comments are written in
    const child = Object.assign(built(block), { source, dir });
    old ? old.replaceWith(child) : target.append(child);
  });
  while (target.children.length > blocks.length) target.lastChild.remove();
}

// Returns the element or text of a part of a block.
function built(part) {
  if (typeof part === "string") return part;
  const { tag, children, href, start } = part;
  const properties = {
    a: { href, title: href, target: "_blank", rel: "noopener noreferrer" }, // the title says where it leads
    ol: { start },
    pre: { tabIndex: 0 }, // to be scrolled with keys
  };
  return make(tag, properties[tag] ?? {}, ...children.map(built));
}

function scrollToEnd() {
  main.scrollTop = main.scrollHeight;
}

// Changes what is shown and stays at the end of the conversation, unless the reader has scrolled away.
function following(change) {
  const isAtEnd = main.scrollHeight - main.scrollTop - main.clientHeight < NEAR;
  change();
  if (isAtEnd) scrollToEnd();
}

function setRunning(request) {
  running = request;
  send.textContent = running ? "Stop" : "Send";
  log.ariaBusy = String(Boolean(running)); // a screen reader then waits for the end
  element("welcome").hidden = exchanges.length > 0;
}

// What a user does

function retry() {
  log.lastChild.remove();
  send.focus(); // which was in what has been removed
  run();
}

function edit() {
  log.lastChild.remove();
  prompt.value = [exchanges.pop().prompt, prompt.value].filter((text) => text.trim()).join("\n"); // and what is there
  setRunning(null);
  save();
  prompt.focus();
}

form.onsubmit = (event) => {
  event.preventDefault();
  if (running) return running.abort();
  if (!prompt.value.trim()) return;
  exchanges.push({ prompt: prompt.value });
  prompt.value = "";
  run();
};

prompt.onkeydown = (event) => {
  // isComposing: Enter then ends the input of a Chinese or Japanese word; 229 is the same in Safari.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  if (!running) form.requestSubmit();
};

element("new-chat").onclick = () => {
  running?.abort();
  exchanges = [];
  log.replaceChildren();
  setRunning(running);
  save();
  prompt.focus();
};

element("settings-button").onclick = ({ currentTarget }) => {
  const isOpen = (element("settings").hidden = !element("settings").hidden) === false;
  currentTarget.ariaExpanded = String(isOpen);
};

element("key-form").onsubmit = (event) => {
  event.preventDefault();
  key = element("key").value;
  keep("key", key); // for a reload
  element("key").value = "";
  listModels().catch((error) => { element("key-message").textContent = explained(error); });
};

NAMES.forEach((name) => { element(name).value = kept[name] ?? ""; });
exchanges.forEach((exchange) => {
  if (!exchange.note && !exchange.error) exchange.note = "stopped"; // with the page
  show(exchange);
});
// The browser cancels requests before it leaves the page, which would look as if the connection had failed.
addEventListener("beforeunload", () => running?.abort());
addEventListener("pagehide", save);
setRunning(null);
scrollToEnd();
listModels().catch(() => {}); // the first message tries it again, and shows the error
