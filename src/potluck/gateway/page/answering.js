// One answer while it is written: takes what the stream says into the message, measures, and can be stopped. Draws nothing.

import { ApiError } from "./api.js";
import { complete } from "./completion.js";

export class Answering {
  #abort = new AbortController();
  #startedMs = performance.now();
  #firstMs = null;
  id = null;

  /** `onChange` is called whenever the message has changed. */
  constructor(api, body, message, onChange) {
    this.api = api;
    this.body = body;
    this.message = message;
    this.onChange = onChange;
  }

  stop() {
    this.#abort.abort();
  }

  get isStopped() {
    return this.#abort.signal.aborted;
  }

  /** Runs to the end; whatever goes wrong ends up in the message, in words. */
  async run() {
    const { message } = this;
    try {
      const outcome = await complete(this.api, this.body, this.#abort.signal, {
        onId: (id) => { this.id = id; },
        onText: (text) => this.#takeText(text),
        onDiagnostic: (name, frame) => this.#takeDiagnostic(name, frame),
      });
      this.#finish(outcome);
    } catch (error) {
      message.status = this.isStopped ? "stopped" : "failed";
      if (!this.isStopped) message.error = error instanceof ApiError ? error.message : "The connection to this node broke off.";
    }
    message.notes = (message.notes ?? []).filter((note) => note.kind !== "lost");
    this.onChange();
  }

  #takeText(text) {
    const { message } = this;
    const nowMs = performance.now();
    this.#firstMs ??= nowMs;
    message.status = "writing";
    message.content += text;
    message.tokens = (message.tokens ?? 0) + 1;
    message.firstMs = Math.round(this.#firstMs - this.#startedMs);
    if (nowMs - this.#firstMs > 250) message.tokensPerSecond = (message.tokens - 1) / ((nowMs - this.#firstMs) / 1000);
    this.onChange();
  }

  #takeDiagnostic(name, frame) {
    const { message } = this;
    const notes = (message.notes ?? []).filter((note) => note.kind !== "lost");
    if (name === "shard_status" && frame.status === "degraded") notes.push({ kind: "lost", stages: [stageOf(frame)] });
    if (name === "shard_failover") {
      notes.push({ kind: "failover", stages: frame.lost, pauseMs: frame.pause_ms });
      message.failovers = (message.failovers ?? 0) + 1;
      message.pauseMs = (message.pauseMs ?? 0) + frame.pause_ms;
      if (message.chaos) message.chaos = { ...message.chaos, pauseMs: message.pauseMs };
    }
    if (name === "pipeline_aborted") message.error = frame.message;
    message.notes = notes;
    this.onChange();
  }

  #finish({ finishReason, usage }) {
    const { message } = this;
    message.status = "done";
    message.finishReason = finishReason;
    if (!usage) return;
    message.tokens = usage.completion_tokens;
    message.nodes = usage.potluck?.nodes ?? [];
    message.failovers = usage.potluck?.failovers ?? message.failovers;
    message.pauseMs = usage.potluck?.pause_ms ?? message.pauseMs;
  }
}

function stageOf(frame) {
  const range = frame.shard_id?.split(":").at(-1);
  return range && /^\d+-\d+$/.test(range) ? `${frame.node}:${range}` : frame.node;
}
