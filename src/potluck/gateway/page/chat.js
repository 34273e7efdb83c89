// The chat: asking, stopping, asking again, editing, and the chaos experiment. One answer runs at a time.

import { Answering } from "./answering.js";
import { verdictOf } from "./chaos.js";
import { complete, freshSeed, requestBody } from "./completion.js";
import { element } from "./dom.js";
import { createMessage, updateAnswer } from "./message_view.js";

const NEAR_BOTTOM_PX = 60;

export class Chat {
  #context;
  #parts;
  #conversation;
  #nodes = new Map(); // message → element
  #answering = null;
  #repeat = null; // the undisturbed run that is compared
  #dirty = new Set(); // messages to draw in the next frame
  #isStuck = true;

  /** `context`: api, conversations, settings, state(), model(), announce(text), onBusy(). `parts`: log, empty, jump. */
  constructor(context, parts) {
    this.#context = context;
    this.#parts = parts;
    this.#conversation = context.conversations.create();
    parts.log.addEventListener("scroll", () => this.#noteScroll());
    parts.jump.addEventListener("click", () => this.#scrollDown());
  }

  get conversationId() {
    return this.#conversation.id;
  }

  get isBusy() {
    return this.#answering !== null || this.#repeat !== null;
  }

  get runningId() {
    return this.#answering?.id ?? null;
  }

  get canKill() {
    return this.runningId !== null && !this.#answering.message.chaos;
  }

  open(conversation) {
    this.stop();
    this.#answering = this.#repeat = null;
    this.#conversation = conversation;
    this.#redraw();
    this.#scrollDown();
  }

  openNew() {
    this.open(this.#context.conversations.create());
  }

  async ask(text) {
    if (this.isBusy || !this.#context.model()) return;
    this.#conversation.messages.push({ role: "user", content: text });
    await this.#answer();
  }

  async regenerate(message) {
    if (this.isBusy || !this.#context.model()) return;
    this.#cutFrom(message);
    await this.#answer();
  }

  async edit(message, text) {
    if (!this.#context.model()) return;
    this.stop();
    this.#answering = this.#repeat = null;
    this.#cutFrom(message);
    this.#conversation.messages.push({ role: "user", content: text });
    await this.#answer();
  }

  /** Stores what is there, however far the answer is. */
  keep() {
    this.#context.conversations.keep(this.#conversation);
  }

  stop() {
    this.#answering?.stop();
    this.#repeat?.abort();
  }

  /** Kills a shard under the running answer; when it is complete the same is asked again and compared. */
  async kill() {
    if (!this.canKill) return;
    const { message, id } = this.#answering;
    message.chaos = { phase: "killing" };
    this.#changed(message);
    this.#context.onBusy();
    try {
      const { killed, what } = await this.#context.api.json("/potluck/chaos", { request_id: id, node: null });
      message.chaos = { ...message.chaos, phase: "killed", node: killed, what };
    } catch (error) {
      message.chaos = { phase: "failed", reason: `Nothing was killed: ${error.message}` };
    }
    this.#changed(message);
  }

  async #answer() {
    const { settings, model, api, conversations, announce } = this.#context;
    const conversation = this.#conversation;
    const seed = settings.values.seed ?? freshSeed();
    const body = requestBody(model().id, conversation.messages, settings.values, seed);
    const message = { role: "assistant", content: "", status: "waiting", seed, model: model().id };
    conversation.messages.push(message);
    conversations.save(conversation);
    this.#redraw();
    this.#scrollDown();
    announce("Answering.");
    const answering = new Answering(api, body, message, () => this.#changed(message));
    this.#answering = answering;
    this.#context.onBusy();
    await answering.run();
    if (this.#answering === answering) this.#answering = null; // after an edit the next one is running already
    announce(message.error ? `The answer failed: ${message.error}` : `Answer ${message.status === "stopped" ? "stopped" : "complete"}: ${message.content.slice(0, 400)}`);
    if (message.chaos) await this.#compare(message, body);
    conversations.keep(conversation);
    this.#context.onBusy();
  }

  async #compare(message, body) {
    if (message.chaos.phase === "failed") return;
    if (message.status !== "done") {
      message.chaos = { ...message.chaos, phase: "stopped" };
      return this.#changed(message);
    }
    let text = "";
    const repeat = new AbortController();
    this.#repeat = repeat;
    this.#context.onBusy();
    const progress = () => { message.chaos = { ...message.chaos, phase: "repeating", same: text.length }; this.#changed(message); };
    progress();
    try {
      await complete(this.#context.api, body, repeat.signal, { onText: (piece) => { text += piece; progress(); } });
      message.chaos = { ...message.chaos, ...verdictOf(message.content, text, message.pauseMs) };
      this.#context.announce(message.chaos.phase === "identical" ? "The text stayed identical." : "The text became different.");
    } catch (error) {
      const reason = repeat.signal.aborted ? undefined : `The repetition failed: ${error.message}`;
      message.chaos = { ...message.chaos, phase: "stopped", reason };
    }
    if (this.#repeat === repeat) this.#repeat = null;
    this.#changed(message);
  }

  #cutFrom(message) {
    const { messages } = this.#conversation;
    const at = messages.indexOf(message);
    if (at >= 0) messages.splice(at);
  }

  #redraw() {
    const actions = { regenerate: (message) => this.regenerate(message), edit: (message, text) => this.edit(message, text) };
    const { messages } = this.#conversation;
    for (const message of this.#nodes.keys()) if (!messages.includes(message)) this.#nodes.delete(message);
    for (const message of messages) {
      if (!this.#nodes.has(message)) this.#nodes.set(message, createMessage(message, actions));
      if (message.role === "assistant") updateAnswer(this.#nodes.get(message), message, this.#context.state());
    }
    this.#parts.log.replaceChildren(...messages.map((message) => this.#nodes.get(message)), element("div", { class: "log-end" }));
    this.#parts.empty.hidden = messages.length > 0;
  }

  /** At most one drawing per frame, however fast tokens come. */
  #changed(message) {
    if (this.#dirty.size === 0) requestAnimationFrame(() => this.#drawDirty());
    this.#dirty.add(message);
  }

  #drawDirty() {
    for (const message of this.#dirty) {
      const node = this.#nodes.get(message);
      if (node) updateAnswer(node, message, this.#context.state());
    }
    this.#dirty.clear();
    if (this.#isStuck) this.#scrollDown();
    this.#context.onBusy();
  }

  #noteScroll() {
    const { log, jump } = this.#parts;
    this.#isStuck = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_BOTTOM_PX;
    jump.hidden = this.#isStuck;
  }

  #scrollDown() {
    const { log, jump } = this.#parts;
    log.scrollTop = log.scrollHeight;
    this.#isStuck = true;
    jump.hidden = true;
  }
}
