// The node's HTTP API as the page uses it: JSON, event streams, and the key that a guarded node wants.

import { readEvents } from "./sse.js";

const KEY_NAME = "potluck.api_key";

export class ApiError extends Error {
  constructor(message, { status = 0, code = "" } = {}) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Api {
  #askForKey;
  #asking = null;
  #isDeclined = false; // the person closed the question; asking again at every request would be a nuisance

  /** `askForKey(wasRejected)` resolves to a key, or to null where the person gives up. */
  constructor(askForKey) {
    this.#askForKey = askForKey;
  }

  get key() {
    return sessionStorage.getItem(KEY_NAME);
  }

  async json(path, body = undefined) {
    return (await this.#fetch(path, { body })).json();
  }

  /** Yields {event, data}; ends when the server ends it or `signal` aborts. */
  async *events(path, { body = undefined, signal, headers = {} } = {}) {
    const response = await this.#fetch(path, { body, signal, headers: { Accept: "text/event-stream", ...headers } });
    yield* readEvents(response.body);
  }

  async #fetch(path, { body, signal, headers = {} }) {
    const sentKey = this.key;
    const response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
      headers: {
        ...(body === undefined ? {} : { "Content-Type": "application/json" }),
        ...(sentKey ? { Authorization: `Bearer ${sentKey}` } : {}),
        ...headers,
      },
    });
    if (response.ok) return response;
    if (response.status === 401 && (await this.#renewKey(sentKey))) return this.#fetch(path, { body, signal, headers });
    throw await errorOf(response);
  }

  /** One question at a time, however many requests were refused; true when there is another key to try. */
  async #renewKey(refused) {
    if (this.key !== refused) return true;
    if (this.#isDeclined) return false;
    this.#asking ??= this.#askForKey(refused !== null).finally(() => { this.#asking = null; });
    const key = await this.#asking;
    if (key) sessionStorage.setItem(KEY_NAME, key);
    else this.#isDeclined = true;
    return Boolean(key);
  }
}

async function errorOf(response) {
  const fallback = `The node answered ${response.status}${response.statusText ? ` ${response.statusText}` : ""}.`;
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return new ApiError(error?.message ?? fallback, { status: response.status, code: error?.code ?? "" });
  } catch {
    return new ApiError(fallback, { status: response.status });
  }
}
