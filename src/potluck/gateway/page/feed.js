// The swarm's state and news as they come: one look at the state, then the event stream, taken up again whenever it breaks.

const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10_000;

export class Feed {
  #api;
  #listener;

  /** `listener` has onState(state), onNews(news) and onConnected(isConnected, error). */
  constructor(api, listener) {
    this.#api = api;
    this.#listener = listener;
  }

  async run() {
    let wait = FIRST_WAIT_MS;
    for (;;) {
      try {
        this.#listener.onState(await this.#api.json("/potluck/state"));
        this.#listener.onConnected(true, null);
        wait = FIRST_WAIT_MS;
        await this.#follow();
        this.#listener.onConnected(false, null);
      } catch (error) {
        this.#listener.onConnected(false, error);
      }
      await new Promise((resolve) => { setTimeout(resolve, wait); });
      wait = Math.min(wait * 2, LONGEST_WAIT_MS);
    }
  }

  async #follow() {
    for await (const { event, data } of this.#api.events("/potluck/events")) {
      if (event === "state") this.#listener.onState(JSON.parse(data));
      if (event === "news") this.#listener.onNews(JSON.parse(data));
    }
  }
}
