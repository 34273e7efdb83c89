// Puts the page together: the feed drives the swarm's half, the composer drives the chat.

import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { Conversations } from "./conversations.js";
import { askForKey, bindClients, bindDialogs, bindInvite } from "./dialogs.js";
import { byId, element, paint } from "./dom.js";
import { Feed } from "./feed.js";
import { renderHistory } from "./history.js";
import { icon } from "./icons.js";
import { News } from "./news.js";
import { Settings } from "./settings.js";
import { SwarmView } from "./swarm.js";

const api = new Api(askForKey);
const conversations = new Conversations();
const settings = new Settings();
const news = new News(byId("news"), byId("news-empty"));
const swarm = new SwarmView({
  verdict: byId("verdict"), picture: byId("picture"), strip: byId("strip"), stripTitle: byId("strip-title"), pipeline: byId("pipeline"),
  nodes: byId("nodes"), nodesTitle: byId("nodes-title"), plan: byId("plan"),
});

let state = null;
let chosenModel = null;
let isAskedEarly = false; // before the node has said what it serves; the question goes out when it has

function model() {
  if (!state) return null;
  return state.models.find((candidate) => candidate.id === chosenModel) ?? state.models.find((candidate) => candidate.can_answer) ?? state.models[0] ?? null;
}

function announce(text) {
  byId("announcer").textContent = text;
}

const chat = new Chat(
  { api, conversations, settings, state: () => state, model, announce, onBusy: renderBusy },
  { log: byId("log"), empty: byId("chat-empty"), jump: byId("jump") },
);

// ------------------------------------------------------------------ drawing

function renderState() {
  if (!state) return;
  byId("swarm-name").textContent = state.swarm.name;
  renderModels();
  renderPill();
  swarm.render(state, model(), chat.runningId);
  renderBusy();
}

function renderModels() {
  const names = state.models.map(({ id, can_answer }) => ({ id, can_answer }));
  paint(byId("model"), names, () => names.map(({ id, can_answer }) => element("option", { value: id, text: can_answer ? id : `${id} (incomplete)` })));
  byId("model").value = model()?.id ?? "";
}

function renderPill() {
  const answer = model()?.can_answer;
  byId("pill").dataset.answer = answer ? "yes" : "no";
  byId("pill-text").textContent = answer ? "ready" : "cannot answer";
}

function renderBusy() {
  const isBusy = chat.isBusy;
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  byId("chaos").hidden = !state?.chaos;
  byId("chaos").disabled = !chat.canKill;
  document.body.dataset.busy = isBusy ? "yes" : "no";
}

function renderConversations() {
  const actions = { open: openConversation, remove: removeConversation };
  for (const list of document.querySelectorAll(".history-list")) renderHistory(list, conversations, chat.conversationId, actions);
}

function renderConnection(isConnected, error) {
  byId("offline").hidden = isConnected;
  byId("key-again").hidden = error?.status !== 401;
  if (!isConnected) byId("offline-text").textContent = error?.status ? error.message : "This node does not answer; trying again.";
}

// ------------------------------------------------------------------ doing

function openConversation(id) {
  const conversation = conversations.find(id);
  if (conversation) chat.open(conversation);
  afterOpening();
}

function removeConversation(id) {
  conversations.remove(id);
  if (id === chat.conversationId) chat.openNew();
  renderConversations();
}

function afterOpening() {
  if (byId("history-dialog").open) byId("history-dialog").close();
  showView("chat");
  renderConversations();
  byId("question").focus();
}

function showView(view) {
  document.body.dataset.view = view;
  for (const tab of document.querySelectorAll("[data-show]")) tab.setAttribute("aria-pressed", tab.dataset.show === view ? "true" : "false");
}

async function submitQuestion() {
  const question = byId("question");
  const text = question.value.trim();
  isAskedEarly = Boolean(text) && !state;
  if (!text || chat.isBusy || !model()) return;
  question.value = "";
  fitQuestion();
  await chat.ask(text);
}

function fitQuestion() {
  const question = byId("question");
  question.style.height = "auto";
  question.style.height = `${Math.min(question.scrollHeight, 200)}px`;
}

// ------------------------------------------------------------------ wiring

function bindComposer() {
  byId("composer").addEventListener("submit", (event) => { event.preventDefault(); submitQuestion(); });
  byId("question").addEventListener("input", fitQuestion);
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submitQuestion(); }
    if (event.key === "Escape" && chat.isBusy) chat.stop();
  });
  byId("stop").addEventListener("click", () => { chat.stop(); byId("question").focus(); });
  byId("chaos").addEventListener("click", () => chat.kill());
}

function bindHeader() {
  for (const tab of document.querySelectorAll("[data-show]")) tab.addEventListener("click", () => showView(tab.dataset.show));
  for (const start of document.querySelectorAll("[data-new]")) start.addEventListener("click", () => { chat.openNew(); afterOpening(); });
  for (const suggestion of document.querySelectorAll("[data-ask]")) suggestion.addEventListener("click", () => { byId("question").value = suggestion.textContent.trim(); submitQuestion(); });
  byId("model").addEventListener("change", () => { chosenModel = byId("model").value; renderState(); });
  byId("pill").addEventListener("click", () => { showView("swarm"); byId("swarm-heading").focus(); });
  byId("settings-open").addEventListener("click", () => byId("settings-dialog").showModal());
  byId("history-open").addEventListener("click", () => { renderConversations(); byId("history-dialog").showModal(); });
}

for (const place of document.querySelectorAll("[data-icon]")) place.replaceWith(icon(place.dataset.icon));
bindDialogs();
bindInvite(api);
bindClients(api, () => ({ state, model: model() }));
bindComposer();
bindHeader();
settings.bind(byId("settings-form"));
conversations.onChange(renderConversations);
window.addEventListener("pagehide", () => chat.keep());
byId("key-again").addEventListener("click", () => location.reload());
renderConversations();
renderBusy();
showView("chat");

new Feed(api, {
  onState: (fresh) => { state = fresh; renderState(); if (isAskedEarly) submitQuestion(); },
  onNews: (item) => {
    news.add(item);
    if (item.kind === "lost" || item.kind === "joined") announce(item.text);
  },
  onConnected: renderConnection,
}).run();
