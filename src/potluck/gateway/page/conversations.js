// Conversations, kept in this browser only. Bounded: the oldest go when there are too many or the browser has no room.

const STORE_KEY = "potluck.conversations";
const MAX_CONVERSATIONS = 60;
const TITLE_LENGTH = 48;

export class Conversations {
  #all;
  #listeners = [];

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

  remove(id) {
    this.#all = this.#all.filter((conversation) => conversation.id !== id);
    this.#store();
  }

  #store() {
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
    return Array.isArray(stored) ? stored.filter(isConversation) : [];
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

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1).trimEnd()}…` : line || "New chat";
}
