// One message of the chat as an element: its text, what it cost, what happened on the way, and what can be done with it.

import { renderChaos } from "./chaos.js";
import { copyText, element, paint } from "./dom.js";
import { icon } from "./icons.js";
import { renderMarkdown } from "./markdown.js";
import { milliseconds, nodeName, plural, rate, stageName } from "./words.js";

/** `actions` has regenerate() and edit(message, text). */
export function createMessage(message, actions) {
  return message.role === "user" ? createQuestion(message, actions) : createAnswer(message, actions);
}

function createQuestion(message, actions) {
  const text = element("div", { class: "question-text", text: message.content, data: { testid: "question-text" } });
  const node = element("article", { class: "message question", "aria-label": "You", data: { testid: "question" } }, text);
  const edit = button("edit", "Edit", () => openEditor(node, message, actions));
  node.append(element("div", { class: "message-actions" }, edit, copyButton(() => message.content)));
  return node;
}

function openEditor(node, message, actions) {
  if (node.querySelector("form")) return;
  const area = element("textarea", { class: "edit-area", "aria-label": "Edit your message", rows: Math.min(10, message.content.split("\n").length + 1) });
  area.value = message.content;
  const close = () => {
    form.remove();
    node.classList.remove("editing");
    node.querySelector("button").focus();
  };
  const form = element("form", { class: "edit-form", on: {
    submit: (event) => { event.preventDefault(); if (area.value.trim()) actions.edit(message, area.value.trim()); },
    keydown: (event) => { if (event.key === "Escape") close(); if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); } },
  } }, area, element("div", { class: "row" },
    element("button", { type: "submit", class: "primary small", text: "Ask again" }), element("button", { type: "button", class: "quiet small", text: "Cancel", on: { click: close } })));
  node.classList.add("editing");
  node.append(form);
  area.focus();
}

function createAnswer(message, actions) {
  return element("article", { class: "message answer", "aria-label": "Answer", data: { testid: "answer" } },
    element("div", { class: "markdown", data: { testid: "answer-text" } }),
    element("ul", { class: "notes", "aria-label": "What happened meanwhile" }),
    element("div", { class: "chaos-box", data: { testid: "chaos-verdict" }, hidden: true }),
    element("p", { class: "trouble", role: "alert", hidden: true, data: { testid: "trouble" } }),
    element("div", { class: "answer-foot" },
      element("p", { class: "facts", data: { testid: "answer-facts" } }),
      element("div", { class: "message-actions" }, copyButton(() => message.content), button("again", "Regenerate", () => actions.regenerate(message)))));
}

/** Brings an answer's element up to date with its message. */
export function updateAnswer(node, message, state) {
  node.dataset.status = message.status;
  renderMarkdown(node.querySelector(".markdown"), message.content);
  paint(node.querySelector(".notes"), message.notes ?? [], (notes) => notes.map((note) => drawNote(note, state)));
  renderChaos(node.querySelector(".chaos-box"), message.chaos, state);
  const trouble = node.querySelector(".trouble");
  trouble.hidden = !message.error;
  trouble.textContent = message.error ?? "";
  paint(node.querySelector(".facts"), factsOf(message, state), (facts) => facts.map((fact) => element("span", { text: fact })));
}

function drawNote(note, state) {
  if (note.kind === "lost") {
    return element("li", { class: "note lost", data: { testid: "loss-note" } }, icon("lost"), element("span", { text: `Lost ${note.stages.map((stage) => stageName(state, stage)).join(" and ")}; finding a replacement…` }));
  }
  const lost = note.stages.map((stage) => stageName(state, stage)).join(" and ");
  return element("li", { class: "note failover", data: { testid: "failover-note" } }, icon("failover"), element("span", { text: `Lost ${lost}; the answer went on after ${milliseconds(note.pauseMs)}.` }));
}

function factsOf(message, state) {
  if (message.status === "waiting") return ["reading…"];
  const facts = [];
  if (message.tokens) facts.push(plural(message.tokens, "token"));
  if (message.tokensPerSecond) facts.push(`${rate(message.tokensPerSecond)} tokens/s`);
  if (message.firstMs) facts.push(`first after ${milliseconds(message.firstMs)}`);
  if (message.nodes?.length) facts.push(message.nodes.map((id) => nodeName(state, id)).join(" → "));
  if (message.failovers) facts.push(`${plural(message.failovers, "failover")}, ${milliseconds(message.pauseMs)} pause`);
  if (message.status === "stopped") facts.push("stopped");
  if (message.finishReason === "length") facts.push("cut at max tokens");
  if (message.status !== "writing" && message.seed !== undefined) facts.push(`seed ${message.seed}`);
  return facts;
}

function button(iconName, label, onClick) {
  return element("button", { type: "button", class: "quiet small", "aria-label": label, title: label, data: { testid: label.toLowerCase() }, on: { click: onClick } }, icon(iconName), element("span", { class: "label", text: label }));
}

function copyButton(textOf) {
  const copy = button("copy", "Copy", () => copyText(textOf(), copy));
  return copy;
}
