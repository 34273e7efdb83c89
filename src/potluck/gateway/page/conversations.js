// Conversations, kept in this browser only. Bounded: the oldest go when there are too many or the browser has no room.

const STORE_KEY = "potluck.conversations";
const MAX_CONVERSATIONS = 60;
const TITLE_LENGTH = 48;

export class Conversations {
  #all;
  #listeners = [];
  #removed = new Set();

  constructor(storage = localStorage) {
    this.storage = storage;
    this.#all = load(storage);
  }

  get all() {
    return [...this.#all].sort((one, other) => other.changedMs - one.changedMs);
  }

  find(id) {
    return this.#all.find((conversation) => conversation.id === id) ?? null;
  }

  onChange(listener) {
    this.#listeners.push(listener);
  }

  create() {
    return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "New chat", changedMs: Date.now(), messages: [] };
  }

  /** A conversation without a message is not kept. */
  save(conversation) {
    conversation.changedMs = Date.now();
    const firstQuestion = conversation.messages.find((message) => message.role === "user");
    if (firstQuestion) conversation.title = titleOf(firstQuestion.content);
    if (!this.find(conversation.id) && conversation.messages.length > 0) this.#all.push(conversation);
    this.#store();
  }

  /** Stores a conversation that has changed, unless it has been removed meanwhile. */
  keep(conversation) {
    if (this.find(conversation.id)) this.#store();
  }

  remove(id) {
    this.#removed.add(id);
    this.#all = this.#all.filter((conversation) => conversation.id !== id);
    this.#store();
  }

  #store() {
    this.#all.push(...load(this.storage).filter(({ id }) => !this.find(id) && !this.#removed.has(id))); // begun in another tab
    this.#all = this.all.slice(0, MAX_CONVERSATIONS);
    while (!this.#fits()) this.#all.pop();
    for (const listener of this.#listeners) listener();
  }

  #fits() {
    try {
      this.storage.setItem(STORE_KEY, JSON.stringify(this.#all));
      return true;
    } catch (error) {
      if (error.name !== "QuotaExceededError" || this.#all.length <= 1) return true; // kept in memory while the page is open
      return false;
    }
  }
}

function load(storage) {
  try {
    const stored = JSON.parse(storage.getItem(STORE_KEY) ?? "[]");
    return Array.isArray(stored) ? stored.filter(isConversation).map(settled) : [];
  } catch {
    return []; // somebody else's or a damaged entry: begin anew
  }
}

function isConversation(value) {
  return (
    typeof value?.id === "string" && typeof value.title === "string" && typeof value.changedMs === "number"
    && Array.isArray(value.messages) && value.messages.every((message) => typeof message?.content === "string" && typeof message.role === "string")
  );
}

/** An answer that was being written when the page was closed has ended there. */
function settled(conversation) {
  for (const message of conversation.messages) {
    if (message.status === "waiting" || message.status === "writing") message.status = "stopped";
    if (message.chaos && ["killing", "killed", "repeating"].includes(message.chaos.phase)) message.chaos.phase = "stopped";
  }
  return conversation;
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1).trimEnd()}…` : line || "New chat";
}
